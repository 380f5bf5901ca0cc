"""The work of `vlightning embed`, after its arguments are parsed."""

import argparse
import json
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from ...callbacks.distributed.collectives import rank, world_size
from ...common.errors import UserError
from ...common.files import clear_leftovers
from ...common.manifest import (
    MANIFEST,
    byte_size,
    changed_software,
    first_difference,
    plain_json,
    software_versions,
    write_manifest,
)
from ...common.messages import say, warn
from ...common.shown import shown
from ...datamodules.base.loaders import inner_loader
from ...datamodules.base.stages import Split
from ...datamodules.pairs.datamodule import PairDataModule
from ...datamodules.pairs.rows import CaptionRows
from ...datamodules.reading.table import PairTable
from ...datamodules.stores.identity import texts_digest, transform_digest
from ...datamodules.stores.shards import (
    Shard,
    ShardRows,
    caption_count,
    counted,
    finished_shards,
    shard_path,
    write_shard,
)
from ...datamodules.transforms.normalize import in_pixels, normalization_of
from ...lightning_modules.clip.stored import towers_of
from ...lightning_modules.core.towers import (
    locked_features,
    tower_digest,
    tower_digests,
    trained_head,
    weights_digest,
)
from ..evaluate.model import ImageTextModel, load_model
from ..plan.configuration import build, parse_fit
from .rows import EmbeddedRow, EmbeddedSet, as_list

_SPLITS: tuple[Split, ...] = ("train", "validation", "test", "predict")
NOT_FINITE = "embedding not finite"


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


