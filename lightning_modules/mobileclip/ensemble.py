"""An ensemble of published models, or of networks of the user's own, that embeds images and texts.

Shapes: N images, A augmentations of each, T texts, D embedding dimension of all teachers together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from open_clip import SimpleTokenizer
from open_clip.transformer import QuickGELU
from torch import Tensor, nn

from ...common.errors import UserError
from ...common.preprocessing import Preprocessing
from ...common.ranges import POSITIVE, SettingsGroup
from ..core.frozen import Frozen
from ..core.precision import unit
from ..core.settings import class_path
from ..networks.published_clip import PublishedCLIP, Tokenizer, load_published
from ..networks.user_teacher import checked_output, network_of_setting, stated_normalization, stated_size

View = tuple[int, str]
"""Image size and interpolation of augmented images."""
_PREPROCESSING = ("image_size", "interpolation", "mean", "std", "resize_mode")
_REMEDY = "correct the class, or its attributes image_size and tokenizer."


@dataclass(frozen=True)
class Teacher(SettingsGroup, option="teacher.models"):
    """A model whose embeddings are stored, or computed in the training step.

    Attributes:
        weights: a tag of open_clip; a folder that open_clip loads; or a file, also a checkpoint of a training here.
            None with a network.
        model: its name, one of open_clip's or MobileCLIP's; ignored if `weights` is a folder.
        scale: factor of its cosines for a student's training, which a reinforcement writes to the manifest; None means
            the one that it was trained with.
        network: a network of your own that replaces the weights, embeds images and texts, and states the normalization
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
    network = network_of_setting(teacher.network, f"{option}.network")
    if (network is None) == (teacher.weights is None):
        got = "neither" if network is None else f"both ({teacher.weights!r} and {class_path(network)})"
        raise UserError(f"Expected weights or a network of each teacher in {option}, got {got}: give one.")
    if network is not None:
        return _user_model(network, teacher.scale)
    return load_published(teacher.model, str(teacher.weights))


class UserTowers(nn.Module):
    """The towers of a network of the user's own, with a scale as published models have it.

    Args:
        network: has the methods `encode_image` and `encode_text`.
        scale: factor of its cosines.
    """

    def __init__(self, network: Any, scale: float) -> None:
        super().__init__()
        self.network = network
        self.logit_scale = nn.Parameter(torch.tensor(math.log(scale)))

    def encode_image(self, images: Tensor) -> Tensor:
        """Map normalized images [B, 3, S, S] to embeddings [B, E]."""
        embeddings: Tensor = self.network.encode_image(images)
        return embeddings

    def encode_text(self, input_ids: Tensor) -> Tensor:
        """Map token ids [T, L] to embeddings [T, E]."""
        embeddings: Tensor = self.network.encode_text(input_ids)
        return embeddings


