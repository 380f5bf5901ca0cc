"""Sharding of a method's networks over processes with FSDP2, block by block."""

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from lightning import LightningModule
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

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
"""What is called of a network beside `forward`: FSDP2 has to know, so that it gathers the parameters first."""
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
    and autocast does the casting, as without sharding.

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
    _start_alike(module, mesh.device_type)
    for network in networks:
        for block in _blocks(network):
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        trains = any(parameter.requires_grad for parameter in network.parameters())
        fully_shard(network, mesh=mesh, reshard_after_forward=not trains)
    fully_shard(module, mesh=mesh)
    for part, methods in [*((network, NETWORK_METHODS) for network in networks), (module, MODULE_METHODS)]:
        for method in methods:
            if hasattr(part, method):
                register_fsdp_forward_method(part, method)


def _blocks(network: nn.Module) -> Iterator[nn.Module]:
    """Members of the lists of blocks in a network, inner ones before those they are in."""
    for part in reversed(list(network.modules())):
        alike = isinstance(part, nn.Sequential) and len(part) > 1 and len({type(block) for block in part}) == 1
        if isinstance(part, nn.ModuleList) or alike:
            yield from (block for block in part.children() if not isinstance(block, nn.ModuleList | nn.ModuleDict))


def _start_alike(module: nn.Module, device: str) -> None:
    """Give every process rank 0's parameters and buffers, as DDP does: without a seed each would bring its own."""
    for tensor in (*module.parameters(), *module.buffers()):
        start = tensor.detach().to(device)
        dist.broadcast(start, src=0)
        tensor.data.copy_(start)
