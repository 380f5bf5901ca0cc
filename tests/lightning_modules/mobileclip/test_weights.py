"""Trained weights read from every layout and written to the vendor's and open_clip's; preprocessing."""

import copy
import dataclasses
import json

import numpy as np
import open_clip
import pytest
import timm
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed
from torch import nn

from support.methods.clip import LENGTH, add_tiny_clip
from support.methods.mobileclip import build_shallow, features, random_images, settle, texts
from vlightning.common.errors import UserError
from vlightning.common.preprocessing import Preprocessing
from vlightning.lightning_modules.networks.clip.files import save_open_clip, save_vendor
from vlightning.lightning_modules.networks.clip.models import PRESETS, build_model
from vlightning.lightning_modules.networks.clip.preprocessing import preprocessing_of
from vlightning.lightning_modules.networks.clip.reparameterize import reparameterize
from vlightning.lightning_modules.networks.clip.vendor_layout import to_vendor
from vlightning.lightning_modules.networks.clip.weights import load_pretrained, load_weights

NAME = "MobileCLIP-tiny"
SMALL, SMALLEST = "MobileCLIP2-S0-small", "MobileCLIP2-tiny"
BATCH, SHORT = (random_images(2, 64), texts(2)), (random_images(2, 64), texts(2, LENGTH))


def prefixed(prefix, state):
    return {prefix + name: value for name, value in state.items()}


@pytest.fixture(scope="module")
def trained():
    """A model without initial values of weights, statistics and scales."""
    torch.manual_seed(1)
    model = settle(build_model(NAME))
    with torch.no_grad():
        model.logit_scale.fill_(3.5)
    return model


@pytest.fixture(scope="module")
def plain(trained):
    """Its state dict with a scalar logit scale, as in files."""
    return trained.state_dict() | {"logit_scale": trained.logit_scale.detach()[0]}


@pytest.fixture
def small(monkeypatch):
    """Image towers of real models with tiny text towers."""
    for name, like in ((SMALL, "MobileCLIP2-S0"), (SMALLEST, NAME)):
        monkeypatch.setitem(PRESETS, name, dataclasses.replace(PRESETS[like], width=64, layers=1, mixers=False))


def assert_loads(trained, path, said):
    model = build_model(NAME)
    sentence = load_weights(model, NAME, path)
    assert said in sentence
    assert repr(str(path)) in sentence
    expected = trained.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("entry", [None, "state_dict", "model"])
@pytest.mark.parametrize("layout", ["vendor", "open_clip"])
def test_files_of_both_layouts(tmp_path, trained, plain, layout, entry, prefix):
    content = prefixed(prefix, to_vendor(trained.state_dict()) if layout == "vendor" else plain)
    if entry:
        content = {"epoch": 3, entry: content, "optimizer": {"state": {}, "lr": [0.1]}}
    torch.save(content, tmp_path / "weights.pt")
    assert_loads(
        trained, tmp_path / "weights.pt", "the vendor's checkpoint" if layout == "vendor" else "the checkpoint"
    )


@pytest.mark.parametrize("layout", ["vendor", "open_clip"])
def test_safetensors(tmp_path, trained, plain, layout):
    content = to_vendor(trained.state_dict()) if layout == "vendor" else plain
    save_file({name: value.contiguous() for name, value in content.items()}, tmp_path / "weights.safetensors")
    assert_loads(trained, tmp_path / "weights.safetensors", "checkpoint")


@pytest.mark.parametrize("averaged", [False, True])
def test_the_average_of_a_training_is_preferred(tmp_path, trained, averaged):
    other = {name: value + 1 for name, value in trained.state_dict().items()}
    state = prefixed("student.", other if averaged else trained.state_dict())
    if averaged:
        state |= prefixed("average.", trained.state_dict())
    torch.save({"state_dict": state, "hyper_parameters": {"model": NAME}, "global_step": 7}, tmp_path / "last.ckpt")
    assert_loads(trained, tmp_path / "last.ckpt", "the averaged weights" if averaged else "the student")


