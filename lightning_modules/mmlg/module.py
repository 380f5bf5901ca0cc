"""MM-LG: a multimodal learngene out of CLIP (Chen et al., "Extracting Multimodal Learngene in CLIP", arXiv 2506.16673).

Extraction trains an auxiliary CLIP whose every layer is a weighted sum of two stored blocks, one of its tower and one
that both towers share, with CLIP's loss and a teacher's. What is stored, half as many numbers as that CLIP has, is the
learngene: `LearngeneWriter` puts it into a file, and `LearngeneExpansionCallback` starts CLIPs of 6 to 12 layers from
that. Such a descendant is activated on a tenth of the pairs, and fine-tuned; both are trainings of this module too,
with an ordinary CLIP as the student.
"""

import dataclasses
import math
from statistics import fmean
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from ...callbacks import RetrievalPredictionWriter, StepSeedCallback, missing_callbacks
from ...callbacks.distributed.collectives import gather, keep_from_ddp, rank
from ...callbacks.figures.learngene import LearngeneTerms
from ...callbacks.learngene.file import Learngene, LearngeneSizes
from ...callbacks.learngene.layers import group_of
from ..base.clamped import ClampedLogitScale
from ..base.fitting import load_student
from ..base.frozen import FrozenTeacher
from ..base.initial_weights import InitialWeights
from ..base.preprocessing import preprocessing_of_checkpoint
from ..base.sharding import shard
from ..base.taught import TaughtModule
from ..contrast import Side, Terms, contrast_terms
from ..evaluation.retrieval import Batch, Protocol, RetrievalEvaluation, RetrievalModule
from ..memory import in_slices
from ..networks.precision import unit
from ..networks.published_clip import PublishedCLIP, load_published
from ..optim.adamw import AdamWModule
from .losses import extraction_loss, soft_cross_entropy
from .network import LearngeneCLIP
from .pretrained import NETWORKS, Student

Three = tuple[float, float, float]


