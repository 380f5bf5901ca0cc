"""A run that goes on with another number of processes, against the uninterrupted one."""

import json
from pathlib import Path

import pytest
import torch

from support.data.images import draw_image, encoded
from support.data.small_files import Files
from support.methods.albef import SIZES
from support.methods.methods import METHODS
from support.runs.distributed import run_distributed
from support.runs.elastic import STOP, train, train_several
from support.runs.forked import VLIGHTNING, run_ranks, run_script

ROOT = Path(__file__).resolve().parents[3]
CPU = ("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.limit_val_batches=0")
STRATEGIES = {"albef": ("ddp", "sharded")}


@pytest.mark.parametrize("method", METHODS)
def test_a_run_goes_on_with_more_or_fewer_processes_as_if_it_had_not_stopped(method, tmp_path, caplog, recwarn):
    prepared = METHODS[method].prepare(tmp_path)
    strategies = STRATEGIES.get(method, ("ddp",))
    whole = train("one", method, prepared, tmp_path, tmp_path / "one.ckpt")
    jobs = [
        (kind, method, prepared, tmp_path, *paths)
        for kind in strategies
        for paths in ((tmp_path / f"{kind}.ckpt",), (None, tmp_path / "one.ckpt"))
    ]
    ranks = run_distributed(train_several, jobs)
    for number, job in enumerate(jobs):
        start = 0 if len(job) == 5 else STOP
        halves = [rank[number] for rank in ranks]
        assert_same(halves[0], whole)
        samples = [first + second for first, second in zip(*(half["samples"] for half in halves), strict=True)]
        assert samples == whole["samples"][start:]
    for kind in strategies:
        caplog.clear()
        with caplog.at_level("INFO"):
            resumed = train("one", method, prepared, tmp_path, None, tmp_path / f"{kind}.ckpt")
        assert_same(resumed, whole)
        assert resumed["samples"] == whole["samples"][STOP:]
        assert "2 processes before, 1 now: the run goes on with the same batches and draws." in caplog.text
    assert not [warning for warning in recwarn if "not exactly" in str(warning.message)]


def assert_same(found, expected):
    for part in ("state", "moments"):
        assert found[part].keys() == expected[part].keys()
        for name, value in expected[part].items():
            torch.testing.assert_close(
                found[part][name], value, rtol=1e-6, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
            )


def write_files(folder):
    """A folder of images with captions."""
    folder.mkdir()
    lines = []
    for number in range(24):
        draw_image(number).save(folder / f"{number}.png")
        lines.append(json.dumps({"file_name": f"{number}.png", "caption": [f"image {number}", f"tint {number % 5}"]}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def write_shards(folder):
    """Three weighted sources of a stream: tar files, Parquet and JSON lines."""
    folder.mkdir()
    files = Files(folder)
    images = [encoded(draw_image(number)) for number in range(24)]
    for shard in range(3):
        members = [[(f"{n}.png", images[n]), (f"{n}.txt", b"a text")] for n in range(shard * 5, shard * 5 + 5)]
        files.tar([member for pair in members for member in pair], f"{shard}.tar")
    paths = files.images(7)
    listed = files.json([{"image": path, "caption": f"listed {path}"} for path in paths], "listed.jsonl")
    return [
        {"path": f"{folder}/*.tar", "weight": 2.0},
        files.parquet(6),
        {"path": listed, "weight": 1.0},
    ]


STREAM = {"streaming": True, "samples_per_epoch": 40, "shuffle_block": 16}


@pytest.mark.parametrize(("write", "options"), [(write_files, {}), (write_shards, STREAM)], ids=["files", "stream"])
def test_the_command_line_goes_on_in_one_process_where_two_were_stopped(tmp_path, write, options):
    sizes = {f"{group}.{name}": value for group, fields in SIZES.items() for name, value in fields.items()}
    own = {"contrast.negative_rows": 2, "text.dropout": 0.0, "vision.image_size": 16, "text.vocab_size": 200}
    data = {"train": json.dumps(source) if isinstance(source := write(tmp_path / "data"), list) else source}
    data |= {"global_batch_size": 8, "num_workers": 0, "max_tokens": 16, **options}
    every = {"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}"}
    words = (
        "--config",
        ROOT / "configs/strategy/ddp.yaml",
        "--model=ALBEFModule",
        "--data=ImageTextDataModule",
        *(f"--model.{name}={value}" for name, value in (sizes | own).items()),
        *(f"--data.{name}={value}" for name, value in (data | {"vocab_size": 200}).items()),
        *(f"--last_checkpoint.{name}={value}" for name, value in every.items()),
        *("--trainer.devices=2", "--trainer.max_steps=3", "--trainer.precision=64-true"),
    )
    for done in run_ranks([VLIGHTNING, "fit", *words, *CPU], cwd=tmp_path):
        assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = tmp_path.glob("runs/**/checkpoints")
    assert {path.name for path in folder.iterdir()} == {f"step={step}.ckpt" for step in (1, 2, 3)}
    resumed = run_script(
        [VLIGHTNING, "fit", "--ckpt_path", folder / "step=2.ckpt", "--last_checkpoint.filename=resumed", *CPU],
        cwd=tmp_path,
    )
    said = resumed.stdout + resumed.stderr
    assert resumed.returncode == 0, said
    assert "2 processes before, 1 now: the run goes on with the same batches and draws." in said
    (last,) = tmp_path.glob("runs/**/checkpoints/resumed.ckpt")
    found, expected = (torch.load(path, weights_only=True)["state_dict"] for path in (last, folder / "step=3.ckpt"))
    before = torch.load(folder / "step=2.ckpt", weights_only=True)["state_dict"]
    assert_same({"state": found, "moments": {}}, {"state": expected, "moments": {}})
    assert not torch.equal(before["temperature"], expected["temperature"])