def test_a_sharded_checkpoint(tmp_path, trained):
    whole = {name: value for name, value in trained.state_dict().items() if name != "text.token_embedding.weight"}
    rows = trained.text.token_embedding.weight.detach().split(30_000)
    place = "student.text.token_embedding.weight"
    folder = tmp_path / "last.ckpt"
    folder.mkdir()
    for number, piece in enumerate(rows):
        torch.save({f"state_dict/{place}": piece.clone()}, folder / f"shard-{number:05d}.pt")
    state = prefixed("student.", whole) | {place: {"pieces_along_dimension": 0}}
    torch.save({"state_dict": state, "files_with_pieces": len(rows)}, folder / "meta.pt")
    assert_loads(trained, folder, "the student")


def test_open_clips_own_models_load_from_its_flat_layout(tmp_path):
    theirs = open_clip.create_model(add_tiny_clip(), force_image_size=64).eval()
    torch.save({"state_dict": prefixed("module.", theirs.state_dict())}, tmp_path / "epoch_1.pt")
    model, preprocessing = load_pretrained(add_tiny_clip(), tmp_path / "epoch_1.pt", 64, LENGTH)
    for one, two in zip(features(model, *SHORT), features(theirs, *SHORT), strict=True):
        torch.testing.assert_close(one, two)
    assert preprocessing.image_size == 64


def test_load_pretrained_is_ready_to_use(tmp_path, trained):
    save_vendor(trained, tmp_path / "tiny.pt")
    model, preprocessing = load_pretrained(NAME, str(tmp_path / "tiny.pt"))
    assert not model.training
    assert preprocessing == preprocessing_of(NAME) == Preprocessing(64, (0, 0, 0), (1, 1, 1), "bilinear")
    for one, two in zip(features(model, *BATCH), features(trained, *BATCH), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("text.ln_final.bias"), r"1 missing \(text.ln_final.bias\)"),
        (lambda state: state.update(other=torch.zeros(1)), r"1 unexpected \(other\)"),
        (
            lambda state: state.update({"visual.trunk.head.fc.weight": torch.zeros(128, 5)}),
            r"1 of another shape \(visual.trunk.head.fc.weight \[128, 5\] instead of \[128, 384\]\)",
        ),
        (
            lambda state: state.update({"text.positional_embedding": torch.zeros(64, 128)}),
            r"Expected positions of 77 tokens, got 64 in '.*': set data.max_tokens to 64",
        ),
        (lambda state: [state.pop(name) for name in list(state)[:3]], r"3 missing \(.*, \.\.\.\)"),
    ],
)
def test_misfitting_weights_are_named_and_none_is_loaded(tmp_path, plain, change, message):
    state = dict(plain)
    change(state)
    torch.save(state, tmp_path / "weights.pt")
    model = build_model(NAME)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError, match=message):
        load_weights(model, NAME, tmp_path / "weights.pt")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_missing_names_of_a_vendors_file_are_the_vendors(tmp_path, trained):
    state = to_vendor(trained.state_dict())
    del state["image_encoder.model.head.proj"]
    torch.save(state, tmp_path / "weights.pt")
    with pytest.raises(UserError, match=r"1 missing \(image_encoder.model.head.proj\)"):
        load_weights(build_model(NAME), NAME, tmp_path / "weights.pt")


def test_only_the_bias_of_the_projection_may_be_missing(tmp_path, trained, plain):
    bias = "visual.trunk.head.fc.bias"
    torch.save({name: value for name, value in plain.items() if name != bias}, tmp_path / "weights.pt")
    model = build_model(NAME)
    nn.init.ones_(model.visual.trunk.head.fc.bias)
    assert f"with zeros for the missing {bias}" in load_weights(model, NAME, tmp_path / "weights.pt")
    assert not model.visual.trunk.head.fc.bias.any()


