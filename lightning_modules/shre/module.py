"""SHRe: one space for images and texts from a supervised classifier (T. Cares, master's thesis, 2024).

The name and the idea are those of "See, Hear, and Read: Deep Aligned Representations" (Aytar et al. 2017, arXiv
1706.00932): the class posterior of an image, computed by a trained classifier, is the target for the image and for its
caption, and both members of a pair are contrasted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from ...callbacks import (
    FeatureQueue,
    QueueCallback,
    RetrievalPredictionWriter,
    StepSeedCallback,
    missing_callbacks,
)
from ...common.ranges import COUNT
from ..base.encoder_programs import export_encoders
from ..base.example_batch import pair_batch
from ..base.method import Method
from ..base.vocabulary import TextTower, check_tokenizer
from ..core.checkpoints import preprocessing_of_checkpoint
from ..core.fitting import load_fitting, load_student
from ..core.frozen import Frozen
from ..core.memory import in_slices
from ..core.precision import at_least_float32, unit
from ..core.programs import LAYOUTS as PROGRAMS
from ..core.trainers import callbacks_of
from ..evaluation.protocol import Batch
from ..losses.contrast import pair_ids
from ..networks.clip.pair import preprocessing_of_image_tower
from ..networks.user_teacher import TeacherImages
from ..optim.configure import LRSchedulerCallable, OptimizerCallable
from ..optim.optimizers import adamw, channels_last
from ..optim.schedules import WarmupCosine
from .evaluation import SHReEvaluation
from .losses import EmbeddingDistillation, PosteriorDistillation, contrasts_by_result
from .network import Results, SHReNetwork, TextEncoder, encode_pairs, load_encoders
from .settings import (
    ContrastSettings,
    EvaluationSettings,
    KLSettings,
    MemorySettings,
    OptimSettings,
    TeacherSettings,
    TextSettings,
    VisionSettings,
    check_settings,
)
from .shared import Shared, layers_after
from .teacher import load_teacher, teacher_conversion

_DISTILLATION = "distillation."
"""Prefix of the names of the queue in the state dict."""


class SHReModule(Method):
    """Distill a classifier into encoders of images and texts (listing 2).

    With the default sizes the student has 114,983,656 parameters. Retrieval is evaluated in two spaces, that of the
    shared encoder's first result ("h2") and that of the logits ("h3"), with the average median rank beside recall.
    `classify_images` on data with the teacher's labels is supervised classification, not zero-shot.

    Args:
        num_classes: number of classes C of the teacher (ImageNet), or the dimension of its embedding.
        weights: checkpoint of an earlier training whose student is the initial one; replaces the encoders' weights.
        shared: shared encoder: "mlp" (listing 2); "transformer", contrasted on h2 only, which was 2 to 3 points better;
            "s_smke", the thesis' last; or "mlp_in_order", the listing's widths read as those of consecutive layers.
        teacher: the teacher and its images.
        vision: the image encoder; width and heads of all encoders.
        text: the text encoder.
        kl: divergence from the teacher's posterior, or contrast with its embeddings.
        contrast: image-text contrast.
        evaluation: retrieval.
        match_equal_texts: whether equal captions of other images count as matches; None: see `RetrievalEvaluation`.
        optim: AdamW and its schedule.
        memory: slices and recomputation.
        optimizer: replaces AdamW.
        lr_scheduler: replaces the schedule.

    Raises:
        UserError: For sizes that do not fit together, or a setting outside its range.
    """

    teacher_settings: TeacherSettings
    vision: VisionSettings
    text: TextSettings
    kl: KLSettings
    contrast: ContrastSettings
    evaluation_settings: EvaluationSettings
    optim: OptimSettings
    memory: MemorySettings

    def __init__(
        self,
        num_classes: Annotated[int, COUNT] = 1000,
        weights: str | None = None,
        shared: Shared = "mlp",
        teacher: TeacherSettings = TeacherSettings(),
        vision: VisionSettings = VisionSettings(),
        text: TextSettings = TextSettings(),
        kl: KLSettings = KLSettings(),
        contrast: ContrastSettings = ContrastSettings(),
        evaluation: EvaluationSettings = EvaluationSettings(),
        match_equal_texts: bool | None = None,
        optim: OptimSettings = OptimSettings(),
        memory: MemorySettings = MemorySettings(),
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        self.take_arguments(locals(), teacher="teacher_settings", evaluation="evaluation_settings")
        self.num_classes = num_classes
        self.weights = weights
        if self.text.name is not None:
            from .towers import named_text  # needs open_clip, which encoders without a name do not

            completed = named_text(self.text)
            self.change_settings("text", pooling=completed.pooling, config=completed.config)
        self.student = SHReNetwork(num_classes, shared, self.vision, self.text)
        if not isinstance(encoder := self.student.text_encoder, TextEncoder):
            self.change_settings("text", vocab_size=encoder.vocab_size, pad_token_id=encoder.pad_token_id)
        widths = self.student.widths
        check_settings(self.teacher_settings, self.kl, self.contrast, self.evaluation_settings, list(widths))
        contrasted = (self.contrast.layers or self.student.shared_encoder.contrasted) if self.contrast.weight else ()
        results = {*contrasted, "h3"} if self.kl.weight else contrasted
        for layer in layers_after(self.student.shared_encoder.layers(), results):
            layer.requires_grad_(False)  # DDP requires a gradient for each trainable parameter
        # Not a scalar: FSDP2 shards the first dimension.
        log_scale = torch.tensor([-math.log(self.contrast.temperature)])
        self.scales = nn.ParameterDict([(name, nn.Parameter(log_scale.clone())) for name in contrasted])
        self.teacher: Frozen[Any] = Frozen()
        self._teacher_images: TeacherImages | None = None
        self.distillation: PosteriorDistillation | EmbeddingDistillation = PosteriorDistillation(self.kl, num_classes)
        if self.teacher_settings.target == "embedding":
            self.distillation = EmbeddingDistillation(
                self.teacher_settings, num_classes, self.contrast.mask_same_image, self.memory.loss_rows
            )
        self.spaces = {name: widths[name] for name in (next(iter(widths)), "h3")}
        self.evaluation = SHReEvaluation(self.evaluation_settings, match_equal_texts, self.spaces)
        self.start_vocabulary()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | dict[str, Any]:
        """Return the weighted sum of distillation and contrast (listing 2), with the keys for a queue."""
        teacher = self._teacher_output(batch["image"]) if self.kl.weight else None
        images, texts = encode_pairs(
            self.student, batch["image"], batch["input_ids"], batch["attention_mask"], self.memory.micro_batch_size
        )

        losses = []
        queue_keys: dict[str, Any] = {}
        if teacher is not None:  # kl_div(teacher, image) and kl_div(teacher, caption)
            distilled = self.distillation(teacher, images["h3"], texts["h3"], batch["image_id"])
            losses.append(self.kl.weight * distilled.loss)
            queue_keys = distilled.keys_of(self.distillation.queue)
            self.log_dict(distilled.logs)
        if self.scales:  # mean of itc_loss(image, caption) over the shared encoder's results
            losses.append(self.contrast.weight * self._contrast(images, texts, batch))
        loss = torch.stack(losses).sum()

        self.log("train/loss", loss.detach(), prog_bar=True)
        return {"loss": loss, **queue_keys} if queue_keys else loss

    @torch.no_grad()
    def _teacher_output(self, image: Tensor) -> Tensor:
        """Compute the teacher's logits or embeddings [B, C] of the data's images [B, 3, S, S]."""
        if self._teacher_images is None:
            self._teacher_images = teacher_conversion(self.teacher.network, self.teacher_settings, self.datamodule)
        to_teacher = self._teacher_images
        outputs = in_slices(
            lambda images: (self.teacher.network(to_teacher(images)),), self.memory.micro_batch_size, image
        )
        return outputs[0]

    def _contrast(self, images: Results, texts: Results, batch: Batch) -> Tensor:
        """Compute the mean of CLIP's loss over the contrasted results."""
        ids = pair_ids(batch, self.contrast.mask_same_image, self.contrast.mask_same_text)
        losses = contrasts_by_result(images, texts, dict(self.scales.items()), ids, self.memory.loss_rows)
        logs = {f"train/contrast_{name}": loss.detach() for name, loss in losses.items()}
        logs |= {f"train/logit_scale_{name}": scale.detach().exp().squeeze() for name, scale in self.scales.items()}
        self.log_dict(logs)
        return torch.stack(list(losses.values())).mean()

    def queues(self) -> dict[str, FeatureQueue]:
        """Return the queue of the teacher's embeddings, which `QueueCallback` fills after each batch."""
        queue = self.distillation.queue
        return {} if queue is None or not self.kl.weight else {"target": queue}

    def encode_images(self, image: Tensor) -> tuple[Tensor, None]:
        """Return unit features [B, E] of images [B, 3, S, S] in the space `evaluation.features`."""
        return self._features(self.student.encode_image(image), [self.evaluation_settings.features]), None

    def encode_texts(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return unit features [B, E] of texts, ids and mask [B, L], in the space `evaluation.features`."""
        return self._features(self.student.encode_text(input_ids, attention_mask), [self.evaluation_settings.features])

    def ranked_images(self, image: Tensor) -> tuple[Tensor, None]:
        """Return the unit features of both spaces, concatenated."""
        return self._features(self.student.encode_image(image), self.spaces), None

    def ranked_texts(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the unit features of both spaces, concatenated."""
        return self._features(self.student.encode_text(input_ids, attention_mask), self.spaces)

    def _features(self, results: tuple[Tensor, ...], spaces: Iterable[str]) -> Tensor:
        result_of = dict(zip(self.student.widths, results, strict=True))
        return torch.cat([unit(result_of[space]) for space in spaces], 1)

    def classify_images(self, image: Tensor) -> Tensor:
        """Return logits [B, C] of the teacher's classes for images [B, 3, S, S]."""
        return at_least_float32(self.student.encode_image(image)[-1])

    def classify_texts(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits [B, C] of the teacher's classes for texts, ids and mask [B, L]."""
        return at_least_float32(self.student.encode_text(input_ids, attention_mask)[-1])

    def configure_callbacks(self) -> list[Callback]:
        """Return the callbacks that the method needs and the user did not give."""
        needed = [QueueCallback()] if self.queues() else []
        return missing_callbacks(callbacks_of(self), StepSeedCallback(), RetrievalPredictionWriter(), *needed)

    def setup(self, stage: str) -> None:
        """Load the teacher, for training only."""
        super().setup(stage)
        self._teacher_images = None  # of another datamodule
        if stage == "fit" and self.kl.weight:
            load_teacher(self.teacher, self.teacher_settings, self.num_classes, self.vision.image_size)

    def configure_model(self) -> None:
        """Shard the networks, or use the memory format in which the teacher runs fastest."""
        super().configure_model()
        if self.device_mesh is None:  # FSDP2 requires contiguous parameters
            channels_last(self.teacher)

    def sharded_networks(self) -> list[nn.Module]:
        """Return the student, and the teacher if it is loaded."""
        return [self.student, self.teacher.network] if self.teacher.loaded else [self.student]

    def text_towers(self) -> Iterable[TextTower]:
        """Return the text encoder; one by name has the vocabulary of its own tokenizer."""
        encoder = self.student.text_encoder
        return (encoder,) if isinstance(encoder, TextEncoder) else ()

    def expected_tokenizer(self) -> str | None:
        """Return the folder or hub name of the tokenizer of a text encoder by name; None for another."""
        return self.text.tokenizer or self.text.name

    @property
    def text_prefix(self) -> str:
        """Text before each text."""
        return self.text.prefix

    def on_train_start(self) -> None:
        """Compare the data's tokenizer, restored from a checkpoint by now, with that of a text encoder by name.

        Raises:
            UserError: If it has other ids.
        """
        super().on_train_start()
        text = self.text
        if (name := self.expected_tokenizer()) is not None:
            check_tokenizer(self, name, text.vocab_size, text.pad_token_id, text.weights is not None)

    def initial_preprocessing(self) -> dict[str, Any] | None:
        """Return the preprocessing of the training that `weights` come from, or of an image encoder by name."""
        if self.weights is not None:
            return preprocessing_of_checkpoint(self.weights)
        if self.vision.name is None:
            return None
        from .towers import image_tower

        return preprocessing_of_image_tower(image_tower(self.vision), self.vision.image_size).as_dict()

    def load_initial_weights(self) -> None:
        """Load the student of a training, or weights of public models into its encoders."""
        if self.weights is not None:
            rank_zero_info(load_student(self.student, self.weights, type(self).__name__))
        else:
            load_encoders(self.student, self.vision, self.text)

    def pretrained_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the state without the queue, which only training uses."""
        return {name: tensor for name, tensor in state.items() if not name.startswith(_DISTILLATION)}

    def load_pretrained_state(self, state: Mapping[str, Tensor], source: str) -> None:
        """Load the state of an export, or of a checkpoint with its queue."""
        queue = {name: tensor for name, tensor in self.state_dict().items() if name.startswith(_DISTILLATION)}
        load_fitting(self, queue | dict(state), f"{type(self).__name__} from {source}")

    def bounds(self) -> list[tuple[nn.Parameter, float, float]]:
        """Return CLIP's bounds of each logit scale."""
        return [(scale, 0.0, math.log(self.contrast.max_logit_scale)) for scale in self.scales.values()]

    def no_weight_decay(self) -> list[str]:
        """Return the names of tokens, positions and embeddings."""
        suffixes = ("cls_token", "pos_embed", "embeddings.weight", "embed_tokens.weight", "wte.weight", "wpe.weight")
        trained = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        return [name for name in trained if name.endswith(suffixes)]

    def paper_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return AdamW."""
        return adamw(groups, self.optim.learning_rate, self.optim.weight_decay, self.optim.betas, self.optim.eps)

    def paper_schedule(self) -> WarmupCosine:
        """Return a warm-up from 0 and half a cosine to 0."""
        return WarmupCosine(self.optim.learning_rate, warmup_start=0.0, warmup_share=self.optim.warmup_share)

    def network_methods(self) -> Sequence[str]:
        """Return the methods of the student that use its parameters."""
        return "encode_image", "encode_text"

    def module_methods(self) -> Sequence[str]:
        """Return the methods that encode and classify images and texts."""
        return "encode_images", "encode_texts", "classify_images", "classify_texts"

    def example_batch(self, rows: int, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return pairs of images and texts with the shapes of a training, for `vlightning plan`."""
        return pair_batch(self, rows, data)

    def similarity_scale(self) -> float:
        """Return the logit scale of the space `evaluation.features`; 1 if that space is not contrasted."""
        space = self.evaluation_settings.features
        return float(self.scales[space].exp()) if space in self.scales else 1.0

    evaluation_note = "SHRe's teacher was trained with labels"

    @classmethod
    def layouts(cls) -> dict[str, str]:
        """Return the description of each layout of an export; the first is the default of `vlightning export`."""
        return super().layouts() | PROGRAMS

    @classmethod
    def write_layout(
        cls, content: Mapping[str, Any], source: str, target: str, layout: str, dtype: torch.dtype = torch.float32
    ) -> str:
        """Write the model of a checkpoint in a layout of the method's own."""
        return export_encoders(cls, content, source, target, layout, dtype)
