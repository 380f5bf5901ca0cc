"""MobileCLIP's models: parameter counts, the vendor's outputs, and the vendor's layout."""

import dataclasses
import functools
import json
import math
import socket
import zlib
from pathlib import Path

import open_clip
import pytest
import torch
from safetensors import safe_open
from timm.models.fastvit import MobileOneBlock, ReparamLargeKernelConv, RepMixer
from torch import nn

from support.devices.devices import DEVICES, GPU, TOLERANCE, moved, whole_float32  # noqa: F401, a fixture
from support.methods.mobileclip import build_shallow, features, fill, random_images, settle, texts
from vlightning.common.errors import UserError
from vlightning.lightning_modules.networks.clip.models import PRESETS, build_model
from vlightning.lightning_modules.networks.clip.reparameterize import norms_left, reparameterize
from vlightning.lightning_modules.networks.clip.vendor_layout import (
    from_vendor,
    is_vit,
    to_vendor,
    vendor_name,
)
from vlightning.lightning_modules.networks.clip.weights import fit

GOLDEN = Path(__file__).parents[2] / "golden" / "mobileclip_s0.safetensors"
COUNTS = {  # image tower without the bias of timm's projection, text tower
    "MobileCLIP-S0": (11_406_464, 42_441_216),
    "MobileCLIP-S1": (21_541_120, 63_428_096),
    "MobileCLIP-S2": (35_814_720, 63_428_096),
    "MobileCLIP-B": (86_348_544, 63_428_096),
    "MobileCLIP-B-timm": (86_348_544, 63_428_096),
    "MobileCLIP2-S0": (11_406_464, 63_428_096),
    "MobileCLIP2-S2": (35_814_720, 63_428_096),
    "MobileCLIP2-B": (86_348_544, 63_428_096),
}
LARGE_COUNTS = {  # image tower with that bias, as timm counts, before and after fusing, and text tower; millions
    "S3": ("125.236", "125.074", "123.650"),
    "S4": ("321.785", "321.570", "123.650"),
    "L-14": ("303.967", "303.967", "123.650"),
}
OPEN_CLIPS = [name for name in PRESETS if name in open_clip.list_models()]


def read_vendor(model, state):
    """Return the vendor's weights as the model's state dict."""
    reported = functools.partial(vendor_name, vit=is_vit(model.state_dict()))
    return fit(model, from_vendor(model, state), "a file", reported)


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


@functools.cache
def on_meta(make, *args, **kwargs):
    """Build a model on the meta device, once."""
    with torch.device("meta"):
        return make(*args, **kwargs)


def preset_on_meta(name):
    """Build a model once for all names of a preset, which is all that `build_model` knows of these names."""
    return on_meta(build_model, next(other for other, preset in PRESETS.items() if preset == PRESETS[name]))


def without_values(make, *args, **kwargs):
    """Build a model whose weights are yet to be loaded."""
    with torch.device("meta"):
        return make(*args, **kwargs).to_empty(device="cpu")


def numbers(key, shape):
    """Return ascending numbers that start at one of the name; cheaper than `fill`."""
    first = zlib.crc32(key.encode()) % 1_000_003
    return torch.arange(first, first + math.prod(shape), dtype=torch.float32).reshape(shape)


def shapes(model):
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def count_fused(module):
    """Count the parameters with one convolution and bias in place of each group of branches."""
    if isinstance(module, MobileOneBlock):
        weights = module.in_chs // module.groups * module.out_chs * module.kernel_size**2 + module.out_chs
        return weights + count(module.se)
    if isinstance(module, RepMixer):
        return module.dim * (module.kernel_size**2 + 1)
    if isinstance(module, ReparamLargeKernelConv):
        weights = module.in_chs // module.groups * module.out_chs * module.kernel_size**2 + module.out_chs
        return weights + count(module.se)
    own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return own + sum(count_fused(child) for child in module.children())


