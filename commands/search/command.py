"""The command `vlightning search`."""

import argparse


def run_search(words: list[str]) -> str:
    """Run `vlightning search`.

    Args:
        words: The arguments after `search`.

    Returns:
        The hits of each query.

    Raises:
        UserError: If an argument is wrong, or the store or its model cannot be used.
    """
    typed = parser_of_search().parse_args(words)
    from .work import work  # the other commands need none of its imports

    return work(typed)


def parser_of_search() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    parser = argparse.ArgumentParser(
        "vlightning search",
        description="Search texts, or images, in a store that `vlightning embed` wrote. Above 100,000 rows an index of "
        "usearch (extra search) answers, whose recall against the exact search is printed.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("store", help="folder of the store")
    add("queries", nargs="+", help="texts, or with --by image paths of images")
    add("--by", choices=("text", "image"), default="text", help="what the queries are; text")
    add("--of", choices=("image", "text"), default="image", help="what is searched: images, or captions; image")
    add("--count", type=int, default=10, help="hits of a query; 10")
    add("--method", choices=("auto", "exact", "index"), default="auto", help="auto: an index above 100,000 rows")
    add("--model", help="the model, where it is not at the path that the store names")
    add("--weights", help="as of `vlightning embed`")
    add("--device", default="cpu", help="cpu, cuda, ...; cpu")
    return parser
