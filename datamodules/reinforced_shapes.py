"""Coloured shapes with reinforcements, made on the spot: a fixture with which reinforced training runs anywhere."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from ..common.files import replacing
from .core.base import Split, splits_of
from .core.decode import MAX_PIXELS
from .core.sampling import seeded, view_seed
from .reinforced import ReinforcedDataModule, TeacherDtype
from .shapes import Scene, ShapesTable, Thing
from .sources.reinforced_rows import ReinforcedTable
from .sources.reinforced_writer import ReinforcedRecord, write_shard
from .sources.tar import Shards, find_shards, index_cache
from .transforms.clip import Three
from .transforms.replay import AugmentationDraw, Interpolation

SHARD_ROWS = 1000
TEACHER_WIDTHS = (64, 96)
KEPT_OPERATIONS = ("Identity", "ShearX", "ShearY", "Rotate", "Brightness", "Sharpness", "AutoContrast")
"""Operations after which the captions are still right."""
_INVERSE = {
    "to the left of": "to the right of",
    "to the right of": "to the left of",
    "above": "below",
    "below": "above",
}
_FORMAT = 1


def described(scene: Scene) -> dict[str, list[str]]:
    """Captions of a scene, each with the facts that it states; the first states all of them."""
    one, other = (_facts(thing, place) for thing, place in ((scene.first, "first"), (scene.second, "second")))
    relation = [f"relation {scene.relation}", f"first {scene.first.shape} {scene.relation}"]
    first, second = scene.first, scene.second
    return {
        str(scene): [*one, *other, *relation],
        f"{second} {_INVERSE[scene.relation]} {first}": [*one, *other, *relation],
        f"{first} and {second}": [*one, *other],
        f"two shapes, {first.colour} and {second.colour}: {first.shape}, {second.shape}": [*one[:3], *other[:3]],
        f"a {first.colour} {first.shape} {scene.relation} a {second.colour} {second.shape}": [
            *one[:3],
            *other[:3],
            *relation,
        ],
        f"a {first.shape} {scene.relation} a {second.shape}": [one[1], other[1], *relation],
    }


def _facts(thing: Thing, place: str) -> list[str]:
    return [
        f"{place} {thing.colour}",
        f"{place} {thing.shape}",
        f"{place} {thing.colour} {thing.shape}",
        f"{place} {thing.size}",
        f"{place} {thing}",
    ]


class OracleTeacher:
    """A stand-in for a trained CLIP: it is told what an image or a caption says, and looks at neither.

    An embedding is the sum of a random direction for each fact, so that similar scenes have similar embeddings.

    Args:
        width: of the embeddings.
        seed: seed of the directions.
    """

    def __init__(self, width: int, seed: int) -> None:
        self.width = width
        self.seed = seed
        self._directions: dict[str, torch.Tensor] = {}

    def __call__(self, facts: list[str], blur: torch.Tensor | None = None) -> torch.Tensor:
        """Unit embedding [width] of facts; ``blur`` [width] is added, as another look of the same thing would."""
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
    """A scene with its augmentations, captions and embeddings."""
    image, captions = table.image(row), described(table.scene(row))
    texts, facts = list(captions), list(captions.values())
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


class ReinforcedShapesDataModule(ReinforcedDataModule):
    """Two coloured shapes, reinforced: a fixture for trying things, not a benchmark.

    Training reads shards in DataCompDR's layout, which are written to ``folder`` first: images and captions as in
    :class:`ShapesDataModule`, five more captions from the same grammar, and embeddings of two teachers (64 and 96
    wide). These are no trained networks but told what is in the image, and so know more than any CLIP. Validation and
    test are those of :class:`ShapesDataModule`: pairs of objects that training never shows.

    Args:
        folder: where the shards are written to, in a folder of their own for each set of arguments; those that are
            there are read again.
        length: number of training images.
        eval_length: number of images in the validation split, and in the test split; so many different captions each.
        data_seed: seed of what the images show.
        augmentations: number of augmentations recorded for each image (DataCompDR-12M: 30, -1B: 10).
        batch_size: training pairs per process and batch.
        eval_batch_size: images per process and evaluation batch; ``batch_size`` by default.
        num_workers: loader processes per process.
        persistent_workers: keep the training workers alive between epochs.
        pin_memory: page-locked memory; by default where the trainer uses CUDA.
        seed: seed of sample order and of the choice of augmentation and captions.
        image_size: side of the images, stored and trained, pixels.
        image_mean: mean of each channel, on the 0-1 scale; by default as :class:`ReinforcedImageTextDataModule` has it.
        image_std: standard deviation of each channel, on the 0-1 scale; by default as there.
        image_interpolation: interpolation of crops and resizing; by default as there.
        max_tokens: length of the token sequences; the captions need 16.
        teacher_dtype: type in which the teachers' embeddings come.
        max_bad_share: largest share of unusable samples; nothing is ever unusable here.
        predict_texts: see :class:`ReinforcedImageTextDataModule`; prediction takes them beside the test split's
            images.
    """

    def __init__(
        self,
        folder: str = "runs/reinforced_shapes",
        length: int = 8000,
        eval_length: int = 512,
        data_seed: int = 0,
        augmentations: int = 10,
        batch_size: int = 128,
        eval_batch_size: int | None = None,
        num_workers: int = 1,
        persistent_workers: bool = True,
        pin_memory: bool | None = None,
        seed: int | None = None,
        image_size: int = 64,
        image_mean: Three | None = None,
        image_std: Three | None = None,
        image_interpolation: Interpolation | None = None,
        max_tokens: int = 16,
        teacher_dtype: TeacherDtype = "float32",
        max_bad_share: float = 0.05,
        predict_texts: str | list[str] | None = None,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory,
            seed=seed,
            image_size=image_size,
            image_mean=image_mean,
            image_std=image_std,
            image_interpolation=image_interpolation,
            max_tokens=max_tokens,
            teacher_dtype=teacher_dtype,
            max_bad_share=max_bad_share,
            predict_texts=predict_texts,
        )
        if augmentations < 1:
            raise ValueError(f"found augmentations={augmentations}, expected at least 1: raise it")
        self.length = length
        self.eval_length = eval_length
        self.data_seed = data_seed
        self.augmentations = augmentations
        digest = hashlib.sha256(f"{_FORMAT, length, eval_length, data_seed, augmentations, image_size}".encode())
        self.folder = Path(os.path.abspath(os.path.expanduser(folder))) / digest.hexdigest()[:12]
        self._record_hyperparameters()

    def prepare_data(self) -> None:
        """Write the shards, once per node."""
        if "train" not in splits_of(self.trainer.state.fn if self.trainer is not None else None):
            return
        if self.folder.is_dir():
            return
        with replacing(self.folder, keep_existing=True) as staged:  # nodes that share the file system write it at once
            staged.mkdir()
            for number, first in enumerate(range(0, self.length, SHARD_ROWS)):
                write_shard(staged / f"{number:08d}.tar", self._records(first, min(first + SHARD_ROWS, self.length)))

    def _records(self, start: int, stop: int) -> Iterator[ReinforcedRecord]:
        table = self._table("train")
        draw = AugmentationDraw(self.image_size, (0.85, 1.0), (1.0, 1.0), operations=KEPT_OPERATIONS)
        teachers = [OracleTeacher(width, number) for number, width in enumerate(TEACHER_WIDTHS)]
        for row in range(start, stop):
            yield reinforced_scene(table, row, draw, self.augmentations, teachers, self.data_seed)

    def open_split(self, split: Split) -> ReinforcedTable | ShapesTable:
        """The images of a split; ``predict`` is the test split."""
        if split != "train":
            return self._table(split)
        shards = Shards(find_shards([str(self.folder)]), index_cache(str(self.folder)))
        return self.check_training(ReinforcedTable(shards, None, "syn_text", "refuse", MAX_PIXELS))

    def _table(self, split: Split) -> ShapesTable:
        return ShapesTable(split, self.length, self.eval_length, self.image_size, self.data_seed)
