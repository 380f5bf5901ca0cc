"""FSDP2 over all processes, with checkpoints that are written atomically."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy, StrategyRegistry
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from ...common.errors import UserError
from ...common.files import WriteError, clear_leftovers, remove, swap_in, unfinished_beside, writing
from ...common.names import did_you_mean
from ...common.private_api import ignored_by_ddp
from ..checkpoints.checkpoint_io import AtomicCheckpointIO, reading, write_file
from ..checkpoints.sharded_checkpoint import (
    METADATA,
    local_shard,
    map_values,
    read_checkpoint_folder,
    shard_file,
    split_checkpoint,
    whole_checkpoint,
)
from ..modules import is_batch_norm
from .collectives import broadcast_all

FloatType = Literal["float32", "bfloat16"]


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's `ModelParallelStrategy` for modules that shard themselves in `configure_model` with FSDP2.

    Differences:

    - All processes, on all nodes, form `device_mesh["data_parallel"]`. (Lightning's own default has the size of the
      number of nodes, so that on one node nothing is sharded.)
    - A checkpoint is written beside its target and swapped in when it is complete, so that a failure leaves the old one
      unchanged. It holds tensors and plain data only. Any number of processes can load it (a single one, or DDP's,
      through `AtomicCheckpointIO`), and this strategy can load the file of a single process.
    - Weights are loaded after `on_load_checkpoint`, as under other strategies.
    - Running statistics of BatchNorm are rank 0's in all processes at the beginning of each step and of each
      evaluation, as under DDP, and as in a resumed run.
    - Evaluation runs under `torch.no_grad`: parameters gathered under `torch.inference_mode` cannot be trained later.

    Args:
        param_dtype: Type in which parameters of networks are gathered; None keeps their own. "bfloat16" halves the
            traffic and is for the precision `bf16-mixed`, which rounds most parameters anyway. Types in optimizer and
            checkpoint do not change, nor those of norms and of parameters of the module itself, such as a temperature.
        reduce_dtype: Type in which gradients of networks are summed over the processes; None takes the gathered type.
        activation_checkpointing: Whether the blocks of trained networks recompute their activations in the backward
            pass instead of keeping them.
        save_distributed_checkpoint: Whether a checkpoint is a folder into which every process writes its part, on a
            shared file system; otherwise rank 0 gathers everything and writes one file.
        process_group_backend: As in Lightning; None takes NCCL for GPUs and gloo for CPUs.
        timeout: Time limit of the collective operations.
    """

    def __init__(
        self,
        param_dtype: FloatType | None = None,
        reduce_dtype: FloatType | None = None,
        activation_checkpointing: bool = False,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.mixed_precision = MixedPrecisionPolicy(
            param_dtype=None if param_dtype is None else getattr(torch, param_dtype),
            reduce_dtype=None if reduce_dtype is None else getattr(torch, reduce_dtype),
            cast_forward_inputs=False,  # autocast casts for each operation
        )
        self.activation_checkpointing = activation_checkpointing
        self.save_distributed_checkpoint = save_distributed_checkpoint

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step with rank 0's statistics of BatchNorm, as DDP does: a checkpoint holds only these."""
        broadcast_all(self._statistics())
        return super().training_step(*args, **kwargs)

    @override
    def on_validation_start(self) -> None:
        broadcast_all(self._statistics())

    @override
    def on_test_start(self) -> None:
        broadcast_all(self._statistics())

    @override
    def on_predict_start(self) -> None:
        broadcast_all(self._statistics())

    def _statistics(self) -> list[Tensor]:
        """Return the buffers of norms, without those excluded from DDP's broadcast, such as a frozen teacher's."""
        module = self.lightning_module
        assert module is not None
        norms = {name for name, submodule in module.named_modules() if is_batch_norm(submodule)}
        left_out = ignored_by_ddp(module)
        return [
            buffer
            for name, buffer in module.named_buffers()
            if name.rpartition(".")[0] in norms and name not in left_out
        ]

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def setup_environment(self) -> None:
        if type(self.checkpoint_io) is TorchCheckpointIO:  # Lightning's default
            self.checkpoint_io = AtomicCheckpointIO()
        if self.save_distributed_checkpoint and getattr(self.checkpoint_io, "asynchronous", False):
            raise UserError(
                "Expected AtomicCheckpointIO without asynchronous for checkpoints that are folders, whose completion "
                "all processes agree on, got asynchronous: leave it out, or set save_distributed_checkpoint to false "
                "for one file."
            )
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    @override
    def setup(self, trainer: Trainer) -> None:
        """Set up as Lightning does.

        Raises:
            UserError: If the module does not shard itself, or parameters are gathered as bfloat16 without a precision
                that casts their inputs.
        """
        if self.mixed_precision.param_dtype == torch.bfloat16 and trainer.precision != "bf16-mixed":
            raise UserError(
                f"Expected the precision 'bf16-mixed' with param_dtype 'bfloat16', got {trainer.precision!r}, which "
                "does not cast the inputs of such parameters: set trainer.precision, or leave param_dtype out."
            )
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        overridden = is_overridden("configure_model", self.lightning_module)
        if overridden:  # Lightning would raise an error of its own
            super().setup(trainer)
        assert self.model is not None
        if not overridden or not any(isinstance(parameter, DTensor) for parameter in self.model.parameters()):
            raise UserError(
                f"Expected a configure_model() that shards parameters for {type(self).__name__}, got none sharded by "
                f"{type(self.lightning_module).__name__}: call torch's fully_shard there, or choose another strategy."
            )

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return this process's part of the state, as DTensors."""
        assert self.lightning_module is not None
        state = self.lightning_module.state_dict(keep_vars=True)  # so that tied parameters are one object
        detached: dict[int, Any] = {}
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = detached.setdefault(id(value), value.detach())
        return state

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return this process's part of the state, as DTensors, parameters by number as in one process."""
        return ParallelStrategy.optimizer_state(self, optimizer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint. Every process must call it; if one fails, all raise.

        Args:
            checkpoint: What to save.
            filepath: Path of the folder or file; a folder must be local.
            storage_options: Passed on where one file is written.

        Raises:
            UserError: If a folder is to be written to a remote path.
            WriteError: If it cannot be written; the target then stays as it was.
        """
        path = str(self.broadcast(filepath))
        if not self.save_distributed_checkpoint:
            whole = whole_checkpoint(checkpoint, keep=self.is_global_zero)
            with self._all_or_none():
                if self.is_global_zero:
                    self.checkpoint_io.save_checkpoint(whole, path, storage_options)
            return
        filesystem, local_path = url_to_fs(path)
        if storage_options is not None or not isinstance(filesystem, LocalFileSystem):
            raise UserError(
                f"Expected a local folder without storage options for a sharded checkpoint, got {path!r}: give a local "
                "path, or set save_distributed_checkpoint=False for one file."
            )
        self._save_folder(checkpoint, Path(local_path))

    def _save_folder(self, checkpoint: dict[str, Any], target: Path) -> None:
        meta, pieces = split_checkpoint(checkpoint)
        staged = Path(self.broadcast(str(unfinished_beside(target))))
        try:
            with self._all_or_none(), writing(target):
                if self.is_global_zero:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    clear_leftovers(target.parent)
                    staged.mkdir()
            with self._all_or_none(), writing(target):
                write_file(pieces, staged / shard_file(self.global_rank))
            with self._all_or_none(), writing(target):
                if self.is_global_zero:
                    write_file(meta, staged / METADATA)
                    swap_in(staged, target)
        finally:
            if self.is_global_zero:
                remove(staged)

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Raise an error of one process in all, since the others would wait for that process."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        errors: list[str | None] = [None] * self.world_size
        dist.all_gather_object(errors, None if error is None else str(error))
        if error is not None:
            raise error
        for rank, text in enumerate(errors):
            if text is not None:
                raise WriteError(f"Process {rank} failed, so no checkpoint was written: {text}")

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder of any number of processes, or the file of one; each process takes its part.

        Args:
            checkpoint_path: Path of the folder or file.
            weights_only: False loads arbitrary objects, for files that are trusted; None means True.

        Raises:
            FileNotFoundError: If the path does not exist.
            CheckpointError: If it is not complete, or holds more than plain data.
        """
        path = str(self.broadcast(checkpoint_path))
        filesystem, local_path = url_to_fs(path)
        safe = weights_only is not False
        likes = self._sharded_values()

        def take_shard(path: str, value: Any) -> Any:
            # Each weight has a path; the optimizer's state of a weight is one level below the weight's number.
            like = likes.get(path, likes.get(path.rpartition("/")[0]))
            if like is None or not isinstance(value, Tensor) or value.shape != like.shape:
                return value.clone() if isinstance(value, Tensor) else value  # out of the file
            return local_shard(value, like)

        with reading(path):
            if Path(local_path).is_dir():
                return read_checkpoint_folder(Path(local_path), safe, take_shard)
            if isinstance(filesystem, LocalFileSystem):
                # Mapped into memory: each process reads what it keeps.
                whole = torch.load(local_path, map_location="cpu", mmap=True, weights_only=safe)
            else:
                whole = self.checkpoint_io.load_checkpoint(path, weights_only=safe)
            loaded: dict[str, Any] = map_values(take_shard, whole)
            return loaded

    def _sharded_values(self) -> dict[str, DTensor]:
        """Parameters by their paths in a checkpoint, and again where an optimizer's state for them begins."""
        assert self.lightning_module is not None
        likes = {f"state_dict/{name}": value for name, value in self.lightning_module.state_dict().items()}
        for number, optimizer in enumerate(self.optimizers):
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            likes |= {f"optimizer_states/{number}/state/{index}": weight for index, weight in enumerate(weights)}
        return {path: value for path, value in likes.items() if isinstance(value, DTensor)}

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        ParallelStrategy.load_model_state_dict(self, checkpoint, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        ParallelStrategy.load_optimizer_state_dict(self, checkpoint)


def check_strategy(strategy: Any) -> None:
    """Check the Trainer's `strategy` argument, a name or a class with its arguments.

    Raises:
        UserError: For FSDP1, which runs on CUDA only and wraps the module as a whole, and for an unknown name.
    """
    name = str(strategy.get("class_path", "") if hasattr(strategy, "get") else strategy)
    if (last := name.rpartition(".")[2]).lower().removeprefix("ray").startswith("fsdp"):
        raise UserError(
            f"Expected a strategy that this project supports, got FSDP1 ({last}), which needs CUDA and wraps the "
            "module as a whole: use FSDP2 with --config configs/strategy/fsdp.yaml (ModelParallelStrategy)."
        )
    strategies = ["auto", *StrategyRegistry.available_strategies()]
    if isinstance(strategy, str) and strategy not in strategies:
        raise UserError(f"Expected a strategy of Lightning, got {strategy!r}: {did_you_mean(strategy, strategies)}")
