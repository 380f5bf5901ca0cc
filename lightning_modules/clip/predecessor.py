"""The trained pair into whose space a new tower is trained: what it is, its weights, and the tower that is replaced."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from open_clip.model import convert_to_custom_text_state_dict
from torch import Tensor, nn

from ...common.errors import UserError
from ...common.preprocessing import Normalization
from ...common.ranges import SettingsGroup
from ..core.frozen import Frozen, reads_weights
from ..core.precision import unit
from ..core.settings import plain
from ..core.towers import Space, tower_digest_of
from ..networks.clip.models import build_model
from ..networks.clip.new_tower import TOWERS, NewTower
from ..networks.clip.pair import RANDOM, TowerPair
from ..networks.clip.preprocessing import preprocessing_of, preprocessing_of_training
from ..networks.clip.shapes import Model, resolved
from ..networks.clip.weights import below, load_state
from ..networks.published_clip import PublishedCLIP, Tokenizer, load_published, training_of
from ..networks.user_teacher import TeacherImages
from .start import model_of

TEACHER_IDS = "teacher_input_ids"
"""Token ids of the text tower that is replaced, in a training batch."""


@dataclass(frozen=True)
class PredecessorSettings(SettingsGroup, option="predecessor"):
    """The trained pair. Its weights do not change, and only those of the tower that is kept are in a checkpoint.

    Args:
        weights: a checkpoint or an export of a pair of towers here; a folder of open_clip's; or with `model` a tag of
            open_clip's, or a file of open_clip's or of MobileCLIP's.
        model: its name, one of open_clip's or MobileCLIP's, for a tag or a file.
    """

    weights: str | None = None
    model: str | None = None


class PairDescription(NamedTuple):
    """Description of a trained pair of towers.

    Attributes:
        of: its towers, independent of files.
        image_size: side of its images in pixels; None means its own.
        max_tokens: number of tokens of its texts; None means its own.
        images: record of the preprocessing of a training here; None for other weights.
    """

    of: Model
    image_size: int | None = None
    max_tokens: int | None = None
    images: dict[str, Any] | None = None


def with_predecessor(given: NewTower, predecessor: PredecessorSettings) -> NewTower:
    """Return a new tower that names the pair, and depends on no file.

    Raises:
        UserError: If there is no such pair or encoder.
    """
    if given.of is None:
        old = described_predecessor(predecessor)
        fields = plain({"of": old.of}) | {"image_size": old.image_size, "max_tokens": old.max_tokens}
        given = dataclasses.replace(given, **fields)
    return given.completed()


def described_predecessor(predecessor: PredecessorSettings) -> PairDescription:
    """Return the description of the trained pair.

    Raises:
        UserError: If there is no such pair.
    """
    if predecessor.weights is None:
        raise UserError(
            "Expected the trained pair as model.predecessor.weights, got none: give a checkpoint, an export, a folder "
            "of open_clip's, or a tag with model.predecessor.model."
        )
    return described_pair(predecessor.weights, predecessor.model)


def described_pair(weights: str, model: str | None) -> PairDescription:
    """Return the description of a pair.

    Args:
        weights: as in `PredecessorSettings`.
        model: as in `PredecessorSettings`.

    Raises:
        UserError: If there is no such pair.
    """
    trained = training_of(Path(weights).expanduser()) if model is None else None
    if trained is None:
        return PairDescription(model_of(model, weights))
    arguments = trained["hyper_parameters"]
    of = resolved(arguments["model"])
    if isinstance(of, TowerPair):  # whose weights are those of the training
        image = dataclasses.replace(of.image, weights=RANDOM)
        text = dataclasses.replace(of.text, weights=RANDOM)
        of = dataclasses.replace(of, image=image, text=text)
    images = preprocessing_of_training(trained)
    return PairDescription(of, arguments["vision"]["image_size"], arguments["max_tokens"], images)


def check_stored(record: Mapping[str, Any] | None, digest: str | None, weights: str | None) -> None:
    """Check that features in a store, if there is one, are those of the text tower that is replaced.

    Args:
        record: `stored_teacher` of the datamodule.
        digest: fingerprint of the tower.
        weights: source of the trained model.

    Raises:
        UserError: If they are another tower's.
    """
    if record is not None and record["towers"].get("text") != digest:
        raise UserError(
            f"Expected a store of the texts by {weights!r} as data.store, got one by {record['model']!r}: embed the "
            "texts with that model (`vlightning embed --of texts`), or leave it out."
        )


class Predecessor(Frozen[nn.Module]):
    """The tower that is replaced, frozen, and what is known of its pair once `load` was called.

    Args:
        settings: names the pair.
        side: the tower that is replaced.
        old: description of the pair; None means that of its files, which `load` reads.
    """

    def __init__(
        self, settings: PredecessorSettings, side: Literal["image", "text"], old: PairDescription | None
    ) -> None:
        super().__init__(None, "predecessor", "model.predecessor.weights")
        self.settings = settings
        self.side = side
        self.old = old
        self.tokenizer: Tokenizer | None = None
        self.preprocessing = None if old is None else preprocessing_of(old.of, old.image_size)
        self.space: Space | None = None
        self.digest: str | None = None
        """Fingerprint of the tower that is replaced; known after `load`."""
        self.scale = 1.0
        self.kept: dict[str, Tensor] = {}
        """Weights of the pair's other tower and of its logit scale, for the student."""
        self.text_length = 0
        """Number of tokens of the pair's texts, at most; known after `load`."""
        self._images: TeacherImages | None = None

    def load(self) -> None:
        """Load the pair, and keep the tower that is replaced; on the first call only.

        Raises:
            UserError: If the weights cannot be loaded, or are not those of a restored checkpoint.
        """
        if self.loaded:
            return
        old = self.old = self.old or described_predecessor(self.settings)
        pair = build_model(old.of, old.image_size, old.max_tokens)
        self.text_length = int(pair.context_length)
        name, weights = str(self.settings.model or "pair"), str(self.settings.weights)
        if reads_weights():
            published = load_published(self.settings.model, weights)
            name = published.model
            self._adopt(published)
            state = convert_to_custom_text_state_dict(dict(published.network.state_dict()))
            load_state(pair, resolved(old.of), state, repr(weights), "the weights")
        self.scale = float(pair.logit_scale.detach().exp()) if reads_weights() else 1.0
        tower = TOWERS[self.side]
        (kept,) = set(TOWERS.values()) - {tower}
        whole = pair.state_dict()
        self.kept = {f"{kept}.{key}": tensor for key, tensor in below(f"{kept}.", whole).items()}
        self.kept["logit_scale"] = whole["logit_scale"]
        self.network = getattr(pair, tower).requires_grad_(False).eval()
        self.record(name, weights)

    def _adopt(self, published: PublishedCLIP) -> None:
        self.tokenizer = published.tokenizer
        self.digest = tower_digest_of(published.network, self.side)
        self.preprocessing = published.preprocessing
        self.space = published.space

    def receive(self, images: Normalization) -> None:
        """Adopt the normalization of the images of the training, which the replaced tower gets converted to its own."""
        own = self.preprocessing
        if own is not None:
            self._images = TeacherImages(own.image_size, images, own.normalization, own.interpolation)

    @torch.no_grad()
    def features(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the unit-length features [b, d] of the rows of a batch by the tower that is replaced.

        Args:
            batch: with `teacher_input_ids` [b, L] for a text tower, or its `teacher_features` [b, d] from a store; with
                the `image` [b, 3, S, S] for an image tower.

        Raises:
            UserError: If the batch has none.
        """
        if "teacher_features" in batch:
            return unit(batch["teacher_features"])
        name = TEACHER_IDS if self.side == "text" else "image"
        if name not in batch:
            raise UserError(
                f"Expected {name} in the training batch, got only {', '.join(batch)}: train with "
                "ParallelTextDataModule or ImageTextDataModule, without a store of the tower that is replaced."
            )
        inputs = batch[name]
        if name == "image" and self._images is not None:
            inputs = self._images(inputs)
        return unit(self.network(inputs))
