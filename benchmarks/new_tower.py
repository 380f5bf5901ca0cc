r"""New towers in the space of an old pair: recall of their queries and images in the old pair's index, over seeds.

    python benchmarks/new_tower.py runs/new_tower --data data --seeds 0 1 2 --threads 1
    python benchmarks/new_tower.py tables

Finished arms are not repeated, and an interrupted training goes on. Each line of results is a row of `vlightning
evaluate --index`, with the collection, the arm, the seed and the commit. `tables` writes the tables into
`docs/new_tower.md`, from the results alone.

The old pair is heads on two locked towers, EfficientNet-lite0 and MiniLM, trained on the collection's training images
with English texts. Its index holds the test images; the queries are their texts. Collections:

- emoji: drawings of emoji with their names; one drawing for training, the other one for the index. New text towers
  learn German from names in both languages, without an image. The old pair was trained on the English names that are
  its queries, so the new towers learn the German ones, too. Arms with unseen names learn four fifths of the names,
  and the others are the queries.
- fashion: shop photographs with their titles. A smaller text tower learns from the titles of the training images alone.
- shapes: drawn scenes of two objects; the German captions are those of a few words. The queries describe pairs of
  objects of which neither the old pair nor a new tower has seen a caption.

`data` has `emoji/{twitter,google}.parquet` (`image`, `name`), `fashion/{train,test}.parquet` (`image`, `caption`), and
the towers of `docs/two_towers.md` as `towers/efficientnet_lite0.safetensors` and `towers/minilm`; the German names of
emoji are those of the package `emoji`.
"""

import argparse
import io
import json
import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from proof.training import commit
from tables import CLI, fit, last_checkpoint, run, spread

from vlightning.common.tokenizers import special_tokens, tokenizer_from_json
from vlightning.datamodules.drawn.shapes import ShapesTable
from vlightning.datamodules.text.tokenizers import train_wordpiece

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs/results/new_tower/index.jsonl"
PAGE = ROOT / "docs/new_tower.md"
START, END = "<!-- new tower -->\n", "<!-- end of new tower -->"
SIZE, TOKENS = 96, 16
MEAN, STD = "[0.485,0.456,0.406]", "[0.229,0.224,0.225]"
DIMS = (512, 256, 128, 64)
PREFIXES = "--model.loss.prefixes=[256,128,64]"
BATCH, SHAPES_TRAIN, SHAPES_TEST = 64, 3_000, 1_000
COMMON = (
    f"--data.batch_size={BATCH}",
    "--data.eval_batch_size=128",
    "--data.num_workers=0",
    "--trainer.accelerator=cpu",
)


class Collection(NamedTuple):
    """Images with texts: the names of two files in the work folder, and the column of the texts of new towers.

    Args:
        train: images that the old pair and a new image tower are trained on.
        indexed: images of the index, whose texts are the queries.
        texts: column of the texts that new text towers learn, beside the old `caption`.
        parallel: file of the texts that new text towers learn from.
    """

    train: str
    indexed: str
    texts: str
    parallel: str


COLLECTIONS = {
    "emoji": Collection("twitter", "google", "german", "google"),
    "fashion": Collection("fashion_train", "fashion_test", "caption", "fashion_train"),
    "shapes": Collection("shapes_train", "shapes_test", "german", "shapes_train"),
}


class Arm(NamedTuple):
    """A new tower.

    Args:
        side: "text" or "image".
        words: its arguments of `vlightning fit`.
        steps: length of its training.
        share: share of the rows that it is trained on.
        unseen: whether the queries are the texts of the other rows.
    """

    side: str
    words: Sequence[str]
    steps: int
    share: float = 1.0
    unseen: bool = False


