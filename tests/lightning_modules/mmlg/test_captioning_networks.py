"""The mapper computes what ClipCap's transformer mapper does, and has as many parameters."""

import pytest
import torch
from torch.nn import functional as F

from vlightning.common.errors import UserError
from vlightning.lightning_modules.mmlg.captioning_networks import CaptionMapper
from vlightning.lightning_modules.mmlg.settings import MapperSettings


# The authors' network, counted: the linear layer, the constants, and eight blocks of 4,724,736.
@pytest.mark.parametrize(
    ("embed_dim", "length", "parameters"),
    [(384, 10, 40_762_368), (384, 40, 49_655_808), (512, 10, 41_745_408), (512, 40, 53_587_968)],
)
def test_the_size_equals_the_authors(embed_dim, length, parameters):
    with torch.device("meta"):
        mapper = CaptionMapper(embed_dim, MapperSettings(prefix_length=length, clip_length=length))
    assert sum(parameter.numel() for parameter in mapper.parameters()) == parameters


def slow(mapper, embedding, heads):
    """One image and one head at a time, as the formulas say."""
    rows = []
    for row in embedding:
        x = torch.cat([mapper.spread(row).view(mapper.clip_length, -1), mapper.prefix])
        width = x.shape[1] // heads
        for block in mapper.blocks:
            normed = F.layer_norm(x, x.shape[1:], block.norm1.weight, block.norm1.bias)
            query, key, value = (normed @ weight.T for weight in block.qkv.weight.chunk(3))
            parts = []
            for head in range(heads):
                own = slice(head * width, (head + 1) * width)
                scores = query[:, own] @ key[:, own].T * width**-0.5
                parts.append(scores.softmax(1) @ value[:, own])
            x = x + torch.cat(parts, 1) @ block.proj.weight.T + block.proj.bias
            normed = F.layer_norm(x, x.shape[1:], block.norm2.weight, block.norm2.bias)
            hidden = (normed @ block.mlp.fc1.weight.T + block.mlp.fc1.bias).clamp(min=0)
            x = x + hidden @ block.mlp.fc2.weight.T + block.mlp.fc2.bias
        rows.append(x[mapper.clip_length :])
    return torch.stack(rows)


@pytest.mark.parametrize(("prefix_length", "clip_length"), [(3, 2), (1, 4)])
def test_the_prefix_equals_the_formulas(prefix_length, clip_length):
    torch.manual_seed(0)
    mapper = CaptionMapper(5, MapperSettings(12, prefix_length, clip_length, depth=2, heads=3)).double()
    with torch.no_grad():
        for parameter in mapper.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    embedding = torch.randn(4, 5, dtype=torch.float64)
    found = mapper(embedding)
    assert found.shape == (4, prefix_length, 12)
    torch.testing.assert_close(found, slow(mapper, embedding, heads=3), rtol=1e-10, atol=1e-12)
    found.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in mapper.parameters())


def test_inconsistent_sizes_are_refused():
    with pytest.raises(UserError, match="Expected a width that 5 heads divide, got 12"):
        CaptionMapper(5, MapperSettings(12, heads=5))
    with pytest.raises(UserError, match=r"Expected mapper\.prefix_length of at least 1, got 0"):
        CaptionMapper(5, MapperSettings(12, prefix_length=0))
