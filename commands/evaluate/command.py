"""The command `vlightning evaluate`."""

import argparse
import warnings
from pathlib import Path

from lightning.fabric import Fabric

from ...callbacks.distributed.collectives import rank
from ...common.errors import UserError
from ..cli.command_parser import CommandParser
from .classified_folder import (
    TEMPLATES,
    classify_folder,
    confusion,
    folders_of_images,
    folders_without_class,
    write_sheet,
    write_table,
)
from .encoding import Loading
from .hub import download
from .image_sets import texts_or_lines, with_braces
from .index_search import FORMATS, evaluate_index
from .model import ImageTextModel, load_interpolated, load_model
from .report import compare, markdown, write_report
from .results import Result, read_results
from .row_sets import find_table
from .run import Settings, evaluate
from .tasks import PROTOCOLS, SUITES, TASKS, chosen_tasks


def parser_of_evaluate() -> CommandParser:
    """Return the parser of the arguments."""
    parser = CommandParser(
        "evaluate",
        description="Evaluate an image-text model zero-shot on DataComp's 38 sets, classify your own images, or search "
        "an index of an old model. A stopped evaluation goes on with the set that it was in.",
    )
    add = parser.add_argument
    add("--model", help="a checkpoint, an export, a folder of open_clip's, or a model's name with --weights")
    add("--weights", help="a tag of open_clip's, a file, or random (to try the command), for a model's name")
    add("--interpolate", nargs="+", type=float, help="shares of a fine-tuning's weights, the rest published (WiSE-FT)")
    add("--root", help="folder of the sets, as DataComp's download makes it; with --suite or --tasks by default sets")
    add("--suite", help=f"{' or '.join(SUITES)}; by default datacomp")
    add("--tasks", help=f"keys of sets with commas between, such as {','.join(list(TASKS)[:2])}")
    add("--download", action="store_true", help="download the sets that the folder lacks from the Hugging Face hub")
    add("--out", help="results as JSON lines, by default results.jsonl; tables and a chart are written beside it")
    add("--protocol", nargs="+", default=["zero_shot"], choices=PROTOCOLS, help="by default zero_shot")
    add("--shots", type=int, help="training images of each class for linear_probe and knn; by default all")
    add("--seed", type=int, default=0, help="of the choice of training images; 0")
    add("--c", type=float, default=1.0, help="inverse weight of the linear probe's penalty; 1")
    add("--k", type=int, default=20, help="nearest neighbours; 20")
    add("--temperature", type=float, default=0.07, help="of the neighbours' weights; 0.07")
    add("--cache", help="folder of encoded classes and training images; by default beside --out")
    add("--images", help="classify the images of this folder instead")
    add(
        "--classes",
        nargs="+",
        help="names of the classes, or a text file with one a line; with --images by default the names of its folders; "
        "with --root, instead of a set's",
    )
    add(
        "--templates",
        nargs="+",
        help="prompts with {} or {c} for the name, or a text file; with --root, instead of a set's",
    )
    add("--best", type=int, default=5, help="classes of each image that are written; 5")
    add("--html", help="write a page with the images below their classes, with --images")
    searched = parser.add_argument_group("of an index").add_argument
    searched("--index", help="search this index of an old model: a store, or image_embeddings.parquet of predict")
    searched("--pairs", help="its images with captions, in a file (CSV, JSON, JSON lines, Parquet)")
    searched("--caption_column", default="caption", help="column of the captions for --model; caption")
    searched("--old", help="the model that wrote the index, whose texts are searched too")
    searched("--old_weights", help="as --weights, for --old")
    searched("--old_caption_column", help="column of the captions for --old; by default --caption_column")
    searched("--dims", nargs="+", type=int, help="prefixes of the features that are searched; by default all of them")
    searched("--formats", nargs="+", default=["float32"], choices=FORMATS, help="number formats; float32")
    searched("--match_equal_texts", action="store_true", help="images with an equal caption count as matches")
    add("--compare", nargs=2, metavar="RESULTS", help="print the differences of two files of results; --out draws them")
    add("--batch_size", type=int, default=64, help="images of a process in a batch; 64")
    add("--num_workers", type=int, default=2, help="loader workers of a process; 2")
    add("--accelerator", default="auto", help="cpu, cuda, ...; by default what there is")
    add("--devices", type=int, default=1, help="processes of a node; 1")
    add("--num_nodes", type=int, default=1, help="nodes; 1")
    return parser


def run_evaluate(words: list[str]) -> str:
    """Run `vlightning evaluate`: evaluate a model on sets, classify a folder, or compare two results.

    Returns:
        The tables, or a message that names the written files; empty in processes beside the first.

    Raises:
        UserError: If an argument is wrong, or a set or a model cannot be used.
    """
    typed = parser_of_evaluate().parse_args(words)
    if typed.compare:
        return _compare(typed)
    if typed.model is None:
        raise UserError("Expected --model, got none: give a checkpoint, an export or a model's name.")
    if typed.root is None and (typed.suite or typed.tasks):
        typed.root = "sets"
    if typed.index is None and (typed.root is None) == (typed.images is None):
        raise UserError(
            "Expected --root with sets, or --images with images and --classes: give one of the two. Pairs of your own "
            "are tested by vlightning test --ckpt_path RUN --data.test FILE."
        )
    warnings.filterwarnings("ignore", message="The `srun` command is available")  # one process needs none
    fabric = Fabric(
        accelerator=typed.accelerator,
        devices=typed.devices,
        num_nodes=typed.num_nodes,
        strategy="ddp" if typed.devices * typed.num_nodes > 1 else "auto",
    )
    fabric.launch()
    loading = Loading(typed.batch_size, typed.num_workers)
    out = Path(typed.out or "results.jsonl").expanduser()
    if typed.index:
        _check_index_alone(typed)
        message = evaluate_index(typed, fabric.device, loading)
    elif typed.interpolate:
        message = _interpolated(fabric, typed, loading, out)
    else:
        model = load_model(typed.model, typed.weights)
        model.network.to(fabric.device)
        message = _images(model, typed, loading) if typed.images else _sets(fabric, model, typed, loading, out)
    fabric.barrier()
    return message if rank() == 0 else ""


