"""SHRe's teacher: its weights, the conversion of its images, and the entropy of its posteriors."""

import math
from collections.abc import Mapping
from typing import Any

import timm
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from ...common.errors import UserError
from ...common.preprocessing import Normalization
from ..core.frozen import Frozen
from ..networks.classifier_files import load_frozen
from ..networks.classifiers import LibraryClassifier, build_classifier
from ..networks.own_teacher import TeacherImages, checked_output, given, record, stated_normalization, stated_size
from .settings import TeacherSettings
from .teacher_encoder import ClassToken, load_class_token

OPTION = "model.teacher.network"


def load_teacher(frozen: Frozen[Any], settings: TeacherSettings, outputs: int, image_size: int) -> None:
    """Build the teacher and load its weights, unless they are loaded.

    Args:
        frozen: where the network is put.
        settings: name and weights, or the network.
        outputs: number of its classes, or its width if its target is an embedding.
        image_size: side of the data's images, in pixels.

    Raises:
        UserError: If the weights are missing or do not fit, or a restored checkpoint was trained with other weights.
    """
    if frozen.loaded:
        return
    if (network := given(settings.network, OPTION, outputs)) is not None:
        side = stated_size(network) or image_size
        remedy = "correct the class, set its attribute image_size, or set model.num_classes."
        checked_output(network.eval(), network, torch.zeros(1, 3, side, side), outputs, remedy)
        frozen.network = network
        record(frozen, network, OPTION)
    elif settings.target == "embedding":
        load_class_token(frozen, settings.name, settings.weights, outputs)
    else:
        frozen.network = build_classifier(settings.name, outputs).requires_grad_(False)
        load_frozen(frozen, settings.name, settings.weights, outputs)
    frozen.train()


def teacher_conversion(network: nn.Module, settings: TeacherSettings, data: Any) -> TeacherImages:
    """Return the conversion for a teacher and a datamodule.

    Args:
        network: the teacher's network. A model of timm, or a network of the user's own, names its normalization, and
            its image size where that is fixed.
        settings: normalizations that replace those of network and datamodule.
        data: the run's datamodule, or None. Its property `preprocessing` holds the "mean" and "std" of its images.

    Raises:
        UserError: If the teacher's normalization is known and the data's is not.
    """
    config = _timm_config(network) if settings.network is None else _stated(network)
    size = int(config["input_size"][-1]) if config.get("fixed_input_size", False) else None
    mean, std = settings.mean or config.get("mean"), settings.std or config.get("std")
    if mean is None or std is None:
        return TeacherImages(size, None, None)
    preprocessing = getattr(data, "preprocessing", None) or {}
    data_mean = settings.image_mean or preprocessing.get("mean")
    data_std = settings.image_std or preprocessing.get("std")
    if data_mean is None or data_std is None:
        raise UserError(
            "Expected the normalisation of the images, which the teacher needs, got none from "
            f"{'the run, which has no datamodule' if data is None else type(data).__name__}: set "
            "model.teacher.image_mean and model.teacher.image_std."
        )
    return TeacherImages(size, Normalization(tuple(data_mean), tuple(data_std)), Normalization(tuple(mean), tuple(std)))


def _stated(network: nn.Module) -> Mapping[str, Any]:
    """Return the image configuration of a network of the user's own, in timm's form."""
    size = stated_size(network)
    return stated_normalization(network)._asdict() | {
        "fixed_input_size": size is not None,
        "input_size": (3, size, size),
    }


def _timm_config(network: nn.Module) -> Mapping[str, Any]:
    """Return timm's image configuration of a model's weights; empty for other models."""
    known = network.network if isinstance(network, LibraryClassifier | ClassToken) else network
    if known is not network and type(known).__module__.startswith(timm.__name__):
        config: Any = known.pretrained_cfg
        return dict(config)
    return {}


def log_entropy(entropy: float, classes: int) -> None:
    """Log the mean entropy of the teacher's posteriors, in nats, beside that of a uniform distribution."""
    rank_zero_info(
        f"The teacher's posteriors of the first batch have a mean entropy of {entropy:.2f} nats. Near "
        f"{math.log(classes):.2f} they carry no information; a kl.temperature below 1 sharpens them."
    )
