r"""New towers in the space of an old pair: recall of their queries and images in the old pair's index, over seeds.

    python benchmarks/new_tower.py runs/new_tower --data data --seeds 0 1 2 --threads 1

`data` has `emoji/{twitter,google}.parquet`, drawings with their English `name`, and the towers of `docs/two_towers.md`
as `towers/efficientnet_lite0.safetensors` and `towers/minilm`; the German names are those of the package `emoji`.

The old pair is heads on two locked towers, trained on Twitter's drawings with English names; its index holds Google's
drawings of all emoji. New text towers learn German from names in both languages, without an image; a new image
tower learns from Twitter's drawings. Queries are the names of all emoji that have a German one. Each line of results
is a row of `vlightning evaluate --index`, with the arm, the seed and the commit. Finished arms are not repeated, and an
interrupted training goes on.
"""

import argparse
import json
import re
import unicodedata
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from proof.training import commit
from tables import CLI, fit, last_checkpoint, run, spread

ROOT = Path(__file__).resolve().parent.parent
SIZE, TOKENS = 96, 16
MEAN, STD = "[0.485,0.456,0.406]", "[0.229,0.224,0.225]"
DIMS = (512, 256, 128, 64)
PREFIXES = "--model.loss.prefixes=[256,128,64]"
EMOJI = ("--data.batch_size=64", "--data.eval_batch_size=128", "--data.num_workers=0", "--trainer.accelerator=cpu")


class Arm(NamedTuple):
    """A new tower: which side, its words for `vlightning fit`, its epochs, and its share of the training rows."""

    side: str
    words: Sequence[str]
    epochs: int
    share: float = 1.0


SMALL = (
    "--model.model.text.name={work}/german",
    "--model.model.text.weights=random",
    "--model.optim.learning_rate=1e-3",
)
MINILM = ("--model.model.text.name={data}/towers/minilm", "--model.optim.learning_rate=3e-4")
IMAGE = (
    *("--model.model.image.name=mobilenetv3_small_050", "--model.model.image.weights=random"),
    f"--data.image_size={SIZE}",
    *("--data.horizontal_flip=false", "--model.optim.learning_rate=2e-3"),
)
ARMS = {
    "text, random weights": Arm("text", SMALL, 40),
    "text, random weights, prefixes": Arm("text", (*SMALL, PREFIXES), 40),
    "text, random weights, prefixes and int8": Arm("text", (*SMALL, PREFIXES, "--model.loss.int8=true"), 40),
    "text, random weights, 10 epochs": Arm("text", SMALL, 10),
    "text, random weights, half of the rows": Arm("text", SMALL, 80, 0.5),
    "text, features only": Arm("text", (*SMALL, "--model.loss.similarity=0"), 40),
    "text, similarities only": Arm("text", (*SMALL, "--model.loss.feature=0"), 40),
    "image, a quarter of the parameters": Arm("image", IMAGE, 20),
    "text, MiniLM": Arm("text", MINILM, 10),
}
"""In the order in which they are trained."""


def german_names() -> dict[str, str]:
    """Return the German name of each emoji by its English names, in lower case."""
    emoji: Any = import_module("emoji")
    emoji.config.load_language("de")
    names: dict[str, str] = {}
    for characters, entry in emoji.EMOJI_DATA.items():
        if "de" not in entry:
            continue
        german = entry["de"].strip(":").replace("_", " ")
        english = entry["en"].strip(":").replace("_", " ").lower()
        single = characters.replace("\ufe0f", "")
        spelled = unicodedata.name(single, "").lower() if len(single) == 1 else ""
        for name in (english, f"{english} flag", spelled):
            names.setdefault(name, german)
    return names


