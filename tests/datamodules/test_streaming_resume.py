"""A streamed run goes on exactly where it was, with any number of processes and workers, and reads little again."""

import gzip
import io
import itertools
import math
from collections import Counter

import datasets
import numpy as np
import pytest
import torch
from lightning import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from torch import nn

from support.data.images import draw_image, encoded
from support.data.streams import global_batches, indices, outcomes
from support.methods.tiny_modules import trainer
from support.runs.loader_workers import read_by_loader
from vlightning.callbacks import AtomicCheckpointIO
from vlightning.common.errors import UserError
from vlightning.datamodules import ImageTextDataModule
from vlightning.datamodules.reading import parquet, remote
from vlightning.datamodules.reading.open import Opening
from vlightning.datamodules.reading.stream import Stream
from vlightning.datamodules.reading.tar_records import TarSource
from vlightning.datamodules.streams.order import StreamOrder

BLOCK, GLOBAL_BATCH, SEED, EPOCH = 5, 12, 7, 2


def members(start, count, size=(6, 6)):
    for number in range(start, start + count):
        yield f"{number:04}.png", encoded(draw_image(number, size))
        yield f"{number:04}.txt", f"caption {number}".encode()


def tars(files, counts):
    for shard, count in enumerate(counts):
        files.tar(list(members(100 * shard, count)), f"{shard:02}.tar")
    return [str(files.folder / "*.tar")]