SMALL = (
    "--model.model.text.name={work}/{collection}_encoder",
    "--model.model.text.weights=random",
    "--model.optim.learning_rate=1e-3",
)
MINILM = ("--model.model.text.name={data}/towers/minilm", "--model.optim.learning_rate=3e-4")
IMAGE = (
    *("--model.model.image.name=mobilenetv3_small_050", "--model.model.image.weights=random"),
    f"--data.image_size={SIZE}",
    *("--data.horizontal_flip=false", "--model.optim.learning_rate=2e-3"),
)
MAIN = {
    "text, random weights": Arm("text", SMALL, 1_080),
    "text, random weights, prefixes and int8": Arm("text", (*SMALL, PREFIXES, "--model.loss.int8=true"), 1_080),
    "image, a quarter of the parameters": Arm("image", IMAGE, 540),
}
OTHERS = {
    "text, MiniLM": Arm("text", MINILM, 270),
    "text, MiniLM, unseen names": Arm("text", MINILM, 270, 0.8, unseen=True),
    "text, random weights, unseen names": Arm("text", SMALL, 1_080, 0.8, unseen=True),
    "text, random weights, a quarter of the steps": Arm("text", SMALL, 270),
    "text, random weights, half of the rows": Arm("text", SMALL, 1_080, 0.5),
    "image, a quarter of the steps": Arm("image", IMAGE, 135),
    "image, half of the rows": Arm("image", IMAGE, 540, 0.5),
    "text, random weights, prefixes": Arm("text", (*SMALL, PREFIXES), 1_080),
    "text, features only": Arm("text", (*SMALL, "--model.loss.similarity=0"), 1_080),
    "text, similarities only": Arm("text", (*SMALL, "--model.loss.feature=0"), 1_080),
}
ARMS = {"emoji": MAIN | OTHERS, "fashion": MAIN, "shapes": MAIN}
"""In the order in which they are trained."""
WORDS = {
    "a ": "",
    "small": "klein",
    "large": "groß",
    "to the left of": "links von",
    "to the right of": "rechts von",
    "above": "über",
    "below": "unter",
    "red": "rot",
    "green": "grün",
    "blue": "blau",
    "yellow": "gelb",
    "purple": "lila",
    "cyan": "türkis",
    "white": "weiß",
    "black": "schwarz",
    "circle": "Kreis",
    "square": "Quadrat",
    "triangle": "Dreieck",
    "cross": "Kreuz",
    "ring": "Ring",
}
"""German words of the captions of drawn shapes."""


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


def emoji(data: Path, drawings: str) -> dict[str, list[Any]]:
    """Return the drawings whose emoji have a German name, with both names."""
    import pyarrow.parquet as pq

    german = german_names()
    table = pq.read_table(data / f"emoji/{drawings}.parquet")
    table = table.take([row for row, name in enumerate(table["name"].to_pylist()) if name.lower() in german])
    names = table["name"].to_pylist()
    return {"image": table["image"], "caption": names, "german": [german[name.lower()] for name in names]}


def fashion(data: Path, split: str) -> dict[str, list[Any]]:
    """Return shop photographs with their titles."""
    import pyarrow.parquet as pq

    table = pq.read_table(data / f"fashion/{split}.parquet")
    return {name: table[name] for name in ("image", "caption")}


def shapes(split: Any, length: int) -> dict[str, list[Any]]:
    """Return drawn scenes with their captions in both languages."""
    table = ShapesTable(split, length, SHAPES_TEST, SIZE, seed=0)
    columns: dict[str, list[Any]] = {"image": [], "caption": [], "german": []}
    for row in range(length):
        file = io.BytesIO()
        table.image(row).save(file, "PNG")
        (caption,) = table.captions(row)
        columns["image"].append({"bytes": file.getvalue(), "path": None})
        columns["caption"].append(caption)
        columns["german"].append(re.sub("|".join(WORDS), lambda match: WORDS[match[0]], caption))
    return columns


