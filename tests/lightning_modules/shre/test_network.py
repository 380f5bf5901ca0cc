"""SHRe's networks: counts to the unit, the listing's shapes, and functions written out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertModel

from support.methods.shre import CLASSES, SIZES, random_batch, tiny_shre
from vlightning.common.errors import UserError
from vlightning.lightning_modules.shre.network import SHReNetwork, image_encoder
from vlightning.lightning_modules.shre.settings import TextSettings, ViTSettings
from vlightning.lightning_modules.shre.shared import SharedMLP, SharedTransformer


def vit(size, patch, width, depth, heads, post_norm):
    return image_encoder(ViTSettings(size, patch, width, depth, heads, post_norm))


def count(module):
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def test_the_network_has_the_exact_number_of_parameters():
    with torch.device("meta"):
        network = SHReNetwork(1000, "mlp", ViTSettings(), TextSettings())
        assert count(network.image_encoder) == 43_120_128
        assert count(network.text_encoder) == 66_364_416
        assert count(network.shared_encoder) == 5_499_112
        assert count(network) == 114_983_656
        assert count(SharedMLP(768, 1000, in_order=True)) == 6_033_640
        assert count(SharedTransformer(768, 12, 1000)) == 7_859_176


@pytest.mark.parametrize(
    ("shared", "widths"),
    [("mlp", (768, 3072, 1000)), ("mlp_in_order", (768, 3072, 1000)), ("transformer", (768, 1000))],
)
def test_results_have_the_listings_shapes(shared, widths):
    vision, text = ViTSettings(image_size=32, depth=1), TextSettings(vocab_size=200, depth=1)
    network = SHReNetwork(1000, shared, vision, text)
    image, ids = torch.randn(2, 3, 32, 32), torch.randint(1, 200, (2, 7))
    assert [tuple(part.shape) for part in network.encode_image(image)] == [(2, width) for width in widths]
    found = network.encode_text(ids, torch.ones_like(ids))
    assert [tuple(part.shape) for part in found] == [(2, width) for width in widths]


def randomised(module, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return module.double()


def norm(values, layer):
    mean, variance = values.mean(-1, keepdim=True), values.var(-1, keepdim=True, unbiased=False)
    return (values - mean) / (variance + 1e-6).sqrt() * layer.weight + layer.bias


def test_the_shared_mlp_is_that_of_the_thesis():
    shared = randomised(SharedMLP(8, CLASSES))
    tokens = torch.randn(3, 4, 8, dtype=torch.float64)
    h1 = tokens[:, 0] @ shared.fc1.weight.T + shared.fc1.bias
    gelu = h1 * (1 + torch.erf(h1 / 2**0.5)) / 2
    h2 = norm(gelu, shared.norm1) @ shared.fc2.weight.T + shared.fc2.bias
    h3 = norm(h2, shared.norm2) @ shared.head.weight.T + shared.head.bias
    for found, expected in zip(shared(tokens), (h2, h1, h3), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    in_order = randomised(SharedMLP(8, CLASSES, in_order=True))
    assert [part.shape[1] for part in in_order(tokens)] == [8, 32, CLASSES]
    assert list(in_order.widths) == ["h1", "h2", "h3"]


def test_only_the_first_token_reaches_the_shared_mlp():
    shared = SharedMLP(8, CLASSES).double()
    tokens = torch.randn(3, 4, 8, dtype=torch.float64)
    others = torch.cat([tokens[:, :1], torch.randn(3, 6, 8, dtype=torch.float64)], 1)
    assert all(torch.equal(*pair) for pair in zip(shared(tokens), shared(others), strict=True))


def test_the_shared_transformer_is_one_layer_with_norms_first():
    shared = randomised(SharedTransformer(8, 2, CLASSES))
    tokens = torch.randn(3, 5, 8, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    layer = shared.layer
    plain = nn.MultiheadAttention(8, 2, batch_first=True).double()
    bias = torch.cat([layer.attn.q_bias, torch.zeros(8), layer.attn.v_bias])
    plain.load_state_dict(
        {
            "in_proj_weight": layer.attn.qkv.weight,
            "in_proj_bias": bias,
            "out_proj.weight": layer.attn.proj.weight,
            "out_proj.bias": layer.attn.proj.bias,
        }
    )
    normed = norm(tokens, layer.norm1)
    states = tokens + layer.gamma_1 * plain(normed, normed, normed, key_padding_mask=mask == 0)[0]
    states = states + layer.gamma_2 * layer.mlp(norm(states, layer.norm2))
    first, logits = shared(tokens, mask)
    torch.testing.assert_close(first, states[:, 0])
    torch.testing.assert_close(logits, shared.head(norm(states[:, 0], shared.norm)))
    unmasked = shared(tokens)
    assert torch.allclose(unmasked[0][0], first[0])
    assert not torch.allclose(unmasked[0][1], first[1])


@pytest.mark.parametrize("shared", ["mlp", "transformer"])
def test_padding_beyond_the_mask_is_inert(shared):
    module = tiny_shre(shared=shared).double().eval()
    batch = random_batch()
    expected = module.student.encode_text(batch["input_ids"], batch["attention_mask"])
    longer = F.pad(batch["input_ids"], (0, 2), value=110)
    found = module.student.encode_text(longer, F.pad(batch["attention_mask"], (0, 2)))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)


def test_the_text_encoder_is_bert():
    config = BertConfig(
        vocab_size=120,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    bert = randomised(BertModel(config, add_pooling_layer=False)).eval()
    encoder = tiny_shre().student.text_encoder.double().eval()
    encoder.load_state_dict(bert.state_dict())
    batch = random_batch()
    expected = bert(batch["input_ids"], batch["attention_mask"]).last_hidden_state
    kept = batch["attention_mask"].bool()
    found = encoder(batch["input_ids"], batch["attention_mask"])
    torch.testing.assert_close(found[kept], expected[kept], rtol=1e-10, atol=1e-12)


def test_the_image_encoder_is_data2vecs_with_norms_behind_the_sums():
    encoder = randomised(vit(16, 8, 8, 2, 2, True)).eval()
    assert not encoder.pos_embed.requires_grad
    image = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    patches = F.conv2d(image, encoder.patch_embed.proj.weight, encoder.patch_embed.proj.bias, stride=8)
    states = patches.flatten(2).transpose(1, 2) + encoder.pos_embed
    states = norm(torch.cat([encoder.cls_token.expand(3, -1, -1), states], 1), encoder.norm_pre)
    for block in encoder.blocks:
        states = norm(states + block.attn(states), block.norm1)
        states = norm(states + block.mlp(states), block.norm2)
    torch.testing.assert_close(encoder(image), states, rtol=1e-10, atol=1e-12)


def test_positions_are_sines_and_cosines_of_rows_and_columns():
    encoder = vit(32, 8, 16, 1, 2, True)
    table = encoder.pos_embed[0].reshape(4, 4, 16)
    frequencies = 1 / 10000 ** (torch.arange(4) / 4)
    place = torch.arange(4.0)[:, None] * frequencies
    one = torch.cat([place.sin(), place.cos()], 1)
    for row in range(4):
        for column in range(4):
            # timm orders the channels in its own way.
            torch.testing.assert_close(table[row, column].sort().values, one[[row, column]].flatten().sort().values)


def test_the_usual_vit_has_a_norm_behind_its_blocks():
    encoder = vit(16, 8, 8, 2, 2, False)
    assert isinstance(encoder.norm, nn.LayerNorm)
    assert encoder.pos_embed.requires_grad
    assert encoder.pos_embed.shape[1] == 5
    assert encoder(torch.randn(1, 3, 16, 16)).shape == (1, 5, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "Expected a width that 3 heads divide, got 8"),
        ({"patch_size": 7}, "Expected an image size that patches of 7 pixels divide, got 16"),
    ],
)
def test_inconsistent_sizes_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        tiny_shre(vision=changes)
    assert SIZES["vision"]["heads"] == 2
