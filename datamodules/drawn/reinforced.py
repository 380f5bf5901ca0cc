"""Generated colored shapes with reinforcements: a fixture for reinforced training without a download."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch

from ...common.files import replacing
from ...common.ranges import COUNT, SEED
from ..base.decode import MAX_PIXELS
from ..base.sampling import seeded, view_seed
from ..base.stages import Split
from ..pairs.datamodule import PairDataModule
from ..reading.cache import index_cache
from ..reading.shards import Shards, find_shards
from ..reinforced.datamodule import ReinforcedBatches
from ..reinforced.rows import ReinforcedTable
from ..reinforced.writer import ReinforcedRecord, write_shard
from ..transforms.replay import AugmentationDraw
from .shapes import Scene, ShapesTable, Thing

SHARD_ROWS = 1000
TEACHER_WIDTHS = (64, 96)
KEPT_OPERATIONS = ("Identity", "ShearX", "ShearY", "Rotate", "Brightness", "Sharpness", "AutoContrast")
"""Operations that keep the captions correct."""
_INVERSE = {
    "to the left of": "to the right of",
    "to the right of": "to the left of",
    "above": "below",
    "below": "above",
}


def captions_with_facts(scene: Scene) -> dict[str, list[str]]:
    """Return the captions of a scene, each with the facts that it states; the first caption states all facts."""
    first, second, _ = scene
    first_facts = _facts(first, "first")
    second_facts = _facts(second, "second")
    looks = [*first_facts[:3], *second_facts[:3]]
    relation = [f"relation {scene.relation}", f"first {first.shape} {scene.relation}"]
    return {
        str(scene): [*first_facts, *second_facts, *relation],
        f"{second} {_INVERSE[scene.relation]} {first}": [*first_facts, *second_facts, *relation],
        f"{first} and {second}": [*first_facts, *second_facts],
        f"two shapes, {first.color} and {second.color}: {first.shape}, {second.shape}": looks,
        f"a {first.color} {first.shape} {scene.relation} a {second.color} {second.shape}": [*looks, *relation],
        f"a {first.shape} {scene.relation} a {second.shape}": [first_facts[1], second_facts[1], *relation],
    }


def _facts(thing: Thing, role: str) -> list[str]:
    return [
        f"{role} {thing.color}",
        f"{role} {thing.shape}",
        f"{role} {thing.color} {thing.shape}",
        f"{role} {thing.size}",
        f"{role} {thing}",
    ]


class OracleTeacher:
    """Teacher that embeds the facts that an image or a caption shows, instead of the image or the caption.

    An embedding is the sum of a random direction for each fact, so that similar scenes have similar embeddings.
    """

    def __init__(self, width: int, seed: int) -> None:
        self.width = width
        self.seed = seed
        self._directions: dict[str, torch.Tensor] = {}

    def __call__(self, facts: list[str], blur: torch.Tensor | None = None) -> torch.Tensor:
        """Return the unit-length embedding [width] of facts.

        Args:
            facts: the facts.
            blur: vector [width] that is added before the normalization, as the effect of an augmentation.
        """
        total = torch.stack([self._direction(fact) for fact in facts]).sum(0)
        return torch.nn.functional.normalize(total if blur is None else total + blur, dim=0)

    def _direction(self, fact: str) -> torch.Tensor:
        if fact not in self._directions:
            digest = hashlib.blake2b(f"{self.seed}\0{fact}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
            self._directions[fact] = torch.randn(self.width, generator=generator)
        return self._directions[fact]


def reinforced_scene(
    table: ShapesTable, row: int, draw: AugmentationDraw, augmentations: int, teachers: list[OracleTeacher], seed: int
) -> ReinforcedRecord:
    """Return a scene with its augmentations, captions and embeddings."""
    image = table.image(row)
    captions = captions_with_facts(table.scene(row))
    texts = list(captions)
    facts = list(captions.values())
    with seeded(view_seed(seed, row + 1)):
        drawn = [draw(image.height, image.width) for _ in range(augmentations)]
        blurs = [[torch.randn(teacher.width) for teacher in teachers] for _ in drawn]
    content = io.BytesIO()
    image.save(content, "JPEG", quality=95)

    def of_teachers(stated: list[str], blur: list[torch.Tensor] | None = None) -> torch.Tensor:
        added = [None] * len(teachers) if blur is None else blur
        return torch.cat([teacher(stated, one) for teacher, one in zip(teachers, added, strict=True)])

    return ReinforcedRecord(
        key=f"{row:08d}",
        image=content.getvalue(),
        suffix="jpg",
        caption=texts[0],
        synthetic={"syn_text": texts[1:]},
        augmentations=drawn,
        size=(image.height, image.width),
        image_embeddings=torch.stack([of_teachers(facts[0], blur) for blur in blurs]),
        text_embeddings=of_teachers(facts[0])[None],
        synthetic_embeddings={"syn_text": torch.stack([of_teachers(stated) for stated in facts[1:]])},
    )


class ReinforcedShapesDataModule(ReinforcedBatches, PairDataModule):
    """Two colored shapes with reinforcements: a fixture for trials, not a benchmark.

    Training reads shards in DataCompDR's layout, which are first written to `folder`: images and captions as in
    `ShapesDataModule`, five more captions from the same grammar, and embeddings of two teachers (of dimension 64
    and 96). The teachers are not trained networks; they embed the content of the scene. Validation and test are those
    of `ShapesDataModule`: pairs of objects that do not occur in training. Prediction reads the images of the test
    split.

    Args:
        folder: folder of the shards, with one subfolder per set of arguments; existing shards are reused.
        length: number of training images.
        eval_length: number of images in the validation split, and in the test split, each with a different caption.
        data_seed: seed of the content of the images.
        augmentations: number of augmentations recorded for each image (DataCompDR-12M: 30, -1B: 10).
        batch_size: training pairs per process and batch.
        num_workers: loader workers per process.
        image_size: side of the stored and of the training images, pixels.
        max_tokens: length of the token sequences; the captions need 16.
    """

    def __init__(
        self,
        folder: str = "runs/reinforced_shapes",
        length: Annotated[int, COUNT] = 8000,
        eval_length: Annotated[int, COUNT] = 512,
        data_seed: Annotated[int, SEED] = 0,
        augmentations: Annotated[int, COUNT] = 10,
        batch_size: int = 128,
        num_workers: int = 1,
        image_size: Annotated[int, COUNT] = 64,
        max_tokens: int = 16,
        **options: Any,
    ) -> None:
        super().__init__(
            image_size=image_size, max_tokens=max_tokens, batch_size=batch_size, num_workers=num_workers, **options
        )
        self.length = length
        self.eval_length = eval_length
        self.data_seed = data_seed
        self.augmentations = augmentations
        digest = hashlib.sha256(f"{length, eval_length, data_seed, augmentations, image_size}".encode())
        self.folder = Path(os.path.abspath(os.path.expanduser(folder))) / digest.hexdigest()[:12]

    def prepare_data(self) -> None:
        """Write the shards, once per node."""
        if "train" not in self.splits_to_prepare() or self.folder.is_dir():
            return
        # Another node may have written the folder on a shared file system.
        with replacing(self.folder, keep_existing=True) as staged:
            staged.mkdir()
            for number, start in enumerate(range(0, self.length, SHARD_ROWS)):
                stop = min(start + SHARD_ROWS, self.length)
                write_shard(staged / f"{number:08d}.tar", self._records(start, stop))

    def _records(self, start: int, stop: int) -> Iterator[ReinforcedRecord]:
        table = self._table("train")
        draw = AugmentationDraw(self.image_size, (0.85, 1.0), (1.0, 1.0), operations=KEPT_OPERATIONS)
        teachers = [OracleTeacher(width, number) for number, width in enumerate(TEACHER_WIDTHS)]
        for row in range(start, stop):
            yield reinforced_scene(table, row, draw, self.augmentations, teachers, self.data_seed)

    def open_split(self, split: Split) -> ReinforcedTable | ShapesTable:
        """Open the images of a split; `predict` is the test split."""
        if split != "train":
            return self._table(split)
        shards = Shards(find_shards([str(self.folder)]), index_cache(str(self.folder)))
        rows = ReinforcedTable(shards, None, "syn_text", "refuse", MAX_PIXELS)
        self.check_rows(rows, split)
        return rows

    def _table(self, split: Split) -> ShapesTable:
        return ShapesTable(split, self.length, self.eval_length, self.image_size, self.data_seed)
