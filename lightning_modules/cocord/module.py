"""CoCoRD: Contrastive Consistent Representation Distillation (Fu et al., BMVC 2023)."""

from __future__ import annotations

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
from ...common.ranges import COUNT, NOT_NEGATIVE
from ..base.method import Method
from ..core.data_sizes import DataSizes
from ..core.frozen import Frozen
from ..core.precision import at_least_float32, unit
from ..core.trainers import callbacks_of
from ..evaluation.classification import ClassificationEvaluation, check_classes
from ..evaluation.protocol import Batch
from ..networks.cifar import Classifier
from ..networks.classifier_files import load_classifier_file
from ..networks.classifiers import build_classifier, freeze_classifier
from ..optim.configure import LRSchedulerCallable, OptimizerCallable
from ..optim.optimizers import sgd
from ..optim.schedules import Milestones
from .baselines import FeatureLosses
from .checks import check_views, loss_weights
from .losses import (
    dictionary,
    dictionary_loss,
    distillation_loss,
    prediction_loss,
    same_class_share,
)
from .network import (
    Predictor,
    ProjectionHead,
    channels_last,
    described_head,
    each_view,
    frozen_copy,
    teacher_head,
)
from .settings import (
    ContrastSettings,
    HeadSettings,
    KDSettings,
    MomentumSettings,
    OptimSettings,
    PredictionSettings,
    TeacherSettings,
    default_learning_rate,
)
from .targets import TargetEncoders, needs_of
from .teacher import build_teacher, load_teacher


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
        teacher: the teacher.
        contrast: the contrastive loss.
        prediction: the predictive loss.
        kd: distillation of the class distribution, and baselines that distil features.
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
        self.num_classes = num_classes
        self.weights = weights
        self.learning_rate = self.optim.learning_rate or default_learning_rate(student)
        self.loss_weights = loss_weights(class_weight, self.kd, self.contrast, self.prediction)
        self.views, self.student_views, encoders = needs_of(self.contrast, self.prediction)

        # Student g_s and teacher g_t
        self.student = build_classifier(student, num_classes)
        if not class_weight and not self.kd.weight:
            freeze_classifier(self.student)  # DDP requires a gradient for each trainable parameter
        self.teacher: Frozen[Classifier] | None = None
        if "teacher" in encoders or self.kd.weight or self.kd.features:
            self.teacher = Frozen(build_teacher(self.teacher_settings, num_classes))
        # Head f_s and predictor h_s; slow-moving student and head; the teacher's head f_t
        width = self.student.feature_dim
        heads = self.heads
        self.student_head = ProjectionHead(width, heads.hidden, heads.embed_dim) if encoders else None
        self.predictor = Predictor(heads.embed_dim, heads.predictor_hidden) if self.prediction.weight else None
        slow = "slow_student" in encoders
        self.slow_student = frozen_copy(self.student) if slow else None
        self.slow_head = frozen_copy(self.student_head) if slow else None
        taught = 0 if self.teacher is None else self.teacher.network.feature_dim
        self.hparams["teacher"]["feature_dim"] = taught if self.teacher_settings.name is None and taught else None
        self.teacher_head = teacher_head(self.student_head, taught, width, heads) if "teacher" in encoders else None
        self.teacher_head_moves = self.teacher_head is not None and taught == width  # f_t is the moving average of f_s
        self.dictionary = dictionary(self.contrast, heads.embed_dim) if self.contrast.weight else None
        self.baselines = FeatureLosses(self.kd, self.student, self.teacher) if self.kd.features else None
        self.evaluation = ClassificationEvaluation()

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """Return the weighted sum of the losses (eq. 8), and the keys that enter the dictionary after this batch."""
        check_views(batch, self.views)
        batch, label, losses = channels_last(batch), batch["label"], {}
        # Encoders without gradient run first, to free their memory: keys k_t (eq. 1), cognate keys (eq. 5).
        targets = self._target_encoders()(batch, self.student_views)
        stages = {view: self.student.forward_stages(batch[view], self.kd.maps) for view in self.student_views}
        features = {view: found.features for view, found in stages.items()}
        logits = self.student.classify(features["image"])
        queries = each_view(self.student_head, features) if self.student_head is not None else {}  # q_s (eq. 1)

        if self.loss_weights["class"]:  # L_cls
            losses["class"] = F.cross_entropy(at_least_float32(logits), label)
        if targets.logits is not None:  # KD
            losses["kd"] = distillation_loss(logits, targets.logits, self.kd.temperature)
        if targets.stages is not None and self.baselines is not None:  # CRD, attention transfer, FitNet
            losses |= self.baselines(stages["image"], targets.stages, batch)
        if targets.key is not None and self.dictionary is not None:  # L_ctr (eq. 2)
            self.log("train/same_class_keys", same_class_share(label, self.dictionary))
            temperature = self.contrast.temperature
            losses["contrast"] = dictionary_loss(queries["image"], targets.key, self.dictionary, temperature)
        if self.predictor is not None:  # L_pred from x_s (eq. 6) and from x'_s (eq. 7)
            predictions = each_view(self.predictor, queries)  # p_s = h_s(q_s)
            each = [prediction_loss(predictions[view], targets.cognates[view]) for view in self.student_views]
            losses["prediction"] = torch.stack(each).sum()
        loss = torch.stack([self.loss_weights[name] * value for name, value in losses.items()]).sum()
        self.log("train/loss", loss.detach(), prog_bar=True)
        self.log_dict({f"train/loss_{name}": value.detach() for name, value in losses.items()})
        if targets.key is None:
            return {"loss": loss}
        return {"loss": loss, "keys": {"dictionary": unit(targets.key)}, "key_ids": {"dictionary": label}}

    def _target_encoders(self) -> TargetEncoders:
        """Return the encoders without gradient, and the losses that need them."""
        teacher = None if self.teacher is None else self.teacher.network
        key = self.contrast.encoder if self.contrast.weight else None
        cognate = self.prediction.encoder if self.prediction.weight else None
        needs = (self.kd.weight > 0, self.kd.features, self.kd.maps)
        return TargetEncoders(teacher, self.teacher_head, self.slow_student, self.slow_head, key, cognate, *needs)

    def forward(self, image: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to the student's logits [B, C]."""
        logits: Tensor = self.student(image.contiguous(memory_format=torch.channels_last))
        return logits

    def momentum_pairs(self) -> dict[str, EMAPair]:
        """Return the moving averages (eqs. 3 and 4), which run in train mode with their own BatchNorm statistics."""
        pairs, slow = {}, self.momentum.slow_student
        if self.slow_student is not None:
            pairs["slow_student"] = EMAPair("student", "slow_student", slow, buffers="keep")
            pairs["slow_head"] = EMAPair("student_head", "slow_head", slow, buffers="keep")
        if self.teacher_head_moves:
            pairs["teacher_head"] = EMAPair("student_head", "teacher_head", self.momentum.teacher_head, buffers="keep")
        return pairs

    def queues(self) -> dict[str, FeatureQueue]:
        """Return the queue that `QueueCallback` fills after each batch."""
        return {} if self.dictionary is None else {"dictionary": self.dictionary}

    def configure_callbacks(self) -> list[Callback]:
        """Return the callbacks that the method needs and the user did not give."""
        own: list[Callback] = [StepSeedCallback(), ClassPredictionWriter()]
        own += [EMACallback()] if self.momentum_pairs() else []
        own += [QueueCallback()] if self.queues() else []
        return missing_callbacks(callbacks_of(self), *own)

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
            rank_zero_info(described_head(self.teacher.network.feature_dim, self.student.feature_dim))

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
