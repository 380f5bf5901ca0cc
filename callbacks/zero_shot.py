"""Zero-shot classification: how well a model that knows pictures and texts names the classes of any labelled data."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from math import ceil
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn.functional import normalize
from typing_extensions import override

from .distributed import all_reduce_sum, gather, rank, world_size

Split = Literal["validation", "test"]
_STAGES: dict[Split, str] = {"validation": "validate", "test": "test"}
_LOADERS: dict[Split, str] = {"validation": "val_dataloader", "test": "test_dataloader"}
_PROMPTS = 256  # that are encoded at a time, unless there are more templates


class ZeroShotClassification(Callback):
    """Classifies the labelled pictures of another datamodule by the names of their classes, and logs how well it went.

    Every name is put into every template. The class is embedded as the normalised mean of the normalised embeddings of
    these prompts, and a picture gets the class whose embedding has the largest cosine with its own. After validation,
    in percent: "val/<name>_top1"; "val/<name>_top5" where there are more than five classes; "val/<name>_class_recall",
    the mean over the classes that occur of the share of their pictures that are right. After test the same with
    "test/".

    The module has `encode_images(image)`, which returns features [B, E] (or a tuple that starts with them), and
    `encode_texts(input_ids=..., attention_mask=...)`, which returns features [T, E]. The trainer's datamodule has
    `encoder()`, whose result turns a list of texts into a dict of what `encode_texts` takes. Both run without gradient,
    in eval mode and in the trainer's precision. A module's training is bit for bit what it is without this callback.

    All pictures are read, whatever `limit_val_batches` says; only the sanity check and `fast_dev_run` take one batch
    and one template, to find mistakes early. Over several processes prompts are shared out, and pictures as far as
    `data` shares them out. (A plain `DataLoader` does not: every process then reads all, to the same percentages.)

    Several of these need a `name` each. A `ModelCheckpoint` that monitors one takes the same `every_n_epochs`.

    Args:
        data: gives batches, dicts with `image` [B, 3, H, W] and `label`, long [B]. Validation reads its validation
            split and test its test split, or the one that it has. It is set up here, and no part of the Trainer.
        class_names: of the labels 0, 1, ...: a list, a text file with one a line, or "imagenet" for the 1000 of
            open_clip. By default `data.class_names`.
        templates: open_clip's 80 for ImageNet ("openai"), its short list of 7 ("simple"), or texts with one `{}` each,
            where the name goes (quoted in YAML, to which braces mean something).
        name: of the metrics.
        every_n_epochs: epochs of training between two measurements in validation.
        transform: "trainer" prepares the pictures by `eval_transform` of the trainer's datamodule, if it has one, since
            a model must see pictures as those that it was trained on; "own" leaves that to `data`.

    Raises:
        ValueError: for names or templates that cannot be used, a label without a name, data without pictures, or a
            run that cannot encode.
    """

    def __init__(
        self,
        data: LightningDataModule,
        class_names: list[str] | str | None = None,
        templates: Literal["openai", "simple"] | list[str] = "openai",
        name: str = "zero_shot",
        every_n_epochs: int = 1,
        transform: Literal["trainer", "own"] = "trainer",
    ) -> None:
        super().__init__()
        if every_n_epochs < 1:
            raise ValueError(f"every_n_epochs={every_n_epochs} of ZeroShotClassification must be at least 1.")
        if transform not in ("trainer", "own"):
            raise ValueError(f"transform={transform!r} of ZeroShotClassification must be 'trainer' or 'own'.")
        self.data = data
        self.name = name
        self.every_n_epochs = every_n_epochs
        self.transform = transform
        self.class_names = None if class_names is None else _read_names(class_names)
        self.templates = _read_templates(templates)
        self._split: Split = "validation"

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "predict":
            return
        self._check(trainer, pl_module)
        with isolate_rng():
            self._open("test" if stage == "test" else "validation", trainer)
        if self.transform == "trainer":
            self._take_transform(_datamodule(trainer))
        if not self._names():
            raise ValueError(
                f"{self} found no class_names in {type(self.data).__name__}, expected a name for every label: set "
                "class_names to a list, or to a text file with one a line."
            )

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
        return f"ZeroShotClassification {self.name!r}"

    def _check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what cannot work before anything is read."""
        others: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if [getattr(other, "name", None) for other in others if isinstance(other, type(self))].count(self.name) > 1:
            raise ValueError(f"{self} is there twice, and both would log the same metrics: give each its own name.")
        for method in ("encode_images", "encode_texts"):
            if not hasattr(pl_module, method):
                raise ValueError(
                    f"{self} found no {method}() in {type(pl_module).__name__}, expected a module that encodes "
                    "pictures and texts: leave the callback out."
                )
        if not hasattr(_datamodule(trainer), "encoder"):
            raise ValueError(
                f"{self} found no encoder() in the trainer's datamodule "
                f"({type(_datamodule(trainer)).__name__}), expected one that returns what turns a list of texts into "
                "token ids: add it, or leave the callback out."
            )
        shares = trainer.distributed_sampler_kwargs
        if shares is not None and shares["num_replicas"] != trainer.world_size:
            raise ValueError(
                f"{self} found {trainer.world_size} processes that hold {shares['num_replicas']} models, expected one "
                "each, because processes that share layers must encode the same: set tensor_parallel_size to 1, or "
                "leave the callback out."
            )

    def _open(self, wanted: Split, trainer: Trainer) -> None:
        """Prepare and set up a split of the data; the other one where there is no such."""
        first = trainer.local_rank == 0 and (self.data.prepare_data_per_node or trainer.node_rank == 0)
        if first:
            self.data.prepare_data()
        trainer.strategy.barrier("zero_shot_data")
        splits: tuple[Split, Split] = ("test", "validation") if wanted == "test" else ("validation", "test")
        found = [split for split in splits if self._has(split)]
        if not found:
            raise ValueError(
                f"{self} found neither a validation nor a test split in {type(self.data).__name__}, expected one of "
                "them: give data a source for it."
            )
        self._split = found[0]
        self.data.setup(_STAGES[self._split])

    def _has(self, split: Split) -> bool:
        if hasattr(self.data, "open_split"):  # ours says so, and its setup() refuses what it has not
            return self.data.open_split(split) is not None
        return is_overridden(_LOADERS[split], self.data)

    def _take_transform(self, theirs: Any) -> None:
        if not hasattr(theirs, "eval_transform"):
            return
        if not hasattr(self.data, "eval_transform"):
            raise ValueError(
                f"{self} found no eval_transform in {type(self.data).__name__} that the one of "
                f"{type(theirs).__name__} could take the place of: prepare the pictures as the model needs them, and "
                "set transform to 'own'."
            )
        self.data.eval_transform = theirs.eval_transform

    def _names(self) -> list[str]:
        names = self.class_names
        return list(getattr(self.data, "class_names", None) or ()) if names is None else names

    def _measure(self, trainer: Trainer, pl_module: LightningModule, prefix: str) -> None:
        # What `data` and its loaders draw must not be missing in training. (A DataLoader draws a seed for each pass.)
        with isolate_rng(), _evaluating(pl_module):
            counts = self._count(trainer, pl_module, self._embed_classes(trainer, pl_module))
        pictures, *right = counts
        total = int(pictures.sum())
        recall = right[0][pictures > 0] / pictures[pictures > 0]
        metrics = {"top1": 100 * int(right[0].sum()) / total, "class_recall": 100 * float(recall.mean())}
        if len(pictures) > 5:
            metrics["top5"] = 100 * int(right[1].sum()) / total
        # Every process has the same numbers; the mean over them only keeps Lightning from warning.
        pl_module.log_dict({f"{prefix}/{self.name}_{key}": value for key, value in metrics.items()}, sync_dist=True)

    def _embed_classes(self, trainer: Trainer, pl_module: Any) -> Tensor:
        """Unit-length embeddings [C, E] of the classes, the same in every process."""
        names, encode = self._names(), _datamodule(trainer).encoder()
        templates = self.templates[:1] if _tries(trainer) else self.templates
        # Every process embeds equally many, some twice over where they do not go round: sharded modules communicate.
        share = ceil(len(names) / world_size())
        mine = [names[(rank() * share + number) % len(names)] for number in range(share)]
        at_once = max(1, _PROMPTS // len(templates))
        embeddings = []
        for start in range(0, share, at_once):
            group = mine[start : start + at_once]
            texts = encode([template.replace("{}", name) for name in group for template in templates])
            texts = {key: ids.to(trainer.strategy.root_device) for key, ids in texts.items()}
            with trainer.precision_plugin.forward_context():
                features: Tensor = pl_module.encode_texts(**texts)
            prompts = normalize(_at_least_float32(features), dim=-1).unflatten(0, (len(group), len(templates)))
            embeddings.append(normalize(prompts.mean(1), dim=-1))
        return gather(torch.cat(embeddings))[: len(names)]

    def _count(self, trainer: Trainer, pl_module: Any, classes: Tensor) -> Tensor:
        """Pictures of all processes by class, long [3, C]: all, those with the right class first, and among five."""
        number = len(classes)
        counts = torch.zeros(3, number, dtype=torch.long)
        unnamed = torch.zeros(1, dtype=torch.long)
        loaders = getattr(self.data, _LOADERS[self._split])()
        batches = chain.from_iterable(loaders if isinstance(loaders, (list, tuple)) else [loaders])
        for batch in islice(batches, 1 if _tries(trainer) else None):
            if not isinstance(batch, Mapping) or not {"image", "label"} <= batch.keys():
                found = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
                raise ValueError(
                    f"{self} found a batch of {found} from {type(self.data).__name__}, expected a dict with 'image' "
                    "and 'label': give data with labels."
                )
            image = batch["image"].to(trainer.strategy.root_device, non_blocking=True)
            with trainer.precision_plugin.forward_context():
                features = pl_module.encode_images(trainer.precision_plugin.convert_input(image))
            features = features[0] if isinstance(features, tuple) else features
            # The length of a picture's features does not change the order.
            best = (_at_least_float32(features) @ classes.T).topk(min(5, number)).indices.cpu()
            label = batch["label"].cpu()
            named = (label >= 0) & (label < number)
            unnamed += (~named).sum()
            label, right = label[named], (best == label[:, None])[named]
            for row, some in zip(counts, (label, label[right[:, 0]], label[right.any(1)]), strict=True):
                row += some.bincount(minlength=number)
        # Only now, since a process that raised alone would leave the others waiting.
        counts, unnamed = all_reduce_sum(counts), all_reduce_sum(unnamed)
        if unnamed:
            raise ValueError(
                f"{self} found {int(unnamed)} of {int(unnamed + counts[0].sum())} labels outside 0 to {number - 1}, "
                f"expected each to have one of the {number} class names: give class_names that cover the labels."
            )
        if not counts[0].any():
            raise ValueError(
                f"{self} found no picture in the {self._split} split of {type(self.data).__name__}, expected some: "
                "give data a source that has them."
            )
        return counts


def _datamodule(trainer: Trainer) -> Any:
    return getattr(trainer, "datamodule", None)


def _tries(trainer: Trainer) -> bool:
    """Whether the run only looks for mistakes."""
    return bool(trainer.sanity_checking or trainer.fast_dev_run)  # type: ignore[attr-defined]


def _at_least_float32(features: Tensor) -> Tensor:
    return features.to(torch.promote_types(features.dtype, torch.float32))


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode; afterwards each part has its own mode again."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _read_names(given: list[str] | str) -> list[str]:
    source = "class_names"
    if given == "imagenet":
        from open_clip import IMAGENET_CLASSNAMES

        return list(IMAGENET_CLASSNAMES)
    if isinstance(given, str):
        source, path = repr(given), Path(given).expanduser()
        if not path.is_file():
            raise ValueError(
                f"ZeroShotClassification found no file {source}, expected a text file with one class name a line: "
                "correct class_names."
            )
        given = path.read_text(encoding="utf-8").rstrip().splitlines()
    names = [name.strip() for name in given]
    if not names or "" in names:
        where = f"an empty name for label {names.index('')}" if names else "no name"
        raise ValueError(f"ZeroShotClassification found {where} in {source}, expected one for every label: add it.")
    return names


def _read_templates(given: str | list[str]) -> list[str]:
    if given in ("openai", "simple"):
        import open_clip

        known = {"openai": open_clip.OPENAI_IMAGENET_TEMPLATES, "simple": open_clip.SIMPLE_IMAGENET_TEMPLATES}
        return [template("{}") for template in known[str(given)]]
    if isinstance(given, str) or not given or any(text.count("{}") != 1 for text in given):
        raise ValueError(
            f"ZeroShotClassification found {given!r} as templates, expected 'openai', 'simple', or a list of texts "
            "with one {} each: correct templates."
        )
    return list(given)