def prepare(work: Path, data: Path) -> None:
    """Write the pairs of both drawings, the parallel names, and the folder of a small German encoder."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from transformers import BertConfig, PreTrainedTokenizerFast

    from vlightning.common.tokenizers import special_tokens, tokenizer_from_json
    from vlightning.datamodules.text.tokenizers import train_wordpiece

    if (work / "german/config.json").is_file():
        return
    work.mkdir(parents=True, exist_ok=True)
    german = german_names()
    for drawings in ("twitter", "google"):
        table = pq.read_table(data / f"emoji/{drawings}.parquet")
        rows = [number for number, name in enumerate(table["name"].to_pylist()) if name.lower() in german]
        table = table.take(rows)
        names = table["name"].to_pylist()
        columns = {"image": table["image"], "caption": names, "german": [german[name.lower()] for name in names]}
        pq.write_table(pa.table(columns), work / f"{drawings}.parquet")
    parallel = pa.table({"old": names, "new": columns["german"]})
    pq.write_table(parallel, work / "parallel.parquet")
    for share in {arm.share for arm in ARMS.values()} - {1.0}:
        pq.write_table(
            parallel.take(list(range(0, len(names), round(1 / share)))), work / f"parallel_{share:g}.parquet"
        )
    backend = tokenizer_from_json(train_wordpiece(columns["german"], 3000)).backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens(backend)).save_pretrained(work / "german")
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 1024}
    BertConfig(vocab_size=3000, max_position_embeddings=64, **sizes).save_pretrained(work / "german")


def old_pair(work: Path, data: Path, epochs: int, threads: int) -> Path:
    """Train the old pair from stored features, and write its export and its index."""
    towers = [
        f"--model.model.image.weights={data}/towers/efficientnet_lite0.safetensors",
        f"--model.model.text.name={data}/towers/minilm",
        *(f"--model.vision.image_mean={MEAN}", f"--model.vision.image_std={STD}"),
        *("--model.tuning.lock_text=all", "--model.optim.learning_rate=1e-3", "--model.match_equal_texts=true"),
        *(f"--data.image_size={SIZE}", f"--data.max_tokens={TOKENS}"),
    ]
    config = [f"--config={ROOT}/configs/clip/two_towers.yaml", *towers]
    splits = {"train": "twitter", "validation": "google"}
    for split, drawings in splits.items():
        source = [f"--data.{split}={work}/{drawings}.parquet", f"--split={split}"]
        embed(work / f"store_{split}", [*config, *source], threads)
    stores = [f"--data.store.{split}={work}/store_{split}" for split in splits]
    sources = [f"--data.{split}={work}/{drawings}.parquet" for split, drawings in splits.items()]
    words = [*config, *EMOJI, *sources, *stores]
    fit(work / "old_run", words, epochs, "val/recall_mean", threads, every=epochs)
    checkpoint = str(last_checkpoint(work / "old_run"))
    if not (work / "old").is_dir():
        run(["export", "--layout", "vlightning", checkpoint, f"{work}/old"], work / "output.txt", threads)
    embed(work / "index", [f"{work}/old", f"--data.predict={work}/google.parquet", "--of", "images"], threads)
    return work / "old"


def embed(store: Path, words: Sequence[str], threads: int) -> None:
    """Write a store, unless it is complete."""
    manifest = store / "manifest.json"
    if not (manifest.is_file() and json.loads(manifest.read_text())["complete"]):
        words = [*words, f"--output={store}", "--accelerator=cpu", "--num_workers=0"]
        run(["embed", *words], store.parent / "output.txt", threads)


def old_texts(work: Path, share: str, threads: int) -> None:
    """Store what the old text tower says of the parallel texts."""
    words = ["--data=ParallelTextDataModule", f"--data.train={work}/parallel{share}.parquet", "--of", "texts"]
    embed(work / f"texts{share}", [f"{work}/old", *words], threads)


def measure(name: str, seed: int, options: argparse.Namespace, old: Path) -> list[dict[str, Any]]:
    """Train an arm with a seed, and return the rows of its evaluation in the old index."""
    work, arm = options.work, ARMS[name]
    folder = work / f"{re.sub('[^a-z0-9]+', '_', name.lower())}_{seed}"
    words = [word.format(work=work, data=options.data) for word in arm.words]
    words = [f"--config={ROOT}/configs/clip/new_{arm.side}.yaml", f"--model.predecessor.weights={old}", *words, *EMOJI]
    if arm.side == "text":
        share = "" if arm.share == 1 else f"_{arm.share:g}"
        old_texts(work, share, options.threads)
        words += [f"--data.train={work}/parallel{share}.parquet", f"--data.max_tokens={TOKENS}"]
        words += [f"--data.store={work}/texts{share}", "--data.caption_column=german"]
    else:
        words += [f"--data.train={work}/twitter.parquet"]
    validation = [f"--data.validation={work}/google.parquet", "--model.match_equal_texts=true"]
    fit(
        folder,
        [*words, *validation, f"--seed_everything={seed}"],
        arm.epochs,
        "val/recall_mean",
        options.threads,
        every=arm.epochs,
    )
    results = folder / "index.jsonl"
    if not results.is_file():
        captions = "german" if arm.side == "text" else "caption"
        words = [f"--model={last_checkpoint(folder)}", f"--index={work}/index", f"--pairs={work}/google.parquet"]
        words += [f"--caption_column={captions}", f"--old={old}", "--old_caption_column=caption", f"--out={results}"]
        words += ["--dims", *map(str, DIMS), "--formats", "float32", "int8", "--match_equal_texts"]
        words += ["--accelerator=cpu", "--num_workers=0"]
        run(["evaluate", *words], folder / "output.txt", options.threads, CLI)
    return [json.loads(line) for line in results.read_text().splitlines()]


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return the table of recall at 1, mean and standard deviation over the seeds."""
    rows = ["| tower | queries | index | dimension | format | R@1 | seeds |", "|---|---|---|---|---|---|---|"]
    groups: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
    for line in lines:
        key = tuple(line[name] for name in ("arm", "queries", "index", "dimension", "format"))
        groups.setdefault(key, []).append((line["seed"], line["recall"]["r1"]))
    for key, found in groups.items():
        seeds = ", ".join(str(seed) for seed, _ in sorted(found))
        rows.append(f"| {' | '.join(map(str, key))} | {spread([recall for _, recall in found]).strip()} | {seeds} |")
    return "\n".join(rows)


def main() -> None:
    """Measure the arms with the seeds, append the results, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--old_epochs", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=ROOT / "docs/results/new_tower.jsonl")
    options = parser.parse_args()
    options.work, options.data = options.work.absolute(), options.data.absolute()
    prepare(options.work, options.data)
    old = old_pair(options.work, options.data, options.old_epochs, options.threads)
    lines = []
    if options.results.is_file():
        lines = [json.loads(line) for line in options.results.read_text().splitlines()]
    for seed in options.seeds:
        for name in options.arms:
            if any((line["arm"], line["seed"]) == (name, seed) for line in lines):
                continue
            rows = measure(name, seed, options, old)
            found = [{"arm": name, "seed": seed, "commit": commit(), **row} for row in rows]
            with options.results.open("a", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(line)}\n" for line in found)
            lines += found
    print(table(lines))


if __name__ == "__main__":
    main()
