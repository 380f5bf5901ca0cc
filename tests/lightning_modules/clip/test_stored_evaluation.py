"""Validation, test and prediction with features from stores: no tower runs, no image is read, the results are equal."""

import json
import shutil

import pyarrow.parquet as pq
import pytest
import torch
from lightning import Trainer, seed_everything

from support.data.colors import read_table, write_colors, write_table
from support.methods.published import LENGTH, write_published
from support.runs.command_line import run
from support.runs.distributed import rank_trainer, run_distributed
from support.runs.stored import Encodings
from vlightning.common.errors import UserError
from vlightning.datamodules import ImageTextDataModule
from vlightning.lightning_modules import CLIPModule

LIT = {"lock_image": "all"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Pairs with absolute paths, stores of both tables, and the tables in a folder without the images."""
    folder = write_colors(tmp_path_factory.mktemp("evaluated"))
    for table in ("pairs", "held_out"):
        # No two captions are equal: their similarities would tie, and each batch may round them apart.
        rows = [
            (image, f"{caption} {number}")
            for number, (image, caption) in enumerate(read_table(folder / f"{table}.csv"))
        ]
        write_table(folder / f"{table}.csv", [*rows, (rows[0][0], "another text of the first image")])
        assert embed(folder, table, folder / f"stores/{table}").status == 0
    (folder / "moved").mkdir()
    for table in ("pairs", "held_out"):
        shutil.copy(folder / f"{table}.csv", folder / "moved")
    return folder


def embed(files, table, store, *more):
    return run(
        *("embed", f"local-dir:{files}/model", f"--data.train={files}/{table}.csv", f"--output={store}"),
        *("--shard_size=10", "--num_workers=0", "--accelerator=cpu", *more),
    )


def data_of(tables, stores=None, **options):
    given = {"tokenizer": "clip", "vocab_size": 49408, "max_tokens": LENGTH, "batch_size": 4, "num_workers": 0}
    splits = {"train": f"{tables}/pairs.csv"} | {
        split: f"{tables}/held_out.csv" for split in ("validation", "test", "predict")
    }
    return ImageTextDataModule(**splits | given | {"store": stores} | options)


def module_of(files, tuning=None):
    seed_everything(0, verbose=False)
    return CLIPModule(weights=f"{files}/model", max_tokens=LENGTH, tuning=tuning or {}, optim={"learning_rate": 1e-3})


def trainer_of(tmp_path, *callbacks, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return Trainer(default_root_dir=tmp_path, callbacks=list(callbacks), **quiet | options)


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_metrics_of_an_evaluation_are_those_without_a_store(files, tmp_path, stage):
    split = {"validate": "validation"}.get(stage, stage)
    (plain,) = getattr(trainer_of(tmp_path), stage)(module_of(files), datamodule=data_of(files))
    watch = Encodings()
    data = data_of(files / "moved", {split: f"{files}/stores/held_out"})
    (stored,) = getattr(trainer_of(tmp_path, watch), stage)(module_of(files), datamodule=data)
    assert stored == pytest.approx(plain)
    if stage == "validate":
        assert watch.ran == set()


def test_a_training_and_its_validation_need_no_image(files, tmp_path):
    stores = {"train": f"{files}/stores/pairs", "validation": f"{files}/stores/held_out"}
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, "enable_checkpointing": False}
    metrics = []
    for tables, given in ((files, {"train": stores["train"]}), (files / "moved", stores)):
        watch = Encodings()
        trainer = trainer_of(tmp_path, watch, **options)
        trainer.fit(module_of(files, LIT), datamodule=data_of(tables, given))
        metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    assert watch.ran == {"text"}  # it trains; without the store of the validation the image tower runs too
    assert "val/recall_mean" in metrics[0]
    assert metrics[1] == pytest.approx(metrics[0], abs=1e-5)


def test_prediction_answers_from_a_store_as_from_the_images(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = ["--model=CLIPModule", f"--model.weights={files}/model", f"--model.max_tokens={LENGTH}"]
    common += ["--data=ImageTextDataModule", "--data.tokenizer=clip", "--data.vocab_size=49408"]
    common += ["--data.num_workers=0"]
    common += [f"--data.max_tokens={LENGTH}", "--data.predict_texts=[dark half full]", "--trainer.accelerator=cpu"]
    results = []
    for name, tables, more in (
        ("plain", files, []),
        ("stored", files / "moved", [f"--data.store.predict={files}/stores/held_out"]),
    ):
        words = [f"--data.predict={tables}/held_out.csv", f"--trainer.default_root_dir={tmp_path}/{name}", *more]
        ran = run("predict", *common, *words, "--trainer.logger=false")
        assert ran.status == 0, ran.err
        (folder,) = {path.parent for path in (tmp_path / name).rglob("image_embeddings.parquet")}
        results.append({file.stem: pq.read_table(file).to_pydict() for file in sorted(folder.glob("*.parquet"))})
    plain, stored = results
    assert stored.keys() == plain.keys()
    embeddings = [torch.tensor(result["image_embeddings"]["embedding"]) for result in results]
    torch.testing.assert_close(embeddings[1], embeddings[0], atol=1e-5, rtol=1e-5)
    matches = "text_to_image"
    assert stored[matches]["sample_index"] == plain[matches]["sample_index"]
    assert stored[matches]["similarity"] == pytest.approx(plain[matches]["similarity"], abs=1e-5)


def test_a_store_of_the_training_rows_is_not_read_by_an_evaluation(files, tmp_path):
    data = data_of(files, "nowhere")
    (metrics,) = trainer_of(tmp_path).validate(module_of(files), datamodule=data)
    assert "val/recall_mean" in metrics


def test_a_text_that_a_store_lacks_is_a_bad_row(files, tmp_path):
    rows = read_table(files / "held_out.csv")
    changed = [(name, "a new text" if row == 3 else text) for row, (name, text) in enumerate(rows)]
    write_table(files / "moved/changed.csv", changed)
    stores = {"validation": f"{files}/stores/held_out"}
    data = data_of(files / "moved", stores, validation=f"{files}/moved/changed.csv", max_bad_share=0.2)
    trainer_of(tmp_path).validate(module_of(files), datamodule=data)
    assert data.account("validation").causes == {"caption not in the store": 1}


def refused(files, tmp_path, stage, store, module=None, **options):
    split = {"validate": "validation", "fit": "validation"}.get(stage, stage)
    data = data_of(files, {split: str(store)}, **options)
    run_stage = getattr(trainer_of(tmp_path, max_steps=1, enable_checkpointing=False), stage)
    with pytest.raises(UserError) as raised:
        run_stage(module or module_of(files), datamodule=data)
    return str(raised.value)


def test_stores_that_do_not_fit_an_evaluation_are_refused_in_a_sentence(files, tmp_path):
    held_out = files / "stores/held_out"
    pairs = files / "stores/pairs"
    assert "Expected a store of the 9 rows of data.validation, got" in refused(files, tmp_path, "validate", pairs)
    assert embed(files, "held_out", tmp_path / "views", "--views=2").status == 0
    assert "got 2 augmented views of each image" in refused(files, tmp_path, "test", tmp_path / "views")
    assert "got none locked" in refused(files, tmp_path, "fit", held_out)
    write_published(tmp_path / "model", seed=8)
    other = module_of(tmp_path)
    for stage in ("validate", "test", "predict"):
        assert "Expected a store of this image tower" in refused(files, tmp_path, stage, held_out, other)
    sentence = refused(files, tmp_path, "predict", held_out, image_size=16)
    assert "Expected images prepared as for the plain views of the store" in sentence
    with pytest.raises(UserError, match=r"Expected train, .*, predict in data\.store, got 'held_out'"):
        data_of(files, {"held_out": str(held_out)})


def evaluated(files, tables, stores, tmp_path):
    trainer = rank_trainer("ddp", default_root_dir=str(tmp_path))
    (metrics,) = trainer.validate(
        module_of(files), datamodule=data_of(tables, stores, eval_batch_size=5), verbose=False
    )
    return json.dumps(metrics)


def test_two_processes_measure_what_one_does(files, tmp_path):
    """With 8 images in batches of 5 and two processes, one of them also has an empty batch."""
    (plain,) = trainer_of(tmp_path).validate(module_of(files), datamodule=data_of(files))
    stores = {"validation": f"{files}/stores/held_out"}
    for metrics in run_distributed(evaluated, files, files / "moved", stores, tmp_path):
        assert json.loads(metrics) == pytest.approx(plain)
