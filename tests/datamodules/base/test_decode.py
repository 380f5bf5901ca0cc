import io
import struct
import zlib
from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image

from support.data.images import draw_image, encoded
from vlightning.common.errors import UserError
from vlightning.datamodules import ShapesDataModule
from vlightning.datamodules.base import decode as decoding
from vlightning.datamodules.base.decode import decode_image, decoding_by
from vlightning.datamodules.base.faults import Account, BadDataError, BadSample, Fault


def decode(data, **options):
    return decode_image(data, None, "it", **options)


def cause(data, path=None, **options):
    with pytest.raises(BadSample) as caught:
        decode_image(data, path, "it", **options)
    assert caught.value.fault.name == "it"
    return caught.value.fault.cause


def far(image, expected):
    return np.abs(np.asarray(image).astype(int) - np.asarray(expected).astype(int)).max()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", "PPM"])
def test_common_formats_decode_to_rgb(kind):
    image = decode(encoded(draw_image(1), kind))
    assert image.mode == "RGB"
    assert image.size == (40, 32)
    assert far(image, draw_image(1)) <= 16


def test_a_file_is_told_by_its_content_not_by_its_name(tmp_path):
    path = tmp_path / "really_a_png.jpg"
    path.write_bytes(encoded(draw_image(1)))
    assert far(decode_image(None, str(path), "it"), draw_image(1)) == 0


def test_cmyk_turns_to_rgb():
    assert far(decode(encoded(draw_image(1).convert("CMYK"), "JPEG", quality=98)), draw_image(1)) <= 12


def test_transparent_palette_is_put_on_white():
    image = Image.new("P", (4, 4), 0)
    image.putpalette([10, 20, 30, 200, 0, 0])
    image.putpixel((1, 1), 1)
    found = np.asarray(decode(encoded(image, transparency=0)))
    assert found[0, 0].tolist() == [255, 255, 255]
    assert found[1, 1].tolist() == [200, 0, 0]


def test_half_transparent_is_blended_with_white():
    found = np.asarray(decode(encoded(Image.new("RGBA", (2, 2), (0, 0, 0, 128)))))
    assert np.abs(found.astype(int) - 127).max() <= 1


@pytest.mark.parametrize("orientation", [3, 6, 8])
def test_exif_rotation_is_applied(orientation):
    turned = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(draw_image(1).transpose(turned[orientation]), "PNG", exif=exif)
    assert far(decode(data), draw_image(1)) == 0


def test_damaged_exif_does_not_matter():
    data = encoded(draw_image(1), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff garbage")
    assert decode(data).size == (40, 32)


def test_16_bit_grey_is_scaled():
    values = np.array([[0, 257, 32896, 65535]], np.uint16)
    found = np.asarray(decode(encoded(Image.fromarray(values))))
    assert found[0, :, 0].tolist() == [0, 1, 128, 255]


def test_16_bit_rgb_png_is_scaled():
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    pixels = b"\0" + struct.pack(">6H", 0, 32896, 65535, 65535, 0, 257)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0))
    data += chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    assert np.asarray(decode(data))[0].tolist() == [[0, 128, 255], [255, 0, 1]]


def test_one_bit_and_grey_alpha_images():
    assert np.asarray(decode(encoded(Image.new("1", (2, 2), 1))))[0, 0].tolist() == [255, 255, 255]
    assert np.asarray(decode(encoded(Image.new("LA", (2, 2), (50, 255)))))[0, 0].tolist() == [50, 50, 50]


