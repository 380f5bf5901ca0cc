"""CoCoRD: Contrastive Consistent Representation Distillation (Fu et al., BMVC 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from ...callbacks import (
    ClassPredictionWriter,
    EMACallback,
    EMAPair,
    FeatureQueue,
    QueueCallback,
    StepSeedCallback,
    missing_callbacks,
)
from ...common.errors import UserError
from ...common.ranges import COUNT, NOT_NEGATIVE
from ..base.example_batch import image_batch
from ..base.method import Method
from ..core.data_sizes import DataSizes
from ..core.frozen import Frozen
from ..core.precision import at_least_float32, unit
from ..core.trainers import callbacks_of
from ..evaluation.classification import ClassificationEvaluation, check_classes
from ..evaluation.protocol import Batch
from ..losses.soft_targets import posterior_divergence
from ..networks.cifar import Classifier, Stages
from ..networks.classifier_files import load_classifier_file
from ..networks.classifiers import build_classifier, freeze_classifier
from ..optim.configure import LRSchedulerCallable, OptimizerCallable
from ..optim.optimizers import sgd
from ..optim.schedules import Milestones
from .baselines import FeatureLosses
from .export import LAYOUTS, export
from .losses import dictionary_loss, prediction_loss, same_class_share
from .network import ProjectionHead, channels_last, each_view, frozen_copy
from .settings import (
    ContrastSettings,
    Encoder,
    HeadSettings,
    KDSettings,
    MomentumSettings,
    OptimSettings,
    PredictionSettings,
    TeacherSettings,
    default_learning_rate,
    loss_weights,
)
from .teacher import build_teacher, load_teacher
from .views import OTHER_VIEW, batch_views, check_views, key_encoders, student_views, teacher_views


class CoCoRDModule(Method):
    """Train a classifier with its teacher's keys (contrast), a slow student's keys (prediction), and labels.

    With `contrast.weight` and `prediction.weight` 0 the method is a baseline by the weights in `kd`, or plain training.
    Networks that no loss needs are neither built nor run. A training batch holds `label`, `sample_index` [B] and views
    of each image, named in `views` and augmented: `image` (x_s), `image_slow` (x'_s) and `image_teacher` (x_t).

    Args:
        student: name of a CIFAR network (`resnet8x4`, `wrn_16_2`, `MobileNetV2`, ...), or of a model of torchvision or
            timm.
        num_classes: number of classes C. The command line sets it from the data.
        weights: file with the student's initial weights, which `test` evaluates. None: random.
        class_weight: weight of the cross entropy with the labels (sections 4.1 and 4.2).
        student_resize_to: side in pixels to which a student of torchvision or timm resizes the images of the data:
            with it a teacher is trained that has `teacher.resize_to` later. None takes them as they are.
        teacher: the teacher.
        contrast: the contrastive loss.
        prediction: the predictive loss.
        kd: distillation of the class distribution, and baselines that distill features.
        heads: projection heads and predictor.
        momentum: moving averages.
        optim: SGD and its schedule.
        optimizer: replaces SGD.
        lr_scheduler: replaces the schedule.

    Raises:
        UserError: For unknown names, or a loss without the teacher that it needs.
    """

    teacher_settings: TeacherSettings
    contrast: ContrastSettings
    prediction: PredictionSettings
    kd: KDSettings
    heads: HeadSettings
    momentum: MomentumSettings
    optim: OptimSettings

    def __init__(
        self,
        student: str = "resnet8x4",
        num_classes: Annotated[int, COUNT] = 100,
        weights: str | None = None,
        class_weight: Annotated[float, NOT_NEGATIVE] = 1.0,
        student_resize_to: Annotated[int | None, COUNT] = None,
        teacher: TeacherSettings = TeacherSettings(),
        contrast: ContrastSettings = ContrastSettings(),
        prediction: PredictionSettings = PredictionSettings(),
        kd: KDSettings = KDSettings(),
        heads: HeadSettings = HeadSettings(),
        momentum: MomentumSettings = MomentumSettings(),
        optim: OptimSettings = OptimSettings(),
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        self.take_arguments(locals(), teacher="teacher_settings")
        contrast = self.contrast
        prediction = self.prediction
        kd = self.kd
        heads = self.heads
        self.num_classes = num_classes
        self.weights = weights
        self.learning_rate = self.optim.learning_rate or default_learning_rate(student)
        self.loss_weights = loss_weights(class_weight, kd, contrast, prediction)
        self.views = batch_views(contrast, prediction)
        self.student_views = student_views(prediction)
        self.teacher_views = teacher_views(contrast, prediction, kd)
        encoders = key_encoders(contrast, prediction)

        # Student g_s and teacher g_t
        self.student = build_classifier(student, num_classes, resize_to=student_resize_to)
        student_width = self.student.feature_dim
        if not class_weight and not kd.weight:
            freeze_classifier(self.student)  # DDP requires a gradient for each trainable parameter
        self.teacher: Frozen[Classifier] | None = None
        teacher_width = 0
        if self.teacher_views:
            self.teacher = Frozen(build_teacher(self.teacher_settings, num_classes))
            teacher_width = self.teacher.network.feature_dim
        self.hparams["teacher"]["feature_dim"] = (teacher_width or None) if self.teacher_settings.name is None else None

        # Head f_s and predictor h_s; slow-moving student and its head; the teacher's head f_t
        self.student_head = ProjectionHead(student_width, heads.hidden, heads.embed_dim) if encoders else None
        self.predictor: ProjectionHead | None = None
        if prediction.weight:
            self.predictor = ProjectionHead(heads.embed_dim, heads.predictor_hidden, heads.embed_dim)
        self.slow_student = frozen_copy(self.student) if "slow_student" in encoders else None
        self.slow_head = frozen_copy(self.student_head) if "slow_student" in encoders else None
        self.teacher_head: ProjectionHead | None = None
        self.averages_teacher_head = "teacher" in encoders and teacher_width == student_width
        """Whether f_t is the moving average of f_s (eq. 4); it is random and fixed if the features' widths differ."""
        if self.averages_teacher_head:
            self.teacher_head = frozen_copy(self.student_head)
        elif "teacher" in encoders:
            self.teacher_head = frozen_copy(ProjectionHead(teacher_width, heads.hidden, heads.embed_dim))

        self.dictionary: FeatureQueue | None = None  # of the teacher's keys, with the labels of their images
        if contrast.weight:
            random_start = contrast.queue_start == "random"
            self.dictionary = FeatureQueue(contrast.queue_size, heads.embed_dim, ids=True, random_start=random_start)
        self.baselines = FeatureLosses(kd, self.student, self.teacher) if kd.features else None
        self.evaluation = ClassificationEvaluation()

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """Return the weighted sum of the losses (eq. 8), and the keys that enter the dictionary after this batch."""
        check_views(batch, self.views)
        batch = channels_last(batch)
        label = batch["label"]

        # Encoders without gradient run first, to free their memory.
        teacher = self._teacher_stages(batch)
        keys = self._teacher_keys(batch, teacher)
        cognate_keys = self._cognate_keys(batch, teacher)
        teacher_logits = self._teacher_logits(teacher)

        stages = {view: self.student.forward_stages(batch[view], self.kd.maps) for view in self.student_views}
        features = {view: outputs.features for view, outputs in stages.items()}
        logits = self.student.classify(features["image"])
        queries = each_view(self.student_head, features) if self.student_head is not None else {}  # q_s (eq. 1)

        losses: dict[str, Tensor] = {}
        if self.loss_weights["class"]:  # L_cls
            losses["class"] = F.cross_entropy(at_least_float32(logits), label)
        if teacher_logits is not None:  # KD
            losses["kd"] = posterior_divergence(teacher_logits, logits, self.kd.temperature)
        if self.baselines is not None:  # CRD, attention transfer, FitNet
            losses |= self.baselines(stages["image"], teacher["image"], batch)
        if keys is not None and self.dictionary is not None:  # L_ctr (eq. 2)
            self.log("train/same_class_keys", same_class_share(label, self.dictionary))
            losses["contrast"] = dictionary_loss(queries["image"], keys, self.dictionary, self.contrast.temperature)
        if self.predictor is not None:  # L_pred from x_s (eq. 6) and from x'_s (eq. 7)
            predictions = each_view(self.predictor, queries)  # p_s = h_s(q_s)
            distances = [prediction_loss(predictions[view], cognate_keys[view]) for view in self.student_views]
            losses["prediction"] = torch.stack(distances).sum()
        loss = torch.stack([self.loss_weights[name] * value for name, value in losses.items()]).sum()

        self.log("train/loss", loss.detach(), prog_bar=True)
        self.log_dict({f"train/loss_{name}": value.detach() for name, value in losses.items()})
        if keys is None:
            return {"loss": loss}
        return {"loss": loss, "keys": {"dictionary": unit(keys)}, "key_ids": {"dictionary": label}}

    @torch.no_grad()
    def _teacher_stages(self, batch: Batch) -> dict[str, Stages]:
        """Run the teacher g_t on all its views in one pass, since rows are independent in eval mode."""
        views = self.teacher_views
        if self.teacher is None:
            return {}
        images = torch.cat([batch[view] for view in views])
        maps, features = self.teacher.network.forward_stages(images, self.kd.maps)
        maps_by_view = [[stage.chunk(len(views))[number] for stage in maps] for number in range(len(views))]
        return dict(zip(views, map(Stages, maps_by_view, features.chunk(len(views))), strict=True))

    @torch.no_grad()
    def _teacher_logits(self, teacher: dict[str, Stages]) -> Tensor | None:
        """Return the teacher's logits [B, C] of x_s; None without KD."""
        if self.teacher is None or not self.kd.weight:
            return None
        return self.teacher.network.classify(teacher["image"].features)

    def _teacher_keys(self, batch: Batch, teacher: dict[str, Stages]) -> Tensor | None:
        """Return the keys k_t [B, E] of x_t (eq. 1), the queries' positives; None without the contrastive loss."""
        if not self.contrast.weight:
            return None
        return self._keys(self.contrast.encoder, ["image_teacher"], batch, teacher)["image_teacher"]

    def _cognate_keys(self, batch: Batch, teacher: dict[str, Stages]) -> dict[str, Tensor]:
        """Return for each of the student's views the key [B, E] of the other view (eq. 5), the prediction's target."""
        if not self.prediction.weight:
            return {}
        keys = self._keys(self.prediction.encoder, [OTHER_VIEW[view] for view in self.student_views], batch, teacher)
        return {view: keys[OTHER_VIEW[view]] for view in self.student_views}

    @torch.no_grad()
    def _keys(self, encoder: Encoder, views: list[str], batch: Batch, teacher: dict[str, Stages]) -> dict[str, Tensor]:
        """Compute keys [B, E] of views one by one, since BatchNorm's statistics are those of a call."""
        if encoder == "teacher":
            assert self.teacher_head is not None
            return each_view(self.teacher_head, {view: teacher[view].features for view in views})
        assert self.slow_student is not None
        assert self.slow_head is not None
        return each_view(self.slow_head, {view: self.slow_student.forward_features(batch[view]) for view in views})

    def forward(self, image: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to the student's logits [B, C]."""
        logits: Tensor = self.student(image.contiguous(memory_format=torch.channels_last))
        return logits

    def momentum_pairs(self) -> dict[str, EMAPair]:
        """Return the moving averages (eqs. 3 and 4), which run in train mode with their own BatchNorm statistics."""
        pairs = {}
        slow = self.momentum.slow_student
        if self.slow_student is not None:
            pairs["slow_student"] = EMAPair("student", "slow_student", slow, buffers="keep")
            pairs["slow_head"] = EMAPair("student_head", "slow_head", slow, buffers="keep")
        if self.averages_teacher_head:
            pairs["teacher_head"] = EMAPair("student_head", "teacher_head", self.momentum.teacher_head, buffers="keep")
        return pairs

    def queues(self) -> dict[str, FeatureQueue]:
        """Return the queue that `QueueCallback` fills after each batch."""
        return {} if self.dictionary is None else {"dictionary": self.dictionary}

    def configure_callbacks(self) -> list[Callback]:
        """Return the callbacks that the method needs and the user did not give."""
        callbacks: list[Callback] = [StepSeedCallback(), ClassPredictionWriter()]
        if self.momentum_pairs():
            callbacks.append(EMACallback())
        if self.queues():
            callbacks.append(QueueCallback())
        return missing_callbacks(callbacks_of(self), *callbacks)

    def sharded_networks(self) -> list[Classifier]:
        """Return student, slow student and teacher."""
        teacher = None if self.teacher is None else self.teacher.network
        return [network for network in (self.student, self.slow_student, teacher) if network is not None]

    def data_sizes(self) -> DataSizes:
        """Return the image size that one of the networks requires, if any does."""
        return DataSizes(next((network.image_size for network in self.sharded_networks() if network.image_size), None))

    def setup(self, stage: str) -> None:
        """Load the teacher and make CRD's banks, for training only."""
        super().setup(stage)
        if stage == "fit" and self.teacher is not None:
            load_teacher(self.teacher, self.teacher_settings, self.num_classes, self.datamodule)
            if self.baselines is not None:
                self.baselines.start(self)

    def configure_model(self) -> None:
        """Shard the networks, or use the memory format in which convolutions run fastest."""
        super().configure_model()
        if self.device_mesh is None:  # FSDP2 requires contiguous parameters
            self.to(memory_format=torch.channels_last)

    def load_initial_weights(self) -> None:
        """Load the student's initial weights, also into the slow student."""
        if self.weights is not None:
            load_classifier_file(self.student, self.weights, "the student's weights")
            if self.slow_student is not None:
                self.slow_student.load_state_dict(self.student.state_dict())

    def on_fit_start(self) -> None:
        """Load initial weights, check the number of classes, and log how the teacher's head is updated."""
        super().on_fit_start()
        check_classes(self, self.num_classes)
        if self.teacher_head is not None and self.teacher is not None:
            update = "a moving average of the student's" if self.averages_teacher_head else "random and fixed"
            rank_zero_info(
                f"Teacher and student have features of width {self.teacher.network.feature_dim} and "
                f"{self.student.feature_dim}: the teacher's head is {update}."
            )

    def on_after_backward(self) -> None:
        """Write the batch into CRD's banks."""
        if self.baselines is not None:
            self.baselines.update()

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return one group: the CRD benchmark decays vectors too."""
        return [{"params": [parameter for parameter in self.parameters() if parameter.requires_grad]}]

    def paper_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return SGD with momentum."""
        return sgd(self, self.learning_rate, self.optim.momentum, self.optim.weight_decay)

    def paper_schedule(self) -> Milestones:
        """Return a learning rate that decays at the milestones."""
        return Milestones(self.learning_rate, self.optim.lr_milestones, self.optim.lr_decay)

    def network_methods(self) -> Sequence[str]:
        """Return the methods of classifiers that use their parameters."""
        return "forward_features", "classify"

    def start_example(self) -> None:
        """Prepare for a step without data.

        Raises:
            UserError: If there are banks of CRD, which have a row for each image.
        """
        if self.kd.crd_weight:
            raise UserError(
                f"Expected sizes that do not depend on the data, got the banks of model.kd.crd_weight "
                f"{self.kd.crd_weight}: set it to 0."
            )
        super().start_example()

    def example_batch(self, rows: int, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the views of images with the shapes of a training, for `vlightning plan`."""
        return image_batch(self, rows, data, self.views)

    @classmethod
    def layouts(cls) -> dict[str, str]:
        """Return the description of each layout of an export; the first is the default of `vlightning export`."""
        return LAYOUTS | super().layouts()

    @classmethod
    def write_layout(cls, content: Mapping[str, Any], source: str, target: str, layout: str) -> str:
        """Write the model of a checkpoint in a layout of the method's own."""
        return export(content, source, target, layout)
