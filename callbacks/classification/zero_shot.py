"""Zero-shot classification of labeled images by a model of images and texts."""

from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from ...common.errors import UserError
from ...metrics.classification import class_embeddings, class_prompts, zero_shot_scores
from ..distributed.collectives import gather, rank, world_size
from ..modules import features_of
from .image_classification import ImageClassification, datamodule, only_tries

_PROMPTS = 256  # that are encoded at a time, unless there are more templates


class ZeroShotClassification(ImageClassification):
    """Classify the labeled images of another datamodule by the names of their classes, and log accuracies.

    Every name is put into every template. The class embedding is the normalized mean of the normalized embeddings of
    these prompts, and an image gets the class whose embedding has the largest cosine with its own. Logged after
    validation, in percent: "val/<name>_top1"; "val/<name>_top5" where there are more than five classes;
    "val/<name>_class_recall", the mean over the classes that occur of the share of their images that are right. After
    test the same with "test/".

    The module has `encode_images(image)`, which returns features [B, E] (or a tuple that starts with them), and
    `encode_texts(input_ids=..., attention_mask=...)`, which returns features [T, E]. The trainer's datamodule has
    `encoder()`, whose result turns a list of texts into a dict of what `encode_texts` takes. Both run without gradient,
    in eval mode and in the trainer's precision. A module's training is bit for bit the same as without this callback.

    All images are read, regardless of `limit_val_batches`; only the sanity check and `fast_dev_run` use one batch and
    one template, to find mistakes early. Processes share the prompts, and the images if `data` distributes them. (A
    plain `DataLoader` does not: every process then reads all images, with the same result.)

    Several of these need a `name` each. A `ModelCheckpoint` that monitors one takes the same `every_n_epochs`.

    Args:
        data: Datamodule whose batches are dicts with `image` [B, 3, H, W] and `label`, long [B]. Validation reads its
            validation split and test its test split, or the only one it has. This callback sets it up; it is not part
            of the Trainer.
        class_names: Names of the labels 0, 1, ...: a list, a text file with one a line, or "imagenet" for the 1000 of
            open_clip. By default `data.class_names`.
        templates: Open_clip's 80 for ImageNet ("openai"), its short list of 7 ("simple"), or texts with one `{}` each,
            where the name goes (quoted in YAML, where braces have a meaning).
        name: Name of the metrics.
        every_n_epochs: Epochs of training between two measurements in validation.
        transform: "trainer" prepares the images by `eval_transform` of the trainer's datamodule, if it has one, since
            a model must see images as those that it was trained on; "own" leaves that to `data`.

    Raises:
        UserError: If names or templates are invalid, a label has no name, the data has no images, or the run cannot
            encode images or texts.
    """

    module_needs = ("encode_images", "encode_texts")
    module_does = "encodes images and texts"

    def __init__(
        self,
        data: LightningDataModule,
        class_names: list[str] | str | None = None,
        templates: Literal["openai", "simple"] | list[str] = "openai",
        name: str = "zero_shot",
        every_n_epochs: int = 1,
        transform: Literal["trainer", "own"] = "trainer",
    ) -> None:
        super().__init__(data, name, every_n_epochs, transform)
        self.class_names = None if class_names is None else _read_names(class_names)
        self.templates = _read_templates(templates)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "predict" and not self._names():
            raise UserError(
                f"Expected a class name for every label of {self}, got no class_names in {type(self.data).__name__}: "
                "set class_names to a list, or to a text file with one name a line."
            )

    @override
    def check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().check(trainer, pl_module)
        if not hasattr(datamodule(trainer), "encoder"):
            raise UserError(
                "Expected a method encoder() in the trainer's datamodule, whose result turns texts into token ids, for "
                f"{self}, got {type(datamodule(trainer)).__name__} without: add it, or leave the callback out."
            )

    @override
    def advice_on_labels(self, classes: int) -> str:
        return f"give class_names that cover the labels; there are {classes} names."

    @override
    def scorer(self, trainer: Trainer, pl_module: Any) -> Callable[[Tensor], Tensor]:
        classes = self._embed_classes(trainer, pl_module)

        def scores(image: Tensor) -> Tensor:
            return zero_shot_scores(features_of(trainer, pl_module.encode_images, image), classes)

        return scores

    def _names(self) -> list[str]:
        names = self.class_names
        return list(getattr(self.data, "class_names", None) or ()) if names is None else names

    def _embed_classes(self, trainer: Trainer, pl_module: Any) -> Tensor:
        """Return unit-length embeddings [C, E] of the classes, the same in every process."""
        names = self._names()
        encode = datamodule(trainer).encoder()
        templates = self.templates[:1] if only_tries(trainer) else self.templates
        # Every process embeds equally many classes, some twice: sharded modules communicate in every forward pass.
        share = ceil(len(names) / world_size())
        mine = [names[(rank() * share + number) % len(names)] for number in range(share)]
        at_once = max(1, _PROMPTS // len(templates))
        embeddings = []
        for start in range(0, share, at_once):
            group = mine[start : start + at_once]
            texts = encode(class_prompts(group, templates))
            texts = {key: ids.to(trainer.strategy.root_device) for key, ids in texts.items()}
            with trainer.precision_plugin.forward_context():
                features: Tensor = pl_module.encode_texts(**texts)
            embeddings.append(class_embeddings(features, len(templates)))
        return gather(torch.cat(embeddings))[: len(names)]


def _read_names(class_names: list[str] | str) -> list[str]:
    source = "class_names"
    if class_names == "imagenet":
        from open_clip import IMAGENET_CLASSNAMES

        return list(IMAGENET_CLASSNAMES)
    if isinstance(class_names, str):
        source = repr(class_names)
        path = Path(class_names).expanduser()
        if not path.is_file():
            raise UserError(
                f"Expected a text file with one class name a line, got no file {source}: correct class_names."
            )
        class_names = path.read_text(encoding="utf-8").rstrip().splitlines()
    names = [name.strip() for name in class_names]
    if not names or "" in names:
        where = f"an empty name for label {names.index('')}" if names else "no name"
        raise UserError(f"Expected a class name for every label in {source}, got {where}: add it.")
    return names


def _read_templates(templates: str | list[str]) -> list[str]:
    if templates in ("openai", "simple"):
        import open_clip

        lists = {"openai": open_clip.OPENAI_IMAGENET_TEMPLATES, "simple": open_clip.SIMPLE_IMAGENET_TEMPLATES}
        return [template("{}") for template in lists[str(templates)]]
    if isinstance(templates, str) or not templates or any(text.count("{}") != 1 for text in templates):
        raise UserError(
            "Expected 'openai', 'simple', or a list of texts with one {} each as templates of ZeroShotClassification, "
            f"got {templates!r}: correct templates."
        )
    return list(templates)
