"""What is embedded: the data and the model of a command, and what the manifest says of them."""

import argparse
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import torch
from torch import Tensor

from ...common.errors import UserError
from ...common.manifest import plain_json
from ...datamodules.base.stages import Split
from ...datamodules.pairs.datamodule import PairDataModule
from ...datamodules.pairs.rows import CaptionRows
from ...datamodules.reading.table import PairTable
from ...datamodules.stores.identity import texts_digest, transform_digest
from ...datamodules.transforms.normalize import in_pixels, normalization_of
from ...lightning_modules.core.towers import (
    SPACE,
    locked_features,
    tower_digest,
    towers_of,
    trained_head,
)
from ..evaluate.model import ImageTextModel, load_model
from ..plan.configuration import build, parse_fit


@dataclass
class Embedding:
    """What is embedded, and how.

    Args:
        model: the model.
        table: the rows.
        folder: folder of the store.
        transform: image to the pixels that loader workers send; None if images are not embedded.
        finish: pixels to the input of the network.
        views: number of augmented views; 0 for the plain one.
        texts: whether captions are embedded.
        seed: seed of the augmentation.
        shard_size: rows of a shard.
        batch_size: images, or texts, in a pass.
        num_workers: loader workers of a process.
        decoder: as `SampledDataModule.decoder`.
        settings: what decides the content of the store, plain data for the manifest.
    """

    model: ImageTextModel
    table: PairTable
    folder: Path
    transform: Any
    finish: Callable[[Tensor], Tensor]
    views: int
    texts: bool
    seed: int
    shard_size: int
    batch_size: int
    num_workers: int
    decoder: Any
    settings: dict[str, Any]

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-len(self.table) // self.shard_size)

    def rows(self, shard: int) -> range:
        """Return the rows of a shard."""
        return range(shard * self.shard_size, min((shard + 1) * self.shard_size, len(self.table)))


def prepare(typed: argparse.Namespace, words: list[str]) -> Embedding:
    """Load the model, open the data, and describe what will be embedded.

    Raises:
        UserError: If the model or the data cannot be used.
    """
    words = [*(f"--config={config}" for config in typed.config), *words]
    if typed.model is None:
        data, model, sides = configured(words)
    else:
        model = load_model(typed.model, typed.weights)
        data = data_for(words, model)
        sides = {side: (digest, True) for side, digest in model.tower_digests().items()}
    kinds = typed.of or [f"{side}s" for side in sides]
    if absent := [kind for kind in kinds if kind.removesuffix("s") not in sides]:
        raise UserError(
            f"Expected features of a tower that stays the same, got --of {absent[0]}: lock that tower (model.tuning), "
            "or leave the option out."
        )
    splits: list[Split] = [name for name in get_args(Split) if data.hparams.get(name) is not None]
    split: Split = typed.split or (splits or ["train"])[0]
    table = data.open_split(split)
    if isinstance(table, CaptionRows):
        table = table.table
    if not isinstance(table, PairTable):
        raise UserError(
            f"Expected rows of images with texts in the {split} split, got "
            f"{'none' if table is None else 'a stream'}: set data.{split}, without data.streaming."
        )
    texts = "texts" in kinds and any(layout.caption is not None for layout in table.layouts)
    if not texts and "images" not in kinds:
        raise UserError(f"Expected captions in the {split} split, got none: leave out --of, or correct the column.")
    images = None
    seed = data.run_seed if typed.seed is None else typed.seed
    transform: Any = None
    finish: Callable[[Tensor], Tensor] = model.finish
    if "images" in kinds:
        transform = model.transform
        augmented = data.train_transform
        if typed.views:
            transform = in_pixels(augmented)
            finish = normalization_of(augmented) or _same
        images = {
            "views": typed.views,
            "seed": seed if typed.views else None,
            "transform": type(augmented).__name__ if typed.views else "plain",
            "preprocessing": transform_digest(augmented if typed.views else model.prepared, bool(typed.views)),
            "projected": sides["image"][1],
        }
    settings = {
        "model": {
            "name": model.name,
            "model": typed.model,
            "weights": typed.weights or typed.model,
            # A new projection of a config is random, and not stored: it does not count.
            "sha256": model.sha256 if typed.model is not None else joint_digest(sides),
            **{side: digest for side, (digest, _) in sides.items()},
            **({SPACE: model.joined.as_dict()} if model.joined else {}),
        },
        "data": {
            "split": split,
            "sources": [layout.origin for layout in table.layouts],
            "rows": table.mix.sizes,
            "shard_size": typed.shard_size,
        },
        "images": images,
        "texts": {
            "tokenizer": texts_digest(model.token_ids or _no_texts),
            "projected": sides["text"][1],
        }
        if texts
        else None,
    }
    return Embedding(
        model,
        table,
        Path(typed.output).expanduser(),
        transform,
        finish,
        typed.views,
        texts,
        seed,
        typed.shard_size,
        typed.batch_size,
        typed.num_workers,
        data.decoder,
        plain_json(settings),
    )


