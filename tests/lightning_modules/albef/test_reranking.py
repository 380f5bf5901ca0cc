"""Re-ranking through the Trainer against a separate encoding and fusion of every pair."""

import pytest
import torch
from lightning import Trainer
from torch.utils.data import DataLoader

from support.methods.albef import tiny_albef
from support.runs.distributed import run_distributed
from vlightning.callbacks import rank, world_size
from vlightning.lightning_modules.evaluation import retrieval as evaluation

PICTURES, CAPTIONS, K = 14, 2, 10


def _images():
    """Images with two captions each, of different lengths."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(104, 120, (PICTURES, CAPTIONS, 6), generator=generator)
    mask = (torch.arange(6) < torch.randint(2, 7, (PICTURES, CAPTIONS, 1), generator=generator)).long()
    return torch.randn(PICTURES, 3, 16, 16, generator=generator), ids * mask, mask


def _loader(rows, size):
    image, ids, mask = _images()
    batches = []
    for part in torch.tensor(rows).split(size):
        owners = part.repeat_interleave(CAPTIONS)
        longest = int(mask[part].sum(-1).max())
        batches.append(
            {
                "image": image[part],
                "image_id": part,
                "sample_index": part,
                "input_ids": ids[part].flatten(0, 1)[:, :longest],
                "attention_mask": mask[part].flatten(0, 1)[:, :longest],
                "text_image_id": owners,
                "text_id": torch.arange(len(owners)) + int(owners[0]) * CAPTIONS,
            }
        )
    return DataLoader(batches, batch_size=None)


def _module(score):
    """Weights that are large enough for the scores to differ."""
    module = tiny_albef(rerank={"k": K, "score": score}, text={"dropout": 0.0}).double()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    return module.eval()


def _brute_force(module, score):
    """Recall from lists: encode each image and each text alone, fuse each candidate pair alone, sort in Python."""
    image, ids, mask = _images()
    ids, mask = ids.flatten(0, 1), mask.flatten(0, 1)
    owner = torch.arange(PICTURES).repeat_interleave(CAPTIONS).tolist()
    with torch.no_grad():
        tokens = [module.student.encode_image(row[None].double()) for row in image]
        states = [
            module.student.encode_text(i[None, : int(m.sum())], m[None, : int(m.sum())])
            for i, m in zip(ids, mask, strict=True)
        ]
        image_features = torch.cat([module.student.project_image(t) for t in tokens]).float()
        text_features = torch.cat([module.student.project_text(s) for s in states]).float()

        def match(row, text):
            ones = torch.ones(states[text].shape[:2], dtype=torch.long)
            fused = module.student.fuse(states[text], ones, tokens[row])
            logit = module.itm_head(fused[:, 0])[0, 1].item()
            weight = {"itm": 0.0, "itm+itc": 1.0, "itm+itc_logits": 1 / module.temperature.item()}[score]
            return logit + weight * similarity[row][text]

        similarity = (image_features @ text_features.T).tolist()
        found = {}
        for direction, queries, candidates in (
            ("image_to_text", range(PICTURES), range(len(ids))),
            ("text_to_image", range(len(ids)), range(PICTURES)),
        ):
            pair = (lambda q, c: (q, c)) if direction == "image_to_text" else (lambda q, c: (c, q))
            hits = dict.fromkeys((1, 5, 10), 0)
            for query in queries:

                def by_contrast(c, query=query, pair=pair):
                    row, text = pair(query, c)
                    return -similarity[row][text]

                best = sorted(candidates, key=by_contrast)[:K]
                best.sort(key=lambda c, query=query, pair=pair: -match(*pair(query, c)))
                right = [pair(query, c)[0] == owner[pair(query, c)[1]] for c in best]
                for k in hits:
                    hits[k] += any(right[:k])
            for k, count in hits.items():
                found[f"test/rerank_{direction}_r{k}"] = 100 * count / len(queries)
    return found


def _test(module, rows, size):
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    (metrics,) = trainer.test(module, _loader(rows, size), verbose=False)
    return metrics


@pytest.mark.parametrize("score", ["itm", "itm+itc", "itm+itc_logits"])
def test_recall_equals_brute_force_and_each_image_is_encoded_once(monkeypatch, score):
    module = _module(score)
    expected = _brute_force(module, score)
    encoded = []
    original = module.student.encode_image
    monkeypatch.setattr(module.student, "encode_image", lambda x: encoded.append(len(x)) or original(x.double()))
    metrics = _test(module, range(PICTURES), 4)
    assert sum(encoded) == PICTURES
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value), name
    assert any(metrics[name.replace("rerank_", "")] != value for name, value in expected.items())
    assert len(metrics) == 15


def _share(score):
    module = _module(score)
    original = module.student.encode_image
    module.student.encode_image = lambda x: original(x.double())
    collected = module.evaluation
    collected.start()
    rows = range(5) if rank() == 0 else range(5, PICTURES)
    if world_size() == 1:
        rows = range(PICTURES)
    with torch.no_grad():
        for batch in _loader(rows, 3):
            collected.step(module, batch, "test")
        return collected.compute(module).recalls


def test_two_processes_equal_one():
    assert run_distributed(_share, "itm") == [_share("itm")] * 2


def test_validation_re_ranks_only_if_configured():
    names = {}
    for when in ("never", "test", "always"):
        module = tiny_albef(rerank={"k": K, "when": when})
        trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
        names[when] = [
            any(
                name.split("/")[1].startswith("rerank_")
                for name in run(module, _loader(range(12), 4), verbose=False)[0]
            )
            for run in (trainer.validate, trainer.test)
        ]
    assert names == {"never": [False, False], "test": [False, True], "always": [True, True]}


def test_tokens_are_stored_in_the_precision_of_the_matching_head():
    kept = {}
    for precision in ("32-true", "bf16-mixed"):
        module = tiny_albef(rerank={"k": K})
        trainer = Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, precision=precision
        )
        seen = []
        reset = module.evaluation.start

        def spy(reset=reset, tokens=module.evaluation, seen=seen):
            seen.extend(tokens._tokens[row].dtype for row in range(len(tokens._tokens)))
            reset()

        module.evaluation.start = spy
        trainer.test(module, _loader(range(12), 4), verbose=False)
        kept[precision] = set(seen)
    assert kept == {"32-true": {torch.float32}, "bf16-mixed": {torch.bfloat16}}


def test_under_autocast_only_pair_scores_have_half_precision(monkeypatch):
    module = tiny_albef(rerank={"k": K})
    inside = {}

    def watch(place, name):
        original = getattr(place, name)

        def spy(*args):
            inside[name] = torch.is_autocast_enabled("cpu")
            return original(*args)

        monkeypatch.setattr(place, name, spy)

    watch(evaluation, "retrieval_ranks")
    watch(evaluation, "nearest_candidates")
    watch(module, "match_scores")
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, precision="bf16-mixed"
    )
    trainer.test(module, _loader(range(12), 4), verbose=False)
    assert inside == {"retrieval_ranks": False, "nearest_candidates": False, "match_scores": True}
