"""A new text or image tower, trained into the space of a trained pair, so that an index of the pair stays in use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Annotated, Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from open_clip import CustomTextCLIP
from torch import Tensor, nn

from ...common.errors import UserError
from ...common.ranges import COUNT
from ..base.example_batch import pair_batch
from ..base.two_towers import TwoTowers
from ..core.memory import MemorySettings, in_slices, kept_statistics, one_update
from ..core.precision import unit
from ..core.settings import plain, settings
from ..core.towers import locked_towers
from ..evaluation.protocol import Batch
from ..evaluation.retrieval import RetrievalEvaluation
from ..networks.clip.models import build_model, model_config
from ..networks.clip.new_tower import TOWERS, NewTower
from ..networks.clip.pair import ImageTower, image_state, sourced, text_state
from ..networks.clip.preprocessing import ImageSettings, preprocessing_with, training_normalization
from ..networks.clip.shapes import ModelShape, OpenClipConfig
from ..networks.published_clip import Tokenizer
from ..optim.configure import LRSchedulerCallable, OptimizerCallable
from .other_pair import OtherPair, PairTower, Side
from .predecessor import (
    TEACHER_IDS,
    PairDescription,
    Predecessor,
    PredecessorSettings,
    check_stored,
    described_predecessor,
    with_predecessor,
)
from .settings import OptimSettings
from .tower_export import DESCRIPTION, LAYOUT, export_tower
from .tower_training import NewTowerLossSettings, TowerTraining

CLIP_TOKENS = 77
"""Number of tokens of a text of CLIP's."""


