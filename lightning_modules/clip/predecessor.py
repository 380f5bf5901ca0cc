"""The trained pair into whose space a new tower is trained: what it is, its weights, and the tower that is replaced."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from ..networks.clip.preprocessing import preprocessing_of
from ..networks.clip.shapes import resolved
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


def with_predecessor(given: NewTower, predecessor: PredecessorSettings) -> NewTower:
    """Return a new tower that names the pair, and depends on no file.

    Raises:
        UserError: If there is no such pair or encoder.
    """
    if given.of is None:
        given = dataclasses.replace(given, **_described(predecessor))
    return given.completed()


def _described(predecessor: PredecessorSettings) -> dict[str, Any]:
    """Return the fields of `NewTower` that describe a pair."""
    weights = predecessor.weights
    if weights is None:
        raise UserError(
            "Expected the trained pair as model.predecessor.weights, got none: give a checkpoint, an export, a folder "
            "of open_clip's, or a tag with model.predecessor.model."
        )
    trained = training_of(Path(weights).expanduser()) if predecessor.model is None else None
    if trained is None:
        return {"of": plain({"of": model_of(predecessor.model, weights)})["of"]}
    arguments = trained["hyper_parameters"]
    model = resolved(arguments["model"])
    if isinstance(model, TowerPair):  # whose weights are those of the training
        image = dataclasses.replace(model.image, weights=RANDOM)
        text = dataclasses.replace(model.text, weights=RANDOM)
        model = dataclasses.replace(model, image=image, text=text)
    return {
        "of": plain({"of": model})["of"],
        "image_size": arguments["vision"]["image_size"],
        "max_tokens": arguments["max_tokens"],
    }


class Predecessor(Frozen[nn.Module]):
    """The tower that is replaced, frozen, and what is known of its pair once `load` was called.

    Args:
        settings: names the pair.
        new: the new tower, which names the pair's model.
    """

    def __init__(self, settings: PredecessorSettings, new: NewTower) -> None:
        super().__init__(None, "predecessor", "model.predecessor.weights")
        self.settings = settings
        self.new = new
        self.tokenizer: Tokenizer | None = None
        self.preprocessing = preprocessing_of(new.of, new.image_size) if new.of is not None else None
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
        new = self.new
        assert new.of is not None
        pair = build_model(new.of, new.image_size, new.max_tokens)
        self.text_length = int(pair.context_length)
        name, weights = str(self.settings.model or "pair"), str(self.settings.weights)
        if reads_weights():
            published = load_published(self.settings.model, weights)
            name = published.model
            self._adopt(published)
            state = convert_to_custom_text_state_dict(dict(published.network.state_dict()))
            load_state(pair, resolved(new.of), state, repr(weights), "the weights")
        self.scale = float(pair.logit_scale.detach().exp()) if reads_weights() else 1.0
        tower = TOWERS[new.side]
        (kept,) = set(TOWERS.values()) - {tower}
        whole = pair.state_dict()
        self.kept = {f"{kept}.{key}": tensor for key, tensor in below(f"{kept}.", whole).items()}
        self.kept["logit_scale"] = whole["logit_scale"]
        self.network = getattr(pair, tower).requires_grad_(False).eval()
        self.record(name, weights)

    def _adopt(self, published: PublishedCLIP) -> None:
        self.tokenizer = published.tokenizer
        self.digest = tower_digest_of(published.network, self.new.side)
        self.preprocessing = published.preprocessing
        self.space = published.space

    def receive(self, images: Normalization) -> None:
        """Adopt the normalization of the images of the training, which the replaced tower gets converted to its own."""
        own = self.preprocessing
        if own is not None:
            self._images = TeacherImages(own.image_size, images, own.normalization, own.interpolation)

    def check_stored(self, record: Mapping[str, Any] | None) -> None:
        """Check that features in a store, if there is one, are those of the tower that is replaced.

        Args:
            record: `stored_teacher` of the datamodule.

        Raises:
            UserError: If they are another tower's.
        """
        if record is not None and record["towers"].get("text") != self.digest:
            raise UserError(
                f"Expected a store of the texts by {self.settings.weights!r} as data.store, got one by "
                f"{record['model']!r}: embed the texts with the pair (`vlightning embed --of texts`), or leave it out."
            )

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
        name = TEACHER_IDS if self.new.side == "text" else "image"
        if name not in batch:
            raise UserError(
                f"Expected {name} in the training batch, got only {', '.join(batch)}: train with "
                "ParallelTextDataModule or ImageTextDataModule, without a store of the tower that is replaced."
            )
        inputs = batch[name]
        if name == "image" and self._images is not None:
            inputs = self._images(inputs)
        return unit(self.network(inputs))
