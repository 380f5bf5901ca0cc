"""CoCoRD: contrastive, cooperative and relational distillation (Fu et al., BMVC 2023).

A student learns to tell its teacher's key of an image from those of other images (the teacher dictionary), to
predict what a slow-moving average of itself says of another view, and to classify.
"""

import copy
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from ...callbacks import (
    ClassPredictionWriter,
    EMACallback,
    EMAPair,
    FeatureQueue,
    QueueCallback,
    StepSeedCallback,
    missing_callbacks,
)
from ...callbacks.distributed.collectives import keep_from_ddp, world_size
from ..base.data_sizes import DataSizes
from ..base.frozen import FrozenTeacher
from ..base.initial_weights import InitialWeights
from ..base.sharding import shard
from ..evaluation.classification import Accuracy, Batch, ClassifierModule
from ..networks.cifar import Classifier
from ..networks.classifier_files import load_classifier, public_state, read_classifier
from ..networks.classifiers import (
    Predictor,
    ProjectionHead,
    build_classifier,
    each_view,
    freeze_classifier,
    public_network,
)
from ..networks.frozen_classifier import load_frozen
from ..networks.precision import at_least_float32, unit
from .losses import contrastive_loss, distillation_loss, prediction_loss

Module = TypeVar("Module", bound=nn.Module)
_OTHER = {"image": "image_slow", "image_slow": "image"}  # the view that a view's cognate key is of
_SMALL_STEPS = ("mobilenet", "shuffle")  # families that the CRD benchmark trains with a fifth of the learning rate


class _TeacherViews(NamedTuple):
    """What the teacher says of the views that the losses ask for."""

    features: dict[str, Tensor]  # [B, D] by view
    logits: Tensor | None  # [B, C] of the student's view