def test_other_files_are_refused_in_a_sentence(tmp_path):
    model = build_model(NAME)
    with pytest.raises(UserError, match=r"^Expected trained weights, found no file .*missing.pt'"):
        load_weights(model, NAME, tmp_path / "missing.pt")
    with pytest.raises(
        UserError, match=r"^Expected a file, got the folder .*name a file in it, such as open_clip_model.safetensors"
    ):
        load_weights(model, NAME, tmp_path)
    for suffix in (".pt", ".safetensors"):
        for content in (b"", b"hello", b"a text that is no checkpoint", bytes(range(40, 256))):
            path = tmp_path / f"file{suffix}"
            path.write_bytes(content)
            with pytest.raises(
                (UserError, RuntimeError),
                match=r"^Expected a readable checkpoint, got .* \(",
            ):
                load_weights(model, NAME, path)
    for content in ([1, 2], {"epoch": 3}, {}, {"state_dict": {"a": 1}}):
        torch.save(content, tmp_path / "file.pt")
        with pytest.raises(UserError, match=r"found neither a state dict nor one under"):
            load_weights(model, NAME, tmp_path / "file.pt")
    torch.save({"state_dict": np.arange(3)}, tmp_path / "file.pt")
    with pytest.raises((UserError, RuntimeError), match="Expected a checkpoint of tensors and plain data"):
        load_weights(model, NAME, tmp_path / "file.pt")


def test_positions_of_a_vit_are_resampled_for_images_of_another_size(tmp_path):
    model = settle(build_shallow("MobileCLIP-B"))
    save_vendor(model, tmp_path / "b.pt")
    small = build_shallow("MobileCLIP-B", 160).eval()
    said = load_weights(small, "MobileCLIP-B", tmp_path / "b.pt")
    assert "with positions resampled from 14x14 to 10x10" in said
    name = "visual.trunk.pos_embed"
    state, ours = model.state_dict(), small.state_dict()
    # As timm's own filter does on loading: none of them is the class token's.
    torch.testing.assert_close(ours[name], resample_abs_pos_embed(state[name], [10, 10], num_prefix_tokens=0))
    assert all(torch.equal(ours[other], value) for other, value in state.items() if other != name)


def test_positions_of_open_clips_vit_are_resampled_as_open_clip_does(tmp_path):
    name = add_tiny_clip()
    theirs = open_clip.create_model(name, force_image_size=32)
    torch.save(theirs.state_dict(), tmp_path / "weights.pt")
    expected = open_clip.create_model(name, pretrained=str(tmp_path / "weights.pt"), force_image_size=16)
    found = load_pretrained(name, tmp_path / "weights.pt", 16, LENGTH).model
    torch.testing.assert_close(found.visual.positional_embedding, expected.visual.positional_embedding)
    assert "resampled from 4x4 to 2x2" in load_weights(found, name, tmp_path / "weights.pt")
    torch.save(expected.state_dict(), tmp_path / "weights.pt")
    assert "resampled" not in load_weights(found, name, tmp_path / "weights.pt")


def test_a_bias_of_the_logits_is_optional(tmp_path):
    model = build_model(NAME)
    torch.save(model.state_dict() | {"logit_bias": torch.tensor(-10.0)}, tmp_path / "weights.pt")
    load_weights(model, NAME, tmp_path / "weights.pt")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    model.logit_bias = nn.Parameter(torch.ones(1))
    load_weights(model, NAME, tmp_path / "weights.pt")
    assert not model.logit_bias.any()


def listed(preprocessing):
    return {name: getattr(preprocessing, name) for name in ("mean", "std", "interpolation", "resize_mode")}


