"""The work of `vlightning evaluate`, after its arguments are parsed."""

import argparse
import warnings
from pathlib import Path

from lightning.fabric import Fabric

from ...callbacks.distributed.collectives import rank
from ...common.errors import UserError
from .encoding import Loading
from .hub import download
from .image_sets import given_texts, with_braces
from .model import ImageTextModel, load_interpolated, load_model
from .own_images import (
    TEMPLATES,
    classify_folder,
    confusion,
    folders_of_images,
    write_sheet,
    write_table,
)
from .report import compare, markdown, write_report
from .results import Result, read_results
from .row_sets import find_table
from .run import Settings, evaluate
from .tasks import chosen_tasks


def work(typed: argparse.Namespace) -> str:
    """Evaluate a model on sets, classify a folder, or compare two results.

    Args:
        typed: The parsed arguments.

    Returns:
        What is printed; empty in processes beside the first.

    Raises:
        UserError: If an argument is wrong, or a set or a model cannot be used.
    """
    if typed.compare:
        return _compare(typed)
    if typed.model is None:
        raise UserError("Expected --model, got none: give a checkpoint, an export or a model's name.")
    if typed.root is None and (typed.suite or typed.tasks):
        typed.root = "sets"
    if (typed.root is None) == (typed.images is None):
        raise UserError("Expected --root with sets, or --images with images and --classes: give one of the two.")
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
    if typed.interpolate:
        said = _along_the_line(fabric, typed, loading, out)
    else:
        model = load_model(typed.model, typed.weights)
        model.network.to(fabric.device)
        said = _own_images(model, typed, loading) if typed.images else _sets(fabric, model, typed, loading, out)
    fabric.barrier()
    return said if rank() == 0 else ""


def _along_the_line(fabric: Fabric, typed: argparse.Namespace, loading: Loading, out: Path) -> str:
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
    lines += [
        f"| {ratio:g} | {' | '.join(f'{100 * (each.main or 0):.1f}' for each in aggregated)} |"
        for ratio, aggregated in rows
    ]
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
        tuple(given_texts(typed.classes or [])),
        tuple(with_braces(given_texts(typed.templates or []), "--templates")),
    )
    results = evaluate(model, tasks, settings, out)
    order = {task.key: position for position, task in enumerate(tasks)}
    return sorted((r for r in results if r.key in order), key=lambda r: (order[r.key], r.protocol != "zero_shot"))


def _own_images(model: ImageTextModel, typed: argparse.Namespace, loading: Loading) -> str:
    folder = Path(typed.images).expanduser()
    if not folder.is_dir():
        raise UserError(f"Expected a folder of images after --images, got {typed.images!r}: correct it.")
    names = given_texts(typed.classes) if typed.classes else folders_of_images(folder)
    if not names:
        raise UserError(
            "Expected --classes with --images, or a folder of each class, got neither: give names, or a text file with "
            "one a line."
        )
    templates = with_braces(given_texts(typed.templates or list(TEMPLATES)), "--templates")
    table, results = classify_folder(model, folder, names, templates, loading, typed.best)
    if rank() != 0:
        return ""
    out = Path(typed.out or "classes.parquet").expanduser()
    write_table(table, out)
    written = [str(out)]
    if typed.html:
        write_sheet(table, folder, Path(typed.html).expanduser())
        written.append(typed.html)
    left_out = f" {sum(results.bad.values())} could not be read." if results.bad else ""
    said = f"Classified {len(table):,} images by {model.name}.{left_out} Wrote {' and '.join(written)}."
    measured = confusion(table, names)
    return f"{said}\n\n{measured}" if measured else said


def _compare(typed: argparse.Namespace) -> str:
    files = [Path(file).expanduser() for file in typed.compare]
    out = Path(typed.out).expanduser() if typed.out else None
    names = (files[0].stem, files[1].stem) if files[0].stem != files[1].stem else (str(files[0]), str(files[1]))
    said = compare(read_results(files[0]), read_results(files[1]), names, out)
    return f"{said}\n\nWrote {out}." if out else said
