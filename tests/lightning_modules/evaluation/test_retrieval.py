import re

import pytest
import torch
from torch.nn.functional import normalize

from support.methods.methods import METHODS
from support.methods.tiny_modules import trainer
from support.runs.distributed import run_distributed
from vlightning.callbacks import rank
from vlightning.common.errors import UserError
from vlightning.lightning_modules.base.method import Method
from vlightning.lightning_modules.evaluation.reranking import RerankSettings
from vlightning.lightning_modules.evaluation.retrieval import RetrievalEvaluation
from vlightning.lightning_modules.evaluation.retrieval_result import HardPairs
from vlightning.metrics.retrieval import Matches, average_median_ranks

IMAGES = 23
NAMES = [f"{way}_r{k}" for way in ("text_to_image", "image_to_text") for k in (1, 5, 10)] + ["recall_mean"]


class Scorer:
    """Prefers images and texts with close numbers, independent of the features."""

    device = torch.device("cpu")

    def text_states(self, input_ids, attention_mask):
        return input_ids[..., None].float()

    def match_scores(self, text_states, attention_mask, image_tokens):
        return -(text_states[:, 0, 0] - image_tokens[0, 0, 0]).abs()


def _add(evaluation, start, stop, step=4, dead=()):
    generator = torch.Generator().manual_seed(4)
    image, text = (torch.randn(IMAGES, 4, generator=generator) for _ in range(2))
    for features, rows in zip((image, text), dead, strict=False):
        features[rows] = torch.nan
    numbers = torch.arange(IMAGES)
    for first in range(start, stop, step):
        rows = slice(first, min(first + step, stop))
        width = 1 + first % 3  # batches are padded to their own longest text
        ids = numbers[rows, None].expand(-1, width).clone()
        evaluation.add_images(image[rows], numbers[rows], numbers[rows], numbers[rows, None, None].float())
        evaluation.add_texts(text[rows], ids, torch.ones_like(ids), numbers[rows], numbers[rows] // 2)
    return evaluation


def _recalls_of_a_share(shares):
    evaluation = RetrievalEvaluation(match_equal_texts=True, rerank=RerankSettings(12, rows=5))
    result = _add(evaluation, *shares[rank()]).compute(Scorer())
    return result.recalls, result.near_images.index, result.near_texts.match_score


@pytest.mark.parametrize("shares", [[(0, 15), (15, IMAGES)], [(0, 0), (0, IMAGES)]])
def test_processes_with_uneven_or_empty_shares_get_the_whole_result(shares):
    expected = _recalls_of_a_share([(0, IMAGES)])
    assert len(expected[0]) == 15
    for recalls, *tensors in run_distributed(_recalls_of_a_share, shares):
        assert recalls == expected[0]
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected[1:], strict=True))


@pytest.mark.parametrize(("score", "weight"), [("itm", 0), ("itm+itc", 1), ("itm+itc_logits", 20)])
def test_the_matching_score_decides_the_order_of_the_candidates(score, weight):
    result = _add(RetrievalEvaluation(rerank=RerankSettings(10, score=score)), 0, IMAGES).compute(
        Scorer(), temperature=0.05
    )
    plain = _add(RetrievalEvaluation(rerank=RerankSettings(10)), 0, IMAGES).compute()
    for near, before in ((result.near_texts, plain.near_texts), (result.near_images, plain.near_images)):
        distance = (near.index - torch.arange(IMAGES)[:, None]).abs().float()
        assert torch.equal(near.match_score, -distance)
        order_by = near.match_score + weight * near.similarity
        assert (order_by.diff(dim=1) <= 1e-5).all()
        assert torch.equal(near.index.sort(1).values, before.index.sort(1).values)
    # The scorer ranks the match first if it is a candidate: recall at 1 becomes the contrast's recall at 10.
    if score == "itm":
        assert result.recalls["rerank_text_to_image_r1"] == plain.recalls["text_to_image_r10"]
        assert result.recalls["rerank_image_to_text_r1"] == plain.recalls["image_to_text_r10"]
    assert {k: v for k, v in result.recalls.items() if not k.startswith("rerank")} == plain.recalls