def compressed_tars(files, counts):
    (source,) = tars(files, counts)
    for path in files.folder.glob("*.tar"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    return [source]


def parquets(files, counts):
    for shard, count in enumerate(counts):
        files.parquet(count, f"{shard:02}.parquet")
        table = datasets.Dataset.from_parquet(str(files.folder / f"{shard:02}.parquet"), cache_dir=str(files.folder))
        table.to_parquet(files.folder / f"{shard:02}.parquet", batch_size=4)  # row groups of four
    return [str(files.folder / "*.parquet")]


def lists(files, counts):
    paths = files.images(max(counts))
    return [
        files.json([{"image": path, "caption": "text"} for path in paths[:count]], f"{shard}.json")
        for shard, count in enumerate(counts)
    ]


def mixed(files, counts):
    return [*tars(files, counts[:-1]), *lists(files, counts[-1:])]


def opened(sources):
    opening = Opening(None, "image", "caption", None, None)
    return Stream([opening.open(source, "train", streaming=True) for source in sources], 10**6)


def training(stream, done, batches, processes=1, block=BLOCK):
    """The rows of the global batches that are left, read by a number of processes."""
    options = {"done": done, "batches": batches, "block": block, "seed": SEED, "epoch": EPOCH}
    return global_batches(stream, processes, GLOBAL_BATCH, **options)


@pytest.mark.parametrize("counts", [[8, 6, 12, 4, 3], [22, 3]], ids=["many", "few"])
@pytest.mark.parametrize("kind", [tars, parquets, lists, mixed, compressed_tars])
def test_any_number_of_processes_goes_on_at_every_step(files, kind, counts):
    stream = opened(kind(files, counts))
    batches = 9  # more than a pass
    whole = training(stream, 0, batches)
    read_rows = Counter(row for batch in whole for row in batch)
    assert set(read_rows.values()) <= set(range(1, 2 + batches * GLOBAL_BATCH // sum(counts)))
    assert set(read_rows) == {shard << 32 | row for shard, count in enumerate(counts) for row in range(count)}
    for processes in (1, 2, 3, 4):
        for done in range(0, batches + 1, 1 if kind is tars else 4):
            assert training(stream, done, batches, processes) == whole[done:], (processes, done)


@pytest.mark.parametrize("kind", [tars, parquets])
def test_loader_workers_read_the_same_batches(files, kind):
    stream = opened(kind(files, [8, 6, 12, 4, 3]))
    whole = training(stream, 0, 5)
    for processes, rank, workers, done in ((1, 0, 1, 0), (2, 1, 3, 2), (1, 0, 2, 4)):
        size = GLOBAL_BATCH // processes
        options = {"done": done, "batches": 5, "block": BLOCK, "seed": SEED, "epoch": EPOCH, "batch_size": size}
        part = read_by_loader(stream, workers, replicas=(processes, rank), **options)
        assert part == [batch[rank * size : (rank + 1) * size] for batch in whole[done:]]


def test_an_epoch_reads_each_row_once_and_each_source_as_often_as_it_weighs(files):
    tar, parquet_files = tars(files, [6, 4])[0], parquets(files, [9, 7])[0]
    listed = files.json([{"image": path, "caption": "text"} for path in files.images(6)], "list.json")
    sources = [{"path": tar, "weight": 2.0}, {"path": parquet_files, "weight": 0.5}, listed]
    stream = opened(sources)
    entries = StreamOrder(stream, SEED, EPOCH, 5, GLOBAL_BATCH, BLOCK).entries(0)
    total = sum(stream.count(entry.shard) for entry in entries)
    whole = training(stream, 0, total // GLOBAL_BATCH)
    times = Counter(row >> 32 for batch in whole for row in batch)
    assert sum(times.values()) == total // GLOBAL_BATCH * GLOBAL_BATCH > total - GLOBAL_BATCH
    chosen = Counter(entry.shard for entry in entries)
    assert all(times[shard] <= chosen[shard] * stream.count(shard) for shard in times)
    for processes in (2, 3, 4):
        for done in range(len(whole)):
            assert training(stream, done, len(whole), processes) == whole[done:]


def test_samples_are_those_of_a_whole_reading_whatever_else_is_in_a_shard(files):
    whole = [
        ("0.cls", b"7"),  # no sample: neither an image nor a caption
        ("1.png", encoded(draw_image(1))),
        ("1.npz", b"something else"),
        ("1.txt", b"one"),
        ("2.npz", b"no sample"),
        ("1.txt", b"a sample of its own"),
        ("folder/1.PNG", encoded(draw_image(2))),
        ("folder/1.caption", b"taken"),
        ("no_ending", b""),
        (f"{'long' * 40}/3.png", encoded(draw_image(3))),  # its name has a header of its own
        ("4.json", b'{"caption": ["a", "b"], "image_id": 5}'),
    ]
    source = TarSource([files.tar(whole)], "caption", None, files.folder / "cache")
    every = list(source.rows(0))
    assert [row["caption"] for row in every] == [["one"], ["a sample of its own"], ["taken"], [], ["a", "b"]]
    assert source.count(0) == 5
    for start in range(7):
        assert list(source.rows(0, start)) == every[start:]
        for stop in range(start, 7):
            assert list(source.rows(0, start, stop)) == every[start:stop]


class Counted(io.FileIO):
    """A file that counts the bytes read from all of its kind."""

    total = 0

    def read(self, size=-1):
        content = super().read(size)
        Counted.total += len(content)
        return content


def test_what_a_tar_file_holds_before_the_position_is_not_read(files, monkeypatch, started):
    counts = [200, 200, 200]
    noise = [np.random.default_rng(number).integers(0, 256, (60, 60, 3), dtype=np.uint8) for number in range(8)]
    images = [encoded(Image.fromarray(pixels), "BMP") for pixels in noise]
    for shard, count in enumerate(counts):
        parts = [(f"{row:04}.bmp", images[row % 8]) for row in range(count)]
        texts = [(f"{row:04}.txt", b"caption") for row in range(count)]
        files.tar([member for pair in zip(parts, texts, strict=True) for member in pair], f"{shard}.tar")
    sample = 1536 + 512 * -(-len(images[0]) // 512)  # bytes: two headers, the caption and the image, in full blocks
    monkeypatch.setattr(remote, "open", Counted, raising=False)

    def cost(done, replicas=(1, 0)):
        Counted.total = 0
        stream = opened([str(files.folder / "*.tar")])
        options = {"done": done, "batches": 98, "block": BLOCK, "seed": SEED, "epoch": EPOCH, "replicas": replicas}
        list(itertools.islice(outcomes(stream, batch_size=6 // replicas[0], **options), 1))
        for thread in started.threads("stream-"):
            thread.join()
        return Counted.total

    headers = cost(90) - cost(90)
    assert 0 < headers <= 3 * 402 * 9000  # once, then they are in the cache; a disk is read by 8 kB
    depth = 4
    for replicas in ((1, 0), (3, 1)):
        costs = {done: cost(done, replicas) for done in (1, 30, 50, 90)}
        assert max(costs.values()) <= 2 * depth * 6 // replicas[0] * (sample + 512), costs  # two blocks
    assert cost(0) >= depth * 6 * (sample - 1024)  # so it is counted at all


def test_what_a_parquet_file_holds_before_the_row_group_is_not_read(files, monkeypatch, started):
    stream = opened(parquets(files, [40, 60, 50]))
    rows = []
    whole = parquet._rows

    def counting(*arguments):
        for row in whole(*arguments):
            rows.append(row)
            yield row

    monkeypatch.setattr(parquet, "_rows", counting)
    for done in (1, 15, 30, 60):  # the last one in the second pass
        rows.clear()
        list(itertools.islice(outcomes(stream, done=done, batches=100, block=BLOCK, batch_size=2), 1))
        for thread in started.threads("stream-"):
            thread.join()
        assert 2 <= len(rows) <= 2 * 4 * 2, done  # two blocks of four batches


def test_rows_that_nobody_has_counted_are_read_but_not_decoded(files, monkeypatch):
    stream = opened(lists(files, [40]))
    decoded = []
    decoder = stream.decoder
    monkeypatch.setattr(stream, "decoder", lambda item: decoded.append(item.sample_index) or decoder(item))
    (batch,) = outcomes(stream, done=9, batches=10)
    assert decoded == indices(batch)


def test_a_folder_saved_by_datasets_is_streamed(files, module):
    source = str(files.folder / "saved")
    datasets.Dataset.from_parquet(files.parquet(10), cache_dir=str(files.folder)).save_to_disk(source)
    data = module(train=source, streaming=True, samples_per_epoch=8)
    data.setup("fit")
    seen = [row for batch in data.train_dataloader() for row in batch["sample_index"].tolist()]
    assert len(set(seen)) == 8


@pytest.mark.parametrize("percent", [10, 30, 50])
def test_an_epoch_of_a_share_of_the_rows_reads_that_share_once(files, percent):
    data = ImageTextDataModule(
        train=tars(files, (20, 20, 20)),
        streaming=True,
        samples_per_epoch=60 * percent // 100,
        batch_size=2,
        num_workers=0,
        seed=SEED,
        image_size=8,
        shuffle_block=BLOCK,
        tokenizer="clip",
        vocab_size=49408,
        max_tokens=8,
    )
    data.setup("fit")
    loader = data.train_dataloader()
    read_rows = [int(index) for batch in loader for index in batch["sample_index"]]
    assert len(loader) == 60 * percent // 100 // 2
    assert len(read_rows) == len(set(read_rows)) == 60 * percent // 100


class Mean(LightningModule):
    """Has one weight, and keeps the rows of its batches."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.rows = []

    def training_step(self, batch, batch_idx):
        self.rows.append(batch["sample_index"].tolist())
        return self.layer(batch["image"].mean()[None, None]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def run_on_stream(files, module, resume=None, **changes):
    data = module(
        train=str(files.folder / "*.tar"),
        **{"streaming": True, "samples_per_epoch": 24, "batch_size": 4, "num_workers": 0, "shuffle_block": 5} | changes,
    )
    model = Mean()
    kept = ModelCheckpoint(files.folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer(kept, enable_checkpointing=True, plugins=[AtomicCheckpointIO()]).fit(model, data, ckpt_path=resume)
    return model.rows


def test_a_stream_in_another_order_is_refused(files, module):
    tars(files, [8, 8, 8])
    whole = run_on_stream(files, module)
    checkpoint = files.folder / "step=2.ckpt"
    for workers in (1, 3):
        assert run_on_stream(files, module, checkpoint, num_workers=workers) == whole[2:]
    changes = {
        "samples_per_epoch": (20, "data.samples_per_epoch 20 instead of 24"),
        "batch_size": (8, "global batch 8 instead of 4"),
        "shuffle_block": (6, "data.shuffle_block 6 instead of 5"),
    }
    for name, (value, sentence) in changes.items():
        with pytest.raises(UserError, match=f"^Expected a stream in the order of .* got {sentence}, with"):
            run_on_stream(files, module, checkpoint, **{name: value})
    files.tar(list(members(900, 8)), "09.tar")
    with pytest.raises(UserError, match=r"got shards \[4\] instead of \[3\]"):
        run_on_stream(files, module, checkpoint)


def test_a_stream_goes_on_with_another_number_of_processes_and_the_same_global_batch(files, module):
    tars(files, [8, 8, 8])
    data = module(train=str(files.folder / "*.tar"), streaming=True, samples_per_epoch=24)
    data.setup("fit")
    state = data.state_dict()
    state["processes"] = 2
    data.load_state_dict(state)
    assert data.by_process() == []
    state["stream"] |= {"global batch": 8}
    with pytest.raises(UserError, match=r"global batch 4 instead of 8.*data\.global_batch_size"):
        data.load_state_dict(state)


def test_a_checkpoint_of_a_stream_divided_among_workers_is_refused(files, module):
    tars(files, [8, 8, 8])
    data = module(train=str(files.folder / "*.tar"), streaming=True, samples_per_epoch=24)
    data.setup("fit")
    state = data.state_dict()
    state["stream"] = {"data.num_workers": 1, "processes": 1, "data.batch_size": 4, "shards": [3]}
    with pytest.raises(UserError, match=r"^Expected a checkpoint whose stream has .* got one of an earlier release"):
        data.load_state_dict(state)


def test_a_mixture_at_a_temperature_is_streamed(files, module):
    tars(files, [8, 8, 8])
    (few,) = lists(files, [4])
    options = {
        "train": [str(files.folder / "*.tar"), few],
        "streaming": True,
        "samples_per_epoch": 28,
        "mixing_temperature": math.inf,
    }
    data = module(**options)
    data.setup("fit")
    whole = [batch["sample_index"].tolist() for batch in data.train_dataloader()]
    sources = Counter(row >> 32 == 3 for batch in whole for row in batch)
    assert sources == {False: 14, True: 14}
    with pytest.raises(UserError, match=r"weights of the training sources or data\.mixing_temperature"):
        module(**options | {"train": [{"path": few, "weight": 2.0}, options["train"][0]]}).setup("fit")