def joint_digest(sides: Mapping[str, tuple[str, bool]]) -> str:
    """Return the fingerprint of the towers of a config.

    Args:
        sides: fingerprint of each tower, and whether its features are projected, as `configured` returns them.
    """
    return hashlib.sha256("".join(digest for digest, _ in sides.values()).encode()).hexdigest()


def data_for(words: list[str], model: ImageTextModel) -> PairDataModule:
    """Build the datamodule of a fit, with the preprocessing that a model expects.

    Raises:
        UserError: If there is none, or it has no pairs.
    """
    options = [word.split("=")[0] for word in words]
    if "--config" not in options and "--data" not in options:
        words = ["--data=ImageTextDataModule", *words]
    if "--config" not in options and "--model" not in options:
        words = ["--model=CLIPModule", *words]
    expected = SimpleNamespace(expected_preprocessing=partial(_preprocessing, model))
    return _with_module(_data_of(parse_fit(words)), expected)


def configured(words: list[str]) -> tuple[PairDataModule, ImageTextModel, dict[str, tuple[str, bool]]]:
    """Build the data and the module of a fit as it starts, for features of its locked towers.

    Returns:
        The data, the model, and of each locked tower its fingerprint and whether its features are projected.

    Raises:
        UserError: If there is none, or no tower is locked.
    """
    cli = parse_fit(words)
    data = _data_of(cli)
    module = build(cli, "model")
    locked: list[str] = getattr(module, "locked_towers", [])
    if not locked:
        raise UserError(
            f"Expected a model before the options, or a config of one with locked towers, got {type(module).__name__} "
            "without: give a run, an export or a model's name first, or set model.tuning.lock_image or lock_text."
        )
    module.load_initial_weights()
    _with_module(data, module)
    network = module.student
    towers = towers_of(network)
    encoder = data.encoder()

    def images(pixels: Tensor) -> Tensor:
        return locked_features(network.visual, network.encode_image, pixels)

    def token_ids(texts: Sequence[str]) -> Tensor:
        return encoder(texts)["input_ids"]

    def texts(captions: Sequence[str]) -> Tensor:
        ids = token_ids(captions).to(next(network.parameters()).device)
        return locked_features(network.text, network.encode_text, ids)

    sides = {side: (tower_digest(towers[side]), trained_head(towers[side]) is None) for side in locked}
    module.eval().float()
    plain = data.eval_transform
    finish = normalization_of(plain) or _same
    model = ImageTextModel(
        f"{type(module).__name__} of the config",
        network,
        images,
        texts,
        in_pixels(plain),
        finish,
        token_ids=token_ids,
    )
    return data, model, sides


def _data_of(cli: Any) -> PairDataModule:
    if not (cli.config["fit"].get("data") or {}).get("class_path"):
        raise UserError("Expected data in the configs, got none: add --config with your data, or --data.train.")
    arguments = cli.config["fit"]["data"]["init_args"]
    seed = cli.config["fit"].get("seed_everything")
    if arguments.get("seed") is None and isinstance(seed, int) and not isinstance(seed, bool):
        arguments["seed"] = seed  # of which the views are drawn
    data = build(cli, "data")
    if not isinstance(data, PairDataModule) or not hasattr(data, "pairs"):
        raise UserError(
            f"Expected a datamodule of images with texts in files, such as ImageTextDataModule, got "
            f"{type(data).__name__}: give one of these."
        )
    return data


def _with_module(data: PairDataModule, module: Any) -> PairDataModule:
    """Give a datamodule its module without a Trainer."""
    trainer: Any = SimpleNamespace(
        lightning_module=module, state=SimpleNamespace(fn="fit", status=None), distributed_sampler_kwargs=None
    )
    data.trainer = trainer
    return data


def _preprocessing(model: ImageTextModel) -> dict[str, Any]:
    return {} if model.preprocessing is None else model.preprocessing.as_dict()


def _no_texts(texts: Sequence[str]) -> Tensor:
    return torch.zeros(len(texts), 1, dtype=torch.long)


def _same(pixels: Tensor) -> Tensor:
    return pixels
