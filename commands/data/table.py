"""The report as lines for a terminal."""

from collections.abc import Iterator, Mapping
from typing import Any

NAMES = ("least", "5%", "25%", "median", "75%", "95%", "most")
"""Names of the quantiles at `counts.SHARES`."""
_QUANTILES = {
    "width": "width, pixels",
    "height": "height, pixels",
    "aspect_ratio": "width / height",
    "texts_of_an_image": "texts of an image",
    "tokens": "tokens of a text",
}
_SHOWN = 60
"""Characters of a text or a name."""


def lines_of(split: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a split.

    Args:
        split: its name.
        found: plain data from `count_split`, with `sources` and `also_in_train` where they are known.
    """
    images, texts, read = found["images"], found["texts"], found["images_read"]
    seconds = f"{found['bytes'] / 2**20:,.1f} MiB in {found['seconds']:.1f} s"
    whole = "the first rows of a stream" if images is None else f"of {images:,}" if read < images else "all"
    yield f"{split}: {read:,} images ({whole}) with {texts:,} texts; {seconds}"
    if found["rows"] is not None and found["rows"] != images:
        yield _line("rows", found["rows"])
    for source in found.get("sources", ()):
        yield _line(f"  of {_short(source['source'], 24)}", source["rows"], f"{source['epoch']:,} in an epoch")
    yield _line("duplicate images", found["duplicate_images"], _share(found["duplicate_images"], read))
    for one, other in found["examples_of_duplicate_images"]:
        yield f"    {_short(other)} = {_short(one)}"
    if "also_in_train" in found:
        yield _line("images that are in train too", found["also_in_train"], _share(found["also_in_train"], read))
    bad = sum(found["unreadable"].values())
    yield _line("unreadable", bad, ", ".join(f"{cause}: {count:,}" for cause, count in found["unreadable"].items()))
    for name in found["examples_of_unreadable"]:
        yield f"    {_short(name)}"
    if found["smaller_than_input"] is not None:
        note = f"{_share(found['smaller_than_input'], read)}: enlarged to {found['input_size']} pixels"
        yield _line("smaller than the model's images", found["smaller_than_input"], note)
    yield _line("duplicate texts", found["duplicate_texts"], _share(found["duplicate_texts"], texts))
    for text, count in found["most_frequent_texts"]:
        yield f"    {count:,} x {_short(text)!r}"
    yield _line("empty texts", found["empty_texts"], _share(found["empty_texts"], texts))
    long = found["over_long_texts"]
    yield _line(f"texts over {found['max_tokens']} tokens", long, f"{_share(long, texts)}: cut to max_tokens")
    if found["texts_cut_to_max_words"]:
        cut = found["texts_cut_to_max_words"]
        yield _line("texts of more than max_words", cut, f"{_share(cut, texts)}: cut by the cleaning")
    yield f"  {'':<28}" + "".join(f"{name:>9}" for name in NAMES)
    for key, name in _QUANTILES.items():
        if found[key] is not None:
            yield f"  {name:<28}" + "".join(f"{value:>9,.4g}" for value in found[key])
    yield ""


def _line(name: str, value: int, note: str = "") -> str:
    return f"  {name:<32}{value:>10,}  {note}".rstrip()


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _short(text: str, length: int = _SHOWN) -> str:
    """Return a text of one line whose middle is left out if it is too long."""
    line = " ".join(text.split())
    half = length // 2
    return line if len(line) <= length else f"{line[: half - 1]}…{line[-half:]}"
