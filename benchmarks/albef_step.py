"""One ALBEF training step: speed, memory and parts, against the plain formulation of the tests.

    python benchmarks/albef_step.py                # the tables
    python benchmarks/albef_step.py --only parts   # one of: speed, parts, ways, memory

Towers of ViT-S width (384, 12 + 12 layers, 6 heads), 224 px, BERT's vocabulary, texts of 25 tokens, queue 4096. The
plain formulation (`tests/support/methods/plain_albef.py`) has the same weights, data and draws; dropout is off, so that
the losses can be compared. Times are medians of interleaved steps, so that drift of the machine's speed affects all
alike.
"""

import argparse
import contextlib
import gc
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from PIL import Image
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from timing import PRECISIONS, autocast, medians, seconds

from support.methods.plain_albef import PlainALBEF
from vlightning.callbacks import EMACallback
from vlightning.callbacks.speed import CountFlops
from vlightning.datamodules import ImageTextDataModule
from vlightning.lightning_modules import ALBEFModule
from vlightning.lightning_modules.albef import module as albef_module
from vlightning.lightning_modules.albef.itc import image_text_contrast, teacher_keys
from vlightning.lightning_modules.albef.itm import (
    Fused,
    HardNegatives,
    draw_negatives,
    fuse_pairs,
    image_text_matching,
)
from vlightning.lightning_modules.albef.mlm import (
    MaskedTokens,
    draw_masked_tokens,
    masked_language_modeling,
)
from vlightning.lightning_modules.albef.network import ALBEFNetwork, Encoded
from vlightning.lightning_modules.albef.settings import (
    ContrastSettings,
    MemorySettings,
    TextSettings,
    VisionSettings,
)
from vlightning.lightning_modules.evaluation.protocol import Batch
from vlightning.lightning_modules.networks import attention

ALPHA = 0.4


class Step:
    """A module with its optimizer and teacher update, which takes steps as the Trainer does."""

    def __init__(self, options: argparse.Namespace, **memory: Any) -> None:
        torch.manual_seed(0)
        self.module = ALBEFModule(
            vision=VisionSettings(image_size=options.size, width=384, heads=6),
            text=TextSettings(width=384, heads=6, ffn_width=1536, dropout=0.0),
            contrast=ContrastSettings(queue_size=options.queue),
            memory=MemorySettings(**memory),
        )
        self.module.current_alpha = lambda: ALPHA  # type: ignore[method-assign]
        self.losses: dict[str, float] = {}
        self.module.log = lambda *_, **__: None  # type: ignore[method-assign]
        self.module.log_dict = self._keep  # type: ignore[method-assign, assignment]
        self.ema = EMACallback(self.module.momentum_pairs(), log=False)
        optimizers: Any = self.module.configure_optimizers()
        self.optimizer = optimizers["optimizer"]

    def _keep(self, values: dict[str, Tensor], **_: Any) -> None:
        self.losses |= {name: float(value) for name, value in values.items() if "loss_" in name}

    def __call__(self, batch: Batch, precision: str) -> dict[str, float]:
        """Run forward and backward pass, optimizer, teacher update and queues."""
        self.optimizer.zero_grad()
        with autocast(precision):
            outputs = self.module.training_step(batch, 0)
        outputs["loss"].backward()
        self.optimizer.step()
        self.ema.update(self.module)
        self.enqueue(outputs)
        return {name.removeprefix("train/loss_"): value for name, value in self.losses.items()}

    def enqueue(self, outputs: dict[str, Any]) -> None:
        """Enqueue the keys of a batch, as `QueueCallback` does."""
        for name, queue in self.module.queues().items():
            queue.enqueue(outputs["keys"][name], outputs["key_ids"][name])


