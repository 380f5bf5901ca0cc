"""Downstream tasks of ALBEF: speed of a training step and of answering, against the plain formulation of the tests.

    python benchmarks/albef_downstream.py --task vqa

Towers of ViT-S width (384, 12 + 12 layers, 6 heads, a decoder of 6), BERT's vocabulary. The plain formulation
(`tests/support/plain_vqa.py`) has the same weights and data; dropout is off. Times are medians of interleaved calls, so
that drift of the machine's speed affects all alike. A task is a function in `TASKS` that returns its pairs of calls.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from timing import medians

from support.plain_vqa import PlainVQA
from vlightning.lightning_modules import VQAModule
from vlightning.lightning_modules.albef.downstream.answers import rank_answers, target_places
from vlightning.lightning_modules.albef.downstream.settings import TaskVisionSettings
from vlightning.lightning_modules.albef.settings import TextSettings

Pair = tuple[Callable[[], Any], Callable[[], Any]]
ALPHA = 0.4


def vqa(options: argparse.Namespace) -> dict[str, Pair]:
    """Return the plain call and this package's for a step of training, and for ranking a list; both check equality."""
    torch.manual_seed(0)
    module = VQAModule(
        vision=TaskVisionSettings(image_size=options.size, width=384, heads=6),
        text=TextSettings(width=384, heads=6, ffn_width=1536, dropout=0.0),
    )
    module.current_alpha = lambda: ALPHA  # type: ignore[method-assign]
    module.log = lambda *_, **__: None  # type: ignore[method-assign, assignment]
    plain, batch = PlainVQA(module), questions(options)
    listed, mask = answers(options.answers)

    def train(loss: Callable[[], torch.Tensor]) -> float:
        module.zero_grad()
        value = loss()
        value.backward()
        return value.item()

    @torch.no_grad()
    def rank() -> tuple[torch.Tensor, torch.Tensor]:
        encoded = module(batch["unique"], batch["input_ids"], batch["attention_mask"], batch["image_index"])
        return rank_answers(module.student, encoded, listed, mask, options.candidates, 4096)

    first, second = train(lambda: plain.loss(batch, ALPHA)), train(lambda: module.training_step(batch, 0))
    print(f"loss: plain {first:.6f}, this package {second:.6f}")
    (ids, probabilities), ranked = plain.rank(batch, listed, mask, options.candidates), rank()
    print(f"probabilities of the answers: largest difference {(probabilities - ranked[1]).abs().max():.1e}")
    assert abs(first - second) < 1e-4 * abs(first)
    assert (ids[:, 0] == ranked[0][:, 0]).all()
    return {
        "training step": (
            lambda: train(lambda: plain.loss(batch, ALPHA)),
            lambda: train(lambda: module.training_step(batch, 0)),
        ),
        "ranking": (lambda: plain.rank(batch, listed, mask, options.candidates), rank),
    }


def questions(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Return questions of 8 to 14 tokens; four on each image; one to five distinct answers of one to three words."""
    draws = torch.Generator().manual_seed(0)
    rows, length = options.questions, 14
    lengths = torch.randint(8, length + 1, (rows,), generator=draws)
    mask = (torch.arange(length) < lengths[:, None]).long()
    counts = torch.randint(1, 6, (rows,), generator=draws)
    ids, answer_mask = answers(int(counts.sum()), draws)
    index = torch.arange(rows) // 4
    unique = torch.randn(int(index[-1]) + 1, 3, options.size, options.size, generator=draws)
    return {
        "unique": unique,
        "image": unique[index],
        "image_index": index,
        "input_ids": torch.randint(1000, 30000, (rows, length), generator=draws) * mask,
        "attention_mask": mask,
        "answer_ids": ids,
        "answer_mask": answer_mask,
        "answer_index": torch.arange(rows).repeat_interleave(counts),
        "answer_weight": torch.rand(len(ids), generator=draws),
        "answer_places": target_places(answer_mask),
    }


def answers(count: int, draws: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask of answers with one word (60%), two (25%) or three."""
    draws = draws or torch.Generator().manual_seed(1)
    words = 1 + torch.multinomial(torch.tensor([0.6, 0.25, 0.15]), count, replacement=True, generator=draws)
    ids = torch.randint(1000, 30000, (count, 5), generator=draws)
    ids[:, 0] = 101
    ids[torch.arange(count), words + 1] = 102
    mask = (torch.arange(5) <= words[:, None] + 1).long()
    return ids * mask, mask


TASKS: dict[str, Callable[[argparse.Namespace], dict[str, Pair]]] = {"vqa": vqa}


def main() -> None:
    """Print a row for each pair of calls."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="vqa")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--answers", type=int, default=3128)
    parser.add_argument("--candidates", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    for name, (plain, own) in TASKS[options.task](options).items():
        found = medians({"plain": plain, "own": own}, options.repeats)
        plain_seconds, seconds = found["plain"], found["own"]
        print(f"{name}: plain {plain_seconds:.2f} s, this package {seconds:.2f} s, {plain_seconds / seconds:.2f} x")


if __name__ == "__main__":
    main()
