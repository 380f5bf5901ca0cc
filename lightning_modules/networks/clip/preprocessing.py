"""Image preprocessing of MobileCLIP's and open_clip's models: by name, by weights, and of a training here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import open_clip
from open_clip.transform import PreprocessCfg, merge_preprocess_dict

from ....callbacks import AtomicCheckpointIO
from ....common.preprocessing import Interpolation, Normalization, Preprocessing, Three, training_record
from ....common.ranges import COUNT, FINITE, POSITIVE, SettingsGroup
from ...core.checkpoints import is_checkpoint
from .files import CONFIG_NAME, WEIGHTS_NAME, folder_of, is_tag
from .models import model_config, preset_of
from .new_tower import NewTower
from .pair import TowerPair, preprocessing_of_image_tower
from .shapes import Model, resolved


@dataclasses.dataclass(frozen=True)
class ImageSettings(SettingsGroup, option="vision"):
    """Images of a pair of towers. The command line takes these from the data.

    Args:
        image_size: side of the square images in pixels; None means the model's own.
        image_mean: mean of each channel for exports, if no datamodule of this package records it, and for the images of
            a pair whose image tower was trained with another than timm's; None means the model's own.
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
    model = resolved(name)
    if isinstance(model, NewTower) and model.image is None:
        assert model.of is not None
        return preprocessing_of(model.of, image_size or model.image_size)
    if isinstance(model, (TowerPair, NewTower)) and model.image is not None:
        return preprocessing_of_image_tower(model.image, image_size)
    size = image_size or model_config(name)["vision_cfg"]["image_size"]
    preset = preset_of(name)
    if preset is not None:
        return Preprocessing(size, preset.mean, preset.std, preset.interpolation)
    if tag is None:
        listed_name = str(name)
        tags = open_clip.list_pretrained_tags_by_model(listed_name)
    else:
        listed_name = str(resolved(name)).removesuffix("-quickgelu")  # open_clip lists all tags under this name
        tags = [tag]
    listed = open_clip.get_pretrained_cfg(listed_name, tags[0]) if tags else {}
    config = PreprocessCfg(**merge_preprocess_dict(PreprocessCfg(), listed))
    return Preprocessing.of_open_clip(dataclasses.asdict(config), size)


def preprocessing_of_weights(name: Model, weights: str, image_size: int | None = None) -> dict[str, Any] | None:
    """Return the preprocessing that trained weights expect, as a record.

    Args:
        name: as in `build_model`.
        weights: one of open_clip's tags; a folder of open_clip's; or a file, as in `load_weights`.
        image_size: side of the images in pixels; None means the model's own.

    Returns:
        The record of a checkpoint of this package, of the tag, or of open_clip's folder, else the model's; None for a
        checkpoint of another class.
    """
    if is_tag(weights) and not isinstance(resolved(name), TowerPair):
        return preprocessing_of(name, image_size, weights).as_dict()
    path = folder_of(weights) or Path(weights).expanduser()
    if is_checkpoint(path):
        content = AtomicCheckpointIO().load_checkpoint(path)
        return preprocessing_of_training(content) if "model" in content.get("hyper_parameters", {}) else None
    record = preprocessing_of(name, image_size).as_dict()
    config = (path if path.is_dir() else path.parent) / CONFIG_NAME
    if (path.is_dir() or path.name == WEIGHTS_NAME) and config.is_file():
        stored = json.loads(config.read_text(encoding="utf-8")).get("preprocess_cfg", {})
        record |= {field: value for field, value in stored.items() if field in record}
    return record


def preprocessing_of_training(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preprocessing of the evaluation of a training, as a record.

    Without a record of a datamodule of this package it is that of the module's arguments.

    Args:
        content: the training's checkpoint.
    """
    arguments = content["hyper_parameters"]
    size = arguments["vision"]["image_size"]
    return training_record(content, size, lambda: preprocessing_of_arguments(arguments))


def preprocessing_of_arguments(arguments: Mapping[str, Any]) -> Preprocessing:
    """Return the preprocessing that a module's arguments `model` and `vision` give, completed by the model's own."""
    names = [field.name for field in dataclasses.fields(ImageSettings)]
    images = ImageSettings(**{name: arguments["vision"].get(name) for name in names})
    return preprocessing_with(arguments["model"], images)


def training_normalization(datamodule: Any, model: Model, vision: ImageSettings) -> Normalization:
    """Return the normalization of training images: that of the run's datamodule, else the student's."""
    normalization: Any = getattr(datamodule, "normalization", None)
    if normalization is None:
        return preprocessing_with(model, vision).normalization
    return Normalization(*map(tuple, normalization))


def preprocessing_with(model: Model, vision: ImageSettings) -> Preprocessing:
    """Return the preprocessing of a model's images, with the given settings in place of its own."""
    settings = {name: getattr(vision, f"image_{name}") for name in ("mean", "std", "interpolation")}
    preprocessing = preprocessing_of(model, vision.image_size)
    return dataclasses.replace(preprocessing, **{name: value for name, value in settings.items() if value is not None})
