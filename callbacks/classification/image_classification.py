"""A base for callbacks that classify labeled images during validation and test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from typing_extensions import override

from ...common.errors import UserError
from ...common.ranges import COUNT, CheckedArguments
from ...metrics.classification import accuracies, class_recall, hits
from ...metrics.finite import some_of
from ..distributed.collectives import all_reduce_max, all_reduce_sum, gather_uneven
from ..modules import evaluating

Split = Literal["validation", "test"]
_STAGES: dict[Split, str] = {"validation": "validate", "test": "test"}
_LOADERS: dict[Split, str] = {"validation": "val_dataloader", "test": "test_dataloader"}


class ImageClassification(CheckedArguments, Callback):
    """Classify the labeled images of another datamodule, and log accuracy and class recall.

    Arguments, metrics and data are those of `ZeroShotClassification`. An image whose class has a non-finite score is
    not right; the number of images with such scores, if any, is logged as "val/<name>_non_finite", and a warning names
    the images.

    A subclass computes the scores of the classes, without gradient and in eval mode.

    Raises:
        UserError: If an argument is invalid, a label has no class, the data has no images, or the module cannot
            classify.
    """

    module_needs: tuple[str, ...]  # methods of the module
    module_does: str  # what a module with these methods does: "classifies images"

    def __init__(
        self,
        data: LightningDataModule,
        name: str,
        every_n_epochs: Annotated[int, COUNT],
        transform: Literal["trainer", "own"],
    ) -> None:
        super().__init__()
        if transform not in ("trainer", "own"):
            raise UserError(
                f"Expected 'trainer' or 'own' as transform of {type(self).__name__}, got {transform!r}: choose one of "
                "them."
            )
        self.data = data
        self.name = name
        self.every_n_epochs = every_n_epochs
        self.transform = transform
        self.chance: dict[str, float] = {}
        """Results of random guesses in the last measurement, by the name of the result without the stage."""
        self._split: Split = "validation"

    def scorer(self, trainer: Trainer, pl_module: Any) -> Callable[[Tensor], Tensor]:
        """Return a function of images [B, 3, H, W] to class scores [B, C]; called for every measurement."""
        raise NotImplementedError

    def advice_on_labels(self, classes: int) -> str:
        """Return the end of the error about labels outside 0 to `classes` - 1: what to do."""
        raise NotImplementedError

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "predict":
            return
        self.check(trainer, pl_module)
        with isolate_rng():
            self._open("test" if stage == "test" else "validation", trainer)
        if self.transform == "trainer":
            self._take_transform(datamodule(trainer))

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        in_training = trainer.state.fn == "fit" and not trainer.sanity_checking
        if not in_training or (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._measure(trainer, pl_module, "val")

    @override
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._measure(trainer, pl_module, "test")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "predict":
            self.data.teardown(_STAGES[self._split])

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.data.on_exception(exception)

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.name!r}"

    def check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the run before anything is read."""
        others: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if [other.name for other in others if isinstance(other, ImageClassification)].count(self.name) > 1:
            raise UserError(f"Expected one {self}, got two, which would log the same metrics: give each its own name.")
        for method in self.module_needs:
            if not hasattr(pl_module, method):
                raise UserError(
                    f"Expected a module that {self.module_does} by {method}() for {self}, got "
                    f"{type(pl_module).__name__}: leave the callback out."
                )
        shares = trainer.distributed_sampler_kwargs
        if shares is not None and shares["num_replicas"] != trainer.world_size:
            raise UserError(
                f"Expected a whole model in each process for {self}, got {trainer.world_size} processes with "
                f"{shares['num_replicas']} models: set tensor_parallel_size to 1, or leave the callback out."
            )

    def _open(self, wanted: Split, trainer: Trainer) -> None:
        """Prepare and set up a split of the data, or the other one if the data has only that."""
        first = trainer.local_rank == 0 and (self.data.prepare_data_per_node or trainer.node_rank == 0)
        if first:
            self.data.prepare_data()
        trainer.strategy.barrier("image_classification_data")
        splits: tuple[Split, Split] = ("test", "validation") if wanted == "test" else ("validation", "test")
        present = [split for split in splits if self._has(split)]
        if not present:
            raise UserError(
                f"Expected a validation or a test split in the data of {self}, got neither in "
                f"{type(self.data).__name__}: give data a source for one of them."
            )
        self._split = present[0]
        self.data.setup(_STAGES[self._split])

    def _has(self, split: Split) -> bool:
        if hasattr(self.data, "open_split"):  # in this package setup() raises for a split without data
            return self.data.open_split(split) is not None
        return is_overridden(_LOADERS[split], self.data)

    def _take_transform(self, trained: Any) -> None:
        if not hasattr(trained, "eval_transform"):
            return
        if not hasattr(self.data, "eval_transform"):
            raise UserError(
                f"Expected an eval_transform in the data of {self}, which that of {type(trained).__name__} replaces, "
                f"got none in {type(self.data).__name__}: prepare the images as the model needs them, and set "
                "transform to 'own'."
            )
        self.data.eval_transform = trained.eval_transform

    def _measure(self, trainer: Trainer, pl_module: LightningModule, prefix: str) -> None:
        # Draws of `data` and its loaders must not change the training. (A DataLoader draws a seed for each pass.)
        if self.transform == "trainer":  # again, since a checkpoint may have changed it after `setup`
            self._take_transform(datamodule(trainer))
        with isolate_rng(), evaluating(pl_module):
            counts = self.count(trainer, self.scorer(trainer, pl_module))
        images, top1, top5, non_finite = counts
        metrics = accuracies(images, top1, top5, len(images))
        metrics["class_recall"] = class_recall(images, top1)
        levels = {name: 100 * min(k / len(images), 1.0) for name, k in (("top1", 1), ("top5", 5), ("class_recall", 1))}
        self.chance = {f"{self.name}_{name}": level for name, level in levels.items() if name in metrics}
        if bad := int(non_finite.sum()):
            metrics["non_finite"] = float(bad)
        # Every process has the same numbers; `sync_dist` only avoids a warning of Lightning.
        pl_module.log_dict({f"{prefix}/{self.name}_{key}": value for key, value in metrics.items()}, sync_dist=True)

    def count(self, trainer: Trainer, scores: Callable[[Tensor], Tensor]) -> Tensor:
        """Return four numbers of images by class, over all processes, long [4, C].

        All images, those that are right, those with the right class among five, those with a non-finite score.
        """
        classes = 0
        rows = [torch.zeros(0, 5, dtype=torch.long)]
        broken_classes = torch.tensor(False)  # [C] from the first batch on: non-finite for some images only
        for image, label, sample_index in self._batches(trainer):
            image = image.to(trainer.strategy.root_device, non_blocking=True)
            of_classes = scores(image)
            classes = of_classes.shape[1]
            right = hits(of_classes, label.to(of_classes.device), 5)
            broken = ~of_classes.isfinite()
            broken_classes = broken_classes | (broken & ~broken.all(1, keepdim=True)).any(0).cpu()
            kinds = torch.stack([right[:, 0], right.any(1), broken.any(1)], 1).cpu().long()
            rows.append(torch.cat([label[:, None], kinds, sample_index[:, None]], 1))
        # A process without an image learns the number of classes from the others.
        classes = int(gather_uneven(torch.tensor([classes])).max())
        label, *flags, sample_index = torch.cat(rows).unbind(1)
        labeled = (label >= 0) & (label < classes)
        of_kinds = [labeled, *(labeled & flag.bool() for flag in flags)]
        # Errors are raised after the collectives, since the other processes would wait for one that raised alone.
        counts = all_reduce_sum(torch.stack([label[kind].bincount(minlength=classes) for kind in of_kinds]))
        unknown = int(all_reduce_sum((~labeled).sum()[None]))
        if unknown:
            raise UserError(
                f"Expected labels from 0 to {classes - 1} in the data of {self}, got {unknown} of "
                f"{unknown + int(counts[0].sum())} labels outside: {self.advice_on_labels(classes)}"
            )
        if not counts[0].any():
            raise UserError(
                f"Expected images in the {self._split} split of the data of {self}, got none from "
                f"{type(self.data).__name__}: give data a source with images."
            )
        if counts[3].any():
            named = gather_uneven(sample_index[of_kinds[3] & (sample_index >= 0)])
            of = all_reduce_max(broken_classes.long().expand(classes)).nonzero()[:, 0]
            rank_zero_warn(
                f"{self} found non-finite scores for {int(counts[3].sum())} of {int(counts[0].sum())} "
                f"images (sample_index {some_of(named)}"
                + (f"; of the classes {some_of(of)}" if len(of) else "")
                + "), which rank last: check these images, or, if these are all images, use an earlier checkpoint."
            )
        return counts

    def _batches(self, trainer: Trainer) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield images [B, 3, H, W], labels, long [B] on the CPU, and `sample_index`, alike, -1 if unknown."""
        loaders = getattr(self.data, _LOADERS[self._split])()
        batches = chain.from_iterable(loaders if isinstance(loaders, (list, tuple)) else [loaders])
        for batch in islice(batches, 1 if only_tries(trainer) else None):
            if not isinstance(batch, Mapping) or not {"image", "label"} <= batch.keys():
                names = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
                raise UserError(
                    f"Expected batches with 'image' and 'label' for {self}, got {names} from "
                    f"{type(self.data).__name__}: give data with labels."
                )
            label = batch["label"].cpu()
            yield batch["image"], label, batch.get("sample_index", torch.full_like(label, -1)).cpu()


def datamodule(trainer: Trainer) -> Any:
    """Return the trainer's datamodule, or None."""
    return getattr(trainer, "datamodule", None)


def only_tries(trainer: Trainer) -> bool:
    """Return whether this is a sanity check or a `fast_dev_run`."""
    return bool(trainer.sanity_checking or trainer.fast_dev_run)  # type: ignore[attr-defined]
