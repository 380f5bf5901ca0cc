"""Figures of the image regions that a model attends to for the words of a caption."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from lightning.pytorch import Trainer
from torch import Tensor
from typing_extensions import override

from ...common.errors import UserError
from ...common.ranges import COUNT
from .evaluation import (
    EvaluationFigures,
    NoFigureError,
    Split,
    captions_of,
    evenly_spread,
    heat_maps,
    open_image,
    token_ids,
)
from .grid import Panel, Row

# Maps of these words are not informative. Words of place and number are content words.
_FUNCTION_WORDS = (
    "a an the this that these those and or but as if of to in on at by for from with without into onto than then is "
    "are was were be been being has have had do does did it its he him his she her they them their we our you your i "
    "my me not no so there here which who whose what when where while"
)


class WordMapFigures(EvaluationFigures):
    """Draw captions with their image, and heat maps of the attended image regions for words of the caption.

    The module has a method `word_maps(image, input_ids, attention_mask)` that returns maps [B, L, g, g] over patches,
    one for each token. A word's map is the mean over its pieces; the whole text's is the mean over all tokens, [CLS]
    included. Each map is scaled to its own maximum, so colors show the region; the percentage above a map
    is its maximum relative to the highest maximum among the words shown. The figures are "val/words" and "test/words"
    in the loggers.

    Args:
        images: Number of captions with their image, spread evenly over the evaluation set, the same every time.
        words: Number of content words, spread evenly over the caption.
        every_n_epochs: Epochs of training between two figures of the validation.
    """

    name = "words"
    module_needs = "word_maps"

    def __init__(
        self, images: Annotated[int, COUNT] = 4, words: Annotated[int, COUNT] = 5, every_n_epochs: int = 1
    ) -> None:
        super().__init__(every_n_epochs)
        self.images = images
        self.words = words

    @override
    def rows(self, trainer: Trainer, pl_module: Any, split: Split) -> list[Row]:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        result: Any = pl_module.evaluation.result
        if result.matches is None:
            return []
        texts = evenly_spread(len(result.input_ids), self.images)
        owners = result.matches.text_image_id[texts]
        images = (result.matches.image_id == owners[:, None]).int().argmax(1)
        shown = [open_image(data, split, index) for index in result.sample_index[images]]
        tokens = (result.input_ids[texts], result.attention_mask[texts])
        try:
            maps: Tensor = heat_maps(trainer, pl_module, "word_maps", shown, *tokens)
        except (UserError, ValueError) as error:  # this model has no maps
            raise NoFigureError(str(error)) from error
        rows = []
        captions = captions_of(data, split, result, texts)
        for text, caption, image, token_maps in zip(texts, captions, shown, maps.float().cpu(), strict=True):
            ids = token_ids(result, text)
            tokens = data.tokenizer.convert_ids_to_tokens(ids.tolist())
            words = content_words(tokens, set(data.tokenizer.all_special_tokens))
            chosen = [words[number] for number in evenly_spread(len(words), self.words)]
            heats = [(word, token_maps[positions].mean(0)) for word, positions in chosen]
            strongest = max((float(heat.max()) for _, heat in heats), default=0.0) or 1.0
            panels = [Panel(image), Panel(image, "whole text", heat=token_maps[: len(ids)].mean(0))]
            panels += [Panel(image, f"{word}  {heat.max() / strongest:.0%}", heat=heat) for word, heat in heats]
            rows.append(Row(caption, panels=panels))
        return rows


def content_words(tokens: Sequence[str], special: set[str]) -> list[tuple[str, list[int]]]:
    """Return the content words with the indices of their tokens; all words if there is no content word.

    Args:
        tokens: Word pieces; "##" marks a piece that continues a word.
        special: Tokens that are not words.
    """
    words: list[tuple[str, list[int]]] = []
    for position, token in enumerate(tokens):
        if token in special:
            continue
        if token.startswith("##") and words and words[-1][1][-1] == position - 1:
            word, positions = words[-1]
            words[-1] = (word + token[2:], [*positions, position])
        elif any(letter.isalnum() for letter in token):
            words.append((token, [position]))
    without = set(_FUNCTION_WORDS.split())
    return [word for word in words if word[0].lower() not in without] or words
