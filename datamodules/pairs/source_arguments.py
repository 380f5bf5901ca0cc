"""The arguments that the datamodules of image files with texts share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import lightning.pytorch as pl
from torch import nn

from ...common.ranges import COUNT, CheckedArguments
from ..base.decode import MAX_PIXELS
from ..reading.resolve import Sources, by_split
from ..transforms.albef import pair_train_transform


class SourceArguments(CheckedArguments, pl.LightningDataModule):
    """Sources of images with texts, and ALBEF's training transform; a base class before all others.

    Args:
        train: training rows: a file, glob pattern or folder, a `Source`, or a list of these, read one after another.
        validation: rows for validation, in the same forms.
        test: rows for testing, in the same forms.
        predict: rows for prediction, in the same forms, which need no captions, answers, labels or right boxes.
        image_root: folder that relative image paths start from, and that no path may leave; by default the folder of
            the file that names them.
        image_size: side of the square images, pixels; by default that of the module, or else ALBEF's: 384 for
            questions, entailment and NLVR2, 256 for captions and grounding.
        horizontal_flip: whether to flip half of the training images, as ALBEF does; set it to false if texts
            distinguish left and right. Has no effect with `train_transform`.
        max_pixels: images with more pixels are refused before they are decoded.
        cache_dir: folder for the memory-mapped copies of the `datasets` library.
    """

    # Members of `ImageTransforms`
    expected_preprocessing: Callable[[], Mapping[str, Any]]
    image_size: Any

    def __init__(
        self,
        train: Sources = None,
        validation: Sources = None,
        test: Sources = None,
        predict: Sources = None,
        image_root: str | None = None,
        image_size: Annotated[int | None, COUNT] = None,
        horizontal_flip: bool = True,
        max_pixels: Annotated[int, COUNT] = MAX_PIXELS,
        cache_dir: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.sources = by_split(train, validation, test, predict)
        self.image_root = image_root
        self.image_size = image_size
        self.horizontal_flip = horizontal_flip
        self.max_pixels = max_pixels
        self.cache_dir = cache_dir

    def default_train_transform(self) -> nn.Module:
        """Return ALBEF's training transform with `train_options`, and the normalization that trained weights expect."""
        flip = 0.5 if self.horizontal_flip else 0.0
        expected = self.expected_preprocessing()
        return pair_train_transform(self.image_size, expected, horizontal_flip=flip, **self.train_options())

    def train_options(self) -> dict[str, Any]:
        """Return arguments of `ALBEFTrainTransform`: crops of at least half of the area, as in ALBEF's fine-tuning."""
        return {"scale": (0.5, 1.0)}
