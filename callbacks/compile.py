"""Compilation of a module's networks, block by block or tower by tower."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.compiler import list_backends
from typing_extensions import override

from ..common.errors import UserError
from ..common.names import did_you_mean
from .modules import blocks_of

CompileMode = Literal["default", "towers", "max-autotune"]
COMPILE_HELP = (
    "Compile the networks before training: default, block by block; towers, each tower as one program; or "
    "max-autotune, blocks with measured kernels."
)


class CompileCallback(Callback):
    """Compile the blocks of all networks with `torch.compile` before training.

    Blocks of equal structure share one compiled program, so that compilation takes as long for 12 layers as for one.
    Each block is compiled in place: names in the state dict, moving averages, sharding and checkpoints stay as they
    are. A sequence of text lengths compiles a block twice: for the first length, and for any length; with
    `data.pad_to_multiple_of` equal to `data.max_tokens` there is one length.

    `towers` compiles each tower as one program instead: its steps are faster, its compilation takes longer, about in
    proportion to the layers, and it does not work under FSDP2, which gathers weights block by block.

    The argument `compile` of the command line adds it (`--compile default`).

    The networks are `module.sharded_networks()`, which every method of this package has, otherwise the module's
    children, of which one without blocks is compiled as a whole. A network may name other parts in `compiled_parts()`.

    Args:
        mode: "default", blocks; "towers", the outermost parts of the networks that have a forward pass and contain
            blocks; "max-autotune", blocks with measured kernels, which takes minutes. It captures no CUDA graphs, whose
            memory the next block would overwrite.
        backend: backend of `torch.compile`, for tests and other devices.
        fullgraph: whether an operation that cannot be compiled raises an error instead of dividing the program.

    Raises:
        UserError: If there is no such backend.
    """

    def __init__(self, mode: CompileMode = "default", backend: str = "inductor", fullgraph: bool = False) -> None:
        super().__init__()
        backends = list_backends(exclude_tags=())
        if backend not in backends:
            raise UserError(
                f"Expected a backend of torch.compile for CompileCallback, got {backend!r}: "
                f"{did_you_mean(backend, backends)}"
            )
        self.mode = mode
        self.backend = backend
        self.fullgraph = fullgraph

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.mode == "towers" and pl_module.device_mesh is not None:
            raise UserError(
                "Expected networks that are not sharded for CompileCallback's mode 'towers', got FSDP2, which gathers "
                "the weights of one block at a time: set compile: default."
            )
        options: dict[str, Any] = {"backend": self.backend, "fullgraph": self.fullgraph}
        if self.mode == "max-autotune":
            options["mode"] = "max-autotune-no-cudagraphs"
        parts = list(parts_to_compile(pl_module, self.mode == "towers"))
        for part in parts:
            part.compile(**options)
        if not parts:
            rank_zero_warn(
                f"Nothing is compiled: the networks of {type(pl_module).__name__} have no lists of blocks of one class."
            )


def compiling(mode: CompileMode | Literal[False], callbacks: Sequence[Callback] | Callback | None) -> list[Callback]:
    """Return the callback for the argument `compile` of the command line; none for False.

    Raises:
        UserError: If these already compile.
    """
    if not mode:
        return []
    present = callbacks if isinstance(callbacks, Sequence) else [callbacks]
    if any(isinstance(callback, CompileCallback) for callback in present):
        raise UserError(
            f"Expected compile or a CompileCallback, got compile: {mode} and a CompileCallback in trainer.callbacks: "
            "leave one of them out."
        )
    return [CompileCallback(mode)]


def parts_to_compile(module: LightningModule, towers: bool = False) -> Iterator[nn.Module]:
    """Iterate over the parts that `CompileCallback` compiles.

    Args:
        module: whose networks they belong to.
        towers: whether they are towers, otherwise blocks.
    """
    methods_networks: Sequence[nn.Module] = getattr(module, "sharded_networks", tuple)()
    for network in methods_networks or module.children():
        named_parts: Any = getattr(network, "compiled_parts", None)
        if named_parts is not None:
            yield from named_parts()
        elif not methods_networks:
            yield from (network,) if towers else _innermost_blocks(network) or [network]
        else:  # which is called by other methods than `forward`, so that it cannot be compiled itself
            yield from _towers(network) if towers else _innermost_blocks(network)


def _innermost_blocks(network: nn.Module) -> list[nn.Module]:
    """Return the blocks that contain no blocks: a block around others would be compiled into one program with them."""
    return [block for block in blocks_of(network) if next(blocks_of(block), None) is None]


def _towers(network: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the outermost parts of a network that have a forward pass, and are blocks or contain some."""
    blocks = list(blocks_of(network))
    for child in network.children():
        if type(child).forward is nn.Module.forward:  # a container, or a part with methods of other names
            yield from _towers(child)
        elif child in blocks or next(blocks_of(child), None) is not None:
            yield child
