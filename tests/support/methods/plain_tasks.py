"""ALBEF's tasks written the plain way: the slow reference that their modules and their speed are compared with.

The images of a batch go through the image encoder at once, as the authors' do. In VQA every
question has its own copy of its image; the states of a question are repeated for each of its answers, and for each
candidate of a list; the head runs on every position of every answer, [CLS] included; attention is two matrix products.
"""

import torch
import torch.nn.functional as F

from support.methods.plain_albef import attention, encode_image, encode_text, fuse, fusion_layer
from vlightning.lightning_modules.core.precision import at_least_float32 as wide


def _block(layer, x, mask, states, state_mask):
    own, out = layer.attention.self, layer.attention.output
    length = x.shape[1]
    scores_mask = mask[:, None, :] * torch.ones(length, length).tril()
    query, key, value = (part(x) for part in (own.query, own.key, own.value))
    heads = own.num_attention_heads
    query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (query, key, value))
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5 + (1 - scores_mask[:, None]) * -1e9
    mixed = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
    x = out.LayerNorm(out.dense(mixed) + x)
    cross = layer.crossattention
    parts = cross.self["query"](x), cross.self["key"](states), cross.self["value"](states)
    x = cross.output.LayerNorm(cross.output.dense(attention(*parts, cross.heads, state_mask)) + x)
    return layer.output.LayerNorm(layer.output.dense(F.gelu(layer.intermediate.dense(x))) + x)


def decode(network, ids, mask, states, state_mask):
    """Logits [A, L, W] of all positions."""
    x = network.text_decoder.bert.embeddings(ids)
    for layer in network.text_decoder.layers:
        x = _block(layer, x, mask.to(x.dtype), states, state_mask)
    return wide(network.text_decoder.cls(x))


class PlainClassifier:
    """Entailment of one image, or NLVR2 of two, whose fusion layers are doubled."""

    def __init__(self, module):
        self.module = module

    def logits(self, network, batch):
        mask = batch["attention_mask"]
        tokens = encode_image(network, torch.cat([batch[name] for name in batch if name.startswith("image")]))
        x = encode_text(network, batch["input_ids"], mask)
        halves = tokens.chunk(len(tokens) // len(x))
        if len(halves) == 1:
            x = fuse(network, x, mask, tokens)
        else:
            for layer in network.text_encoder.layers[network.text_encoder.fusion_layer :]:
                x = fusion_layer(layer.second, fusion_layer(layer.first, x, mask, halves[0]), mask, halves[1])
        return wide(network.cls_head(x[:, 0]))

    def loss(self, batch, alpha):
        logits = self.logits(self.module.student, batch)
        with torch.no_grad():
            soft = self.logits(self.module.teacher, batch).softmax(-1)
        distilled = -(logits.log_softmax(-1) * soft).sum(-1).mean()
        return (1 - alpha) * F.cross_entropy(logits, batch["label"]) + alpha * distilled


class PlainVQA:
    def __init__(self, module):
        self.module = module

    def questions(self, network, batch):
        mask = batch["attention_mask"]
        return fuse(
            network, encode_text(network, batch["input_ids"], mask), mask, encode_image(network, batch["image"])
        )

    def loss(self, batch, alpha):
        """As the authors write it: weights times the sum over the tokens of an answer, over the number of images."""
        ids, mask, owner = batch["answer_ids"], batch["answer_mask"], batch["answer_index"]
        targets = ids.masked_fill(mask == 0, -100)[:, 1:]

        def logits(network):
            states = self.questions(network, batch)[owner]
            return decode(network, ids, mask, states, batch["attention_mask"][owner])[:, :-1]

        words = logits(self.module.student)
        with torch.no_grad():
            soft = logits(self.module.teacher).softmax(-1)
        hard = F.cross_entropy(words.transpose(1, 2), targets, reduction="none", ignore_index=-100).sum(1)
        distilled = -(words.log_softmax(-1) * soft).sum(-1).masked_fill(targets == -100, 0).sum(1)
        return (batch["answer_weight"] * ((1 - alpha) * hard + alpha * distilled)).sum() / len(batch["image"])

    @torch.no_grad()
    def rank(self, batch, ids, mask, count):
        """Best answers [Q, k] and their probabilities, the first token counted once; a question at a time."""
        network = self.module.student
        states, state_mask = self.questions(network, batch), batch["attention_mask"]
        start = ids[:1, :1].expand(len(states), 1)
        first = decode(network, start, torch.ones_like(start), states, state_mask)[:, 0].softmax(-1)[:, ids[:, 1]]
        chosen = first.topk(count, dim=1)[1]
        scores = []
        for row, own in enumerate(chosen):
            repeated = states[row].expand(count, -1, -1), state_mask[row].expand(count, -1)
            words = decode(network, ids[own], mask[own], *repeated)[:, :-1]
            targets = ids[own].masked_fill(mask[own] == 0, -100)[:, 1:]
            scores.append(-F.cross_entropy(words.transpose(1, 2), targets, reduction="none", ignore_index=-100).sum(1))
        probability, order = torch.stack(scores).softmax(1).sort(1, descending=True)
        return chosen.gather(1, order), probability
