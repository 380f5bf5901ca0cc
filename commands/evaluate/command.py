"""The command `vlightning evaluate`."""

import argparse

from .tasks import PROTOCOLS, SUITES, TASKS


def run_evaluate(words: list[str]) -> str:
    """Run `vlightning evaluate`.

    Args:
        words: The arguments after `evaluate`.

    Returns:
        The tables, or a message that names the written files; empty in processes beside the first.

    Raises:
        UserError: If an argument is wrong, or a set or a model cannot be used.
    """
    typed = parser_of_evaluate().parse_args(words)
    from .work import work  # the other commands need none of its imports

    return work(typed)


def parser_of_evaluate() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    parser = argparse.ArgumentParser(
        "vlightning evaluate",
        description="Evaluate an image-text model zero-shot on DataComp's 38 sets, or classify your own images. A "
        "stopped evaluation goes on with the set that it was in.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", help="a checkpoint, an export, local-dir:FOLDER, or a model's name with --weights")
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
    add("--compare", nargs=2, metavar="RESULTS", help="print the differences of two files of results; --out draws them")
    add("--batch_size", type=int, default=64, help="images of a process in a batch; 64")
    add("--num_workers", type=int, default=2, help="loader workers of a process; 2")
    add("--accelerator", default="auto", help="cpu, cuda, ...; by default what there is")
    add("--devices", type=int, default=1, help="processes of a node; 1")
    add("--num_nodes", type=int, default=1, help="nodes; 1")
    return parser
