import errno
import json
import os
import shutil
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from lightning import Callback, Trainer

from support.data.images import draw_image, encoded
from support.methods import reinforcement
from support.methods.reinforcement import ROWS, Embeds, predict, write_pairs
from support.runs.distributed import rank_trainer, run_distributed
from support.runs.forked import run_script
from vlightning.callbacks import ReinforcementWriter
from vlightning.common.errors import UserError
from vlightning.datamodules import ReinforcedImageTextDataModule
from vlightning.datamodules.reading.shards import Shards, find_shards
from vlightning.datamodules.reinforced.writer import ShardFile

NAMES = ["00000000.index.json", "00000000.tar", "00000001.index.json", "00000001.tar"]
NAMES += ["00000002.index.json", "00000002.tar", "manifest.json"]


@pytest.fixture
def pairs(tmp_path):
    return write_pairs(tmp_path / "pairs.parquet")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("0*")}


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def test_shards_and_manifest(pairs, tmp_path):
    predict(pairs, tmp_path / "out")
    assert names(tmp_path / "out") == NAMES
    shards = Shards(find_shards([str(tmp_path / "out")]), tmp_path / "cache")
    assert [shards.key(sample) for sample in range(len(shards))] == [f"{row:010d}" for row in range(ROWS)]
    said = manifest(tmp_path / "out")
    assert said["complete"] is True
    assert (said["shards"], said["samples"], said["left_out"]) == (3, ROWS, {})
    assert said["self_check"]["samples"] == 4
    assert said["self_check"]["least_cosine"] > 0.99999
    assert said["augmentation"]["per_image"] == 3
    assert [teacher["width"] for teacher in said["teachers"]] == [4, 6]
    assert said["software"]["torch"] == torch.__version__.partition("+")[0]


def test_embeddings_are_stored_with_their_sample(pairs, tmp_path):
    predict(pairs, tmp_path / "out", embeddings="npz")
    student = ReinforcedImageTextDataModule(
        str(tmp_path / "out"), batch_size=ROWS, num_workers=0, image_size=16, cache_dir=str(tmp_path)
    )
    student.setup("fit")
    (batch,) = student.train_dataloader()
    for row, text in zip(batch["sample_index"].tolist(), batch["teacher_text"], strict=True):
        letters = torch.tensor([list(f"image number {row}".encode())[:10]]) / 255
        assert torch.equal(text, reinforcement.unit(letters)[0])


def test_predictions_are_not_kept(pairs, tmp_path):
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[ReinforcementWriter(0)])
    assert trainer.predict(Embeds(), reinforcement.reinforcement_data(pairs, tmp_path / "out")) is None


@pytest.mark.parametrize("kill", ["batch", "index", "rename"])
def test_a_killed_run_resumes_without_loss_or_repetition(pairs, tmp_path, kill):
    predict(pairs, tmp_path / "whole")
    environment = os.environ | {"PYTHONPATH": str(Path(reinforcement.__file__).parents[1])}
    died = run_script([reinforcement.__file__, tmp_path / "killed", pairs, "--kill", kill], env=environment)
    assert died.returncode == -9, died.stderr[-3000:]
    found = names(tmp_path / "killed")
    assert [name for name in found if name.endswith(".tar") and not name.startswith(".")] == ["00000000.tar"]
    assert any(name.startswith(".incomplete-") for name in found)
    assert manifest(tmp_path / "killed")["complete"] is False
    module = predict(pairs, tmp_path / "killed")
    assert module.steps == 2 + 1 + 4  # batches of the two shards that were missing, and the check's
    assert names(tmp_path / "killed") == NAMES
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert manifest(tmp_path / "killed") == manifest(tmp_path / "whole")


class RunsAnother(Callback):
    """Runs a second prediction into the same folder while the first one is writing its second shard."""

    def __init__(self, pairs):
        self.pairs = pairs
        self.unfinished = []

    def on_predict_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 3:
            folder = trainer.datamodule.folder
            while not (folder / "00000000.tar").is_file() or not list(folder.glob(".incomplete-*")):
                time.sleep(0.01)  # for the writing thread
            self.unfinished = list(folder.glob(".incomplete-*"))
            predict(self.pairs, folder)
            assert all(file.exists() for file in self.unfinished)