class PlainStep(Step):
    """The plain formulation of the same step, with torch's default AdamW."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.plain = PlainALBEF(self.module)
        self.optimizer = torch.optim.AdamW(
            [{**group, "fused": False} for group in self.optimizer.param_groups], lr=1e-4
        )

    def __call__(self, batch: Batch, precision: str) -> dict[str, float]:
        """Run forward and backward pass, optimizer, teacher update and queues."""
        losses = self.plain.step(batch, ALPHA, self.optimizer, autocast(precision))
        return {name: float(value.detach()) for name, value in losses.items()}


def make_batch(options: argparse.Namespace) -> Batch:
    """Return random images and texts of 12 to 25 tokens."""
    generator = torch.Generator().manual_seed(0)
    size, length = options.batch, options.length
    ids = torch.randint(1000, 30522, (size, length), generator=generator)
    ids[:, 0] = 101
    mask = (torch.arange(length) < torch.randint(length // 2, length + 1, (size, 1), generator=generator)).long()
    mask[0] = 1
    return {
        "image": torch.randn(size, 3, options.size, options.size, generator=generator),
        "input_ids": ids * mask,
        "attention_mask": mask,
        "image_id": torch.arange(size),
    }


def matmul_rates() -> dict[str, Callable[[], float]]:
    """Return functions that measure a matrix product of the ViT's shapes in flop/s, by precision."""

    def rate(dtype: torch.dtype) -> float:
        left, right = torch.randn(4096, 384, dtype=dtype), torch.randn(384, 1536, dtype=dtype)
        times = [seconds(lambda: left @ right) for _ in range(30)]
        return 2 * 4096 * 384 * 1536 / statistics.median(times[5:])

    return {"32-true": lambda: rate(torch.float32), "bf16-mixed": lambda: rate(torch.bfloat16)}


def speed(options: argparse.Namespace) -> None:
    """Print the speed of both formulations in both precisions, absolute and relative to a matrix product."""
    batch = make_batch(options)
    ours, plain = Step(options), PlainStep(options)
    torch.manual_seed(1)
    first = ours(batch, "32-true")
    torch.manual_seed(1)
    reference = plain(batch, "32-true")
    print("losses of the first step, float32")
    for name, value in reference.items():
        print(f"  {name}: plain {value:.6f}  ours {first[name]:.6f}  difference {abs(first[name] - value):.1e}")

    flops = {}
    for name, step in (("ours", ours), ("plain", plain)):
        with CountFlops() as counter:
            step(batch, "32-true")
        flops[name] = counter.flops
    rates: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    functions: dict[str, Callable[[], Any]] = {
        f"{name} {precision}": lambda step=step, precision=precision: step(batch, precision)
        for precision in PRECISIONS
        for name, step in (("ours", ours), ("plain", plain))
    }
    for precision, measure in matmul_rates().items():
        functions[f"rate {precision}"] = lambda p=precision, m=measure: rates[p].append(m())
    taken = medians(functions, options.repeats)
    slowest = taken["plain 32-true"]
    print(f"\n{'step':18} {'seconds':>8} {'pairs/s':>8} {'x plain f32':>12} {'Tflop':>7} {'share of matmul rate':>21}")
    for precision in PRECISIONS:
        rate = statistics.median(rates[precision])
        for name in ("plain", "ours"):
            value = taken[f"{name} {precision}"]
            share = flops[name] / value / rate
            print(
                f"{name + ' ' + precision:18} {value:8.2f} {options.batch / value:8.2f} {slowest / value:12.2f} "
                f"{flops[name] / 1e12:7.2f} {share:20.0%}"
            )
        print(f"  matrix product, {precision}: {rate / 1e9:.0f} Gflop/s")


def parts(options: argparse.Namespace) -> None:
    """Print the time of each part of a step, forward and backward."""
    batch = make_batch(options)
    step = Step(options)
    module = step.module
    outputs = module.training_step(batch, 0)
    outputs["loss"].backward()
    step.optimizer.step()
    print(f"\n{'part':34} " + " ".join(f"{precision:>11}" for precision in PRECISIONS))
    rows: dict[str, dict[str, float]] = {}
    with images(options) as loader:
        for precision in PRECISIONS:
            measured = medians(_parts(step, batch, precision, loader), options.repeats)
            for name, value in measured.items():
                rows.setdefault(name, {})[precision] = value
    for name, values in rows.items():
        print(f"{name:34} " + " ".join(f"{values[precision]:10.3f}s" for precision in PRECISIONS))
    print(f"{'EMA and queues, share of a step':34} ", end="")
    shares = [(values := {n: rows[n][p] for n in rows})["EMA"] + values["queues"] for p in PRECISIONS]
    print(" ".join(f"{share / rows['whole step'][p]:11.2%}" for share, p in zip(shares, PRECISIONS, strict=True)))


