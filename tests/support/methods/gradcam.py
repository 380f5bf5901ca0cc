"""Grad-CAM of the fusion encoder written out, and a model whose maps differ from one another."""

import torch
from torch.nn import functional as F

from support.methods.albef import random_batch, tiny_albef


def spread_albef(fusion_layers=3, **changes):
    """Return a small ALBEF in float64 whose attention is not even."""
    module = tiny_albef(0, changes, text={"depth": 1, "fusion_depth": fusion_layers}).double().eval()
    # At the initial deviation of 0.02 all attention is nearly even, and a wrong map would hardly differ.
    generator = torch.Generator().manual_seed(7)
    for parameter in module.parameters():
        parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module


def exact_inputs(size=3):
    """Return images, token ids and mask in float64."""
    batch = random_batch(size, dtype=torch.float64)
    return batch["image"], batch["input_ids"], batch["attention_mask"]


def _heads(states, heads=2):
    return states.unflatten(-1, (heads, -1)).transpose(1, 2)


def _linear(weights, name, states):
    return states @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _norm(weights, name, states):
    return F.layer_norm(states, states.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)


def reference_maps(module, image, input_ids, attention_mask, layer):
    """The fusion layers written out, with attention weights that a gradient is asked for."""
    tokens = module.student.encode_image(image)
    states = module.student.encode_text(input_ids, attention_mask)
    weights = {name: value.detach() for name, value in module.student.text_encoder.state_dict().items()}
    hidden = (1 - attention_mask)[:, None, None, :].bool()
    asked = None

    def attention(name, states, others, mask=None):
        query, key, value = (
            _heads(_linear(weights, f"{name}.self.{part}", x))
            for part, x in (("query", states), ("key", others), ("value", others))
        )
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask, -torch.inf)
        probability = scores.softmax(-1)
        context = (probability @ value).transpose(1, 2).flatten(2)
        output = _linear(weights, f"{name}.output.dense", context) + states
        return _norm(weights, f"{name}.output.LayerNorm", output), probability

    first = module.student.text_encoder.fusion_layer
    for index in range(first, len(module.student.text_encoder.layers)):
        name = f"bert.encoder.layer.{index}"
        states, _ = attention(f"{name}.attention", states, states, hidden)
        states, probability = attention(f"{name}.crossattention", states, tokens)
        if index == layer:
            asked = probability
        inner = F.gelu(_linear(weights, f"{name}.intermediate.dense", states))
        output = _linear(weights, f"{name}.output.dense", inner) + states
        states = _norm(weights, f"{name}.output.LayerNorm", output)
    logit = module.itm_head(states[:, 0])[:, 1].sum()
    (gradient,) = torch.autograd.grad(logit, asked)
    maps = torch.zeros(*input_ids.shape, 2, 2, dtype=torch.float64)
    for row in range(len(input_ids)):
        for token in range(int(attention_mask[row].sum())):
            for patch in range(4):
                heads = [asked[row, h, token, 1 + patch] * gradient[row, h, token, 1 + patch].clamp(0) for h in (0, 1)]
                maps[row, token, patch // 2, patch % 2] = sum(heads) / 2
    return maps.detach()
