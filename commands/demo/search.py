"""What the page answers: images of a text, regions of a word, captions and classes of an image."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import exp
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib import colormaps
from PIL import Image
from torch import Tensor

from ...callbacks.figures.word_maps import content_words
from ...common.errors import UserError
from ...datamodules.base.decode import decode_image
from ...datamodules.base.faults import BadSample
from ...lightning_modules.base.method import Method
from ...lightning_modules.evaluation.ranking import cosine_weight
from ...metrics.classification import zero_shot_scores
from ...metrics.finite import highest
from ..evaluate.classified_folder import TEMPLATES
from ..evaluate.encoding import encode_classes, encode_texts
from ..evaluate.model import ImageTextModel
from .folder import ImageFolder, small
from .index import Index, Searched

SHOWN = 12  # images of an answer
_RERANKED = 24  # images that a matching head reorders, of which the first are shown
_SIDE = 480  # pixels of a shown image
_BEST = 5  # captions and classes of an image


class Ranked(NamedTuple):
    """A thing that was searched.

    Attributes:
        name: Name of the image, or the caption.
        cosine: Cosine with the query.
        share: Softmax over all things of the model's logits, which are cosines over its temperature; None for a model
            without a temperature, and where a store answers.
        title: Title of the image; empty without one.
    """

    name: str
    cosine: float
    share: float | None = None
    title: str = ""


class Hit(NamedTuple):
    """An image, what it was ranked by, and a word's strength in it, from 0 to 1."""

    image: Image.Image
    ranked: Ranked
    strength: float | None = None


