"""Non-finite scores rank last, and a message names their samples."""

import ast

import pytest
import torch

from support.project.sources import TREES
from vlightning.metrics.finite import NOTHING, best, highest, non_finite_last, some_of

BROKEN = [torch.nan, torch.inf, -torch.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_non_finite_scores_come_after_the_lowest_number(dtype):
    scores = torch.tensor([*BROKEN, -1e4, 3.0], dtype=dtype)
    assert non_finite_last(scores).tolist() == [-torch.inf] * 3 + [scores[3].item(), 3.0]


def test_the_first_are_named_and_the_others_counted():
    assert some_of(torch.tensor([4, 2])) == "4, 2"
    assert some_of(torch.arange(20)) == f"{', '.join(map(str, range(16)))} and 4 more"
    assert some_of(torch.zeros(0)) == "unknown"


def test_the_highest_scores_are_finite_ones():
    scores = torch.tensor([[torch.nan, 1.0, torch.inf, 2.0], [torch.nan, torch.nan, torch.nan, 0.0]])
    assert highest(scores, 2).indices[0].tolist() == [3, 1]
    assert highest(scores, 9).values.tolist() == [[2.0, 1.0, -torch.inf, -torch.inf], [0.0, *[-torch.inf] * 3]]
    assert best(scores).tolist() == [3, 3]
    assert best(torch.tensor([[torch.nan, torch.inf]])).tolist() == [NOTHING]


RANKED = {
    "callbacks/queue.py": "which rows are finite",
    "lightning_modules/albef/downstream/answers.py": "scores of `non_finite_last`; beams: all or no tokens are finite",
    "lightning_modules/albef/downstream/assignment.py": "draws",
    "lightning_modules/albef/itc.py": "which key of the batch is first, for a running mean",
    "lightning_modules/albef/itm.py": "draws",
    "lightning_modules/albef/mlm.py": "draws",
    "lightning_modules/cocord/crd.py": "draws",
    "lightning_modules/mmlg/network.py": "the place of the end token",
    "lightning_modules/networks/clip/text_encoder.py": "the place of the last token",
    "lightning_modules/mobileclip/caption_decoder.py": "draws of tokens",
    "callbacks/figures/evaluation.py": "the first image of a text",
    "callbacks/figures/word_maps.py": "the first image of a text",
    "datamodules/text/clip.py": "the place of the end token",
    "datamodules/base/eval_rows.py": "labels, which are integers",
    "datamodules/reading/division.py": "numbers of rows",
    "datamodules/reading/tar_scan.py": "places of bytes in a header",
    "lightning_modules/evaluation/ranking.py": "the first match, of booleans",
}
"""Files beside `metrics/` that call a function of torch for the highest values, and what the values are."""


def ranks(tree):
    """Whether a file calls topk, argmax, a descending sort, or the maximum along a dimension."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name, options = node.func.attr, {option.arg for option in node.keywords}
        along = isinstance(node.func.value, ast.Name | ast.Attribute) and bool(node.args or "dim" in options)
        if name in ("topk", "argmax") or (name in ("sort", "argsort") and "descending" in options):
            return True
        if name == "max" and along and "default" not in options:
            return True
    return False


def test_every_ranking_by_scores_goes_through_these_functions():
    found = {file for file, tree in TREES.items() if not file.startswith("metrics/") and ranks(tree)}
    assert found == RANKED.keys()
