"""An ensemble of published models that embeds images and texts.

Shapes: N images, A augmentations of each, T texts, D embedding dimension of all teachers together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from open_clip.transformer import QuickGELU
from torch import Tensor, nn

from ...common.errors import UserError
from ...common.ranges import POSITIVE, SettingsGroup
from ..core.frozen import Frozen
from ..core.precision import unit
from ..networks.own_teacher import class_path, given
from ..networks.published_clip import PublishedCLIP, load_published
from .own_pair import own_pair

View = tuple[int, str]
"""Image size and interpolation of augmented images."""
_PREPROCESSING = ("image_size", "interpolation", "mean", "std", "resize_mode")


@dataclass(frozen=True)
class Teacher(SettingsGroup, option="teacher.models"):
    """A model whose embeddings are stored, or computed in the training step.

    Attributes:
        weights: a tag of open_clip; a folder that open_clip loads; or a file, also a checkpoint of a training here.
            None with a network.
        model: its name, one of open_clip's or MobileCLIP's; ignored if `weights` is a folder.
        scale: factor of its cosines for a student's training, which a reinforcement writes to the manifest; None means
            the one that it was trained with.
        network: a network of your own that replaces the weights, embeds images and texts, and states the normalisation
            of its images (docs/own_teachers.md).
    """

    weights: str | None = None
    model: str | None = None
    scale: Annotated[float | None, POSITIVE] = None
    network: nn.Module | None = None


def published(teacher: Teacher, option: str = "model.teachers") -> PublishedCLIP:
    """Return a loaded teacher.

    Args:
        teacher: the teacher.
        option: the option with the list that it is in, for messages.

    Raises:
        UserError: If it names no network or two, or the network cannot be loaded or does not fit.
    """
    network = given(teacher.network, f"{option}.network")
    if (network is None) == (teacher.weights is None):
        got = "neither" if network is None else f"both ({teacher.weights!r} and {class_path(network)})"
        raise UserError(f"Expected weights or a network of each teacher in {option}, got {got}: give one.")
    if network is not None:
        return own_pair(network, teacher.scale)
    return load_published(teacher.model, str(teacher.weights))


class TeacherEnsemble(nn.Module):
    """Teachers whose embeddings, each of unit length, are concatenated.

    Args:
        teachers: the teachers in the order of their embeddings.
        forward_batch: images, or texts, in one forward pass.
    """

    def __init__(self, teachers: list[Teacher], forward_batch: int) -> None:
        super().__init__()
        self.teachers = teachers
        self.forward_batch = forward_batch
        self.loaded: list[PublishedCLIP] = []
        self.scales: list[float] = []
        self.networks = nn.ModuleList()

    def load(self) -> None:
        """Load the teachers on the first call.

        Raises:
            UserError: If weights are missing, cannot be read or downloaded, or are of another model.
        """
        if self.loaded:
            return
        self.loaded = [published(teacher) for teacher in self.teachers]
        # Read in float32, before the trainer casts the weights.
        self.scales = [
            float(loaded.network.logit_scale.exp()) if teacher.scale is None else teacher.scale
            for teacher, loaded in zip(self.teachers, self.loaded, strict=True)
        ]
        self.networks.extend(Frozen(loaded.network) for loaded in self.loaded)

    @property
    def views(self) -> list[View]:
        """Distinct views that the teachers take."""
        return list(dict.fromkeys(_view(loaded) for loaded in self.loaded))

    @property
    def widths(self) -> list[int]:
        """Embedding dimension of each teacher."""
        return [_width(loaded) for loaded in self.loaded]

    def description(self) -> list[dict[str, Any]]:
        """Return what determines the embeddings as data for JSON."""
        return [
            {
                "model": loaded.model,
                "weights": loaded.weights,
                "sha256": loaded.sha256,
                "quick_gelu": any(isinstance(part, QuickGELU) for part in loaded.network.modules()),
                "width": width,
                "scale": scale,
                "temperature": 1 / scale,
                **{name: getattr(loaded.preprocessing, name) for name in _PREPROCESSING},
            }
            for loaded, width, scale in zip(self.loaded, self.widths, self.scales, strict=True)
        ]

    def embed_images(self, images: list[Tensor]) -> Tensor:
        """Return embeddings [N, A, D] in float32 on the CPU.

        Args:
            images: uint8 [N, A, S, S, 3] of each of `views`.
        """
        parts = []
        for loaded in self.loaded:
            own = images[self.views.index(_view(loaded))]
            flat = own.flatten(0, 1)
            features = [
                loaded.network.encode_image(_normalized(part, loaded)) for part in flat.split(self.forward_batch)
            ]
            parts.append(unit(torch.cat(features)).float().unflatten(0, own.shape[:2]))
        return torch.cat(parts, -1).cpu()

    def embed_texts(self, texts: list[str], device: torch.device) -> Tensor:
        """Return embeddings [T, D] in float32 on the CPU; `device` is that of the networks."""
        parts = []
        for loaded in self.loaded:
            input_ids = loaded.tokenizer(texts).to(device)
            features = [loaded.network.encode_text(part) for part in input_ids.split(self.forward_batch)]
            parts.append(unit(torch.cat(features)).float())
        return torch.cat(parts, -1).cpu()


def _view(loaded: PublishedCLIP) -> View:
    return loaded.preprocessing.image_size, loaded.preprocessing.interpolation


def _normalized(images: Tensor, loaded: PublishedCLIP) -> Tensor:
    """Normalize uint8 images [B, S, S, 3] to [B, 3, S, S] in the precision of a teacher's weights."""
    preprocessing = loaded.preprocessing
    mean, std = (images.new_tensor(part, dtype=torch.float32) for part in (preprocessing.mean, preprocessing.std))
    normalized = ((images.float() / 255 - mean) / std).permute(0, 3, 1, 2)
    return normalized.to(next(loaded.network.parameters()).dtype)


def _width(loaded: PublishedCLIP) -> int:
    """Return the embedding dimension of a model, measured on a text."""
    device = next(loaded.network.parameters()).device
    with torch.no_grad():
        features: Tensor = loaded.network.encode_text(loaded.tokenizer(["a"]).to(device))
    return features.shape[-1]
