"""MobileCLIP: reinforced training (Vasu et al., CVPR 2024, arXiv 2311.17049; MobileCLIP2: TMLR 2025, arXiv 2508.20691).

A small image-text model learns from a data set that was reinforced once: of each pair there are recorded augmentations,
synthetic captions, and the embeddings of an ensemble of large models, so that a step of training costs what plain
contrastive training costs.
"""

import copy
import math
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from timm.layers import to_2tuple
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from ...callbacks import EMACallback, EMAPair, RetrievalPredictionWriter, StepSeedCallback, missing_callbacks
from ...callbacks.distributed.collectives import gather, rank
from ...callbacks.ema import Warmup
from ..base.clamped import ClampedLogitScale
from ..base.data_sizes import DataSizes
from ..base.initial_weights import InitialWeights
from ..base.sharding import shard
from ..contrast import Side, Terms, contrast_terms
from ..evaluation.retrieval import Batch, RetrievalEvaluation, RetrievalModule
from ..memory import in_slices
from ..networks.batch_norm import kept_statistics, one_update
from ..networks.precision import unit
from ..optim.adamw import AdamWModule
from ..optim.layout import channels_last
from .losses import reinforced_loss
from .models import Three, build_model, model_config
from .pretrained import given_preprocessing, load_weights, preprocessing_of_file, rebuild
from .towers import Format, export_towers

_DATACOMP_DIMS, _DATACOMP_SCALE = [768, 768], 100.0
REAL, SYNTHETIC = "real", "synthetic"
_CAPTIONS = {REAL: "input_ids", SYNTHETIC: "synthetic_input_ids"}
_TEACHERS = {REAL: "teacher_text", SYNTHETIC: "teacher_synthetic"}


