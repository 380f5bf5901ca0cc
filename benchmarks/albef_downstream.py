"""Downstream tasks of ALBEF: speed of a training step and of answering, against the plain formulation of the tests.

    python benchmarks/albef_downstream.py --task vqa

Towers of ViT-S width (384, 12 + 12 layers, 6 heads, a decoder of 6), BERT's vocabulary. The plain formulation
(`tests/support/methods/plain_tasks.py`) has the same weights and data; dropout is off. Times are medians of interleaved
calls, so that drift of the machine's speed affects all alike. Before that, both are compared: losses are equal to 1e-5.

VQA has two steps of training: with a question of an image, as the authors read them, and with `--per-image` questions
of an image (`data.questions_per_image`), which the plain formulation encodes once for each question.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from timing import medians

from support.methods.plain_tasks import PlainClassifier, PlainVQA
from vlightning.lightning_modules import EntailmentModule, NLVR2Module, VQAModule
from vlightning.lightning_modules.albef.downstream.answers import rank_answers, target_positions
from vlightning.lightning_modules.albef.settings import TaskVisionSettings, TextSettings

Pair = tuple[Callable[[], Any], Callable[[], Any]]
Batch = dict[str, torch.Tensor]
ALPHA = 0.4
LENGTH = 14
"""Tokens of the longest text."""


def vqa(options: argparse.Namespace) -> dict[str, Pair]:
    """Return the plain call and this package's for two steps of training, and for ranking a list."""
    module = built(VQAModule, options)
    plain = PlainVQA(module)
    alone = questions(options, 1)
    shared = questions(options, options.per_image)
    repeated = shared | {"image": shared["image"][shared["image_index"]]}
    listed, mask = answers(options.answers)

    @torch.no_grad()
    def rank() -> tuple[torch.Tensor, torch.Tensor]:
        encoded = module(*(shared[name] for name in ("image", "input_ids", "attention_mask", "image_index")))
        return rank_answers(module.student, encoded, listed, mask, options.candidates, 4096)

    (ids, probabilities), ranked = plain.rank(repeated, listed, mask, options.candidates), rank()
    print(f"probabilities of the answers: largest difference {(probabilities - ranked[1]).abs().max():.1e}")
    assert (probabilities - ranked[1]).abs().max() < 1e-5
    assert (ids[:, 0] == ranked[0][:, 0]).all()
    return {
        "training step, a question of an image": steps(module, lambda: plain.loss(alone, ALPHA), alone),
        f"training step, {options.per_image} questions of an image": steps(
            module, lambda: plain.loss(repeated, ALPHA), shared
        ),
        f"ranking, {options.per_image} questions of an image": (
            lambda: plain.rank(repeated, listed, mask, options.candidates),
            rank,
        ),
    }


def entailment(options: argparse.Namespace) -> dict[str, Pair]:
    """Return the plain call and this package's for a step of training."""
    return classifier(EntailmentModule, ("image",), 3, options)


def nlvr(options: argparse.Namespace) -> dict[str, Pair]:
    """Return the plain call and this package's for a step of training."""
    return classifier(NLVR2Module, ("image_left", "image_right"), 2, options)


def classifier(kind: type, images: tuple[str, ...], classes: int, options: argparse.Namespace) -> dict[str, Pair]:
    """Return the plain call and this package's for a step of a task with texts of 8 to 14 tokens."""
    module, draws = built(kind, options), torch.Generator().manual_seed(0)
    batch = texts(options.rows, draws)
    shape = options.rows, 3, options.size, options.size
    batch |= {name: torch.randn(shape, generator=draws) for name in images}
    batch["label"] = torch.randint(classes, (options.rows,), generator=draws)
    plain = PlainClassifier(module)
    return {"training step": steps(module, lambda: plain.loss(batch, ALPHA), batch)}


