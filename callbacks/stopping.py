"""Stopping a training in an orderly way when a signal asks for it: checkpoint first, then requeue or exit."""

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

from .distributed.collectives import LateMax, all_reduce_max

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
REQUEUE = signal.SIGUSR1


class StopOnSignal(Callback):
    """Ends a training that is sent SIGUSR1, SIGTERM or SIGINT (Ctrl-C) with a checkpoint that it can go on from.

    A signal only sets a flag. After the next optimizer step, or validation batch, all processes agree on it, whichever
    of them was sent the signal, write one checkpoint, and leave with the exit status 128 + the signal's number: 138
    after SIGUSR1, 143 after SIGTERM, 130 after SIGINT. Where processes talk over GPUs it is one step or batch later,
    since the host does not wait for their answers. Under SLURM, SIGUSR1 (`#SBATCH --signal=SIGUSR1@90`) puts the job
    back into the queue first. The second signal ends the process at once, as if there were no handler; but not SIGTERM
    under SLURM, which sends that twice and kills in any case.

    The run that goes on ends as one that was never stopped if three things are so, none of them this callback's work:
    what the method changes is in the module's state, as with `EMACallback` and `QueueCallback`; its draws follow from
    counters (`StepSeedCallback`); and its loader goes on with the next batch, as those of this package's datamodules
    do. A plain `DataLoader` begins its epoch anew, in another order if it shuffles, so the run sees some samples twice.

    A checkpoint from the middle of a validation begins that validation anew when the run goes on, so that its numbers
    are those of the whole. A validation between two accumulated batches is run to its end, and so is their step: no
    checkpoint holds gradients.

    Lightning's own handlers are replaced for as long as the training runs. (2.6.6: the one of SIGUSR1 saves from
    within the signal handler, wherever the program is, and trains on; that of SIGTERM saves nothing, and enters a
    collective operation from within the handler.)

    It moves itself to the end of the Trainer's callbacks, so that the others have done their part of a batch.

    Args:
        dirpath: Folder of the checkpoint; by default as in `save_resumable`.
        filename: The checkpoint's name without ".ckpt"; one that is there is replaced.
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
        # Gradients that only wait for more are in no checkpoint.
        if not trainer.fit_loop._should_accumulate() and not _validates_next(trainer):
            self._stop_if_asked(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            batches = torch.tensor([sum(trainer.num_val_batches), -sum(trainer.num_val_batches)])
            most, least = all_reduce_max(batches).tolist()
            self._validation_is_even = most == -least  # else processes would wait for others that are done

    @override
    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if _is_between_steps(trainer) and self._validation_is_even:
            self._stop_if_asked(trainer, in_validation=True)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _is_between_steps(trainer):
            self._stop_if_asked(trainer)

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
        self._received, self._agreement = None, LateMax()
        self._handlers = {number: signal.signal(number, self._receive) for number in SIGNALS}

    def _stop_listening(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and self._received is not None and SLURMEnvironment.detect():
            return  # SLURM sends it twice, through slurmstepd and srun, and kills what does not end in KillWait seconds
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
            _begin_validation_anew(trainer)
        path = save_resumable(trainer, self.dirpath, self.filename)
        name = signal.Signals(number).name
        rank_zero_info(f"{name}: wrote {path} after step {trainer.global_step}; the training goes on from there.")
        if number == REQUEUE and self.requeue and SLURMEnvironment.detect():
            # SLURM answers with SIGTERM to all processes, loader workers too, which torch would take for a failure.
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

    Lightning has a place at the end for its `Checkpoint` only, and whoever is one switches Lightning's default off.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    # Another list: Lightning is going through the old one.
    trainer.callbacks = [*(other for other in callbacks if other is not callback), callback]  # type: ignore[attr-defined]


def save_resumable(trainer: Trainer, dirpath: str | None = None, filename: str = "last") -> Path:
    """Write a checkpoint that a training goes on from; every process must call it.

    Args:
        trainer: Whose training it is.
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
    return path


def validate_after_resume(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Let a checkpoint that is written when a batch ends say that the validation after it has been begun.

    Lightning (2.6.6) leaves out that validation when a run goes on from such a checkpoint, as `every_n_train_steps`
    writes them. For `on_save_checkpoint` of a callback; calling it twice does no harm.
    """
    if trainer.state.fn != "fit" or trainer.sanity_checking:
        return
    begun = trainer.fit_loop.epoch_loop.batch_progress.total
    if begun.processed != begun.completed + 1 or not _validates_next(trainer):  # type: ignore[attr-defined]
        return
    loops = checkpoint["loops"]["fit_loop"]
    for counts in (loops["epoch_loop.batch_progress"][kind] for kind in ("total", "current")):
        counts["completed"] = counts["processed"]
    validation = loops["epoch_loop.val_loop.batch_progress"]
    for counts, before in ((validation["current"], 0), (validation["total"], validation["total"]["completed"])):
        counts.update(ready=before + 1, started=before + 1, processed=before, completed=before)
    validation["is_last_batch"] = False


def _is_between_steps(trainer: Trainer) -> bool:
    """Whether a validation of a training runs while no gradients wait for more, which are in no checkpoint."""
    training = trainer.state.fn == "fit" and not trainer.sanity_checking
    return training and not trainer.fit_loop._should_accumulate()


def _validates_next(trainer: Trainer) -> bool:
    """Whether a validation follows the batch that ends now: the run then stops in its first batch."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    return trainer.enable_validation and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def _begin_validation_anew(trainer: Trainer) -> None:
    """Let the checkpoint say that the first batch of the validation has been begun, and none has ended.

    Lightning otherwise goes on with the next batch, and the metrics of the batches before it are lost.
    """
    progress: Any = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    for counts, before in ((progress.current, 0), (progress.total, progress.total.ready - progress.current.ready)):
        counts.ready = counts.started = before + 1
        counts.processed = counts.completed = before
    progress.is_last_batch = False


def _requeue() -> None:
    """Puts the SLURM job, or this task of an array, back into the queue."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    job = os.environ["SLURM_JOB_ID"] if task is None else f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}"
    if not re.fullmatch(r"[0-9]+(_[0-9]+)?", job):
        rank_zero_warn(f"Found the SLURM job id {job!r}, expected a number: the job is not requeued.")
        return
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
        failure = " ".join(done.stderr.split()) or f"exit status {done.returncode}" if done.returncode else None
    except OSError as error:  # a container without SLURM's programs
        failure = str(error)
    if failure is None:
        rank_zero_info(f"Requeued the SLURM job {job}.")
    else:
        rank_zero_warn(
            f"The SLURM job {job} could not be requeued ({failure}): submit it again with --ckpt_path and the "
            "checkpoint above."
        )
