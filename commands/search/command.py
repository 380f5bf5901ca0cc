"""The command `vlightning search`."""

from ..cli.command_parser import CommandParser


def run_search(words: list[str]) -> str:
    """Run `vlightning search`.

    Args:
        words: The arguments after `search`.

    Returns:
        The hits of each query.

    Raises:
        UserError: If an argument is wrong, or the store, the model or the images cannot be used.
    """
    typed = parser_of_search().parse_args(words)
    from .work import work  # the other commands need none of its imports

    return work(typed)


def parser_of_search() -> CommandParser:
    """Return the parser of the arguments."""
    parser = CommandParser(
        "search",
        description="Search texts, or images, in a folder of images, as in `vlightning search MODEL images/ 'red "
        "handbag'`, or in a store that `vlightning embed` wrote, as in `vlightning search STORE 'red handbag'`. Above "
        "100,000 rows of a store an index of usearch (extra search) answers, whose recall is printed.",
    )
    add = parser.add_argument
    add("source", help="a run's folder, a checkpoint, an export, or a model's name with --weights; or a store")
    add(
        "queries",
        nargs="+",
        help="after a model the images, a folder or a table (CSV, JSON, JSON lines, Parquet); then texts, or with --by "
        "image paths of images",
    )
    add("--weights", help="a tag of open_clip's or a file, for a model's name")
    add("--by", choices=("text", "image"), default="text", help="what the queries are; text")
    add("--of", choices=("image", "text"), default="image", help="what is searched: images, or captions; image")
    add("--count", type=int, default=10, help="hits of a query; 10")
    add("--device", help="cpu, cuda, ...; by default a GPU if there is one, and the CPU for a store")
    images = parser.add_argument_group("of images").add_argument
    images("--html", help="file of a page with the images that are found")
    images(
        "--captions", help="table with titles of the images of a folder; by default one in the folder, as of the demo"
    )
    images("--caption_column", help="column of the titles in a table; caption")
    images("--image_column", default="image", help="column of the images in a table; image")
    images("--cache", help="folder of the embeddings; by default ~/.cache/vlightning, as of the demo")
    images("--batch_size", type=int, default=64, help="images that are embedded at a time; 64")
    images("--num_workers", type=int, default=2, help="processes that read images; 2")
    store = parser.add_argument_group("of a store").add_argument
    store("--method", choices=("auto", "exact", "index"), default="auto", help="auto: an index above 100,000 rows")
    store("--model", help="the model, where it is not at the path that the store names")
    return parser