def built(kind: type, options: argparse.Namespace) -> Any:
    """Return a task's module, whose weights are drawn and whose logs go nowhere."""
    torch.manual_seed(0)
    module = kind(
        vision=TaskVisionSettings(image_size=options.size, width=384, heads=6),
        text=TextSettings(width=384, heads=6, ffn_width=1536, dropout=0.0),
    )
    module.current_alpha = lambda: ALPHA
    module.log = lambda *_, **__: None
    return module


def steps(module: Any, plain_loss: Callable[[], torch.Tensor], batch: Batch) -> Pair:
    """Return forward and backward pass of the plain formulation and of this package, whose losses are compared."""

    def train(loss: Callable[[], torch.Tensor]) -> float:
        module.zero_grad()
        value = loss()
        value.backward()
        return value.item()

    pair: Pair = lambda: train(plain_loss), lambda: train(lambda: module.training_step(batch, 0))
    first, second = (call() for call in pair)
    print(f"loss: plain {first:.6f}, this package {second:.6f}")
    assert abs(first - second) < 1e-5 * abs(first)
    return pair


def texts(rows: int, draws: torch.Generator) -> Batch:
    """Return texts of 8 to 14 tokens."""
    lengths = torch.randint(8, LENGTH + 1, (rows,), generator=draws)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return {"input_ids": torch.randint(1000, 30000, (rows, LENGTH), generator=draws) * mask, "attention_mask": mask}


def questions(options: argparse.Namespace, per_image: int) -> Batch:
    """Return questions; one to five distinct answers of one to three words."""
    draws = torch.Generator().manual_seed(0)
    rows = options.rows
    asked = texts(rows, draws)
    counts = torch.randint(1, 6, (rows,), generator=draws)
    ids, answer_mask = answers(int(counts.sum()), draws)
    index = torch.arange(rows) // per_image
    batch = {
        "image": torch.randn(int(index[-1]) + 1, 3, options.size, options.size, generator=draws),
        **asked,
        "answer_ids": ids,
        "answer_mask": answer_mask,
        "answer_index": torch.arange(rows).repeat_interleave(counts),
        "answer_weight": torch.rand(len(ids), generator=draws),
        "answer_positions": target_positions(answer_mask),
    }
    return batch if per_image == 1 else batch | {"image_index": index}


def answers(count: int, draws: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask of answers with one word (60%), two (25%) or three."""
    draws = draws or torch.Generator().manual_seed(1)
    words = 1 + torch.multinomial(torch.tensor([0.6, 0.25, 0.15]), count, replacement=True, generator=draws)
    ids = torch.randint(1000, 30000, (count, 5), generator=draws)
    ids[:, 0] = 101
    ids[torch.arange(count), words + 1] = 102
    mask = (torch.arange(5) <= words[:, None] + 1).long()
    return ids * mask, mask


TASKS: dict[str, Callable[[argparse.Namespace], dict[str, Pair]]] = {"vqa": vqa, "entailment": entailment, "nlvr": nlvr}


def main() -> None:
    """Print a row for each pair of calls."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=[*TASKS, "all"], default="all")
    parser.add_argument("--size", type=int, default=224, help="side of the images in pixels")
    parser.add_argument("--rows", type=int, default=16, help="questions or texts of a batch")
    parser.add_argument("--per-image", type=int, default=4, help="questions of an image, where they share it")
    parser.add_argument("--answers", type=int, default=3128, help="answers of the list")
    parser.add_argument("--candidates", type=int, default=128, help="answers that are ranked by all tokens")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    for task in TASKS if options.task == "all" else [options.task]:
        for name, (plain, own) in TASKS[task](options).items():
            found = medians({"plain": plain, "own": own}, options.repeats)
            plain_seconds, seconds = found["plain"], found["own"]
            ratio = plain_seconds / seconds
            print(
                f"{task}, {name}: plain {plain_seconds:.2f} s, this package {seconds:.2f} s, {ratio:.2f} x", flush=True
            )


if __name__ == "__main__":
    main()
