"""A tower of another pair as the new tower: from an export of either to a searched old index, and back to files."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from open_clip.model import convert_to_custom_text_state_dict
from safetensors.torch import load_file

from support.methods.clip import LENGTH, SIZE, WORDS, randomized
from support.methods.encoders import write_pair, write_towers
from support.methods.mmlg import trained_checkpoint
from support.methods.published import CONFIG, PREPROCESSING, write_published
from support.methods.published import LENGTH as TOKENS
from support.runs.command_line import run
from vlightning.commands.evaluate.model import load_model
from vlightning.common.errors import UserError
from vlightning.lightning_modules import CLIPModule, NewTowerModule
from vlightning.lightning_modules.networks.clip.files import save_open_clip, save_vendor
from vlightning.lightning_modules.networks.clip.models import build_model
from vlightning.lightning_modules.networks.clip.shapes import ModelShape, OpenClipConfig
from vlightning.lightning_modules.networks.published_clip import load_published

ROOT = Path(__file__).parents[3]
CPU = ("--accelerator=cpu", "--num_workers=0")
CLIP_TEXTS = ("--data.tokenizer=clip", f"--data.vocab_size={WORDS}", f"--data.max_tokens={TOKENS}")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """An old pair of two towers and its index, a pair of open_clip's, and parallel texts."""
    folder = write_towers(tmp_path_factory.mktemp("other_pair"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        old = write_pair(folder / "old", folder, 10, image_size=64)
        write_published(folder / "published")
        with Path("pairs.csv").open(newline="") as file:
            texts = [row["caption"] for row in csv.DictReader(file)]
        with Path("parallel.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("old", "new"), *zip(texts, texts, strict=True)])
        embedded = run("embed", "old", "--data.predict=held_out.csv", "--output=index_old", *CPU)
        assert embedded.status == 0, embedded.err
    return folder, old


def fit(folder, weights, *words, train="pairs.csv", old="old"):
    given = [f"--model.predecessor.weights={folder}/{old}", f"--model.pair.weights={weights}"]
    given += [f"--data.train={folder}/{train}", f"--data.validation={folder}/held_out.csv", "--trainer.max_epochs=2"]
    small = ("--trainer.accelerator=cpu", "--data.num_workers=0", "--data.batch_size=8", "--checkpoint.save_top_k=0")
    return run("fit", f"--config={ROOT}/configs/clip/new_from_pair.yaml", *given, *small, *words)


@pytest.fixture(scope="module")
def image_run(files, tmp_path_factory):
    """A checkpoint of an image tower of open_clip's in the space of two towers, whose own pair is gone."""
    folder, _ = files
    shutil.copytree(folder / "published", folder / "gone")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work := tmp_path_factory.mktemp("image"))
        done = fit(folder, folder / "gone", "--data.max_tokens=10")
    assert done.status == 0, done.err
    shutil.rmtree(folder / "gone")
    (checkpoint,) = work.rglob("last.ckpt")
    return checkpoint


@pytest.fixture(scope="module")
def text_run(files, tmp_path_factory):
    """A checkpoint of the text tower of the same pair, from parallel texts alone."""
    folder, _ = files
    words = ("--model.pair.side=text", "--data=ParallelTextDataModule", *CLIP_TEXTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work := tmp_path_factory.mktemp("text"))
        done = fit(folder, folder / "published", *words, train="parallel.csv")
    assert done.status == 0, done.err
    (checkpoint,) = work.rglob("last.ckpt")
    return checkpoint


def test_an_image_tower_starts_with_its_own_weights_and_preprocessing(files):
    folder, old = files
    module = NewTowerModule(
        pair={"weights": f"{folder}/published"}, predecessor={"weights": f"{folder}/old"}, max_tokens=10
    )
    module.load_initial_weights()
    own = load_published(None, str(folder / "published")).network.state_dict()
    state = module.student.state_dict()
    for name, tensor in own.items():
        if name.startswith("visual.") and name != "visual.proj":
            assert torch.equal(state[name], tensor), name
    assert state["visual.proj"].shape == (32, 8)
    for name, tensor in old.student.text.state_dict().items():
        assert torch.equal(state[f"text.{name}"], tensor), name
    assert module.initial_preprocessing() == PREPROCESSING.as_dict()
    assert {name for name, weight in module.named_parameters() if weight.requires_grad} == {
        name for name, _ in module.named_parameters() if name.startswith("student.visual.")
    }


def test_a_projection_of_the_old_dimension_stays(files):
    folder, _ = files
    module = NewTowerModule(
        pair={"side": "text", "weights": f"{folder}/published"},
        predecessor={"weights": f"{folder}/published"},
        max_tokens=TOKENS,
    )
    module.load_initial_weights()
    own = load_published(None, str(folder / "published")).network
    ids = torch.randint(1, WORDS, (3, TOKENS))
    torch.testing.assert_close(module.student.eval().encode_text(ids), own.encode_text(ids))


@pytest.mark.parametrize("side", ["image", "text"])
def test_a_resumed_run_needs_the_old_pair_alone(files, image_run, text_run, side, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint = {"image": image_run, "text": text_run}[side]
    again = run("fit", f"--ckpt_path={checkpoint}", "--trainer.max_epochs=3")
    assert again.status == 0, again.err
    assert "Epoch 2/2" in again.out


@pytest.mark.parametrize("side", ["image", "text"])
def test_the_old_index_is_searched_and_evaluated(files, image_run, text_run, side, tmp_path, monkeypatch):
    folder, _ = files
    monkeypatch.chdir(tmp_path)
    checkpoint = {"image": image_run, "text": text_run}[side]
    words = ["--model", checkpoint, "--pairs", folder / "held_out.csv", "--index", folder / "index_old", *CPU]
    done = run("evaluate", *words, "--old", folder / "old", "--out=index.jsonl")
    assert done.status == 0, done.err
    rows = [json.loads(line) for line in Path("index.jsonl").read_text().splitlines()]
    found = [(row["queries"], row["index"]) for row in rows]
    indexes = ("old", "new", "mixed") if side == "image" else ("old",)
    assert found == [(queries, index) for queries in ("old", "new") for index in indexes]
    tested = run("test", f"--ckpt_path={checkpoint}", f"--data.test={folder}/held_out.csv", "--data.num_workers=0")
    assert tested.status == 0, tested.err
    if side == "text":  # its images are the old ones
        (r1,) = re.findall(r"test/text_to_image_r1 +([\d.]+)", tested.out)
        new = rows[1]["recall"]["r1"]
        assert new == pytest.approx(float(r1), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["image", "text"])
def test_every_export_has_the_features_of_the_checkpoint(files, image_run, text_run, side, tmp_path, monkeypatch):
    folder, _ = files
    monkeypatch.chdir(tmp_path)
    checkpoint = str({"image": image_run, "text": text_run}[side])
    whole = load_model(checkpoint)
    size = whole.preprocessing.image_size
    texts, image = ["dark half", "full"], torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8)
    for layout in ("vlightning", "tower", "open_clip", "torch_export"):
        done = run("export", "--layout", layout, checkpoint, layout)
        assert done.status == 0, done.err
        if layout in ("torch_export",):
            continue
        model = load_model(layout)
        if side in model.sides and (side == "text" or len(model.sides) == 2):
            torch.testing.assert_close(model.encode_texts(texts), whole.encode_texts(texts))
        if "image" in model.sides:
            torch.testing.assert_close(model.encode_images(image), whole.encode_images(image))
        if layout != "open_clip":  # a folder of open_clip's has no place for a space
            assert model.space == whole.space
    with pytest.raises(UserError, match="got the tower alone in"):
        NewTowerModule(pair={"weights": "tower"}, predecessor={"weights": "vlightning"})
    alone = load_file("tower/model.safetensors")
    assert {name.partition(".")[0] for name in alone} == {"visual" if side == "image" else "text"}
    searched = run("search", folder / "index_old", "dark full half", "--model", "vlightning", "--count=2")
    assert searched.status == 0, searched.err
    # The export is a predecessor in its turn, in the same space.
    again = NewTowerModule(
        pair={"weights": f"{folder}/published", "side": side}, predecessor={"weights": "vlightning"}, max_tokens=TOKENS
    )
    again.load_initial_weights()
    assert again.space == whole.space


def test_a_descendant_of_a_learngene_becomes_a_new_tower(files, tmp_path, monkeypatch):
    folder, _ = files
    monkeypatch.chdir(tmp_path)
    _, extraction = trained_checkpoint(tmp_path)
    sizes = ("--model.towers.width=16", "--model.towers.heads=2", "--model.towers.embed_dim=12")
    sizes += ("--model.vision.patch_size=8", "--trainer.accelerator=cpu")
    written = run("export", extraction, "learngene.safetensors", "--layout=learngene")
    assert written.status == 0, written.err
    data = ("--data=ImageTextDataModule", f"--data.train={folder}/pairs.csv", f"--data.image_size={SIZE}")
    data += ("--data.num_workers=0", "--data.batch_size=8", f"--data.vocab_size={WORDS}", f"--data.max_tokens={LENGTH}")
    expanded = ("--trainer.callbacks=LearngeneExpansionCallback", "--trainer.callbacks.file=learngene.safetensors")
    expanded += ("--trainer.callbacks.target=student", "--model.student=plain", "--model.towers.depth=3")
    teacher = ("--model.teacher.model=null", "--model.teacher.distillation_weight=0", "--data.tokenizer=clip")
    activated = run("fit", "--model=MMLGModule", *data, *sizes, *expanded, *teacher, "--trainer.max_epochs=1")
    assert activated.status == 0, activated.err
    (checkpoint,) = (path for path in tmp_path.rglob("last.ckpt") if "checkpoints" in str(path))
    refused = fit(folder, checkpoint, "--data.max_tokens=10")
    assert refused.sentence.startswith("Expected a pair of towers as model.pair.weights, got a training of MMLGModule")
    exported = run("export", "--layout", "open_clip", str(checkpoint), "descendant")
    assert exported.status == 0, exported.err
    done = fit(folder, "descendant", "--data.max_tokens=10")
    assert done.status == 0, done.err
    last = max(tmp_path.rglob("last.ckpt"), key=lambda path: path.stat().st_mtime)
    layers = load_model(str(last)).network.student.visual.transformer.resblocks
    assert len(layers) == 3
    words = ("--model", last, "--pairs", folder / "held_out.csv", "--index", folder / "index_old", *CPU)
    assert "| new | mixed |" in run("evaluate", *words, "--old", folder / "old").out


def shape(**changes):
    small = {"image_size": 64, "embed_dim": 16, "width": 64, "layers": 1}
    return ModelShape("fastvit_mci_shallow", **small | changes)


def write_kind(kind, folder, files):
    """Write a pair of a kind with random weights to a folder, and return the number of tokens of its texts."""
    torch.manual_seed(11)
    if kind == "quick":
        config = OpenClipConfig("quick", CONFIG.config | {"quick_gelu": True})
        save_open_clip(build_model(config, context_length=TOKENS), config, PREPROCESSING, folder)
        return TOKENS
    if kind == "open_clip":
        write_published(folder)
        return TOKENS
    if kind == "towers":
        text = {"name": f"{files}/text", "weights": "random", "prefix": "a photo of "}
        model = {"image": {"name": "test_efficientnet", "weights": "random"}, "text": text, "projection_dim": 12}
    else:
        model = shape(mixers=kind == "mixers", vendor_stem=False)
    CLIPModule(model, max_tokens=10, vision={"image_size": 64}).save_pretrained(folder)
    return 10


@pytest.mark.parametrize("side", ["image", "text"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("quick", "open_clip"),
        ("quick", "shape"),
        ("quick", "towers"),
        ("towers", "quick"),
        ("towers", "mixers"),
        ("shape", "mixers"),
        ("mixers", "towers"),
        ("mixers", "shape"),
    ],
)
def test_any_two_pairs_make_one_whose_other_tower_is_the_old_one(files, old, new, side, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokens = {"old": write_kind(old, "old", files[0]), "new": write_kind(new, "new", files[0])}
    length = tokens["new" if side == "text" else "old"]
    module = NewTowerModule(
        pair={"side": side, "weights": "new"}, predecessor={"weights": "old"}, max_tokens=length, loss={"prefixes": [4]}
    ).eval()
    module.load_initial_weights()
    pairs = {name: load_published(None, name).network for name in ("old", "new")}
    size = {name: 64 if kind in ("shape", "mixers", "towers") else 32 for name, kind in (("old", old), ("new", new))}
    image = torch.rand(2, 3, size["new" if side == "image" else "old"], size["new" if side == "image" else "old"])
    ids = torch.randint(1, 104, (2, length))
    kept = (module.text_features, pairs["old"].encode_text, (ids, torch.ones_like(ids)), (ids,))
    if side == "text":
        kept = (module.image_features, pairs["old"].encode_image, (image,), (image,))
    torch.testing.assert_close(kept[0](*kept[2]), kept[1](*kept[3]))
    attribute = {"image": "visual", "text": "text"}[side]
    own = convert_to_custom_text_state_dict(dict(pairs["new"].state_dict()))
    state, width = module.student.state_dict(), module.student.logit_scale.numel() and kept[0](*kept[2]).shape[1]
    taken = [
        name for name, tensor in own.items() if name.startswith(f"{attribute}.") and tensor.shape == state[name].shape
    ]
    assert all(torch.equal(state[name], own[name]) for name in taken)
    others = {name for name in state if name.startswith(f"{attribute}.")} - set(taken)
    assert all("proj" in name or "head" in name for name in others)
    assert bool(others) == (width != pairs["new"].encode_image(torch.rand(1, 3, size["new"], size["new"])).shape[1])
    module.save_pretrained("exported")
    again = NewTowerModule.from_pretrained("exported")
    torch.testing.assert_close(again.image_features(image), module.image_features(image))
    torch.testing.assert_close(
        again.text_features(ids, torch.ones_like(ids)), module.text_features(ids, torch.ones_like(ids))
    )
    published = load_published(None, "exported")
    torch.testing.assert_close(published.network.encode_image(image), module.image_features(image))
    assert again.text_prefix == ("a photo of " if (new if side == "text" else old) == "towers" else "")


@pytest.mark.parametrize(
    ("pair", "begin"),
    [
        ({}, "Expected the weights of the new tower's pair as model.pair.weights, got none"),
        ({"weights": "random"}, "Expected the name of a pair as model.pair.name with random weights, got none"),
        ({"weights": "absent"}, "Expected the name of the model"),
        ({"weights": "random", "name": "MobileCLIP-S0", "side": "text"}, "Expected towers that open_clip's"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(files, pair, begin, monkeypatch):
    monkeypatch.chdir(files[0])
    with pytest.raises(UserError, match=begin):
        NewTowerModule(pair=pair, predecessor={"weights": "published"}, max_tokens=TOKENS)


def test_a_file_of_the_vendors_is_taken_by_its_name(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    network = randomized(build_model("MobileCLIP-tiny"))
    network.visual.trunk.get_classifier().bias.data.zero_()
    save_vendor(network, "tiny.pt")
    module = NewTowerModule(
        pair={"name": "MobileCLIP-tiny", "weights": "tiny.pt"}, predecessor={"weights": f"{files[0]}/old"}
    )
    module.load_initial_weights()
    own, state = network.visual.state_dict(), module.student.visual.state_dict()
    assert {name for name, tensor in own.items() if not torch.equal(tensor, state[name])} == {
        "trunk.head.fc.weight",
        "trunk.head.fc.bias",
    }
    assert module.expected_image_size() == module.expected_preprocessing()["image_size"] == 64


def test_one_new_tower_is_given_and_not_two(files):
    with pytest.raises(UserError, match="Expected one new tower, got model"):
        NewTowerModule(
            {"image": {"name": "test_vit"}},
            pair={"weights": f"{files[0]}/published"},
            predecessor={"weights": f"{files[0]}/old"},
        )