def test_two_runs_may_write_into_one_folder(pairs, tmp_path):
    predict(pairs, tmp_path / "whole")
    predict(pairs, tmp_path / "out", callbacks=[another := RunsAnother(pairs)])
    assert another.unfinished
    assert names(tmp_path / "out") == NAMES
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert manifest(tmp_path / "out") == manifest(tmp_path / "whole")


def test_a_run_on_a_complete_folder_only_checks(pairs, tmp_path):
    predict(pairs, tmp_path / "out")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("0*")}
    module = predict(pairs, tmp_path / "out")
    assert module.steps == 1 + 4  # a batch of nothing
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("0*")} == before
    assert manifest(tmp_path / "out")["complete"] is True


def test_a_limited_run_leaves_complete_shards_only(pairs, tmp_path):
    limited = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        limit_predict_batches=3,
        callbacks=[ReinforcementWriter(4)],
    )
    with pytest.warns(UserWarning, match="2 of 3 shards are missing"):
        predict(pairs, tmp_path / "out", trainer=limited)
    assert names(tmp_path / "out") == ["00000000.index.json", "00000000.tar", "manifest.json"]
    assert manifest(tmp_path / "out")["complete"] is False
    predict(pairs, tmp_path / "out")
    assert names(tmp_path / "out") == NAMES


def test_omitted_rows_are_counted_by_cause_over_all_runs(tmp_path):
    bad = {
        1: {"image": {"bytes": encoded(draw_image(1), "JPEG")[:-40], "path": None}},
        2: {"caption": " "},
        9: {"caption": ""},
    }
    pairs = write_pairs(tmp_path / "pairs.parquet", replaced=bad)
    predict(pairs, tmp_path / "out", Embeds(leaves_out=(5,)))
    said = manifest(tmp_path / "out")
    assert said["samples"] == 6
    assert said["left_out"] == {"truncated": 1, "empty caption": 2, "embedding not finite": 1}
    index = json.loads((tmp_path / "out" / "00000000.index.json").read_text())
    assert index["keys"] == ["0000000000", "0000000003"]
    assert [(left["row"], left["cause"]) for left in index["examples"]] == [(1, "truncated"), (2, "empty caption")]
    (tmp_path / "out" / "00000001.tar").unlink()
    predict(pairs, tmp_path / "out", Embeds(leaves_out=(5,)))
    assert manifest(tmp_path / "out")["left_out"] == said["left_out"]


def test_a_shard_without_usable_rows_is_complete(tmp_path):
    pairs = write_pairs(tmp_path / "pairs.parquet", replaced={row: {"caption": ""} for row in range(4, 8)})
    predict(pairs, tmp_path / "out")
    assert manifest(tmp_path / "out")["samples"] == 6
    assert predict(pairs, tmp_path / "out").steps == 1 + 4


@pytest.mark.parametrize(("row", "turned"), [(0, 0.4), (7, 0.4), (7, float("nan"))])
def test_the_check_names_the_differing_embedding(pairs, tmp_path, row, turned):
    class Drifts(Embeds):
        """Returns other embeddings of a row the second time."""

        def predict_step(self, batch, batch_idx):
            again = len(batch["sample_index"]) == 1 and f" {row:010d}" in batch["originals"].pairs[0].name
            self.turned = turned if again else 0.0
            return super().predict_step(batch, batch_idx)

    with pytest.raises(
        UserError, match=rf"Expected a cosine .* for embedding \d of text by teacher \d .* {row:010d}: do not train"
    ):
        predict(pairs, tmp_path / "out", Drifts(), ReinforcementWriter(ROWS))
    assert manifest(tmp_path / "out")["complete"] is False


def test_the_check_reads_the_written_samples(pairs, tmp_path):
    predict(pairs, tmp_path / "out")
    shards = Shards([str(tmp_path / "out" / "00000000.tar")], tmp_path / "cache")
    samples = [shards.members(sample) for sample in range(4)]
    samples[1]["jpg"], samples[2]["jpg"] = samples[2]["jpg"], samples[1]["jpg"]
    with ShardFile(shards.files[0]) as shard:
        for sample, members in enumerate(samples):
            shard.add(shards.key(sample), members)
        shard.finish(left_out={})
    with pytest.raises(UserError, match=r"embedding . of image by teacher . .* 000000000[12]"):
        predict(pairs, tmp_path / "out", writer=ReinforcementWriter(ROWS))