@pytest.mark.parametrize("equal_texts", [None, True])
def test_the_accuracy_of_the_matching_head_equals_a_slow_reference(equal_texts):
    """Over the images and texts with a match among the candidates: the match against the nearest wrong candidate."""

    class Even(Scorer):
        def match_scores(self, text_states, attention_mask, image_tokens):
            pair = text_states[:, 0, 0] * 31 + image_tokens[0, 0, 0] * 17
            return pair.remainder(4)  # some are equal

    result = _add(RetrievalEvaluation(equal_texts, RerankSettings(10)), 0, IMAGES).compute(Even())
    plain = _add(RetrievalEvaluation(rerank=RerankSettings(10)), 0, IMAGES).compute()
    for prefix, group in (("", 1 if equal_texts is None else 2), ("equal_texts_", 2)):
        head, contrast, count = 0.0, 0, 0
        for near, of_texts in ((plain.near_images, True), (plain.near_texts, False)):
            for query, candidates in enumerate(near.index.tolist()):
                right = [candidate // group == query // group for candidate in candidates]
                if not any(right):
                    continue
                count += 1
                first, wrong = right.index(True), right.index(False)
                pairs = [(query, candidates[c]) if of_texts else (candidates[c], query) for c in (first, wrong)]
                match, other = ((31 * text + 17 * image) % 4 for text, image in pairs)
                head += (match > other) + (match == other) / 2
                contrast += first < wrong
        name = f"rerank_{prefix}pair_accuracy"
        if equal_texts and prefix:
            assert name not in result.recalls
            continue
        assert result.recalls[name] == pytest.approx(100 * head / count)
        assert 5 < result.recalls[name] < 95
        expected = (count, pytest.approx(100 * contrast / count), result.recalls[name])
    assert result.hard_pairs == expected  # by equal texts where there are any


@pytest.mark.parametrize(("share", "at_chance"), [(40.0, True), (50.0, True), (54.9, True), (55.1, False)])
def test_an_accuracy_is_above_chance_from_two_standard_errors_on(share, at_chance):
    assert HardPairs(400, 60.0, share).at_chance == at_chance  # a standard error of 2.5 points


class NoNumbers(Scorer):
    """Returns non-finite scores for one text."""

    def match_scores(self, text_states, attention_mask, image_tokens):
        scores = super().match_scores(text_states, attention_mask, image_tokens)
        return scores.masked_fill(text_states[:, 0, 0] == 2, torch.nan)


DEAD = [3, 17], [20]


def _broken_share(shares):
    evaluation = RetrievalEvaluation(rerank=RerankSettings(12))
    result = _add(evaluation, *shares[rank()], dead=DEAD).compute(NoNumbers())
    return result.recalls, result.non_finite, result.non_finite_images, result.non_finite_texts


def test_non_finite_features_and_matching_scores_count_as_misses_on_one_process_and_on_two():
    recalls, counts, images, texts = _broken_share([(0, IMAGES)])
    assert (images.tolist(), texts.tolist()) == DEAD
    near = _add(RetrievalEvaluation(rerank=RerankSettings(12)), 0, IMAGES, dead=DEAD).compute()
    asked = int((near.near_texts.index == 2).sum()) + 12  # of the images that have text 2 near, and its own
    assert counts == {"non_finite_images": 2, "non_finite_texts": 1, "rerank_non_finite_scores": asked}
    # Finite scores are correct, so a match is found if it is a candidate with a finite score.
    own = torch.arange(IMAGES)[:, None]
    for direction, side in (("image_to_text", near.near_texts), ("text_to_image", near.near_images)):
        found = ((side.index == own) & side.similarity.isfinite() & (own != 2)).any(1)
        assert recalls[f"rerank_{direction}_r1"] == pytest.approx(100 * found.double().mean().item())
        assert not found[[2, *DEAD[0], *DEAD[1]]].any()
    for found in run_distributed(_broken_share, [(0, 15), (15, IMAGES)]):
        assert found[:2] == (recalls, counts)
        assert (found[2].tolist(), found[3].tolist()) == DEAD


@pytest.mark.parametrize(
    ("method", "weight", "names"),
    [
        ("albef", "student.vision_proj.weight", ["", "rerank_"]),
        ("shre", "student.image_encoder.cls_token", ["h2/", "h3/"]),
        ("mmlg", "student.vision.proj", ["karpathy5/", "paper/"]),
        ("mobileclip", "average.visual.trunk.stem.0.conv_kxk.0.bn.weight", [""]),
    ],
)
def test_a_non_finite_model_has_recall_zero_and_warns(tmp_path, method, weight, names):
    module, data = METHODS[method].build(METHODS[method].prepare(tmp_path), seed=0, batch_size=5, num_workers=0)
    torch.nn.init.constant_(module.get_parameter(weight), torch.nan)
    runs = trainer(default_root_dir=tmp_path)
    with pytest.warns(
        match=r"features of 10 of 10 images \(sample_index 0, 1, 2, 3, 4, 5, 6, 7, 8, 9\): these rank last"
    ):
        runs.test(module, data, verbose=False)
    found = {name: value.item() for name, value in runs.callback_metrics.items()}
    assert found["test/non_finite_images"] == 10
    assert {found[f"test/{name}recall_mean"] for name in names} == {0}
    assert {value for name, value in found.items() if "_r1" in name or "_r5" in name} == {0}
    assert {value for name, value in found.items() if "median" in name} <= {11}


def test_features_are_kept_in_main_memory_in_float32():
    evaluation = RetrievalEvaluation()
    evaluation.add_images(torch.ones(2, 4, dtype=torch.bfloat16), torch.arange(2), torch.arange(2))
    features = evaluation.compute().image_features
    assert features.dtype == torch.float32
    assert features.device.type == "cpu"


def test_images_alone_and_texts_alone_have_features_and_no_recall():
    images, texts = RetrievalEvaluation(), RetrievalEvaluation()
    images.add_images(torch.randn(3, 4), torch.arange(3), torch.arange(3))
    texts.add_texts(torch.randn(5, 4), torch.ones(5, 2).long(), torch.ones(5, 2).long(), text_index=torch.arange(5))
    found = images.compute(Scorer()), texts.compute(Scorer())
    assert [len(r.image_features) for r in found] == [3, 0]
    assert [len(r.text_features) for r in found] == [0, 5]
    assert [r.recalls for r in found] == [{}, {}]
    assert found[1].near_images.index.shape == (5, 0)


def test_fewer_candidates_than_the_recalls_are_refused():
    with pytest.raises(UserError, match=r"rerank\.k of at least 10, .* got 5: raise it"):
        RetrievalEvaluation(rerank=RerankSettings(5))


@pytest.mark.parametrize("protocols", [["karpathy5", "paper"], ["paper"], ["karpathy5"]])
def test_protocols_rank_all_captions_or_the_first_of_each_image(protocols):
    """Three images, captions 0 and 1, 2 and 3, 4; similarities by hand."""
    evaluation = RetrievalEvaluation(protocols=protocols)
    scores = torch.tensor(
        [
            [0.5, 0.9, 0.6, 0.1, 0.2],  # the second caption is first, the first one third, of first captions second
            [0.7, 0.0, 0.7, 0.8, 0.3],  # the first caption ties with a wrong one, which counts as before it
            [0.1, 0.2, 0.3, 0.0, 0.4],
        ]
    )
    evaluation.add_images(torch.eye(3), torch.tensor([7, 3, 5]), torch.arange(3))
    ids = torch.ones(5, 2).long()
    evaluation.add_texts(scores.T, ids, ids, torch.tensor([7, 7, 3, 3, 5]), torch.arange(5))
    found = evaluation.compute().recalls
    assert list(found) == [f"{protocol}/{name}" for protocol in protocols for name in NAMES]
    third = 100 / 3
    if "karpathy5" in protocols:
        assert found["karpathy5/image_to_text_r1"] == pytest.approx(100)
        # Captions 1, 2, 3 and 4 have their own image first; caption 0 has image 1 before it.
        assert found["karpathy5/text_to_image_r1"] == pytest.approx(80)
    if "paper" in protocols:
        assert found["paper/image_to_text_r1"] == pytest.approx(third)
        assert found["paper/text_to_image_r1"] == pytest.approx(2 * third)
        assert found["paper/image_to_text_r5"] == pytest.approx(100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"protocols": []}, "or both as protocols, got none"),
        ({"protocols": ["paper"], "rerank": RerankSettings(10)}, "no protocols with re-ranking, got rerank.k 10"),
        ({"spaces": {}}, "width of each space by its name, got none"),
        ({"spaces": {"h2": 4}, "rerank": RerankSettings(10)}, "one space with re-ranking, got rerank.k 10"),
        ({"spaces": {"h2": 4}, "prediction_space": "h3"}, r"prediction_space among \['h2'\], got 'h3'"),
        ({"prediction_space": "h3"}, r"prediction_space among \[\], got 'h3'"),
        ({"median_rank_fold": 0}, "median_rank_fold of at least 1, got 0"),
    ],
)
def test_invalid_options_are_refused_with_one_sentence(options, message):
    with pytest.raises(UserError, match=message) as error:
        RetrievalEvaluation(**options)
    assert "\n" not in str(error.value)


