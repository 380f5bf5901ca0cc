"""The loader of streams in a project of its own."""

import itertools
import runpy
from pathlib import Path

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from support.data.images import draw_image, encoded
from support.methods.tiny_modules import trainer
from support.runs.distributed import rank_trainer, run_distributed
from vlightning.common.errors import UserError
from vlightning.datamodules.streams import stream_loader

PROJECT = Path(__file__).with_name("project.py")


class Seen(Callback):
    def __init__(self):
        self.batches = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch)


@pytest.fixture
def sources(files):
    for shard in range(3):
        rows = range(shard * 7, shard * 7 + 7)
        # One row of 33 is bad: more would be too large a share of the few rows of a process.
        texts = {n: b"" if n == 10 else b"x" * (n % 5 + 1) for n in rows}
        members = [[(f"{n:03}.png", encoded(draw_image(n, (20, 20)))), (f"{n:03}.txt", texts[n])] for n in rows]
        files.tar(list(itertools.chain.from_iterable(members)), f"{shard}.tar")
    return [str(files.folder / "*.tar"), {"path": files.parquet(6), "weight": 2.0}]


def fitted(sources, resume=None, workers=0, folder=None, kind="one", own=None):
    """The batches and the state of a training of two epochs of the project."""
    torch.manual_seed(0)
    module = runpy.run_path(str(PROJECT))["Project"](sources, workers)
    seen = Seen()
    callbacks = [seen]
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1))
    options = {"max_epochs": 2, "enable_checkpointing": folder is not None}
    run = trainer(*callbacks, **options) if kind == "one" else rank_trainer(kind, callbacks=callbacks, **options)
    run.fit(module, ckpt_path=resume, weights_only=True)
    return seen.batches, module.state_dict()


def test_a_project_resumes_at_every_step_with_any_workers(sources, tmp_path):
    batches, state = fitted(sources, folder=tmp_path / "whole")
    assert len(batches) == 10
    for step in range(1, 10):
        left, found = fitted(sources, tmp_path / "whole" / f"step={step}.ckpt", workers=2 * (step == 3))
        assert len(left) == 10 - step
        for one, other in zip(left, batches[step:], strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
        assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_project_goes_on_in_two_processes(sources, tmp_path):
    batches, _ = fitted(sources, folder=tmp_path / "whole")
    checkpoint = tmp_path / "whole" / "step=3.ckpt"
    ranks = run_distributed(fitted, sources, checkpoint, 0, None, "ddp")
    for first, second, whole in zip(ranks[0][0], ranks[1][0], batches[3:], strict=True):
        assert all(torch.equal(torch.cat([first[name], second[name]]), whole[name]) for name in whole)


def test_bad_rows_are_replaced_and_another_order_is_refused(sources, tmp_path):
    torch.manual_seed(0)
    loader = stream_loader(
        sources,
        runpy.run_path(str(PROJECT))["prepare"],
        global_batch_size=4,
        samples_per_epoch=32,
        max_bad_share=0.5,
    )
    for batch in loader:
        assert len(batch["index"]) == 4
    assert loader.account.causes.total() > 0
    other = stream_loader(sources, print, global_batch_size=5, samples_per_epoch=32)
    with pytest.raises(UserError, match=r"^Expected a stream in the order of .* got global batch 5 instead of 4"):
        other.load_state_dict(loader.state_dict())
