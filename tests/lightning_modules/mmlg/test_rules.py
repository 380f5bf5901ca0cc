"""The rules that compute layers from stored blocks, against the paper's tables."""

import pytest
import torch

from vlightning.callbacks.learngene.layers import rule_of
from vlightning.callbacks.learngene.sizes import LearngeneSizes
from vlightning.common.errors import UserError
from vlightning.lightning_modules.mmlg.rules import (
    descendant_pairs,
    group_of,
    layer_sum,
    linear_layer,
)

SIZES = LearngeneSizes()

GROUP = [1, 1, 2, 2, 1, 1, 2, 2, 1, 1, 2, 2]
COEFFICIENT = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
DESCENDANTS = {
    6: [0, 1, 2, 3, 4, 5],
    7: [0, 0, 1, 2, 3, 4, 5],
    8: [0, 0, 1, 1, 2, 3, 4, 5],
    9: [0, 0, 1, 1, 2, 2, 3, 4, 5],
    10: [0, 0, 1, 1, 2, 2, 3, 3, 4, 5],
    11: [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5],
    12: COEFFICIENT,
}


def test_layers_have_the_papers_groups_and_coefficients():
    assert [group_of(pair) for pair in descendant_pairs(12)] == GROUP
    assert (group_of(3), descendant_pairs(12)[6]) == (2, 3)


@pytest.mark.parametrize("depth", DESCENDANTS)
def test_descendants_repeat_the_first_pairs_in_place(depth):
    assert descendant_pairs(depth) == DESCENDANTS[depth]


def test_other_auxiliaries_have_descendants_of_half_their_depth_and_more():
    assert descendant_pairs(3, pairs=2) == [0, 0, 1]


@pytest.mark.parametrize("depth", [0, 5, 13])
def test_other_depths_are_refused(depth):
    with pytest.raises(
        UserError, match=f"Expected a tower of 6 to 12 layers, which the learngene expands to, got {depth}"
    ):
        descendant_pairs(depth)


def numbers():
    parts = [f"{linear}.{end}" for linear in ("qkv", "proj", "fc1", "fc2") for end in ("weight", "bias")]
    tensors, value = {}, 2.0
    for kind in ("vision", "text", "multimodal"):
        for group in (1, 2):
            for part in parts:
                tensors[f"blocks.{kind}.{group}.{part}"] = torch.tensor([value], requires_grad=True)
                value += 1
    for name in ("vision", "vision_multimodal", "text", "text_multimodal"):
        tensors[f"coefficients.{name}"] = torch.arange(value, value + 6).requires_grad_()
        value += 6
    return tensors, parts


@pytest.mark.parametrize("tower", ["vision", "text"])
@pytest.mark.parametrize("pair", range(6))
def test_a_pair_is_the_sum_of_its_towers_block_and_the_shared_one(tower, pair):
    tensors, parts = numbers()
    group = 1 if pair in (0, 2, 4) else 2
    found = {kind: layer_sum(tensors, tower, pair, kind) for kind in ("both", "unimodal", "multimodal")}
    for part in parts:
        own = tensors[f"coefficients.{tower}"][pair] * tensors[f"blocks.{tower}.{group}.{part}"]
        shared = tensors[f"coefficients.{tower}_multimodal"][pair] * tensors[f"blocks.multimodal.{group}.{part}"]
        assert found["both"][part] == own + shared
        assert found["unimodal"][part] == own
        assert found["multimodal"][part] == shared
    assert all(list(weights) == parts for weights in found.values())


PARTS = [f"{part}.{end}" for part in ("qkv", "proj", "fc1", "fc2", "norm1", "norm2") for end in ("weight", "bias")]


@pytest.mark.parametrize("tower", ["vision", "text"])
@pytest.mark.parametrize("depth", [1, 6, 12])
def test_layers_of_tleg_are_linear_in_their_number_at_any_depth(tower, depth):
    names = [
        f"blocks.{kind}.{term}.{part}" for kind in ("vision", "text") for term in ("base", "slope") for part in PARTS
    ]
    tensors = {name: torch.tensor([float(number)]) for number, name in enumerate(names, 1)}
    layers = rule_of("TLEG").layers(tensors, tower, depth, SIZES)
    assert len(layers) == depth
    for number, layer in enumerate(layers):
        assert layer.keys() == set(PARTS)
        assert layer == linear_layer(tensors, tower, number, depth)
        for part, found in layer.items():
            base, slope = (tensors[f"blocks.{tower}.{term}.{part}"].item() for term in ("base", "slope"))
            assert found.item() == pytest.approx(base + number / depth * slope)


def test_of_he_lg_the_last_three_layers_are_set():
    names = [f"layers.{kind}.{layer}.{part}" for kind in ("vision", "text") for layer in range(3) for part in PARTS]
    tensors = {name: torch.tensor([float(number)]) for number, name in enumerate(names)}
    layers = rule_of("He-LG").layers(tensors, "text", 5, SIZES)
    assert layers[:2] == [{}, {}]
    assert layers[2:] == [{part: tensors[f"layers.text.{layer}.{part}"] for part in PARTS} for layer in range(3)]


def test_layers_of_mm_lg_have_the_towers_norms():
    tensors, parts = numbers()
    tensors |= {
        f"norms.{tower}.{part}": torch.ones(1) * len(tower) for tower in ("vision", "text") for part in PARTS[8:]
    }
    layers = rule_of("MM-LG").layers(tensors, "text", 8, SIZES, "multimodal")
    for layer, pair in zip(layers, DESCENDANTS[8], strict=True):
        assert layer == layer_sum(tensors, "text", pair, "multimodal") | dict.fromkeys(PARTS[8:], torch.tensor([4.0]))
    assert parts == PARTS[:8]


@pytest.mark.parametrize(
    ("method", "depth", "components", "message"),
    [
        ("TLEG", 0, "both", "Expected a tower of at least 1 layer, got 0"),
        ("He-LG", 2, "both", "Expected a tower of at least the 3 layers of He-LG, got 2"),
        ("TLEG", 6, "unimodal", "Expected components both, since the layers of TLEG are not sums .* got 'unimodal'"),
        ("MM-LG", 13, "both", "Expected a tower of 6 to 12 layers, .* got 13"),
    ],
)
def test_unsupported_depths_and_components_are_refused_with_one_sentence(method, depth, components, message):
    with pytest.raises(UserError, match=message):
        rule_of(method).layers({}, "text", depth, SIZES, components)


def test_a_method_without_a_rule_is_refused_with_one_sentence():
    with pytest.raises(UserError, match="Expected a learngene of MM-LG or TLEG or He-LG, got one of 'other': import"):
        rule_of("other")
