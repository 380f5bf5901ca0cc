"""Image preprocessing of MobileCLIP's and open_clip's models: by name, by file, and of a training here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import open_clip
from open_clip.transform import PreprocessCfg, merge_preprocess_dict

from ....callbacks import AtomicCheckpointIO
from ....common.ranges import COUNT, FINITE, POSITIVE, SettingsGroup
from ...core.clip_preprocessing import Interpolation, Preprocessing, Three
from ...core.preprocessing import is_checkpoint, recorded_preprocessing
from ...core.teacher_images import Normalisation
from ..open_clip_folder import CONFIG_NAME, WEIGHTS_NAME
from .models import model_config, preset_of
from .shapes import Model


@dataclasses.dataclass(frozen=True)
class ImageSettings(SettingsGroup, option="vision"):
    """Images of a pair of towers. The command line takes these from the data.

    Args:
        image_size: side of the square images in pixels; None means the model's own.
        image_mean: mean of each channel for exports, if no datamodule of this package records it; None means the
            model's own.
        image_std: standard deviation that belongs to `image_mean`.
        image_interpolation: interpolation of the resize for exports; None means the model's own.
    """

    image_size: Annotated[int | None, COUNT] = None
    image_mean: Annotated[Three | None, FINITE] = None
    image_std: Annotated[Three | None, POSITIVE] = None
    image_interpolation: Interpolation | None = None


def preprocessing_of(name: Model, image_size: int | None = None, tag: str | None = None) -> Preprocessing:
    """Return the preprocessing of a model.

    Weights of one name may differ in it; of open_clip's models it is that of the first listed weights, or of `tag`.

    Args:
        name: as in `build_model`.
        image_size: side of the images in pixels; None means the model's own.
        tag: one of open_clip's tags of the model.

    Raises:
        UserError: As `build_model` does.
    """
    size = image_size or model_config(name)["vision_cfg"]["image_size"]
    preset = preset_of(name)
    if preset is not None:
        return Preprocessing(size, preset.mean, preset.std, preset.interpolation)
    tags = [tag] if tag is not None else open_clip.list_pretrained_tags_by_model(str(name))
    listed = open_clip.get_pretrained_cfg(str(name), tags[0]) if tags else {}
    own = PreprocessCfg(**merge_preprocess_dict(PreprocessCfg(), listed))
    return Preprocessing(size, own.mean, own.std, own.interpolation, own.resize_mode)


def preprocessing_of_file(name: Model, path: str | Path, image_size: int | None = None) -> dict[str, Any] | None:
    """Return the preprocessing that weights in a file expect, as a record (`recorded_preprocessing`).

    Args:
        name: as in `build_model`.
        path: as in `load_weights`.
        image_size: side of the images in pixels; None means the model's own.

    Returns:
        The record of a checkpoint of this package or of open_clip's folder, else the model's; None for a checkpoint
        without.
    """
    file = Path(path).expanduser()
    if is_checkpoint(file):
        content = AtomicCheckpointIO().load_checkpoint(file)
        return preprocessing_of_training(content) if "model" in content.get("hyper_parameters", {}) else None
    own = dataclasses.asdict(preprocessing_of(name, image_size))
    config = (file if file.is_dir() else file.parent) / CONFIG_NAME
    if (file.is_dir() or file.name == WEIGHTS_NAME) and config.is_file():
        stored = json.loads(config.read_text(encoding="utf-8")).get("preprocess_cfg", {})
        own |= {field: value for field, value in stored.items() if field in own}
    return own


def preprocessing_of_training(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preprocessing of the evaluation of a training, as a record.

    Without a record of a datamodule of this package it is that of the module's arguments.

    Args:
        content: the training's checkpoint.
    """
    recorded = recorded_preprocessing(content)
    arguments = content["hyper_parameters"]
    if recorded is None:
        return preprocessing_of_arguments(arguments)
    if "transform" in recorded:
        return recorded
    return recorded | {"image_size": arguments["vision"]["image_size"] or recorded.get("image_size")}


def preprocessing_of_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preprocessing that a module's arguments `model` and `vision` give, completed by the model's own."""
    names = [field.name for field in dataclasses.fields(ImageSettings)]
    images = ImageSettings(**{name: arguments["vision"].get(name) for name in names})
    return dataclasses.asdict(student_preprocessing(arguments["model"], images))


def student_preprocessing(model: Model, vision: ImageSettings) -> Preprocessing:
    """Return the preprocessing of a model's images, with the given values in place of its own."""
    given = {part: getattr(vision, f"image_{part}") for part in ("mean", "std", "interpolation")}
    own = preprocessing_of(model, vision.image_size)
    return dataclasses.replace(own, **{part: value for part, value in given.items() if value is not None})


def training_normalization(datamodule: Any, model: Model, vision: ImageSettings) -> Normalisation:
    """Return the normalization of training images: that of the run's datamodule, else the student's."""
    found: Any = getattr(datamodule, "normalization", None)
    if found is None:
        own = student_preprocessing(model, vision)
        found = own.mean, own.std
    return Normalisation(*map(tuple, found))
