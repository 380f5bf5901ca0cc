"""Stopping a training on a signal: write a checkpoint, then requeue or exit."""

import os
import re
import signal
import subprocess
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from ..common.private_api import validates_next
from .distributed.collectives import LateMax, all_reduce_max
from .modules import accumulates, is_last_batch

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
REQUEUE = signal.SIGUSR1


class StopOnSignal(Callback):
    """End a training on SIGUSR1, SIGTERM or SIGINT (Ctrl-C), with a checkpoint to resume from.

    A signal only sets a flag. After the next optimizer step or validation batch all processes agree on it, whichever of
    them received the signal, write one checkpoint, and exit with the status 128 + the signal's number: 138 after
    SIGUSR1, 143 after SIGTERM, 130 after SIGINT. If processes communicate over GPUs this is one step or batch later,
    since the host does not wait for their answers. Under SLURM, SIGUSR1 (`#SBATCH --signal=SIGUSR1@90`) first requeues
    the job. A second signal ends the process at once, as without a handler; except SIGTERM under SLURM, which sends
    SIGTERM twice and kills in any case.

    SIGTERM ends an evaluation or a prediction, which has nothing to save, at once, with the status 143. (Lightning
    2.6.6 notes the signal and goes on to the end.)

    The resumed run ends like the uninterrupted run under three conditions: the state of the method is in the module, as
    with `EMACallback` and `QueueCallback`; random draws follow from counters (`StepSeedCallback`); and the loader
    resumes at the next batch, as those of this package's datamodules do. A plain `DataLoader` restarts its epoch, in
    another order if it shuffles, so the run sees some samples twice.

    A run that resumes from a checkpoint of the middle of a validation restarts that validation, so that its metrics are
    those of the whole. A validation between two accumulated batches, and their step, are completed first: no checkpoint
    holds gradients.

    Lightning's own handlers are replaced while the training runs. (2.6.6: the handler of SIGUSR1 saves from within the
    signal handler, wherever the program is, and continues training; the handler of SIGTERM saves nothing, and enters a
    collective operation from within the handler.)

    The callback moves itself to the end of the Trainer's callbacks, so that the others have finished the batch.

    Args:
        dirpath: Folder of the checkpoint; by default as in `save_resumable`.
        filename: Name of the checkpoint without ".ckpt"; an existing one is replaced.
        requeue: Whether SIGUSR1 requeues a SLURM job.
    """

    def __init__(self, dirpath: str | None = None, filename: str = "last", requeue: bool = True) -> None:
        super().__init__()
        self.dirpath = dirpath
        self.filename = filename
        self.requeue = requeue
        self._received: int | None = None
        self._agreement = LateMax()
        self._handlers: dict[int, Any] = {}
        self._validation_is_even = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        act_last(trainer, self)

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Accumulated gradients are in no checkpoint.
        if not accumulates(trainer) and not validates_next(trainer):
            self._stop_if_asked(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._end_at_once()
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            batches = torch.tensor([sum(trainer.num_val_batches), -sum(trainer.num_val_batches)])
            most, least = all_reduce_max(batches).tolist()
            self._validation_is_even = most == -least  # otherwise processes would wait for others that are done

    @override
    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if _is_between_steps(trainer) and self._validation_is_even:
            self._stop_if_asked(trainer, in_validation=True)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._stop_listening()
        if _is_between_steps(trainer):
            self._stop_if_asked(trainer)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_at_once()

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_listening()

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_at_once()

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_listening()

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        validate_after_resume(trainer, checkpoint)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_listening()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop_listening()

    def _listen(self) -> None:
        if self._handlers or threading.current_thread() is not threading.main_thread():
            return
        self._received = None
        self._agreement = LateMax()
        self._handlers = {number: signal.signal(number, self._receive) for number in SIGNALS}

    def _end_at_once(self) -> None:
        if not self._handlers and threading.current_thread() is threading.main_thread():
            self._handlers = {signal.SIGTERM: signal.signal(signal.SIGTERM, _exit)}

    def _stop_listening(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and self._received is not None and SLURMEnvironment.detect():
            return  # SLURM sends it twice, through slurmstepd and srun, and kills processes after KillWait seconds
        if self._received is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._received = number

    def _stop_if_asked(self, trainer: Trainer, in_validation: bool = False) -> None:
        # Ctrl-C in a terminal, or `srun`, reaches all processes, but not at the same step; `kill` reaches one.
        number = self._agreement.exchange(self._received or 0)
        if not number:
            return
        if in_validation:
            _restart_validation(trainer)
        path = save_resumable(trainer, self.dirpath, self.filename)
        name = signal.Signals(number).name
        rank_zero_info(f"{name}: wrote {path} after step {trainer.global_step}; the training resumes from there.")
        if number == REQUEUE and self.requeue and SLURMEnvironment.detect():
            # SLURM then sends SIGTERM to all processes, also to loader workers, which torch would report as a failure.
            self._handlers = {}
            for each, handler in ((signal.SIGTERM, signal.SIG_IGN), (signal.SIGCHLD, signal.SIG_DFL)):
                signal.signal(each, handler)
            trainer.strategy.barrier("deaf")
            if trainer.is_global_zero:
                _requeue()
            trainer.strategy.barrier("requeued")
        raise SystemExit(128 + number)


def act_last(trainer: Trainer, callback: Callback) -> None:
    """Move a callback to the end of the Trainer's, also behind those that write checkpoints; call it in `setup`.

    Lightning keeps only a `Checkpoint` at the end, and a subclass of it switches Lightning's default checkpoint off.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    # A new list, since Lightning is iterating over the old one.
    trainer.callbacks = [*(other for other in callbacks if other is not callback), callback]  # type: ignore[attr-defined]


def save_resumable(trainer: Trainer, dirpath: str | None = None, filename: str = "last") -> Path:
    """Write a checkpoint to resume from, and wait until it is written; every process must call this.

    Args:
        trainer: Trainer of the run.
        dirpath: Folder; by default that of the Trainer's first checkpoint callback that has one, or `checkpoints` in
            its `default_root_dir`.
        filename: Name without ".ckpt".

    Returns:
        The file or folder.
    """
    if dirpath is None:
        others = (getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks)
        dirpath = next((other for other in others if other), None)
    path = Path(dirpath or Path(trainer.default_root_dir, "checkpoints")) / f"{filename}.ckpt"
    trainer.save_checkpoint(path, weights_only=False)
    checkpoint_io: Any = trainer.strategy.checkpoint_io
    if getattr(checkpoint_io, "asynchronous", False):
        checkpoint_io.wait()
        trainer.strategy.barrier("written")  # a process that ends may end the one that writes
    return path


def validate_after_resume(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Mark in a checkpoint that is written at the end of a batch that the validation after the batch has begun.

    Lightning (2.6.6) skips that validation when a run resumes from such a checkpoint, as `every_n_train_steps` writes
    them. For `on_save_checkpoint` of a callback; calling this twice is harmless.
    """
    if trainer.state.fn != "fit" or trainer.sanity_checking:
        return
    _complete_epoch_after_resume(trainer, checkpoint["loops"]["fit_loop"])
    begun = trainer.fit_loop.epoch_loop.batch_progress.total
    if begun.processed != begun.completed + 1 or not validates_next(trainer):  # type: ignore[attr-defined]
        return
    loops = checkpoint["loops"]["fit_loop"]
    for counts in (loops["epoch_loop.batch_progress"][kind] for kind in ("total", "current")):
        counts["completed"] = counts["processed"]
    validation = loops["epoch_loop.val_loop.batch_progress"]
    for counts, before in ((validation["current"], 0), (validation["total"], validation["total"]["completed"])):
        counts.update(ready=before + 1, started=before + 1, processed=before, completed=before)
    validation["is_last_batch"] = False


def _complete_epoch_after_resume(trainer: Trainer, loops: dict[str, Any]) -> None:
    """Mark in a checkpoint of the end of an epoch without validation that the epoch's last batch has just ended.

    `loops`, the progress of the loops in the checkpoint, is changed in place. Lightning (2.6.6) trains one batch too
    many in that epoch when a run with `max_steps` resumes from it.
    """
    epochs = trainer.fit_loop.epoch_progress.state_dict()["total"]
    if epochs["processed"] != epochs["completed"] + 1 or not is_last_batch(trainer) or validates_next(trainer):
        return
    for kind in ("total", "current"):
        batches = loops["epoch_loop.batch_progress"][kind]
        batches["completed"] = batches["processed"] - 1
        loops["epoch_progress"][kind]["processed"] = loops["epoch_progress"][kind]["completed"]


def _is_between_steps(trainer: Trainer) -> bool:
    """Return whether a validation during training runs without accumulated gradients, which are in no checkpoint."""
    training = trainer.state.fn == "fit" and not trainer.sanity_checking
    return training and not accumulates(trainer)


def _restart_validation(trainer: Trainer) -> None:
    """Set the progress of the validation to its beginning: the first batch has begun and none has ended.

    Lightning would otherwise resume with the next batch, and the metrics of the batches before it would be lost.
    """
    progress: Any = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    for counts, before in ((progress.current, 0), (progress.total, progress.total.ready - progress.current.ready)):
        counts.ready = counts.started = before + 1
        counts.processed = counts.completed = before
    progress.is_last_batch = False


def _requeue() -> None:
    """Requeue the SLURM job, or this task of a job array."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    job = os.environ["SLURM_JOB_ID"] if task is None else f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}"
    if not re.fullmatch(r"[0-9]+(_[0-9]+)?", job):
        rank_zero_warn(f"Expected a number as SLURM job id, got {job!r}: the job is not requeued.")
        return
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
        failure = " ".join(done.stderr.split()) or f"exit status {done.returncode}" if done.returncode else None
    except OSError as error:  # SLURM's programs are not installed in a container
        failure = str(error)
    if failure is None:
        rank_zero_info(f"Requeued the SLURM job {job}.")
    else:
        rank_zero_warn(
            f"The SLURM job {job} could not be requeued ({failure}): submit it again with --ckpt_path and the "
            "checkpoint above."
        )


def _exit(number: int, frame: FrameType | None) -> None:
    """End the program in order, so that loader workers and temporary files go; a second signal ends it as it is."""
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)
