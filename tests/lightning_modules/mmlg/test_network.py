"""The auxiliary against an ordinary CLIP whose layers were filled in by hand, and the tensors that autograd saves."""

import pytest
import torch

from support.methods.learngene import LENGTH, SIZES, WIDTH, auxiliary, clip, random_images, texts
from vlightning.callbacks.learngene.layers import rule_of
from vlightning.callbacks.learngene.sizes import LearngeneSizes
from vlightning.callbacks.modules import blocks_of
from vlightning.common.errors import UserError
from vlightning.lightning_modules.mmlg.network import LearngeneCLIP, LinearCLIP

# Which group and coefficients layers 0 to 11 have (section 3.1 of the paper; the example there is layer 6).
LAYERS = [(1, 0), (1, 0), (2, 1), (2, 1), (1, 2), (1, 2), (2, 3), (2, 3), (1, 4), (1, 4), (2, 5), (2, 5)]
DIRECT = {
    "vision": (
        *("class_embedding", "positional_embedding", "conv1.weight", "proj"),
        *("ln_pre.weight", "ln_pre.bias", "ln_post.weight", "ln_post.bias"),
    ),
    "text": ("token_embedding.weight", "positional_embedding", "ln_final.weight", "ln_final.bias", "text_projection"),
}


def filled(network):
    """open_clip's CLIP of 12 layers, written without the package's own rules."""
    own, plain = dict(network.named_parameters()), clip().double()
    state = plain.state_dict()
    for tower, prefix in (("vision", "visual."), ("text", "")):
        for name in DIRECT[tower]:
            state[prefix + name] = own[f"{tower}.{name}"]
        for layer, (group, index) in enumerate(LAYERS):
            block = f"{prefix}transformer.resblocks.{layer}."

            def total(part, tower=tower, group=group, index=index):
                one = own[f"coefficients.{tower}"][index] * own[f"blocks.{tower}.{group}.{part}"]
                return one + own[f"coefficients.{tower}_multimodal"][index] * own[f"blocks.multimodal.{group}.{part}"]

            for end in ("weight", "bias"):
                state[f"{block}attn.in_proj_{end}"] = total(f"qkv.{end}")
                state[f"{block}attn.out_proj.{end}"] = total(f"proj.{end}")
                state[f"{block}mlp.c_fc.{end}"] = total(f"fc1.{end}")
                state[f"{block}mlp.c_proj.{end}"] = total(f"fc2.{end}")
                state[f"{block}ln_1.{end}"] = own[f"norms.{tower}.norm1.{end}"]
                state[f"{block}ln_2.{end}"] = own[f"norms.{tower}.norm2.{end}"]
    state["logit_scale"] = own["logit_scale"].reshape(())
    return plain, state


def outputs(plain, state, image, ids):
    both = torch.func.functional_call(plain, state, (image, ids))
    return both[0], both[1]


