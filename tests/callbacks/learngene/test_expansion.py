"""Descendants: the same function at full depth, the paper's layers at others, nothing shared, nothing partial."""

import open_clip
import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from support.methods.learngene import SIZES, auxiliary, clip, learngene, random_images, texts, timm_vit
from vlightning.callbacks.learngene.expansion import expand_learngene
from vlightning.callbacks.learngene.file import Learngene
from vlightning.callbacks.learngene.layers import rule_of
from vlightning.callbacks.learngene.sizes import LearngeneSizes
from vlightning.common.errors import UserError
from vlightning.lightning_modules.mmlg.network import LearngeneCLIP, LinearCLIP

PAIRS = {6: [0, 1, 2, 3, 4, 5], 8: [0, 0, 1, 1, 2, 3, 4, 5], 11: [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5]}


def features():
    network = auxiliary().eval()
    with torch.no_grad():
        return network.encode_image(random_images(dtype=torch.float32)), network.encode_text(texts())


@pytest.mark.parametrize("custom", [False, True])
def test_the_descendant_of_full_depth_is_the_auxiliary(custom):
    descendant = clip(custom=custom)
    sentence = expand_learngene(learngene(), descendant)
    assert sentence == "12 vision layers and 12 text layers start from the learngene of MM-LG."
    image, text = features()
    with torch.no_grad():
        torch.testing.assert_close(
            descendant.encode_image(random_images(dtype=torch.float32)), image, rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(descendant.encode_text(texts()), text, rtol=1e-5, atol=1e-5)
    assert descendant.logit_scale.item() == 2.5


def test_the_descendant_of_full_depth_equals_the_auxiliary_at_the_papers_sizes():
    torch.manual_seed(0)
    network = LearngeneCLIP().eval()
    state = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    descendant = open_clip.create_model("ViT-S-16").eval()
    expand_learngene(Learngene(state, LearngeneSizes(), "MM-LG"), descendant)
    assert sum(parameter.numel() for parameter in descendant.parameters()) == 62_257_537
    image = torch.randn(1, 3, 224, 224)
    ids = open_clip.get_tokenizer("ViT-S-16")(["a red square"])
    with torch.no_grad():
        for one, other in (
            (descendant.encode_image(image), network.encode_image(image)),
            (descendant.encode_text(ids), network.encode_text(ids)),
        ):
            torch.testing.assert_close(normalize(one, dim=-1), normalize(other, dim=-1), rtol=0, atol=1e-5)


def towers():
    """Of one modality: a network, how it makes features [B, V or E], and what they are in the auxiliary."""
    network = auxiliary().eval()
    projection = network.vision.proj.detach()
    image, text = features()
    plain, bare = clip(custom=True), clip(custom=True)
    bare.visual.proj = None
    return {
        "open_clip's vision": (plain.visual, lambda tower: tower(random_images(dtype=torch.float32)), image),
        "without projection": (
            bare.visual,
            lambda tower: tower(random_images(dtype=torch.float32)) @ projection,
            image,
        ),
        "open_clip's text": (plain.text, lambda tower: tower(texts()), text),
        "timm's": (
            timm_vit(),
            lambda tower: (
                tower.forward_head(tower.forward_features(random_images(dtype=torch.float32)), pre_logits=True)
                @ projection
            ),
            image,
        ),
    }


@pytest.mark.parametrize("name", ["open_clip's vision", "without projection", "open_clip's text", "timm's"])
def test_a_single_tower_equals_the_tower_of_a_clip(name):
    tower, encode, expected = towers()[name]
    expand_learngene(learngene(), tower)
    with torch.no_grad():
        torch.testing.assert_close(encode(tower), expected, rtol=1e-5, atol=1e-5)


def test_a_new_head_is_not_changed():
    tower = timm_vit()
    before = {name: tensor.clone() for name, tensor in tower.state_dict().items()}
    expand_learngene(learngene(), tower)
    for name, tensor in tower.state_dict().items():
        assert torch.equal(tensor, before[name]) == name.startswith("head."), name


@pytest.mark.parametrize("depth", PAIRS)
def test_layers_of_other_depths_are_those_of_their_pairs(depth):
    whole, part, image = clip(), clip(depth, custom=True), timm_vit(depth)
    for network in (whole, part, image):
        expand_learngene(learngene(), network)
    theirs = {"in_proj_weight": "qkv.weight", "out_proj.bias": "proj.bias"}
    for layer, pair in enumerate(PAIRS[depth]):
        for tower, other in ((part.visual, whole.visual), (part.text, whole)):
            found = tower.transformer.resblocks[layer].state_dict()
            expected = other.transformer.resblocks[2 * pair + 1].state_dict()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        expected = whole.visual.transformer.resblocks[2 * pair].attn.state_dict()
        found = image.blocks[layer].attn.state_dict()
        assert all(torch.equal(found[their], expected[own]) for own, their in theirs.items())
    if depth == 8:
        weights = [block.mlp.c_fc.weight for block in part.visual.transformer.resblocks]
        equal = {(i, j) for i in range(8) for j in range(i) if torch.equal(weights[i], weights[j])}
        assert equal == {(1, 0), (3, 2)}


def test_towers_may_have_different_depths():
    descendant = clip(7, 9)
    assert expand_learngene(learngene(), descendant).startswith("7 vision layers and 9 text layers")


@pytest.mark.parametrize("make", [clip, timm_vit])
def test_both_terms_add_up_to_the_layers(make):
    found = {}
    for kind in ("both", "unimodal", "multimodal"):
        network = make()
        expand_learngene(learngene(), network, components=kind)
        found[kind] = network.state_dict()
    summed = 0
    for name, tensor in found["both"].items():
        one, other = found["unimodal"][name], found["multimodal"][name]
        if any(part in name for part in ("attn.", "mlp.")):
            torch.testing.assert_close(one + other, tensor, rtol=1e-6, atol=1e-7)
            assert not torch.equal(one, other)
            summed += 1
        elif not name.startswith("head."):
            assert torch.equal(one, tensor), name
            assert torch.equal(other, tensor), name
    assert summed == 8 * 12 * (2 if make is clip else 1)


def test_layers_share_no_memory():
    descendant = clip()
    expand_learngene(learngene(), descendant)
    before = {name: tensor.clone() for name, tensor in descendant.state_dict().items()}
    with torch.no_grad():
        for parameter in descendant.visual.transformer.resblocks[3].parameters():
            parameter.add_(1.0)
    for name, tensor in descendant.state_dict().items():
        assert torch.equal(tensor, before[name]) != name.startswith("visual.transformer.resblocks.3."), name


@pytest.mark.parametrize("tower", ["vision", "text"])
def test_the_other_tower_is_not_changed(tower):
    descendant = clip(6, custom=True)
    before = {name: tensor.clone() for name, tensor in descendant.state_dict().items()}
    expand_learngene(learngene(), descendant, tower)
    own = {"vision": "visual.", "text": "text."}[tower]
    for name, tensor in descendant.state_dict().items():
        assert torch.equal(tensor, before[name]) != name.startswith(own), name


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (lambda: clip(5), "Expected a tower of 6 to 12 layers, .* got 5"),
        (lambda: clip(6, 13), "Expected a tower of 6 to 12 layers, .* got 13"),
        (
            lambda: clip(6, width=32),
            r"the vision tower .* got .*class_embedding of shape \[32\] instead of \[16\]",
        ),
        (lambda: clip(6, heads=4), "Expected the vision tower .* got 4 heads"),
        (lambda: clip(6, quick=True), "got another activation function than GELU"),
        (lambda: clip(6, image_size=24), r"positional_embedding of shape \[10, 16\] instead of \[5, 16\]"),
        (
            lambda: clip(6, ls_init_value=0.1),
            "vision tower .* got .*resblocks.0.ls_1.gamma, which the",
        ),
        (
            lambda: timm_vit(6, pre_norm=False),
            "tower of the VisionTransformer .* got no norm_pre.bias",
        ),
        (
            lambda: timm_vit(6, global_pool="avg"),
            "tower of the VisionTransformer .* got no norm.bias",
        ),
        (
            lambda: timm_vit(6, pre_norm=False),
            r'got no norm_pre.bias: build the network with pre_norm=True and global_pool="token"\.',
        ),
        (
            lambda: timm_vit(6, pre_norm=False, num_heads=4),
            "got no norm_pre.bias: build the network with these sizes",
        ),
        (
            lambda: timm_vit(6, num_heads=4),
            "Expected the vision tower .* got 4 heads: build the network with these sizes",
        ),
    ],
)
def test_a_network_of_other_sizes_is_refused_and_not_changed(network, message):
    network = network()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(UserError, match=message) as raised:
        expand_learngene(learngene(), network)
    assert "\n" not in str(raised.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_unsupported_networks_are_refused_with_one_sentence():
    with pytest.raises(UserError, match=r"Expected open_clip's CLIP, .* got a Linear"):
        expand_learngene(learngene(), nn.Linear(1, 1))
    with pytest.raises(UserError, match="Expected a network with a text tower, got a VisionTransformer"):
        expand_learngene(learngene(), timm_vit(), "text")


def tleg():
    network = auxiliary(kind=LinearCLIP).eval()
    state = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    return network, Learngene(state, SIZES, "TLEG")


def test_tlegs_descendant_of_full_depth_is_its_auxiliary():
    network, found = tleg()
    for descendant in (clip(), clip(custom=True)):
        assert expand_learngene(found, descendant).endswith("the learngene of TLEG.")
        with torch.no_grad():
            image, text = random_images(dtype=torch.float32), texts()
            expected = network.encode_image(image), network.encode_text(text)
            for one, other in zip(
                (descendant.encode_image(image), descendant.encode_text(text)), expected, strict=True
            ):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_tlegs_descendants_of_other_depths_follow_the_same_linear_rule():
    network, found = tleg()
    descendant, image = clip(7), timm_vit(3)
    expand_learngene(found, descendant)
    expand_learngene(found, image)
    own = dict(network.named_parameters())
    for layer in range(7):
        block = descendant.transformer.resblocks[layer]
        for linear, name in ((block.mlp.c_fc, "fc1"), (block.ln_2, "norm2"), (block.attn.out_proj, "proj")):
            for end in ("weight", "bias"):
                base, slope = (own[f"blocks.text.{term}.{name}.{end}"] for term in ("base", "slope"))
                torch.testing.assert_close(getattr(linear, end), base + layer / 7 * slope)
    base, slope = (own[f"blocks.vision.{term}.qkv.weight"] for term in ("base", "slope"))
    torch.testing.assert_close(image.blocks[2].attn.qkv.weight, base + 2 / 3 * slope)


@pytest.mark.parametrize("kind", [clip, timm_vit])
def test_he_lg_sets_the_last_layers_only(kind):
    tensors = {name: torch.full(shape, 7.0) for name, shape in rule_of("He-LG").shapes(SIZES).items()}
    network = kind(5)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    expand_learngene(Learngene(tensors, SIZES, "He-LG"), network)
    for name, tensor in network.state_dict().items():
        if any(f"blocks.{layer}." in name for layer in (2, 3, 4)):
            assert bool((tensor == 7).all()), name
        else:
            assert torch.equal(tensor, before[name]), name


def test_unsupported_components_are_refused_and_change_nothing():
    _, found = tleg()
    descendant = clip(6)
    before = {name: tensor.clone() for name, tensor in descendant.state_dict().items()}
    with pytest.raises(UserError, match=r"Expected components both, .* got 'unimodal'"):
        expand_learngene(found, descendant, components="unimodal")
    with pytest.raises(UserError, match="Expected a tower of at least the 3 layers of He-LG, got 2"):
        expand_learngene(
            Learngene(
                {name: torch.zeros(shape) for name, shape in rule_of("He-LG").shapes(SIZES).items()}, SIZES, "He-LG"
            ),
            clip(2),
        )
    assert all(torch.equal(tensor, before[name]) for name, tensor in descendant.state_dict().items())
