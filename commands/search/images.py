"""A search straight from images: a folder or a table, embedded by a model once."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from ...common.errors import UserError
from ...common.files import replacing
from ...common.messages import say
from ...common.shown import shown
from ...datamodules.base.faults import BadSample
from ...datamodules.reading.cache import index_cache
from ..demo.folder import ImageFolder, read_folder, read_table, titled
from ..demo.index import embed_captions, embed_folder
from ..demo.rendering import page_of_hits
from ..demo.search import Ranked, Search
from ..evaluate.encoding import Loading
from ..evaluate.model import ImageTextModel, load_model


def search_images(typed: argparse.Namespace) -> str:
    """Search the images of a folder or of a table.

    Args:
        typed: The parsed arguments, of which the first query names the images.

    Raises:
        UserError: If an argument is wrong, or the model or the images cannot be used.
    """
    source, *queries = typed.queries
    if not queries:
        raise UserError(f"Expected a query after the images {source!r}, got none: add a text, or an image with --by.")
    if not Path(typed.source).expanduser().exists() and typed.weights is None and ":" not in typed.source:
        raise UserError(
            f"Expected a store, a run, a checkpoint or an export first, got {typed.source!r}, which does not exist: "
            "correct it, or give the weights of a published model of this name after --weights."
        )
    folder, captions = images_of(source, typed.captions, typed.caption_column, typed.image_column)
    if typed.of == "text" and not captions:
        raise UserError(f"Expected captions of {source!r} to search with --of text, got none: give --captions.")
    model = load_model(typed.source, typed.weights)
    model.network.to(typed.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    loading = Loading(typed.batch_size, typed.num_workers)
    search = embedded(model, folder, captions if typed.of == "text" else [], index_cache(typed.cache), loading)
    answers = {query: answer(search, query, typed) for query in queries}
    if typed.html:
        note = f"{len(search.images.names):,} images of {folder.root.name}, {model.name}"
        write_page(typed.html, search, answers, note)
    return "\n".join(line for query, best in answers.items() for line in lines_of(query, best))


def opened_search(
    model: ImageTextModel,
    source: str,
    captions: str | None = None,
    caption_column: str | None = None,
    image_column: str = "image",
    cache: str | None = None,
    loading: Loading | None = None,
) -> Search:
    """Return a search among the images of a folder or of a table.

    Args:
        model: The model.
        source: The folder or the table.
        captions: As of the command.
        caption_column: As of the command.
        image_column: As of the command.
        cache: Folder of the embeddings; None for that of the demo.
        loading: How images are read.

    Raises:
        UserError: If there are no images, or an option does not fit.
    """
    folder, _ = images_of(source, captions, caption_column, image_column)
    return embedded(model, folder, [], index_cache(cache), loading or Loading())


def embedded(
    model: ImageTextModel, folder: ImageFolder, captions: Sequence[str], cache: Path, loading: Loading
) -> Search:
    """Return a search among images and captions, which are embedded if they were not.

    Raises:
        UserError: If no image can be used.
    """
    return Search(model, folder, embed_folder(model, folder, cache, loading), embed_captions(model, captions, cache))


def images_of(
    source: str, captions: str | None, caption_column: str | None, image_column: str
) -> tuple[ImageFolder, list[str]]:
    """Return the images of a folder or of a table, and their captions.

    Raises:
        UserError: If there are none, or an option does not fit.
    """
    if Path(source).expanduser().is_file():
        if captions is not None:
            raise UserError(f"Expected no --captions with the table {source!r}, got {captions!r}: leave it out.")
        table = read_table(source, image_column, caption_column or "caption")
        return table, list(dict.fromkeys(table.titles.values()))
    folder, texts, _ = titled(read_folder(source, "after the model"), captions, caption_column, image_column)
    return folder, texts


def answer(search: Search, query: str, typed: argparse.Namespace) -> list[Ranked]:
    """Return what is ranked first by a query.

    Raises:
        UserError: If the query is no image although --by says so.
    """
    try:
        if typed.by == "text" and typed.of == "image":
            return search.rank(query, typed.count)
        if typed.by == "image":
            ranks = search.rank_by_image if typed.of == "image" else search.describe
            return ranks(query, count=typed.count)
    except BadSample as bad:
        raise UserError(f"Expected an image, got {query!r} ({bad.fault.cause}): correct the path.") from None
    return search.rank_captions(query, typed.count)


def lines_of(query: str, best: Sequence[Ranked]) -> list[str]:
    """Return the lines of a query and of what it ranks first: cosine, share, name and title."""
    lines = [f"{shown(query)}:"]
    for each in best:
        share = "" if each.share is None else f"{each.share:6.1%}  "
        title = f"  {shown(each.title)}" if each.title else ""
        lines.append(f"  {each.cosine:.4f}  {share}{shown(each.name)}{title}")
    return lines


def write_page(file: str, search: Search, answers: dict[str, list[Ranked]], note: str) -> None:
    """Write a page with the images that queries rank first.

    Raises:
        UserError: If the file cannot be written.
    """
    page = page_of_hits({query: search.readable(best) for query, best in answers.items()}, note)
    with replacing(Path(file).expanduser()) as staged:
        staged.write_text(page, encoding="utf-8")
    say(f"Page: {file}")