def _parts(step: Step, batch: Batch, precision: str, loader: Iterator[Batch]) -> dict[str, Callable[[], Any]]:
    module = step.module
    torch.manual_seed(1)
    masked, mask = draw_masked_tokens(batch["input_ids"], module.text), batch["attention_mask"]

    def encoded(network: ALBEFNetwork) -> Encoded:
        return network.encode(batch, masked.input_ids, None)

    def contrasted(student: Encoded) -> Any:
        keys = teacher_keys(teacher, batch, module.contrast)
        return image_text_contrast(student, teacher, keys, module.queues(), module.temperature, ALPHA, "image_id", None)

    def words(fused: Tensor) -> Tensor:
        return masked_language_modeling(module.student, module.teacher, fused, teacher, mask, masked, ALPHA, None)

    with autocast(precision), torch.no_grad():
        teacher, student = encoded(module.teacher), encoded(module.student)
        contrast = contrasted(student)
        negatives = draw_negatives(contrast, batch, ContrastSettings())
        fused = _as_leaves(fuse_pairs(module.student, student, mask, negatives, None))
    leaves = _as_leaves(student)
    outputs = teacher_keys(teacher, batch, module.contrast).for_queues()

    def run(forward: Callable[[], Any], backward: bool = True) -> Callable[[], None]:
        def call() -> None:
            step.optimizer.zero_grad()
            with autocast(precision), torch.set_grad_enabled(backward):
                result = forward()
            if backward:
                tensors = [t for t in _flat(result) if t.requires_grad]
                torch.autograd.backward(tensors, [torch.ones_like(t) for t in tensors])

        return call

    def optimizer() -> None:
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        step.optimizer.step()

    optimizer()
    return {
        "whole step": lambda: step(batch, precision),
        "student towers, forward, backward": run(lambda: encoded(module.student)),
        "teacher towers, forward": run(lambda: encoded(module.teacher), backward=False),
        "contrast, forward, backward": run(lambda: contrasted(leaves).loss),
        "negatives": run(lambda: draw_negatives(contrast, batch, ContrastSettings()), backward=False),
        "fusion, forward, backward": run(lambda: fuse_pairs(module.student, leaves, mask, negatives, None)),
        "matching head": run(lambda: image_text_matching(module.itm_head, fused.cls, negatives)),
        "MLM with the teacher's fusion": run(lambda: words(fused.masked)),
        "EMA": lambda: step.ema.update(module),
        "queues": lambda: step.enqueue(outputs),
        "optimizer": optimizer,
        "loader, no worker": lambda: next(loader),
    }


def _as_leaves(record: Any) -> Any:
    return type(record)(*(tensor.detach().requires_grad_() for tensor in record))


def _flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [tensor for part in result for tensor in _flat(part)]


@contextlib.contextmanager
def images(options: argparse.Namespace) -> Iterator[Iterator[Batch]]:
    """Yield a loader of JPEG images of 500 x 375 pixels with captions, decoded and augmented in this process."""
    with tempfile.TemporaryDirectory() as folder:
        lines = []
        for number in range(4 * options.batch):
            noise = torch.randint(256, (6, 8, 3), generator=torch.Generator().manual_seed(number), dtype=torch.uint8)
            Image.fromarray(noise.numpy()).resize((500, 375), Image.Resampling.BICUBIC).save(f"{folder}/{number}.jpg")
            lines.append(json.dumps({"image": f"{number}.jpg", "caption": f"an image with the number {number}"}))
        table = Path(folder, "pairs.jsonl")
        table.write_text("\n".join(lines))
        data = ImageTextDataModule(
            train=str(table),
            image_size=options.size,
            batch_size=options.batch,
            num_workers=0,
            vocab_size=300,
            cache_dir=folder,
        )
        data.setup("fit")

        def forever() -> Iterator[Batch]:
            while True:
                yield from data.train_dataloader()

        yield forever()


