"""Sharding of a method's networks over processes with FSDP2, block by block."""

from collections.abc import Sequence
from functools import partial
from typing import Any, get_args

import torch.distributed as dist
from lightning import LightningModule
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from ...callbacks import ShardedStrategy
from ...callbacks.modules import blocks_of
from ..core.memory import BatchNorm, kept_statistics, recomputed

NORMS = (*get_args(BatchNorm), nn.LayerNorm, nn.GroupNorm)
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""Methods of each LightningModule, beside `forward`, before which FSDP2 gathers the parameters."""


def shard(
    module: LightningModule,
    networks: Sequence[nn.Module],
    network_methods: Sequence[str] = (),
    module_methods: Sequence[str] = (),
) -> None:
    """Shard a module over the processes of its device mesh; do nothing without one.

    For `configure_model`, which Lightning calls once per stage; a sharded module is not changed.

    Each block of a network is a group, whose parameters are gathered before the block runs and freed afterwards, in the
    backward pass too. The other parameters of a network (embeddings, projections, a head tied to the embeddings) are
    one group, and the module's own parameters another. A trained network keeps that group gathered until its backward
    pass, so that its methods do not gather the group one by one; a frozen network frees it at once, since it has no
    backward pass. Networks of equal structure are sharded alike, as moving averages require.

    Parameters are gathered, and gradients reduced, in their own precision, float32 under `bf16-mixed`, where autocast
    casts them as without sharding. A `ShardedStrategy` may set another precision for the networks, except for norms,
    for networks that set `sums_weights` because they compute their layers' weights from their parameters, and for the
    module's own parameters, such as a temperature. It may also recompute the activations of blocks.

    Args:
        module: LightningModule, whose steps may use all parameters.
        networks: submodules with blocks in an `nn.ModuleList` (or an `nn.Sequential` of blocks of one class).
        network_methods: names of the networks' methods, beside `forward`, that use their parameters; a network need not
            have all of them.
        module_methods: names of the module's methods, beside `forward` and the steps, that use parameters.

    Raises:
        ValueError: If a parameter is 0-D.
    """
    if module.device_mesh is None or isinstance(module, FSDPModule):
        return
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise ValueError(
                f"Expected parameters with a dimension that FSDP2 can shard along, got the 0-D {name!r}: give it the "
                "shape [1]."
            )
    mesh = module.device_mesh["data_parallel"]
    strategy = None if module._trainer is None else module.trainer.strategy  # `trainer` raises without a Trainer
    if not isinstance(strategy, ShardedStrategy):
        strategy = None
    recompute = strategy is not None and strategy.activation_checkpointing
    _broadcast_start(module, mesh.device_type)
    for network in networks:
        policy = MixedPrecisionPolicy()
        if strategy is not None and not getattr(network, "sums_weights", False):
            policy = strategy.mixed_precision
        trains = any(parameter.requires_grad for parameter in network.parameters())
        for block in blocks_of(network):
            # Not blocks that contain blocks, which would run a third time.
            if recompute and trains and next(blocks_of(block), None) is None:
                _recompute(block)
            _shard_norms(block, mesh, policy)
            fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        _shard_norms(network, mesh, policy)
        fully_shard(network, mesh=mesh, reshard_after_forward=not trains, mp_policy=policy)
    fully_shard(module, mesh=mesh)
    for network in networks:
        for name in network_methods:
            if hasattr(network, name):
                register_fsdp_forward_method(network, name)
    for name in (*STEPS, *module_methods):
        register_fsdp_forward_method(module, name)


def _shard_norms(block: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Shard the norms of a block as a group that computes in float32, or in the type of their running statistics."""
    norms: list[nn.Module] = [
        layer for layer in block.modules() if isinstance(layer, NORMS) and not isinstance(layer, FSDPModule)
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
    """Broadcast rank 0's parameters and buffers, as DDP does: without a seed the ranks draw different values."""
    for tensor in (*module.parameters(), *module.buffers()):
        start = tensor.detach().to(device)
        dist.broadcast(start, src=0)
        tensor.data.copy_(start)


def full_state(network: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a network on rank 0, on the CPU, where a strategy may have sharded it.

    A collective call; other ranks of a sharded network get an empty dict.
    """
    state: Any = get_model_state_dict(network, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return dict(state)
