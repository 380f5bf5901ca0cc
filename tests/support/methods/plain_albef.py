"""ALBEF's step written the plain way: the slow reference that `ALBEFModule` and its speed are compared with.

Captions and masked captions go through BERT separately; pairs, negatives and masked texts go through the fusion encoder
separately; attention is two matrix products and a softmax; the language-model head runs on every position; negatives
are drawn one by one; the queue is copied in every step; the teacher is averaged tensor by tensor. Only the weights,
random numbers and masked words are the module's.
"""

import torch
import torch.nn.functional as F

from vlightning.callbacks.draws import draw_uniform
from vlightning.lightning_modules.albef.itc import key_ids
from vlightning.lightning_modules.albef.mlm import draw_masked_tokens
from vlightning.lightning_modules.core.precision import at_least_float32 as wide


class PlainALBEF:
    def __init__(self, module):
        self.module = module

    def losses(self, batch, alpha):
        """ITC, ITM and MLM loss, and the teacher's features of images and texts."""
        module = self.module
        student, teacher = module.student, module.teacher
        mask, image_id = batch["attention_mask"], batch["image_id"]
        pairs = len(image_id)
        masked = draw_masked_tokens(batch["input_ids"], module.text)
        labels = torch.full_like(batch["input_ids"], -100).flatten()
        labels[masked.positions] = masked.labels

        tokens = encode_image(student, batch["image"])
        image_feature = F.normalize(wide(student.vision_proj(tokens[:, 0])), dim=-1)
        states = encode_text(student, batch["input_ids"], mask)
        text_feature = F.normalize(wide(student.text_proj(states[:, 0])), dim=-1)
        with torch.no_grad():
            teacher_tokens = encode_image(teacher, batch["image"])
            teacher_image = F.normalize(wide(teacher.vision_proj(teacher_tokens[:, 0])), dim=-1)
            teacher_states = encode_text(teacher, batch["input_ids"], mask)
            teacher_text = F.normalize(wide(teacher.text_proj(teacher_states[:, 0])), dim=-1)
            image_bank = torch.cat([teacher_image.t(), module.image_queue.features.clone().t()], dim=1)
            text_bank = torch.cat([teacher_text.t(), module.text_queue.features.clone().t()], dim=1)
            ids = key_ids(batch, module.contrast)
            positives = (torch.cat([ids, module.image_queue.ids])[None] == ids[:, None]).any(-1)
            truth = positives.double() / positives.double().sum(1, keepdim=True)
            targets = [
                alpha * F.softmax(self._hide(feature @ bank / module.temperature), dim=1)
                + (1 - alpha) * truth.to(feature.dtype)
                for feature, bank in ((teacher_image, text_bank), (teacher_text, image_bank))
            ]
        image_to_text = self._hide(image_feature @ text_bank / module.temperature)
        text_to_image = self._hide(text_feature @ image_bank / module.temperature)
        itc = 0
        for similarity, target in zip((image_to_text, text_to_image), targets, strict=True):
            itc = itc - (F.log_softmax(similarity, dim=1) * target).sum(1).mean() / 2

        forbidden = image_id[:, None] == image_id[None]
        forbidden |= (batch["input_ids"][:, None] == batch["input_ids"][None]).all(-1)
        with torch.no_grad():
            wrong = []
            for similarity in (text_to_image, image_to_text):
                weights = similarity[:, :pairs].float().masked_fill(forbidden, -torch.inf).softmax(1)
                numbers = draw_uniform(pairs, pairs, weights.device)
                times = [-numbers[row].log() / weights[row] for row in range(pairs)]
                wrong.append([row.argmin().item() for row in times])
        wrong_image, wrong_text = wrong
        positive = fuse(student, states, mask, tokens)[:, 0]
        negative_tokens = torch.stack([tokens[row] for row in wrong_image])
        negative_states = torch.stack([states[row] for row in wrong_text])
        negative_mask = torch.stack([mask[row] for row in wrong_text])
        negative = fuse(
            student,
            torch.cat([states, negative_states]),
            torch.cat([mask, negative_mask]),
            torch.cat([negative_tokens, tokens]),
        )[:, 0]
        logits = wide(module.itm_head(torch.cat([positive, negative])))
        itm = F.cross_entropy(logits, (torch.arange(3 * pairs, device=logits.device) < pairs).long())

        with torch.no_grad():
            fused = fuse(teacher, encode_text(teacher, masked.input_ids, mask), mask, teacher_tokens)
            soft = F.softmax(wide(teacher.text_encoder.cls(fused)), dim=-1).flatten(0, 1)
        fused = fuse(student, encode_text(student, masked.input_ids, mask), mask, tokens)
        words = wide(student.text_encoder.cls(fused)).flatten(0, 1)
        hard = F.cross_entropy(words, labels, ignore_index=-100)
        distilled = -(F.log_softmax(words, dim=-1) * soft).sum(-1)[labels != -100].mean()
        mlm = (1 - alpha) * hard + alpha * distilled
        return {"itc": itc, "itm": itm, "mlm": mlm}, teacher_image, teacher_text

    def _hide(self, similarity):
        empty = torch.zeros_like(similarity[0], dtype=torch.bool)
        empty[-self.module.image_queue.size :] = ~self.module.image_queue.valid
        return similarity.masked_fill(empty, torch.finfo(similarity.dtype).min)

    @torch.no_grad()
    def update_teacher(self):
        """One tensor after the other, each into new memory."""
        momentum = self.module.momentum.momentum
        for average, weight in zip(self.module.teacher.parameters(), self.module.student.parameters(), strict=True):
            average.data = average.data * momentum + weight.data * (1.0 - momentum)

    def step(self, batch, alpha, optimizer, autocast):
        """Forward, backward, optimizer, teacher, queues; returns the losses."""
        optimizer.zero_grad()
        with autocast:
            losses, image_keys, text_keys = self.losses(batch, alpha)
            loss = losses["itc"] + losses["itm"] + losses["mlm"]
        loss.backward()
        optimizer.step()
        self.update_teacher()
        ids = key_ids(batch, self.module.contrast)
        self.module.image_queue.enqueue(image_keys, ids)
        self.module.text_queue.enqueue(text_keys, ids)
        return losses


