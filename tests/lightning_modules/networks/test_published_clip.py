"""Published models from folders, files and tags: network, preprocessing and tokenizer."""

import json
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import open_clip
import pytest
import torch
from open_clip import CLIP, CoCa
from open_clip.push_to_hf_hub import save_for_hf
from safetensors.torch import load_file, save_file

from support.methods.clip import LENGTH, NAME, SIZE, add_tiny_clip, randomized, tiny_module
from support.methods.mobileclip import features, random_images, settle, texts
from vlightning.common.errors import UserError
from vlightning.common.preprocessing import Preprocessing
from vlightning.lightning_modules.core.frozen import Frozen
from vlightning.lightning_modules.networks.clip.files import save_open_clip
from vlightning.lightning_modules.networks.clip.models import build_model
from vlightning.lightning_modules.networks.clip.preprocessing import preprocessing_of
from vlightning.lightning_modules.networks.published_clip import load_published

QUICK, CLEANED, CAPTIONER = f"{NAME}-quickgelu", "tiny-clip-without-punctuation", "tiny-coca-of-the-tests"
TAG = "of_the_tests"
BATCH = random_images(3, SIZE), texts(3, LENGTH)
LOOK = Preprocessing(SIZE, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bilinear", "squash")


def configs():
    add_tiny_clip()
    tiny = open_clip.get_model_config(NAME)
    coca = tiny | {
        "custom_text": True,
        "embed_dim": 16,
        "multimodal_cfg": tiny["text_cfg"] | {"context_length": LENGTH - 1},
    }
    coca["vision_cfg"] = tiny["vision_cfg"] | {"output_tokens": True, "attentional_pool": True, "attn_pooler_heads": 2}
    coca["text_cfg"] = tiny["text_cfg"] | {"embed_cls": True, "output_tokens": True, "context_length": LENGTH - 1}
    cleaned = tiny | {"text_cfg": tiny["text_cfg"] | {"tokenizer_kwargs": {"clean": "canonicalize"}}}
    return {QUICK: tiny | {"quick_gelu": True}, CLEANED: cleaned, CAPTIONER: coca}


@pytest.fixture(scope="module", autouse=True)
def _models():
    """Register the models with open_clip."""
    for name, config in configs().items():
        if name not in open_clip.list_models():
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"{name}.json"
                path.write_text(json.dumps(config))
                open_clip.add_model_config(path)


@pytest.fixture(scope="module")
def clip():
    """A model built by open_clip."""
    return randomized(CLIP(**open_clip.get_model_config(NAME)))


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "saved"
    save_open_clip(randomized(build_model(NAME, context_length=None)), NAME, LOOK, path)
    return path


@pytest.fixture
def file(tmp_path, clip):
    path = tmp_path / "weights.pt"
    torch.save(clip.state_dict(), path)
    return path


@pytest.fixture
def listed(monkeypatch, file):
    """Add a tag to open_clip whose download is the file."""

    def put(**options):
        entry = {"url": "https://example.invalid/weights.pt", "mean": LOOK.mean, "std": LOOK.std}
        entry |= {"interpolation": LOOK.interpolation, "resize_mode": LOOK.resize_mode, **options}
        monkeypatch.setitem(open_clip.pretrained._PRETRAINED, NAME, {TAG: entry})
        if entry.get("quick_gelu"):  # as open_clip lists such tags a second time
            monkeypatch.setitem(open_clip.pretrained._PRETRAINED, QUICK, {TAG: entry})
        monkeypatch.setattr(open_clip.factory, "download_pretrained", lambda *_, **__: str(file))

    return put


def assert_same(network, expected, batch=BATCH):
    for found, wanted in zip(features(network, *batch), features(expected, *batch), strict=True):
        torch.testing.assert_close(found, wanted)


def assert_frozen(published):
    network = published.network
    assert not any(module.training for module in network.modules())
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert {tensor.dtype for tensor in network.state_dict().values() if tensor.is_floating_point()} == {torch.float32}
    assert Frozen(network).state_dict() == {}


def plain(preprocessing):
    """Convert JSON's lists to tuples."""
    return vars(preprocessing) | {name: tuple(getattr(preprocessing, name)) for name in ("mean", "std")}


def test_a_folder_gives_the_saved_model(folder):
    published = load_published(None, str(folder))
    assert_same(published.network, randomized(build_model(NAME, context_length=None)))
    assert plain(published.preprocessing) == vars(LOOK)
    assert published.tokenizer(["a dog", "a " * 50]).shape == (2, LENGTH)
    assert (published.model, published.weights) == ("saved", str(folder))
    assert_frozen(published)


def test_a_folder_of_half_precision_is_made_float32(folder):
    weights = folder / "open_clip_model.safetensors"
    half = {key: value.half() for key, value in load_file(weights).items()}
    save_file(half, weights)
    published = load_published(None, str(folder))
    assert_frozen(published)
    for key, value in published.network.state_dict().items():
        assert torch.equal(value, half[key].float().reshape(value.shape)), key


@pytest.mark.parametrize("safe", [True, False])
def test_a_folder_that_open_clip_wrote(tmp_path, clip, safe):
    theirs = open_clip.create_model(QUICK, force_preprocess_cfg={"mean": LOOK.mean, "interpolation": "bilinear"})
    theirs.load_state_dict(clip.state_dict())
    no_files = SimpleNamespace(save_pretrained=lambda _: None)  # the plain tokenizer needs none
    save_for_hf(theirs, no_files, open_clip.get_model_config(QUICK), tmp_path / "hub", safe_serialization=safe)
    published = load_published("a name that is not used", str(tmp_path / "hub"))
    assert_same(published.network, theirs.eval())
    default = open_clip.transform.PreprocessCfg()
    assert plain(published.preprocessing) == vars(Preprocessing(SIZE, LOOK.mean, default.std, "bilinear", "shortest"))
    assert published.tokenizer(["a dog"]).shape == (1, LENGTH)


def test_a_file_of_open_clips(file, clip):
    published = load_published(NAME, str(file))
    assert_same(published.network, clip)
    assert published.preprocessing == preprocessing_of(NAME)
    assert torch.equal(published.tokenizer(["a dog!"]), open_clip.get_tokenizer(NAME)(["a dog!"]))
    assert published.tokenizer(["a dog!"]).shape == (1, LENGTH)
    assert (published.model, published.weights) == (NAME, str(file))
    assert_frozen(published)


def test_a_file_in_the_home_folder_is_found(file, monkeypatch):
    monkeypatch.setenv("HOME", str(file.parent))
    assert load_published(NAME, "~/weights.pt").sha256 == load_published(NAME, str(file)).sha256


def test_a_file_has_the_tokenizer_of_its_model(file):
    plain, cleaned = (load_published(name, str(file)).tokenizer for name in (NAME, CLEANED))
    assert not torch.equal(plain(["a dog!"]), plain(["a dog"]))
    assert torch.equal(cleaned(["a dog!"]), plain(["a dog"]))


@pytest.mark.parametrize("name", [NAME, QUICK])
def test_a_file_has_the_activation_of_its_name(file, clip, name):
    expected = CLIP(**open_clip.get_model_config(name))
    expected.load_state_dict(clip.state_dict())
    assert_same(load_published(name, str(file)).network, expected.eval())


def prefixed(prefix, model):
    return {f"{prefix}.{name}": value for name, value in model.state_dict().items()}


@pytest.mark.parametrize("averaged", [False, True])
def test_a_checkpoint_of_this_package_has_the_preprocessing_of_its_training(tmp_path, averaged):
    torch.manual_seed(0)
    vision = {"image_size": 32, "image_mean": (0.5, 0.4, 0.3), "image_std": None, "image_interpolation": "bicubic"}
    arguments = {"model": "MobileCLIP-tiny", "max_tokens": 9, "vision": vision}
    student, average = (settle(build_model("MobileCLIP-tiny", 32, 9), seed) for seed in (1, 2))
    state = prefixed("student", student) | (prefixed("average", average) if averaged else {})
    torch.save({"state_dict": state, "hyper_parameters": arguments, "global_step": 3}, tmp_path / "last.ckpt")
    published = load_published("MobileCLIP-tiny", str(tmp_path / "last.ckpt"))
    assert_same(
        published.network, average if averaged else student, (random_images(2, 32), published.tokenizer(["a", "b"]))
    )
    assert published.preprocessing == Preprocessing(32, (0.5, 0.4, 0.3), (1.0, 1.0, 1.0), "bicubic")
    assert published.tokenizer(["a dog"]).shape == (1, 9)
    assert_frozen(published)
    with pytest.raises(UserError, match=r"Expected a training of MobileCLIP-S0 .* got one of MobileCLIP-tiny"):
        load_published("MobileCLIP-S0", str(tmp_path / "last.ckpt"))


def test_a_sharded_checkpoint_is_not_a_folder_of_open_clip(tmp_path):
    module = tiny_module()
    state = prefixed("student", module.student)
    place = "student.text.token_embedding.weight"
    rows = state.pop(place)
    folder = tmp_path / "last.ckpt"
    folder.mkdir()
    for number, piece in enumerate(rows.split(30_000)):
        torch.save({f"state_dict/{place}": piece.clone()}, folder / f"shard-{number:05d}.pt")
    torch.save(
        {"state_dict": state | {place: {"pieces_along_dimension": 0}}, "files_with_pieces": 2}, folder / "meta.pt"
    )
    assert_same(load_published(NAME, str(folder)).network, module.student.eval())


def coca(seed=0):
    config = open_clip.get_model_config(CAPTIONER)
    config.pop("custom_text")
    return randomized(CoCa(**config), seed)


def test_a_file_of_a_captioner(tmp_path):
    expected = coca()
    torch.save(expected.state_dict(), tmp_path / "coca.pt")
    published = load_published(CAPTIONER, str(tmp_path / "coca.pt"))
    assert isinstance(published.network, CoCa)
    ids = texts(3, LENGTH - 1)
    assert_same(published.network, expected, (BATCH[0], ids))
    found, wanted = (network(BATCH[0], ids)["logits"] for network in (published.network, expected))
    torch.testing.assert_close(found, wanted)
    assert published.preprocessing.image_size == SIZE
    assert published.tokenizer(["a dog"]).shape == (1, LENGTH - 1)
    assert_frozen(published)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", [NAME, QUICK])
def test_a_tag_has_the_activation_of_its_training(listed, clip, name, quick):
    listed(**({"quick_gelu": True} if quick else {}))
    built = {}
    for activation in (True, False):
        built[activation] = open_clip.create_model(NAME, force_quick_gelu=activation).eval()
        built[activation].load_state_dict(clip.state_dict())
    published = load_published(name, TAG)
    assert_same(published.network, built[quick])
    for found, other in zip(features(published.network, *BATCH), features(built[not quick], *BATCH), strict=True):
        assert not torch.allclose(found, other, atol=1e-3)
    assert (published.model, published.weights) == (name, TAG)


def test_a_tag_has_its_preprocessing(listed):
    listed()
    published = load_published(NAME, TAG.replace("_", "-"))  # open_clip takes both
    assert plain(published.preprocessing) == vars(LOOK)
    assert published.tokenizer(["a dog"]).shape == (1, LENGTH)
    assert_frozen(published)


def test_quickgelu_models_of_open_clip_differ_in_the_activation_alone():
    names = [name for name in open_clip.list_models() if name.endswith("-quickgelu")]
    assert len(names) > 10
    for name in names:
        config = open_clip.get_model_config(name)
        assert config.pop("quick_gelu")
        assert config == open_clip.get_model_config(name.removesuffix("-quickgelu"))


def test_fingerprints_depend_on_the_weights_alone(tmp_path, folder):
    fingerprint = load_published(None, str(folder)).sha256
    assert len(bytes.fromhex(fingerprint)) == 32
    copied = tmp_path / "elsewhere"
    shutil.copytree(folder, copied)
    assert load_published(None, str(copied)).sha256 == fingerprint
    weights = load_file(copied / "open_clip_model.safetensors")
    weights["visual.proj"][0, 0] += 1e-3
    save_file(weights, copied / "open_clip_model.safetensors")
    assert load_published(None, str(copied)).sha256 != fingerprint


def sentence(kind, model, weights):
    with pytest.raises(kind) as raised:
        load_published(model, str(weights))
    said = str(raised.value)
    assert raised.type is kind
    assert said.endswith((".", "?"))
    assert "\n" not in said
    return said


def test_missing_files_are_named(tmp_path, folder):
    missing = tmp_path / "missing.pt"
    assert f"found no file {str(missing)!r}" in sentence(UserError, NAME, missing)
    assert "found no file" in sentence(UserError, NAME, tmp_path / "missing")
    assert "found no file" in sentence(UserError, CAPTIONER, missing)
    (folder / "open_clip_config.json").unlink()
    assert "found no open_clip_config.json in the folder" in sentence(UserError, None, folder)


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda folder: (folder / "open_clip_model.safetensors").write_bytes(b"no weights"), "header"),
        (lambda folder: (folder / "open_clip_model.safetensors").unlink(), "could not be loaded"),
        (lambda folder: (folder / "open_clip_config.json").write_text("{"), "Expecting"),
        (lambda folder: (folder / "open_clip_config.json").write_text("{}"), "model_cfg"),
        (lambda folder: save_file({"a": torch.ones(1)}, folder / "open_clip_model.safetensors"), "visual.proj"),
        (lambda folder: with_hub_tokenizer(folder), "okenizer"),
    ],
)
def test_damaged_folders(folder, break_it, said):
    break_it(folder)
    found = sentence(UserError, None, folder)
    assert f"a model that open_clip can load in the folder {str(folder)!r}, got an error (" in found
    assert said in found


