"""Compilation of a module's networks, block by block."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.compiler import list_backends
from typing_extensions import override

from ..common.errors import UserError
from ..common.names import did_you_mean
from .modules import blocks_of

CompileMode = Literal["default", "max-autotune"]
COMPILE_HELP = "Compile the blocks of the networks before training: default, or max-autotune, which measures kernels."


class CompileCallback(Callback):
    """Compile the blocks of all networks with `torch.compile` before training.

    Blocks of equal structure share one compiled program, so that compilation takes as long for 12 layers as for one.
    Each block is compiled in place: names in the state dict, moving averages, sharding and checkpoints stay as they
    are. A sequence of text lengths compiles a block twice: for the first length, and for any length; with
    `data.pad_to_multiple_of` equal to `data.max_tokens` there is one length.

    The argument `compile` of the command line adds it (`--compile default`).

    The networks are `module.sharded_networks()`, which every method of this package has, otherwise the module's
    children. A network may name other parts in `compiled_parts()`; one without blocks is compiled as a whole.

    Args:
        mode: "default"; "max-autotune" measures kernels, which takes minutes. It captures no CUDA graphs, whose
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
        options: dict[str, Any] = {"backend": self.backend, "fullgraph": self.fullgraph}
        if self.mode == "max-autotune":
            options["mode"] = "max-autotune-no-cudagraphs"
        for network in parts_to_compile(pl_module):
            network.compile(**options)


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


def parts_to_compile(module: LightningModule) -> Iterator[nn.Module]:
    """Iterate over the parts that `CompileCallback` compiles."""
    networks = getattr(module, "sharded_networks", module.children)()
    for network in networks:
        named_parts: Any = getattr(network, "compiled_parts", None)
        if named_parts is not None:
            yield from named_parts()
            continue
        # Not blocks that contain blocks, which would be compiled into one program.
        innermost = [block for block in blocks_of(network) if next(blocks_of(block), None) is None]
        yield from innermost or [network]