def test_a_damaged_shard_is_named(pairs, tmp_path):
    predict(pairs, tmp_path / "out")
    damaged = tmp_path / "out" / "00000001.tar"
    size = damaged.stat().st_size
    damaged.write_bytes(b"x" * size)
    with pytest.raises(UserError, match=r"a readable tar file, got .*00000001\.tar'.*remove the shard"):
        predict(pairs, tmp_path / "out", writer=ReinforcementWriter(ROWS))


def test_other_settings_are_refused(pairs, tmp_path):
    predict(pairs, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(UserError, match=r"teachers\[0\]\.weights one, with which .* made, got other \(and 1 more\)"):
        predict(pairs, tmp_path / "out", Embeds(weights="other"))
    with pytest.raises(UserError, match=r"augmentation\.per_image 3, .* got 2"):
        predict(pairs, tmp_path / "out", augmentations=2)
    with pytest.raises(UserError, match=r"data\.shard_size 4, .* got 5"):
        predict(pairs, tmp_path / "out", shard_size=5)
    with pytest.raises(UserError, match=r"augmentation\.seed 5, .* got 6"):
        predict(pairs, tmp_path / "out", seed=6)
    assert contents(tmp_path / "out") == before
    assert manifest(tmp_path / "out")["complete"] is True


@pytest.mark.slow
def test_other_software_versions_warn(pairs, tmp_path):
    predict(pairs, tmp_path / "out")
    said = manifest(tmp_path / "out")
    said["software"]["pillow"] = "1.0"
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(said))
    with pytest.warns(UserWarning, match=r"other software: pillow 1\.0 \(now "):
        predict(pairs, tmp_path / "out")


def test_shards_without_a_manifest_are_refused(pairs, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "00000000.tar").write_bytes(b"")
    with pytest.raises(UserError, match=r"shards without a manifest\.json"):
        predict(pairs, tmp_path / "out")


def test_a_disk_that_is_too_small_is_reported_before_writing(pairs, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 0, 20_000))
    with pytest.raises(
        UserError, match=r"Expected room for 10 of 10 samples, about [\d.]+ KB .*, got 20 KB of free space"
    ):
        predict(pairs, tmp_path / "out")
    assert names(tmp_path / "out") == []


def test_an_error_of_the_writing_thread_ends_the_run(pairs, tmp_path, monkeypatch, started):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tarfile.TarFile.addfile", full)
    with pytest.raises(OSError, match="No space left"):
        predict(pairs, tmp_path / "out")
    assert names(tmp_path / "out") == ["manifest.json"]
    assert not started.threads("reinforcement-writer")


def test_another_datamodule_is_refused(tmp_path):
    class Nothing(Embeds):
        def predict_dataloader(self):
            return [[1]]

    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[ReinforcementWriter()])
    with pytest.raises(UserError, match="for ReinforcementWriter, got NoneType"):
        trainer.predict(Nothing())


def predict_on_a_rank(pairs, folder, turned):
    trainer = rank_trainer("ddp", callbacks=[ReinforcementWriter(4)])
    try:
        return predict(pairs, folder, Embeds(turned), trainer=trainer).steps
    except UserError as error:
        return str(error)


@pytest.mark.slow
def test_two_processes_write_the_files_of_one_process(pairs, tmp_path):
    predict(pairs, tmp_path / "one")
    steps = run_distributed(predict_on_a_rank, pairs, str(tmp_path / "two"), 0.0)
    assert steps == [2 + 1 + 4, 2]  # shards 0 and 2 and the check, shard 1
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert manifest(tmp_path / "two") == manifest(tmp_path / "one")


@pytest.mark.slow
def test_a_failed_check_ends_all_processes(pairs, tmp_path):
    predict(pairs, tmp_path / "two")
    failures = run_distributed(predict_on_a_rank, pairs, str(tmp_path / "two"), 0.5)
    assert len(failures) == 2
    assert all("between written and recomputed embeddings" in str(failure) for failure in failures)