def work(typed: argparse.Namespace, words: list[str]) -> str:
    """Embed a split of a data set.

    Args:
        typed: The parsed arguments.
        words: Those of the data.

    Raises:
        UserError: If an argument is wrong, the data or the model cannot be used, or the folder holds another store.
    """
    if typed.seed is not None and typed.seed < 0:
        raise UserError(f"Expected at least 0 after --seed, got {typed.seed}: increase it.")
    for name, least in (("views", 0), ("shard_size", 1), ("batch_size", 1), ("num_workers", 0)):
        if getattr(typed, name) < least:
            raise UserError(f"Expected at least {least} after --{name}, got {getattr(typed, name)}: increase it.")
    warnings.filterwarnings("ignore", message="The `srun` command is available")  # one process needs none
    fabric = Fabric(
        accelerator=typed.accelerator,
        devices=typed.devices,
        num_nodes=typed.num_nodes,
        strategy="ddp" if typed.devices * typed.num_nodes > 1 else "auto",
    )
    fabric.launch()
    if rank() == 0:  # converts files, which the other processes then find
        prepared = prepare(typed, words)
    fabric.barrier()
    if rank() != 0:
        prepared = prepare(typed, words)
    prepared.model.network.to(fabric.device)
    # All processes must see the same shards before one of them writes another.
    problem = _start(prepared) if rank() == 0 else None
    if problem := fabric.broadcast(problem):
        raise problem
    finished = fabric.broadcast(finished_shards(prepared.folder, prepared.shards))
    missing = [number for number in range(prepared.shards) if number not in finished]
    if missing and rank() == 0:
        rows = sum(len(prepared.rows(number)) for number in missing)
        say(f"Embedding {rows:,} of {len(prepared.table):,} rows.")
    embed(prepared, missing[rank() :: world_size()])
    fabric.barrier()
    problem, said = (None, "")
    if rank() == 0:
        try:
            said = _finish(prepared)
        except UserError as error:
            problem = error
    if problem := fabric.broadcast(problem):
        raise problem
    return said


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
        sides = {side: (digest, True) for side, digest in tower_digests(model.network, model.sha256).items()}
    kinds = typed.of or [f"{side}s" for side in sides]
    if absent := [kind for kind in kinds if kind.removesuffix("s") not in sides]:
        raise UserError(
            f"Expected features of a tower that stays the same, got --of {absent[0]}: lock that tower (model.tuning), "
            "or leave the option out."
        )
    given: list[Split] = [name for name in _SPLITS if data.hparams.get(name) is not None]
    split: Split = typed.split or (given or ["train"])[0]
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
        if typed.views:
            augmented = data.train_transform
            transform = in_pixels(augmented)
            finish = normalization_of(augmented) or _same
        images = {
            "views": typed.views,
            "seed": seed if typed.views else None,
            "transform": type(data.train_transform).__name__ if typed.views else "plain",
            "preprocessing": transform_digest(_both(transform, finish), bool(typed.views)),
            "projected": sides["image"][1],
        }
    settings = {
        "model": {
            "name": model.name,
            "model": typed.model,
            "weights": typed.weights or typed.model,
            "sha256": model.sha256,
            **{side: digest for side, (digest, _) in sides.items()},
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


def data_for(words: list[str], model: ImageTextModel) -> PairDataModule:
    """Build the datamodule of a fit, with the preprocessing that a model expects.

    Raises:
        UserError: If there is none, or it has no pairs.
    """
    given = [word.split("=")[0] for word in words]
    if "--config" not in given and "--data" not in given:
        words = ["--data=ImageTextDataModule", *words]
    if "--config" not in given and "--model" not in given:
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

    def texts(given: Sequence[str]) -> Tensor:
        ids = token_ids(given).to(next(network.parameters()).device)
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
        weights_digest(network.state_dict().items()),
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


def _both(transform: Any, finish: Any) -> Callable[[Any], Tensor]:
    device = torch.device("cpu")

    def prepared(image: Any) -> Tensor:
        result: Tensor = finish(transform(image).to(device))
        return result

    return prepared


def _no_texts(texts: Sequence[str]) -> Tensor:
    return torch.zeros(len(texts), 1, dtype=torch.long)


def _same(pixels: Tensor) -> Tensor:
    return pixels


def _start(embedding: Embedding) -> Exception | None:
    """Return the error that prevents writing, if any; otherwise write the manifest of an incomplete store."""
    path = embedding.folder / MANIFEST
    try:
        embedding.folder.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            manifest = json.loads(path.read_text(encoding="utf-8"))
            _compare(manifest, embedding.settings, embedding.folder)
        elif any(embedding.folder.iterdir()):
            raise UserError(
                f"Expected a new folder, an empty one or one of a store after --output, got "
                f"{str(embedding.folder)!r} with other files: give another."
            )
        clear_leftovers(embedding.folder)
        if len(finished_shards(embedding.folder, embedding.shards)) < embedding.shards:
            _check_space(embedding)
            write_manifest(path, _manifest(embedding, complete=False))
    except (UserError, ValueError, OSError) as problem:
        return problem
    return None


def _compare(manifest: dict[str, Any], settings: dict[str, Any], folder: Path) -> None:
    # A model may have another path with the same weights, and dimensions are known when a store is complete.
    wanted = plain_json(settings)
    kept = plain_json({name: manifest.get(name) for name in wanted})
    for content in (kept, wanted):
        for name in ("name", "model", "weights"):
            (content["model"] or {}).pop(name, None)
        for side in ("images", "texts"):
            (content[side] or {}).pop("width", None)
    if (differing := first_difference(kept, wanted)) is not None:
        name, old, new, more = differing
        raise UserError(
            f"Expected {name} {old}, with which the store in {str(folder)!r} was written, got {new}{more}: give "
            "another folder after --output, or the arguments of that store."
        )
    if changed := changed_software(manifest):
        warn(f"The existing shards were written with other software: {', '.join(changed)}.")


def _check_space(embedding: Embedding) -> None:
    width = 512  # about; exact sizes need a pass
    each = 4 * width * (max(embedding.views, 1) * (embedding.transform is not None) + embedding.texts)
    needed = len(embedding.table) * each
    free = shutil.disk_usage(embedding.folder).free
    if needed > free:
        raise UserError(
            f"Expected room for about {byte_size(needed)} in {str(embedding.folder)!r}, got {byte_size(free)} of free "
            "space: make room, or store fewer --views."
        )


def _manifest(embedding: Embedding, complete: bool, **more: Any) -> dict[str, Any]:
    return {"format": 1, "complete": complete, **embedding.settings, **more, "software": software_versions()}


def embed(embedding: Embedding, shards: Sequence[int]) -> None:
    """Write shards; no batch has rows of two of them, so that any number of processes writes the same bytes."""
    batches = [
        list(rows[start : start + embedding.batch_size])
        for rows in map(embedding.rows, shards)
        for start in range(0, len(rows), embedding.batch_size)
    ]
    if not batches:
        return
    dataset = EmbeddedSet(embedding.table, embedding.transform, embedding.views, embedding.seed, embedding.texts)
    dataset.decoder = embedding.decoder
    loader = inner_loader(dataset, as_list, embedding.num_workers, batch_sampler=batches)
    rows: list[EmbeddedRow] = []
    features: list[Tensor] = []
    for batch in loader:
        rows += [row._replace(views=None) for row in batch]
        if embedding.transform is not None:
            features.append(_image_features(embedding, batch))
        number = rows[0].row // embedding.shard_size
        if len(rows) == len(embedding.rows(number)):
            write_shard(shard_path(embedding.folder, number), _shard_rows(embedding, rows, features))
            rows = []
            features = []


@torch.no_grad()
def _image_features(embedding: Embedding, batch: Sequence[EmbeddedRow]) -> Tensor:
    """Return features [B, K, D] of the views of a batch, zeros for rows with a fault; [B, 0] without any image."""
    model = embedding.model
    used = [index for index, row in enumerate(batch) if row.views is not None]
    views = max(embedding.views, 1)
    if not used:
        return torch.zeros(len(batch), 0)
    pixels = torch.cat([row.views for row in batch if row.views is not None])
    encoded = torch.cat(
        [
            model.images(embedding.finish(part.to(model.device))).float().cpu()
            for part in pixels.split(embedding.batch_size)
        ]
    )
    features = torch.zeros(len(batch), views, encoded.shape[1])
    features[used] = encoded.view(len(used), views, -1)
    return features


def _shard_rows(embedding: Embedding, rows: Sequence[EmbeddedRow], features: Sequence[Tensor]) -> ShardRows:
    written = ShardRows()
    images: Tensor | None = None
    if embedding.transform is not None:
        width = max(part.shape[-1] for part in features)
        views = max(embedding.views, 1)
        parts = [part if part.ndim == 3 else torch.zeros(len(part), views, width) for part in features]
        images = torch.cat(parts)
        written.features = images
    for number, row in enumerate(rows):
        fault = row.fault
        if fault is None and images is not None and not bool(images[number].isfinite().all()):
            fault = NOT_FINITE
        written.names.append(row.name)
        written.image_ids.append(row.image_id)
        written.keys.append(row.key)
        written.faults.append(fault)
        written.captions.append(row.captions)
    if embedding.texts:
        written.text_features = torch.cat(list(_text_features(embedding, rows)))
    return written


@torch.no_grad()
def _text_features(embedding: Embedding, rows: Sequence[EmbeddedRow]) -> Iterator[Tensor]:
    captions = [text for row in rows for text in row.captions]
    if not captions:  # for the dimension
        yield embedding.model.texts(["a"]).float().cpu()[:0]
    for start in range(0, len(captions), embedding.batch_size):
        yield embedding.model.texts(captions[start : start + embedding.batch_size]).float().cpu()


def _finish(embedding: Embedding) -> str:
    """Write the manifest of the complete store; return what was written."""
    missing = embedding.shards - len(finished_shards(embedding.folder, embedding.shards))
    if missing:
        raise UserError(
            f"Expected {embedding.shards} shards in {str(embedding.folder)!r}, got {missing} fewer: give the command "
            "again."
        )
    shards = [Shard(shard_path(embedding.folder, number)) for number in range(embedding.shards)]
    causes = Counter[str]()
    for shard in shards:
        causes.update(counted(shard))
    bad = sum(causes.values())
    if bad == len(embedding.table):
        raise UserError(
            f"Expected rows that can be embedded, got {bad} that cannot ({_listed(causes)}): correct the data, and "
            f"remove {str(embedding.folder)!r}."
        )
    settings = embedding.settings
    if settings["images"] is not None:
        views = max(embedding.views, 1)
        settings["images"]["width"] = max(shard.images.shape[1] for shard in shards) // views
    if settings["texts"] is not None:
        settings["texts"]["width"] = shards[0].texts.shape[1]
    counts = {"unusable": dict(causes), "captions": caption_count(shards) if embedding.texts else 0}
    write_manifest(embedding.folder / MANIFEST, _manifest(embedding, complete=True, counts=counts))
    left = f", {bad} of them unusable ({_listed(causes)})" if bad else ""
    size = byte_size(sum(file.stat().st_size for file in embedding.folder.iterdir()))
    return f"{len(embedding.table):,} rows{left} in {embedding.shards} shards, {size}: {shown(str(embedding.folder))}"


def _listed(causes: Counter[str]) -> str:
    return ", ".join(f"{cause}: {count}" for cause, count in causes.items())
