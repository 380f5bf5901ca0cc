"""Image preprocessing of published image-text models."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torchvision.transforms import v2

from ...common.errors import UserError

Three = tuple[float, float, float]
Interpolation = Literal["bilinear", "bicubic"]


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How a model expects an image to be prepared.

    Attributes:
        image_size: side S of the network's input in pixels.
        mean: mean of each channel on the 0-1 scale.
        std: standard deviation of each channel on the 0-1 scale.
        interpolation: interpolation of the resize.
        resize_mode: "shortest" resizes the shorter side to `image_size` and crops the center; "squash" resizes both.
        resize: size of the resize before the crop, where it differs from `image_size`.
    """

    image_size: int
    mean: Three
    std: Three
    interpolation: Interpolation
    resize_mode: Literal["shortest", "squash"] = "shortest"
    resize: int | None = None

    @classmethod
    def of(cls, record: Mapping[str, Any], source: str) -> "Preprocessing":
        """Read the record of a checkpoint.

        Args:
            record: as of `recorded_preprocessing`.
            source: where the record is from, for messages.

        Raises:
            UserError: If the record names a transform that does not describe itself.
        """
        if "transform" in record:
            raise UserError(
                f"Expected a transform that describes itself, got {record['transform']} in {source}: "
                "evaluate with CLIPEvalTransform or ALBEFEvalTransform as data.eval_transform, or export in a layout "
                "without preprocessing."
            )
        return cls(**{field.name: record[field.name] for field in dataclasses.fields(cls) if field.name in record})

    def transform(self) -> v2.Transform:
        """Return a transform from a PIL image, or uint8 [3, H, W], to normalized float [3, S, S]."""
        return v2.Compose([self.pixels(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(self.mean, self.std)])

    def pixels(self) -> v2.Transform:
        """Return a transform from a PIL image, or uint8 [3, H, W], to uint8 [3, S, S], before the normalization."""
        if self.resize_mode not in ("shortest", "squash"):
            raise UserError(
                f"Expected the resize_mode shortest or squash, got {self.resize_mode!r}: choose other weights, padded "
                "images are not supported."
            )
        squash, side = self.resize_mode == "squash", self.resize or self.image_size
        return v2.Compose(
            [
                v2.RGB(),
                v2.Resize(
                    (side, side) if squash else side,
                    interpolation=v2.InterpolationMode(self.interpolation),
                    antialias=True,
                ),
                v2.CenterCrop(self.image_size),
                v2.ToImage(),
                v2.ToPureTensor(),
            ]
        )