@dataclass
class Search:
    """A model with the embeddings of images and captions.

    Attributes:
        model: The model.
        folder: The images.
        images: Embeddings of the images.
        captions: Embeddings of captions, of which there may be none.
        order: A sentence about the order of the images; None for a model without a matching head.
    """

    model: ImageTextModel
    folder: ImageFolder
    images: Searched
    captions: Index
    order: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._network: Any = self.model.network
        self._encoder: Any = self.model.encoder
        if isinstance(self.model.network, Method):
            self.order = self.model.network.retrieval_order()
        self._tokens = lru_cache(256)(self._encode)
        self._maps = lru_cache(4)(self._map)
        self._classes = lru_cache(8)(self._embed_classes)

    @cached_property
    def why_no_maps(self) -> str | None:
        """Why the model has no maps of words; None if it has."""
        return self._ask_for_maps()

    def find(self, text: str) -> list[Hit]:
        """Return what `rank` does, with the images that can be read."""
        return self.readable(self.rank(text))

    def rank(self, text: str, count: int = SHOWN) -> list[Ranked]:
        """Return the images with the highest cosines with a text, best first.

        A matching head reorders them if this order was better in the model's last evaluation.
        """
        query = encode_texts(self.model, [text])[0]
        if self.order is None or not self._network.evaluation.reranks("predict"):
            best = self.images.best(query, count)
        else:
            best = self._reranked(text, self.images.best(query, max(count, _RERANKED)))[:count]
        return self._ranked(self.images, query, best)

    def rank_captions(self, text: str, count: int) -> list[Ranked]:
        """Return the captions with the highest cosines with a text, best first."""
        best = self.captions.best(encode_texts(self.model, [text])[0], count)
        return [Ranked(*each) for each in best]

    def rank_by_image(self, file: str, count: int) -> list[Ranked]:
        """Return the images with the highest cosines with an image, best first; raises `BadSample`."""
        return self.rank_by_embedding(self._embed(file), count)

    def rank_by_embedding(self, query: Tensor, count: int) -> list[Ranked]:
        """Return the images with the highest cosines with a unit-length embedding [E] of an image, best first."""
        return [Ranked(name, cosine, None, self._title(name)) for name, cosine in self.images.best(query, count)]

    def words(self, text: str) -> list[str]:
        """Return the words of a text that have maps; none if the model maps no words."""
        return [] if self.why_no_maps else [word for word, _ in self._word_positions(text)]

    def look(self, text: str, word: int) -> list[Hit]:
        """Return what `find` returns, with the region of each image that a word of the text attends to.

        Each map is scaled to its own maximum, and the paler the lower this is: `strength` is its share of the highest
        maximum of the images.
        """
        hits = self.find(text)
        (_, columns) = self._word_positions(text)[word]
        heats = self._maps(text, tuple(hit.ranked.name for hit in hits))[:, columns].mean(1)
        highest = max(float(heats.max()), 1e-30)
        return [
            Hit(heat_over(hit.image, heat, strength), hit.ranked, strength)
            for hit, heat in zip(hits, heats, strict=True)
            for strength in [float(heat.max()) / highest]
        ]

    def describe(self, file: str, typed: Sequence[str] = (), count: int = _BEST) -> list[Ranked]:
        """Return the captions with the highest cosines with an image, best first, of those typed or else of those read.

        Raises:
            BadSample: If the image cannot be used.
        """
        captions = Index(typed, encode_texts(self.model, typed)) if typed else self.captions
        if not captions.names:
            return []
        query = self._embed(file)
        return self._ranked(captions, query, captions.best(query, count))

    def classify(self, file: str, names: Sequence[str]) -> list[tuple[str, float]]:
        """Return the best classes of an image, and the softmax of their logits, as `vlightning evaluate`.

        Raises:
            BadSample: If the image cannot be used.
        """
        if not names:
            return []
        scores = zero_shot_scores(self._embed(file), self._classes(tuple(names)))
        top = highest(self.model.shares(scores), _BEST)
        return [(names[index], share) for share, index in zip(top.values.tolist(), top.indices.tolist(), strict=True)]

    def _ranked(self, among: Searched, query: Tensor, best: Sequence[tuple[str, float]]) -> list[Ranked]:
        """Return the best of some things with their shares and titles."""
        scale = self.model.logit_scale
        total = among.log_sum(query, scale) if scale != 1 else None
        shares = [None if total is None else exp(scale * cosine - total) for _, cosine in best]
        return [Ranked(*each, share, self._title(each[0])) for each, share in zip(best, shares, strict=True)]

    def _title(self, name: str) -> str:
        return self.folder.titles.get(name, "")

    @torch.no_grad()
    def _reranked(self, text: str, best: list[tuple[str, float]]) -> list[tuple[str, float]]:
        """Return images with their cosines in the order of the matching head, without those that cannot be read."""
        network = self._network
        tokens = [(hit, image_tokens) for hit in best if (image_tokens := self._tokens(hit[0])) is not None]
        if not tokens:
            return []
        ids = {key: row.to(self.model.device) for key, row in self._encoder([text]).items()}
        states = network.text_states(**ids)
        scores = torch.cat(
            [network.match_scores(states, ids["attention_mask"], image_tokens) for _, image_tokens in tokens]
        ).cpu()
        weight = cosine_weight(network.rerank.score, network.contrastive_temperature())
        order = highest(scores + weight * torch.tensor([cosine for (_, cosine), _ in tokens]), len(tokens))
        return [tokens[index][0] for index in order.indices.tolist()]

    def _encode(self, name: str) -> Tensor | None:
        """Return the tokens [1, N, V] of an image of the folder; None if it can no longer be read."""
        try:
            pixels = self.model.transform(self.folder.open(name))[None].to(self.model.device)
        except (BadSample, OSError):
            return None
        tokens: Tensor = self._network.encode_images(self.model.finish(pixels))[1]
        return tokens

    def readable(self, best: Sequence[Ranked]) -> list[Hit]:
        """Return the images that can still be read."""
        with ThreadPoolExecutor(4) as pool:
            images = pool.map(lambda each: small(self.folder, each.name, _SIDE), best)
            return [Hit(image, each) for each, image in zip(best, images, strict=True) if image is not None]

    def _embed(self, file: str) -> Tensor:
        pixels = self.model.transform(decode_image(None, file, "the given image"))
        return self.model.encode_images(pixels[None]).cpu()[0]

    def _embed_classes(self, names: tuple[str, ...]) -> Tensor:
        return encode_classes(self.model, names, TEMPLATES)

    def _word_positions(self, text: str) -> list[tuple[str, list[int]]]:
        """Return the words of a text with the positions of their tokens."""
        tokenizer = self._encoder.tokenizer
        tokens = tokenizer.convert_ids_to_tokens(self._encoder([text])["input_ids"][0].tolist())
        return content_words(tokens, set(tokenizer.all_special_tokens))

    def _map(self, text: str, names: tuple[str, ...]) -> Tensor:
        """Return the maps of a text's tokens on images, [N, L, g, g], on the CPU."""
        model = self.model
        pixels = torch.stack([model.transform(self.folder.open(name)) for name in names]).to(model.device)
        ids = {key: row.to(model.device).expand(len(names), -1) for key, row in self._encoder([text]).items()}
        maps: Tensor = self._network.word_maps(model.finish(pixels), **ids)
        return maps.float().cpu()

    def _ask_for_maps(self) -> str | None:
        if not hasattr(self.model.network, "word_maps") or self.model.encoder is None:
            return "only ALBEF has word maps"
        try:
            self._map("a", (self.images.names[0],))
        except (UserError, ValueError) as error:
            return str(error)
        return None


def heat_over(image: Image.Image, heat: Tensor, strength: float) -> Image.Image:
    """Return an image in gray with a map [g, g] over it, in the colors of `WordMapFigures`; strengths are up to 1."""
    values = (heat / max(float(heat.max()), 1e-30)).numpy()
    stretched = Image.fromarray(values).resize(image.size, Image.Resampling.BILINEAR)
    heat_map = np.asarray(stretched).clip(0, 1)
    gray = np.asarray(image.convert("L"))[..., None] / 255
    opacity = 0.75 * heat_map[..., None] ** 0.7 * strength**0.5
    mixed = gray * (1 - opacity) + colormaps["plasma"](heat_map)[..., :3] * opacity
    return Image.fromarray((255 * mixed).round().astype(np.uint8))