class Replaced(Step):
    """A step with a function of `albef/module.py`, or a method of a class, replaced."""

    def __init__(
        self, options: argparse.Namespace, name: str, function: Callable[..., Any], owner: Any = albef_module
    ) -> None:
        super().__init__(options)
        self.name = name
        self.function = function
        self.owner = owner

    def __call__(self, batch: Batch, precision: str) -> dict[str, float]:
        """Run the step with the replaced function."""
        with patch.object(self.owner, self.name, self.function):
            return super().__call__(batch, precision)


def fuse_separately(
    network: ALBEFNetwork, encoded: Encoded, mask: Tensor, negatives: HardNegatives, slice_rows: int | None
) -> Fused:
    """Run each group of rows through the fusion encoder separately."""
    negative_image, negative_text = negatives.image.row, negatives.text.row
    text, tokens, masked, fuse = encoded.text_states, encoded.image_tokens, encoded.masked_states, network.fuse
    assert masked is not None
    pairs, wrong = fuse(text, mask, tokens)[:, 0], fuse(text, mask, tokens[negative_image])[:, 0]
    with_negative_text = fuse(text[negative_text], mask[negative_text], tokens)[:, 0]
    return Fused(torch.stack([pairs, wrong, with_negative_text], 1), fuse(masked, mask, tokens))


def fuse_with_copied_keys(
    network: ALBEFNetwork, encoded: Encoded, mask: Tensor, negatives: HardNegatives, slice_rows: int | None
) -> Fused:
    """Run one fusion pass with image tokens that are copied and projected for every row."""
    negative_image, negative_text = negatives.image.row, negatives.text.row
    text, tokens, masked = encoded.text_states, encoded.image_tokens, encoded.masked_states
    assert masked is not None
    fused = network.fuse(
        torch.cat([text, text, text[negative_text], masked]),
        torch.cat([mask, mask, mask[negative_text], mask]),
        torch.cat([tokens, tokens[negative_image], tokens, tokens]),
    )
    pairs, wrong, with_negative_text, words = fused.chunk(4)
    return Fused(torch.stack([pairs[:, 0], wrong[:, 0], with_negative_text[:, 0]], 1), words)


def encode_texts_separately(network: ALBEFNetwork, batch: Batch, masked_ids: Tensor, slice_rows: int | None) -> Encoded:
    """Run captions and masked captions through the text layers separately."""
    mask = batch["attention_mask"]
    tokens = network.encode_image(batch["image"])
    text, words = network.encode_text(batch["input_ids"], mask), network.encode_text(masked_ids, mask)
    return Encoded(tokens, text, words, network.project_image(tokens), network.project_text(text))


def mask_at_every_position(input_ids: Tensor, text: TextSettings) -> MaskedTokens:
    """Run the language-model head on all positions."""
    masked = draw_masked_tokens(input_ids, text)
    labels = torch.full_like(input_ids, -100).flatten()
    labels[masked.positions] = masked.labels
    return MaskedTokens(masked.input_ids, torch.arange(labels.numel()), labels)


class OtherAttention(Step):
    """A step with the slower implementation of attention in each place."""

    def __call__(self, batch: Batch, precision: str) -> dict[str, float]:
        """Run the step with the other choice, also in recomputations."""
        chosen = attention._fused
        attention._fused = lambda *args: not chosen(*args)
        try:
            return super().__call__(batch, precision)
        finally:
            attention._fused = chosen


