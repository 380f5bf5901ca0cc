"""The command `vlightning demo`."""

from importlib.util import find_spec

import torch

from ...common.errors import UserError
from ...datamodules.reading.cache import index_cache
from ..cli.command_parser import CommandParser
from ..evaluate.encoding import Loading
from ..evaluate.image_sets import texts_or_lines
from ..evaluate.model import load_model
from .folder import read_folder, titled
from .index import Searched, embed_captions, embed_folder
from .search import Search
from .server import bound, serve
from .stored import stored_folder


def parser_of_demo() -> CommandParser:
    """Return the parser of the arguments."""
    parser = CommandParser(
        "demo",
        description="Open a page on this machine: type a text, see the best images of a folder; click a word, see "
        "where ALBEF looks; drop an image, see its best captions and classes. Needs the extra demo.",
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
        help="text file with a caption a line, or JSON, JSON lines or CSV with a caption of each `image`, which is its "
        "title; by default such a table in the folder of the images",
    )
    add("--caption_column", help="column of the captions and titles in that table; caption")
    add("--image_column", default="image", help="column of the images' names in that table; image")
    add(
        "--classes", nargs="+", default=[], help="names of classes, or a text file with one a line; changed on the page"
    )
    add("--port", type=int, default=7860, help="of http://127.0.0.1; 0 for a free one; 7860")
    add("--cache", help="folder of the embeddings; by default ~/.cache/vlightning")
    add("--batch_size", type=int, default=64, help="images that are embedded at a time; 64")
    add("--num_workers", type=int, default=2, help="processes that read images; 2")
    add("--device", help="cpu, cuda, ...; by default a GPU if there is one")
    return parser


def run_demo(words: list[str]) -> str:
    """Run `vlightning demo`: embed a folder, and serve the page until it is stopped.

    Raises:
        UserError: If an argument is wrong, or the model or the images cannot be used.
    """
    typed = parser_of_demo().parse_args(words)
    if find_spec("gradio") is None:
        raise UserError("Expected the package gradio for vlightning demo, got none: pip install 'vlightning[demo]'.")
    folder = read_folder(typed.images)
    classes = texts_or_lines(typed.classes)
    folder, captions, source = titled(folder, typed.captions, typed.caption_column, typed.image_column)
    with bound(typed.port) as address:  # before the images are embedded, which may take minutes
        model = load_model(typed.model, typed.weights)
        model.network.to(typed.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        cache = index_cache(typed.cache)
        if typed.store:
            images: Searched = stored_folder(model, folder, typed.store)
        else:
            images = embed_folder(model, folder, cache, Loading(typed.batch_size, typed.num_workers))
        search = Search(model, folder, images, embed_captions(model, captions, cache))
        serve(search, None if source is None else source.name, classes, address)
    return "Stopped."
