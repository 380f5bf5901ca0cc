"""Parameter groups, by loops over names."""

import pytest
import timm
import torch
from torch import nn

from vlightning.lightning_modules.optim.optimizers import (
    layer_decay_groups,
    scale_rates,
    weight_decay_groups,
)


@pytest.fixture(scope="module")
def vit():
    return timm.create_model("test_vit", num_classes=3)


def by_name(module, groups):
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        names[id(p)]: {k: v for k, v in group.items() if k != "params"} for group in groups for p in group["params"]
    }


def test_matrices_decay_and_vectors_and_named_parameters_do_not(vit):
    vit.patch_embed.proj.weight.requires_grad_(False)
    found = by_name(vit, weight_decay_groups(vit, ("cls_token", "pos_embed")))
    for name, parameter in vit.named_parameters():
        if name == "patch_embed.proj.weight":
            assert name not in found
        elif parameter.ndim < 2 or name in ("cls_token", "pos_embed"):
            assert found[name] == {"weight_decay": 0.0}
        else:
            assert found[name] == {}
    vit.patch_embed.proj.weight.requires_grad_(True)


def test_lower_layers_have_lower_learning_rates(vit):
    groups = layer_decay_groups(vit, 0.5)
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.2)
    scale_rates(optimizer)
    found = by_name(vit, optimizer.param_groups)
    last = len(vit.blocks) + 1
    for name in found:
        layer = int(name.split(".")[1]) + 1 if name.startswith("blocks.") else last
        layer = last - 1 if name.startswith("norm.") else layer
        layer = 0 if name.startswith(("patch_embed", "cls_token", "pos_embed", "reg_token")) else layer
        assert found[name]["lr"] == pytest.approx(0.1 * 0.5 ** (last - layer)), name
    assert found["head.weight"]["weight_decay"] == 0.2
    assert found["head.bias"]["weight_decay"] == 0.0


def test_a_module_of_vectors_has_one_group():
    (group,) = weight_decay_groups(nn.LayerNorm(4))
    assert group["weight_decay"] == 0.0