SPACES = {"h2": 4, "h3": 7}
MEDIANS = ["median_rank_text_to_image", "median_rank_image_to_text"]


def _two_spaces():
    """Features of images and of two captions each, caption after caption of an image, in two spaces."""
    generator = torch.Generator().manual_seed(5)
    parts = []
    for width in SPACES.values():
        image = torch.randn(IMAGES, width, generator=generator)
        text = image.repeat_interleave(2, 0) + torch.randn(2 * IMAGES, width, generator=generator)
        parts.append([normalize(part, dim=-1) for part in (image, text)])
    return parts


def _add_pairs(evaluation, image, text, start=0, stop=IMAGES):
    """Add some images and their captions, whose ids do not follow the order."""
    numbers = torch.arange(IMAGES)
    ids = (numbers * 7) % IMAGES
    for first in range(start, stop, 4):
        rows = slice(first, min(first + 4, stop))
        both = slice(2 * rows.start, 2 * rows.stop)
        evaluation.add_images(image[rows], ids[rows], numbers[rows])
        tokens = torch.ones(both.stop - both.start, 2).long()
        evaluation.add_texts(text[both], tokens, tokens, ids.repeat_interleave(2)[both])
    return evaluation


def _add_spaces(evaluation, *rows):
    return _add_pairs(evaluation, *(torch.cat(part, 1) for part in zip(*_two_spaces(), strict=True)), *rows)


