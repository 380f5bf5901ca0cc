"""MobileCLIP's models: exact counts, the vendor's outputs, and its checkpoints both ways."""

import json
from pathlib import Path

import open_clip
import pytest
import torch
from safetensors import safe_open

from support.mobileclip import fill
from vlightning.lightning_modules.mobileclip.checkpoint import from_vendor, to_vendor
from vlightning.lightning_modules.mobileclip.models import PRESETS, build_model

GOLDEN = Path(__file__).parents[2] / "golden" / "mobileclip_s0.safetensors"
COUNTS = {  # image tower without the bias of timm's projection, text tower
    "MobileCLIP-S0": (11_406_464, 42_441_216),
    "MobileCLIP-S1": (21_541_120, 63_428_096),
    "MobileCLIP-S2": (35_814_720, 63_428_096),
    "MobileCLIP-B": (86_348_544, 63_428_096),
    "MobileCLIP2-S0": (11_406_464, 63_428_096),
}


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def vendor_state(model):
    """A state in the vendor's layout, whose tensors are functions of their names."""
    state = to_vendor({name: value * (name != "visual.trunk.head.bias") for name, value in zeroed(model).items()})
    return {name: fill(name, value.shape) for name, value in state.items()}


def zeroed(model):
    """The state dict with a projection bias of zero, as that of the vendor's."""
    state = model.state_dict()
    return {
        name: torch.zeros_like(value) if ".head." in name and name.endswith("bias") else value
        for name, value in state.items()
    }


@pytest.fixture(scope="module")
def golden():
    with safe_open(GOLDEN, "pt") as file:
        keys = json.loads(file.metadata()["keys"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {name: fill(name, torch.Size(shape)) for name, (shape, _) in keys.items()}, tensors


def test_s0_is_the_vendors(golden):
    state, expected = golden
    model = build_model("MobileCLIP-S0").eval()
    model.load_state_dict(from_vendor(model, state, "the golden file"))
    image = torch.rand(2, 3, 256, 256, generator=torch.Generator().manual_seed(123))
    with torch.no_grad():
        found = model.encode_image(image), model.encode_text(expected["input_ids"])
    torch.testing.assert_close(found[0], expected["image_features"], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[1], expected["text_features"], rtol=0, atol=1e-5)
    written = to_vendor(model.state_dict())
    assert written.keys() == state.keys()
    assert all(torch.equal(written[name], value) for name, value in state.items())


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_the_vendors(name):
    model = build_model(name)
    assert (count(model.visual) - PRESETS[name].embed_dim, count(model.text)) == COUNTS[name]


@pytest.mark.parametrize(("name", "entries"), [("MobileCLIP-S1", 1585), ("MobileCLIP-S2", 1721), ("MobileCLIP-B", 313)])
def test_vendor_files_load_as_open_clip_loads_them(name, entries):
    model = build_model(name).eval()
    state = vendor_state(model)
    assert len(state) == entries
    model.load_state_dict(from_vendor(model, state, "a file"))
    theirs = open_clip.create_model(name).eval()
    theirs.load_state_dict(open_clip.convert.convert_state_dict(theirs, dict(state)))
    for parameter, value in theirs.state_dict().items():
        assert torch.equal(model.state_dict()[parameter], value), parameter


def test_vendors_stem_is_another_function_of_the_same_weights():
    vendor, timm = build_model("MobileCLIP-B").eval(), build_model("MobileCLIP-B-timm").eval()
    timm.load_state_dict(vendor.state_dict())
    image = torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, other = (model.encode_image(image, normalize=True) for model in (vendor, timm))
    assert 1e-4 < float((ours - other).abs().max()) < 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("text_encoder.projection_layer"), r"1 missing \(text_encoder.projection_layer\)"),
        (lambda state: state.update(other=torch.zeros(1)), r"1 left over \(other\)"),
        (lambda state: state.update(logit_scale=torch.zeros(2)), r"1 of another shape \(logit_scale \[2\]\)"),
    ],
)
def test_weights_that_do_not_fit_are_named(golden, change, message):
    state = dict(golden[0])
    change(state)
    with pytest.raises(ValueError, match=message):
        from_vendor(build_model("MobileCLIP-S0"), state, "a file")


def test_another_models_file_and_an_unknown_name_are_refused(golden):
    with pytest.raises(ValueError, match=r"missing .* left over .*name the model that it is of"):
        from_vendor(build_model("MobileCLIP-B"), golden[0], "a file")
    with pytest.raises(ValueError, match="did you mean MobileCLIP-S1"):
        build_model("MobileClip-S1")


def test_any_model_of_open_clip_is_a_student():
    assert type(build_model("RN50", image_size=64)).__name__ == "CLIP"