class CoCoRDModule(InitialWeights, ClassifierModule):
    """CoCoRD, and what it is compared with: with its weights at zero plain KD, with that at zero too plain training.

    What a loss with weight zero would need is neither built nor computed. A training batch holds `label` [B] and a view
    of each image for each name in `views()`; `image` is the student's.

    The teacher is not in the checkpoint, which names it and holds a fingerprint of its weights.

    Args:
        student: name of a CIFAR network (`resnet8x4`, `wrn_16_2`, `MobileNetV2`, ...), or of a model of torchvision or
            timm.
        num_classes: how many there are. The command line sets it from the data's, where that is given.
        student_weights: file that the student starts from, or that `test` evaluates. None means random.
        teacher: the teacher's name, in the same form. None where no loss asks for one.
        teacher_weights: the teacher's file (a checkpoint of this class whose student it was, a public one of the CRD
            benchmark, or safetensors), the folder of the run that trained it, whose newest last checkpoint is taken, or
            the name of the library's own weights, such as IMAGENET1K_V1.
        contrast_weight: weight of the contrastive loss (section 4.1).
        prediction_weight: weight of the predictive loss, or of the sum of both (section 4.1; kept where there is only
            one).
        class_weight: weight of the cross entropy with the labels.
        kd_weight: weight of the KL divergence from the teacher's distribution; 1 beside the rest for CoCoRD+KD, 0.9
            beside `class_weight` 0.1 for KD as in the CRD benchmark.
        kd_temperature: temperature of both distributions (CRD benchmark).
        temperature: temperature of the contrastive loss (section 4.1: 0.1; ImageNet 0.07).
        queue_size: number N of keys in the dictionary (section 4.1: 2048; ImageNet 65536).
        queue_start: "empty" hides slots until they are filled; "random" starts with random unit vectors as negatives,
            as the authors do.
        embed_dim: number of values of a key (derived from Table 12).
        head_hidden: width inside a projection head (the authors' code).
        predictor_hidden: width inside the predictor (the authors' code).
        slow_momentum: m_r of the slow-moving student and its head (section 4.1).
        teacher_head_momentum: m_c of the teacher's head (section 4.1), where its features are as wide as the student's;
            else that head stays random.
        symmetric_prediction: whether the second view is predicted from the first too (eq. 7; ImageNet does without).
        dictionary_encoder: the encoder that gives the keys of the dictionary (Table 5).
        cognate_encoder: the encoder that gives the targets of the prediction (Table 5).
        learning_rate: learning rate at the start; by default 0.05, and 0.01 for MobileNets and ShuffleNets (CRD
            benchmark).
        lr_milestones: epochs after which the learning rate falls (CRD benchmark).
        lr_decay: factor by which the learning rate is multiplied at each milestone.
        momentum: momentum of SGD.
        weight_decay: weight decay of SGD, on all parameters (CRD benchmark).

    Raises:
        ValueError: for unknown names, or a loss without what it needs.
    """

    def __init__(
        self,
        student: str = "resnet8x4",
        num_classes: int = 100,
        student_weights: str | None = None,
        teacher: str | None = None,
        teacher_weights: str | None = None,
        contrast_weight: float = 1.0,
        prediction_weight: float = 4.0,
        class_weight: float = 1.0,
        kd_weight: float = 0.0,
        kd_temperature: float = 4.0,
        temperature: float = 0.1,
        queue_size: int = 2048,
        queue_start: Literal["empty", "random"] = "empty",
        embed_dim: int = 2048,
        head_hidden: int = 2048,
        predictor_hidden: int = 512,
        slow_momentum: float = 0.9,
        teacher_head_momentum: float = 0.999,
        symmetric_prediction: bool = True,
        dictionary_encoder: Literal["teacher", "slow_student"] = "teacher",
        cognate_encoder: Literal["slow_student", "teacher"] = "slow_student",
        learning_rate: float | None = None,
        lr_milestones: list[int] = [150, 180, 210],  # noqa: B006  (jsonargparse shows it as the default)
        lr_decay: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        weights = {
            "contrast_weight": contrast_weight,
            "prediction_weight": prediction_weight,
            "class_weight": class_weight,
            "kd_weight": kd_weight,
        }
        for name, weight in weights.items():
            if weight < 0:
                raise ValueError(f"{name} is {weight}: give a weight of at least 0.")
        if not any(weights.values()):
            raise ValueError(f"{', '.join(weights)} are all 0, so there is nothing to learn: raise class_weight.")
        self.contrasts, self.predicts, self.imitates = contrast_weight > 0, prediction_weight > 0, kd_weight > 0
        used_encoders = {dictionary_encoder} if self.contrasts else set()
        used_encoders |= {cognate_encoder} if self.predicts else set()
        self.asks_teacher = "teacher" in used_encoders or self.imitates
        if self.asks_teacher and teacher is None:
            raise ValueError("There is no teacher, but a loss that learns from one: name it as `teacher`.")

        self.student = build_classifier(student, num_classes)
        if not class_weight and not kd_weight:
            freeze_classifier(self.student)  # no loss reaches it, which DDP would not forgive
        self.teacher: FrozenTeacher[Classifier] | None = None
        if self.asks_teacher and teacher is not None:
            self.teacher = FrozenTeacher(build_classifier(teacher, num_classes))
        heads = self.contrasts or self.predicts
        width = self.student.feature_dim
        self.student_head = ProjectionHead(width, head_hidden, embed_dim) if heads else None
        self.predictor = Predictor(embed_dim, predictor_hidden) if self.predicts else None
        self.slow_student: Classifier | None = None
        self.slow_head: ProjectionHead | None = None
        if "slow_student" in used_encoders and self.student_head is not None:
            self.slow_student, self.slow_head = _average(self.student), _average(self.student_head)
        self.teacher_head: ProjectionHead | None = None
        self.teacher_head_moves = False
        if "teacher" in used_encoders and self.teacher is not None and self.student_head is not None:
            teacher_width = self.teacher.network.feature_dim
            self.teacher_head_moves = teacher_width == width
            self.teacher_head = (
                _average(self.student_head)
                if self.teacher_head_moves
                else ProjectionHead(teacher_width, head_hidden, embed_dim).requires_grad_(False)
            )
        self.dictionary = (
            FeatureQueue(queue_size, embed_dim, ids=True, random_start=queue_start == "random")
            if self.contrasts
            else None
        )
        self.accuracy = Accuracy()
        self.train()

    def views(self) -> list[str]:
        """Names of the views that a training batch holds: what a datamodule asks for."""
        return ["image", *["image_slow"] * self.predicts, *["image_teacher"] * self.contrasts]

    def data_sizes(self) -> DataSizes:
        """The size that one of the networks asks for, if any does."""
        networks = [self.student, *([] if self.teacher is None else [self.teacher.network])]
        return DataSizes(next((network.image_size for network in networks if network.image_size), None))

    def momentum_pairs(self) -> dict[str, EMAPair]:
        """Return what `EMACallback` moves once per optimizer step.

        Statistics of BatchNorm are not averaged ("keep"): averaged modules run in train mode, and gather their own.
        """
        pairs = {}
        slow, head = self.hparams["slow_momentum"], self.hparams["teacher_head_momentum"]
        if self.slow_student is not None:
            pairs["slow_student"] = EMAPair("student", "slow_student", slow, buffers="keep")
            pairs["slow_head"] = EMAPair("student_head", "slow_head", slow, buffers="keep")
        if self.teacher_head_moves:
            pairs["teacher_head"] = EMAPair("student_head", "teacher_head", head, buffers="keep")
        return pairs

    def queues(self) -> dict[str, FeatureQueue]:
        """Return what `QueueCallback` fills after each batch."""
        return {} if self.dictionary is None else {"dictionary": self.dictionary}

    def configure_callbacks(self) -> list[Callback]:
        """Supply what the method cannot run without, unless the user's own is there."""
        needed: list[Callback] = [StepSeedCallback(), ClassPredictionWriter()]
        if self.momentum_pairs():
            needed.append(EMACallback())
        if self.queues():
            needed.append(QueueCallback())
        return missing_callbacks(self.trainer.callbacks, *needed)  # type: ignore[attr-defined]

    def setup(self, stage: str) -> None:
        """Load the teacher, which only training needs."""
        super().setup(stage)
        if stage == "fit" and self.teacher is not None:
            name, source = self.hparams["teacher"], self.hparams["teacher_weights"]
            load_frozen(self.teacher, name, source, self.hparams["num_classes"])
            keep_from_ddp(self, [self.teacher])

    def configure_model(self) -> None:
        """Shard the networks where the strategy shards, else lay out convolutions as they run fastest."""
        networks = (self.student, self.slow_student, self.teacher and self.teacher.network)
        shard(self, [network for network in networks if network is not None])
        if self.device_mesh is None:  # FSDP2 takes contiguous parameters only
            self.to(memory_format=torch.channels_last)

    def on_fit_start(self) -> None:
        """Load the student's initial weights, compare class counts, and say what the teacher's head does.

        Raises:
            ValueError: if the data has another number of classes.
        """
        super().on_fit_start()
        self.check_classes()
        if self.teacher_head is not None and self.teacher is not None:
            widths = f"{self.teacher.network.feature_dim} and {self.student.feature_dim}"
            rank_zero_info(
                f"CoCoRD: features of teacher and student are {widths} wide, so the teacher's head is "
                + ("a moving average of the student's." if self.teacher_head_moves else "random and stays so.")
            )

    def evaluates_initial_weights(self) -> bool:
        """Whether there is a trained student to start from."""
        return self.hparams["student_weights"] is not None

    def load_initial_weights(self) -> None:
        """Start the student, and its average, from `student_weights`, if there are any."""
        source = self.hparams["student_weights"]
        if source is None:
            return
        state = public_state(self.student, read_classifier(source))
        load_classifier(public_network(self.student), state, f"student_weights {source!r}")
        if self.slow_student is not None:
            self.slow_student.load_state_dict(self.student.state_dict())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Name the teacher, and what its weights were."""
        if self.teacher is not None:
            self.teacher.save_record(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Compare the teacher with that of the checkpoint.

        Raises:
            ValueError: if its weights are others.
        """
        super().on_load_checkpoint(checkpoint)
        if self.teacher is not None:
            self.teacher.compare(checkpoint)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """Weighted sum of the losses (eq. 8), and the teacher's keys for the dictionary."""
        self._check_views(batch)
        batch = {name: _channels_last(value) for name, value in batch.items()}
        label = batch["label"]
        # What nobody learns from comes first: its memory is free again when the student's is taken.
        teacher = self._ask_teacher(batch)
        keys, cognates = self._dictionary_keys(batch, teacher), self._cognate_keys(batch, teacher)
        features = {view: self.student.forward_features(batch[view]) for view in self._student_views()}
        logits = self.student.classify(features["image"])
        queries = each_view(self.student_head, features) if self.student_head is not None else {}
        losses: dict[str, Tensor] = {}
        outputs: dict[str, Any] = {}
        if self.hparams["class_weight"] > 0:
            losses["class"] = F.cross_entropy(at_least_float32(logits), label)
        if teacher.logits is not None:
            losses["kd"] = distillation_loss(logits, teacher.logits, self.hparams["kd_temperature"])
        if self.dictionary is not None and keys is not None:
            losses["contrast"] = self._contrast(queries["image"], keys, self.dictionary, label)
            outputs = {"keys": {"dictionary": unit(keys)}, "key_ids": {"dictionary": label}}
        if self.predictor is not None:
            predictions = each_view(self.predictor, queries)
            each = [prediction_loss(prediction, cognates[view]) for view, prediction in predictions.items()]
            losses["prediction"] = torch.stack(each).sum()
        weighted = [self.hparams[f"{name}_weight"] * value for name, value in losses.items()]
        loss = torch.stack(weighted).sum()
        self.log("train/loss", loss.detach(), prog_bar=True)
        self.log_dict({f"train/loss_{name}": value.detach() for name, value in losses.items()})
        return {"loss": loss, **outputs}

    def _student_views(self) -> list[str]:
        """What the student looks at in training."""
        return ["image", *["image_slow"] * (self.predicts and self.hparams["symmetric_prediction"])]

    def _contrast(self, query: Tensor, key: Tensor, dictionary: FeatureQueue, label: Tensor) -> Tensor:
        if len(key) * world_size() > dictionary.size:
            raise ValueError(
                f"queue_size is {dictionary.size}, smaller than a batch of {len(key) * world_size()} over all "
                "processes, whose keys would overwrite each other: raise it, or lower the batch size."
            )
        valid = dictionary.valid
        # Negatives of the same class are pushed away although they should not be.
        same = (label[:, None] == dictionary.ids) & valid
        self.log("train/same_class_keys", same.sum() / (valid.sum().clamp(min=1) * len(label)))
        with torch.autocast(self.device.type, enabled=False):
            return contrastive_loss(query, key, dictionary.features, valid, self.hparams["temperature"])

    def _dictionary_keys(self, batch: Batch, teacher: _TeacherViews) -> Tensor | None:
        """Keys [B, E] of the third view: the positives of this batch, the negatives of later ones."""
        if not self.contrasts:
            return None
        return self._keys(self.hparams["dictionary_encoder"], batch, ["image_teacher"], teacher)["image_teacher"]

    def _cognate_keys(self, batch: Batch, teacher: _TeacherViews) -> dict[str, Tensor]:
        """Keys [B, E] that are predicted from each of the student's views: that of the other one (eqs. 6 and 7)."""
        if not self.predicts:
            return {}
        views = self._student_views()
        keys = self._keys(self.hparams["cognate_encoder"], batch, [_OTHER[view] for view in views], teacher)
        return {view: keys[_OTHER[view]] for view in views}

    @torch.no_grad()
    def _keys(self, encoder: str, batch: Batch, views: list[str], teacher: _TeacherViews) -> dict[str, Tensor]:
        """An encoder's keys [B, E] of views. Each view by itself: BatchNorm takes its statistics from the batch."""
        if encoder == "teacher":
            assert self.teacher_head is not None
            return each_view(self.teacher_head, {view: teacher.features[view] for view in views})
        assert self.slow_student is not None
        assert self.slow_head is not None
        return each_view(self.slow_head, {view: self.slow_student.forward_features(batch[view]) for view in views})

    @torch.no_grad()
    def _ask_teacher(self, batch: Batch) -> _TeacherViews:
        """The teacher on all views that a loss needs, in one pass: in eval mode no row depends on another."""
        if self.teacher is None:
            return _TeacherViews({}, None)
        views = ["image"] * self.imitates
        if self.contrasts and self.hparams["dictionary_encoder"] == "teacher":
            views += ["image_teacher"]
        if self.predicts and self.hparams["cognate_encoder"] == "teacher":
            views += [_OTHER[view] for view in self._student_views()]
        views = list(dict.fromkeys(views))
        network = self.teacher.network
        features = network.forward_features(torch.cat([batch[view] for view in views]))
        by_view = dict(zip(views, features.chunk(len(views)), strict=True))
        return _TeacherViews(by_view, network.classify(by_view["image"]) if self.imitates else None)

    def _check_views(self, batch: Batch) -> None:
        missing = [view for view in (*self.views(), "label") if view not in batch]
        if missing:
            raise ValueError(
                f"The training batch has {', '.join(batch)}, but no {', '.join(missing)}: let data.views be "
                f"{self.views()}, or leave it out."
            )

    def forward(self, image: Tensor) -> Tensor:
        """Images [B, 3, H, W] to the student's logits [B, C]."""
        logits: Tensor = self.student(_channels_last(image))
        return logits

    def initial_learning_rate(self) -> float:
        """Learning rate of the first epoch: where none is given, that of the student's family."""
        return self.hparams["learning_rate"] or default_learning_rate(self.hparams["student"])


def default_learning_rate(student: str) -> float:
    """Learning rate of the CRD benchmark for a student."""
    return 0.01 if any(family in student.lower() for family in _SMALL_STEPS) else 0.05


def _average(module: Module) -> Module:
    """A copy that a moving average turns into, without gradient."""
    return copy.deepcopy(module).requires_grad_(False)


def _channels_last(tensor: Tensor) -> Tensor:
    """Images in the layout in which convolutions run 1.2 to 1.8 times as fast on a CPU; other tensors as they are."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