class MobileCLIPModule(ClampedLogitScale, AdamWModule, InitialWeights, RetrievalModule):
    """Contrast with the pairs, and distillation of how teachers relate images and texts, on two captions an image.

    Each batch of reinforced data makes two batches of pairs, with the real and with a synthetic caption of the same
    augmented images, whose losses are added up (paper, section 3). With `distillation_weight` 0 it is plain CLIP
    training, and takes pairs without reinforcements too.

    Sizes and rates default to the paper's for the S models; `configs/mobileclip/` has the paper's and the released
    scripts' settings as a whole.

    Args:
        model: name of the student: one of MobileCLIP's or MobileCLIP2's ("MobileCLIP-S0"), or any of open_clip's.
        image_size: side of the square images, pixels; the model's own by default. The command line sets it, and the
            three that follow, from the data's.
        image_mean: what the images are normalised with, for exports, where the datamodule is none of this package,
            which would say it; the model's own by default.
        image_std: standard deviation that goes with `image_mean`.
        image_interpolation: how the images are resized, for exports; the model's own by default.
        max_tokens: length of the token sequences (CLIP: 77).
        weights: file of a trained model of that name, the vendor's, open_clip's or a checkpoint of ours, to start from,
            or to evaluate. Datamodules of this package prepare images as it expects them, unless they are told how.
        captions: captions of reinforced data to train on: "both", as in the paper, or one kind, for ablations.
        distillation_weight: lambda, the share of the distillation in the loss (paper: 1 for the S models and
            MobileCLIP2, 0.75 for B).
        teacher_dims: width of each teacher's part of the embeddings; by default what `manifest.json` beside the data
            says, else DataCompDR's, 768 both.
        teacher_scales: what each teacher's cosines are multiplied by; by default what `manifest.json` says, else 100
            each (DataCompDR; DFNDR: 70 and 60).
        average_momentum: momentum of the moving average of the student that is evaluated and exported (paper: 0.9995);
            None evaluates the student itself, as the released scripts do.
        average_warmup: whether that momentum is at most (1 + n) / (10 + n) after n steps (`EMAPair`): else the average
            of a short run is still what it started from. "short" does so in runs of fewer than 10 / (1 -
            average_momentum) steps, 20,000, and leaves longer ones, such as the paper's of 200,000, as they are.
        max_logit_scale: the student's own scale is clamped to at most this after each optimizer step (CLIP: 100).
        learning_rate: learning rate at its peak (paper).
        min_learning_rate: learning rate at the last step (paper; MobileCLIP2-S3 and -S4, and the released scripts: 0).
        warmup_steps: optimizer steps of warm-up (paper: 2000; MobileCLIP2-S0 and -S2: 10,000; released scripts: 1000);
            a tenth of the run where that is not longer.
        weight_decay: weight decay of AdamW (paper); norms, biases and scales are spared.
        decay_layer_scales: whether the factors of residual branches are decayed, as in the released scripts.
        betas: beta1 and beta2 of AdamW (paper).
        eps: epsilon of AdamW (open_clip: 1e-6 for models with "vit" in their name).
        micro_batch_size: pairs that go through the towers at a time, activations computed again in the backward pass:
            the memory of a small batch for the loss of the whole one. Exact for towers without BatchNorm. Those of MCi
            and MCt normalise each slice by its own statistics then, as they would normalise a smaller batch; running
            statistics move once a step, towards the mean over the slices. None: all at once.
        loss_rows: rows of the logits that are held at a time, computed again in the backward pass; None holds all.
        match_equal_texts: whether retrieval evaluation counts equal captions of other images as matches.

    Raises:
        ValueError: for sizes that do not fit together, or a name that nobody knows.
    """

    def __init__(
        self,
        model: str = "MobileCLIP-S0",
        image_size: int | None = None,
        image_mean: Three | None = None,
        image_std: Three | None = None,
        image_interpolation: Literal["bilinear", "bicubic"] | None = None,
        max_tokens: int = 77,
        weights: str | None = None,
        captions: Literal["both", "real", "synthetic"] = "both",
        distillation_weight: float = 1.0,
        teacher_dims: list[int] | None = None,
        teacher_scales: list[float] | None = None,
        average_momentum: float | None = 0.9995,
        average_warmup: Warmup = "short",
        max_logit_scale: float = 100.0,
        learning_rate: float = 1e-3,
        min_learning_rate: float = 1e-6,
        warmup_steps: int = 2000,
        weight_decay: float = 0.2,
        decay_layer_scales: bool = False,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        micro_batch_size: int | None = None,
        loss_rows: int | None = None,
        match_equal_texts: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if not 0 <= distillation_weight <= 1:
            raise ValueError(f"distillation_weight is {distillation_weight}: give a share from 0 to 1.")
        self.teacher_dims, self.teacher_scales = self._teachers_of(None)
        if len(self.teacher_dims) != len(self.teacher_scales):
            raise ValueError(
                f"teacher_dims names {len(self.teacher_dims)} teachers, teacher_scales {len(self.teacher_scales)}: "
                "give one width and one scale for each."
            )
        if distillation_weight > 0 and not self.teacher_dims:
            raise ValueError("There is no teacher to distil from: name their widths as teacher_dims.")
        for name, value in (("micro_batch_size", micro_batch_size), ("loss_rows", loss_rows)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: give a number of at least 1, or leave it out.")
        self.student = build_model(model, image_size, max_tokens)
        self.student.logit_bias = None  # SigLIP's, which this loss does not have
        self.average: nn.Module | None = None
        if average_momentum is not None:
            self.average = copy.deepcopy(self.student).requires_grad_(False)
        self.evaluation = RetrievalEvaluation(match_equal_texts)
        self.train()

    @property
    def evaluated(self) -> Any:
        """The network that is evaluated and exported: the moving average where there is one, else the student."""
        return self.student if self.average is None else self.average

    def data_sizes(self) -> DataSizes:
        """What the towers were made for."""
        side = self.hparams["image_size"] or to_2tuple(self.student.visual.image_size)[0]
        return DataSizes(side, self.student.vocab_size)

    def momentum_pairs(self) -> dict[str, EMAPair]:
        """Return what `EMACallback` moves once per optimizer step; statistics of BatchNorm are averaged too."""
        if self.average is None:
            return {}
        momentum, warmup = self.hparams["average_momentum"], self.hparams["average_warmup"]
        return {"average": EMAPair("student", "average", momentum, buffers="average", warmup=warmup)}

    def configure_callbacks(self) -> list[Callback]:
        """Supply what the method cannot run without, and what writes predictions, unless the user's own is there."""
        needed: list[Callback] = [StepSeedCallback(), RetrievalPredictionWriter()]
        if self.average is not None:
            needed.append(EMACallback())
        return missing_callbacks(self.trainer.callbacks, *needed)  # type: ignore[attr-defined]

    def configure_model(self) -> None:
        """Shard the networks where the strategy shards, else lay out convolutions as they run fastest."""
        shard(self, [network for network in (self.student, self.average) if network is not None])
        if self.device_mesh is None:  # FSDP2 takes contiguous parameters only
            channels_last(self)

    def on_fit_start(self) -> None:
        """Load initial weights once a checkpoint would be restored, and learn from the data who its teachers are.

        Raises:
            ValueError: if that contradicts what was given, or the embeddings are not as wide as all teachers together.
        """
        super().on_fit_start()
        data = getattr(self.trainer, "datamodule", None)
        if self.hparams["distillation_weight"] > 0:
            self.teacher_dims, self.teacher_scales = self._teachers_of(getattr(data, "teachers", None))
            found = getattr(data, "teacher_width", None)
            if found is not None:
                self._check_width(found)

    def _teachers_of(self, stored: dict[str, Any] | None) -> tuple[list[int], list[float]]:
        """Width and scale of each teacher: as given, else as stored with the data, else DataCompDR's."""
        given = {name: self.hparams[f"teacher_{name}"] for name in ("dims", "scales")}
        if stored is not None:
            for name, value in given.items():
                if value is not None and not _alike(value, stored[name]):
                    raise ValueError(
                        f"teacher_{name} is {value}, but the data was reinforced with teachers of {stored[name]} by "
                        f"{stored['source']}: leave model.teacher_{name} out, or set it to null."
                    )
            return stored["dims"], stored["scales"]
        dims = _DATACOMP_DIMS if given["dims"] is None else given["dims"]
        return dims, [_DATACOMP_SCALE] * len(dims) if given["scales"] is None else given["scales"]

    def evaluates_initial_weights(self) -> bool:
        """Whether there is a trained model to start from."""
        return self.hparams["weights"] is not None

    def load_initial_weights(self) -> None:
        """Start the student, and its average, from `weights`, if there are any."""
        if self.hparams["weights"] is None:
            return
        rank_zero_info(load_weights(self.student, self.hparams["model"], self.hparams["weights"]))
        if self.average is not None:
            self.average.load_state_dict(self.student.state_dict())

    def initial_preprocessing(self) -> dict[str, Any] | None:
        """What `weights` expect."""
        if self.hparams["weights"] is None:
            return None
        return preprocessing_of_file(self.hparams["model"], self.hparams["weights"], self.hparams["image_size"])

    def picture_size(self) -> int:
        """The argument, else the model's own."""
        size: int = self.hparams["image_size"] or model_config(self.hparams["model"])["vision_cfg"]["image_size"]
        return size

    def train(self, mode: bool = True) -> "MobileCLIPModule":
        """Set the mode; the average is for evaluation only."""
        super().train(mode)
        if self.average is not None:
            self.average.eval()
        return self

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Sum over both captions of (1 - lambda) contrast + lambda distillation."""
        wanted = self.hparams["captions"]
        captions = [kind for kind, name in _CAPTIONS.items() if name in batch and wanted in (kind, "both")]
        if not captions:
            raise ValueError(
                f"The training batch has {', '.join(batch)}, but no {_CAPTIONS[SYNTHETIC]}: train on reinforced data, "
                "or leave model.captions out."
            )
        own = self._encode(batch, captions)
        everyone = dict(zip(own, gather(torch.cat(list(own.values()), 1), True).chunk(len(own), 1), strict=True))
        teachers = self._teachers(batch, captions)
        scale = self.student.logit_scale.exp()
        losses, logged = [], {}
        for kind in captions:
            student = Side(own["image"], own[kind], everyone["image"], everyone[kind], scale)
            first = rank() * len(own["image"])
            terms = contrast_terms(student, teachers[kind], first, self.hparams["loss_rows"])
            losses.append(reinforced_loss(terms, self.hparams["distillation_weight"]))
            logged[kind] = terms
        loss = torch.stack(losses).sum()
        self._log_step(loss, logged)
        return loss

    def _encode(self, batch: Batch, captions: list[str]) -> dict[str, Tensor]:
        """Unit features [B, E] of the images and of each kind of caption, in float32 at least."""

        def encode(image: Tensor, *texts: Tensor) -> tuple[Tensor, ...]:
            # Both captions share one pass through the text tower.
            features = self.student.encode_text(torch.cat(texts)).chunk(len(texts))
            return tuple(unit(part) for part in (self.student.encode_image(image), *features))

        texts = [batch[_CAPTIONS[kind]] for kind in captions]
        self._check_tokens(texts[0])
        size = self.hparams["micro_batch_size"]
        whole: AbstractContextManager[None] = nullcontext() if size is None else one_update(self.student)
        with whole:
            found = in_slices(encode, size, batch["image"], *texts, again=lambda: kept_statistics(self.student))
        return dict(zip(("image", *captions), found, strict=True))

    @torch.no_grad()
    def _teachers(self, batch: Batch, captions: list[str]) -> dict[str, list[Side]]:
        """What each teacher says of the pairs of each kind of caption; gathered once, in the precision of the data."""
        if not self.hparams["distillation_weight"]:
            return {kind: [] for kind in captions}
        names = ["teacher_image", *(_TEACHERS[kind] for kind in captions)]
        missing = [name for name in names if name not in batch]
        if missing:
            raise ValueError(
                f"The training batch has {', '.join(batch)}, but no {', '.join(missing)}: train on reinforced data, "
                "or set distillation_weight to 0."
            )
        self._check_width(batch["teacher_image"].shape[1])
        own = dict(zip(names, (batch[name] for name in names), strict=True))
        gathered = gather(torch.cat(list(own.values()), 1)).chunk(len(own), 1)
        everyone = dict(zip(names, gathered, strict=True))
        dims, scales = self.teacher_dims, self.teacher_scales
        return {
            kind: [
                Side(image, text, all_image, all_text, scale)
                for image, text, all_image, all_text, scale in zip(
                    own["teacher_image"].split(dims, 1),
                    own[_TEACHERS[kind]].split(dims, 1),
                    everyone["teacher_image"].split(dims, 1),
                    everyone[_TEACHERS[kind]].split(dims, 1),
                    scales,
                    strict=True,
                )
            ]
            for kind in captions
        }

    def _check_width(self, found: int) -> None:
        dims = self.teacher_dims
        if found != sum(dims):
            raise ValueError(
                f"The data's teacher embeddings are {found} wide, but teacher_dims {dims} add up to {sum(dims)}: set "
                "model.teacher_dims to the widths of the teachers that the data was reinforced with."
            )

    def _check_tokens(self, input_ids: Tensor) -> None:
        length = self.hparams["max_tokens"]
        if input_ids.shape[1] != length:
            raise ValueError(
                f"The captions come as {input_ids.shape[1]} tokens, but the text tower takes {length}: let the data "
                f"have tokenizer clip, vocab_size 49408 and max_tokens {length}."
            )

    def _log_step(self, loss: Tensor, terms: dict[str, Terms]) -> None:
        self.log("train/loss", loss.detach(), prog_bar=True)
        for kind, found in terms.items():
            self.log(f"train/contrast_{kind}", found.contrast.detach())
            if self.hparams["distillation_weight"]:
                self.log(f"train/distillation_{kind}", found.distillation.detach())
        self.log("train/logit_scale", self.student.logit_scale.detach().exp().squeeze())

    def encode_images(self, image: Tensor) -> tuple[Tensor, None]:
        """Unit-length features [B, E] of images [B, 3, S, S]."""
        return unit(self.evaluated.encode_image(image)), None

    def encode_texts(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Unit-length features [B, E] of texts [B, L]; the towers look at all positions, so the mask is not used."""
        self._check_tokens(input_ids)
        return unit(self.evaluated.encode_text(input_ids))

    def contrastive_temperature(self) -> float:
        """One over the learned scale."""
        value = self.evaluated.logit_scale
        return math.exp(-float(value.full_tensor() if isinstance(value, DTensor) else value))

    def export(self, folder: str | Path, format: Format = "torch_export", fused: bool = True) -> None:
        """Write both towers of the evaluated network for use without this project. Every process must call it.

        Args:
            folder: a new one.
            format: "torch_export" or "onnx".
            fused: whether branches and norms become convolutions first.
        """
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: Any = get_model_state_dict(self.evaluated, options=options)
        if rank() != 0:
            return
        model = rebuild(self.hparams, state, "the module")
        look = self.preprocessing() or given_preprocessing(self.hparams)
        export_towers(model, folder, format, self.picture_size(), fused, preprocessing=look)

    def decay_spared(self) -> tuple[str, ...]:
        """Scales of layers, unless they are to decay."""
        if self.hparams["decay_layer_scales"]:
            return ()
        names = (name for name, _ in self.student.named_parameters(prefix="student"))
        return tuple(name for name in names if name.endswith(".gamma"))


def _alike(given: list[float], stored: list[float]) -> bool:
    """Whether numbers are the same, as far as somebody has typed them: to one in a hundred."""
    return len(given) == len(stored) and all(map(partial(math.isclose, rel_tol=0.01), given, stored))
