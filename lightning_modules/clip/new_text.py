"""A new text tower in the contrastive space of a model that is no pair of towers, such as ALBEF and SHRe."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Annotated, Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from ...common.errors import UserError
from ...common.ranges import COUNT
from ...common.tokenizers import saved_tokenizer, with_prefix
from ..base.example_batch import pair_batch
from ..base.vocabulary import check_tokenizer
from ..core.data_sizes import DataSizes
from ..core.fitting import load_fitting
from ..core.memory import MemorySettings, in_slices, one_update
from ..core.precision import unit
from ..core.settings import plain, settings
from ..core.towers import SPACE, tower_digest
from ..evaluation.protocol import Batch
from ..evaluation.retrieval import RetrievalEvaluation
from ..losses.contrast import check_length
from ..networks.clip.models import build_new_tower
from ..networks.clip.new_tower import NewTower
from ..networks.clip.pair import RANDOM, TextTower, sourced, text_state
from ..networks.clip.programs import export_text_tower
from ..networks.clip.weights import below
from ..networks.published_clip import Tokenizer
from ..optim.configure import LRSchedulerCallable, OptimizerCallable
from .any_predecessor import AnyPredecessor, ModelSettings
from .predecessor import TEACHER_IDS, check_stored
from .settings import OptimSettings
from .tower_export import DESCRIPTION, LAYOUT, write_tower
from .tower_training import NewTowerLossSettings, TowerTraining

_STUDENT = "student."
PROGRAMS = {
    "torch_export": "a folder with text.pt2 for torch.export.load",
    "onnx": "a folder with text.onnx; needs the extra 'onnx'",
    "onnx_int8": "the same with int8 weights of matrices, quantized by ONNX Runtime",
}
"""Description of each layout that is a program of the tower."""


class NewTextModule(TowerTraining):
    """Training of a new text tower against a frozen model of any method that embeds images and texts.

    `student` is the new tower alone. Images are embedded by the trained model, which is not in the checkpoint: what
    needs images loads it by its name, and compares its fingerprint. The new tower learns from parallel texts
    (`ParallelTextDataModule`), or from images with captions that both read. Only the contrastive space is learned, not
    what a model computes of an image and a text together (ALBEF's fusion).

    Args:
        model: the new tower: `text`, an encoder of transformers; see `TextTower`.
        predecessor: the trained model; see `ModelSettings`.
        embed_dim: embedding dimension; None means the trained model's.
        max_tokens: number of tokens of the new tower's texts, at most.
        match_equal_texts: whether equal captions of other images count as matches; None: see `RetrievalEvaluation`.
        loss: see `NewTowerLossSettings`.
        optim: see `OptimSettings`; the default peak rate is 1e-4.
        memory: see `MemorySettings`.
        optimizer: replaces AdamW.
        lr_scheduler: replaces the schedule.

    Raises:
        UserError: If settings do not fit together, or the model or the tower is unknown.
    """

    model: NewTower
    predecessor_settings: ModelSettings

    def __init__(
        self,
        model: NewTower,
        predecessor: ModelSettings = ModelSettings(),
        embed_dim: Annotated[int | None, COUNT] = None,
        max_tokens: Annotated[int, COUNT] = 77,
        match_equal_texts: bool | None = None,
        loss: NewTowerLossSettings = NewTowerLossSettings(),
        optim: OptimSettings = OptimSettings(),
        memory: MemorySettings = MemorySettings(),
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        self.take_arguments(locals(), predecessor="predecessor_settings")
        self.tower = _text_of(self.model.completed())
        self.model = NewTower(text=self.tower)
        self.predecessor = AnyPredecessor(self.predecessor_settings)
        if embed_dim is None:
            embed_dim = self.predecessor.width()
        # A checkpoint needs neither the folder of the tower nor the trained model to be built.
        self.hparams.update(plain({"model": self.model, "embed_dim": embed_dim}))
        self.max_tokens = max_tokens
        self.check_prefixes(embed_dim)
        self.student: Any = build_new_tower(self.model, embed_dim, None, max_tokens)
        self.evaluation = RetrievalEvaluation(match_equal_texts)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the weighted sum of the losses of a batch."""
        check_length(batch["input_ids"], self.max_tokens, fixed=False)
        old = self.predecessor.features(batch)
        new = self._new_features(batch["input_ids"])
        partner = self.predecessor.images(batch["image"]) if "image" in batch else old
        return self.weighted_losses(new, old, partner, self.predecessor.scale, batch)

    def _new_features(self, input_ids: Tensor) -> Tensor:
        """Return the unit-length features [b, d] of texts [b, L], with gradient."""
        size = self.memory.micro_batch_size
        with nullcontext() if size is None else one_update(self.student):
            (features,) = in_slices(lambda rows: (unit(self.student(rows)),), size, input_ids)
        return features

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return unit-length features [B, E] of images and texts."""
        return self.encode_images(batch["image"])[0], self.encode_texts(batch["input_ids"], batch["attention_mask"])

    def encode_images(self, image: Tensor) -> tuple[Tensor, None]:
        """Return unit-length features [B, E] of images [B, 3, S, S] by the trained model."""
        self._load_predecessor()
        self.predecessor.to(image.device)  # loaded after the module was moved
        return self.predecessor.images(image), None

    def encode_texts(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return unit-length features [B, E] of texts [B, L], whose padding the tower leaves out."""
        check_length(input_ids, self.max_tokens, fixed=False)
        return unit(self.student(input_ids))

    @property
    def image_digest(self) -> str | None:
        """The fingerprint of the trained model's image tower."""
        self._load_predecessor()
        return self.predecessor.image_digest

    def tower_record(self) -> dict[str, Any]:
        """Return the fingerprints of both towers, and their space; empty if the new one is sharded."""
        if self.device_mesh is not None or self.space is None:
            return {}
        text = tower_digest(self.student, whole=True)
        return {"image": self.image_digest, "text": text, SPACE: self.space.as_dict()}

    # Overrides of Method

    def setup(self, stage: str) -> None:
        """Load the trained model, which every stage needs."""
        self._load_predecessor()
        if stage == "fit":
            record = getattr(self.datamodule, "stored_teacher", None)
            check_stored(record, self.predecessor.digest, self.predecessor_settings.weights)
        super().setup(stage)

    def _load_predecessor(self) -> None:
        self.predecessor.load()
        self.space = self.predecessor.space or self.space

    def evaluates_initial_weights(self) -> bool:
        """Return True: the weights of the new tower are evaluated without a checkpoint."""
        return True

    def load_initial_weights(self) -> None:
        """Load the weights of the new tower."""
        self.student.load_state_dict(text_state(self.student, self.tower))
        space = "" if self.space is None else f" {self.space.fingerprint}"
        rank_zero_info(
            f"The new text tower is {sourced(self.tower)}; it is trained into the space{space} of "
            f"{self.predecessor_settings.weights!r}."
        )

    def initial_preprocessing(self) -> dict[str, Any] | None:
        """Return the preprocessing of the trained model's images."""
        self._load_predecessor()
        return self.predecessor.preprocessing

    def expected_image_size(self) -> int | None:
        """Return the side of the trained model's images in pixels, once it is loaded."""
        record = self.predecessor.preprocessing
        return None if record is None else record.get("image_size")

    def expected_tokenizer(self) -> str | None:
        """Return the folder or hub name of the new tower's tokenizer."""
        return self.tower.tokenizer or self.tower.name

    @property
    def text_prefix(self) -> str:
        """Text before each text."""
        return self.tower.prefix

    @property
    def teacher_tokenizers(self) -> Mapping[str, Tokenizer]:
        """The tokenizer of the trained model's texts, by the name of their ids in a batch."""
        tokenizer = self.predecessor.tokenizer
        return {} if tokenizer is None else {TEACHER_IDS: tokenizer}

    def on_train_start(self) -> None:
        """Compare the data's tokenizer with that of the new tower.

        Raises:
            UserError: If it has other ids.
        """
        super().on_train_start()
        name = str(self.expected_tokenizer())
        check_tokenizer(self, name, self.student.vocab_size, self.student.pad_token_id, self.tower.weights != RANDOM)

    def data_sizes(self) -> DataSizes:
        """Return the sizes that the tower and the trained model accept."""
        return DataSizes(self.expected_image_size(), self.student.vocab_size)

    def sharded_networks(self) -> list[nn.Module]:
        """Return the new tower."""
        return [self.student]

    def module_methods(self) -> list[str]:
        """Return the method that encodes texts."""
        return ["encode_texts"]

    def similarity_scale(self) -> float:
        """Return the inverse of the trained model's temperature; 1 before it is loaded."""
        return self.predecessor.scale

    def example_batch(self, rows: int, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return texts, or pairs of images and texts, with the shapes of a training, for `vlightning plan`."""
        batch = pair_batch(self, rows, data)
        if "old_column" in data:  # parallel texts
            del batch["image"]
        batch[TEACHER_IDS] = torch.zeros(rows, self.predecessor.text_length, dtype=torch.long)
        return batch

    @classmethod
    def layouts(cls) -> dict[str, str]:
        """Return the description of each layout of an export; the first is the default of `vlightning export`."""
        return super().layouts() | {LAYOUT: DESCRIPTION} | PROGRAMS

    @classmethod
    def write_layout(
        cls, content: Mapping[str, Any], source: str, target: str, layout: str, dtype: torch.dtype = torch.float32
    ) -> str:
        """Write the new tower of a checkpoint."""
        arguments = content["hyper_parameters"]
        new = settings(NewTower, arguments["model"])
        tower: Any = build_new_tower(new, arguments["embed_dim"], None, arguments["max_tokens"])
        load_fitting(tower, below(_STUDENT, content["state_dict"]), source)
        text = _text_of(new)
        tokens_of = text.tokenizer or text.name
        if layout == LAYOUT:
            fields = plain({"model": new}) | {"embed_dim": arguments["embed_dim"]}
            return write_tower(content, source, target, tower, "text", str(text), fields, tokens_of)
        tokenizer, note = saved_tokenizer(content, tokens_of)
        tokenizer = None if tokenizer is None else with_prefix(tokenizer, text.prefix)
        export_text_tower(tower.eval(), target, layout, arguments["max_tokens"], dtype, tokenizer)
        return f"Wrote {target} with the new text tower in the layout {layout!r}, {note}."


def _text_of(model: NewTower) -> TextTower:
    if model.text is None:
        raise UserError(
            "Expected a new text tower as model.text of NewTextModule, got model.image: NewTowerModule trains an image "
            "tower, into the space of a pair of towers."
        )
    return model.text
