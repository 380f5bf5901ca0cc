"""A training step of two towers beside sentence-transformers' trainer, on the same networks, images and captions.

    python benchmarks/two_towers.py --sentence_transformers FOLDER

FOLDER has sentence-transformers (at least 6.2) and accelerate, as `pip install --no-deps --target FOLDER` writes them.
The networks are EfficientNet-lite0 at 224 pixels and a BERT of MiniLM's sizes, both with random weights, each with the
mean of its outputs and a linear layer to 512 numbers; the images are drawn JPEG files. In sentence-transformers the
image tower is `TimmWrapperModel` in a `Router`, and the loss `MultipleNegativesSymmetricRankingLoss`. Both trainers
clip gradients and step AdamW. With the image tower locked, its weights have no gradients in both.

Each trainer runs in a process of its own with one thread and no loader workers, in turns. Printed are medians of all
steps but the first two, in processor seconds, which other work on the machine changes little: from the batch in memory
to the optimizer's step, and with the loading and decoding of the batch. `--way` runs one of them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from embed import write_pairs

IMAGES, WIDTH, EMBED = "tf_efficientnet_lite0", 1280, 512
TEXT = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
WAYS = ("vlightning", "sentence-transformers")
SKIPPED = 2


class Clock:
    """Processor seconds of steps, and of steps with their loading."""

    def __init__(self) -> None:
        self.begun: list[float] = []
        self.ended: list[float] = []

    def begin(self) -> None:
        """Note that a batch is in memory."""
        self.begun.append(time.process_time())

    def end(self) -> None:
        """Note that the optimizer has stepped."""
        self.ended.append(time.process_time())

    def seconds(self) -> dict[str, list[float]]:
        """Return the seconds of the steps after the first ones."""
        steps = [end - begin for begin, end in zip(self.begun, self.ended, strict=True)]
        whole = [after - before for before, after in zip(self.ended, self.ended[1:], strict=False)]
        return {"step": steps[SKIPPED:], "with loading": whole[SKIPPED - 1 :]}


def write_networks(folder: Path, captions: list[str]) -> None:
    """Write the folders of both networks, with random weights."""
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, TimmWrapperConfig, TimmWrapperModel

    from vlightning.common.tokenizers import special_tokens, tokenizer_from_json
    from vlightning.datamodules.text.tokenizers import train_wordpiece

    BertModel(BertConfig(**TEXT)).save_pretrained(folder / "text")
    backend = tokenizer_from_json(train_wordpiece(captions, 30522)).backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens(backend)).save_pretrained(folder / "text")
    TimmWrapperModel(TimmWrapperConfig(architecture=IMAGES, num_labels=0)).save_pretrained(folder / "image")
    config = json.loads((folder / "image/config.json").read_text())
    half = [0.5, 0.5, 0.5]
    sizes = {"input_size": [3, 224, 224], "mean": half, "std": half, "interpolation": "bicubic", "crop_pct": 1.0}
    (folder / "image/config.json").write_text(json.dumps(config | {"pretrained_cfg": sizes | {"crop_mode": "center"}}))


def train_vlightning(folder: Path, typed: argparse.Namespace) -> Clock:
    """Train with this package."""
    from lightning.pytorch import Callback, Trainer

    from vlightning.datamodules import ImageTextDataModule
    from vlightning.lightning_modules import CLIPModule

    clock = Clock()

    class Times(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            clock.begin()

        def on_train_batch_end(self, *_: Any) -> None:
            clock.end()

    pair = {
        "image": {"name": IMAGES, "weights": "random"},
        "text": {"name": str(folder / "text")},
        "projection_dim": EMBED,
    }
    tuning = {"lock_image": "all"} if typed.locked else {"batch_norm": "trained"}
    module = CLIPModule(pair, max_tokens=32, tuning=tuning)
    data = ImageTextDataModule(
        train=str(folder / "pairs.csv"), max_tokens=32, num_workers=0, batch_size=typed.batch, horizontal_flip=False
    )
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", max_steps=typed.steps, gradient_clip_val=1.0, callbacks=[Times()], **quiet)
    trainer.fit(module, data)
    return clock


def train_sentence_transformers(folder: Path, typed: argparse.Namespace) -> Clock:
    """Train with sentence-transformers."""
    sys.path.insert(0, typed.sentence_transformers)
    import datasets
    import torch
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.modules import (
        Dense,
        Normalize,
        Pooling,
        Router,
        Transformer,
    )
    from transformers import TrainerCallback

    clock = Clock()

    class Times(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.end()

    def tower(name: str, width: int) -> list[Any]:
        linear = Dense(width, EMBED, bias=False, activation_function=torch.nn.Identity())
        return [Transformer(str(folder / name)), Pooling(width), linear]

    towers = {"image": tower("image", WIDTH), "text": tower("text", TEXT["hidden_size"])}
    if typed.locked:
        towers["image"][0].requires_grad_(False)
    routes = {(None, "image"): "image", (None, "text"): "text"}
    model = SentenceTransformer(modules=[Router(towers, route_mappings=routes), Normalize()], device="cpu")
    lines = [line.split(",", 1) for line in (folder / "pairs.csv").read_text().splitlines()[1:]]
    columns = {"image": [str(folder / name) for name, _ in lines], "caption": [caption for _, caption in lines]}
    rows = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder / "output"),
        per_device_train_batch_size=typed.batch,
        max_steps=typed.steps,
        max_grad_norm=1.0,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        router_mapping={"image": "image", "caption": "text"},
    )
    loss = losses.MultipleNegativesSymmetricRankingLoss(model)
    SentenceTransformerTrainer(model, arguments, train_dataset=rows, loss=loss, callbacks=[Times()]).train()
    return clock


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sentence_transformers", required=True, help="folder with sentence-transformers and accelerate"
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", type=int, default=512, help="longer side of the files in pixels")
    parser.add_argument("--locked", action="store_true", help="of the run that --way chooses")
    parser.add_argument("--way", choices=WAYS, help="print the seconds of the steps of one trainer, as JSON")
    parser.add_argument("--folder", type=Path, help="of the networks and pairs, with --way")
    typed = parser.parse_args()
    if typed.way is not None:
        train = train_vlightning if typed.way == WAYS[0] else train_sentence_transformers
        print(json.dumps(train(typed.folder, typed).seconds()))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pairs = typed.batch * typed.steps
        table = write_pairs(folder, pairs, typed.side)
        write_networks(folder, [line.split(",", 1)[1] for line in table.read_text().splitlines()[1:]])
        print(f"batches of {typed.batch}, processor seconds, medians of {typed.rounds} runs of {typed.steps} steps")
        print(f"{'':<16}{'':<14}{WAYS[0]:>12}{WAYS[1]:>24}{'times':>8}")
        for locked in (False, True):
            seconds: dict[str, dict[str, list[float]]] = {way: {"step": [], "with loading": []} for way in WAYS}
            for _ in range(typed.rounds):
                for way in WAYS:
                    words = ["--sentence_transformers", typed.sentence_transformers, "--way", way, "--folder", name]
                    words += ["--batch", str(typed.batch), "--steps", str(typed.steps), *["--locked"] * locked]
                    done = subprocess.run(
                        [sys.executable, __file__, *words],
                        check=True,
                        stdout=subprocess.PIPE,
                        text=True,
                        env=os.environ | {"OMP_NUM_THREADS": "1"},
                    )
                    for kind, taken in json.loads(done.stdout.splitlines()[-1]).items():
                        seconds[way][kind] += taken
            for kind in ("step", "with loading"):
                first, second = (statistics.median(seconds[way][kind]) for way in WAYS)
                tower = "image locked" if locked else "full"
                print(f"{tower:<16}{kind:<14}{first:>12.2f}{second:>24.2f}{second / first:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