def _user_model(network: nn.Module, scale: float | None) -> PublishedCLIP:
    """Return a network of the user's own in the form of a published model.

    Args:
        network: has the methods `encode_image` (images [B, 3, S, S] to [B, E]) and `encode_text` (token ids [T, L] to
            [T, E]), and the attributes `mean`, `std`, `image_size` and, if its tokens are not CLIP's, `tokenizer`.
        scale: factor of its cosines; None takes its parameter `logit_scale`, the logarithm of the factor.

    Raises:
        UserError: If one of these is missing or does not fit.
    """
    name = class_path(network)
    needed = ("encode_image", "encode_text", "image_size")
    missing = [member for member in needed if getattr(network, member, None) is None]
    if scale is None and not hasattr(network, "logit_scale"):
        missing.append("logit_scale (or a scale beside the network)")
    if missing:
        raise UserError(
            f"Expected encode_image, encode_text and image_size of the teacher {name}, got none of the name "
            f"{', '.join(missing)}: add it to the class."
        )
    towers: Any = network
    normalization = stated_normalization(network)
    side = stated_size(network) or 0
    tokenizer: Tokenizer = getattr(towers, "tokenizer", None) or SimpleTokenizer()
    pair = UserTowers(network, float(towers.logit_scale.exp()) if scale is None else scale).float().eval()
    image = checked_output(network, pair.encode_image, torch.zeros(1, 3, side, side), None, _REMEDY)
    checked_output(network, pair.encode_text, tokenizer(["a photo"]), image.shape[1], _REMEDY)
    preprocessing = Preprocessing(side, *normalization, "bicubic")
    return PublishedCLIP(pair, preprocessing, tokenizer, name, "model.teachers.network", Frozen(pair).fingerprint())


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
        self.scales = [scale_of(teacher, loaded) for teacher, loaded in zip(self.teachers, self.loaded, strict=True)]
        self.networks.extend(Frozen(loaded.network) for loaded in self.loaded)

    @property
    def views(self) -> list[View]:
        """Distinct views that the teachers take."""
        return list(dict.fromkeys(_view(loaded) for loaded in self.loaded))

    @property
    def widths(self) -> list[int]:
        """Embedding dimension of each teacher."""
        return [width_of(loaded) for loaded in self.loaded]

    def description(self) -> list[dict[str, Any]]:
        """Return the networks, weights, preprocessing and scales of the teachers as data for JSON."""
        return [
            {
                "model": loaded.model,
                "weights": loaded.weights,
                "sha256": loaded.sha256,
                "quick_gelu": any(isinstance(layer, QuickGELU) for layer in loaded.network.modules()),
                "width": width,
                "scale": scale,
                "temperature": 1 / scale,
                **{name: value for name, value in loaded.preprocessing.as_dict().items() if name in _PREPROCESSING},
            }
            for loaded, width, scale in zip(self.loaded, self.widths, self.scales, strict=True)
        ]

    def embed_images(self, images: list[Tensor]) -> Tensor:
        """Return embeddings [N, A, D] in float32 on the CPU.

        Args:
            images: uint8 [N, A, S, S, 3] of each of `views`.
        """
        embeddings = []
        for loaded in self.loaded:
            view = images[self.views.index(_view(loaded))]
            features = [
                loaded.network.encode_image(_normalized(batch, loaded))
                for batch in view.flatten(0, 1).split(self.forward_batch)
            ]
            embeddings.append(unit(torch.cat(features)).float().unflatten(0, view.shape[:2]))
        return torch.cat(embeddings, -1).cpu()

    def embed_texts(self, texts: list[str], device: torch.device) -> Tensor:
        """Return embeddings [T, D] in float32 on the CPU; `device` is that of the networks."""
        embeddings = []
        for loaded in self.loaded:
            input_ids = loaded.tokenizer(texts).to(device)
            features = [loaded.network.encode_text(batch) for batch in input_ids.split(self.forward_batch)]
            embeddings.append(unit(torch.cat(features)).float())
        return torch.cat(embeddings, -1).cpu()


def _view(loaded: PublishedCLIP) -> View:
    return loaded.preprocessing.image_size, loaded.preprocessing.interpolation


def _normalized(images: Tensor, loaded: PublishedCLIP) -> Tensor:
    """Normalize uint8 images [B, S, S, 3] to [B, 3, S, S] in the precision of a teacher's weights."""
    preprocessing = loaded.preprocessing
    mean = images.new_tensor(preprocessing.mean, dtype=torch.float32)
    std = images.new_tensor(preprocessing.std, dtype=torch.float32)
    normalized = ((images.float() / 255 - mean) / std).permute(0, 3, 1, 2)
    return normalized.to(next(loaded.network.parameters()).dtype)


def scale_of(teacher: Teacher, loaded: PublishedCLIP) -> float:
    """Return the factor of a teacher's cosines: that of the settings, else that of its training."""
    return float(loaded.network.logit_scale.exp()) if teacher.scale is None else teacher.scale


def width_of(loaded: PublishedCLIP) -> int:
    """Return the embedding dimension of a model, measured on a text."""
    device = next(loaded.network.parameters()).device
    with torch.no_grad():
        features: Tensor = loaded.network.encode_text(loaded.tokenizer(["a"]).to(device))
    return features.shape[-1]
