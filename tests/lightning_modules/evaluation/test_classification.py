"""Accuracy by definition, also with non-finite logits, on one process and on two."""

import pytest
import torch
from torch.utils.data import DataLoader

from support.methods.tiny_modules import trainer
from support.runs.distributed import rank_trainer, run_distributed
from vlightning.callbacks import rank
from vlightning.lightning_modules.base.method import Method
from vlightning.lightning_modules.evaluation.classification import ClassificationEvaluation

CLASSES, IMAGES = 7, 23
DEAD = [3, 9, 20]


class GivenLogits(Method):
    """An image is its logits."""

    def __init__(self):
        super().__init__()
        self.evaluation = ClassificationEvaluation()

    def forward(self, image):
        return image


def images(dead):
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(IMAGES, CLASSES, generator=draws)
    logits[dead] = torch.nan
    label = torch.randint(CLASSES, (IMAGES,), generator=draws)
    return logits, label


def measured(make, dead, first=None):
    logits, label = images(dead)
    rows = [
        {"image": image, "label": number, "sample_index": place}
        for place, (image, number) in enumerate(zip(logits, label, strict=True))
    ]
    if first is not None:
        rows = rows[:first] if rank() == 0 else rows[first:]
    runs = make()
    runs.validate(GivenLogits(), DataLoader(rows, 4 if len(rows) < 20 else 6), verbose=False)
    return {name: value.item() for name, value in runs.callback_metrics.items() if name != "val/loss"}


def measured_on_rank(dead, first):
    return measured(lambda: rank_trainer("ddp", use_distributed_sampler=False), dead, first)


def by_loops(dead):
    logits, label = images(dead)
    ranks = [
        sum(score > row[own] for score in row) if row.isfinite().all() else CLASSES
        for row, own in zip(logits, label.tolist(), strict=True)
    ]
    found = {f"val/top{k}": 100 * sum(int(place) < k for place in ranks) / IMAGES for k in (1, 5)}
    return found | ({"val/non_finite": len(dead)} if dead else {})


@pytest.mark.parametrize("dead", [[], DEAD, list(range(IMAGES))])
def test_non_finite_logits_are_misses_and_are_counted(dead, recwarn):
    assert measured(trainer, dead) == pytest.approx(by_loops(dead))
    said = [str(warning.message) for warning in recwarn if "non-finite logits" in str(warning.message)]
    assert [text.split(")")[0] for text in said] == (
        [
            f"Found non-finite logits for {len(dead)} of {IMAGES} images (sample_index "
            f"{', '.join(map(str, dead[:16]))}" + (f" and {len(dead) - 16} more" if len(dead) > 16 else "")
        ]
        if dead
        else []
    )


def test_two_processes_equal_one_process():
    for found in run_distributed(measured_on_rank, DEAD, 12):
        assert found == pytest.approx(by_loops(DEAD))


def test_means_of_many_samples_are_not_rounded_in_half_precision():
    evaluation = ClassificationEvaluation(top={"top1": 1})
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        evaluation.to(dtype)  # as the trainer's precision does with the whole module
        evaluation.start()
        for right in (True, False, True):
            logits = torch.tensor([[4.0, 0.0] if right else [0.0, 4.0]]).expand(1000, 2)
            evaluation.accuracy.update("val", logits, torch.zeros(1000, dtype=torch.long), torch.arange(1000))
            evaluation.losses["val"].update(torch.full((1000,), 1.25))
        (mean,) = (metric.compute() for _, metric in evaluation.accuracy._of("val"))
        assert float(mean) == pytest.approx(2 / 3, rel=1e-6)
        assert float(evaluation.losses["val"].compute()) == 1.25
