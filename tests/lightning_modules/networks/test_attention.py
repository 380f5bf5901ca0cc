import open_clip
import pytest
import timm
import torch

from vlightning.lightning_modules.networks.attention import (
    SelfAttention,
    attend,
    set_clip_attention,
    set_vit_attention,
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_both_formulations_are_equal_in_value_and_gradient(monkeypatch, dtype, masked):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, length, 8, dtype=dtype, requires_grad=True) for length in (5, 7, 7))
    mask = (torch.arange(7) < torch.tensor([[7], [4]]))[:, None, None] if masked else None
    results = []
    for longest in (0, 256):  # fused, explicit
        monkeypatch.setattr(
            "vlightning.lightning_modules.networks.attention._LONGEST_EXPLICIT", {2: longest, 8: longest}
        )
        out = attend(query, key, value, mask)
        results.append([out, *torch.autograd.grad(out.square().sum(), (query, key, value))])
    close = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.05}
    for fused, explicit in zip(*results, strict=True):
        torch.testing.assert_close(explicit, fused, **close)


def test_dropout_keeps_the_mean_and_drops_weights():
    torch.manual_seed(0)
    value = torch.ones(1, 1, 50, 4)
    query = torch.randn(1, 1, 2000, 4, requires_grad=True)
    out = attend(query, torch.randn(1, 1, 50, 4), value, dropout=0.5)
    assert out.std() > 0.05
    assert out.mean().item() == pytest.approx(1, abs=0.01)


def test_vit_uses_the_fused_kernel_only_where_it_is_faster():
    encoder = timm.models.vision_transformer.VisionTransformer(16, 8, embed_dim=8, depth=1, num_heads=1, num_classes=0)
    set_vit_attention(encoder, torch.zeros(1, 3, 16, 16))
    assert not encoder.blocks[0].attn.fused_attn
    with torch.no_grad():
        set_vit_attention(encoder, torch.zeros(1, 3, 16, 16))
    assert encoder.blocks[0].attn.fused_attn


def test_the_length_up_to_which_two_products_are_faster_depends_on_the_precision():
    encoder = timm.models.vision_transformer.VisionTransformer(224, 16, embed_dim=8, depth=1, num_heads=1)
    image = torch.zeros(1, 3, 224, 224)
    set_vit_attention(encoder, image)
    assert encoder.blocks[0].attn.fused_attn
    with torch.autocast("cpu", torch.bfloat16):
        set_vit_attention(encoder, image)
    assert not encoder.blocks[0].attn.fused_attn


@pytest.mark.parametrize("masked", [None, "alike", "each its own"])
def test_self_attention_equals_torch_in_value_and_gradient(masked):
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True).double()
    own = SelfAttention(12, 3, batch_first=True).double()
    own.load_state_dict(theirs.state_dict())
    tokens = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    mask = torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1) if masked else None
    if masked == "each its own":  # of two sequences and three heads; every row sees something
        hidden = (torch.rand(6, 5, 5) > 0.5) & ~torch.eye(5, dtype=torch.bool)
        mask = torch.zeros(6, 5, 5, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    results = []
    for module in (theirs, own):
        found = module(tokens, tokens, tokens, need_weights=False, attn_mask=mask)[0]
        results.append([found, *torch.autograd.grad(found.square().sum(), [tokens, *module.parameters()])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_only_open_clips_self_attention_is_replaced():
    with torch.device("meta"):
        network = open_clip.CoCa(
            **{k: v for k, v in open_clip.get_model_config("coca_ViT-B-32").items() if k != "custom_text"}
        )
    names = list(network.state_dict())
    set_clip_attention(network)
    assert list(network.state_dict()) == names
    kinds = {name: type(part) is SelfAttention for name, part in network.named_modules() if name.endswith("attn")}
    assert all(
        kinds[f"{place}.{i}.attn"]
        for i in range(12)
        for place in ("visual.transformer.resblocks", "text.transformer.resblocks")
    )
    assert not any(kind for name, kind in kinds.items() if "cross_attn" in name or "attn_pool" in name)