def ways(options: argparse.Namespace) -> None:
    """Print the time that each optimization saves: a step without this optimization, compared with all of them."""
    batch = make_batch(options)
    without: dict[str, Callable[[], Step]] = {
        "masked rows only": lambda: Replaced(options, "draw_masked_tokens", mask_at_every_position),
        "one fusion pass for all rows": lambda: Replaced(options, "fuse_pairs", fuse_separately),
        "keys and values projected once": lambda: Replaced(options, "fuse_pairs", fuse_with_copied_keys),
        "both texts in one pass": lambda: Replaced(options, "encode", encode_texts_separately, ALBEFNetwork),
        "attention by the faster formulation": lambda: OtherAttention(options),
    }
    step = Step(options)
    plain = PlainALBEF(step.module)
    default = torch.optim.AdamW([{**group, "fused": False} for group in step.optimizer.param_groups], lr=1e-4)
    print(f"\n{'way':38} " + " ".join(f"{precision + ', saved':>22}" for precision in PRECISIONS))
    rows: dict[str, list[str]] = {}
    for precision in PRECISIONS:
        base_and_other: dict[str, tuple[float, float]] = {}
        for name, make in without.items():
            other = make()
            taken = medians(
                {
                    "with": lambda p=precision: step(batch, p),
                    "without": lambda p=precision, o=other: o(batch, p),
                },
                options.repeats,
            )
            base_and_other[name] = taken["with"], taken["without"]
            del other
            gc.collect()
        taken = medians(
            {
                "step": lambda p=precision: step(batch, p),
                "ema": lambda: step.ema.update(step.module),
                "plain ema": plain.update_teacher,
                "fused": step.optimizer.step,
                "default": default.step,
            },
            options.repeats,
        )
        base_and_other["averaging all tensors at once"] = (
            taken["step"],
            taken["step"] + taken["plain ema"] - taken["ema"],
        )
        base_and_other["fused AdamW"] = taken["step"], taken["step"] + taken["default"] - taken["fused"]
        for name, (base, other_time) in base_and_other.items():
            rows.setdefault(name, []).append(f"{other_time - base:9.3f}s {(other_time - base) / other_time:10.0%}")
    for name, cells in rows.items():
        print(f"{name:38} " + " ".join(f"{cell:>22}" for cell in cells))


def memory(options: argparse.Namespace) -> None:
    """Print the peak resident memory of three steps over the baseline memory, each variant in a new process."""
    variants = {
        "plain": ["plain", "{}"],
        "ours": ["ours", "{}"],
        "ours, activation_checkpointing": ["ours", '{"activation_checkpointing": true}'],
        "ours, micro_batch_size 4": ["ours", '{"micro_batch_size": 4}'],
        "ours, both": ["ours", '{"micro_batch_size": 4, "activation_checkpointing": true}'],
    }
    print(f"\n{'peak memory over the baseline':34} " + " ".join(f"{p:>22}" for p in PRECISIONS))
    base: dict[str, float] = {}
    for name, words in variants.items():
        cells = []
        for precision in PRECISIONS:
            command = [sys.executable, __file__, "--measure", *words, precision]
            command += [f"--{key}={getattr(options, key)}" for key in ("batch", "size", "length", "queue")]
            answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            peak = float(answer.split()[-1])
            base.setdefault(precision, peak)
            cells.append(f"{peak:5.2f} GiB {peak / base[precision]:5.0%}")
        print(f"{name:34} " + " ".join(f"{cell:>22}" for cell in cells))


def measure(options: argparse.Namespace) -> None:
    """Print the memory of one variant in GiB."""
    formulation, changes, precision = options.measure
    # A first product, so that buffers of libraries belong to the baseline memory.
    torch.randn(64, 64) @ torch.randn(64, 64)
    bare = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = PlainStep(options) if formulation == "plain" else Step(options, **json.loads(changes))
    batch = make_batch(options)
    for _ in range(3):
        step(batch, precision)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - bare) / 2**20)


def main() -> None:
    """Print the selected tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = {"speed": speed, "parts": parts, "ways": ways, "memory": memory}
    parser.add_argument("--only", choices=tables, help="print one table")
    parser.add_argument("--batch", type=int, default=16, help="pairs")
    parser.add_argument("--size", type=int, default=224, help="side of the images in pixels")
    parser.add_argument("--length", type=int, default=25, help="tokens of the longest text")
    parser.add_argument("--queue", type=int, default=4096, help="keys in each queue")
    parser.add_argument("--repeats", type=int, default=5, help="number of steps for a median")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options)
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, batch {options.batch}, {options.size} px")
    for name, table in tables.items():
        if options.only in (None, name):
            table(options)
            gc.collect()


if __name__ == "__main__":
    main()
