"""Streamed splits: exact continuation, evaluation without duplicates."""

import contextlib
import itertools

import lightning.pytorch as pl
import pytest
import torch

from support.data.images import draw_image, encoded
from support.data.streams import AnyCaption, indices, outcomes, read, size_of
from vlightning.common.errors import UserError
from vlightning.datamodules.pairs.samples import EvaluationReader
from vlightning.datamodules.pairs.streams import StreamedEvaluationSet
from vlightning.datamodules.reading.open import Opening
from vlightning.datamodules.reading.stream import Stream


@pytest.fixture
def stream(files):
    def make(rows_per_shard, captions=None, ids=None):
        number = 0
        for shard, rows in enumerate(rows_per_shard):
            members = []
            for _ in range(rows):
                members.append((f"{number:03}.png", encoded(draw_image(number, (16, 16)))))
                caption = captions[number] if captions else f"caption {number}"
                identity = f', "image_id": {ids[number]}' if ids else ""
                members.append((f"{number:03}.json", f'{{"caption": "{caption}"{identity}}}'.encode()))
                number += 1
            files.tar(members, f"{shard:02}.tar")
        opening = Opening(None, "image", "caption", None, None)
        return Stream([opening.open(str(files.folder / "*.tar"), "train", streaming=True)], 10**6)

    return make


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def _reader():
    return EvaluationReader(size_of, AnyCaption(), seed=0, need_captions=True)


def test_an_epoch_has_its_batches_and_reads_no_row_twice_in_a_pass(stream):
    rows = stream([10, 10, 10, 10])
    batches = read(rows, batches=10)
    assert [len(batch) for batch in batches] == [4] * 10
    assert len(set(flat(batches))) == 40


def test_skipped_rows_are_not_decoded(stream, monkeypatch):
    rows = stream([10, 10, 10])
    decoded = []
    decoder = rows.decoder
    monkeypatch.setattr(rows, "decoder", lambda item: decoded.append(item.sample_index) or decoder(item))
    last = read(rows, done=5)
    assert decoded == last[0]


def test_unusable_rows_are_replaced_from_their_shard(stream):
    captions = ["" if number == 3 else f"caption {number}" for number in range(20)]
    rows = stream([10, 10], captions=captions)
    found = flat([*outcomes(rows, batches=5), *outcomes(rows, batches=5, epoch=1)])
    faults = [fault for outcome in found for fault in outcome.faults]
    assert faults
    assert all(fault.cause == "empty caption" and "shard 0, row 3" in fault.name for fault in faults)
    assert all(outcome.sample.sample_index != 3 for outcome in found)
    replaced = [outcome.sample.sample_index for outcome in found if outcome.faults]
    assert all(index < 10 for index in replaced)
    assert indices(flat(outcomes(rows, batches=5))) == indices(found[:20])
    assert sum(map(len, read(rows, batches=5))) == 20


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("shards", [[11], [4, 5, 8], [12]])
def test_evaluation_reads_every_image_once_in_equally_many_batches(stream, replicas, shards):
    rows = stream(shards)
    parts = [
        [indices(batch) for batch in StreamedEvaluationSet(rows, _reader(), 2, (replicas, rank))]
        for rank in range(replicas)
    ]
    everything = sorted(flat(flat(parts)))
    assert everything == [item.sample_index for item in rows.all_rows()]
    assert len({len(part) for part in parts}) == 1
    assert all(1 <= len(batch) <= 3 for part in parts for batch in part)


def test_neighbouring_rows_of_one_image_are_one_item(stream):
    rows = stream([4, 2], ids=[5, 5, 6, 7, 7, 7])
    outcomes = [o for batch in StreamedEvaluationSet(rows, _reader(), 2, (1, 0)) for o in batch]
    assert [(o.sample.image_id, len(o.sample.captions)) for o in outcomes] == [(5, 2), (6, 1), (7, 3)]


def test_scattered_rows_of_one_image_are_an_error(stream):
    rows = stream([4], ids=[5, 6, 5, 7])
    with pytest.raises(UserError, match=r"got the image id '5' again in .* row 2"):
        list(StreamedEvaluationSet(rows, _reader(), 2, (1, 0)))


class Recorder(pl.LightningModule):
    def __init__(self, kill_at=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen, self.validated, self.kill_at = [], [], kill_at

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        self.seen.append((batch["sample_index"].tolist(), batch["image"].double().sum().item()))
        if len(self.seen) == self.kill_at:
            raise InterruptedError
        return self.weight.sum()

    def validation_step(self, batch, batch_idx):
        self.validated += batch["sample_index"].tolist()


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_a_streamed_run_resumes_exactly(files, module, tmp_path, kind):
    if kind == "parquet":
        files.parquet(9, "a.parquet")
        files.parquet(8, "b.parquet")
        source = str(files.folder / "*.parquet")
    else:
        source = files.json([{"image": path, "caption": "text"} for path in files.images(17)])

    def run(folder, recorder, ckpt_path=None, **options):
        data = module(
            train=source,
            validation=source,
            streaming=True,
            samples_per_epoch=17,
            num_workers=2,
            shuffle_block=4,
            seed=1,
        )
        trainer = pl.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            num_sanity_val_steps=0,
            enable_model_summary=False,
            **options,
            callbacks=[pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)],
        )
        with contextlib.suppress(InterruptedError):
            trainer.fit(recorder, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
        return recorder

    whole = run(tmp_path / "whole", Recorder())
    assert len(whole.seen) == 8
    assert len(whole.validated) == len(set(whole.validated)) * 2 == 34
    run(tmp_path / "killed", Recorder(kill_at=7), limit_val_batches=0)
    for step in (3, 6):
        saved = tmp_path / "killed" / f"step={step}.ckpt"
        resumed = run(tmp_path / f"resumed{step}", Recorder(), saved, limit_val_batches=0)
        assert resumed.seen == whole.seen[step:]


def test_streaming_without_samples_per_epoch_is_an_error(module):
    with pytest.raises(UserError, match=r"Expected data.samples_per_epoch with data.streaming"):
        module(train="x.parquet", streaming=True)


def test_streams_are_checked_before_training(files, module):
    source = files.json([{"image": "gone.png", "caption": "x"}] * 3)
    data = module(train=source, streaming=True, samples_per_epoch=8)
    with pytest.raises(UserError, match=r"no usable row among the first 3 \(missing file: 3, for example .*gone.png"):
        data.setup("fit")
    data = module(train=files.json([], "empty.json"), streaming=True, samples_per_epoch=8)
    with pytest.raises(UserError, match="Expected rows in the train split"):
        data.setup("fit")
    data = module(
        train=files.parquet(2, captions=["a", "b"]), caption_column="text", streaming=True, samples_per_epoch=8
    )
    with pytest.raises(UserError, match="the column 'text'"):
        data.setup("fit")


def test_several_streamed_sources_are_one_stream(files, module):
    paths = files.images(3)
    listed = files.json([{"image": path, "caption": "listed"} for path in paths])
    data = module(train=[files.parquet(5), listed], streaming=True, samples_per_epoch=8, shuffle_block=8)
    data.setup("fit")
    batches = list(data.train_dataloader())
    assert len({index for batch in batches for index in batch["sample_index"].tolist()}) == 8