@pytest.mark.parametrize("options", [{}, {"protocols": ["paper", "karpathy5"], "median_rank_fold": 5}])
def test_each_space_is_measured_as_if_it_were_the_only_one(options):
    found = _add_spaces(RetrievalEvaluation(spaces=SPACES, **options)).compute().recalls
    alone = [_add_pairs(RetrievalEvaluation(**options), *part).compute().recalls for part in _two_spaces()]
    expected = {f"{space}/{name}": v for space, own in zip(SPACES, alone, strict=True) for name, v in own.items()}
    assert found == expected
    assert list(found) == list(expected)
    assert alone[0] != alone[1]
    if not options:
        assert list(found) == [f"{space}/{name}" for space in SPACES for name in NAMES]
    else:
        names = [f"{protocol}/{name}" for protocol in options["protocols"] for name in NAMES]
        assert list(alone[0]) == names + MEDIANS


@pytest.mark.parametrize(("wanted", "space"), [(None, 0), ("h2", 0), ("h3", 1)])
def test_the_result_holds_features_and_candidates_of_one_space(wanted, space):
    result = _add_spaces(RetrievalEvaluation(spaces=SPACES, prediction_space=wanted)).compute()
    image, text = _two_spaces()[space]
    plain = _add_pairs(RetrievalEvaluation(), image, text).compute()
    assert torch.equal(result.image_features, image)
    assert torch.equal(result.text_features, text)
    for near, expected in ((result.near_texts, plain.near_texts), (result.near_images, plain.near_images)):
        assert torch.equal(near.index, expected.index)
        torch.testing.assert_close(near.similarity, expected.similarity)
    # Nothing of the other space is left in memory.
    assert result.text_features.untyped_storage().nbytes() == 4 * text.numel()


def test_texts_without_images_have_features_in_one_space():
    evaluation = RetrievalEvaluation(spaces=SPACES, median_rank_fold=5)
    assert evaluation.compute().image_features.shape == (0, 4)  # nor need there be texts
    evaluation.add_texts(torch.randn(5, 11), torch.ones(5, 2).long(), torch.ones(5, 2).long())
    result = evaluation.compute()
    assert (result.image_features.shape, result.text_features.shape, result.recalls) == ((0, 4), (5, 4), {})


