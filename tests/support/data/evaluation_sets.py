"""Small sets in DataComp's layout, and a model without towers whose features follow from the pixels."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from PIL import Image

from vlightning.commands.evaluate.model import ImageTextModel
from vlightning.commands.evaluate.tasks import Task

COLORS = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "white": (255, 255, 255),
    "black": (0, 0, 0),
    "yellow": (255, 255, 0),
}
TEMPLATES = ["a photo of a {c} square.", "a {c} thing"]
NAMES = list(COLORS)
LABELS = [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 0]
SHOWN = [0, 1, 2, 3, 4, 5, 0, 1, 3, 3, 0, 1]  # colors of the images, which a model of colors takes for their classes
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 5, 5]
OBJECTS = [f"{color}-{seed}" for seed in range(2) for color in COLORS]
CUES = [
    {"cue": "Red", "candidates": OBJECTS[:5], "associations": ["red-0"]},
    {"cue": "blue", "candidates": OBJECTS, "associations": ["blue-0", "blue-1"]},
    {"cue": "Apple", "candidates": OBJECTS[:10], "associations": ["white-0", "red-0"]},
]
FACES = [[place % 2, place // 2 % 2, place % 3, int(place % 3 != 1)] for place in range(len(SHOWN))]
"""Age, gender, race, and whether the race is another than white."""
FACE_NAMES = [
    *(f"race:{color}" for color in ("green", "red", "blue")),
    *(f"gender:{color}" for color in ("red", "blue")),
    *(f"age:{color}" for color in ("black", "white")),
    *(f"toxic:{person}" for person in ["green"] * 14 + ["blue"] * 4 + ["black"] * 3),
]


def write_task(root, task: Task):
    """Write a small set of a task in the public layout."""
    if task.kind == "classification":
        with_metadata = task.group is not None or task.key.startswith("wilds")
        write_image_set(root, task, LABELS, SHOWN, [[group, 7, 1] for group in GROUPS] if with_metadata else None)
    elif task.kind == "retrieval":
        write_retrieval(root, task, NAMES[:5])
    elif task.kind == "winogavil":
        write_winogavil(root, task, CUES)
    elif task.kind == "negatives":
        write_negatives(root, task, [("red", "a red car", "a blue car"), ("blue", "a red car", "a blue car")])
    else:
        templates = [f"{attribute}:a {{c}} one" for attribute in ("race", "gender", "age", "toxic")]
        write_image_set(root, task, [None] * len(SHOWN), SHOWN, FACES, FACE_NAMES, templates)


def picture(color, seed=0, kind="PNG"):
    """An encoded image of 8 x 8 pixels of a color, with noise."""
    noise = np.random.default_rng(seed).integers(-20, 21, (8, 8, 3))
    pixels = (np.array(COLORS[color]) + noise).clip(0, 255).astype(np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, kind)
    return content.getvalue()


def write_tar(file, samples):
    """Write members of samples by kind, such as {"png": bytes, "cls": bytes}."""
    with tarfile.open(file, "w") as tar:
        for number, members in enumerate(samples):
            for kind, content in members.items():
                info = tarfile.TarInfo(f"s{number:07}.{kind}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def array(values):
    content = io.BytesIO()
    np.save(content, np.array(values))
    return content.getvalue()


def write_image_set(root, task: Task, labels, shown=None, metadata=None, names=None, templates=None, split="test"):
    """Write a set.

    Args:
        root: The folder of the sets.
        task: The task.
        labels: The label of each image; None for none.
        shown: The color of each image, by number; by default that of its label.
        metadata: The numbers beside each image.
        names: Class names.
        templates: Prompts.
        split: Written split.
    """
    folder = Path(root) / task.folder
    (folder / split).mkdir(parents=True, exist_ok=True)
    names = names or list(COLORS)
    (folder / "classnames.txt").write_text("\n".join(names) + "\n")
    (folder / "zeroshot_classification_templates.txt").write_text("\n".join(templates or TEMPLATES) + "\n")
    shown = labels if shown is None else shown
    samples = []
    for number, (label, color) in enumerate(zip(labels, shown, strict=True)):
        kind = ("png", "webp", "jpg")[number % 3]
        encoded = picture(list(COLORS)[color], number, {"jpg": "JPEG"}.get(kind, kind.upper()))
        members = {kind: encoded} | ({} if label is None else {"cls": str(label).encode()})
        samples.append(members | ({} if metadata is None else {"npy": array(metadata[number])}))
    shards = [samples[: len(samples) // 2], samples[len(samples) // 2 :]]
    (folder / split / "nshards.txt").write_text(f"{len(shards)}\n")
    for shard, part in enumerate(shards):
        write_tar(folder / split / f"{shard}.tar", part)
    return folder


def write_retrieval(root, task: Task, colors, captions=("a {} square", "it is {}")):
    """Write a table of images with captions, in which `{}` is the color and `{n}` the row."""
    folder = Path(root) / task.folder
    folder.mkdir(parents=True)
    rows = [
        {
            "image": {"bytes": picture(color, seed), "path": None},
            "caption": [caption.format(color, n=seed) for caption in captions],
        }
        for seed, color in enumerate(colors)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "test-00000-of-00001.parquet")


def write_winogavil(root, task: Task, rows):
    """Write rows of cue, candidates and associations, all of them colors with a number after them."""
    folder = Path(root) / task.folder
    (folder / "images").mkdir(parents=True)
    for name in {name for row in rows for name in row["candidates"]}:
        color, _, seed = name.partition("-")
        (folder / "images" / f"{name}.jpg").write_bytes(picture(color, int(seed), "JPEG"))
    (folder / f"{folder.name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_negatives(root, task: Task, rows):
    """Write rows of image (color), caption and negative."""
    folder = Path(root) / task.folder
    folder.mkdir(parents=True)
    lines = []
    for number, (color, caption, negative) in enumerate(rows):
        (folder / f"{number}.png").write_bytes(picture(color, number))
        lines.append(json.dumps({"image": f"{number}.png", "caption": caption, "negative": negative}))
    (folder / f"{folder.name}.jsonl").write_text("\n".join(lines))


def color_model(name="colors", wrong=()):
    """A model whose features are the mean color, of the image and of the colors named in a text.

    Args:
        name: Name of the model.
        wrong: Colors that it takes for green in texts.
    """
    network = torch.nn.Linear(1, 1)

    def finish(pixels):
        return pixels.float() / 255

    def images(image):
        return image.mean((2, 3)) * 2 - 1 + 1e-3

    def texts(given):
        found = []
        for text in given:
            colors = [color for color in COLORS if color in text.lower()] or ["white"]
            values = [COLORS["green" if color in wrong else color] for color in colors]
            # Texts of one color differ by less than colors do: ties would be broken by the processor's rounding.
            letters = sum(map(ord, text)) % 101 / 101
            found.append(
                torch.tensor(values, dtype=torch.float32).mean(0) / 127.5 - 1 + torch.tensor([1e-3, 1e-2 * letters, 0])
            )
        return torch.stack(found)

    def transform(image):
        return torch.from_numpy(np.array(image.resize((8, 8)))).permute(2, 0, 1)

    model = ImageTextModel(name, network, images, texts, transform, finish)
    model.sha256 = f"sha-{name}-{'-'.join(wrong)}"  # no weights tell these models apart
    return model
