from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.methods.albef import random_batch, tiny_albef
from support.runs.distributed import run_distributed
from vlightning.callbacks import rank
from vlightning.lightning_modules.evaluation.reranking import TokenStore, match_candidates
from vlightning.metrics.retrieval import nearest_candidates

IMAGES, TEXTS, K = 9, 14, 4


class Scorer:
    """Scores of a formula that depends on every real token of the text and every token of the image."""

    device = torch.device("cpu")

    def __init__(self):
        self.encoded = []
        self.scored = []

    def text_states(self, input_ids, attention_mask):
        self.encoded.append(len(input_ids))
        return input_ids[..., None].float() * torch.tensor([1.0, 0.1])

    def match_scores(self, text_states, attention_mask, image_tokens):
        self.scored.append(len(text_states))
        assert image_tokens.shape == (1, 3, 5)
        weights = torch.arange(1, text_states.shape[1] + 1) * attention_mask
        return (text_states.sum(-1) * weights).sum(1).sin() * image_tokens.double().pow(2).sum().cos().float()


def _data():
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 6, (TEXTS,), generator=generator)
    mask = (torch.arange(5) < lengths[:, None]).long()
    return (
        torch.randn(IMAGES, 3, 5, generator=generator),
        torch.randint(1, 9, (TEXTS, 5), generator=generator) * mask,
        mask,
        *nearest_candidates(torch.randn(IMAGES, 6, generator=generator), torch.randn(TEXTS, 6, generator=generator), K),
    )


def _brute_force():
    """Every pair by itself, in both directions."""
    tokens, ids, mask, near_texts, near_images = _data()

    def score(image, text):
        length = int(mask[text].sum())
        states = Scorer().text_states(ids[text : text + 1, :length], None)
        return Scorer().match_scores(states, mask[text : text + 1, :length], tokens[image : image + 1]).item()

    return (
        torch.tensor([[score(i, int(t)) for t in near_texts.index[i]] for i in range(IMAGES)]),
        torch.tensor([[score(int(i), t) for i in near_images.index[t]] for t in range(TEXTS)]),
    )


def _scores(shares, limit):
    tokens, ids, mask, near_texts, near_images = _data()
    store = TokenStore(limit)
    start, stop = shares[rank()]
    for first in range(start, stop, 2):
        store.append(tokens[first : min(first + 2, stop)])
    scorer = Scorer()
    scores = match_candidates(scorer, near_texts, near_images, store, ids, mask, rows=3, limit=limit)
    return *scores, len(scorer.scored), sum(scorer.scored), max(scorer.scored), store.on_disk


@pytest.mark.parametrize("limit", [0, 100, 1e9])
def test_scores_equal_brute_force_with_tokens_in_memory_or_on_disk(limit):
    image_scores, text_scores, _, pairs, most, on_disk = _scores([(0, IMAGES)], limit)
    expected = _brute_force()
    torch.testing.assert_close(image_scores, expected[0])
    torch.testing.assert_close(text_scores, expected[1])
    assert on_disk == (limit < 1e9)
    assert most <= 3
    _, _, _, near_texts, near_images = _data()
    wanted = {(i, int(t)) for i in range(IMAGES) for t in near_texts.index[i]}
    wanted |= {(int(i), t) for t in range(TEXTS) for i in near_images.index[t]}
    assert pairs == len(wanted) < IMAGES * K + TEXTS * K  # each pair once, although both directions ask for it


@pytest.mark.parametrize("shares", [[(0, 5), (5, IMAGES)], [(0, 0), (0, IMAGES)]])
def test_processes_score_their_own_images_in_equally_many_passes(shares):
    expected = _brute_force()
    ranks = run_distributed(_scores, shares, 1e9)
    alone = _scores([(0, IMAGES)], 1e9)
    for image_scores, text_scores, *_ in ranks:
        torch.testing.assert_close(image_scores, expected[0])
        torch.testing.assert_close(text_scores, expected[1])
    assert ranks[0][2] == ranks[1][2]
    idle = sum(passes for _, _, passes, *_ in ranks) - alone[2]
    assert sum(pairs for *_, pairs, _, _ in ranks) - idle <= alone[3]  # nothing twice


def test_rows_on_disk_read_back_exactly_and_leave_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = TokenStore(limit=2 * 3 * 4)
    rows = torch.randn(5, 3)
    for part in rows.split(2):
        store.append(part)
    store.append(rows[:0])
    assert len(store) == 5
    assert all(torch.equal(store[row], rows[row]) for row in range(5))
    assert list(tmp_path.iterdir()) != []
    del store
    assert list(tmp_path.iterdir()) == []


class Copies(TorchDispatchMode):
    """Counts copies to and from the meta device, which stands for a GPU: a question for a value is an error there."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        target = (kwargs or {}).get("device")
        if func.overloadpacket.__name__ == "_to_copy" and target is not None:
            target = torch.device(target).type
            self.found[f"{args[0].device.type} to {target}"] += 1
            if target == "cpu":
                return torch.zeros(args[0].shape)
        return func(*args, **(kwargs or {}))


def test_the_host_copies_three_tensors_for_a_pass_and_waits_for_the_scores_once():
    batch, near = random_batch(TEXTS), _data()[3:]
    module = tiny_albef().eval()
    store = TokenStore(2.0**30)
    with torch.no_grad():
        store.append(module.student.encode_image(batch["image"][:IMAGES]))
        module.to("meta")
        texts = batch["input_ids"], batch["attention_mask"]
        with Copies() as copies:
            match_candidates(module, *near, store, *texts, rows=TEXTS, limit=2.0**30)
    # One block of texts, two tensors to the device and its states back; one pass an image.
    assert copies.found == {"cpu to meta": 2 + 3 * IMAGES, "meta to cpu": 1 + 1}