@pytest.mark.parametrize("width", [4, 12])
def test_inconsistent_widths_are_refused_with_one_sentence(width):
    evaluation = RetrievalEvaluation(spaces=SPACES)
    features, numbers, ids = torch.ones(2, width), torch.arange(2), torch.ones(2, 1).long()
    message = rf"^Expected features of width 11, the sum over the spaces {{'h2': 4, 'h3': 7}}, got {width}: [^\n]*$"
    with pytest.raises(ValueError, match=message):
        evaluation.add_images(features, numbers, numbers)
    with pytest.raises(ValueError, match=message):
        evaluation.add_texts(features, ids, ids)


def test_median_ranks_are_of_all_captions_in_folds_of_the_data_sets_order():
    image, text = _two_spaces()[0]
    evaluation = RetrievalEvaluation(protocols=["paper"], median_rank_fold=5)
    # Later images come first, as from a process that had the second half.
    for rows in ((12, IMAGES), (0, 12)):
        _add_pairs(evaluation, image, text, *rows)
    found = evaluation.compute().recalls
    ids = torch.arange(IMAGES)
    expected = average_median_ranks(image, text, Matches(ids, ids.repeat_interleave(2)), 5)
    assert {name: found[name] for name in MEDIANS} == expected
    assert average_median_ranks(image, text, Matches(ids, ids.repeat_interleave(2)), 6) != expected


def _spaces_of_a_share(shares):
    evaluation = RetrievalEvaluation(protocols=["karpathy5", "paper"], spaces=SPACES, median_rank_fold=5)
    return _add_spaces(evaluation, *shares[rank()]).compute().recalls


@pytest.mark.parametrize("shares", [[(15, IMAGES), (0, 15)], [(0, 0), (0, IMAGES)]])
def test_processes_equal_one_process_in_each_space(shares):
    expected = _spaces_of_a_share([(0, IMAGES)])
    assert len(expected) == 2 * (2 * len(NAMES) + len(MEDIANS))
    for found in run_distributed(_spaces_of_a_share, shares):
        assert found == expected


class TwoSpaces(Method):
    """Returns the features of the batch."""

    def __init__(self):
        super().__init__()
        self.evaluation = RetrievalEvaluation(protocols=["paper"], spaces=SPACES, median_rank_fold=3)

    def ranked_images(self, image):
        return image, None

    def ranked_texts(self, input_ids, attention_mask):
        return attention_mask


def test_a_module_logs_each_space_under_its_name():
    (image, text), numbers = (torch.cat(part, 1)[:6] for part in zip(*_two_spaces(), strict=True)), torch.arange(6)
    ids = {"image_id": numbers, "sample_index": numbers, "text_image_id": numbers, "input_ids": numbers[:, None]}
    batches = [{"image": image, "attention_mask": text, **ids}]
    module, runs = TwoSpaces(), trainer()
    runs.validate(module, torch.utils.data.DataLoader(batches, batch_size=None), verbose=False)
    names = [f"val/{space}/{name}" for space in SPACES for name in [f"paper/{name}" for name in NAMES] + MEDIANS]
    recalls = module.evaluation.result.recalls.values()
    assert runs.callback_metrics == pytest.approx(dict(zip(names, recalls, strict=True)))


class Judged(Method):
    """An image is its features and its number; the matching head is right, or wrong."""

    def __init__(self, sign, text):
        super().__init__()
        self.evaluation, self.sign, self.text = RetrievalEvaluation(rerank=RerankSettings(10)), sign, text

    def encode_images(self, image):
        return image[:, :4], image[:, None, 4:]

    def encode_texts(self, input_ids, attention_mask):
        return self.text[input_ids[:, 0]]

    def contrastive_temperature(self):
        return 1.0

    def text_states(self, input_ids, attention_mask):
        return input_ids[..., None].float()

    def match_scores(self, text_states, attention_mask, image_tokens):
        return self.sign * Scorer().match_scores(text_states, attention_mask, image_tokens)


def judged(better, **rerank):
    """A module whose matching head ranks better or worse than its features, and a batch for it."""
    torch.manual_seed(0)
    numbers, image, text = torch.arange(IMAGES), torch.randn(IMAGES, 4), torch.randn(IMAGES, 4)
    images = torch.cat([image, numbers[:, None].float()], 1)
    ids = {"image_id": numbers, "sample_index": numbers, "text_image_id": numbers, "input_ids": numbers[:, None]}
    batch = {"image": images, "attention_mask": torch.ones_like(numbers[:, None]), **ids}
    module = Judged(1 if better else -1, text)
    module.evaluation.rerank = RerankSettings(10, **rerank)
    return module, torch.utils.data.DataLoader([batch], batch_size=None)