def attention(query, key, value, heads, mask=None):
    query, key, value = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores + (1 - mask[:, None, None, :].to(scores.dtype)) * -10000.0
    return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


def encode_image(network, image):
    vit = network.visual_encoder
    x = vit.patch_embed(image)
    x = torch.cat([vit.cls_token.expand(len(x), -1, -1), x], dim=1) + vit.pos_embed
    for block in vit.blocks:
        query, key, value = block.attn.qkv(block.norm1(x)).chunk(3, dim=-1)
        x = x + block.attn.proj(attention(query, key, value, block.attn.num_heads))
        x = x + block.mlp.fc2(F.gelu(block.mlp.fc1(block.norm2(x))))
    return vit.norm(x)


def _self_attention(layer, x, mask):
    own, out = layer.attention.self, layer.attention.output
    mixed = attention(own.query(x), own.key(x), own.value(x), own.num_attention_heads, mask)
    return out.LayerNorm(out.dense(mixed) + x)


def _feed_forward(layer, x):
    return layer.output.LayerNorm(layer.output.dense(F.gelu(layer.intermediate.dense(x))) + x)


def encode_text(network, input_ids, mask):
    bert = network.text_encoder
    x = bert.bert.embeddings(input_ids)
    for layer in bert.layers[: bert.fusion_layer]:
        x = _feed_forward(layer, _self_attention(layer, x, mask))
    return x


def fuse(network, x, mask, tokens):
    bert = network.text_encoder
    for layer in bert.layers[bert.fusion_layer :]:
        x = fusion_layer(layer, x, mask, tokens)
    return x


def fusion_layer(layer, x, mask, tokens):
    x = _self_attention(layer, x, mask)
    cross, own = layer.crossattention, layer.crossattention.self
    mixed = attention(own["query"](x), own["key"](tokens), own["value"](tokens), cross.heads)
    x = cross.output.LayerNorm(cross.output.dense(mixed) + x)
    return _feed_forward(layer, x)
