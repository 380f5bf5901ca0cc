"""Networks, loss, ranking and generation of VQA against numbers of the authors' code and slow references."""

import pytest
import torch

from support.methods import golden_tasks
from vlightning.lightning_modules.albef import network as albef_network
from vlightning.lightning_modules.albef.downstream.answers import (
    Answers,
    Questions,
    answer_loss,
    answer_maps,
    causal,
    generate_answers,
    rank_answers,
    target_positions,
    token_logits,
)
from vlightning.lightning_modules.albef.downstream.network import VQANetwork
from vlightning.lightning_modules.albef.settings import TextSettings, VisionSettings


@pytest.fixture(scope="module")
def golden():
    return golden_tasks.read("vqa")


def own_name(name):
    """The name in `VQANetwork` of a tensor of the student in the authors' file, or None."""
    part, _, inner = name.partition(".")
    if part.endswith("_m") or name.endswith("position_ids"):
        return None
    return f"{part}.bert.{inner}" if part == "text_encoder" else name


def network_of(tensors, config, teacher=False):
    sizes = golden_tasks.sizes(config)
    network = VQANetwork(VisionSettings(**sizes["vision"]), TextSettings(**sizes["text"]))
    state = {name.removeprefix("state."): value for name, value in tensors.items() if name.startswith("state.")}
    if teacher:
        state = {name.replace("_m.", ".", 1): value for name, value in state.items() if "_m." in name}
    network.load_state_dict({own: value for name, value in state.items() if (own := own_name(name))})
    return network.eval()


@pytest.fixture(scope="module")
def network(golden):
    return network_of(*golden)


@pytest.fixture
def questions(golden, network):
    return ask(network, golden[0])


def ask(network, tensors):
    mask = tensors["in.attention_mask"]
    tokens = network.encode_image(tensors["in.image"])
    return Questions(network.encode_text(tensors["in.input_ids"], mask, tokens), mask)


@pytest.fixture
def answers(golden):
    tensors = golden[0]
    mask, counts = tensors["in.answer_mask"], tensors["in.k"]
    owner = torch.arange(len(counts)).repeat_interleave(counts)
    return Answers(tensors["in.answer_ids"], mask, owner, tensors["in.weights"], target_positions(mask))


def test_loss_and_gradients_are_the_authors(golden, answers):
    tensors, config = golden
    network, teacher = network_of(tensors, config), network_of(tensors, config, teacher=True)
    with torch.no_grad():  # the reference averages once before its teacher pass
        for average, weight in zip(teacher.parameters(), network.parameters(), strict=True):
            average.lerp_(weight, 1 - config["momentum"])
        soft = token_logits(teacher, ask(teacher, tensors), answers)
    logits = token_logits(network, ask(network, tensors), answers)
    loss = answer_loss(logits, soft, answers, tensors["in.alpha"].item(), 4)
    torch.testing.assert_close(loss, tensors["out.loss"], rtol=1e-5, atol=0)
    loss.backward()
    own = {name: parameter.grad for name, parameter in network.named_parameters()}
    named = {name.removeprefix("grad."): value for name, value in tensors.items() if name.startswith("grad.")}
    compared = {own_name(name) for name in named}
    assert compared >= own.keys()
    for name, gradient in named.items():
        if own_name(name) in own:
            torch.testing.assert_close(
                own[own_name(name)], gradient, rtol=1e-4, atol=1e-6 + 1e-5 * gradient.abs().max()
            )


def plain_scores(network, questions, input_ids, mask, twice):
    """Log-probability of each answer after each question, token by token."""
    scores = torch.zeros(len(questions.states), len(input_ids))
    for row in range(len(questions.states)):
        kept = questions.mask[row].bool()
        states = questions.states[row, kept][None]
        for answer, (ids, present) in enumerate(zip(input_ids, mask.bool(), strict=True)):
            words = ids[present]
            for place in range(1, len(words)):
                prefix = words[None, :place]
                seen = causal(torch.ones_like(prefix))
                last = network.decode(prefix, seen, states, torch.ones_like(states[..., 0]))[:, -1]
                step = network.predict_words(last).log_softmax(-1)[0, words[place]]
                scores[row, answer] += step * (2 if twice and place == 1 else 1)
    return scores


