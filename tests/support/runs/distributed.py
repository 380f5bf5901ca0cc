"""Functions and Lightning fits on several processes of this machine, over gloo.

    def work(x):                       # at module level, so that the other processes can import it
        return gather(x + rank())

    first, second = run_distributed(work, torch.zeros(2))

The processes are forked from the server of `support.runs.fork_server`, so one call costs a fraction of a second after
the first. Their current folder, environment and test helpers are those of the caller.
"""

import functools
import importlib.util
import io
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.runs.fork_server import ONE_THREAD, enter, fork_context


class WorkerError(RuntimeError):
    """Errors of the other processes: their tracebacks by rank."""


def run_distributed(
    fn: Callable[..., Any], *args: Any, processes: int = 2, timeout: float = 120.0, **kwargs: Any
) -> list[Any]:
    """Call `fn(*args, **kwargs)` in several processes that form one gloo process group.

    Args:
        fn: A module-level function of an importable module or of a test file.
        *args: Arguments, the same for every rank; sent by pickle.
        processes: How many.
        timeout: Seconds for all of them together, after which they are killed; a collective that waits for a rank
            that does not come gives up a little earlier, and then the traceback says where.
        **kwargs: Keyword arguments, likewise.

    Returns:
        What each rank returned, rank 0 first: tensors and plain data.

    Raises:
        WorkerError: If a rank raised or died; the message holds every rank's traceback.
        TimeoutError: If they did not finish in time.
    """
    context = fork_context()
    with tempfile.TemporaryDirectory(prefix="vlightning-ranks-") as folder:
        job = _Job(fn, args, kwargs, processes, f"file://{folder}/store", max(timeout - 5.0, 1.0))
        workers, pipes = [], []
        for rank in range(processes):
            ours, theirs = context.Pipe(duplex=False)
            worker = context.Process(target=_work, args=(job, rank, theirs), daemon=True)
            worker.start()
            theirs.close()
            workers.append(worker)
            pipes.append(ours)
        try:
            answers = _collect(pipes, time.monotonic() + timeout)
        finally:
            for worker in workers:
                worker.join(0.5)
                worker.kill()
                worker.join()
    failed = [f"--- rank {rank} ---\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
    if failed:
        raise WorkerError("\n".join(failed))
    return [torch.load(io.BytesIO(result), weights_only=True) for _, result in answers]


def run_ddp_fit(
    make: Callable[..., tuple[Any, Any]],
    trainer_kwargs: dict[str, Any] | None = None,
    *,
    make_args: tuple[Any, ...] = (),
    ddp_kwargs: dict[str, Any] | None = None,
    collect: Callable[..., Any] | None = None,
    ckpt_path: str | None = None,
    processes: int = 2,
    timeout: float = 120.0,
) -> list[Any]:
    """Fits a LightningModule under DDP over gloo on CPU, one process a rank.

    Args:
        make: Module-level function that returns (module, train loader or datamodule); called on every rank with
            `make_args`, after the process group exists.
        trainer_kwargs: For `Trainer`, over quiet defaults: CPU, no logger, no checkpoints, no progress bar. Must
            be picklable.
        make_args: Arguments of `make`.
        ddp_kwargs: For `DDPStrategy`, such as `{"broadcast_buffers": False}`.
        collect: Module-level function of the fitted Trainer whose result is returned instead of the default.
        ckpt_path: Checkpoint to resume from.
        processes: How many ranks.
        timeout: Seconds for everything.

    Returns:
        Per rank what `collect` returned, or `{"state_dict", "global_step", "metrics"}`.
    """
    return run_distributed(
        _fit_one_rank,
        make,
        make_args,
        trainer_kwargs or {},
        "ddp",
        ddp_kwargs or {},
        collect,
        ckpt_path,
        processes=processes,
        timeout=timeout,
    )


def run_sharded_fit(
    make: Callable[..., tuple[Any, Any]],
    trainer_kwargs: dict[str, Any] | None = None,
    *,
    make_args: tuple[Any, ...] = (),
    strategy_kwargs: dict[str, Any] | None = None,
    collect: Callable[..., Any] | None = None,
    ckpt_path: str | None = None,
    processes: int = 2,
    timeout: float = 120.0,
) -> list[Any]:
    """The same under `ShardedStrategy`; the default result's `state_dict` holds whole tensors."""
    return run_distributed(
        _fit_one_rank,
        make,
        make_args,
        trainer_kwargs or {},
        "sharded",
        strategy_kwargs or {},
        collect,
        ckpt_path,
        processes=processes,
        timeout=timeout,
    )


def run_both_fits(
    make: Callable[..., tuple[Any, Any]],
    trainer_kwargs: dict[str, dict[str, Any]],
    *,
    make_args: tuple[Any, ...] = (),
) -> dict[str, Any]:
    """Fit under DDP and then sharded, in the same two processes.

    Args:
        make: As in `run_ddp_fit`; called for each fit.
        trainer_kwargs: By strategy, "ddp" and "sharded".
        make_args: Arguments of `make`.

    Returns:
        By strategy the default result of rank 0.
    """
    found: dict[str, Any] = run_distributed(_fit_both, make, make_args, trainer_kwargs)[0]
    return found


def _fit_both(
    make: Callable[..., tuple[Any, Any]], make_args: tuple[Any, ...], trainer_kwargs: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    return {
        kind: _fit_one_rank(make, make_args, options, kind, {}, None, None) for kind, options in trainer_kwargs.items()
    }


def whole_state(module: Any) -> dict[str, torch.Tensor]:
    """A module's state, with sharded tensors put together; every rank must call it."""
    state = module.state_dict()
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()
        for name, tensor in state.items()
    }


def rank_trainer(kind: str, strategy_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """A quiet Trainer of this rank under `ddp` or `sharded`, in the process group that exists already."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    from vlightning.callbacks import ShardedStrategy

    # With LOCAL_RANK set Lightning launches nothing itself, and it takes over the process group that exists already:
    # no port has to be found.
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    os.environ["NODE_RANK"] = "0"
    strategy = {"ddp": DDPStrategy, "sharded": ShardedStrategy}[kind](
        process_group_backend="gloo", **(strategy_kwargs or {})
    )
    strategy.cluster_environment = LightningEnvironment()
    defaults = {
        "accelerator": "cpu",
        "devices": dist.get_world_size(),
        "strategy": strategy,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**(defaults | kwargs))


def _fit_one_rank(
    make: Callable[..., tuple[Any, Any]],
    make_args: tuple[Any, ...],
    trainer_kwargs: dict[str, Any],
    kind: str,
    strategy_kwargs: dict[str, Any],
    collect: Callable[..., Any] | None,
    ckpt_path: str | None,
) -> Any:
    module, data = make(*make_args)
    trainer = rank_trainer(kind, strategy_kwargs, **trainer_kwargs)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    if collect is not None:
        return collect(trainer)
    return {
        "state_dict": whole_state(module),
        "global_step": trainer.global_step,
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
    }


class _Job:
    """A call that can be pickled although its function stands in a test file that no import statement finds."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        processes: int,
        store: str,
        timeout: float,
    ) -> None:
        self.call = pickle.dumps((fn, args, kwargs))
        self.processes, self.store, self.timeout = processes, store, timeout
        self.environment = dict(os.environ) | ONE_THREAD
        self.path, self.folder = list(sys.path), os.getcwd()
        self.modules = {
            name: str(module.__file__)
            for name, module in list(sys.modules.items())
            if _is_test_file(getattr(module, "__file__", None))
        }

    def run(self, rank: int) -> bytes:
        """Runs the call as one rank and returns its result as torch.save writes it."""
        ranks = {"WORLD_SIZE": str(self.processes), "RANK": str(rank)}
        enter(self.folder, self.environment | ranks, self.path)
        torch.set_num_threads(1)
        sys.meta_path.append(_TestFileFinder(self.modules))
        fn, args, kwargs = pickle.loads(self.call)
        dist.init_process_group(
            "gloo",
            init_method=self.store,
            rank=rank,
            world_size=self.processes,
            timeout=timedelta(seconds=self.timeout),
        )
        result = io.BytesIO()
        torch.save(fn(*args, **kwargs), result)
        dist.barrier()  # a rank that leaves early would look like a failure to those that still communicate
        dist.destroy_process_group()
        return result.getvalue()


class _TestFileFinder:
    """Finds the modules that pytest made of test files, under the names that it gave them."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        file = self.files.get(name)
        if file is None:
            packages = {known.rpartition(".")[0] for known in self.files}
            if not any(package == name or package.startswith(name + ".") for package in packages):
                return None
            return importlib.util.spec_from_loader(name, loader=None, is_package=True)
        return importlib.util.spec_from_file_location(name, file)


@functools.cache
def _is_test_file(file: str | None) -> bool:
    return file is not None and Path(__file__).resolve().parents[2] in Path(file).resolve().parents


def _work(job: _Job, rank: int, pipe: Connection) -> None:
    try:
        answer: tuple[bool, Any] = (True, job.run(rank))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send(answer)
    pipe.close()
    os._exit(0)  # no exit handlers: those of a broken process group wait for the others


def _collect(pipes: list[Connection], deadline: float) -> list[tuple[bool, Any]]:
    """Wait for every rank's answer; after a failure wait a moment for errors of the others."""
    answers: dict[int, tuple[bool, Any]] = {}
    while len(answers) < len(pipes):
        open_pipes = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers}
        ready = wait(list(open_pipes), timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            break
        for pipe in ready:
            rank = open_pipes[pipe]  # type: ignore[index]
            try:
                answers[rank] = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                answers[rank] = (False, "The process died without a word.")
            if not answers[rank][0]:
                deadline = min(deadline, time.monotonic() + 3.0)
    missing = [rank for rank in range(len(pipes)) if rank not in answers]
    if missing and all(ok for ok, _ in answers.values()):
        raise TimeoutError(f"Ranks {missing} did not answer in time.")
    return [answers.get(rank, (False, "Killed: it waited for a rank that had failed.")) for rank in range(len(pipes))]
