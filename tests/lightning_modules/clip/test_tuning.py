"""Locked layers, layer-wise rates, adapters and statistics of BatchNorm."""

import math

import open_clip
import pytest
import torch

from support.methods.published import CONFIG, LENGTH, pairs, tiny_clip
from vlightning.common.errors import UserError
from vlightning.lightning_modules.networks.clip.lora import (
    ADAPTER_FILE,
    LoRASettings,
    adapter_state,
    base_state,
    merged_state,
)
from vlightning.lightning_modules.networks.clip.models import build_model
from vlightning.lightning_modules.networks.clip.towers import layers_of


def features(network, batch):
    return network.encode_image(batch["image"]), network.encode_text(batch["input_ids"])


def trainable(module):
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("tower", "blocks", "first", "last"),
    [
        (lambda: build_model(CONFIG, context_length=LENGTH).visual, 3, "class_embedding", "proj"),
        (lambda: build_model(CONFIG, context_length=LENGTH).text, 2, "token_embedding.weight", "text_projection"),
        (lambda: build_model("MobileCLIP-tiny").text, 4, "token_embedding.weight", "text_projection"),
        (lambda: build_model("MobileCLIP-B").visual, 12, "trunk.cls_token", "trunk.head.weight"),
        (lambda: build_model("MobileCLIP-tiny").visual, None, "trunk.stem.0.conv_kxk.0.conv.weight", None),
        (
            lambda: open_clip.model.ModifiedResNet((1, 1, 1, 1), 16, 2, 32, 8),
            4,
            "conv1.weight",
            "attnpool.positional_embedding",
        ),
    ],
)
def test_layers_of_a_tower_are_counted_from_its_embeddings_to_its_projection(tower, blocks, first, last):
    with torch.device("meta"):
        layers = layers_of(tower())
    assert blocks is None or layers.blocks == blocks
    assert layers.of[first] == 0
    assert last is None or layers.of[last] == layers.blocks + 1
    assert set(layers.of.values()) == set(range(layers.blocks + 2))


def test_locked_layers_do_not_change_and_all_others_do():
    module = tiny_clip(tuning={"lock_image": 2, "lock_text": "all"}).double()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    optimizer = torch.optim.SGD([weight for weight in module.parameters() if weight.requires_grad], 0.1)
    module.training_step(pairs(4), 0)["loss"].backward()
    optimizer.step()
    changed = {name for name, tensor in module.state_dict().items() if not torch.equal(tensor, before[name])}
    kept = ("student.visual.transformer.resblocks.2.", "student.visual.ln_post", "student.visual.proj")
    assert changed == {name for name in before if name.startswith((*kept, "student.logit_scale"))}


def test_rates_fall_from_layer_to_layer_in_each_tower():
    module = tiny_clip(tuning={"layer_decay": 0.5}, optim={"learning_rate": 1e-3})
    rates = {}
    names = {parameter: name for name, parameter in module.named_parameters()}
    for group in module.parameter_groups():
        for parameter in group["params"]:
            rates[names[parameter]] = group.get("lr_scale", 1.0), group.get("weight_decay")
    assert rates["student.logit_scale"] == (1.0, 0.0)
    assert rates["student.visual.proj"][0] == rates["student.text.text_projection"][0] == 1.0
    assert rates["student.visual.transformer.resblocks.2.mlp.c_fc.weight"] == (0.5, None)
    assert rates["student.visual.transformer.resblocks.0.ln_1.bias"] == (0.125, 0.0)
    assert rates["student.visual.conv1.weight"][0] == 0.5**4
    assert rates["student.text.token_embedding.weight"][0] == 0.5**3
    assert set(rates) == {name for name, _ in module.named_parameters()}
    configured = module.configure_optimizers
    module.paper_schedule = lambda: None
    assert {group["lr"] for group in configured().param_groups} == {1e-3 * 0.5**power for power in range(5)}