def _check_index_alone(typed: argparse.Namespace) -> None:
    """Refuse what does not go with --index.

    Raises:
        UserError: If there are sets or images too, or a prefix has no dimension.
    """
    if other := next((name for name in ("root", "images", "interpolate", "html") if getattr(typed, name)), None):
        raise UserError(f"Expected --index alone, got --{other} beside it: leave one of them out.")
    if typed.dims and min(typed.dims) < 1:
        raise UserError(f"Expected at least 1 as each of --dims, got {min(typed.dims)}: correct it.")


def _interpolated(fabric: Fabric, typed: argparse.Namespace, loading: Loading, out: Path) -> str:
    """Evaluate models between published weights and a fine-tuning; return a row of main metrics for each."""
    if typed.root is None:
        raise UserError("Expected --root with sets beside --interpolate, got --images: leave one out.")
    rows = []
    for ratio in typed.interpolate:
        model = load_interpolated(typed.model, ratio)
        model.network.to(fabric.device)
        file = out.with_name(f"{out.stem}-{ratio:g}{out.suffix}")
        results = _results(fabric, model, typed, loading, file)
        rows.append((ratio, [result for result in results if result.main is not None]))
        if rank() == 0:
            write_report(results, file)
    names = [f"{result.key} ({result.protocol})" for result in rows[0][1]]
    lines = [f"| ratio | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for ratio, results in rows:
        lines.append(f"| {ratio:g} | {' | '.join(f'{100 * (result.main or 0):.1f}' for result in results)} |")
    return "\n".join([*lines, f"Wrote {out.with_name(out.stem)}-<ratio>{out.suffix}, and a report beside each."])


def _sets(fabric: Fabric, model: ImageTextModel, typed: argparse.Namespace, loading: Loading, out: Path) -> str:
    results = _results(fabric, model, typed, loading, out)
    if rank() != 0:
        return ""
    files = write_report(results, out)
    return f"{markdown(results)}\nWrote {out}, {', '.join(map(str, files))}."


def _results(
    fabric: Fabric, model: ImageTextModel, typed: argparse.Namespace, loading: Loading, out: Path
) -> list[Result]:
    tasks = chosen_tasks(typed.suite, [key for key in (typed.tasks or "").split(",") if key])
    root = Path(typed.root).expanduser()
    if not root.is_dir() and not typed.download:
        raise UserError(
            f"Expected the folder of the sets after --root, got {typed.root!r}: correct it, or add --download."
        )
    if typed.download and rank() == 0:
        root.mkdir(parents=True, exist_ok=True)
        download(tasks, root)
    fabric.barrier()
    if not out.exists() and not any((root / task.folder).is_dir() or find_table(root, task.folder) for task in tasks):
        raise UserError(
            f"Expected one of {len(tasks)} sets in {str(root)!r}, such as {str(root / tasks[0].folder)!r}, got none: "
            "correct --root, or add --download."
        )
    settings = Settings(
        root,
        loading,
        tuple(dict.fromkeys(typed.protocol)),
        typed.shots,
        typed.seed,
        typed.c,
        typed.k,
        typed.temperature,
        Path(typed.cache).expanduser() if typed.cache else out.with_suffix(".cache"),
        tuple(texts_or_lines(typed.classes or [])),
        tuple(with_braces(texts_or_lines(typed.templates or []), "--templates")),
    )
    results = evaluate(model, tasks, settings, out)
    order = {task.key: position for position, task in enumerate(tasks)}
    return sorted((r for r in results if r.key in order), key=lambda r: (order[r.key], r.protocol != "zero_shot"))


def _images(model: ImageTextModel, typed: argparse.Namespace, loading: Loading) -> str:
    folder = Path(typed.images).expanduser()
    if not folder.is_dir():
        raise UserError(f"Expected a folder of images after --images, got {typed.images!r}: correct it.")
    names = texts_or_lines(typed.classes) if typed.classes else folders_of_images(folder)
    if not names:
        raise UserError(
            "Expected --classes with --images, or a folder of each class, got neither: give names, or a text file with "
            "one a line."
        )
    templates = with_braces(texts_or_lines(typed.templates or list(TEMPLATES)), "--templates")
    table, results = classify_folder(model, folder, names, templates, loading, typed.best)
    if rank() != 0:
        return ""
    out = Path(typed.out or "classes.parquet").expanduser()
    write_table(table, out)
    written = [str(out)]
    if typed.html:
        write_sheet(table, folder, Path(typed.html).expanduser())
        written.append(typed.html)
    unreadable = f" {sum(results.bad.values())} could not be read." if results.bad else ""
    message = f"Classified {len(table):,} images by {model.name}.{unreadable} Wrote {' and '.join(written)}."
    return "\n\n".join(filter(None, (message, folders_without_class(table), confusion(table, names))))


def _compare(typed: argparse.Namespace) -> str:
    files = [Path(file).expanduser() for file in typed.compare]
    out = Path(typed.out).expanduser() if typed.out else None
    names = (files[0].stem, files[1].stem) if files[0].stem != files[1].stem else (str(files[0]), str(files[1]))
    table = compare(read_results(files[0]), read_results(files[1]), names, out)
    return f"{table}\n\nWrote {out}." if out else table