@pytest.mark.parametrize("size", [None, 2])
def test_the_auxiliary_equals_an_ordinary_clip_in_features_and_gradients(size):
    network = auxiliary().double()
    plain, state = filled(network)
    image, ids = random_images(), texts()
    expected = outputs(plain, state, image, ids)
    found = network.encode_pairs(image, ids, size)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.nn.functional.normalize(one, dim=-1), other, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(network.encode_image(image), found[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(network.encode_text(ids), found[1], rtol=1e-12, atol=1e-12)

    def total(features):
        image, text = (torch.nn.functional.normalize(part, dim=-1) for part in features)
        return (network.logit_scale.exp() * image @ text.T).softmax(-1).diagonal().log().sum()

    names, parameters = zip(*network.named_parameters(), strict=True)
    wanted = torch.autograd.grad(total(expected), parameters)
    for name, one, other in zip(names, torch.autograd.grad(total(found), parameters), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-12, msg=name)
        assert one.any(), name


def test_the_auxiliary_has_the_exact_number_of_parameters():
    with torch.device("meta"):
        network = LearngeneCLIP()
    counts = {name: parameter.numel() for name, parameter in network.named_parameters()}
    assert sum(counts.values()) == 30_311_065
    below = {
        part: sum(count for name, count in counts.items() if name.startswith(part))
        for part in ("blocks.vision.1.", "blocks.", "coefficients.", "norms.", "vision.", "text.")
    }
    expected = [1_772_928, 6 * 1_772_928, 24, 2 * 1_536, 519_936, 19_150_464]
    assert list(below.values()) == expected


@pytest.mark.parametrize("sizes", [LearngeneSizes(), SIZES, LearngeneSizes(layers=4, width=64, heads=4)])
def test_a_file_has_the_names_and_shapes_of_the_parameters(sizes):
    with torch.device("meta"):
        network = LearngeneCLIP(sizes)
    assert {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()} == rule_of("MM-LG").shapes(
        sizes
    )
    with torch.device("meta"):
        network = LinearCLIP(sizes)
    assert {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()} == rule_of("TLEG").shapes(sizes)


def test_tleg_equals_an_ordinary_clip_with_linear_layers():
    network = auxiliary(kind=LinearCLIP).double()
    own, plain = dict(network.named_parameters()), clip().double()
    state = plain.state_dict()
    names = {"qkv": "attn.in_proj_", "proj": "attn.out_proj.", "fc1": "mlp.c_fc.", "fc2": "mlp.c_proj."}
    names |= {"norm1": "ln_1.", "norm2": "ln_2."}
    for tower, prefix in (("vision", "visual."), ("text", "")):
        state |= {prefix + name: own[f"{tower}.{name}"] for name in DIRECT[tower]}
        for layer in range(12):
            for name, theirs in names.items():
                for end in ("weight", "bias"):
                    base, slope = (own[f"blocks.{tower}.{term}.{name}.{end}"] for term in ("base", "slope"))
                    state[f"{prefix}transformer.resblocks.{layer}.{theirs}{end}"] = base + layer / 12 * slope
    image, ids = random_images(), texts()
    found = [torch.nn.functional.normalize(part, dim=-1) for part in network.encode_pairs(image, ids)]
    for one, other in zip(found, outputs(plain, state, image, ids), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    for gradient in torch.autograd.grad(
        (found[0] @ found[1].T).diagonal().sum(), [own[name] for name in own if "blocks" in name]
    ):
        assert gradient.any()


def test_tleg_starts_from_clips_weights_and_norms_without_slope():
    torch.manual_seed(0)
    network = LinearCLIP(LearngeneSizes(width=64, heads=1, vocab_size=30))
    for tower in ("vision", "text"):
        base, slope = (network.blocks.get_submodule(f"{tower}.{term}") for term in ("base", "slope"))
        stds = {"qkv": 64**-0.5, "proj": (64 * 24) ** -0.5, "fc1": 128**-0.5, "fc2": (64 * 24) ** -0.5}
        for block in (base, slope):
            for name, std in stds.items():
                linear = block.get_submodule(name)
                assert linear.weight.std().item() == pytest.approx(std, rel=0.05)
                assert not linear.bias.any()
        assert bool((base.norm1.weight == 1).all())
        assert not slope.norm1.weight.any() | slope.norm2.weight.any() | slope.norm2.bias.any()


def test_sums_start_with_the_variance_of_a_clip():
    torch.manual_seed(0)
    network = LearngeneCLIP(LearngeneSizes(width=64, heads=1, vocab_size=30))
    inner = 64**-0.5
    stds = {"qkv": inner, "proj": inner * 24**-0.5, "fc1": 128**-0.5, "fc2": inner * 24**-0.5}
    for tower in ("vision", "text"):
        for layer in network.layers_of(tower):
            for name, std in stds.items():
                assert layer[f"{name}.weight"].std().item() == pytest.approx(std, rel=0.05)
                assert not layer[f"{name}.bias"].any()
    assert all(bool((value == 0.5**0.5).all()) for value in network.coefficients.values())


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("tower", ["vision", "text"])
def test_autograd_keeps_six_sums_of_twelve_layers(tower, half):
    network, kept = auxiliary(), set()
    stored = {parameter.data_ptr() for parameter in network.parameters()}

    def note(tensor):
        if tensor.dim() == 2 and sorted(tensor.shape) == [WIDTH, 4 * WIDTH] and tensor.data_ptr() not in stored:
            held.append(tensor)  # or another could get its address
            kept.add((tensor.data_ptr(), tensor.dtype))
        return tensor

    held = []
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=half),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        features = network.encode_image(random_images(dtype=torch.float32)) if tower == "vision" else None
        features = network.encode_text(texts()) if features is None else features
    assert features.requires_grad
    assert len(kept) == 12  # fc1 and fc2, of six layers
    assert {kind for _, kind in kept} == {torch.bfloat16 if half else torch.float32}


def test_sharding_makes_one_group_of_all_parameters():
    """A layer needs blocks of two groups, which have no forward pass, so FSDP2 cannot gather them separately."""
    assert not list(blocks_of(auxiliary()))
    assert len(list(blocks_of(clip()))) == 24


def test_texts_may_be_shorter_and_attention_is_causal():
    network = auxiliary().double()
    ids = texts(2)
    ids[:, 3:] = 0
    ids[:, 3] = ids.max() + 1
    longer = network.encode_text(ids)
    ids[:, 4:] = 1
    torch.testing.assert_close(network.encode_text(ids), longer, rtol=1e-12, atol=1e-12)
    assert ids.shape[1] == LENGTH


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layers": 11}, "Expected an even number of layers, which come in pairs, got 11"),
        ({"width": 100}, "Expected a width that 6 heads divide, got 100"),
        ({"patch_size": 15}, "Expected an image size that patches of 15 pixels divide, got 224"),
        ({"heads": 0}, "Expected heads of LearngeneSizes of at least 1, got 0"),
    ],
)
def test_inconsistent_sizes_are_refused(sizes, message):
    with pytest.raises(UserError, match=message):
        LearngeneCLIP(LearngeneSizes(**sizes))