class NewTowerModule(TowerTraining, TwoTowers):
    """Training of one new tower against a frozen pair, of which it replaces one.

    A new text tower learns from parallel texts alone (`ParallelTextDataModule`): the text that it reads, and the text
    that the pair reads. It, and a new image tower, also learn from pairs of images and texts (`ImageTextDataModule`).
    The partner, with which features are compared, is the pair's other tower where the batch has its inputs, else the
    replaced tower itself.

    `student` is the pair with the new tower: its other tower is the pair's, frozen, so that evaluation, prediction,
    stores and exports are those of any pair. It has the pair's space, which checkpoints and exports name.

    Args:
        model: the new tower: `text`, an encoder of transformers (see `TextTower`), or `image`, a network of timm (see
            `ImageTower`); left out with `pair`. A checkpoint with `pair` has the description of both towers here.
        pair: another pair, of which one tower is the new one; see `PairTower`.
        predecessor: the trained pair; see `PredecessorSettings`.
        max_tokens: number of tokens of a new tower's texts, at most; the pair's is its own.
        match_equal_texts: whether equal captions of other images count as matches; None: see `RetrievalEvaluation`.
        vision: see `ImageSettings`.
        loss: see `NewTowerLossSettings`.
        optim: see `OptimSettings`; the default peak rate is 1e-4.
        memory: see `MemorySettings`.
        optimizer: replaces AdamW.
        lr_scheduler: replaces the schedule.

    Raises:
        UserError: If settings do not fit together, or the pair or the tower is unknown.
    """

    vision: ImageSettings
    predecessor_settings: PredecessorSettings
    pair: PairTower | None

    def __init__(
        self,
        model: NewTower | ModelShape | OpenClipConfig | None = None,
        predecessor: PredecessorSettings = PredecessorSettings(),
        max_tokens: Annotated[int, COUNT] = 77,
        match_equal_texts: bool | None = None,
        vision: ImageSettings = ImageSettings(),
        loss: NewTowerLossSettings = NewTowerLossSettings(),
        optim: OptimSettings = OptimSettings(),
        memory: MemorySettings = MemorySettings(),
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        pair: PairTower | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        self.take_arguments(locals(), predecessor="predecessor_settings")
        old = self._describe(model, max_tokens)
        # Not a folder: a checkpoint needs no other file.
        self.hparams.update(plain({"model": self.model, "pair": self.pair, "vision": self.vision}))
        self.check_prefixes(model_config(self.model)["embed_dim"])
        self.student = self._build()
        self.predecessor = Predecessor(self.predecessor_settings, self.side, old)
        self.evaluation = RetrievalEvaluation(match_equal_texts)
        self.train()

    def _describe(self, model: Any, max_tokens: int) -> PairDescription | None:
        """Set `model`, the description of both towers, and the number of tokens; return the trained pair, if known."""
        self.max_tokens = max_tokens
        self.other = None if self.pair is None else OtherPair(self.pair)
        if self.pair is None or self.other is None:
            self.side: Side
            new = self.model = with_predecessor(
                settings(NewTower, {} if model is None else model), self.predecessor_settings
            )
            assert new.of is not None
            self.side = new.side
            if self.side == "image":
                self.max_tokens = new.max_tokens or CLIP_TOKENS
            return PairDescription(new.of, new.image_size, new.max_tokens)
        self.side = self.pair.side
        if self.pair.of is not None:  # of a checkpoint
            self.model = model
            return None
        if model is not None:
            raise UserError(
                "Expected one new tower, got model.pair beside model.image or model.text: leave out one of them, "
                "perhaps as --model.model null."
            )
        old = described_predecessor(self.predecessor_settings)
        composed = self.other.composed(old, self.vision.image_size, max_tokens)
        self.model, self.max_tokens = composed.model, composed.max_tokens
        images = self.other.images() if self.side == "image" else None
        self.pair = dataclasses.replace(self.pair, **plain({"of": composed.of}), images=images)
        self.vision = dataclasses.replace(self.vision, image_size=composed.image_size)
        self.hparams["max_tokens"] = self.max_tokens
        return old

    def _build(self) -> CustomTextCLIP:
        network = build_model(self.model, self.vision.image_size, self.max_tokens)
        network.logit_bias = None
        network.requires_grad_(False)
        self._new_tower_of(network).requires_grad_(True)
        return network

    def _new_tower_of(self, network: Any) -> nn.Module:
        tower: nn.Module = getattr(network, TOWERS[self.side])
        return tower

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the weighted sum of the losses of a batch."""
        if "input_ids" in batch:
            self.check_texts(batch["input_ids"])
        old = self.predecessor.features(batch)
        new = self._new_features(batch)
        partner = self._partner_features(batch)
        if partner is None:  # texts alone: the old tower's are what the new ones are compared with
            partner = old
        return self.weighted_losses(new, old, partner, self.predecessor.scale, batch)

    def _new_features(self, batch: Batch) -> Tensor:
        """Return the unit-length features [b, d] by the new tower, with gradient."""
        encode = self.student.encode_text if self.side == "text" else self.student.encode_image
        inputs = batch["input_ids"] if self.side == "text" else batch["image"]
        size = self.memory.micro_batch_size

        def encoded(rows: Tensor) -> tuple[Tensor]:
            return (unit(encode(rows)),)

        with nullcontext() if size is None else one_update(self.student):
            (features,) = in_slices(encoded, size, inputs, again=lambda: kept_statistics(self.student))
        return features

    @torch.no_grad()
    def _partner_features(self, batch: Batch) -> Tensor | None:
        """Return the unit-length features [b, d] of the pair's other tower, or of a store; None without its inputs."""
        if self.side == "image":
            texts = batch["text_features"] if "text_features" in batch else batch["input_ids"]
            return self.encode_texts(texts, batch["attention_mask"])
        images = batch.get("image_features", batch.get("image"))
        return None if images is None else self.encode_images(images)[0]

    def train(self, mode: bool = True) -> NewTowerModule:
        """Set the mode of the new tower; the pair's other tower stays in eval mode."""
        super().train(mode)
        new = self._new_tower_of(self.student)
        for tower in (self.student.visual, self.student.text):
            tower.train(mode and tower is new)
        return self

    # Overrides of Method

    def setup(self, stage: str) -> None:
        """Load the pair for a training, whose images it gets converted."""
        if stage == "fit":
            self._load_predecessor()
            record = getattr(self.datamodule, "stored_teacher", None)
            check_stored(record, self.predecessor.digest, self.predecessor_settings.weights)
            self.predecessor.receive(training_normalization(self.datamodule, self.model, self.vision))
        super().setup(stage)

    def _load_predecessor(self) -> None:
        self.predecessor.load()
        self.space = self.predecessor.space or self.space

    def evaluates_initial_weights(self) -> bool:
        """Return True: the weights of the pair and of the new tower are evaluated without a checkpoint."""
        return True

    def load_initial_weights(self) -> None:
        """Load the pair's other tower, and the weights of the new tower."""
        self._load_predecessor()
        tower: Any = self._new_tower_of(self.student)
        model = self.model
        if self.other is not None:
            state, unread = self.other.state(tower, self.vision.image_size, self.max_tokens)
            source = self.other.sourced(unread)
        else:
            assert isinstance(model, NewTower)
            new = model.tower
            state = image_state(tower, new) if isinstance(new, ImageTower) else text_state(tower, new)
            source = sourced(new)
        self.student.load_state_dict(self.predecessor.kept, strict=False)
        tower.load_state_dict(state)
        space = "" if self.space is None else f" {self.space.fingerprint}"
        rank_zero_info(
            f"The new {self.side} tower is {source}; it is trained into the space{space} of "
            f"{self.predecessor_settings.weights!r}."
        )

    def initial_preprocessing(self) -> dict[str, Any] | None:
        """Return the preprocessing of the new image tower, or of the pair's."""
        if self.side == "image" and self.pair is not None:
            return self.pair.images
        if self.side == "image":
            return preprocessing_with(self.model, self.vision).as_dict()
        self._load_predecessor()
        pair = self.predecessor.preprocessing
        return None if pair is None else pair.as_dict()

    def expected_image_size(self) -> int:
        """Return the argument `vision.image_size`, else the pair's or the new tower's side of images in pixels."""
        kept = self.model.image_size if self.side == "text" and isinstance(self.model, NewTower) else None
        return self.vision.image_size or kept or super().expected_image_size()

    @property
    def teacher_tokenizers(self) -> Mapping[str, Tokenizer]:
        """The tokenizer of the text tower that is replaced, by the name of its ids in a batch."""
        tokenizer = self.predecessor.tokenizer
        return {TEACHER_IDS: tokenizer} if tokenizer is not None and self.side == "text" else {}

    @property
    def locked_towers(self) -> list[str]:
        """The pair's other tower: its features may come from a store."""
        return locked_towers(self.student)

    def sharded_networks(self) -> list[nn.Module]:
        """Return the student and the tower that is replaced."""
        return [self.student, *([self.predecessor.network] if self.predecessor.loaded else [])]

    def example_batch(self, rows: int, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return texts, or pairs of images and texts, with the shapes of a training, for `vlightning plan`."""
        batch = pair_batch(self, rows, data)
        if "old_column" in data:  # parallel texts
            del batch["image"]
        if self.side == "text":
            length = self.predecessor.text_length
            batch[TEACHER_IDS] = torch.zeros(rows, length, dtype=torch.long)
        return batch

    @classmethod
    def layouts(cls) -> dict[str, str]:
        """Return the description of each layout of an export; the first is the default of `vlightning export`."""
        return super().layouts() | {LAYOUT: DESCRIPTION}

    @classmethod
    def write_layout(
        cls, content: Mapping[str, Any], source: str, target: str, layout: str, dtype: torch.dtype = torch.float32
    ) -> str:
        """Write the pair of a checkpoint in a layout, or the new tower alone."""
        if layout == LAYOUT:
            return export_tower(content, source, target)
        return super().write_layout(content, source, target, layout, dtype)