def vendor_state(model):
    """A state in the vendor's layout, whose tensors are functions of their names."""
    state = to_vendor({name: value * (name != "visual.trunk.head.bias") for name, value in zeroed(model).items()})
    return {name: numbers(name, value.shape) for name, value in state.items()}


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("whole_float32")
def test_s0_equals_the_vendors(golden, device):
    state, expected = golden[0], moved(golden[1], device)
    model = build_model("MobileCLIP-S0").eval()
    model.load_state_dict(read_vendor(model, state))
    image = torch.rand(2, 3, 256, 256, generator=torch.Generator().manual_seed(123)).to(device)
    model.to(device)
    with torch.no_grad():
        found = model.encode_image(image), model.encode_text(expected["input_ids"])
    torch.testing.assert_close(found[0], expected["image_features"], rtol=0, atol=TOLERANCE[device])
    torch.testing.assert_close(found[1], expected["text_features"], rtol=0, atol=TOLERANCE[device])
    if device == GPU:
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            low = model.encode_image(image), model.encode_text(expected["input_ids"])
        for feature, name in zip(low, ("image_features", "text_features"), strict=True):
            assert torch.cosine_similarity(feature.float(), expected[name]).min() > 0.99
        return
    written = to_vendor(model.state_dict())
    assert written.keys() == state.keys()
    assert all(torch.equal(written[name], value) for name, value in state.items())


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_equal_the_vendors(name):
    model = preset_on_meta(name)
    assert (count(model.visual) - PRESETS[name].embed_dim, count(model.text)) == COUNTS[name]


@pytest.mark.parametrize("generation", ["MobileCLIP", "MobileCLIP2"])
@pytest.mark.parametrize("size", LARGE_COUNTS)
def test_counts_of_the_large_models(generation, size):
    model = preset_on_meta(f"{generation}-{size}")
    found = count(model.visual), count_fused(model.visual), count(model.text)
    assert tuple(f"{number / 1e6:.3f}" for number in found) == LARGE_COUNTS[size]


def test_fused_counts_equal_those_of_reparameterized_models():
    assert count_fused(on_meta(build_model, "MobileCLIP-S0").visual) == 11_356_992 + 512
    tiny = build_model("MobileCLIP-tiny").eval()
    assert count_fused(tiny.visual) == count(reparameterize(tiny, "branches").visual)


@pytest.mark.parametrize("name", OPEN_CLIPS)
def test_shapes_equal_open_clips(name):
    theirs = on_meta(open_clip.create_model, name, device="meta", load_weights=False, nonscalar_logit_scale=True)
    assert shapes(preset_on_meta(name)) == shapes(theirs)


def test_first_generation_models_have_the_shapes_of_the_second():
    assert len(OPEN_CLIPS) == 9
    for name, like in (("B-timm", "2-B"), ("B", "2-B"), ("S3", "2-S3"), ("S4", "2-S4"), ("L-14", "2-L-14")):
        one, other = (preset_on_meta(full) for full in (f"MobileCLIP-{name}", f"MobileCLIP{like}"))
        assert shapes(one) == shapes(other)
    s0 = shapes(on_meta(build_model, "MobileCLIP-S0").visual)
    assert s0 == shapes(on_meta(build_model, "MobileCLIP2-S0").visual)


@pytest.mark.parametrize("size", [48, 64])
def test_tiny_model_has_all_parts_and_can_be_fused(size):
    model = settle(build_model("MobileCLIP-tiny", size))
    assert count(model.visual) < 2e6
    kinds = {type(module).__name__ for module in model.modules()}
    assert kinds >= {type(module).__name__ for module in on_meta(build_model, "MobileCLIP-S0").modules()}
    assert model.text.transformer.resblocks[0].mlp.fc1.out_channels == 4 * 128
    fused = reparameterize(model)
    assert norms_left(fused) == []
    batch = random_images(2, size), texts(2)
    for one, two in zip(features(fused, *batch), features(model, *batch), strict=True):
        assert one.shape == (2, 128)
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["MobileCLIP-tiny", "ViT-S-32-alt"])
def test_context_length(name):
    model = build_model(name, 64, 20).eval()
    assert model.text.positional_embedding.shape[0] == model.context_length == 20
    assert model.encode_text(texts(2, 20)).shape[0] == 2
    assert on_meta(build_model, "ViT-B-16-SigLIP", context_length=None).context_length == 64


@pytest.mark.parametrize("name", ["MobileCLIP-B", "MobileCLIP-S0", "ViT-S-32-alt"])
def test_images_of_another_size_are_supported(name):
    model = (build_shallow if name in PRESETS else build_model)(name, 128).eval()
    with torch.no_grad():
        assert model.encode_image(random_images(1, 128)).shape[0] == 1


