"""Evaluate the quickstarts' checkpoints on drawn shapes, written as sets in DataComp's layout.

    python benchmarks/evaluate_shapes.py --root sets --out results albef=last.ckpt

Writes the sets, then runs `vlightning evaluate` for each checkpoint, and prints a table. The images are those of
`ShapesDataModule`'s test split: two objects each, whose combination occurs in no training image. The sets take the
places of public ones, so that the command reads them without options:

- color (in the place of CIFAR-10): which of 8 colors the first object of the caption has; chance 1/8;
- shape (STL-10): which of 5 shapes; chance 1/5;
- object (Oxford-IIIT Pet; mean per-class recall): which of 40 colors and shapes; chance 1/40;
- relation (KITTI): which of the 4 relations of the two objects; chance 1/4;
- captions (Flickr): retrieval among 512 images, mean R@1; chance 1/512.

The other object of an image also has a color and a shape, so a model without a sense of order gets at most about half.
To classify, the prompt is the part of a caption that names the class.
"""

import argparse
import io
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
from PIL import Image

from vlightning.commands.evaluate.results import read_results
from vlightning.commands.evaluate.tasks import TASKS, Task
from vlightning.datamodules.drawn.shapes import COLORS, RELATIONS, SHAPES, SIZES, Scene, ShapesTable

OBJECTS = [f"{color} {shape}" for color in COLORS for shape in SHAPES]
PAIRS = [(one, other) for one, other in zip(OBJECTS[::3], reversed(OBJECTS[::3]), strict=True) if one != other]
CLASSIFIED: dict[str, tuple[Task, list[str], list[str], Callable[[Scene], str]]] = {
    "color": (
        TASKS["cifar10"],
        list(COLORS),
        [f"a {size} {{c}} {shape}" for size in SIZES for shape in SHAPES],
        lambda scene: scene.first.color,
    ),
    "shape": (
        TASKS["stl10"],
        list(SHAPES),
        [f"a {size} {color} {{c}}" for size in SIZES for color in COLORS],
        lambda scene: scene.first.shape,
    ),
    "object": (
        TASKS["vtab/pets"],
        OBJECTS,
        [f"a {size} {{c}}" for size in SIZES],
        lambda scene: f"{scene.first.color} {scene.first.shape}",
    ),
    "relation": (
        TASKS["vtab/kitti_closest_vehicle_distance"],
        list(RELATIONS),
        [f"a large {one} {{c}} a small {other}" for one, other in PAIRS],
        lambda scene: scene.relation,
    ),
}
"""Set, classes, prompts and the class of a scene."""
CAPTIONS = TASKS["retrieval/flickr_1k_test_image_text_retrieval"]
CHANCE = {"color": 1 / 8, "shape": 1 / 5, "object": 1 / 40, "relation": 1 / 4, "captions": 1 / 512}
KEYS = {**{name: task.key for name, (task, *_) in CLASSIFIED.items()}, "captions": CAPTIONS.key}


def write_sets(root: Path, images: int, side: int, seed: int) -> None:
    """Write the sets; the images are the same in all."""
    rows = ShapesTable("test", 1, images, side, seed)
    encoded = [_png(rows.image(row)) for row in range(images)]
    for task, names, templates, label in CLASSIFIED.values():
        folder = root / task.folder
        (folder / "test").mkdir(parents=True)
        (folder / "classnames.txt").write_text("\n".join(names) + "\n")
        (folder / "zeroshot_classification_templates.txt").write_text("\n".join(templates) + "\n")
        (folder / "test/nshards.txt").write_text("1\n")
        with tarfile.open(folder / "test/0.tar", "w") as tar:
            for row, image in enumerate(encoded):
                number = names.index(label(rows.scene(row)))
                for kind, content in (("png", image), ("cls", str(number).encode())):
                    member = tarfile.TarInfo(f"s{row:07}.{kind}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    (root / CAPTIONS.folder).mkdir()
    table = [{"image": {"bytes": image, "path": None}, "caption": rows.captions(r)} for r, image in enumerate(encoded)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), root / CAPTIONS.folder / "test.parquet")


def _png(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def main() -> None:
    """Write the sets, evaluate the checkpoints, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", help="name=checkpoint")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--side", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    typed = parser.parse_args()
    if not typed.root.exists():
        write_sets(typed.root, typed.images, typed.side, typed.seed)
    print(f"| model | {' | '.join(KEYS)} |\n|---|{'---:|' * len(KEYS)}")
    for given in typed.checkpoints:
        name, _, checkpoint = given.partition("=")
        out = typed.out / f"{name}.jsonl"
        words = [
            "--model",
            checkpoint,
            "--root",
            str(typed.root),
            "--tasks",
            ",".join(KEYS.values()),
            "--out",
            str(out),
        ]
        typed.out.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "vlightning.cli", "evaluate", *words], check=True, stdout=sys.stderr)
        _print_row(name, {result.key: result.main or 0.0 for result in read_results(out)})
    _print_row("chance", {KEYS[name]: value for name, value in CHANCE.items()})


def _print_row(name: str, values: dict[str, float]) -> None:
    print(f"| {name} | {' | '.join(f'{100 * values[key]:.1f}' for key in KEYS.values())} |", flush=True)


if __name__ == "__main__":
    main()
