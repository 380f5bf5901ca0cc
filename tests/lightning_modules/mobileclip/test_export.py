"""Export of MobileCLIP checkpoints: the evaluated network in each layout."""

import json

import open_clip
import pytest
import torch
from lightning import Trainer
from torch.nn.functional import normalize

from support.methods.clip import LENGTH, SIZE, add_tiny_clip, reinforced_batch
from support.runs.command_line import export as main
from vlightning.lightning_modules import MobileCLIPModule
from vlightning.lightning_modules.networks.clip.weights import load_pretrained

LOOK = {"image_mean": (0.1, 0.2, 0.3), "image_std": (0.4, 0.5, 0.6), "image_interpolation": "bilinear"}


def trained(folder, name, size, length, average=0.9):
    """A module whose average differs from its student, and its checkpoint."""
    torch.manual_seed(0)
    module = MobileCLIPModule(
        name, max_tokens=length, vision={"image_size": size, **LOOK}, momentum={"momentum": average}
    )
    module.configure_model()
    with torch.no_grad():
        for parameter in module.student.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01 * torch.randn_like(parameter))
    trainer = Trainer(logger=False, accelerator="cpu", enable_checkpointing=False, default_root_dir=folder)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(folder / "last.ckpt", weights_only=True)
    return module.eval(), folder / "last.ckpt"


def features(module, size, length):
    batch = reinforced_batch(3, dtype=torch.float32, size=size, length=length)
    with torch.no_grad():
        return batch, module.encode_images(batch["image"])[0], module.encode_texts(batch["input_ids"], None)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["torch_export", "onnx"])
def test_programs_compute_the_features_of_the_average(tmp_path, layout, capsys):
    module, checkpoint = trained(tmp_path, add_tiny_clip(), SIZE, LENGTH)
    main([str(checkpoint), str(tmp_path / "out"), "--layout", layout])
    assert f"with the average of {add_tiny_clip()}" in capsys.readouterr().out
    batch, image, text = features(module, SIZE, LENGTH)
    if layout == "torch_export":
        found = [torch.export.load(tmp_path / "out" / f"{name}.pt2").module() for name in ("image", "text")]
        found = found[0](batch["image"]), found[1](batch["input_ids"])
    else:
        onnxruntime = pytest.importorskip("onnxruntime")
        sessions = [onnxruntime.InferenceSession(tmp_path / "out" / f"{name}.onnx") for name in ("image", "text")]
        inputs = {"image": batch["image"].numpy()}, {"input_ids": batch["input_ids"].numpy()}
        found = [torch.from_numpy(run.run(None, given)[0]) for run, given in zip(sessions, inputs, strict=True)]
    torch.testing.assert_close(found[0], image, rtol=0, atol=1e-4)
    torch.testing.assert_close(found[1], text, rtol=0, atol=1e-4)
    look = json.loads((tmp_path / "out" / "config.json").read_text())["preprocessing"]
    assert (look["mean"], look["std"], look["image_size"]) == ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6], SIZE)


def test_open_clip_reads_its_layout(tmp_path):
    module, checkpoint = trained(tmp_path, add_tiny_clip(), SIZE, LENGTH)
    main([str(checkpoint), str(tmp_path / "out"), "--layout", "open_clip"])
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'out'}")
    batch, image, text = features(module, SIZE, LENGTH)
    with torch.no_grad():
        torch.testing.assert_close(normalize(model.eval().encode_image(batch["image"]), dim=-1), image)
        torch.testing.assert_close(normalize(model.encode_text(batch["input_ids"]), dim=-1), text)
    assert tuple(transform.transforms[-1].mean) == LOOK["image_mean"]


@pytest.mark.parametrize("average", [0.9, None])
def test_the_vendors_layout_starts_another_training(tmp_path, average):
    module, checkpoint = trained(tmp_path, "MobileCLIP-tiny", 64, 77, average)
    main([str(checkpoint), str(tmp_path / "tiny.pt"), "--layout", "vendor"])
    found = load_pretrained("MobileCLIP-tiny", tmp_path / "tiny.pt").model
    for name, value in module.evaluated.state_dict().items():
        assert torch.equal(found.state_dict()[name].reshape(value.shape), value), name


def test_refused_exports_print_one_line(tmp_path, capsys):
    _, checkpoint = trained(tmp_path, "MobileCLIP-tiny", 32, 12)
    capsys.readouterr()  # what the Trainer printed

    def refused(*words):
        with pytest.raises(SystemExit) as stopped:
            main([str(word) for word in (checkpoint, tmp_path / "out", *words)])
        assert stopped.value.code == 1
        assert not (tmp_path / "out").exists()
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "Expected a model that open_clip can build, got MobileCLIP-tiny" in refused("--layout", "open_clip")
    content = torch.load(checkpoint, weights_only=True)
    content["state_dict"]["average.visual.trunk.head.fc.bias"] += 1
    torch.save(content, checkpoint)
    assert "head.fc.bias, which the vendor's layout has no name for, got other values" in refused("--layout", "vendor")
    content["state_dict"].pop("average.logit_scale")
    torch.save(content, checkpoint)
    assert "1 missing (logit_scale)" in refused()
    del content["hyper_parameters"]["max_tokens"]
    torch.save(content, checkpoint)
    assert "found no max_tokens among the hyper_parameters" in refused()