@pytest.mark.parametrize("name", [name for name in PRESETS if name in open_clip.list_models()])
def test_preprocessing_equals_open_clips(name):
    for tag in open_clip.list_pretrained_tags_by_model(name):
        theirs = open_clip.get_pretrained_cfg(name, tag)
        assert listed(preprocessing_of(name)) == {key: theirs[key] for key in listed(preprocessing_of(name))}
    size = open_clip.get_model_config(name)["vision_cfg"]["image_size"]
    assert preprocessing_of(name).image_size == size
    assert preprocessing_of(name, 96).image_size == 96


@pytest.mark.parametrize(
    ("name", "tower"),
    [
        ("MobileCLIP-S0", "fastvit_mci0.apple_mclip"),
        ("MobileCLIP-S1", "fastvit_mci1.apple_mclip"),
        ("MobileCLIP-S2", "fastvit_mci2.apple_mclip"),
        ("MobileCLIP-B", "vit_base_mci_224.apple_mclip"),
        ("MobileCLIP2-S0", "fastvit_mci0.apple_mclip2_dfndr2b"),
        ("MobileCLIP2-S2", "fastvit_mci2.apple_mclip2_dfndr2b"),
        ("MobileCLIP2-B", "vit_base_mci_224.apple_mclip2_dfndr2b"),
        ("MobileCLIP2-S3", "fastvit_mci3.apple_mclip2_dfndr2b"),
        ("MobileCLIP2-S4", "fastvit_mci4.apple_mclip2_dfndr2b"),
    ],
)
def test_normalization_equals_timms(name, tower):
    theirs = timm.get_pretrained_cfg(tower)
    ours = preprocessing_of(name)
    assert (ours.mean, ours.std, ours.image_size) == (theirs.mean, theirs.std, theirs.input_size[-1])


def test_preprocessing_of_other_models():
    for size in ("S3", "S4", "L-14"):  # open_clip lists the second generation only
        assert preprocessing_of(f"MobileCLIP-{size}") == preprocessing_of(f"MobileCLIP2-{size}")
    assert listed(preprocessing_of("MobileCLIP-S0")) == listed(preprocessing_of("MobileCLIP-S1"))
    openai = listed(PreprocessCfg())
    assert listed(preprocessing_of("ViT-L-14")) == listed(preprocessing_of("ViT-S-32-alt")) == openai
    half = (0.5, 0.5, 0.5)
    assert preprocessing_of("ViT-B-16-SigLIP") == Preprocessing(224, half, half, "bicubic", "squash")
    modes = [open_clip.get_pretrained_cfg("ViT-H-14", tag)["resize_mode"] for tag in ("laion2b_s32b_b79k", "dfn5b")]
    assert modes == ["shortest", "squash"]  # weights of one name that differ
    assert preprocessing_of("ViT-H-14").resize_mode == "shortest"
    with pytest.raises(UserError, match="got 'nothing'"):
        preprocessing_of("nothing")


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", ["MobileCLIP-S0", "MobileCLIP2-L-14", "ViT-B-16-SigLIP"])
def test_transform_equals_open_clips(name, mode):
    preprocessing = preprocessing_of(name, 48)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 140, 3), dtype=np.uint8)).convert(mode)
    theirs = image_transform_v2(PreprocessCfg(48, **listed(preprocessing)), is_train=False)(image)
    ours = preprocessing.transform()(image)
    assert type(ours) is torch.Tensor
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    tensor = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    torch.testing.assert_close(preprocessing.transform()(tensor), theirs, rtol=0, atol=0.05)  # another resize