@pytest.mark.parametrize(("name", "entries"), [("MobileCLIP-S1", 1585), ("MobileCLIP-S2", 1721), ("MobileCLIP-B", 313)])
def test_vendor_files_load_as_open_clip_loads_them(name, entries, monkeypatch):
    text = open_clip.get_model_config(name)["text_cfg"]
    if name != "MobileCLIP-B":  # one text tower of the real width is enough
        text |= {"width": 64, "heads": 1}
        monkeypatch.setitem(PRESETS, name, dataclasses.replace(PRESETS[name], width=64))
    model = without_values(build_model, name)
    state = vendor_state(model)
    assert len(state) == entries
    model.load_state_dict(read_vendor(model, state))
    theirs = without_values(open_clip.create_model, name, device="meta", load_weights=False, text_cfg=text)
    theirs.load_state_dict(open_clip.convert.convert_state_dict(theirs, dict(state)))
    ours = model.state_dict()
    for parameter, value in theirs.state_dict().items():
        assert torch.equal(ours[parameter].reshape(value.shape), value), parameter


@pytest.mark.parametrize("shape", [[], [1]])
def test_logit_scale_is_a_vector_here_and_a_scalar_for_the_vendor(golden, shape):
    model = without_values(build_model, "MobileCLIP-S0")
    state = golden[0] | {"logit_scale": torch.full(shape, 3.0)}
    model.load_state_dict(read_vendor(model, state))
    assert torch.equal(model.logit_scale, torch.tensor([3.0]))
    assert torch.equal(to_vendor(model.state_dict())["logit_scale"], torch.tensor(3.0))


@pytest.mark.parametrize("name", ["MobileCLIP-S3", "MobileCLIP-L-14", "RN50"])
def test_vendor_layout_refuses_other_models(name):
    with pytest.raises(UserError, match="the vendor's layout has no names for"):
        to_vendor(on_meta(build_model, name).state_dict())


@pytest.mark.parametrize(("name", "lost"), [("MobileCLIP-S0", "conv_kxk.0"), ("MobileCLIP-B", "backbone.0.bn")])
def test_vendor_layout_refuses_fused_models(name, lost):
    state = on_meta(build_model, name).state_dict()
    with pytest.raises(UserError, match="before reparameterization"):
        to_vendor({key: value for key, value in state.items() if lost not in key})


def test_vendor_layout_refuses_a_bias_of_the_projection():
    model = build_model("MobileCLIP-tiny")
    nn.init.ones_(model.visual.trunk.head.fc.bias)
    with pytest.raises(UserError, match=r"Expected zeros in .*head.fc.bias"):
        to_vendor(model.state_dict())


def test_vendors_stem_differs_from_timms_for_equal_weights():
    vendor, timm = (build_shallow(name, 64).eval() for name in ("MobileCLIP-B", "MobileCLIP-B-timm"))
    timm.load_state_dict(vendor.state_dict())
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, other = (model.encode_image(image, normalize=True) for model in (vendor, timm))
    assert 1e-4 < float((ours - other).abs().max()) < 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("text_encoder.projection_layer"), r"1 missing \(text_encoder.projection_layer\)"),
        (lambda state: state.update(other=torch.zeros(1)), r"1 unexpected \(other\)"),
        (lambda state: state.update(logit_scale=torch.zeros(2)), r"1 of another shape \(logit_scale \[2\] instead"),
    ],
)
def test_misfitting_weights_are_named(golden, change, message):
    state = dict(golden[0])
    change(state)
    with pytest.raises(UserError, match=message):
        read_vendor(on_meta(build_model, "MobileCLIP-S0"), state)


def test_another_models_file_and_an_unknown_name_are_refused(golden):
    with pytest.raises(UserError, match=r"missing .* unexpected .*name the model that the weights are of"):
        read_vendor(on_meta(build_model, "MobileCLIP-B"), golden[0])
    with pytest.raises(UserError, match=r"did you mean 'MobileCLIP-S1'"):
        build_model("MobileClip-S1")


def test_any_model_of_open_clip_is_a_pair_of_towers():
    torch.manual_seed(0)
    model = build_model("ViT-S-32-alt").eval()
    theirs = open_clip.create_model("ViT-S-32-alt").eval()
    assert type(model) is open_clip.CustomTextCLIP
    assert type(theirs) is open_clip.CLIP
    assert model.logit_scale.shape == (1,)
    state = {name.removeprefix("text."): value for name, value in model.state_dict().items()}
    theirs.load_state_dict(state | {"logit_scale": torch.tensor(2.0)})
    for one, two in zip(
        features(model, random_images(2, 224), texts(2)), features(theirs, random_images(2, 224), texts(2)), strict=True
    ):
        torch.testing.assert_close(one, two)


def test_nothing_is_downloaded(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("reached the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    pretrained_towers = {"convnext_base", "ViT-B-16-SigLIP", "PE-Core-T-16-384", "MobileCLIP2-S0"}
    with torch.device("meta"):
        for name in pretrained_towers:
            build_model(name)