def prepare(work: Path, data: Path, name: str) -> None:
    """Write the pairs of a collection, its parallel texts, and the folder of a small text encoder."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from transformers import BertConfig, PreTrainedTokenizerFast

    collection, encoder = COLLECTIONS[name], work / f"{name}_encoder"
    if (encoder / "config.json").is_file():
        return
    work.mkdir(parents=True, exist_ok=True)
    if name == "emoji":
        files: Mapping[str, dict[str, list[Any]]] = {side: emoji(data, side) for side in ("twitter", "google")}
    elif name == "fashion":
        files = {f"fashion_{split}": fashion(data, split) for split in ("train", "test")}
    else:
        files = {
            "shapes_train": shapes("train", SHAPES_TRAIN),
            "shapes_test": shapes("test", SHAPES_TEST),
        }
    tables = {file: pa.table(columns) for file, columns in files.items()}
    new = tables[collection.parallel][collection.texts].to_pylist()
    parallel = pa.table({"old": tables[collection.parallel]["caption"], "new": new})
    for share in {arm.share for arm in ARMS[name].values()}:
        taken, left = parts(len(new), share)
        pq.write_table(parallel.take(taken), work / f"{name}_parallel{suffix(share)}.parquet")
        if share != 1:
            tables[f"{collection.train}{suffix(share)}"] = tables[collection.train].take(
                parts(len(tables[collection.train]), share)[0]
            )
            tables[f"{collection.indexed}_without{suffix(share)}"] = tables[collection.indexed].take(
                [row for row in left if row < len(tables[collection.indexed])]
            )
    for file, table in tables.items():
        pq.write_table(table, work / f"{file}.parquet")
    backend = tokenizer_from_json(train_wordpiece(new, 3000)).backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens(backend)).save_pretrained(encoder)
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 1024}
    BertConfig(vocab_size=3000, max_position_embeddings=64, **sizes).save_pretrained(encoder)


def parts(rows: int, share: float) -> tuple[list[int], list[int]]:
    """Return a share of the row numbers, spread evenly, and the others."""
    taken = [row for row in range(rows) if int((row + 1) * share) > int(row * share)]
    return taken, sorted({*range(rows)} - {*taken})


def suffix(share: float) -> str:
    """Return the part of the name of a file with a share of the rows."""
    return "" if share == 1 else f"_{share:g}"


def old_pair(work: Path, data: Path, name: str, steps: int, threads: int) -> Path:
    """Train the old pair of a collection from stored features, and write its export and its index."""
    collection, folder = COLLECTIONS[name], work / f"{name}_old"
    towers = [
        f"--model.model.image.weights={data}/towers/efficientnet_lite0.safetensors",
        f"--model.model.text.name={data}/towers/minilm",
        *(f"--model.vision.image_mean={MEAN}", f"--model.vision.image_std={STD}"),
        *("--model.tuning.lock_text=all", "--model.optim.learning_rate=1e-3", "--model.match_equal_texts=true"),
        *(f"--data.image_size={SIZE}", f"--data.max_tokens={TOKENS}"),
    ]
    config = [f"--config={ROOT}/configs/clip/two_towers.yaml", *towers]
    splits = {"train": collection.train, "validation": collection.indexed}
    for split, file in splits.items():
        source = [f"--data.{split}={work}/{file}.parquet", f"--split={split}"]
        embed(folder / f"store_{split}", [*config, *source], threads)
    stores = [f"--data.store.{split}={folder}/store_{split}" for split in splits]
    sources = [f"--data.{split}={work}/{file}.parquet" for split, file in splits.items()]
    epochs = epochs_of(work / f"{collection.train}.parquet", steps)
    fit(folder / "run", [*config, *COMMON, *sources, *stores], epochs, "val/recall_mean", threads, every=epochs)
    export = folder / "export"
    if not export.is_dir():
        checkpoint = str(last_checkpoint(folder / "run"))
        run(["export", "--layout", "vlightning", checkpoint, str(export)], folder / "output.txt", threads)
    images = [f"--data.predict={work}/{collection.indexed}.parquet", "--of", "images"]
    embed(folder / "index", [str(export), *images], threads)
    return export


def epochs_of(file: Path, steps: int) -> int:
    """Return the number of epochs of a file of pairs that are nearest to a number of steps."""
    import pyarrow.parquet as pq

    return max(1, round(steps / max(1, pq.read_metadata(file).num_rows // BATCH)))


def embed(store: Path, words: Sequence[str], threads: int) -> None:
    """Write a store, unless it is complete."""
    manifest = store / "manifest.json"
    if not (manifest.is_file() and json.loads(manifest.read_text())["complete"]):
        words = [*words, f"--output={store}", "--accelerator=cpu", "--num_workers=0"]
        run(["embed", *words], store.parent / "output.txt", threads)


def measure(name: str, arm_name: str, seed: int, options: argparse.Namespace, old: Path) -> list[dict[str, Any]]:
    """Train an arm with a seed, and return the rows of its evaluation in the old index."""
    work, arm, collection = options.work, ARMS[name][arm_name], COLLECTIONS[name]
    folder = work / f"{name}_{re.sub('[^a-z0-9]+', '_', arm_name.lower())}_{seed}"
    words = [word.format(work=work, data=options.data, collection=name) for word in arm.words]
    words = [f"--config={ROOT}/configs/clip/new_{arm.side}.yaml", f"--model.predecessor.weights={old}", *words, *COMMON]
    if arm.side == "text":
        train = work / f"{name}_parallel{suffix(arm.share)}.parquet"
        store = old.parent / f"texts{suffix(arm.share)}"
        parallel = ["--data=ParallelTextDataModule", f"--data.train={train}", "--of", "texts"]
        embed(store, [str(old), *parallel], options.threads)
        words += [f"--data.store={store}", f"--data.caption_column={collection.texts}"]
    else:
        train = work / f"{collection.train}{suffix(arm.share)}.parquet"
    words += [f"--data.train={train}", f"--data.validation={work}/{collection.indexed}.parquet"]
    words += [f"--data.max_tokens={TOKENS}"]
    words += ["--model.match_equal_texts=true", f"--seed_everything={seed}"]
    epochs = epochs_of(train, arm.steps)
    fit(folder, words, epochs, "val/recall_mean", options.threads, every=epochs)
    results = folder / "index.jsonl"
    if not results.is_file():
        without = f"_without{suffix(arm.share)}" if arm.unseen else ""
        captions = collection.texts if arm.side == "text" else "caption"
        words = [f"--model={last_checkpoint(folder)}", f"--index={old.parent}/index"]
        words += [f"--pairs={work}/{collection.indexed}{without}.parquet", f"--caption_column={captions}"]
        words += [f"--old={old}", "--old_caption_column=caption", f"--out={results}", "--match_equal_texts"]
        words += ["--dims", *map(str, DIMS), "--formats", "float32", "int8", "--accelerator=cpu", "--num_workers=0"]
        run(["evaluate", *words], folder / "output.txt", options.threads, CLI)
    return [json.loads(line) for line in results.read_text().splitlines()]


def read(file: Path) -> list[dict[str, Any]]:
    """Return the lines of results."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def recalls(lines: Sequence[dict[str, Any]], **values: Any) -> dict[int, float]:
    """Return the recall at 1 by seed of the lines with given values."""
    wanted = values.items()
    return {line["seed"]: line["recall"]["r1"] for line in lines if all(line[name] == value for name, value in wanted)}