def test_animation_gives_its_first_frame():
    frames = [Image.new("RGB", (8, 8), color) for color in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.asarray(decode(data))[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_truncated_file(kind):
    big = Image.fromarray(np.random.default_rng(0).integers(0, 256, (100, 100, 3), dtype=np.uint8))
    data = encoded(big, kind)
    assert cause(data[: len(data) // 2]) == "truncated"


def test_decompression_bomb_is_refused_from_its_header(recwarn):
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    body = b"IHDR" + header
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    data += struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    assert cause(data) == "too large"
    assert not recwarn.list


def test_the_pixel_limit_is_a_parameter_in_both_directions():
    data = encoded(draw_image(1))
    assert cause(data, max_pixels=40 * 32 - 1) == "too large"
    assert decode(data, max_pixels=40 * 32).size == (40, 32)
    limit = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = 100  # Pillow's own limit does not come before ours
    try:
        assert decode(data).size == (40, 32)
        assert Image.MAX_IMAGE_PIXELS == 100
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def test_other_causes(tmp_path):
    assert cause(None, str(tmp_path / "missing.jpg")) == "missing file"
    assert cause(None, None) == "no image"
    assert cause(b"") == "not an image"
    assert cause(b"<html>404</html>") == "not an image"
    assert cause(None, str(tmp_path)) == "unreadable"


def test_formats_that_start_programs_are_not_opened():
    buffer = io.BytesIO()
    draw_image(1).save(buffer, "EPS")
    assert cause(buffer.getvalue()) == "not an image"


def test_account_names_the_first_few_of_each_cause(caplog):
    account = Account("train", max_bad_share=1.0)
    account.update(100, [Fault("truncated", f"a{number}") for number in range(20)] + [Fault("missing file", "b")])
    text = caplog.text
    assert [f"a{number} " in text for number in range(7)] == [True] * 5 + [False] * 2
    assert "b is unusable (missing file): replaced" in text
    assert account.summary() == "21 of 100 (truncated: 20, missing file: 1)"


def test_account_ends_the_run_past_the_share_with_the_counts():
    account = Account("train", max_bad_share=0.05)
    account.update(100, [Fault("truncated", "a")] * 9)  # too few seen to judge
    account.update(150, [Fault("truncated", "a")] * 3)
    with pytest.raises(BadDataError, match=r"unusable train .* got 14 of 251 \(truncated: 12, missing file: 2\)"):
        account.update(1, [Fault("missing file", "b")] * 2)


def test_account_judges_a_short_split_at_its_end():
    account = Account("test", max_bad_share=0.05)
    account.update(20, [Fault("truncated", "a")] * 2)
    with pytest.raises(BadDataError, match="2 of 20"):
        account.end_of_pass()


with_torchcodec = pytest.mark.skipif(find_spec("torchcodec") is None, reason="needs the extra torchcodec")


@pytest.fixture
def decoded_by_torchcodec(monkeypatch):
    """Return the formats of the files that torchcodec decoded."""
    from torchcodec import decoders

    found, original = [], decoders.decode_image

    def counted(source, **options):
        pixels = original(source, **options)
        found.append(Image.open(io.BytesIO(source)).format)
        return pixels

    monkeypatch.setattr(decoders, "decode_image", counted)
    return found


def photo(width=97, height=117):
    coarse = np.random.default_rng(0).integers(0, 256, (12, 9, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def oriented(number, kind="JPEG"):
    orientation = Image.Exif()
    orientation[0x0112] = number
    return encoded(photo(50, 50), kind, exif=orientation)


ALIKE = {
    "JPEG": lambda: encoded(photo(), "JPEG", quality=80),
    "JPEG without subsampling": lambda: encoded(photo(), "JPEG", quality=95, subsampling=0),
    "progressive JPEG": lambda: encoded(photo(), "JPEG", progressive=True),
    "gray JPEG": lambda: encoded(photo().convert("L"), "JPEG"),
    "JPEG with EXIF": lambda: oriented(1),
    "WebP": lambda: encoded(photo(), "WEBP"),
}
OTHER = {
    "rotated JPEG": lambda: oriented(6),
    "turned JPEG": lambda: oriented(3),
    "turned PNG": lambda: oriented(3, "PNG"),
    "turned WebP": lambda: oriented(3, "WEBP"),
    "CMYK": lambda: encoded(photo().convert("CMYK"), "JPEG"),
    "PNG": lambda: encoded(photo(), "PNG"),
    "transparent PNG": lambda: encoded(Image.new("RGBA", (5, 5), (9, 99, 199, 128)), "PNG"),
    "transparent WebP": lambda: encoded(Image.new("RGBA", (5, 5), (9, 99, 199, 128)), "WEBP"),
    "GIF": lambda: encoded(photo(), "GIF"),
    "animation": lambda: encoded(photo(), "WEBP", save_all=True, append_images=[photo().rotate(90)]),
    "BMP": lambda: encoded(photo(), "BMP"),
}


@with_torchcodec
@pytest.mark.parametrize("upright", [True, False])
@pytest.mark.parametrize("case", [*ALIKE, *OTHER])
def test_torchcodec_decodes_to_the_pixels_of_pillow(decoded_by_torchcodec, case, upright):
    data = (ALIKE | OTHER)[case]()
    expected = decode(data, upright=upright)
    with decoding_by("torchcodec"):
        found = decode(data, upright=upright)
    assert bool(decoded_by_torchcodec) == (case in ALIKE)
    assert (found.mode, found.size) == (expected.mode, expected.size)
    assert far(found, expected) == 0
    assert not decoded_by_torchcodec or decode(data, upright=upright).size == expected.size
    assert len(decoded_by_torchcodec) == (case in ALIKE)  # not outside of the context


@with_torchcodec
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: data[:60] + b"?" * 400])
def test_faults_have_the_same_cause_with_torchcodec(kind, damage):
    data = damage(encoded(photo(), kind))
    try:
        expected = decode(data)
    except BadSample as bad:
        expected = bad.fault
    with decoding_by("torchcodec"):
        if isinstance(expected, Fault):
            assert cause(data) == expected.cause
        else:
            assert far(decode(data), expected) == 0


@with_torchcodec
def test_a_datamodule_reads_by_its_decoder(decoded_by_torchcodec):
    class FromFiles(ShapesDataModule):
        def open_split(self, split):
            rows = super().open_split(split)
            draw = rows.image
            rows.image = lambda row: decode(encoded(draw(row), "JPEG"))
            return rows

    batches = {}
    for decoder in ("pillow", "torchcodec"):
        data = FromFiles(length=4, eval_length=2, batch_size=4, decoder=decoder)
        data.setup("fit")
        (batches[decoder],) = data.train_dataloader()
        next(iter(data.val_dataloader()))
        assert len(decoded_by_torchcodec) == (6 if decoder == "torchcodec" else 0)
    assert batches["pillow"]["image"].equal(batches["torchcodec"]["image"])


def test_a_decoder_that_is_not_installed_is_one_sentence(monkeypatch):
    monkeypatch.setattr(decoding, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install vlightning\[torchcodec\]"):
        ShapesDataModule(decoder="torchcodec")
    ShapesDataModule()
