"""The command `vlightning demo`."""

import argparse


def run_demo(words: list[str]) -> str:
    """Run `vlightning demo`.

    Args:
        words: The arguments after `demo`.

    Returns:
        A message after the page was stopped.

    Raises:
        UserError: If an argument is wrong, or the model or the images cannot be used.
    """
    typed = parser_of_demo().parse_args(words)
    from .work import work  # the other commands need none of its imports

    return work(typed)


def parser_of_demo() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    parser = argparse.ArgumentParser(
        "vlightning demo",
        description="Open a page on this machine: type a text, see the best images of a folder; click a word, see "
        "where ALBEF looks; drop an image, see its best captions and classes. Needs the extra demo.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="a run's folder, a checkpoint, an export, or a model's name with --weights")
    add("--weights", help="a tag of open_clip's or a file, for a model's name")
    add("--images", required=True, help="folder of the images; folders in it are searched too")
    add(
        "--store",
        help="store of `vlightning embed`, which answers in place of embedding the folder; those of its images that "
        "are in the folder are shown",
    )
    add(
        "--captions",
        help="text file with a caption a line, or JSON, JSON lines or CSV with captions under `caption`; by default "
        "such a table in the folder of the images",
    )
    add(
        "--classes", nargs="+", default=[], help="names of classes, or a text file with one a line; changed on the page"
    )
    add("--port", type=int, default=7860, help="of http://127.0.0.1; 0 for a free one; 7860")
    add("--cache", help="folder of the embeddings; by default ~/.cache/vlightning")
    add("--batch_size", type=int, default=64, help="images that are embedded at a time; 64")
    add("--num_workers", type=int, default=2, help="processes that read images; 2")
    add("--device", help="cpu, cuda, ...; by default a GPU if there is one")
    return parser