@pytest.mark.parametrize("model", [CONFIG, "MobileCLIP-tiny"])
def test_adapters_change_nothing_at_first_and_merge_to_what_they_compute(model):
    options = {"model": model, "max_tokens": LENGTH, "vision": {"image_size": 32}, "tuning": {"lora": {"rank": 3}}}
    module = tiny_clip(**options).double().eval()
    batch = pairs(4)
    plain = build_model(model, 32, LENGTH).double().eval()
    plain.logit_bias = None
    lora = LoRASettings(rank=3)
    plain.load_state_dict(merged_state(module.student.state_dict(), lora))
    for found, expected in zip(features(module.student, batch), features(plain, batch), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert all(".lora_" in name or name == "student.logit_scale" for name in trainable(module))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn_like(parameter) / 20)
    before = features(plain, batch)
    plain.load_state_dict(merged_state(module.student.state_dict(), lora))
    for found, expected, old in zip(features(module.student, batch), features(plain, batch), before, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        assert (expected - old).abs().max() > 1e-10


def test_adapters_start_from_saved_ones_of_the_same_layers_and_rank(tmp_path):
    from safetensors.torch import save_file

    module = tiny_clip(tuning={"lora": {"rank": 2}})
    for name, parameter in module.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_()
    save_file(adapter_state(module.student.state_dict()), tmp_path / ADAPTER_FILE)
    other = tiny_clip(seed=5, tuning={"lora": {"rank": 2, "weights": str(tmp_path)}})
    other.load_initial_weights()
    theirs = dict(other.named_parameters())
    adapters = {name: weight for name, weight in module.named_parameters() if ".lora_" in name}
    assert adapters
    assert all(torch.equal(weight, theirs[name]) for name, weight in adapters.items())
    assert not torch.equal(theirs["student.visual.proj"], module.student.visual.proj)
    with pytest.raises(UserError, match="Expected the adapters of this model with the rank"):
        tiny_clip(tuning={"lora": {"rank": 3, "weights": str(tmp_path)}}).load_initial_weights()
    with pytest.raises(UserError, match=r"Expected a folder with adapter_model\.safetensors"):
        tiny_clip(tuning={"lora": {"weights": str(tmp_path / "none")}}).load_initial_weights()


def test_every_plain_weight_has_one_place_below_the_adapters():
    plain = build_model(CONFIG, context_length=LENGTH).state_dict().keys()
    module = tiny_clip(tuning={"lora": {}})
    assert base_state(module.student.state_dict()).keys() == plain


@pytest.mark.parametrize(
    ("tuning", "sentence"),
    [
        ({"lock_image": "all", "lock_text": "all"}, "Expected weights to train beside the logit scale"),
        ({"lock_image": 4}, "Expected at most 3 as tuning.lock_image"),
        ({"lock_text": -1}, "Expected tuning.lock_text of at least 0, got -1"),
        ({"layer_decay": 0.0}, "Expected tuning.layer_decay of more than 0"),
        ({"lora": {"targets": ["attn.q"]}}, "got attn.q: choose from attn.in_proj, attn.out_proj, mlp.c_fc"),
        ({"lora": {"rank": 0}}, "Expected tuning.lora.rank of at least 1"),
        ({"lora": {}, "lock_image": "all", "lock_text": "all"}, "Expected weights to train beside the logit scale"),
    ],
)
def test_settings_that_cannot_be_are_refused(tuning, sentence):
    with pytest.raises(UserError, match=sentence):
        tiny_clip(tuning=tuning)


@pytest.mark.parametrize("batch_norm", ["fixed", "trained"])
def test_statistics_of_batch_norm_are_those_of_the_pretraining_unless_trained(batch_norm):
    options = {"model": "MobileCLIP-tiny", "vision": {"image_size": 64}, "tuning": {"batch_norm": batch_norm}}
    module = tiny_clip(**options, max_tokens=LENGTH)
    module.train()
    before = {name: tensor.clone() for name, tensor in module.named_buffers() if "running" in name}
    batch = pairs(4, dtype=torch.float32)
    batch["image"] = torch.nn.functional.interpolate(batch["image"], 64)
    loss = module.training_step(batch, 0)["loss"]
    moved = [name for name, tensor in module.named_buffers() if "running" in name and (tensor != before[name]).any()]
    assert bool(moved) == (batch_norm == "trained")
    assert math.isfinite(loss.item())


def test_a_batch_of_one_pair_is_refused():
    with pytest.raises(UserError, match="Expected a batch of at least 2 pairs"):
        tiny_clip().double().training_step(pairs(1), 0)
