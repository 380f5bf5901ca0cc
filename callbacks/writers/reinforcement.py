"""Shards of teachers' embeddings: complete shards only, with a manifest, and a check of written samples."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from ...common.errors import UserError
from ...common.files import clear_leftovers
from ...common.manifest import (
    MANIFEST,
    byte_size,
    changed_software,
    check_settings,
    check_space,
    write_manifest,
)
from ...common.ranges import NOT_NEGATIVE, CheckedArguments, Range
from .reinforced import LeftOut, Reinforced, ReinforcementData, Shard

_NAMED = 20  # samples without embeddings that an index names
_WAITING = 4  # batches that may wait for the writing thread


class ReinforcementWriter(CheckedArguments, BasePredictionWriter):
    """Write each shard when its last row is computed, and a manifest beside the shards.

    A shard gets its name when it is complete and on the disk: a killed run loses at most one shard of each process, and
    the next run of the same command makes exactly the missing shards. Two runs may write into one folder. A thread
    encodes and writes.

    Before anything is written, the predicted size of all shards is compared with the free space, and the settings with
    those of existing shards. At the end some random samples are read from the shards and embedded again: their
    images are decoded and cropped again.

    `manifest.json` holds the settings of the shards (teachers, captioner, augmentations, data, software) and, once all
    shards exist, the number of samples, the numbers of rows left out by cause, and the result of the check.

    The module has `settings()` (plain data), `widths` (of each teacher's embeddings), `captions` (number of captions it
    generates for an image, None if the data has them), and a `predict_step` that returns a `Reinforced`. The
    datamodule is a `ReinforcementData`.

    Args:
        checked_samples: Number of samples that are embedded again; 0 skips the check.
        least_cosine: Lowest cosine of each embedding with the one that was written.

    Raises:
        UserError: If the folder holds shards of other settings, the datamodule is of another kind, the shards do not
            fit on the disk, or a sample differs from what was written.
    """

    def __init__(
        self,
        checked_samples: Annotated[int, NOT_NEGATIVE] = 16,
        least_cosine: Annotated[float, Range(least=-1, most=1)] = 0.999,
    ) -> None:
        super().__init__("batch")
        self.checked_samples = checked_samples
        self.least_cosine = least_cosine
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: deque[Future[None]] = deque()
        self._open: _OpenShard | None = None

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = _data(trainer)
        trainer.predict_loop.return_predictions = False  # otherwise the trainer keeps all of them until the end
        # Every process must see the same shards before one of them writes another.
        problem = self._problem(data, pl_module) if trainer.is_global_zero else None
        if problem := trainer.strategy.broadcast(problem):
            raise problem
        self._thread = ThreadPoolExecutor(1, "reinforcement-writer")

    @override
    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        assert self._thread is not None
        self._waiting.append(self._thread.submit(self._write, _data(trainer), prediction))
        while len(self._waiting) > _WAITING or (self._waiting and self._waiting[0].done()):
            self._waiting.popleft().result()

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        while self._waiting:
            self._waiting.popleft().result()
        trainer.strategy.barrier("reinforcement written")
        problem = None
        if trainer.is_global_zero:
            try:
                self._complete(trainer, pl_module)
            except (UserError, RuntimeError, OSError) as error:
                problem = error
        if problem := trainer.strategy.broadcast(problem):
            raise problem

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        """End the thread, and remove its unfinished shard."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None
        self._waiting.clear()
        if self._open is not None:
            self._open.shard.discard()
            self._open = None

    # Before writing

    def _problem(self, data: ReinforcementData, pl_module: LightningModule) -> Exception | None:
        """Return the error that prevents writing the shards, if any; otherwise write the manifest."""
        path = data.folder / MANIFEST
        try:
            settings = _settings(data, pl_module)
            data.folder.mkdir(parents=True, exist_ok=True)
            there = any(data.folder.glob("*.tar"))
            if there and not path.is_file():
                return UserError(
                    f"Expected no shards or those of this command in {str(data.folder)!r}, got shards without a "
                    f"{MANIFEST}: give another data.folder."
                )
            if there:
                self._compare(json.loads(path.read_text(encoding="utf-8")), settings, data.folder)
            clear_leftovers(data.folder)
            module = cast(Any, pl_module)
            self._check_space(data, data.bytes_per_sample(sum(module.widths), module.captions))
            write_manifest(path, settings, complete=False)
        except (UserError, ValueError, OSError) as problem:
            return problem
        return None

    def _compare(self, manifest: dict[str, Any], settings: dict[str, Any], folder: Path) -> None:
        shards = f"the shards in {str(folder)!r} were made"
        check_settings(manifest, settings, shards, "another data.folder, or the settings of those shards")
        if changed := changed_software(manifest):
            rank_zero_warn(f"The existing shards were made with other software: {', '.join(changed)}.")

    def _check_space(self, data: ReinforcementData, each: float) -> None:
        rows = data.missing_rows
        needed = rows * each
        total = data.shard_rows(data.shards - 1).stop
        samples = f"{rows:,} of {total:,} samples, "
        advice = "store less (data.embeddings pth.gz, fewer data.augmentations)"
        free = byte_size(check_space(data.folder, needed, advice, samples))
        rank_zero_info(
            f"To be reinforced: {samples}about {byte_size(needed)} in {str(data.folder)!r}; {free} are free."
        )

    # Each batch, in the thread

    def _write(self, data: ReinforcementData, prediction: Reinforced) -> None:
        rows = sorted([*prediction.records, *(left.row for left in prediction.left_out)])
        if not rows:
            return
        number = rows[0] // data.shard_size
        if self._open is None:
            self._open = _OpenShard(data.open_shard(number), data.shard_rows(number))
        self._open.add(prediction, data.version, data.embeddings)
        if self._open.complete:
            if data.shard_path(number).is_file():  # another run has written it in the meantime
                self._open.shard.discard()
            else:
                self._open.finish()
            self._open = None

    # After writing

    def _complete(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = _data(trainer)
        missing = [number for number in range(data.shards) if not data.shard_path(number).is_file()]
        if missing:  # a run of some batches only
            rank_zero_warn(
                f"{len(missing)} of {data.shards} shards are missing: the same command, or those of other parts, make "
                "them."
            )
            return
        samples = 0
        causes = Counter[str]()
        for number in range(data.shards):
            index = json.loads(data.shard_path(number).with_suffix(".index.json").read_text(encoding="utf-8"))
            samples += len(index["keys"])
            causes.update(index["left_out"])
        check = self._check(trainer) if self.checked_samples else {}
        settings = _settings(data, pl_module)
        counts = {"shards": data.shards, "samples": samples, "left_out": dict(causes)}
        write_manifest(data.folder / MANIFEST, settings, complete=True, **counts, self_check=check)
        left = ", ".join(f"{cause}: {count}" for cause, count in causes.items())
        rank_zero_info(
            f"{samples:,} samples in {data.shards} shards in {str(data.folder)!r}; left out: {left or 'none'}."
        )

    def _check(self, trainer: Trainer) -> dict[str, Any]:
        """Embed written samples again."""
        widths: list[int] = cast(Any, trainer.lightning_module).widths
        least = 1.0
        checked = 0
        for batch, written in _data(trainer).reread(self.checked_samples):
            moved = trainer.strategy.batch_to_device(batch)
            again: Reinforced = trainer.strategy.predict_step(moved, 0)
            if not again.records:
                raise UserError(
                    f"Expected written samples that can be embedded again, got {written.name} with the cause "
                    f"{again.left_out[0].cause!r}: do not train on these shards."
                )
            (record,) = again.records.values()
            text = torch.cat([record.text_embeddings, *record.synthetic_embeddings.values()])
            for kind, new, old in (("image", record.image_embeddings, written.image), ("text", text, written.text)):
                cosines = _cosines(new, old, widths)  # [rows, teachers]
                worst = float(cosines.min())
                if not worst >= self.least_cosine:  # also for NaN
                    row, teacher = divmod(int(cosines.argmin()), len(widths))
                    raise UserError(
                        f"Expected a cosine of at least {self.least_cosine} between written and recomputed embeddings, "
                        f"got {worst:.4f} for embedding {row} of {kind} by teacher {teacher} in the sample "
                        f"{written.name}: do not train on these shards."
                    )
                least = min(least, worst)
            checked += 1
        rank_zero_info(f"{checked} written samples were embedded again, the least cosine is {least:.6f}.")
        return {"samples": checked, "least_cosine": least}


class _OpenShard:
    """A shard and its rows that are not computed yet."""

    def __init__(self, shard: Shard, rows: range) -> None:
        self.shard = shard
        self.rows = set(rows)
        self.causes: Counter[str] = Counter()
        self.named: list[LeftOut] = []

    @property
    def complete(self) -> bool:
        """Whether all rows are accounted for."""
        return not self.rows

    def add(self, prediction: Reinforced, version: int, embeddings: str) -> None:
        """Write samples, and count the rows left out."""
        for row, record in prediction.records.items():
            self.shard.add(record.key, record.members(version, embeddings))
            self.rows.remove(row)
        for left in prediction.left_out:
            self.causes[left.cause] += 1
            self.named.append(left)
            self.rows.remove(left.row)

    def finish(self) -> None:
        """Rename the shard to its final name."""
        examples = [left._asdict() for left in self.named[:_NAMED]]
        self.shard.finish(left_out=dict(self.causes), examples=examples)


def _data(trainer: Trainer) -> ReinforcementData:
    data = getattr(trainer, "datamodule", None)
    if not hasattr(data, "open_shard"):
        raise UserError(
            f"Expected a datamodule that opens shards for ReinforcementWriter, got {type(data).__name__}: use "
            "ReinforcementDataModule."
        )
    return cast(ReinforcementData, data)


def _settings(data: ReinforcementData, pl_module: LightningModule) -> dict[str, Any]:
    """Return the settings of data and module that decide the content of the shards."""
    if missing := [name for name in ("settings", "widths", "captions") if not hasattr(pl_module, name)]:
        raise UserError(
            f"Expected settings(), widths and captions of the module for ReinforcementWriter, got "
            f"{type(pl_module).__name__} without {missing[0]}: add it, or use ReinforcementModule."
        )
    module_settings: dict[str, Any] = cast(Any, pl_module).settings()
    return data.settings() | module_settings


def _cosines(new: Tensor, old: Tensor, widths: list[int]) -> Tensor:
    """Return cosines [rows, teachers]; embeddings stored in bfloat16 are not exactly of unit length."""
    pairs = zip(new.float().split(widths, 1), old.float().split(widths, 1), strict=True)
    return torch.stack([torch.cosine_similarity(one, other, dim=1) for one, other in pairs], 1)
