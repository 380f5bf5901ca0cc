"""A step of SHRe against the sum of its parts, and the share of the teacher.

    python benchmarks/shre_step.py

The thesis' sizes, random weights, a batch in memory. "parts" are the teacher's forward pass, and forward
and backward of the image encoder, of the text encoder and of the shared encoder (each with a plain sum for a loss), and
the optimizer's step, one after another; "step" is `SHReModule`'s. Medians of interleaved calls.
"""

import argparse
from typing import Any

import torch
from timing import PRECISIONS, autocast, medians
from torch import Tensor

from vlightning.lightning_modules import SHReModule
from vlightning.lightning_modules.networks.attention import set_vit_attention
from vlightning.lightning_modules.networks.classifiers import build_classifier
from vlightning.lightning_modules.optim.optimizers import channels_last
from vlightning.lightning_modules.shre.shared import Shared


class Steps:
    """A module with its teacher and optimizer."""

    def __init__(self, shared: Shared, rows: int, tokens: int) -> None:
        torch.manual_seed(0)
        self.module = SHReModule(
            shared=shared, teacher={"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)}
        )
        self.module.teacher.network = build_classifier("timm/resnet50", 1000).requires_grad_(False).eval()
        channels_last(self.module.teacher)
        self.module.log = self.module.log_dict = lambda *_, **__: None  # type: ignore[method-assign]
        self.module._trainer = None
        optimizers: Any = self.module.configure_optimizers()
        self.optimizer = optimizers["optimizer"]
        self.batch = {
            "image": torch.randn(rows, 3, 224, 224),
            "input_ids": torch.randint(1000, 30000, (rows, tokens)),
            "attention_mask": torch.ones(rows, tokens, dtype=torch.long),
            "image_id": torch.arange(rows),
        }
        # Input of the shared encoder: one token of each encoder, or all tokens.
        width, whole = self.module.vision.width, shared == "transformer"
        self.tokens = [torch.randn(rows, count if whole else 1, width) for count in (197, tokens)]

    def step(self, precision: str) -> None:
        """Run forward and backward pass and optimizer."""
        self.optimizer.zero_grad()
        with autocast(precision):
            loss = self.module.training_step(self.batch, 0)
        loss.backward()
        self.optimizer.step()

    def teacher(self, precision: str) -> None:
        """Run the teacher's forward pass."""
        with autocast(precision), torch.no_grad():
            self.module.teacher.network(self.batch["image"])

    def parts(self, precision: str) -> None:
        """Run the parts one after another."""
        self.optimizer.zero_grad()
        self.teacher(precision)
        student = self.module.student
        with autocast(precision):
            set_vit_attention(student.image_encoder, self.batch["image"])
        for part in (
            lambda: student.image_encoder(self.batch["image"]),
            lambda: student.text_encoder(self.batch["input_ids"], self.batch["attention_mask"]),
            *(lambda tokens=tokens: torch.cat(student.shared_encoder(tokens), 1) for tokens in self.tokens),
        ):
            with autocast(precision):
                found: Tensor = part()
            found.float().sum().backward()
        self.optimizer.step()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32, help="pairs in a step")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of each caption")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shared", default="mlp", choices=["mlp", "transformer"])
    options: Any = parser.parse_args()
    steps = Steps(options.shared, options.batch, options.tokens)
    print(f"SHRe, {options.shared}, {options.batch} pairs, {torch.get_num_threads()} threads")
    for precision in PRECISIONS:
        ways = {name: getattr(steps, name) for name in ("step", "parts", "teacher")}
        found = medians(
            {name: lambda way=way, precision=precision: way(precision) for name, way in ways.items()}, options.repeats
        )
        print(
            f"{precision:12} {options.batch / found['step']:6.2f} pairs/s; step {found['step']:.2f} s, parts "
            f"{found['parts']:.2f} s: {found['step'] / found['parts']:.2f}; teacher {found['teacher']:.2f} s: "
            f"{found['teacher'] / found['step']:.0%}"
        )


if __name__ == "__main__":
    main()
