"""A trained model of any method that embeds images and texts, into whose space a new text tower is trained."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...callbacks import AtomicCheckpointIO
from ...common.errors import UserError
from ...common.preprocessing import recorded_preprocessing
from ...common.ranges import SettingsGroup
from ...common.tokenizers import saved_tokenizer, tokenizer_from_json
from ..base.exported import arguments_without_weights
from ..base.model_card import expected_tokenizer_of
from ..core.checkpoints import class_of, is_checkpoint, is_folder, read_config, saved_settings
from ..core.frozen import Frozen, reads_weights
from ..core.precision import unit
from ..core.programs import padding_tokenizer
from ..core.towers import Space, tower_digest_of, weights_digest
from ..networks.published_clip import TowerTokenizer
from .predecessor import TEACHER_IDS

_PACKAGE = __name__.rpartition(".")[0].rpartition(".")[0]


@dataclass(frozen=True)
class ModelSettings(SettingsGroup, option="predecessor"):
    """The trained model. Its weights do not change, and are not in a checkpoint.

    Args:
        weights: a checkpoint or an export of a method that embeds images and texts, such as `ALBEFModule` and
            `SHReModule`.
    """

    weights: str | None = None


class AnyPredecessor(Frozen[Any]):
    """The trained model, frozen, and what is known of it once `load` was called.

    Args:
        settings: names the model.
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(None, "predecessor", "model.predecessor.weights")
        self.settings = settings
        self.tokenizer: TowerTokenizer | None = None
        self.preprocessing: dict[str, Any] | None = None
        self.space: Space | None = None
        self.digest: str | None = None
        """Fingerprint of its text tower; known after `load`."""
        self.image_digest: str | None = None
        """Fingerprint of its image tower; known after `load`."""
        self.scale = 1.0
        self.text_length = 0
        """Number of tokens of the model's texts, at most; known after `load`."""
        self._padding = 0

    def width(self) -> int:
        """Return the embedding dimension, without the weights of the model.

        Raises:
            UserError: As `load` does.
        """
        content, _ = self._content()
        cls = _class_of(content, str(self.settings.weights))
        with torch.device("meta"):
            module = Context().run(_without_weights, cls, content)
            ids = torch.zeros(1, _tokens(content, module), dtype=torch.long)
            features: Tensor = module.eval().encode_texts(ids, torch.ones_like(ids))
        return features.shape[1]

    def load(self) -> None:
        """Load the model; on the first call only.

        Raises:
            UserError: If there is none, it does not embed images and texts, or is not that of a restored checkpoint.
        """
        if self.loaded:
            return
        content, path = self._content()
        weights = str(self.settings.weights)
        cls = _class_of(content, weights)
        # In an empty context: inside a constructor that the command line calls, Lightning would take this module's
        # arguments for those of the model.
        module = Context().run(_built, cls, content, path) if reads_weights() else _without_weights(cls, content)
        self.network = module.eval().requires_grad_(False).float()
        self._adopt_texts(content, weights)
        if reads_weights():
            digests = [tower_digest_of(module, side) for side in ("image", "text")]
            whole = weights_digest(module.state_dict().items())
            self.image_digest, self.digest = image, text = [digest or whole for digest in digests]
            self.space = Space.of(content) or Space(weights, image, text)
            self.scale = float(module.similarity_scale())
        self.preprocessing = content["preprocessing"]
        self.record(cls.__name__, weights)

    def _content(self) -> tuple[dict[str, Any], Path]:
        weights = self.settings.weights
        if weights is None:
            raise UserError(
                "Expected the trained model as model.predecessor.weights, got none: give a checkpoint or an export of "
                "a method that embeds images and texts, such as ALBEFModule or SHReModule."
            )
        path = Path(weights).expanduser()
        return _content(path, weights), path

    def _adopt_texts(self, content: Mapping[str, Any], weights: str) -> None:
        """Adopt the tokenizer of the model's texts."""
        text = content["tokenizer"]
        if text is None:
            text, note = saved_tokenizer(content, expected_tokenizer_of(self.network))
            if text is None:
                raise UserError(f"Expected the tokenizer of the model in {weights!r}, got one {note}: export it again.")
        self.text_length = _tokens(content, self.network)
        self._padding = int(tokenizer_from_json(text).pad_token_id or 0)
        encode = padding_tokenizer(text, self.text_length, self._padding)
        self.tokenizer = TowerTokenizer(encode, getattr(self.network, "text_prefix", ""))

    @torch.no_grad()
    def _texts(self, input_ids: Tensor) -> Tensor:
        return unit(self.network.encode_texts(input_ids, (input_ids != self._padding).long()))

    def features(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the unit-length features [b, d] of the old texts of a batch.

        Args:
            batch: with `teacher_input_ids` [b, L], or `teacher_features` [b, d] from a store.

        Raises:
            UserError: If the batch has neither.
        """
        if "teacher_features" in batch:
            return unit(batch["teacher_features"])
        if TEACHER_IDS not in batch:
            raise UserError(
                f"Expected {TEACHER_IDS} in the training batch, got only {', '.join(batch)}: train with "
                "ParallelTextDataModule or ImageTextDataModule."
            )
        return self._texts(batch[TEACHER_IDS])

    @torch.no_grad()
    def images(self, image: Tensor) -> Tensor:
        """Return the unit-length features [b, d] of images [b, 3, S, S] that are prepared as the model's."""
        return unit(self.network.encode_images(image)[0])


def _content(path: Path, weights: str) -> dict[str, Any]:
    """Return a checkpoint or an export, without weights, with `class`, `arguments`, `preprocessing` and `tokenizer`."""
    if is_checkpoint(path):
        content = dict(AtomicCheckpointIO().load_checkpoint(path, map_location="meta"))
        described = {"class": class_of(saved_settings(content)), "arguments": content["hyper_parameters"]}
        return content | described | {"preprocessing": recorded_preprocessing(content), "tokenizer": None}
    if not is_folder(path):
        raise UserError(
            f"Expected a checkpoint or an export as model.predecessor.weights, found none at {weights!r}: correct it."
        )
    config = read_config(path)
    tokenizer = path / "tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8") if tokenizer.is_file() else None
    return config | {"datamodule_hyper_parameters": config.get("data") or {}, "tokenizer": text}


def _built(cls: Any, content: Mapping[str, Any], path: Path) -> Any:
    """Return the module of a checkpoint or an export."""
    if is_checkpoint(path):
        # An optimizer of the user's own is not needed, and its code not imported.
        return cls.load_from_checkpoint(path, map_location="cpu", optimizer=None, lr_scheduler=None)
    return cls.from_pretrained(path)


def _without_weights(cls: Any, content: Mapping[str, Any]) -> Any:
    return cls(**arguments_without_weights(content["arguments"]))


def _tokens(content: Mapping[str, Any], module: Any) -> int:
    """Return the number of tokens of a model's texts, at most."""
    data = content.get("datamodule_hyper_parameters") or {}
    return int(data.get("max_tokens") or module.data_sizes().max_tokens or module.max_tokens)


def _class_of(content: Mapping[str, Any], weights: str) -> Any:
    # By its name: a method does not import another one.
    classes = importlib.import_module(_PACKAGE).method_classes()
    name = content["class"]
    cls = classes.get(name)
    if cls is None or not (hasattr(cls, "encode_images") and hasattr(cls, "encode_texts")):
        raise UserError(
            f"Expected a model that embeds images and texts as model.predecessor.weights, got {name} in {weights!r}: "
            "give another."
        )
    return cls
