"""Sharding of a method's networks over processes with FSDP2, block by block."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import get_args

import torch.distributed as dist
from lightning import LightningModule
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from ...callbacks import ShardedStrategy
from ..memory import recomputed
from ..networks.batch_norm import BatchNorm, kept_statistics

NORMS = (*get_args(BatchNorm), nn.LayerNorm, nn.GroupNorm)
NETWORK_METHODS = (
    "encode_image",
    "encode_text",
    "encode_pairs",
    "fuse",
    "predict_words",
    "project_image",
    "project_text",
    "forward_features",
    "classify",
)
"""Methods of a network, beside `forward`, before which FSDP2 gathers the parameters."""
MODULE_METHODS = (
    "training_step",
    "validation_step",
    "test_step",
    "predict_step",
    "encode_images",
    "encode_texts",
    "classify_images",
    "classify_texts",
    "text_states",
    "match_scores",
    "word_maps",
)
"""The same for the LightningModule."""


def shard(module: LightningModule, networks: Sequence[nn.Module]) -> None:
    """Shard a module over the processes of its device mesh; without one, as under every other strategy, do nothing.

    For `configure_model`, which Lightning calls once a stage; a module that is sharded already is left as it is.

    Each block of a network is a group whose parameters are gathered before it runs and let go after it, in the backward
    pass too. A network's other parameters (embeddings, projections, a head tied to the embeddings) are one more group,
    and what belongs to the module itself another. A network that trains keeps that group gathered until its backward
    pass, so that its methods need not gather it one by one; a frozen one lets go at once, since no backward pass would
    do it. Networks of equal structure are sharded alike, as a moving average of one in the other needs it.

    Parameters are gathered, and gradients reduced, in the precision that they have: under `bf16-mixed` that is float32,
    and autocast does the casting, as without sharding. A `ShardedStrategy` may say otherwise for the networks (but for
    their norms, for a network that computes its layers' weights from its parameters and says so by `sums_weights`, and
    for what belongs to the module itself, such as a temperature), and that blocks recompute their activations.

    Args:
        module: its steps and the methods named in `MODULE_METHODS` may use all parameters.
        networks: submodules with blocks in an `nn.ModuleList` (or an `nn.Sequential` of equals), called by `forward` or
            the methods named in `NETWORK_METHODS`.

    Raises:
        ValueError: if a parameter has no dimension to be sharded along.
    """
    if module.device_mesh is None or isinstance(module, FSDPModule):
        return
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise ValueError(
                f"The parameter {name!r} has no dimension, and FSDP2 shards along the first one: give it the shape [1]."
            )
    mesh = module.device_mesh["data_parallel"]
    strategy = None if module._trainer is None else module.trainer.strategy  # `trainer` raises where there is none
    if not isinstance(strategy, ShardedStrategy):
        strategy = None
    recompute = strategy is not None and strategy.activation_checkpointing
    _broadcast_start(module, mesh.device_type)
    for network in networks:
        policy = MixedPrecisionPolicy()
        if strategy is not None and not getattr(network, "sums_weights", False):
            policy = strategy.mixed_precision
        trains = any(parameter.requires_grad for parameter in network.parameters())
        for block in _blocks(network):
            # Not those with blocks in them, which would run a third time.
            if recompute and trains and next(_blocks(block), None) is None:
                _recompute(block)
            _shard_norms(block, mesh, policy)
            fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        _shard_norms(network, mesh, policy)
        fully_shard(network, mesh=mesh, reshard_after_forward=not trains, mp_policy=policy)
    fully_shard(module, mesh=mesh)
    for part, methods in [*((network, NETWORK_METHODS) for network in networks), (module, MODULE_METHODS)]:
        for method in methods:
            if hasattr(part, method):
                register_fsdp_forward_method(part, method)


def _blocks(network: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the members of the lists of blocks in a network, inner ones first."""
    for part in reversed(list(network.modules())):
        alike = isinstance(part, nn.Sequential) and len(part) > 1 and len({type(block) for block in part}) == 1
        if isinstance(part, nn.ModuleList) or alike:
            yield from (block for block in part.children() if not isinstance(block, nn.ModuleList | nn.ModuleDict))


def _shard_norms(block: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Shard the norms of a block as a group that computes in float32, or in the type of their running statistics."""
    norms: list[nn.Module] = [
        part for part in block.modules() if isinstance(part, NORMS) and not isinstance(part, FSDPModule)
    ]
    if norms and policy.param_dtype is not None:
        fully_shard(norms, mesh=mesh, reshard_after_forward=True)


def _recompute(block: nn.Module) -> None:
    """Recompute a block's activations in the backward pass."""
    forward = block.forward
    block.forward = lambda *args, **kwargs: recomputed(
        partial(forward, **kwargs), *args, again=partial(kept_statistics, block)
    )


def _broadcast_start(module: nn.Module, device: str) -> None:
    """Broadcast rank 0's parameters and buffers, as DDP does: without a seed every rank draws its own."""
    for tensor in (*module.parameters(), *module.buffers()):
        start = tensor.detach().to(device)
        dist.broadcast(start, src=0)
        tensor.data.copy_(start)
