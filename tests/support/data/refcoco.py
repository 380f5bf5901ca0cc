"""Small files in RefCOCO+'s public layout: the authors' lists, REFER's annotations and MAttNet's proposals."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.data.images import draw_image

SIDES = (40, 32)  # of the images: width, height
SPLITS = {"train": range(20), "val": range(20, 26), "testA": range(26, 29), "testB": range(29, 32)}
"""Images of each split; each has two annotated objects."""


def _annotated() -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for split, images in SPLITS.items():
        for image in images:
            for place in range(2):
                number = 2 * image + place
                box = [1.5 + 18 * place + image % 3, 3.0 + image % 5, 14.25, 11.0 + image % 7]
                found[number] = {"image_id": 1000 + image, "ann_id": 500 + number, "split": split, "bbox": box}
    return found


ANNOTATED = _annotated()
"""References by ref_id."""


def write_refcoco(folder: Path, images: Path, texts: Callable[[int], str]) -> None:
    """Write the lists, and a folder `refcoco+`, to a folder, and the images of COCO's `train2014` to another.

    Args:
        folder: of the lists.
        images: root of the images.
        texts: The text of a ref_id.
    """
    annotations = folder / "refcoco+"
    annotations.mkdir(parents=True)
    (images / "train2014").mkdir(parents=True, exist_ok=True)
    lists: dict[str, list[dict[str, Any]]] = {"train": [], "val": [], "test": []}
    refs, boxes, proposals = [], [], {}
    for ref_id, ref in ANNOTATED.items():
        name = f"COCO_train2014_{ref['image_id']:012d}.jpg"
        draw_image(ref["image_id"], SIDES).save(images / "train2014" / name)
        item = {"image": f"train2014/{name}", "text": texts(ref_id)}
        listed = ref["split"][:4] if ref["split"] not in lists else ref["split"]
        lists[listed].append(item if listed == "train" else item | {"ref_id": ref_id})
        plain = {name: value for name, value in ref.items() if name != "bbox"}
        sentences = [{"sent_id": ref_id, "sent": texts(ref_id), "raw": texts(ref_id), "tokens": texts(ref_id).split()}]
        refs.append({"ref_id": ref_id, "file_name": name, "category_id": 1, "sentences": sentences} | plain)
        boxes.append({"id": ref["ann_id"], "image_id": ref["image_id"], "category_id": 1, "bbox": ref["bbox"]})
        detected = [value + 0.5 for value in ref["bbox"]]
        proposals.setdefault(str(ref["image_id"]), []).append([*detected, 0.9])
    for name, items in lists.items():
        (folder / f"refcoco+_{name}.json").write_text(json.dumps(items))
    (annotations / "refs(unc).p").write_bytes(pickle.dumps(refs, protocol=0))
    (annotations / "instances.json").write_text(json.dumps({"images": [], "annotations": boxes, "categories": []}))
    (annotations / "dets.json").write_text(json.dumps(proposals))