class MMLGModule(TaughtModule, ClampedLogitScale, AdamWModule, InitialWeights, RetrievalModule):
    """CLIP training with a teacher: extraction, of the auxiliary, and whatever its descendants go through.

    Sizes default to the paper's: a ViT-S/16 and a text tower of the same width, 30,311,065 parameters instead of the
    62,257,537 of the ordinary CLIP that it computes. The teacher is not in the checkpoint, which names it and holds a
    fingerprint of its weights.

    Args:
        student: "MM-LG" extracts, "TLEG" does so in the way of the method that the paper compares with. "plain" is an
            ordinary CLIP: a descendant, if a `LearngeneExpansionCallback` sets it, or else the paper's "PT-FT" or
            "scratch", and what He-LG's learngene is cut out of.
        width: values of a token in both towers, which share blocks (open_clip's ViT-S-16).
        heads: number of attention heads in both towers (open_clip's ViT-S-16).
        layers: number of layers of each tower (paper), an even number for "MM-LG".
        embed_dim: number of values of a feature; the teacher's may have another number (open_clip's ViT-S-16).
        patch_size: side of a patch, pixels (paper).
        image_size: side of the square images, pixels (paper). The command line sets it, and the four that follow,
            from the data's.
        image_mean: what the images are normalised with (CLIP), where the datamodule is none of this package, which
            would say it. It has to be what the teacher expects.
        image_std: standard deviation that goes with `image_mean`.
        max_tokens: length of the token sequences (CLIP).
        vocab_size: number of tokens (CLIP).
        teacher: name of one of open_clip's models (paper: OpenAI's ViT-B/16).
        teacher_weights: a tag of open_clip's, which decides about QuickGELU too; a folder or a file. As in
            `load_published`.
        distillation_weight: lambda (paper: 1); 0 leaves the teacher out.
        weights: checkpoint of an earlier training here whose student this one starts from; of the same sizes.
        max_logit_scale: the scale of the logits is clamped to at most this after each optimizer step (CLIP).
        learning_rate: learning rate at its peak (paper).
        warmup_steps: optimizer steps of warm-up (paper); a tenth of the run where that is not longer.
        weight_decay: weight decay of AdamW (paper); norms, biases, coefficients and the scale are spared.
        betas: beta1 and beta2 of AdamW (open_clip's for ViTs; the paper does not say).
        eps: epsilon of AdamW (the same).
        micro_batch_size: pairs that go through the towers at a time, activations computed again in the backward pass:
            the memory of a small batch for the loss of the whole one. None: all at once.
        loss_rows: rows of the logits that are held at a time, computed again in the backward pass; None holds all.
        match_equal_texts: whether retrieval evaluation counts equal captions of other images as matches.
        protocols: what retrieval is measured by: "karpathy5" ranks all captions of all images (five each in
            Karpathy's splits), "paper" the first one of each. Every number is logged under the name of its protocol.

    Raises:
        ValueError: for sizes that do not fit together, or a number that is too small.
    """

    def __init__(
        self,
        student: Student = "MM-LG",
        width: int = 384,
        heads: int = 6,
        layers: int = 12,
        embed_dim: int = 384,
        patch_size: int = 16,
        image_size: int = 224,
        image_mean: Three = OPENAI_DATASET_MEAN,
        image_std: Three = OPENAI_DATASET_STD,
        max_tokens: int = 77,
        vocab_size: int = 49408,
        teacher: str = "ViT-B-16",
        teacher_weights: str = "openai",
        distillation_weight: float = 1.0,
        weights: str | None = None,
        max_logit_scale: float = 100.0,
        learning_rate: float = 1e-3,
        warmup_steps: int = 10_000,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-6,
        micro_batch_size: int | None = None,
        loss_rows: int | None = None,
        match_equal_texts: bool = False,
        protocols: list[Protocol] = ["karpathy5", "paper"],  # noqa: B006  (jsonargparse shows it as the default)
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if distillation_weight < 0:
            raise ValueError(f"distillation_weight is {distillation_weight}: give a weight of at least 0.")
        for name, value in (("micro_batch_size", micro_batch_size), ("loss_rows", loss_rows)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: give a number of at least 1, or leave it out.")
        sizes = LearngeneSizes(width, heads, layers, embed_dim, image_size, patch_size, max_tokens, vocab_size)
        self.student = NETWORKS[student](sizes)
        self.teacher: FrozenTeacher[Any] = FrozenTeacher(nn.Identity())  # until a fit needs it
        self.teacher_scale = 0.0
        self._teachers_look: dict[str, Any] | None = None  # what the teacher expects to be done with an image
        self.evaluation = RetrievalEvaluation(match_equal_texts, protocols=protocols)

    def configure_callbacks(self) -> list[Callback]:
        """Supply what the method cannot run without, and what writes predictions, unless the user's own is there."""
        needed = (StepSeedCallback(), RetrievalPredictionWriter())
        return missing_callbacks(self.trainer.callbacks, *needed)  # type: ignore[attr-defined]

    def setup(self, stage: str) -> None:
        """Load the teacher, which only training needs."""
        super().setup(stage)
        if stage == "fit" and self.hparams["distillation_weight"] and self.teacher.origin is None:
            outside = load_published(self.hparams["teacher"], self.hparams["teacher_weights"])
            self._teachers_look = dataclasses.asdict(outside.preprocessing)
            self._check_teacher(outside)
            network = outside.network
            self.teacher_scale = float(network.logit_scale.exp())
            # FSDP2 shards along the first dimension, and a number has none.
            network.logit_scale = nn.Parameter(network.logit_scale.detach().reshape(1))
            network.logit_bias = None
            self.teacher.network = network.requires_grad_(False)
            self.teacher.record(outside.model, outside.weights)
            keep_from_ddp(self, [self.teacher])

    def _check_teacher(self, outside: PublishedCLIP) -> None:
        """The teacher sees the student's images and tokens."""
        look, text = outside.preprocessing, getattr(outside.network, "text", outside.network)
        compared = {
            "image_size": look.image_size,
            "image_mean": look.mean,
            "image_std": look.std,
            "max_tokens": text.context_length,
            "vocab_size": text.vocab_size,
        }
        shown = getattr(getattr(self._trainer, "datamodule", None), "preprocessing", None) or {}
        for name, expected in compared.items():
            found = shown.get(name.removeprefix("image_"), self.hparams[name])
            if not torch.allclose(torch.tensor(found).double(), torch.tensor(expected).double()):
                raise ValueError(
                    f"{name} is {found}, but the teacher {outside.model} of {outside.weights!r} expects {expected}: "
                    f"set data.{name} to that, or choose another teacher."
                )

    def evaluates_initial_weights(self) -> bool:
        """Whether there are some."""
        return self.hparams["weights"] is not None

    def initial_preprocessing(self) -> dict[str, Any] | None:
        """What `weights` expect, else what the teacher does, which sees the same images."""
        source = self.hparams["weights"]
        return self._teachers_look if source is None else preprocessing_of_checkpoint(source)

    def load_initial_weights(self) -> None:
        """Start from `weights`, where they are given; what was done is logged."""
        if self.hparams["weights"] is not None:
            rank_zero_info(load_student(self.student, self.hparams["weights"], type(self).__name__))

    def configure_model(self) -> None:
        """Shard the networks where the strategy shards."""
        taught = self.teacher.origin is not None
        shard(self, [self.student, *[self.teacher.network] * taught])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Contrast of the pairs, and cross entropy of student and teacher."""
        self._check_tokens(batch["input_ids"])
        teachers = self._teachers(batch)  # its memory is free again when the student's is taken
        image, text = self.student.encode_pairs(batch["image"], batch["input_ids"], self.hparams["micro_batch_size"])
        student = _side(image, text, self.student.logit_scale.exp(), gradient=True)
        terms = contrast_terms(student, teachers, rank() * len(student.image), self.hparams["loss_rows"])
        loss = extraction_loss(terms, self.hparams["distillation_weight"])
        self._log_step(loss, terms)
        return loss

    @torch.no_grad()
    def _teachers(self, batch: Batch) -> list[Side]:
        if not self.hparams["distillation_weight"]:
            return []

        def encode(image: Tensor, input_ids: Tensor) -> tuple[Tensor, ...]:
            return self.teacher.network.encode_image(image), self.teacher.network.encode_text(input_ids)

        image, text = in_slices(encode, self.hparams["micro_batch_size"], batch["image"], batch["input_ids"])
        return [_side(image, text, self.teacher_scale)]

    def _check_tokens(self, input_ids: Tensor) -> None:
        length = self.hparams["max_tokens"]
        if input_ids.shape[1] != length:
            raise ValueError(
                f"The captions come as {input_ids.shape[1]} tokens, but the text tower takes {length}: let the data "
                f"have tokenizer clip, vocab_size {self.hparams['vocab_size']} and max_tokens {length}."
            )

    def _log_step(self, loss: Tensor, terms: Terms) -> None:
        self.log("train/loss", loss.detach(), prog_bar=True)
        self.log("train/contrast", terms.contrast.detach())
        if self.hparams["distillation_weight"]:
            self.log("train/distillation", soft_cross_entropy(terms).detach())
        self.log("train/logit_scale", self.student.logit_scale.detach().exp().squeeze())

    def on_train_epoch_end(self) -> None:
        """Log means over the layers of what `LearngeneFigures` draws of each, if the student has such sums."""
        terms = self.learngene_terms()
        if terms is None:
            return
        found = {f"coefficient_{name}": values for name, values in terms.coefficients.items()}
        found |= {f"summand_norm_{name}": values for name, values in terms.norms.items()}
        # Every process has the same numbers; the mean over them only keeps Lightning from warning.
        self.log_dict({f"train/{name}": fmean(values) for name, values in found.items()}, sync_dist=True)

    @torch.no_grad()
    def learngene_terms(self) -> LearngeneTerms | None:
        """The coefficients and the norms of what they multiply, products; every process must call it.

        None for a student whose layers are not weighted sums.
        """
        if not isinstance(self.student, LearngeneCLIP):
            return None
        blocks, norms = self.student.blocks, {}
        coefficients = {name: _whole(value.detach()).float() for name, value in self.student.coefficients.items()}
        sizes = {
            (kind, int(group)): _whole(get_total_norm([part.detach().float() for part in block.parameters()]))
            for kind, groups in blocks.items()
            for group, block in groups.items()  # type: ignore[operator]
        }
        for name, values in coefficients.items():
            kind = "multimodal" if name.endswith("multimodal") else name
            theirs = torch.stack([sizes[kind, group_of(pair)] for pair in range(len(values))])
            norms[name] = (values.abs() * theirs).tolist()
        return LearngeneTerms({name: values.tolist() for name, values in coefficients.items()}, norms)

    def encode_images(self, image: Tensor) -> tuple[Tensor, None]:
        """Unit-length features [B, E] of images [B, 3, S, S]."""
        return unit(self.student.encode_image(image)), None

    def encode_texts(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Unit-length features [B, E] of texts [B, L]; a text's feature is that of its end, so the mask is not used."""
        self._check_tokens(input_ids)
        return unit(self.student.encode_text(input_ids))

    def contrastive_temperature(self) -> float:
        """One over the learned scale."""
        return math.exp(-float(_whole(self.student.logit_scale.detach())))

    def learngene(self) -> Learngene:
        """What was extracted so far: an ordinary CLIP's is that of He-LG.

        Every process must call it, and the first one gets the tensors.
        """
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: Any = get_model_state_dict(self.student, options=options)
        state = {name: tensor.detach().float() for name, tensor in state.items()}
        tensors = self.student.learngene_tensors(state) if state else state  # the other processes get nothing
        origin, look = self.teacher.origin, self.preprocessing()
        return Learngene(tensors, self.student.sizes, origin, method=self.student.method, preprocessing=look)


def _side(image: Tensor, text: Tensor, scale: Tensor | float, gradient: bool = False) -> Side:
    """Unit features of this process's pairs and everybody's, of features [B, E]."""
    image, text = unit(image), unit(text)
    all_image, all_text = gather(torch.cat([image, text], 1), gradient).chunk(2, 1)
    return Side(image, text, all_image, all_text, scale)


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
