"""Small generated images."""

import io
import json

import numpy as np
from PIL import Image


def draw_image(number, size=(40, 32)):
    """Return a smooth image that depends on a number."""
    x = np.linspace(0, 1, size[0])[None, :, None]
    y = np.linspace(0, 1, size[1])[:, None, None]
    tint = np.array([number * 37 % 256, number * 91 % 256, number * 151 % 256]) / 255
    return Image.fromarray((255 * (0.5 * tint + 0.25 * x + 0.25 * y)).clip(0, 255).astype(np.uint8))


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def write_pets(folder, breeds, trainval, test):
    """Write Oxford-IIIT Pet's images and lists, some of each breed; a cat's breed has a capital letter."""
    (folder / "images").mkdir(parents=True)
    (folder / "annotations").mkdir()
    lists = {"trainval": [], "test": []}
    for number, breed in enumerate(breeds, 1):
        for image in range(1, trainval + test + 1):
            draw_image(number).save(folder / f"images/{breed}_{image}.jpg")
            same = [other for other in breeds[:number] if other[0].isupper() == breed[0].isupper()]
            line = f"{breed}_{image} {number} {1 if breed[0].isupper() else 2} {len(same)}"
            lists["trainval" if image <= trainval else "test"].append(line)
    for name, lines in lists.items():
        (folder / f"annotations/{name}.txt").write_text("\n".join(lines) + "\n")
    return folder


def write_food101(folder, dishes, train, test):
    """Write Food-101's images and lists, some of each dish."""
    (folder / "meta").mkdir(parents=True)
    lists = {"train": {}, "test": {}}
    for number, dish in enumerate(dishes, 1):
        (folder / "images" / dish).mkdir(parents=True)
        for image in range(train + test):
            draw_image(number).save(folder / f"images/{dish}/{10 * number + image}.jpg")
            chosen = lists["train" if image < train else "test"]
            chosen.setdefault(dish, []).append(f"{dish}/{10 * number + image}")
    (folder / "meta/classes.txt").write_text("\n".join(dishes))
    for name, images in lists.items():
        (folder / f"meta/{name}.json").write_text(json.dumps(images))
        (folder / f"meta/{name}.txt").write_text("\n".join(image for those in images.values() for image in those))
    return folder
