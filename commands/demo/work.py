"""The work of `vlightning demo`, after its arguments are parsed."""

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch

from ...common.errors import UserError
from ...datamodules.reading.cache import index_cache
from ..evaluate.encoding import Loading
from ..evaluate.image_sets import given_texts
from ..evaluate.model import load_model
from .folder import captions_beside, read_captions, read_folder
from .index import Searched, embed_captions, embed_folder
from .search import Search
from .server import bound, serve
from .stored import stored_folder


def work(typed: argparse.Namespace) -> str:
    """Embed a folder, and serve the page until it is stopped.

    Args:
        typed: The parsed arguments.

    Raises:
        UserError: If an argument is wrong, or the model or the images cannot be used.
    """
    if find_spec("gradio") is None:
        raise UserError("Expected the package gradio for vlightning demo, got none: pip install 'vlightning[demo]'.")
    folder = read_folder(typed.images)
    classes = given_texts(typed.classes)
    captions, source = captions_beside(folder.root)
    if typed.captions:
        captions = read_captions(Path(typed.captions).expanduser())
        source = Path(typed.captions).name
    with bound(typed.port) as address:  # before the images are embedded, which may take minutes
        model = load_model(typed.model, typed.weights)
        model.network.to(typed.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        cache = index_cache(typed.cache)
        if typed.store:
            images: Searched = stored_folder(model, folder, typed.store)
        else:
            images = embed_folder(model, folder, cache, Loading(typed.batch_size, typed.num_workers))
        search = Search(model, folder, images, embed_captions(model, captions, cache))
        serve(search, source, classes, address)
    return "Stopped."
