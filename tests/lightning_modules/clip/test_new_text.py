"""A new text tower in the space of ALBEF and of SHRe: from a model to its index, searched in another language."""

import json
import re
import shutil
from pathlib import Path

import onnxruntime
import pytest
import torch
from tokenizers import Tokenizer

from support.methods.albef import SIZES as ALBEF
from support.methods.encoders import german, write_german, write_towers
from support.methods.shre import SIZES as SHRE
from support.runs.command_line import run
from vlightning.callbacks import AtomicCheckpointIO
from vlightning.commands.evaluate.model import load_model
from vlightning.common.errors import UserError
from vlightning.lightning_modules import NewTextModule

ROOT = Path(__file__).parents[3]
TOKENS = 8
CPU = ("--accelerator=cpu", "--num_workers=0")
SMALL = ("--trainer.accelerator=cpu", "--data.num_workers=0", "--data.batch_size=8")
MODELS = {"albef": ("ALBEFModule", ALBEF, {}), "shre": ("SHReModule", SHRE, {"kl": {"weight": 0.0}})}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """An export of a trained ALBEF and of a trained SHRe, their indexes, a German encoder and parallel texts."""
    folder = write_towers(tmp_path_factory.mktemp("new_text"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_german(folder, "pairs")
        for name, (module, sizes, more) in MODELS.items():
            groups = {key: value for key, value in (sizes | more).items() if isinstance(value, dict)}
            words = [
                f"--model.{group}.{key}={value}"
                for group, values in groups.items()
                for key, value in values.items()
                if key not in ("vocab_size", "max_tokens", "image_size")
            ]
            words += ["--data=ImageTextDataModule", "--data.train=pairs.csv", "--data.image_size=16"]
            words += [f"--data.max_tokens={TOKENS}", "--data.validation=held_out.csv", "--trainer.max_epochs=2"]
            done = run("fit", f"--model={module}", *words, *SMALL, f"--trainer.default_root_dir=run_{name}")
            assert done.status == 0, done.err
            (last,) = Path(f"run_{name}").rglob("last.ckpt")
            exported = run("export", "--layout", "vlightning", str(last), name)
            assert exported.status == 0, exported.err
            embedded = run("embed", name, "--data.predict=held_out.csv", f"--output=index_{name}", *CPU)
            assert embedded.status == 0, embedded.err
    return folder


def fit(folder, model, *words):
    given = [f"--model.predecessor.weights={folder}/{model}", f"--model.model.text.name={folder}/german"]
    given += [f"--data.train={folder}/parallel.csv", f"--data.validation={folder}/held_out_de.csv", *SMALL]
    given += ["--data.max_tokens=10", "--checkpoint.save_top_k=0", "--trainer.max_epochs=2"]
    return run("fit", f"--config={ROOT}/configs/clip/new_text_any.yaml", *given, *words)


@pytest.fixture(scope="module", params=list(MODELS))
def trained(request, files, tmp_path_factory):
    """The name of a model, and the checkpoint of a new text tower in its space."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work := tmp_path_factory.mktemp("run"))
        done = fit(files, request.param)
    assert done.status == 0, done.err
    (checkpoint,) = work.rglob("last.ckpt")
    return request.param, checkpoint


def test_a_checkpoint_has_the_new_tower_alone_and_names_the_space(files, trained):
    name, checkpoint = trained
    content = AtomicCheckpointIO().load_checkpoint(checkpoint)
    assert {key.partition(".")[0] for key in content["state_dict"]} == {"student"}
    old = load_model(str(files / name))
    assert content["space"]["image"] == old.tower_digest("image")
    assert load_model(str(checkpoint)).space.is_that_of(old.space)


def test_queries_of_the_new_tower_search_the_index_that_the_model_wrote(files, trained, tmp_path, monkeypatch):
    name, checkpoint = trained
    monkeypatch.chdir(tmp_path)
    done = run("export", "--layout", "tower", str(checkpoint), "german")
    assert done.status == 0, done.err
    words = ["--pairs", files / "held_out_de.csv", "--index", files / f"index_{name}", *CPU]
    words += ["--old", files / name, "--old_caption_column=english", "--match_equal_texts"]
    tables = {}
    for model in ("german", checkpoint):
        evaluated = run("evaluate", "--model", model, *words, "--out=index.jsonl")
        assert evaluated.status == 0, evaluated.err
        rows = [json.loads(line) for line in Path("index.jsonl").read_text().splitlines()]
        Path("index.jsonl").unlink()
        tables[str(model)] = [row["recall"] for row in rows]
        assert [(row["queries"], row["index"]) for row in rows] == [("old", "old"), ("new", "old")]
    assert tables["german"] == tables[str(checkpoint)]
    tested = run("test", f"--ckpt_path={checkpoint}", f"--data.test={files}/held_out_de.csv", "--data.num_workers=0")
    (r1,) = re.findall(r"test/(?:equal_texts_)?text_to_image_r1 +([\d.]+)", tested.out)[-1:]
    assert tables["german"][1]["r1"] == pytest.approx(float(r1), rel=1e-3)
    searched = run("search", files / f"index_{name}", "dunkel voll halb", "--model", "german", "--count=2")
    assert searched.status == 0, searched.err
    other = "shre" if name == "albef" else "albef"
    refused = run("search", files / f"index_{other}", "dunkel", "--model", "german")
    assert refused.status != 0
    assert "space" in refused.sentence


@pytest.mark.parametrize("layout", ["torch_export", "onnx", "onnx_int8"])
def test_the_tower_is_a_program_with_its_tokenizer(trained, layout, tmp_path, monkeypatch):
    _, checkpoint = trained
    monkeypatch.chdir(tmp_path)
    done = run("export", "--layout", layout, checkpoint, "program")
    assert done.status == 0, done.err
    ending = "pt2" if layout == "torch_export" else "onnx"
    assert sorted(path.name for path in Path("program").iterdir()) == [
        "config.json",
        f"text.{ending}",
        "tokenizer.json",
    ]
    texts = ["dunkel voll halb", "voll", "halb halb dunkel"]
    tokenizer = Tokenizer.from_file("program/tokenizer.json")
    ids = torch.tensor([tokens.ids for tokens in tokenizer.encode_batch(texts)])
    if layout == "torch_export":
        features = torch.export.load("program/text.pt2").module()(ids)
    else:
        (array,) = onnxruntime.InferenceSession("program/text.onnx").run(None, {"input_ids": ids.numpy()})
        features = torch.from_numpy(array)
    expected = load_model(str(checkpoint)).encode_texts(texts)
    if layout == "onnx_int8":
        assert (features * expected).sum(1).min() > 0.99
    else:
        torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)


def test_training_moves_the_new_texts_to_the_old_ones(files, trained, tmp_path, monkeypatch):
    name, _ = trained
    monkeypatch.chdir(tmp_path)
    done = fit(files, name, "--trainer.max_epochs=40", "--model.optim.learning_rate=3e-3")
    assert done.status == 0, done.err
    (last,) = tmp_path.rglob("last.ckpt")
    new, old = load_model(str(last)), load_model(str(files / name))
    texts = ["dark half full", "full dark dark", "half half full"]
    cosine = (new.encode_texts([german(text) for text in texts]) * old.encode_texts(texts)).sum(1)
    assert cosine.min() > 0.9


def test_a_store_of_the_old_texts_stands_in_place_of_the_model(files, trained, tmp_path, monkeypatch):
    name, checkpoint = trained
    monkeypatch.chdir(tmp_path)
    data = ("--data=ParallelTextDataModule", f"--data.train={files}/parallel.csv", "--of", "texts", *CPU)
    for model in MODELS:
        done = run("embed", files / model, *data, f"--output={model}")
        assert done.status == 0, done.err
    done = fit(files, name, f"--data.store={name}")
    assert done.status == 0, done.err
    (last,) = tmp_path.rglob("last.ckpt")
    state, expected = (AtomicCheckpointIO().load_checkpoint(path)["state_dict"] for path in (last, checkpoint))
    for key, tensor in expected.items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-3, atol=1e-5)
    refused = fit(files, name, f"--data.store={'shre' if name == 'albef' else 'albef'}")
    assert refused.sentence.startswith("Expected a store of the texts by")


def test_a_resumed_run_needs_the_model_and_not_the_folder_of_the_tower(files, trained, tmp_path, monkeypatch):
    name, checkpoint = trained
    monkeypatch.chdir(tmp_path)
    shutil.move(files / "german", files / "moved")
    try:
        again = run("fit", f"--ckpt_path={checkpoint}", "--trainer.max_epochs=3")
        assert again.status == 0, again.err
        other = "shre" if name == "albef" else "albef"
        refused = run("fit", f"--ckpt_path={checkpoint}", f"--model.predecessor.weights={files}/{other}")
        assert refused.sentence.startswith("Expected the predecessor that the checkpoint was trained with")
    finally:
        shutil.move(files / "moved", files / "german")


@pytest.mark.parametrize(
    ("model", "predecessor", "begin"),
    [
        ({"text": {"name": "german"}}, {}, "Expected the trained model as model.predecessor.weights, got none"),
        ({"text": {"name": "german"}}, {"weights": "absent"}, "Expected a checkpoint or an export as"),
        ({"image": {"name": "test_vit"}}, {"weights": "albef"}, "Expected a new text tower as model.text"),
    ],
)
def test_settings_that_do_not_fit_are_refused(files, monkeypatch, model, predecessor, begin):
    monkeypatch.chdir(files)
    with pytest.raises(UserError, match=begin):
        NewTextModule(model, predecessor, max_tokens=TOKENS)


def test_a_step_is_planned_without_weights(files, trained, tmp_path, monkeypatch):
    name, _ = trained
    monkeypatch.chdir(tmp_path)
    words = (f"--model.predecessor.weights={files}/{name}", f"--model.model.text.name={files}/german")
    words += (f"--data.train={files}/parallel.csv", "--data.max_tokens=10")
    planned = run("plan", f"--config={ROOT}/configs/clip/new_text_any.yaml", *words)
    assert planned.status == 0, planned.err
    assert "frozen networks" in planned.out


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_of_the_model_is_a_predecessor_of_its_own_space(files, name, monkeypatch):
    monkeypatch.chdir(files)
    (last,) = Path(f"run_{name}").rglob("last.ckpt")
    module = NewTextModule({"text": {"name": "german"}}, {"weights": str(last)}, max_tokens=TOKENS)
    module.predecessor.load()
    old, exported = load_model(str(last)), load_model(name)
    texts = ["dark half full", "half"]
    ids = module.teacher_tokenizers["teacher_input_ids"](texts)
    torch.testing.assert_close(module.predecessor.features({"teacher_input_ids": ids}), old.encode_texts(texts))
    assert module.predecessor.space.is_that_of(old.space)
    assert module.predecessor.space.is_that_of(exported.space) == (name == "shre")  # ALBEF's export has no teacher
    assert module.student.proj.out_features == old.encode_texts(texts).shape[1]
