"""Boxes of texts: from the table itself, or from RefCOCO's annotations (REFER) and a file of proposals."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from ...common.errors import UserError
from ..base.faults import ROW_ERRORS, BadSample
from ..base.text_files import ENCODING, parse_json
from ..pairs.rows import CaptionRows
from ..reading.lists import read_items
from ..reading.open import resolve_tables
from ..reading.parquet import column_names
from ..reading.resolve import Named, as_source
from ..reading.table import PairTable
from .samples import INVALID, NO_BOXES, Box, Target

COLUMNS = ("boxes", "box", "ref_id", "image_id", "image")
UNKNOWN_REF = "unknown ref_id"


class Refer:
    """RefCOCO's annotations as published by REFER: `refs(unc).p` and `instances.json` in one folder.

    Args:
        folder: the folder, for example `data/refcoco+`.
        split_by: authors of the split, in the name of the file.

    Raises:
        UserError: If a file is missing or is not of this form.
    """

    def __init__(self, folder: str, split_by: str = "unc") -> None:
        path = Path(folder).expanduser()
        refs = path / f"refs({split_by}).p"
        instances = path / "instances.json"
        for file in (refs, instances):
            if not file.is_file():
                raise UserError(f"Expected RefCOCO's file {str(file)!r}, got none: correct data.refer.")
        try:
            with refs.open("rb") as pickled:
                listed = _PlainUnpickler(pickled, encoding="latin1").load()
            annotations = parse_json(instances.read_text(encoding=ENCODING), instances)
            self.refs = {int(ref["ref_id"]): ref for ref in listed}
            self.boxes: dict[int, Box] = {int(each["id"]): each["bbox"] for each in annotations["annotations"]}
            self.of_image: dict[int, list[Box]] = {}
            for each in annotations["annotations"]:
                self.of_image.setdefault(int(each["image_id"]), []).append(each["bbox"])
        except (pickle.UnpicklingError, EOFError, *ROW_ERRORS) as error:
            raise UserError(
                f"Expected RefCOCO's annotations in {folder!r}, got another content ({error}): get the files again."
            ) from error

    def target(self, ref_id: int, proposals: Mapping[str, Any] | None, name: str) -> Target:
        """Return the boxes of a reference; raises `BadSample`."""
        ref = self.refs.get(ref_id)
        if ref is None or int(ref["ann_id"]) not in self.boxes:
            raise BadSample(UNKNOWN_REF, f"{name} ({ref_id})")
        image_id = int(ref["image_id"])
        boxes = self.of_image[image_id] if proposals is None else proposals.get(str(image_id), [])
        return Target(first_four(boxes, name), self.boxes[int(ref["ann_id"])], str(ref["split"]), ref_id)


class _PlainUnpickler(pickle.Unpickler):
    """Read plain data only: numbers, strings, lists and dicts need no names, which can run any code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and plain data has no names")


def read_proposals(file: str) -> dict[str, Any]:
    """Read candidate boxes by image: MAttNet's `dets.json` has the id of a COCO image and its detections.

    Raises:
        UserError: If the file does not exist or is not an object of lists.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"Expected a file of boxes by image, got none {file!r}: correct data.proposals.")
    proposals = parse_json(path.read_text(encoding=ENCODING), path)
    if not isinstance(proposals, dict):
        raise UserError(
            f"Expected an object with a list of boxes for each image in {file!r}, got a {type(proposals).__name__}: "
            "convert it."
        )
    return proposals


def first_four(boxes: Any, name: str) -> list[Box]:
    """Return x, y, width and height of each box, without what follows (score, class); raises `BadSample`."""
    try:
        return [[float(value) for value in box[:4]] for box in boxes]
    except (TypeError, ValueError, LookupError):
        raise BadSample(INVALID, name) from None


class BoxRows(CaptionRows[PairTable]):
    """Texts of images, one per row, with boxes.

    The boxes are those of the annotations if the row has a `ref_id`, else those of its columns: `boxes` are the
    candidates, `box` is the right one, by default the first of the candidates. Proposals replace the candidates;
    their keys are the ids of the images in the annotations, else values of the column `image_id` or `image`.

    Args:
        images: images and texts.
        columns: the `COLUMNS` of each of their rows.
        refer: annotations, if there are any.
        proposals: candidates by image, if there are any.
    """

    def __init__(
        self,
        images: PairTable,
        columns: list[dict[str, Any]],
        refer: Refer | None,
        proposals: Mapping[str, Any] | None,
    ) -> None:
        super().__init__(images)
        if len(columns) != len(images):
            raise ValueError(f"Expected boxes of {len(images)} rows, got {len(columns)}: read the same files.")
        self.columns = columns
        self.refer = refer
        self.proposals = proposals

    def target(self, row: int) -> Target:
        """Return the boxes of a row; raises `BadSample`."""
        name = self.name(row)
        values = self.columns[self.image_row(row)]
        if self.refer is not None:
            try:
                ref_id = int(values["ref_id"])
            except (TypeError, ValueError, LookupError):
                raise BadSample(UNKNOWN_REF, name) from None
            return self.refer.target(ref_id, self.proposals, name)
        boxes = first_four(_parsed(values.get("boxes"), name), name)
        right = _parsed(values.get("box"), name)
        if not right and boxes:
            right = boxes[0]
        if self.proposals is not None:
            keys = [str(values[key]) for key in ("image_id", "image") if values.get(key) is not None]
            boxes = first_four(next((self.proposals[key] for key in keys if key in self.proposals), []), name)
        if not boxes:
            raise BadSample(NO_BOXES, name)
        return Target(boxes, first_four([right], name)[0] if right else None)


def _parsed(value: Any, name: str) -> Any:
    """Return a value of a table as a list: a CSV file has lists in JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadSample(INVALID, name) from None
    return [] if value is None else value


def read_columns(source: Named) -> Iterator[dict[str, Any]]:
    """Yield the `COLUMNS` of each row of a source; an empty dict for an unreadable row.

    Raises:
        UserError: If the source is neither a list in JSON or CSV nor Parquet.
    """
    spec = as_source(source)
    kind, files, _ = resolve_tables(spec, "texts and boxes")
    for file in files:
        if kind == "parquet":
            names = [name for name in COLUMNS if name in column_names(file) and name != "image"]
            rows = pq.ParquetFile(file).metadata.num_rows
            yield from pq.read_table(file, columns=names).to_pylist() if names else ({} for _ in range(rows))
            continue
        for read in read_items(file):
            try:
                item = read()
                yield {name: item[name] for name in COLUMNS if name in item}
            except (BadSample, *ROW_ERRORS):
                yield {}
