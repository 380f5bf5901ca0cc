"""Answers of visual question answering: the loss, the ranking of a list, generation, and maps (section 5 of the paper).

Shapes: Q questions, Lq question tokens, A answers, L answer tokens ([CLS], words, [SEP]), C listed answers, k
candidates, D width, W words of the vocabulary, g patches along a side.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ....callbacks.distributed.collectives import all_reduce_max
from ....metrics.finite import non_finite_last
from ...losses.soft_targets import soft_cross_entropy
from ..gradcam import cross_attention, recording, relevance
from .network import VQANetwork


class Questions(NamedTuple):
    """Fused states of questions, which the decoder attends to."""

    states: Tensor  # [Q, Lq, D]
    mask: Tensor  # [Q, Lq], 1 for tokens, 0 for padding


class Answers(NamedTuple):
    """Tokenized answers to predict."""

    input_ids: Tensor  # long [A, L]
    mask: Tensor  # [A, L], 1 for tokens, 0 for padding
    question: Tensor  # long [A], the question of each
    weight: Tensor  # [A]
    positions: Tensor  # long [P], indices in the flattened [A, L - 1] of tokens whose next token is predicted


def target_positions(mask: Tensor) -> Tensor:
    """Return the indices, in [A, L - 1], of the tokens before another token: on a GPU the host waits for the result."""
    return (mask[:, 1:] != 0).flatten().nonzero()[:, 0]


def token_logits(network: VQANetwork, questions: Questions, answers: Answers) -> Tensor:
    """Predict the token after each token in `answers.positions`: logits [P, W], in float32 at least."""
    ids, mask = answers.input_ids[:, :-1], answers.mask[:, :-1]
    states = network.decode(ids, causal(mask), questions.states, questions.mask, answers.question)
    return network.predict_words(states.flatten(0, 1)[answers.positions])


def causal(mask: Tensor) -> Tensor:
    """Return which tokens each token attends to, boolean [A, 1, L, L]: those before it and itself."""
    length = mask.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    return before & (mask != 0)[:, None, None, :]


def answer_loss(
    logits: Tensor, teacher_logits: Tensor | None, answers: Answers, alpha: float, count: Tensor | int
) -> Tensor:
    """Compute the loss of generating the answers (eq. 8), with the teacher's soft labels.

    Args:
        logits: [P, W].
        teacher_logits: [P, W] of the teacher for the same answers; None without distillation.
        answers: the answers, whose weights are shares of the people who gave them.
        alpha: weight of the soft labels.
        count: number of questions to divide by.
    """
    log_probabilities = logits.log_softmax(-1)
    targets = answers.input_ids[:, 1:].flatten()[answers.positions]
    loss = -log_probabilities.gather(1, targets[:, None])[:, 0]
    if teacher_logits is not None:
        soft = soft_cross_entropy(log_probabilities, teacher_logits.softmax(-1))
        loss = (1 - alpha) * loss + alpha * soft
    weight = answers.weight[answers.positions // (answers.input_ids.shape[1] - 1)]
    return (weight * loss).sum() / count


class Ranked(NamedTuple):
    """The best answers of questions, best first."""

    answer: Tensor  # long [Q, k], index in the list
    probability: Tensor  # [Q, k], of these k answers


def rank_answers(
    network: VQANetwork,
    questions: Questions,
    input_ids: Tensor,
    mask: Tensor,
    candidates: int,
    block: int,
    first_token_twice: bool = False,
) -> Ranked:
    """Rank a list of answers: by the first token, then the best of these by all tokens.

    The candidates of a question are one sequence of the decoder, in which a token attends to [CLS] and to the earlier
    tokens of its own answer: [CLS] runs once, keys and values of the question are not repeated, and the last token,
    which predicts nothing, is left out.

    Args:
        network: the networks.
        questions: the questions.
        input_ids: long [C, L], the list.
        mask: [C, L].
        candidates: number k of answers that remain after the first token; at most C.
        block: tokens that pass through the decoder at a time, about and at least those of one question, and at most
            through its head, which takes 2 x 4 x W bytes for each.
        first_token_twice: whether the first token's log-probability counts twice, as in the authors' code.
    """
    total = len(questions.states)
    start = input_ids[:1, :1].expand(total, 1)
    states = network.decode(start, causal(torch.ones_like(start)), questions.states, questions.mask)
    first_scores = torch.cat(
        [network.predict_words(rows).log_softmax(-1)[:, input_ids[:, 1]] for rows in states[:, 0].split(block)]
    )  # [Q, C]
    first_scores = non_finite_last(first_scores)
    # Ties go to the earlier answer.
    chosen = first_scores.sort(dim=1, descending=True, stable=True)[1][:, : min(candidates, len(input_ids))]
    first_scores = first_scores.gather(1, chosen)
    later_scores = [
        _later_tokens(
            network,
            Questions(questions.states[rows], questions.mask[rows]),
            input_ids,
            mask,
            chosen[rows],
            block,
        )
        for rows in _blocks(chosen, mask, block)
    ]
    scores = non_finite_last(first_scores * (2 if first_token_twice else 1) + torch.cat(later_scores))
    probability, order = scores.softmax(1).sort(dim=1, descending=True, stable=True)
    return Ranked(chosen.gather(1, order), probability)


def _blocks(chosen: Tensor, mask: Tensor, block: int) -> list[slice]:
    """Divide questions into blocks of about `block` tokens, by the mean length of the answers in the list.

    The number of blocks does not depend on the chosen answers, because sharded processes run the same layers.
    """
    questions, candidates = chosen.shape
    rows = max(int(block / (1 + candidates * (mask.float().sum(1).mean() - 2).clamp(min=0))), 1)
    return [slice(start, start + rows) for start in range(0, max(questions, 1), rows)]


def _later_tokens(
    network: VQANetwork, questions: Questions, input_ids: Tensor, mask: Tensor, chosen: Tensor, block: int
) -> Tensor:
    """Return the sum of the log-probabilities [Q, k] of all tokens of the chosen answers [Q, k] but the first."""
    ids = input_ids[chosen]  # [Q, k, L]
    present = mask[chosen] != 0
    rows, candidates, length = ids.shape
    inner = length - 2
    if inner < 1:
        return torch.zeros(rows, candidates, device=ids.device)
    # A slot holds a token that predicts another one; unused slots come last and are cut off.
    used = present[:, :, 2:].flatten(1)  # [Q, k * inner]
    order = used.int().sort(dim=1, descending=True, stable=True)[1]
    order = order[:, : max([1, *used.sum(1).tolist()])]
    used = used.gather(1, order)
    candidate = order // inner
    tokens = ids[:, :, 1:-1].flatten(1).gather(1, order)
    targets = ids[:, :, 2:].flatten(1).gather(1, order)

    # The sequence of a question: [CLS], which belongs to no candidate (-1), then the slots.
    cls = ids[:, :1, 0]
    candidate_of = torch.cat([torch.full_like(cls, -1), candidate], 1)
    position_of = torch.cat([torch.zeros_like(cls), order % inner + 1], 1)
    slot_used = torch.cat([torch.ones_like(cls, dtype=torch.bool), used], 1)
    same_candidate = candidate_of[:, :, None] == candidate_of[:, None]
    earlier = position_of[:, :, None] >= position_of[:, None]
    visible = ((same_candidate & earlier) | (candidate_of == -1)[:, None]) & slot_used[:, None]
    visible[:, :, 0] = True
    states = network.decode(
        torch.cat([cls, tokens], 1), visible[:, None], questions.states, questions.mask, position_ids=position_of
    )[:, 1:]
    log_probabilities = torch.cat(
        [
            _log_probability(network.predict_words(states_of_block), targets_of_block)
            for states_of_block, targets_of_block in zip(
                states.flatten(0, 1).split(block), targets.flatten().split(block), strict=True
            )
        ]
    ).view_as(targets)
    sums = torch.zeros(rows, candidates, dtype=log_probabilities.dtype, device=log_probabilities.device)
    return sums.scatter_add(1, candidate, log_probabilities.masked_fill(~used, 0))


def _log_probability(logits: Tensor, target: Tensor) -> Tensor:
    return logits.gather(1, target[:, None])[:, 0] - logits.logsumexp(-1)


def generate_answers(
    network: VQANetwork, questions: Questions, cls_token: int, sep_token: int, beams: int, max_tokens: int
) -> tuple[Tensor, Tensor]:
    """Write an answer of each question by beam search for the highest mean log-probability of a token.

    An answer has a token before its [SEP], and at most `max_tokens` with it. The search of a question ends when as many
    answers as beams have ended.

    Args:
        network: the networks.
        questions: the questions.
        cls_token: id of the token before an answer.
        sep_token: id of the token after it.
        beams: number of beams.
        max_tokens: largest number of tokens.

    Returns:
        Token ids [Q, max_tokens] without [CLS], filled up with [SEP], and the mean log-probability [Q] of a token.
    """
    total = len(questions.states)
    device = questions.states.device
    ids = torch.full((total, beams, max_tokens + 1), sep_token, dtype=torch.long, device=device)
    ids[:, :, 0] = cls_token
    scores = torch.full((total, beams), -torch.inf, device=device)
    scores[:, 0] = 0  # all beams are equal at first
    best_ids = ids[:, 0].clone()
    best = torch.full((total,), -torch.inf, device=device)
    ended = torch.zeros(total, dtype=torch.long, device=device)
    question = torch.arange(total, device=device).repeat_interleave(beams)
    for length in range(1, max_tokens + 1):
        prefix = ids[:, :, :length].flatten(0, 1)
        states = network.decode(prefix, causal(torch.ones_like(prefix)), questions.states, questions.mask, question)
        steps = network.predict_words(states[:, -1]).log_softmax(-1).unflatten(0, (total, beams))
        if length == 1:
            steps[:, :, sep_token] = -torch.inf
        running = (scores[:, :, None] + steps).flatten(1)
        top, index = running.topk(2 * beams, 1)  # at most one ending of each beam: enough to go on
        beam = index // steps.shape[2]
        token = index % steps.shape[2]
        grown = ids.gather(1, beam[:, :, None].expand(-1, -1, ids.shape[2])).clone()
        grown[:, :, length] = token
        finished = (token == sep_token) | (length == max_tokens)
        counted = finished.clone()
        counted[:, beams:] = False  # only what is among the best ends
        final = (top / length).masked_fill(~counted | (ended >= beams)[:, None], -torch.inf)
        score, winner = final.max(1)
        better = score > best
        best = torch.where(better, score, best)
        best_ids = torch.where(better[:, None], grown[torch.arange(total, device=device), winner], best_ids)
        ended += counted.sum(1)
        order = finished.int().sort(dim=1, stable=True)[1][:, :beams]
        scores = top.gather(1, order).masked_fill(finished.gather(1, order), -torch.inf)
        ids = grown.gather(1, order[:, :, None].expand(-1, -1, ids.shape[2]))
        # Sharded processes run the same layers.
        if not bool(all_reduce_max((ended < beams).any().int())):
            break
    return best_ids[:, 1:], best


def answer_maps(
    network: VQANetwork,
    image: Tensor,
    input_ids: Tensor,
    attention_mask: Tensor,
    answer_ids: Tensor,
    pad_token: int,
    layer: int | None = None,
) -> Tensor:
    """Map answers to the patches whose attention, by any word of the question, increases the answer's probability.

    Args:
        network: the networks, in eval mode.
        image: [B, 3, S, S].
        input_ids: long [B, Lq].
        attention_mask: [B, Lq].
        answer_ids: long [B, L], [CLS], words, [SEP], padding.
        pad_token: id of the padding.
        layer: index of the fusion layer, counted from the first text layer; by default the middle one.

    Returns:
        [B, g, g], the mean over the question's tokens, in float32 at least.
    """
    attention = cross_attention(network.text_encoder, layer, of_words=False)
    answer_mask = (answer_ids != pad_token).long()
    question = torch.arange(len(image), device=image.device)
    # Lightning evaluates in inference mode, which has no gradients.
    with torch.inference_mode(False):
        image, input_ids, attention_mask, answer_ids, answer_mask, question = (
            tensor.clone() for tensor in (image, input_ids, attention_mask, answer_ids, answer_mask, question)
        )
        answers = Answers(answer_ids, answer_mask, question, answer_mask[:, 0].float(), target_positions(answer_mask))
        with torch.no_grad():
            tokens = network.encode_image(image)
        with torch.enable_grad(), recording(dict(attention.self.items()), attention.output) as record:
            states = network.encode_text(input_ids, attention_mask, tokens)
            logits = token_logits(network, Questions(states, attention_mask), answers)
            targets = answer_ids[:, 1:].flatten()[answers.positions]
            log_probability = logits.log_softmax(-1).gather(1, targets[:, None]).sum()
            (gradient,) = torch.autograd.grad(log_probability, record["context"])
        token_maps = relevance(record["query"], record["key"], record["value"], gradient, attention.heads)
        weight = attention_mask[:, :, None].to(token_maps.dtype)  # [B, Lq, 1]; the maps are [B, Lq, N - 1]
        maps: Tensor = (token_maps * weight).sum(1) / weight.sum(1)
        return maps.unflatten(-1, network.visual_encoder.patch_embed.grid_size)