@torch.no_grad()
def test_ranking_with_the_first_token_twice_is_the_authors(golden, network, questions):
    tensors = golden[0]
    ids = tensors["in.candidate_ids"]
    ranked = rank_answers(network, questions, ids, (ids != 0).long(), 5, 64, first_token_twice=True)
    assert torch.equal(ranked.answer, tensors["out.rank_ids"])
    torch.testing.assert_close(ranked.probability, tensors["out.rank_probs"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("block", [1, 7, 1000])
@torch.no_grad()
def test_ranking_equals_token_by_token_scores_in_any_blocks(golden, network, questions, twice, block):
    ids = golden[0]["in.candidate_ids"]
    mask = (ids != 0).long()
    expected = plain_scores(network, questions, ids, mask, twice)
    ranked = rank_answers(network, questions, ids, mask, len(ids), block, first_token_twice=twice)
    probability, order = expected.softmax(1).sort(dim=1, descending=True)
    assert torch.equal(ranked.answer, order)
    torch.testing.assert_close(ranked.probability, probability, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_the_first_token_selects_the_candidates(golden, network, questions):
    ids = golden[0]["in.candidate_ids"]
    mask = (ids != 0).long()
    first = torch.stack([plain_scores(network, questions, ids[:, :2], mask[:, :2], False)])[0]
    for count in (1, 3, 50):
        index = rank_answers(network, questions, ids, mask, count, 64).answer
        best = first.sort(dim=1, descending=True, stable=True)[1][:, :count]
        assert torch.equal(index.sort(1)[0], best.sort(1)[0])


@torch.no_grad()
def test_an_empty_batch_is_ranked_and_answered(golden, network, questions):
    ids = golden[0]["in.candidate_ids"]
    none = Questions(*(part[:0] for part in questions))
    ranked = rank_answers(network, none, ids, (ids != 0).long(), 5, 64)
    assert ranked.answer.shape == ranked.probability.shape == (0, 5)
    assert generate_answers(network, none, 101, 102, 3, 10)[0].shape == (0, 10)


def plain_beams(network, states, mask, beams, longest, cls=101, sep=102):
    """Beam search of one question with lists, until as many answers as beams have ended."""
    running, finished = [(0.0, [cls])], []
    for length in range(1, longest + 1):
        candidates = []
        for score, ids in running:
            prefix = torch.tensor([ids])
            last = network.decode(prefix, causal(torch.ones_like(prefix)), states, mask)[:, -1]
            steps = network.predict_words(last).log_softmax(-1)[0]
            if length == 1:
                steps[sep] = -torch.inf
            candidates += [(score + step.item(), [*ids, token]) for token, step in enumerate(steps)]
        best = sorted(candidates, key=lambda pair: -pair[0])[: 2 * beams]
        ends = [(score, ids) for score, ids in best[:beams] if ids[-1] == sep or length == longest]
        finished += [(score / length, ids[1:]) for score, ids in ends][: max(beams - len(finished), 0) + beams]
        running = [pair for pair in best if pair[1][-1] != sep][:beams]
        if len(finished) >= beams:
            break
    return max(finished)


@pytest.mark.parametrize(("beams", "longest"), [(3, 10), (1, 4), (4, 2), (3, 1)])
@torch.no_grad()
def test_generation_is_a_plain_beam_search(golden, questions, beams, longest):
    network = network_of(*golden)
    network.text_decoder.cls.predictions.bias[102] += 2.0  # answers end at several lengths
    ids, score = generate_answers(network, questions, 101, 102, beams, longest)
    for row in range(len(ids)):
        states, mask = questions.states[row : row + 1], questions.mask[row : row + 1]
        value, expected = plain_beams(network, states, mask, beams, longest)
        assert ids[row].tolist() == expected + [102] * (longest - len(expected))
        assert score[row].item() == pytest.approx(value, abs=1e-5)


def test_maps_are_attention_times_its_positive_gradient(golden, monkeypatch):
    tensors, network = golden[0], network_of(*golden)
    ids, mask, image = tensors["in.input_ids"], tensors["in.attention_mask"], tensors["in.image"]
    answer_ids = tensors["in.candidate_ids"][:4]
    found = answer_maps(network, image, ids, mask, answer_ids, 0)
    seen = []

    def explicit(query, key, value, visible=None, dropout=0.0):
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        weights = (scores if visible is None else scores.masked_fill(~visible, -torch.inf)).softmax(-1)
        weights.retain_grad()
        seen.append(weights)
        return weights @ value

    monkeypatch.setattr(albef_network, "attend", explicit)
    present = (answer_ids != 0).long()
    answers = Answers(answer_ids, present, torch.arange(4), torch.ones(4), target_positions(present))
    logits = token_logits(network, ask(network, tensors), answers)
    answer_loss(logits, None, answers, 0.0, 1).neg().backward()
    middle = seen[2]  # layer 8 of 6 to 11
    maps = (middle * middle.grad.clamp(min=0)).mean(1)[:, :, 1:]
    expected = (maps * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
    torch.testing.assert_close(found.flatten(1), expected, rtol=1e-4, atol=1e-7)
