"""A new tower in an old space as a user types it: from an export of a pair to a searched old index."""

import csv
import json
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from support.methods.clip import LENGTH, SIZE, add_tiny_clip, randomized
from support.methods.encoders import (
    GERMAN,
    IMAGES,
    write_encoder,
    write_german,
    write_pair,
    write_tokenizer,
    write_towers,
)
from support.runs.command_line import run
from vlightning.callbacks import AtomicCheckpointIO
from vlightning.commands.evaluate.model import load_model
from vlightning.common.errors import UserError
from vlightning.common.preprocessing import Preprocessing
from vlightning.lightning_modules import NewTowerModule
from vlightning.lightning_modules.core.towers import tower_digest
from vlightning.lightning_modules.networks.clip.files import save_open_clip
from vlightning.lightning_modules.networks.clip.models import build_model
from vlightning.lightning_modules.networks.published_clip import load_published

ROOT = Path(__file__).parents[3]
TOKENS = 10
SMALL = ("--trainer.accelerator=cpu", "--data.num_workers=0", "--data.batch_size=8", "--trainer.max_epochs=2")
CPU = ("--accelerator=cpu", "--num_workers=0")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """An old pair and its index, another pair, a German encoder, parallel texts, and pairs in both languages."""
    folder = write_towers(tmp_path_factory.mktemp("new_tower"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        old = write_pair(folder / "old", folder, TOKENS, image_size=64)
        write_pair(folder / "other", folder, TOKENS, seed=7, image_size=64)
        write_german(folder, "held_out")
        for model in ("old", "other"):
            embedded = run("embed", model, "--data.predict=held_out.csv", f"--output=index_{model}", *CPU)
            assert embedded.status == 0, embedded.err
    return folder, old


def fit(folder, *words, side="text", tower="german"):
    if side == "text":
        given = [f"--model.model.text.name={folder}/{tower}", f"--data.train={folder}/parallel.csv"]
        given += [f"--data.max_tokens={TOKENS}"]
    else:
        given = [f"--model.model.image.name={IMAGES}", "--model.model.image.weights=random"]
        given += [f"--data.train={folder}/pairs.csv", f"--data.max_tokens={TOKENS}"]
    given += [f"--model.predecessor.weights={folder}/old", f"--data.validation={folder}/held_out_de.csv", *SMALL]
    return run("fit", f"--config={ROOT}/configs/clip/new_{side}.yaml", *given, *words)


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
    """A checkpoint of a new text tower, whose folder and whose pair are gone."""
    folder, _ = files
    work = tmp_path_factory.mktemp("run")
    shutil.copytree(folder / "german", folder / "gone")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        done = fit(folder, "--model.loss.prefixes=[4]", "--model.loss.int8=true", tower="gone")
    assert done.status == 0, done.err
    shutil.rmtree(folder / "gone")
    (checkpoint,) = work.rglob("last.ckpt")
    return checkpoint


def moved(folder, name):
    """Move a folder away for a while."""
    return shutil.move(folder / name, folder / f"{name}_moved")


def test_the_pairs_image_tower_does_not_change_and_the_new_tower_moves(files, trained):
    _, old = files
    state = AtomicCheckpointIO().load_checkpoint(trained)["state_dict"]
    for name, tensor in old.student.visual.state_dict().items():
        assert torch.equal(state[f"student.visual.{name}"], tensor), name
    assert torch.equal(state["student.logit_scale"], old.student.logit_scale)
    assert not any(name.startswith("predecessor.") for name in state)
    module = NewTowerModule.load_from_checkpoint(trained)
    trains = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert trains
    assert all(name.startswith("student.text.") for name in trains)


def test_a_training_takes_the_new_text_towards_the_old_one(files, tmp_path, monkeypatch):
    folder, _ = files
    monkeypatch.chdir(tmp_path)
    words = ("--trainer.max_epochs=40", "--model.optim.learning_rate=3e-3", "--trainer.log_every_n_steps=1")
    done = fit(folder, *words, "--trainer.logger=CSVLogger")
    assert done.status == 0, done.err
    (last,) = tmp_path.rglob("last.ckpt")
    new, old = load_model(str(last)), load_model(str(folder / "old"))
    with (folder / "parallel.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    cosine = (new.encode_texts([row["new"] for row in rows]) * old.encode_texts([row["old"] for row in rows])).sum(1)
    assert cosine.mean() > 0.9


def test_a_checkpoint_needs_neither_the_pair_nor_the_folder_of_the_tower(files, trained, tmp_path, monkeypatch):
    folder, _ = files
    monkeypatch.chdir(tmp_path)
    moved(folder, "old")
    try:
        done = run("test", f"--ckpt_path={trained}", f"--data.test={folder}/held_out_de.csv", "--data.num_workers=0")
        assert done.status == 0, done.err
        exported = run("export", "--layout", "vlightning", str(trained), "exported")
        assert exported.status == 0, exported.err
    finally:
        shutil.move(folder / "old_moved", folder / "old")
    card = Path("exported/README.md").read_text()
    checkpoint, export = load_model(str(trained)), load_model("exported")
    assert export.space == checkpoint.space
    assert export.space.fingerprint in card
    assert export.space.image == load_model(str(folder / "old")).tower_digest("image")
    texts = ["dunkel halb", "voll"]
    torch.testing.assert_close(export.encode_texts(texts), checkpoint.encode_texts(texts))
    published = load_published(None, "exported")
    assert published.space == export.space
    torch.testing.assert_close(
        published.network.encode_text(published.tokenizer(texts), normalize=True).detach(), export.encode_texts(texts)
    )


def test_a_resumed_run_is_the_uninterrupted_one_and_needs_the_same_pair(files, trained, tmp_path, monkeypatch):
    folder, _ = files
    monkeypatch.chdir(tmp_path)
    (best,) = trained.parent.glob("best-*.ckpt")
    write_tokenizer(write_encoder(folder / "gone", seed=9), texts=list(GERMAN.values()))
    more = ("--trainer.max_epochs=3", "--checkpoint.save_top_k=0")
    again = run("fit", f"--ckpt_path={trained}", *more)
    assert again.status == 0, again.err
    other = run("fit", f"--ckpt_path={trained}", f"--model.predecessor.weights={folder}/other", *more)
    assert other.status != 0
    assert other.sentence.startswith("Expected the predecessor that the checkpoint was trained with")
    shutil.rmtree(folder / "gone")
    assert best


def test_a_store_of_the_old_texts_stands_in_place_of_the_old_tower(files, tmp_path, monkeypatch):
    folder, _ = files
    monkeypatch.chdir(tmp_path)
    data = ("--data=ParallelTextDataModule", f"--data.train={folder}/parallel.csv", "--of", "texts", *CPU)
    for model in ("old", "other"):
        done = run("embed", folder / model, *data, f"--output={model}")
        assert done.status == 0, done.err
    states = []
    for words in ((), ("--data.store=old",)):
        done = fit(folder, *words, "--checkpoint.save_top_k=0")
        assert done.status == 0, done.err
        newest = max(tmp_path.rglob("last.ckpt"), key=lambda path: path.stat().st_mtime)
        states.append(AtomicCheckpointIO().load_checkpoint(newest)["state_dict"])
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-3, atol=1e-5)
    refused = fit(folder, "--data.store=other")
    assert refused.sentence.startswith("Expected a store of the texts by")


def rows_of(file):
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def test_queries_of_the_new_tower_search_the_old_index(files, trained, tmp_path, monkeypatch):
    folder, _ = files
    monkeypatch.chdir(tmp_path)
    words = ["--model", trained, "--old", folder / "old", "--pairs", folder / "held_out_de.csv", *CPU]
    words += ["--old_caption_column=english", "--match_equal_texts", "--dims", 8, 4, "--formats", "float32", "int8"]
    done = run("evaluate", *words, "--index", folder / "index_old", "--out=index.jsonl")
    assert done.status == 0, done.err
    found = rows_of("index.jsonl")
    keys = {(row["queries"], row["index"], row["dimension"], row["format"]) for row in found}
    assert keys == {(q, "old", d, f) for q in ("old", "new") for d in (8, 4) for f in ("float32", "int8")}
    tested = run("test", f"--ckpt_path={trained}", f"--data.test={folder}/held_out_de.csv", "--data.num_workers=0")
    (tested_r1,) = re.findall(r"test/text_to_image_r1 +([\d.]+)", tested.out)
    (new,) = [row for row in found if (row["queries"], row["dimension"], row["format"]) == ("new", 8, "float32")]
    assert new["recall"]["r1"] == pytest.approx(float(tested_r1), rel=1e-3)
    assert f"| new | old | 8 | float32 | {new['recall']['r1']:.2f} |" in done.out
    (old,) = [row for row in found if (row["queries"], row["dimension"], row["format"]) == ("old", 8, "float32")]
    assert old["images"] == 8


def test_an_index_in_parquet_names_its_space(files, trained, tmp_path, monkeypatch):
    folder, _ = files
    monkeypatch.chdir(tmp_path)
    done = run("predict", f"--ckpt_path={trained}", f"--data.predict={folder}/held_out.csv", "--data.num_workers=0")
    assert done.status == 0, done.err
    (written,) = re.findall(r"Run folder: (\S+)", done.out)
    file = Path(written) / "predictions/image_embeddings.parquet"
    words = ["--model", trained, "--pairs", folder / "held_out_de.csv", *CPU]
    by = {}
    for name, index in {"parquet": file, "store": folder / "index_old"}.items():
        searched = run("evaluate", *words, "--index", index, f"--out={name}.jsonl")
        assert searched.status == 0, searched.err
        by[name] = rows_of(f"{name}.jsonl")
    assert by["parquet"] == by["store"]  # the image tower is the pair's
    table = pq.read_table(file)
    pq.write_table(table.replace_schema_metadata(), "nameless.parquet")
    nameless = run("evaluate", *words, "--index", "nameless.parquet")
    assert nameless.sentence.startswith("Expected an index that names its space")


def test_other_spaces_are_refused_by_their_fingerprints(files, trained):
    folder, _ = files
    new = load_model(str(trained))
    pairs = ("--pairs", folder / "held_out_de.csv", *CPU)
    refused = run("evaluate", "--model", trained, "--index", folder / "index_other", *pairs)
    assert refused.status != 0
    assert refused.sentence.startswith("Expected a model of the space of the index")
    assert new.space.fingerprint in refused.sentence
    refused = run("evaluate", "--model", trained, "--old", folder / "other", "--index", folder / "index_old", *pairs)
    assert refused.sentence.startswith("Expected a model of the space of the index")
    searched = run("search", folder / "index_old", "dunkel voll halb", "--model", trained, "--count=2")
    assert searched.status == 0, searched.err
    refused = run("search", folder / "index_other", "dunkel", "--model", trained)
    assert new.space.fingerprint in refused.sentence


def test_a_tower_is_exported_alone_and_answers_in_the_old_index(files, trained, tmp_path, monkeypatch):
    folder, _ = files
    monkeypatch.chdir(tmp_path)
    done = run("export", "--layout", "tower", str(trained), "german")
    assert done.status == 0, done.err
    whole, alone = load_model(str(trained)), load_model("german")
    texts = ["dunkel halb", "voll"]
    torch.testing.assert_close(alone.encode_texts(texts), whole.encode_texts(texts))
    assert alone.space == whole.space
    assert whole.space.fingerprint in Path("german/README.md").read_text()
    size = sum(tensor.numel() for tensor in load_file("german/model.safetensors").values())
    assert size == sum(weight.numel() for weight in whole.network.student.text.state_dict().values())
    words = ["--pairs", folder / "held_out_de.csv", "--index", folder / "index_old", *CPU]
    tables = [run("evaluate", "--model", model, *words).out for model in (trained, "german")]
    assert tables[0] == tables[1]
    assert "| new | old | 8 |" in tables[1]
    searched = run("search", folder / "index_old", "dunkel voll halb", "--model", "german", "--count=2")
    assert searched.status == 0, searched.err
    refused = run("embed", "german", f"--data.predict={folder}/held_out.csv", "--output=store", *CPU)
    assert refused.sentence.startswith("Expected a model with both towers")
    assert not Path("store").exists()
    again = fit(folder, "--model.model.text.weights=german")
    assert again.status == 0, again.err


@pytest.fixture(scope="module")
def image_run(files, tmp_path_factory):
    """A checkpoint of a new image tower for images of another size."""
    folder, _ = files
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work := tmp_path_factory.mktemp("image"))
        english = f"--data.validation={folder}/held_out.csv"
        done = fit(folder, "--data.image_size=32", "--model.loss.contrast=1", english, side="image")
    assert done.status == 0, done.err
    (checkpoint,) = work.rglob("last.ckpt")
    return checkpoint


def test_images_of_a_new_tower_are_mixed_into_the_old_index(files, image_run, tmp_path, monkeypatch):
    folder, old = files
    monkeypatch.chdir(tmp_path)
    words = ["--model", image_run, "--pairs", folder / "held_out.csv", "--index", folder / "index_old", *CPU]
    done = run("evaluate", *words, "--old", folder / "old", "--out=index.jsonl")
    assert done.status == 0, done.err
    found = rows_of("index.jsonl")
    assert [(row["queries"], row["index"]) for row in found] == [
        (queries, index) for queries in ("old", "new") for index in ("old", "new", "mixed")
    ]
    assert found[0]["recall"] == found[3]["recall"]  # the text tower is the pair's
    new = load_model(str(image_run))
    assert new.tower_digest("text") == tower_digest(old.student.text, whole=True)
    assert new.preprocessing.image_size == 32


def test_a_published_pair_of_open_clip_is_a_predecessor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    network = randomized(build_model(add_tiny_clip(), context_length=LENGTH))
    prepared = Preprocessing(SIZE, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bicubic")
    save_open_clip(network, add_tiny_clip(), prepared, "published")
    write_tokenizer(write_encoder(Path("german")))
    module = NewTowerModule({"text": {"name": "german"}}, {"weights": "published"}, max_tokens=TOKENS)
    module.load_initial_weights()
    image = torch.rand(2, 3, SIZE, SIZE)
    torch.testing.assert_close(
        module.eval().encode_images(image)[0], network.eval().encode_image(image, normalize=True)
    )
    assert module.expected_image_size() == SIZE
    assert module.initial_preprocessing() == prepared.as_dict()
    assert module.space == load_published(None, "published").space


@pytest.mark.parametrize(
    ("model", "predecessor", "loss", "begin"),
    [
        ({}, {}, {}, "Expected one new tower, model.image or model.text, got none"),
        ({"text": {"name": "text"}}, {}, {}, "Expected the trained pair as model.predecessor.weights, got none"),
        (
            {"text": {"name": "text"}},
            {"weights": "old"},
            {"prefixes": [8]},
            "Expected lengths below 8, the embedding dimension of the pair, as loss.prefixes, got 8",
        ),
        (
            {"text": {"name": "text"}},
            {"weights": "old"},
            {"feature": 0, "similarity": 0},
            "Expected a loss of a new tower, got 0",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(files, monkeypatch, model, predecessor, loss, begin):
    monkeypatch.chdir(files[0])
    with pytest.raises(UserError, match=begin):
        NewTowerModule(model, predecessor, max_tokens=TOKENS, loss=loss)


def test_files_that_do_not_fit_are_refused(files, tmp_path, monkeypatch):
    folder, _ = files
    monkeypatch.chdir(tmp_path)
    Path("wrong.csv").write_text("english,german\na,b\n")
    refused = fit(folder, "--data.train=wrong.csv")
    assert refused.sentence.startswith("Expected the column 'new' in 'wrong.csv'")
    assert "set data.new_column to" in refused.sentence
    other = run(
        "fit",
        "--model=CLIPModule",
        "--model.model=MobileCLIP-tiny",
        "--data=ParallelTextDataModule",
        f"--data.train={folder}/parallel.csv",
        *SMALL,
    )
    assert other.sentence.startswith("Expected a module that learns from parallel texts")
