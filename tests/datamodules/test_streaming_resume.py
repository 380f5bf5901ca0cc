"""A streamed run goes on exactly where it was, and reads next to nothing of what came before."""

import gzip
import io
import itertools

import datasets
import numpy as np
import pytest
import torch
from lightning import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from torch import nn

from support.data.images import draw_image, encoded
from support.data.streams import indices, read
from support.methods.tiny_modules import trainer
from support.runs.loader_workers import read_by_loader
from vlightning.callbacks import AtomicCheckpointIO
from vlightning.common.errors import UserError
from vlightning.datamodules import ImageTextDataModule
from vlightning.datamodules.base.mixing import Mix
from vlightning.datamodules.base.sampling import block_order, shard_order
from vlightning.datamodules.pairs.streams import StreamedTrainingSet
from vlightning.datamodules.reading import parquet, remote
from vlightning.datamodules.reading.open import Opening
from vlightning.datamodules.reading.stream import Stream
from vlightning.datamodules.reading.tar_records import TarSource

BLOCK, BATCH, SEED, EPOCH = 5, 3, 7, 2


class Encoder:
    """Stands in for a TextEncoder where only usability is asked."""

    @staticmethod
    def usable(caption):
        return bool(caption)


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


def training(stream, done, batches, replicas=(1, 0), block=BLOCK):
    return StreamedTrainingSet(
        stream,
        lambda image: torch.zeros(1),
        Encoder(),
        SEED,
        BATCH,
        batches,
        block,
        replicas,
        (EPOCH, done),
    )


def expected(counts, batches, workers, replicas):
    """All batches of an epoch of one process."""
    count, rank = replicas
    workers = max(workers, 1)
    streams = []
    for worker in range(workers):
        number, block, rows = rank * workers + worker, 0, []
        for turn in itertools.count():
            order = shard_order(SEED, EPOCH, turn, Mix([len(counts)])).tolist()
            dealt = len(counts) >= count * workers
            whole = [
                shard << 32 | row
                for shard in (order[number :: count * workers] if dealt else order)
                for row in range(counts[shard])
            ]
            whole = whole if dealt else whole[number :: count * workers]
            for start in range(0, len(whole), BLOCK):
                part = whole[start : start + BLOCK]
                rows += [part[place] for place in block_order(SEED, EPOCH, number, block, len(part)).tolist()]
                block += 1
            if len(rows) >= batches * BATCH:
                break
        streams.append(iter(rows))
    return [list(itertools.islice(streams[batch % workers], BATCH)) for batch in range(batches)]


@pytest.mark.parametrize("counts", [[8, 6, 12, 4, 3], [22, 3]], ids=["dealt", "shared"])
@pytest.mark.parametrize("kind", [tars, parquets, lists, mixed, compressed_tars])
def test_every_position_is_reached_exactly(files, kind, counts):
    stream = opened(kind(files, counts))
    batches = 16  # more than one pass
    for replicas in ((1, 0), (2, 0), (2, 1), (3, 2)):
        whole = expected(counts, batches, 0, replicas)
        for done in range(0, batches + 1, 1 if kind is tars else 4):
            assert read(training(stream, done, batches, replicas)) == whole[done:], (replicas, done)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("counts", [[8, 6, 12, 4, 3], [22]], ids=["dealt", "shared"])
@pytest.mark.parametrize("kind", [tars, parquets])
def test_each_of_several_workers_goes_on_exactly(files, kind, counts, workers):
    stream = opened(kind(files, counts))
    for replicas, done in (((1, 0), 0), ((1, 0), 7), ((2, 1), 4), ((2, 1), 15)):
        whole = expected(counts, 16, workers, replicas)
        assert read(training(stream, done, 16, replicas), workers) == whole[done:], (replicas, done)


@pytest.mark.parametrize(("workers", "counts"), [(1, [22]), (2, [8, 6, 12, 4, 3])], ids=["shared", "dealt"])
@pytest.mark.parametrize("kind", [tars, parquets])
def test_loader_workers_go_on_exactly(files, kind, counts, workers):
    stream = opened(kind(files, counts))
    whole = expected(counts, 16, workers, (2, 1))
    assert read_by_loader(training(stream, 4, 16, (2, 1)), workers) == whole[4:]


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


class Counted(io.FileIO):
    """A file that counts the bytes read from all of its kind."""

    total = 0

    def read(self, size=-1):
        content = super().read(size)
        Counted.total += len(content)
        return content


def test_what_a_tar_file_holds_before_the_position_is_not_read(files, monkeypatch):
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
        next(iter(training(opened([str(files.folder / "*.tar")]), done, 190, replicas)))
        return Counted.total

    headers = cost(180) - cost(180)
    assert 0 < headers <= 3 * 402 * 513  # once, then they are in the cache
    for replicas in ((1, 0), (5, 3)):  # the latter share all shards
        costs = {done: cost(done, replicas) for done in (1, 60, 100, 180)}
        assert max(costs.values()) <= (2 * BLOCK + 1) * replicas[0] * sample, costs  # a batch may touch two blocks
    assert cost(0) >= BLOCK * (sample - 1024)  # so it is counted at all


def test_what_a_parquet_file_holds_before_the_row_group_is_not_read(files, monkeypatch):
    stream = opened(parquets(files, [40, 60, 50]))
    rows = []
    whole = parquet._rows

    def counting(*arguments):
        for row in whole(*arguments):
            rows.append(row)
            yield row

    monkeypatch.setattr(parquet, "_rows", counting)
    for done in (1, 15, 30, 45, 90):  # the last one in the second pass
        rows.clear()
        next(iter(training(stream, done, 100)))
        assert BLOCK <= len(rows) <= BLOCK + 2 * 4, done


def test_rows_that_nobody_has_counted_are_read_but_not_decoded(files, monkeypatch):
    stream = opened(lists(files, [40]))
    decoded = []
    decoder = stream.decoder
    monkeypatch.setattr(stream, "decoder", lambda item: decoded.append(item.sample_index) or decoder(item))
    batch = next(iter(training(stream, 9, 12)))
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


def test_a_stream_that_would_be_divided_otherwise_is_refused(files, module):
    tars(files, [8, 8, 8])
    whole = run_on_stream(files, module)
    checkpoint = files.folder / "step=2.ckpt"
    assert run_on_stream(files, module, checkpoint, num_workers=1) == whole[2:]
    changes = {
        "num_workers": (2, "data.num_workers 2 instead of 1"),
        "samples_per_epoch": (20, "data.samples_per_epoch 20 instead of 24"),
        "batch_size": (8, "data.batch_size 8 instead of 4"),
        "shuffle_block": (6, "data.shuffle_block 6 instead of 5"),
    }
    for name, (value, sentence) in changes.items():
        with pytest.raises(UserError, match=f"^Expected a stream that is divided as .* got {sentence}, with"):
            run_on_stream(files, module, checkpoint, **{name: value})
    files.tar(list(members(900, 8)), "09.tar")
    with pytest.raises(UserError, match=r"got shards \[4\] instead of \[3\]"):
        run_on_stream(files, module, checkpoint)


def test_a_stream_of_other_processes_is_refused(files, module):
    tars(files, [8, 8, 8])
    data = module(train=str(files.folder / "*.tar"), streaming=True, samples_per_epoch=24)
    data.setup("fit")
    state = data.state_dict()
    data.load_state_dict(state)
    state["stream"]["processes"] = 2
    with pytest.raises(UserError, match="got processes 1 instead of 2"):
        data.load_state_dict(state)
