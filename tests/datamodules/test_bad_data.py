"""A training over shards of which some samples are bad: it runs through, and they are counted exactly, by cause."""

import io
import json
import re
import tarfile

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.transforms.functional import pil_to_tensor

from support.data.images import draw_image, encoded
from vlightning.datamodules.base.decode import decode_image
from vlightning.datamodules.base.faults import BadDataError, BadSample
from vlightning.datamodules.base.mixing import Mix
from vlightning.datamodules.base.sampling import epoch_order, substitute
from vlightning.datamodules.streams.order import StreamOrder

SHARDS, ROWS = 4, 400  # rows of each
BATCH, BLOCK, SEED, EPOCHS, WORKERS = 8, 64, 5, 2, 2
MAX_PIXELS = 1_000_000
SIDE = 6


def noise(number):
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (40, 40, 3), dtype=np.uint8))


def bomb(kind):
    return encoded(Image.new("1", (1200, 1200)), kind)


JPEG, PNG = encoded(noise(0), "JPEG"), encoded(noise(1), "PNG")
GOOD = encoded(draw_image(2, (24, 20)), "JPEG")
# What is bad about a sample, the cause it is counted under, and its members.
BAD = [
    ("half a JPEG", "truncated", {"jpg": JPEG[: len(JPEG) // 2], "txt": b"text"}),
    ("nearly a whole JPEG", "truncated", {"jpg": JPEG[:-20], "txt": b"text"}),
    ("half a PNG", "truncated", {"png": PNG[: len(PNG) // 2], "txt": b"text"}),
    ("a text called a JPEG", "not an image", {"jpg": b"<html>404 not found</html>", "txt": b"text"}),
    ("an SVG called a PNG", "not an image", {"png": b'<svg xmlns="http://www.w3.org/2000/svg"/>', "txt": b"text"}),
    ("an image that is empty", "not an image", {"jpg": b"", "txt": b"text"}),
    ("no image at all", "no image", {"txt": b"text"}),
    ("a bomb as PNG", "too large", {"png": bomb("PNG"), "txt": b"text"}),
    ("a bomb as GIF", "too large", {"jpg": bomb("GIF"), "txt": b"text"}),
    (
        "a bomb as TIFF",
        "too large",
        {"tif": encoded(Image.new("1", (1200, 1200)), "TIFF", compression="group4"), "txt": b"text"},
    ),
    ("a caption that is empty", "empty caption", {"jpg": GOOD, "txt": b""}),
    ("a caption of white space", "empty caption", {"jpg": GOOD, "txt": b" \n\t"}),
    ("no caption", "empty caption", {"jpg": GOOD}),
    ("JSON without a caption", "empty caption", {"jpg": GOOD, "json": json.dumps({"width": 3}).encode()}),
    ("JSON that is cut off", "empty caption", {"jpg": GOOD, "json": b'{"caption": "te'}),
    ("neither image nor caption is usable", "empty caption", {"jpg": JPEG[:700], "txt": b""}),
]


def solid(mode, color, **options):
    return encoded(Image.new(mode, (10, 8), color), options.pop("kind", "PNG"), **options)


def palette(**options):
    image = Image.new("P", (10, 8), 1)
    image.putpalette([9, 9, 9, 10, 200, 30])
    return encoded(image, "PNG", **options)


def wide(values, kind):
    return encoded(Image.fromarray(np.full((8, 10), values)), kind)


# Images of other kinds than 8-bit RGB, or by another name, and the color that they have all over. None is bad.
ODD = [
    ("cmyk", "jpg", solid("CMYK", (0, 255, 255, 0), kind="JPEG", quality=100), (255, 0, 0)),
    ("cmyk_tiff", "tif", solid("CMYK", (255, 0, 255, 0), kind="TIFF"), (0, 255, 0)),
    ("gray", "png", solid("L", 77), (77, 77, 77)),
    ("gray_jpeg", "jpg", solid("L", 77, kind="JPEG"), (77, 77, 77)),
    ("gray_with_alpha", "png", solid("LA", (77, 255)), (77, 77, 77)),
    ("gray_that_is_transparent", "png", solid("LA", (77, 0)), (255, 255, 255)),
    ("rgba", "png", solid("RGBA", (10, 20, 30, 255)), (10, 20, 30)),
    ("rgba_half", "png", solid("RGBA", (0, 0, 0, 51)), (204, 204, 204)),
    ("palette", "png", palette(), (10, 200, 30)),
    ("palette_transparent", "png", palette(transparency=1), (255, 255, 255)),
    ("palette_other_transparent", "png", palette(transparency=0), (10, 200, 30)),
    ("one_bit_white", "png", solid("1", 1), (255, 255, 255)),
    ("one_bit_black", "png", solid("1", 0), (0, 0, 0)),
    ("sixteen_bits", "png", wide(np.uint16(100 * 257), "PNG"), (100, 100, 100)),
    ("sixteen_bits_tiff", "tif", wide(np.uint16(100 * 257), "TIFF"), (100, 100, 100)),
    ("float_tiff", "tif", wide(np.float32(0.2), "TIFF"), (51, 51, 51)),
    ("png_called_jpg", "jpg", solid("RGB", (1, 2, 3)), (1, 2, 3)),
    ("jpg_called_png", "png", solid("RGB", (90, 90, 90), kind="JPEG"), (90, 90, 90)),
]


class Plain(nn.Module):
    """RGB or nothing, as it is, at one size."""

    def forward(self, image):
        assert image.mode == "RGB"
        return pil_to_tensor(image.resize((SIDE, SIDE), Image.Resampling.NEAREST)).float()


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Rows of each shard as (kind, cause or color), and the pattern of the files; one in a hundred is bad."""
    folder = tmp_path_factory.mktemp("shards")
    kinds = {}
    draws = np.random.default_rng(0).permutation(SHARDS * ROWS)
    bad = dict(zip(draws[: SHARDS * ROWS // 100].tolist(), range(SHARDS * ROWS // 100), strict=True))
    odd = dict(zip(draws[-2 * len(ODD) :].tolist(), range(2 * len(ODD)), strict=True))
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for place in range(ROWS):
                row = shard * ROWS + place
                members = {"jpg": GOOD, "txt": f"good {row}".encode()}
                if row in bad:
                    _, kinds[row], members = BAD[bad[row] % len(BAD)]
                elif row in odd:
                    _, suffix, data, kinds[row] = ODD[odd[row] % len(ODD)]
                    members = {suffix: data, "txt": b"odd"}
                for kind, content in members.items():
                    info = tarfile.TarInfo(f"{shard}/{place:05}.{kind}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return str(folder / "*.tar"), kinds


class Recorder(pl.LightningModule):
    """Trains one number, and keeps what the batches held."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen, self.colors = [], {}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        assert batch["image"].shape == (BATCH, 3, SIDE, SIDE)
        rows = batch["sample_index"].tolist()
        self.seen.append(rows)
        self.colors |= dict(zip(rows, batch["image"], strict=True))
        return self.weight.sum()


# The slow reference: which rows are drawn, substitutes included, and what was wrong with those that are not in a batch.


def drawn(epoch, first, bad, choices, index):
    """The row in a row's place, and the causes met on the way to it; `choices` are what a substitute is drawn from."""
    row, causes, attempt = first, [], 0
    while row in bad:
        causes.append(bad[row])
        attempt += 1
        row = choices[substitute(SEED, epoch, index(first), attempt, len(choices))]
    return row, causes


def mapped(epoch, bad):
    """Batches of a map-style epoch, and the causes of each."""
    order = epoch_order(SEED, epoch, Mix([SHARDS * ROWS])).tolist()
    everything = range(SHARDS * ROWS)
    for start in range(0, len(order) - BATCH + 1, BATCH):
        yield [drawn(epoch, row, bad, everything, int) for row in order[start : start + BATCH]]


def number(row):
    """How a streamed row is numbered."""
    return row // ROWS << 32 | row % ROWS


def streamed(epoch, bad):
    """Batches of a streamed epoch, in the order of the stream; a substitute is of the same shard."""
    order = StreamOrder(Counted(), SEED, epoch, SHARDS * ROWS // BATCH, BATCH, BLOCK)
    for batch in range(order.batches):
        _, first, depth = order.block_of(batch)
        if batch == first:
            rows = [
                run.shard * ROWS + row for run in order.runs(batch, range(BATCH)) for row in range(run.start, run.stop)
            ]
            places = order.places(batch)
        planned = [rows[slot * depth + places[slot, batch - first]] for slot in range(BATCH)]
        yield [drawn(epoch, row, bad, range(row // ROWS * ROWS, (row // ROWS + 1) * ROWS), number) for row in planned]


class Counted:
    """The shards as their order needs them."""

    mix = Mix([SHARDS])

    def count(self, shard):
        return ROWS

    def chunk_starts(self, shard):
        return None

    def is_sequential(self, shard):
        return False


WAYS = {
    "map-style": (mapped, {}, int),
    "streamed": (streamed, {"streaming": True, "samples_per_epoch": SHARDS * ROWS}, number),
}


def fitted(module, source, way, **options):
    """A training of two epochs with two loader workers, and its datamodule."""
    data = module(
        train=source,
        batch_size=BATCH,
        num_workers=WORKERS,
        seed=SEED,
        train_transform=Plain(),
        max_pixels=MAX_PIXELS,
        shuffle_block=BLOCK,
        **WAYS[way][1],
        **options,
    )
    recorder = Recorder()
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return trainer, recorder, data


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.fault(
    "1% of samples truncated, mislabeled, bombs or empty",
    "written into tar shards",
    "two epochs run through, each bad sample replaced, counts exact by cause",
)
def test_bad_samples_are_replaced_and_counted_exactly(shards, module, way):
    source, kinds = shards
    bad = {row: cause for row, cause in kinds.items() if isinstance(cause, str)}
    reference, _, index = WAYS[way]
    assert len(bad) == SHARDS * ROWS // 100
    trainer, recorder, data = fitted(module, source, way)
    trainer.fit(recorder, datamodule=data)

    epochs = [list(reference(epoch, bad)) for epoch in range(EPOCHS)]
    assert recorder.seen == [[index(row) for row, _ in batch] for epoch in epochs for batch in epoch]
    causes = [cause for epoch in epochs for batch in epoch for _, met in batch for cause in met]
    account = data.account("train")
    assert dict(account.causes) == {cause: causes.count(cause) for cause in set(causes)}
    assert set(causes) == {cause for _, cause, _ in BAD}
    assert account.num_read == len(causes) + BATCH * len(recorder.seen)

    for row, color in kinds.items():
        if row not in bad and index(row) in recorder.colors:
            expected = torch.tensor(color, dtype=torch.float32)[:, None, None].expand(3, SIDE, SIDE)
            torch.testing.assert_close(recorder.colors[index(row)], expected, atol=2.0, rtol=0, msg=f"{color} in {row}")
    assert sum(index(row) in recorder.colors for row in kinds if row not in bad) == 2 * len(ODD)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.fault(
    "more bad samples than max_bad_share", "written into tar shards", "the run ends with a sentence that counts them"
)
def test_past_the_share_a_training_ends_with_the_sentence(shards, module, way):
    source, kinds = shards
    bad = {row: cause for row, cause in kinds.items() if isinstance(cause, str)}
    trainer, recorder, data = fitted(module, source, way, max_bad_share=0.004)
    with pytest.raises(BadDataError) as error:
        trainer.fit(recorder, datamodule=data)

    seen, met = 0, []
    for batch in WAYS[way][0](0, bad):
        met += [cause for _, causes in batch for cause in causes]
        seen = seen + BATCH + sum(len(causes) for _, causes in batch)
        if seen >= 200 and len(met) > 0.004 * seen:
            break
    found = re.fullmatch(
        r"Expected at most 0\.40% unusable train samples \(data.max_bad_share\), got "
        rf"{len(met)} of {seen} \((.*)\): correct the data, or increase the limit\.",
        str(error.value),
    )
    assert sorted(found[1].split(", ")) == sorted(f"{cause}: {met.count(cause)}" for cause in set(met))


@pytest.mark.parametrize(
    ("data", "pixels_from"),
    [
        (encoded(draw_image(3), "JPEG"), b"\xff\xda"),
        (encoded(draw_image(3), "JPEG", progressive=True), b"\xff\xda"),
        (encoded(draw_image(3), "PNG"), b"IDAT"),
    ],
    ids=["jpeg", "progressive", "png"],
)
def test_a_image_cut_off_anywhere_is_bad_or_complete(data, pixels_from):
    whole = read(data)
    for size in range(len(data)):
        found = read(data[:size])
        if not isinstance(found, str):  # nothing but the end mark is missing
            assert size > len(data) - 25
            assert np.array_equal(found, whole)
        elif size > data.index(pixels_from) + 20:
            assert found == "truncated"
        else:
            assert found in ("truncated", "unreadable", "not an image")


def read(data):
    """The image, or why it cannot be used."""
    try:
        return decode_image(data, None, "image")
    except BadSample as bad:
        return bad.fault.cause