@pytest.mark.usefixtures("small")
def test_open_clip_loads_the_written_folder(tmp_path):
    name = SMALL
    torch.manual_seed(2)
    model = settle(build_model(name, 64, 32))
    nn.init.normal_(model.visual.trunk.head.fc.bias)
    save_open_clip(model, name, preprocessing_of(name, 64), tmp_path / "made")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made"]
    theirs, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'made'}")
    batch = random_images(2, 64), texts(2, 32)
    for one, two in zip(features(theirs.eval(), *batch), features(model, *batch), strict=True):
        assert torch.equal(one, two)
    weights = tmp_path / "made" / "open_clip_model.safetensors"
    assert torch.equal(load_file(weights)["logit_scale"], model.logit_scale[0])
    assert theirs.visual.preprocess_cfg["interpolation"] == "bilinear"
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (80, 90, 3), dtype=np.uint8))
    torch.testing.assert_close(preprocess(image), preprocessing_of(name, 64).transform()(image))
    assert open_clip.get_tokenizer(f"local-dir:{tmp_path / 'made'}")(["a dog"]).shape == (1, 32)
    again, ours = (
        load_pretrained(name, weights, 64, 32).model,
        model.state_dict(),
    )
    assert all(torch.equal(value, ours[key]) for key, value in again.state_dict().items())
    with pytest.raises(UserError):
        save_open_clip(model, name, preprocessing_of(name), tmp_path / "made")


def test_a_model_of_open_clip_is_written_for_it(tmp_path):
    model = build_model(add_tiny_clip(), 64, LENGTH).eval()
    model.logit_bias = nn.Parameter(torch.full([1], -9.5))  # of a training with the sigmoid loss
    preprocessing = Preprocessing(64, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bilinear", "squash")
    save_open_clip(model, add_tiny_clip(), preprocessing, tmp_path / "made")
    theirs = open_clip.create_model(f"local-dir:{tmp_path / 'made'}").eval()
    assert theirs.logit_bias.item() == -9.5
    for one, two in zip(features(theirs, *SHORT), features(model, *SHORT), strict=True):
        assert torch.equal(one, two)
    written = json.loads((tmp_path / "made" / "open_clip_config.json").read_text())["preprocess_cfg"]
    assert written.pop("size") == 64
    assert Preprocessing(64, *(tuple(value) if isinstance(value, list) else value for value in written.values())) == (
        preprocessing
    )


@pytest.mark.parametrize(
    ("name", "part"),
    [(NAME, "mixers"), ("MobileCLIP-S0", "mixers"), ("MobileCLIP-B", "the vendor's stem")],
)
def test_open_clip_layout_refuses_models_unknown_to_open_clip(tmp_path, name, part):
    with torch.device("meta"):
        model = build_model(name)
    with pytest.raises(UserError, match=f"open_clip can build, got {name} with .*{part}.*write the layout 'vendor'"):
        save_open_clip(model, name, preprocessing_of(name), tmp_path / "made")
    if name == "MobileCLIP-B":  # of the same shapes
        with pytest.raises(UserError, match="the vendor's stem"):
            save_open_clip(model, "MobileCLIP2-B", preprocessing_of(name), tmp_path / "made")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small")
def test_open_clip_layout_refuses_other_models_sizes_and_fused_ones(tmp_path):
    with torch.device("meta"):
        small, vit = build_model("MobileCLIP2-S0"), build_model("MobileCLIP-B-timm", 160)
    for model, name in ((small, "MobileCLIP2-S2"), (vit, "MobileCLIP2-B")):
        preprocessing = preprocessing_of(name, model.visual.image_size[0])
        with pytest.raises(UserError, match=f"Expected the {name} that open_clip builds"):
            save_open_clip(model, name, preprocessing, tmp_path / "made")
    fused = reparameterize(build_model(SMALLEST).eval())
    with pytest.raises(UserError, match="not reparameterized"):
        save_open_clip(fused, SMALLEST, preprocessing_of(SMALLEST), tmp_path / "made")
    assert not list(tmp_path.iterdir())


def test_vendor_layout_refuses_timms_stem(tmp_path):
    with torch.device("meta"):
        model = build_model("MobileCLIP2-B")
    with pytest.raises(UserError, match="with another stem: write the layout of open_clip"):
        save_vendor(model, tmp_path / "b.pt")
    assert not list(tmp_path.iterdir())