def test_the_log_states_no_gain_where_the_matching_head_is_at_chance(caplog, monkeypatch):
    monkeypatch.setattr("vlightning.lightning_modules.evaluation.retrieval_result.HardPairs.at_chance", True)
    monkeypatch.setattr("vlightning.lightning_modules.evaluation.reranking.SECONDS_OF_A_LINE", 0.0)
    (module, rows), runs = judged(better=True), trainer()
    with caplog.at_level("INFO"):
        runs.test(module, rows, verbose=False)
    assert "re-ranking shows no gain, because the matching head is not trained well enough" in caplog.text
    shares = re.findall(r"Re-ranking: (\d+)% of the pairs", caplog.text)
    assert len(shares) > 10  # a line a pass, of no fewer than an image
    assert [int(share) for share in shares] == sorted(int(share) for share in shares)


@pytest.mark.parametrize("better", [True, False])
def test_the_log_states_whether_re_ranking_improves_recall(better, caplog):
    (module, rows), runs = judged(better), trainer()
    with caplog.at_level("INFO"):
        runs.test(module, rows, verbose=False)
    plain, reranked = (float(runs.callback_metrics[f"test/{name}recall_mean"]) for name in ("", "rerank_"))
    assert (reranked > plain) == better
    (said,) = [record.message for record in caplog.records if record.message.startswith("Mean recall")]
    assert said.startswith(f"Mean recall is {plain:.1f} by contrast alone and {reranked:.1f} after re-ranking: ")
    assert said.endswith("re-ranking improves it." if better else "set model.rerank.k 0 to disable it.")
    accuracy = float(runs.callback_metrics["test/rerank_pair_accuracy"])
    clause = (
        rf"nearest wrong candidate in {accuracy:.1f}% of \d+ cases, no better than chance, the contrast in \d+\.\d%;"
    )
    assert bool(re.search(clause, said)) != better
    assert accuracy == 100 if better else accuracy < 30
    assert module.evaluation.summary.chance["rerank_pair_accuracy"] == 50


@pytest.mark.parametrize("when", ["test", "always"])
@pytest.mark.parametrize("better", [True, False])
def test_prediction_uses_the_order_that_was_better_in_the_last_evaluation(better, when, tmp_path, caplog):
    module, rows = judged(better, when=when)
    evaluated = trainer()
    evaluated.test(module, rows, verbose=False)
    evaluated.save_checkpoint(tmp_path / "tested.ckpt")
    other, rows = judged(better, when=when)
    with caplog.at_level("INFO"):
        trainer().predict(other, rows, ckpt_path=tmp_path / "tested.ckpt")
    assert (other.evaluation.result.near_texts.match_score is not None) == better
    which = "of the matching head" if better else "by contrast"
    (said,) = [record.message for record in caplog.records if record.message.startswith("Matches are")]
    orders = module.evaluation.orders
    assert said == f"Matches are in the order {which}, the better one: in the last evaluation {orders}."
    assert str(orders).startswith(
        f"mean recall was {float(evaluated.callback_metrics['test/recall_mean']):.1f} by contr"
    )


@pytest.mark.parametrize(
    ("rerank", "reranks", "says"),
    [
        (
            {},
            False,
            "by contrast: no evaluation has compared it with the other one, which `--model.rerank.when always`",
        ),
        (
            {"when": "always"},
            True,
            "of the matching head: no evaluation has compared it with the other one, which `--m",
        ),
        ({"when": "never"}, False, "by contrast, as model.rerank says."),
    ],
)
def test_without_an_evaluation_prediction_is_by_contrast_unless_asked(rerank, reranks, says, caplog):
    module, rows = judged(True, **rerank)
    with caplog.at_level("INFO"):
        trainer().predict(module, rows)
    assert (module.evaluation.result.near_texts.match_score is not None) == reranks
    (said,) = [record.message for record in caplog.records if record.message.startswith("Matches are")]
    assert said.startswith(f"Matches are in the order {says}")
