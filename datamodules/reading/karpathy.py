"""Reader of Karpathy's splits of COCO and Flickr30k: `dataset_coco.json` and `dataset_flickr30k.json`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ...common.errors import UserError
from ..base.faults import BadSample
from ..base.text_files import ENCODING, parse_json, require_utf8
from .record import Record, identity_in, record
from .remote import open_file, suffix_of

# The splits of the literature for each split of the datamodule. Flickr30k has no "restval".
_DEFAULT_SPLITS = {"train": {"train", "restval"}, "validation": {"val"}, "test": {"test"}, "predict": {"test"}}


def is_karpathy(file: str) -> bool:
    """Return whether a JSON file is in Karpathy's form, which is an object; reads the first 100 characters only."""
    if suffix_of(file) != ".json":
        return False
    with open_file(file) as content:
        return content.read(100).decode(ENCODING, errors="replace").lstrip().startswith("{")


def read_karpathy(files: list[str], split: str | None, role: str, stamp: list[str]) -> Iterator[Record]:
    """Yield the records of the images in some splits, each image with all of its captions.

    Args:
        files: JSON files, each an object whose list `images` has objects with `filename`, `split`, `sentences`
            and optionally a folder `filepath`; the id of an image is `cocoid`, or else `imgid`.
        split: names of splits, joined by "+"; None for the splits of the literature.
        role: split of the datamodule.
        stamp: not read; a change of it, with the files, invalidates the cache of the `datasets` library.

    Raises:
        UserError: If a file has another form, or lacks a split.
    """
    for file in files:
        images = _images(file)
        known = {image["split"] for image in images if _is_complete(image)}
        wanted = set(split.split("+")) if split is not None else _DEFAULT_SPLITS[role] - ({"restval"} - known)
        if missing := wanted - known:
            raise UserError(
                f"Expected the splits {', '.join(sorted(missing))} in {file!r}, got {', '.join(sorted(known))}: name "
                "one of them as `split`, or several joined by +."
            )
        for image in images:
            # The split of an incomplete image is unknown: such an image is counted as a bad row of every split.
            if not _is_complete(image) or image["split"] in wanted:
                yield record(lambda image=image: _of_image(image))  # type: ignore[misc]


def _of_image(image: Any) -> Record:
    if not _is_complete(image):
        raise BadSample("incomplete image", "")
    return {
        "image": {"bytes": None, "path": os.path.join(image.get("filepath") or "", image["filename"])},
        "caption": [sentence["raw"] for sentence in image["sentences"]],
        "image_id": identity_in(image.get("cocoid", image.get("imgid"))),
    }


def _images(file: str) -> list[Any]:
    with require_utf8(file), open_file(file) as opened:
        content = parse_json(opened.read().decode(ENCODING), file)
    images = content.get("images") if isinstance(content, dict) else None
    if not isinstance(images, list):
        what = f"object with the keys {', '.join(content)}" if isinstance(content, dict) else type(content).__name__
        raise UserError(
            "Expected a list of objects with an image and its caption, or Karpathy's form, an object with a list "
            f"`images`, got a JSON {what} in {file!r}: convert the file."
        )
    if images and not any(map(_is_complete, images)):
        raise UserError(
            "Expected images as objects with `filename`, `split` and `sentences`, each with its `raw` text, got no "
            f"such object in {file!r}: correct the file."
        )
    return images


def _is_complete(image: Any) -> bool:
    try:
        texts = [image["filename"], image["split"], *(sentence["raw"] for sentence in image["sentences"])]
    except (KeyError, TypeError):
        return False
    return all(isinstance(text, str) for text in texts)
