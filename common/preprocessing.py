"""How images are prepared for a model: one description for data, modules, checkpoints and exports.

In checkpoints and exports, and between a datamodule and its module, a `Preprocessing` is plain data, a record
(`Preprocessing.as_dict`). For a transform that does not describe itself, a record has only the name of its class, as
`transform`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
from torch import nn
from torchvision.transforms import v2

from .errors import UserError

Three = tuple[float, float, float]
"""A value for each channel."""
Interpolation = Literal["bilinear", "bicubic"]
ResizeMode = Literal["shortest", "squash"]
_RESAMPLING = {"bilinear": 2, "bicubic": 3}  # of Pillow


class Normalization(NamedTuple):
    """Mean and standard deviation of each channel on the 0-1 scale."""

    mean: Three
    std: Three


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How a model expects an image to be prepared.

    Attributes:
        image_size: side S of the network's input in pixels.
        mean: mean of each channel on the 0-1 scale.
        std: standard deviation of each channel on the 0-1 scale.
        interpolation: interpolation of the resize.
        resize_mode: "shortest" resizes the shorter side to `resize` and crops the center; "squash" resizes both sides.
        resize: size of the resize in pixels, where it differs from `image_size`.
    """

    image_size: int
    mean: Three
    std: Three
    interpolation: Interpolation
    resize_mode: ResizeMode = "shortest"
    resize: int | None = None

    def __post_init__(self) -> None:
        for name in ("mean", "std"):  # of JSON they are lists, and perhaps of integers
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        if self.resize == self.image_size:
            object.__setattr__(self, "resize", None)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any], source: str) -> "Preprocessing":
        """Read the record of a checkpoint or an export.

        Args:
            record: plain data, as of `as_dict`.
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

    @classmethod
    def of_open_clip(cls, config: Mapping[str, Any], image_size: int | None = None) -> "Preprocessing":
        """Read open_clip's configuration of a model's preprocessing.

        Args:
            config: has the keys `size`, `mean`, `std`, `interpolation` and `resize_mode`.
            image_size: side of the images in pixels in place of `size`.
        """
        size = config["size"] if image_size is None else image_size
        side = size if isinstance(size, int) else size[0]
        return cls(side, config["mean"], config["std"], config["interpolation"], config["resize_mode"])

    @property
    def normalization(self) -> Normalization:
        """Mean and standard deviation."""
        return Normalization(self.mean, self.std)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, with lists as JSON returns them."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values}

    def as_open_clip(self) -> dict[str, Any]:
        """Return the entry `preprocess_cfg` of `open_clip_config.json`.

        Raises:
            UserError: If images are resized to one size and cropped to another, which the entry cannot express.
        """
        if self.resize is not None:
            raise UserError(
                f"Expected images resized to the size of the crop, which is all that open_clip's configuration can "
                f"express, got a resize to {self.resize} pixels before a crop to {self.image_size}: "
                "evaluate with CLIPEvalTransform as data.eval_transform, or export in another layout."
            )
        config = self.as_dict()
        config["size"] = config.pop("image_size")
        del config["resize"]
        return config

    def as_transformers(self) -> dict[str, Any]:
        """Return the content of `preprocessor_config.json`, which `AutoImageProcessor` of `transformers` reads."""
        side = self.resize or self.image_size
        crops = self.resize_mode == "shortest"
        return {
            "image_processor_type": "CLIPImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"shortest_edge": side} if crops else {"height": side, "width": side},
            "resample": _RESAMPLING[self.interpolation],
            "do_center_crop": crops,
            "crop_size": {"height": self.image_size, "width": self.image_size},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }

    def transform(self) -> v2.Transform:
        """Return a transform from a PIL image, or uint8 [3, H, W], to normalized float [3, S, S]."""
        return v2.Compose([self.pixels(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(self.mean, self.std)])

    def pixels(self) -> v2.Transform:
        """Return a transform from a PIL image, or uint8 [3, H, W], to uint8 [3, S, S], before the normalization.

        Raises:
            UserError: If the weights were trained with another mode of the resize.
        """
        if self.resize_mode not in ("shortest", "squash"):
            raise UserError(
                f"Expected the resize_mode shortest or squash, got {self.resize_mode!r}: choose other weights, padded "
                "images are not supported."
            )
        side = self.resize or self.image_size
        return v2.Compose(
            [
                v2.RGB(),
                v2.Resize(
                    (side, side) if self.resize_mode == "squash" else side,
                    interpolation=v2.InterpolationMode(self.interpolation),
                    antialias=True,
                ),
                v2.CenterCrop(self.image_size),
                v2.ToImage(),
                v2.ToPureTensor(),
            ]
        )


def transform_record(transform: nn.Module) -> dict[str, Any]:
    """Return the record of an evaluation transform.

    Args:
        transform: describes itself with the attribute `preprocessing`, a record; else its class is named.
    """
    record: Mapping[str, Any] | None = getattr(transform, "preprocessing", None)
    cls = type(transform)
    return {"transform": f"{cls.__module__}.{cls.__qualname__}"} if record is None else dict(record)


def recorded_preprocessing(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the record of the evaluation of a checkpoint's training; None if the checkpoint does not contain it.

    Args:
        content: the checkpoint. Lightning stores the datamodule's state under the name of its class.
    """
    states = (state for name, state in content.items() if name != "state_dict" and isinstance(state, Mapping))
    records = (state.get("preprocessing") for state in states)
    return next((dict(record) for record in records if isinstance(record, Mapping)), None)


def training_record(
    content: Mapping[str, Any], image_size: int | None, default: Callable[[], Preprocessing]
) -> dict[str, Any]:
    """Return the record of the evaluation of a training, or a default where the checkpoint contains none.

    Args:
        content: the checkpoint.
        image_size: side of the module's images in pixels; None if the module does not set it.
        default: returns the preprocessing by the module's arguments.
    """
    record = recorded_preprocessing(content)
    if record is None:
        return default().as_dict()
    return record if "transform" in record or image_size is None else record | {"image_size": image_size}


def has_pixels(record: Mapping[str, Any] | None) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a record describes the preparation of pixels."""
    return record is not None and "mean" in record


def described(record: Mapping[str, Any] | None) -> str:
    """Describe a record as the end of a sentence about a model."""
    if record is None or ("mean" not in record and "transform" not in record):
        return "the preprocessing of its images is unknown"
    if "transform" in record:
        return f"the preprocessing of its images, {record['transform']}, cannot be recorded"
    size = record["image_size"]
    resize = record.get("resize") or size
    resizes = {
        "shortest": f"the shorter side resized to {resize}, center crop of {size} x {size} pixels",
        "squash": f"both sides resized to {resize}",
    }
    mean, std = (", ".join(f"{value:.4g}" for value in record[name]) for name in ("mean", "std"))
    return (
        f"preprocessing of its images: {resizes[record['resize_mode']]}, {record['interpolation']}, normalized with "
        f"mean ({mean}) and standard deviation ({std}) on the 0-1 scale"
    )
