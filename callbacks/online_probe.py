"""A linear probe that is trained beside a module, on the module's batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from typing_extensions import override

from ..common.errors import UserError
from ..common.names import did_you_mean
from ..common.ranges import BELOW_ONE, COUNT, NOT_NEGATIVE, POSITIVE, RATE, CheckedArguments
from ..metrics.classification import accuracies, hits
from ..metrics.finite import some_of
from .distributed.collectives import all_reduce_sum, gather_uneven
from .modules import evaluating, features_of, state_key
from .non_finite import is_skipped


class OnlineLinearProbe(CheckedArguments, Callback):
    """Train a linear classifier on a module's image features while the module trains, and log its accuracy.

    The classifier is a LayerNorm and a linear layer that starts at zero, in float32. After every training batch it
    takes one step of AdamW on that batch's images, which the module encodes without gradient, in eval mode and in the
    trainer's precision. The module's training is bit for bit the same as without this callback.

    Logged are `train/<name>_loss`, the cross entropy before the step, and after validation, in percent over the
    labeled images of all processes, `val/<name>_top1`, and `val/<name>_top5` where there are more than five classes.
    Before the first step nothing is measured.

    An image with a non-finite feature takes no part in training and is not right in validation, where the number of
    such images is logged as `val/<name>_non_finite` and a warning names them.

    N processes with B images each take the same steps as one process with N*B. Classifier and optimizer are in the
    checkpoint, under this callback's name.

    Args:
        num_classes: Number of classes; labels are 0 to `num_classes` - 1.
        name: Name of the metrics; each of several such callbacks needs its own.
        method: Name of the module's method that turns `batch[image]` into features [B, D] or tokens [B, T, D], or into
            a tuple that starts with them. Tokens are averaged without the first one, the class token.
        image: Key of the images in a batch.
        label: Key of the labels [B]. A validation batch without it is not counted.
        learning_rate: Learning rate of AdamW, constant.
        weight_decay: Weight decay of AdamW.
        betas: Beta1 and beta2 of AdamW.
        eps: Epsilon of AdamW.

    Raises:
        UserError: If `num_classes` is below 1, the module lacks that method, features have another shape, a training
            batch has no images or labels, or a label is outside the classes.
    """

    def __init__(
        self,
        num_classes: Annotated[int, COUNT],
        name: str = "probe",
        method: str = "encode_images",
        image: str = "image",
        label: str = "label",
        learning_rate: Annotated[float, RATE] = 1e-3,
        weight_decay: Annotated[float, NOT_NEGATIVE] = 0.01,
        betas: Annotated[tuple[float, float], BELOW_ONE] = (0.9, 0.999),
        eps: Annotated[float, POSITIVE] = 1e-8,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.name = name
        self.chance: dict[str, float] = {}  # results of random guesses, by the name of the result without the stage
        self.method = method
        self.image = image
        self.label = label
        self._options: dict[str, Any] = {"lr": learning_rate, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        self._head: nn.Sequential | None = None  # built for the width of the first features
        self._optimizer: Optimizer | None = None
        self._restored: dict[str, Any] = {}
        self._no_class: Tensor | int = 0  # labels outside the classes, over all processes
        self._counts: Tensor | None = None  # of this process's validation: images, right, right among five, no class
        self._non_finite: list[Tensor] = []  # of it, [B, 2]: position in the data set, whether a feature is not finite

    @property
    @override
    def state_key(self) -> str:
        """Hold the name, so that several instances keep their states apart."""
        return state_key(self, name=self.name)

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._head is None or self._optimizer is None:
            return self._restored
        return {"head": dict(self._head.state_dict()), "optimizer": self._optimizer.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        classes = len(state_dict["head"]["1.bias"]) if state_dict else self.num_classes
        if classes != self.num_classes:
            raise UserError(
                f"Expected a probe for {self.num_classes} classes in the checkpoint for {self}, got one for {classes}: "
                f"set num_classes to {classes}, or give the probe another name."
            )
        self._restored = state_dict
        self._head = self._optimizer = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not callable(getattr(pl_module, self.method, None)):
            methods = [name for name in dir(type(pl_module)) if callable(getattr(type(pl_module), name))]
            raise UserError(
                f"Expected a method {self.method}() that encodes images for {self}, got {type(pl_module).__name__} "
                f"without ({did_you_mean(self.method, methods).rstrip('.')}): set method."
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        missing = {self.image, self.label} - (batch.keys() if isinstance(batch, Mapping) else set())
        if missing:
            keys = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
            raise UserError(
                f"Expected training batches with {self.image!r} and {self.label!r} for {self}, got {keys}: give data "
                "with labels, or set image and label to its keys."
            )
        if is_skipped(trainer):
            return
        loss = self._step(self._features(trainer, pl_module, batch), batch[self.label])
        pl_module.log(f"train/{self.name}_loss", loss, on_step=True, on_epoch=False)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._refuse_no_class()

    @override
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._counts = torch.zeros(4, dtype=torch.long, device=trainer.strategy.root_device)
        self._non_finite = [torch.zeros(0, 2, dtype=torch.long, device=trainer.strategy.root_device)]

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        has_labels = isinstance(batch, Mapping) and {self.image, self.label} <= batch.keys()
        if not has_labels or not (self._restored or self._head is not None):
            return
        assert self._counts is not None
        features = self._features(trainer, pl_module, batch)
        label = batch[self.label]
        head, _ = self._probe(features)
        labeled = self._has_class(label)
        right = hits(head(features), label, 5)
        self._counts += torch.stack([labeled.sum(), right[:, 0].sum(), right.sum(), (~labeled).sum()])
        bad = labeled & ~features.isfinite().all(1)
        self._non_finite.append(torch.stack([batch.get("sample_index", torch.full_like(label, -1)), bad.long()], 1))

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._counts is not None
        counts = all_reduce_sum(self._counts)
        self._no_class = self._no_class + counts[3]
        self._refuse_no_class()
        images, top1, top5, _ = counts
        if not images:
            return
        metrics = accuracies(images, top1, top5, self.num_classes)
        levels = {name: 100 * min(k / self.num_classes, 1.0) for name, k in (("top1", 1), ("top5", 5))}
        self.chance = {f"{self.name}_{name}": level for name, level in levels.items() if name in metrics}
        if bad := self._count_non_finite(int(images)):
            metrics["non_finite"] = float(bad)
        # Every process has the same numbers; `sync_dist` only avoids a warning of Lightning.
        pl_module.log_dict({f"val/{self.name}_{key}": value for key, value in metrics.items()}, sync_dist=True)

    def _count_non_finite(self, images: int) -> int:
        """Return the number of images, of all processes, with a non-finite feature; a warning names them."""
        rows = gather_uneven(torch.cat(self._non_finite))
        bad = rows[rows[:, 1] > 0, 0]
        if len(bad):
            rank_zero_warn(
                f"{self} found non-finite features for {len(bad)} of {images} images (sample_index "
                f"{some_of(bad[bad >= 0])}), none of which counts as right: check these samples, or, if these are all "
                "images, use an earlier checkpoint."
            )
        return len(bad)

    def __str__(self) -> str:
        return f"OnlineLinearProbe {self.name!r}"

    def _features(self, trainer: Trainer, pl_module: LightningModule, batch: Mapping[str, Tensor]) -> Tensor:
        """Return features, float32 [B, D]; the module, its modes and the random generators do not change."""
        with isolate_rng(), torch.no_grad(), evaluating(pl_module):
            features = features_of(trainer, getattr(pl_module, self.method), batch[self.image])
        if features.dim() == 3 and features.shape[1] > 1:
            features = features[:, 1:].mean(1)
        if features.dim() != 2:
            raise UserError(
                "Expected features [B, D], or tokens [B, T, D] with the class token first and at least one more, for "
                f"{self}, got {list(features.shape)} from {type(pl_module).__name__}.{self.method}(): set method."
            )
        return features.float()

    @torch.inference_mode(False)
    def _probe(self, features: Tensor) -> tuple[nn.Sequential, Optimizer]:
        """Return the head and its optimizer; the first call builds or restores them for features [B, D]."""
        if self._head is None or self._optimizer is None:
            width = features.shape[1]
            # skip_init, since the usual initialization draws random numbers.
            linear = nn.utils.skip_init(nn.Linear, width, self.num_classes)
            self._head = nn.Sequential(nn.LayerNorm(width, eps=1e-6), linear).to(features.device)
            for parameter in linear.parameters():
                nn.init.zeros_(parameter)
            self._optimizer = AdamW(self._head.parameters(), **self._options)
            if self._restored:
                self._head.load_state_dict(self._restored["head"])
                self._optimizer.load_state_dict(self._restored["optimizer"])
        return self._head, self._optimizer

    def _step(self, features: Tensor, label: Tensor) -> Tensor:
        """Take a step on features [B, D] and labels [B]; return the mean loss [] over all processes before the step."""
        head, optimizer = self._probe(features)
        labeled = self._has_class(label)
        finite = features.isfinite().all(1)
        # Non-finite features would make the head non-finite for the rest of the run.
        features = features.where(finite[:, None], 0.0)
        loss = F.cross_entropy(head(features), label.where(labeled & finite, -100), reduction="sum")
        parameters = list(head.parameters())
        gradients = torch.autograd.grad(loss, parameters)
        # One all-reduce of sums, since processes may have different numbers of labels.
        sums = [*gradients, loss.detach(), (labeled & finite).sum(), (~labeled).sum()]
        totals = all_reduce_sum(torch.cat([values.flatten().float() for values in sums]))
        images = totals[-2]
        no_class = totals[-1]
        mean = totals[:-2] / images.clamp(min=1)
        for parameter, gradient in zip(parameters, mean[:-1].split([p.numel() for p in parameters]), strict=True):
            parameter.grad = gradient.view_as(parameter)
        optimizer.step()
        self._no_class = self._no_class + no_class
        return mean[-1].where(images > 0, torch.nan)

    def _has_class(self, label: Tensor) -> Tensor:
        return (label >= 0) & (label < self.num_classes)

    def _refuse_no_class(self) -> None:
        # Not in the step, where the host would wait for the device.
        if self._no_class:
            raise UserError(
                f"Expected labels from 0 to {self.num_classes - 1} for {self}, got {int(self._no_class)} labels "
                "outside: set num_classes to the number of classes."
            )