def shares(new: Mapping[int, float], old: Mapping[int, float]) -> str:
    """Format the shares of the old recall, in percent."""
    return spread([100 * new[seed] / old[seed] for seed in new if seed in old]).strip() if new else ""


def tables(lines: Sequence[dict[str, Any]]) -> str:
    """Return the tables: recall at 1 in the old index and in a mixed one, and the cost of prefixes and of int8."""
    whole = {"dimension": DIMS[0], "format": "float32"}
    rows = [
        "| collection, new tower | old queries | new queries, old index | share | mixed index | share | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    costs = [f"| collection, new tower | {' | '.join(f'{dim}' for dim in DIMS)} | {DIMS[0]}, int8 |", f"|{'---|' * 6}"]
    for name, arms in ARMS.items():
        for arm in arms:
            rows_of = [line for line in lines if (line["collection"], line["arm"]) == (name, arm)]
            if not rows_of:
                continue
            text = arms[arm].side == "text"
            old = recalls(rows_of, queries="old", index="old", **whole)
            new = recalls(rows_of, queries="new", index="old", **whole) if text else {}
            mixed = {} if text else recalls(rows_of, queries="new", index="mixed", **whole)
            cells = [f"{name}: {arm}", spread(list(old.values())).strip()]
            for found in (new, mixed):
                cells += [spread(list(found.values())).strip() if found else "", shares(found, old)]
            rows.append(f"| {' | '.join([*cells, ', '.join(map(str, sorted(new or mixed)))])} |")
            which = {"queries": "new", "index": "old" if text else "new"}
            found_of = [recalls(rows_of, **which, dimension=dim, format="float32") for dim in DIMS]
            found_of.append(recalls(rows_of, **which, dimension=DIMS[0], format="int8"))
            cells = [spread(list(found.values())).strip() if found else "" for found in found_of]
            costs.append(f"| {' | '.join([f'{name}: {arm}', *cells])} |")
    commits = sorted({line["commit"] for line in lines})
    measured = ", ".join(f"`{commit}`" for commit in commits)
    return "\n".join(
        [
            "Recall at 1 in percent, mean and standard deviation over the seeds; every share is of the old pair's with "
            f"the same texts (commit {measured}).",
            "",
            *rows,
            "",
            "Recall at 1 of the new queries by the length of a prefix and by number format: in the old index; for an "
            "image tower in one of its own.",
            "",
            *costs,
        ]
    )


def page(text: str, lines: Sequence[dict[str, Any]]) -> str:
    """Return a page with the tables of the results between its two comments."""
    before, rest = text.split(START)
    return f"{before}{START}{tables(lines)}\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Measure the arms with the seeds, append the results, and write the tables."""
    if sys.argv[1:] == ["tables"]:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), read(RESULTS)), encoding="utf-8")
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", type=Path, help="folder of data, checkpoints and outputs")
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets and the towers")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--collections", nargs="+", choices=list(COLLECTIONS), default=list(COLLECTIONS))
    parser.add_argument("--old_steps", type=int, default=1_080)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.work, options.data = options.work.absolute(), options.data.absolute()
    done = {(line["collection"], line["arm"], line["seed"]) for line in read(options.results)}
    for name, arm in [(name, arm) for arms in (MAIN, OTHERS) for name in options.collections for arm in arms]:
        if arm not in ARMS[name]:
            continue
        prepare(options.work, options.data, name)
        old = old_pair(options.work, options.data, name, options.old_steps, options.threads)
        for seed in options.seeds:
            if (name, arm, seed) in done:
                continue
            rows = measure(name, arm, seed, options, old)
            found = [{"collection": name, "arm": arm, "seed": seed, "commit": commit(), **row} for row in rows]
            options.results.parent.mkdir(parents=True, exist_ok=True)
            with options.results.open("a", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(line)}\n" for line in found)
    print(tables(read(options.results)))


if __name__ == "__main__":
    main()
