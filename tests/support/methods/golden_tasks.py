"""The reference's numbers for the downstream tasks, and our modules in their sizes."""

import json
from pathlib import Path

import torch
from safetensors import safe_open

from vlightning.callbacks import EMACallback
from vlightning.lightning_modules.albef.official import to_official

FOLDER = Path(__file__).parents[2] / "golden"


def read(name):
    """Return tensors by name, and the sizes of the networks."""
    with safe_open(FOLDER / f"albef_{name}_dev.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["config"])  # noqa: SIM118


def part(tensors, prefix):
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def sizes(config):
    """Return the groups of settings of a task's module."""
    return {
        "vision": {
            "image_size": config["image_size"],
            "patch_size": config["patch_size"],
            "width": config["width"],
            "depth": config["vit_depth"],
            "heads": config["heads"],
        },
        "text": {
            "vocab_size": config["vocab_size"],
            "max_positions": 64,
            "width": config["width"],
            "heads": config["heads"],
            "ffn_width": config["intermediate_size"],
            "depth": config["fusion_layer"],
            "fusion_depth": config["bert_layers"] - config["fusion_layer"],
        },
    }


def built(kind, tensors, config, folder, **arguments):
    """Return a module with the reference's state, which is read from a file in the authors' layout."""
    momentum = arguments.pop("momentum", {})
    arguments |= {"momentum": {"momentum": config["momentum"]} | momentum, "weights": str(folder / "authors.pth")}
    torch.save({"model": part(tensors, "state.")}, arguments["weights"])
    module = kind(**sizes(config), **arguments)
    module.load_initial_weights()
    return module.eval()


def check_step(module, tensors, batch, monkeypatch):
    """Compare the loss of a step and its gradients with the reference's, whose teacher moves first."""
    monkeypatch.setattr(module, "current_alpha", lambda: tensors["in.alpha"].item())
    EMACallback(module.momentum_pairs(), log=False).update(module)
    loss = module.training_step(batch, 0)
    loss.backward()
    torch.testing.assert_close(loss.detach(), tensors["out.loss"], rtol=1e-5, atol=1e-5)
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    module.load_state_dict(module.state_dict() | {name: parameter.grad for name, parameter in trained.items()})
    gradients, expected = to_official(module), part(tensors, "grad.")
    assert expected
    for name, gradient in expected.items():
        error = (gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-8)
        # A key bias shifts all logits of a query alike: its true gradient is 0.
        assert error < 1e-4 or (name.endswith("key.bias") and gradients[name].abs().max() < 1e-6), (name, error)
    return set(expected)
