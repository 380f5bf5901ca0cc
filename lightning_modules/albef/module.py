"""ALBEF: "Align before Fuse" (Li et al., NeurIPS 2021, arXiv 2107.07651).

A ViT and the lower half of a BERT are aligned by a contrastive loss before the upper half of the BERT fuses them by
cross-attention. A momentum copy of the whole model supplies soft targets, because captions from the web describe their
images only roughly, and the keys of the queues.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from ...callbacks import (
    EMACallback,
    EMAPair,
    FeatureQueue,
    GroundingWriter,
    QueueCallback,
    RetrievalPredictionWriter,
    StepSeedCallback,
    missing_callbacks,
)
from ...callbacks.distributed.collectives import full_tensor
from ...common.errors import UserError
from ..base.example_batch import pair_batch
from ..base.method import Bound, Method
from ..base.vocabulary import check_tokenizer
from ..core.checkpoints import preprocessing_of_checkpoint
from ..core.precision import at_least_float32
from ..core.trainers import callbacks_of, trainer_of
from ..evaluation.protocol import Batch
from ..evaluation.reranking import RerankSettings
from ..evaluation.retrieval import RetrievalEvaluation
from ..optim.configure import LRSchedulerCallable, OptimizerCallable
from ..optim.optimizers import adamw
from ..optim.schedules import Schedule
from . import gradcam
from . import weights as initial_weights
from .export import LAYOUTS, write_layout
from .grounding import GroundingEvaluation, GroundingSettings, grounding_maps
from .itc import Accuracies, image_text_contrast, teacher_keys
from .itm import draw_negatives, fuse_pairs, image_text_matching
from .mlm import check_special_tokens, draw_masked_tokens, masked_language_modeling
from .network import ALBEFNetwork, FusionBert, copy_student
from .official import QUEUES, TRAINING_STATE
from .schedule import paper_schedule, ramped_alpha
from .settings import (
    ContrastSettings,
    MemorySettings,
    MomentumSettings,
    OptimSettings,
    TextSettings,
    VisionSettings,
)


class ALBEFModule(Method):
    """Image-text contrast, matching and masked language modeling; or fine-tuning for retrieval or grounding.

    Defaults are the paper's; where the authors' code differs, `configs/albef/official.yaml` sets its behavior.

    Args:
        vision: the image encoder.
        text: the text and fusion encoder, and masked words.
        momentum: the momentum teacher and its soft targets.
        contrast: contrastive space, temperature and queues.
        optim: AdamW and its learning rate.
        memory: activation memory.
        rerank: re-ranking of retrieval candidates by the matching head (section 5).
        weights: initial weights: a checkpoint of the authors or of this class, or the folder of an export; excludes
            `vision.weights` and `text.weights`.
        mlm: whether words are masked and predicted; False builds no language-model head.
        match_equal_texts: whether equal captions of other images count as matches; None: see `RetrievalEvaluation`.
        grounding: evaluation of the boxes that texts refer to, instead of retrieval.
        optimizer: replaces AdamW.
        lr_scheduler: replaces the paper's schedule.
    """

    vision: VisionSettings
    text: TextSettings
    momentum: MomentumSettings
    contrast: ContrastSettings
    optim: OptimSettings
    memory: MemorySettings
    rerank: RerankSettings
    grounding: GroundingSettings

    def __init__(
        self,
        vision: VisionSettings = VisionSettings(),
        text: TextSettings = TextSettings(),
        momentum: MomentumSettings = MomentumSettings(),
        contrast: ContrastSettings = ContrastSettings(),
        optim: OptimSettings = OptimSettings(),
        memory: MemorySettings = MemorySettings(),
        rerank: RerankSettings = RerankSettings(),
        weights: str | None = None,
        mlm: bool = True,
        match_equal_texts: bool | None = None,
        grounding: GroundingSettings = GroundingSettings(),
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        self.take_arguments(locals())
        self.weights = weights
        self.mlm = mlm
        self.change_settings("text", **initial_weights.sizes_of_bert(self.text))
        initial_weights.check_sources(weights, self.vision, self.text)

        contrast = self.contrast
        checkpointing = self.memory.activation_checkpointing
        self.student = ALBEFNetwork(self.vision, self.text, contrast.embed_dim, mlm, checkpointing)
        self.teacher = ALBEFNetwork(self.vision, self.momentum.teacher_text(self.text), contrast.embed_dim, mlm)
        self.itm_head = nn.Linear(self.text.width, 2)
        self.temperature = nn.Parameter(torch.tensor([contrast.temperature]))  # [1]: FSDP2 cannot shard a 0-D tensor
        queue = contrast.queue_size, contrast.embed_dim, 1 + contrast.match_same_text, contrast.queue_start == "random"
        self.image_queue = FeatureQueue(*queue)
        self.text_queue = FeatureQueue(*queue)
        if self.momentum.alpha_by_accuracy and not contrast.itc:
            raise UserError(
                "Expected momentum.alpha_by_accuracy false without contrast.itc, which trains the similarities that "
                "the accuracy is measured by, got true: set one of them."
            )
        follows = self.momentum.alpha_by_accuracy or contrast.negatives == "ramped"
        self.accuracies = Accuracies() if follows else None
        self.evaluation = (
            GroundingEvaluation(self.grounding)
            if self.grounding.evaluate
            else RetrievalEvaluation(match_equal_texts, self.rerank)
        )
        copy_student(self.student, self.teacher)
        if not contrast.itc:  # then no loss trains these
            for untrained in (self.student.vision_proj, self.student.text_proj, self.temperature):
                untrained.requires_grad_(False)
        self.start_vocabulary()

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """Return the sum of the losses (eq. 5), and the teacher's features for the queues."""
        alpha = self.current_alpha()
        mask = batch["attention_mask"]
        slice_rows = self.memory.micro_batch_size
        losses = {}

        # Tokens, states and contrastive features of student and teacher (section 3.1).
        masked = draw_masked_tokens(batch["input_ids"], self.text) if self.mlm else None
        masked_ids = None if masked is None else masked.input_ids
        student = self.student.encode(batch, masked_ids, slice_rows)
        with torch.no_grad():
            teacher = self.teacher.encode(batch, masked_ids if self.momentum.distill_mlm else None, slice_rows)

        # Image-text contrastive learning (eqs. 1 and 2) with the teacher's soft targets (eq. 6).
        keys = teacher_keys(teacher, batch, self.contrast)
        itc_alpha = alpha if self.momentum.distill_itc else 0.0
        contrast = image_text_contrast(
            student, teacher, keys, self.queues(), self.temperature, itc_alpha, self.contrast.positives, slice_rows
        )
        if self.contrast.itc:
            losses["itc"] = contrast.loss
        if self.accuracies is not None:
            self.accuracies.update(contrast)

        # Image-text matching (eq. 4) with hard negatives.
        negatives = draw_negatives(contrast, batch, self.contrast, self.current_hardness())
        fused = fuse_pairs(self.student, student, mask, negatives, slice_rows)
        losses["itm"] = image_text_matching(self.itm_head, fused.cls, negatives)

        # Masked language modeling (eq. 3) with the teacher's soft labels (eq. 7).
        if masked is not None and fused.masked is not None:
            mlm_alpha = alpha if self.momentum.distill_mlm else 0.0
            losses["mlm"] = masked_language_modeling(
                self.student, self.teacher, fused.masked, teacher, mask, masked, mlm_alpha, slice_rows
            )

        loss = torch.stack(list(losses.values())).sum()
        self._log_step(loss, losses, alpha)
        return {"loss": loss} | keys.for_queues()

    def current_alpha(self) -> float | Tensor:
        """Return the weight of the teacher's soft targets in this batch."""
        alpha = ramped_alpha(self.trainer, self.momentum)
        if self.accuracies is None or not self.momentum.alpha_by_accuracy:
            return alpha
        return alpha * self.accuracies.teacher

    def current_hardness(self) -> float | Tensor:
        """Return the factor of the similarities by which negatives are drawn in this batch."""
        if self.accuracies is None or self.contrast.negatives != "ramped":
            return 1.0
        return self.accuracies.student

    @torch.compiler.disable  # logging a name for the first time would compile the whole step again
    def _log_step(self, loss: Tensor, losses: dict[str, Tensor], alpha: float | Tensor) -> None:
        self.log("train/loss", loss.detach(), prog_bar=True)
        self.log_dict({f"train/loss_{name}": value.detach() for name, value in losses.items()})
        self.log_dict({"train/temperature": self.temperature.detach().squeeze(), "train/alpha": alpha})
        if self.accuracies is not None:
            student = self.accuracies.student
            self.log_dict({"train/accuracy": student, "train/accuracy_teacher": self.accuracies.teacher})

    def configure_callbacks(self) -> list[Callback]:
        """Supply averaging, queues, seeds and the writer of predictions, unless the user gives them."""
        writer = GroundingWriter() if self.grounding.evaluate else RetrievalPredictionWriter()
        required = EMACallback(), QueueCallback(), StepSeedCallback(), writer
        return missing_callbacks(callbacks_of(self), *required)

    def momentum_pairs(self) -> dict[str, EMAPair]:
        """Return the pairs that `EMACallback` averages after each optimizer step."""
        return {"teacher": EMAPair(source="student", target="teacher", momentum=self.momentum.momentum)}

    def queues(self) -> dict[str, FeatureQueue]:
        """Return the queues that `QueueCallback` fills after each batch."""
        return {"image": self.image_queue, "text": self.text_queue}

    def load_initial_weights(self) -> None:
        """Load `weights` into student and teacher, or `vision.weights` and `text.weights` into both."""
        if self.weights is not None:
            state, source, name_in_source = initial_weights.read_trained(self.weights, self.text.depth)
            # Without its queues: keys of another model are wrong negatives.
            source = initial_weights.load_state(self, state, source, queues=False, name_in_source=name_in_source)
        else:
            source = initial_weights.load_encoders(self.student, self.vision, self.text)
            copy_student(self.student, self.teacher)
        rank_zero_info(f"ALBEF starts with {source}.")

    def initial_preprocessing(self) -> dict[str, Any] | None:
        """Return how `weights` expect images to be prepared, if they record it."""
        return None if self.weights is None else preprocessing_of_checkpoint(self.weights)

    def expected_tokenizer(self) -> str | None:
        """Return the hub name or folder of the tokenizer of `text.weights`; None without."""
        return self.text.weights

    @property
    def text_prefix(self) -> str:
        """Text before each text: none."""
        return ""

    def on_fit_start(self) -> None:
        """Load initial weights, and compare the special token ids with the data's."""
        super().on_fit_start()
        check_special_tokens(self.datamodule, self.text)

    def on_train_start(self) -> None:
        """Compare the data's tokenizer, restored from a checkpoint by now, with that of `text.weights`.

        Raises:
            UserError: If it has other ids.
        """
        super().on_train_start()
        if (name := self.expected_tokenizer()) is not None:
            check_tokenizer(self, name, self.text.vocab_size, self.text.pad_token_id, trained=True)

    def text_towers(self) -> Iterable[FusionBert]:
        """Return the BERTs of student and teacher."""
        return self.student.text_encoder, self.teacher.text_encoder

    def sharded_networks(self) -> Sequence[nn.Module]:
        """Return student and teacher."""
        return self.student, self.teacher

    def paper_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return AdamW."""
        return adamw(groups, self.optim.learning_rate, self.optim.weight_decay, self.optim.betas)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return matrices with weight decay and vectors without; the temperature decays on request."""
        decayed, undecayed = super().parameter_groups()
        if self.optim.decay_temperature:
            decayed["params"].insert(0, self.temperature)
            undecayed["params"] = [each for each in undecayed["params"] if each is not self.temperature]
        return [decayed, undecayed]

    def paper_schedule(self) -> Schedule:
        """Return warm-up and cosine, or the authors' staircase."""
        return paper_schedule(self.optim, trainer_of(self))

    def bounds(self) -> Iterable[Bound]:
        """Return the bounds of the temperature."""
        return [(self.temperature, self.contrast.temperature_min, self.contrast.temperature_max)]

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return unit-length features of the images [B, E] and the texts [T, E] of a batch."""
        return self.encode_images(batch["image"])[0], self.encode_texts(batch["input_ids"], batch["attention_mask"])

    def encode_images(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Encode images [B, 3, S, S] as unit-length features [B, E] and tokens [B, N, V]."""
        tokens = self.student.encode_image(image)
        return self.student.project_image(tokens), tokens

    def encode_texts(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Encode texts, ids and mask [B, L], as unit-length features [B, E]."""
        return self.student.project_text(self.text_states(input_ids, attention_mask))

    def text_states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Encode texts, ids and mask [B, L], as states [B, L, D] before fusion, for `match_scores`."""
        return self.student.encode_text(input_ids, attention_mask)

    def match_scores(self, text_states: Tensor, attention_mask: Tensor, image_tokens: Tensor) -> Tensor:
        """Return logits [R] of a match of R texts, [R, L, D] with mask [R, L], with one image [1, N, V] (section 5)."""
        fused = self.student.fuse(text_states, attention_mask, image_tokens)
        return at_least_float32(self.itm_head(fused[:, 0]))[:, 1]

    def contrastive_temperature(self) -> float:
        """Return the learned temperature; every process calls it, because the temperature may be sharded."""
        return float(full_tensor(self.temperature.detach()))

    def word_maps(self, image: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return Grad-CAM maps [B, L, g, g] of every token for images [B, 3, S, S] and texts [B, L]; in eval mode."""
        return gradcam.word_maps(self.student, self.itm_head, image, input_ids, attention_mask)

    def grounding_maps(self, image: Tensor, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Return the "itm" and "itc" maps [B, g, g] of images [B, 3, S, S] and texts [B, L]; in eval mode."""
        temperature = self.contrastive_temperature()
        return grounding_maps(
            self.student, self.itm_head, temperature, self.grounding, image, input_ids, attention_mask
        )

    def pretrained_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the state without second names of tied tensors, and without what only training uses."""
        untied = initial_weights.without_tied(state)
        return {name: tensor for name, tensor in untied.items() if not name.startswith(TRAINING_STATE)}

    def load_pretrained_state(self, state: Mapping[str, Tensor], source: str) -> None:
        """Load the state of an export, or of a checkpoint with its queues."""
        initial_weights.load_state(self, state, source, queues=any(name.startswith(QUEUES) for name in state))

    def network_methods(self) -> Sequence[str]:
        """Return the methods of student and teacher that use their parameters."""
        encoders = ("encode_image", "finish_image", "project_image", "encode_text", "project_text")
        return (*encoders, "fuse", "predict_words")

    def module_methods(self) -> Sequence[str]:
        """Return the methods that encode, match and explain pairs."""
        return "encode_images", "encode_texts", "text_states", "match_scores", "word_maps", "grounding_maps"

    def example_batch(self, rows: int, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return pairs of images and texts with the shapes of a training, for `vlightning plan`."""
        return pair_batch(self, rows, data)

    def similarity_scale(self) -> float:
        """Return the inverse of the learned temperature; every process calls it."""
        return 1 / self.contrastive_temperature()

    @classmethod
    def layouts(cls) -> dict[str, str]:
        """Return the description of each layout of an export; the first is the default of `vlightning export`."""
        return super().layouts() | LAYOUTS

    @classmethod
    def write_layout(
        cls, content: Mapping[str, Any], source: str, target: str, layout: str, dtype: torch.dtype = torch.float32
    ) -> str:
        """Write the model of a checkpoint in a layout of the method's own."""
        return write_layout(cls, content, source, target, layout, dtype)