def with_hub_tokenizer(folder, **options):
    path = folder / "open_clip_config.json"
    config = json.loads(path.read_text())
    config["model_cfg"]["text_cfg"] |= {"hf_tokenizer_name": "of-nobody"} | options
    path.write_text(json.dumps(config))


def test_a_folder_does_not_run_its_own_python_files(tmp_path, folder):
    with_hub_tokenizer(folder, tokenizer_kwargs={"trust_remote_code": True})
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Own: pass\n")
    named = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "config.json").write_text("{}")
    assert "a tokenizer without trust_remote_code in the open_clip_config.json of" in sentence(UserError, None, folder)
    assert not (tmp_path / "ran").exists()


def test_files_of_other_models(tmp_path, file):
    torch.save({"visual.proj": torch.ones(2, 2)}, tmp_path / "other.pt")
    assert "missing" in sentence(UserError, NAME, tmp_path / "other.pt")
    said = sentence(UserError, CAPTIONER, file)
    assert f"Expected weights of {CAPTIONER} in {str(file)!r}, got an error (" in said
    assert "visual.attn_pool" in said
    (tmp_path / "broken.pt").write_bytes(b"no weights")
    for name in (NAME, CAPTIONER):
        with pytest.raises((UserError, RuntimeError), match=r"broken\.pt"):
            load_published(name, str(tmp_path / "broken.pt"))
    assert "got 'ViT-nothing'" in sentence(UserError, "ViT-nothing", file)


def test_unknown_tags(listed):
    listed()
    assert f"tags of {NAME}, got 'openai': choose one of {TAG}." in sentence(UserError, NAME, "openai")
    assert f"tags of {QUICK}, got 'openai': choose one of {TAG}." in sentence(UserError, QUICK, "openai")
    assert "a model with weights of open_clip, got 'ViT-nothing'" in sentence(UserError, "ViT-nothing", TAG)
    assert f"the model of the weights '{TAG}', got none" in sentence(UserError, None, TAG)


def test_a_download_that_fails(listed, monkeypatch):
    listed()

    def fail(*_, **__):
        raise OSError("no route to host\nTraceback: many lines")

    monkeypatch.setattr(open_clip.factory, "download_pretrained", fail)
    said = sentence(UserError, NAME, TAG)
    assert f"Expected the weights '{TAG}' of {NAME}, got an error (" in said
    assert "no route to host" in said
    assert "download them on a machine with a network" in said


def test_a_tag_whose_activation_the_model_cannot_have(listed, monkeypatch):
    listed()
    config = open_clip.get_model_config(NAME) | {"quick_gelu": True}
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, NAME, config)
    assert "QuickGELU mismatch" in sentence(UserError, NAME, TAG)
