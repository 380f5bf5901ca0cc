"""Pairs of image files, read by the package's loader.

`VLIGHTNING_IMAGES` names a folder of JPEG, PNG or WebP files; otherwise shapes are drawn and written as JPEG files.
"""

import os
import random
from pathlib import Path
from typing import Any

from PIL import Image
from setting import Setting

from vlightning.datamodules import ShapesDataModule
from vlightning.datamodules.drawn.shapes import ShapesTable

DATA: dict[str, dict[str, Any]] = {
    "CLIP": {"image_size": 224, "tokenizer": "clip", "max_tokens": 77},
    "ALBEF": {"image_size": 256, "max_tokens": 25, "rand_augment": True},
    "MM-LG": {"image_size": 224, "tokenizer": "clip", "max_tokens": 77},
    "SHRe": {"image_size": 224, "max_tokens": 64},
}
"""By the first word of the case. Reinforced pairs and views of images need files of their own."""
TOY: dict[str, dict[str, Any]] = {
    "CLIP": {"image_size": 32, "max_tokens": 16},
    "ALBEF": {"image_size": 16, "max_tokens": 8},
    "MM-LG": {"image_size": 16, "max_tokens": 6},
    "SHRe": {"image_size": 16, "max_tokens": 8},
}
WORDS = {"ALBEF": (30522, 2000), "SHRe": (30522, 120)}
"""Entries of the vocabulary, at full and at toy size."""


class Files(ShapesTable):
    """Image files with the captions of shapes.

    Args:
        files: the files.
        length: rows of the training split, which repeats the files.
    """

    def __init__(self, files: list[Path], length: int) -> None:
        super().__init__("train", length, 1, 64, 0)
        self._files = files

    def image(self, row: int) -> Image.Image:
        """Read an image."""
        return Image.open(self._files[row % len(self._files)]).convert("RGB")


class FilesDataModule(ShapesDataModule):
    """Pairs of image files and captions of shapes.

    Args:
        files: the files.
        **options: see `ShapesDataModule`.
    """

    def __init__(self, files: list[Path], **options: Any) -> None:
        super().__init__(**options)
        self._image_files = files

    def open_split(self, split: Any) -> Files:
        """Open the files, of any split."""
        return Files(self._image_files, self.length)


def loader(setting: Setting, case: str, images: int, steps: int, folder: Path) -> FilesDataModule | None:
    """Return the data of a case; None if its batches hold more than pairs.

    Args:
        setting: of the part.
        case: a name of `CASES`.
        images: images of a batch.
        steps: batches to read.
        folder: for drawn images and the vocabulary.
    """
    name = case.split()[0].rstrip(",")
    if name not in DATA:
        return None
    options = DATA[name] | (TOY[name] if setting.pretend else {})
    if name in WORDS:
        entries = WORDS[name][setting.pretend]
        special = {0: "[PAD]", 100: "[UNK]", 101: "[CLS]", 102: "[SEP]", 103: "[MASK]"}
        lines = [special.get(entry, f"[unused{entry}]" if entry < 104 else f"word{entry}") for entry in range(entries)]
        (folder / "vocab.txt").write_text("\n".join(lines))
        options |= {"tokenizer": str(folder / "vocab.txt"), "vocab_size": entries}
    else:
        options["vocab_size"] = 49408
    return FilesDataModule(
        files_of(setting, folder),
        length=images * steps,
        batch_size=images,
        num_workers=workers(setting),
        min_crop=0.5,
        **options,
    )


def workers(setting: Setting) -> int:
    """Return the number of the loader's workers: one core stays for the step."""
    return 0 if setting.pretend else max(1, min(16, (os.cpu_count() or 2) - 1))


def files_of(setting: Setting, folder: Path) -> list[Path]:
    """Return the files of the given folder, in random order; or drawn ones."""
    if given := os.environ.get("VLIGHTNING_IMAGES"):
        endings = {".jpg", ".jpeg", ".png", ".webp"}
        found = sorted(path for path in Path(given).expanduser().rglob("*") if path.suffix.lower() in endings)
        if not found:
            raise FileNotFoundError(f"Expected images in VLIGHTNING_IMAGES={given}, found none: correct the folder.")
        random.Random(0).shuffle(found)
        return found
    side, count = (64, 4) if setting.pretend else (384, 128)
    table = ShapesTable("train", count, 1, side, 0)
    for row in range(count):
        table.image(row).save(folder / f"{row}.jpg", quality=90)
    return sorted(folder.glob("*.jpg"))
