"""Images in TensorBoard of what a retrieval model finds, and of where it looks."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from PIL.Image import Image
from torch import Tensor
from typing_extensions import override

from .drawing import Panel, Row, draw_rows, heat

Split = Literal["validation", "test"]
# What these look at says little. Words of place and number are not among them.
_FUNCTION_WORDS = (
    "a an the this that these those and or but as if of to in on at by for from with without into onto than then is "
    "are was were be been being has have had do does did it its he him his she her they them their we our you your i "
    "my me not no so there here which who whose what when where while"
)


class _Figures(Callback):
    """Draws a figure after every validation and test; where that is impossible it warns once.

    A subclass makes the rows. They come from the evaluation's result and from the images that are shown, which the
    datamodule opens again, so that an evaluation has nothing to keep for them.
    """

    name: str  # of the figure, after "val/" or "test/"
    module_needs: str | None = None  # a method of the module

    def __init__(self, every_n_epochs: int, **counts: int) -> None:
        super().__init__()
        for name, value in {"every_n_epochs": every_n_epochs, **counts}.items():
            if value < 1:
                raise ValueError(f"{name}={value} of {type(self).__name__} must be at least 1.")
        self.every_n_epochs = every_n_epochs
        self._warned = False

    def rows(self, trainer: Trainer, pl_module: Any, split: Split) -> list[Row]:
        """The content of the figure. Every process calls it; what rank 0 returns is drawn."""
        raise NotImplementedError

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        in_training = trainer.state.fn == "fit"
        if trainer.sanity_checking or (in_training and (trainer.current_epoch + 1) % self.every_n_epochs):
            return
        self._draw(trainer, pl_module, "val", "validation")

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(trainer, pl_module, "test", "test")

    def _draw(self, trainer: Trainer, pl_module: LightningModule, prefix: str, split: Split) -> None:
        loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        lacking = self._lacking(trainer, pl_module, bool(loggers))
        if lacking is None:
            try:
                rows = self.rows(trainer, pl_module, split)
            except _NoFigureError as error:
                lacking = str(error)
        if lacking is not None:
            if not self._warned and not trainer.fast_dev_run:  # type: ignore[attr-defined]
                rank_zero_warn(f"{type(self).__name__} draws nothing: {lacking}")
            self._warned = True
        elif rows and trainer.is_global_zero:
            figure = np.asarray(draw_rows(rows))
            for logger in loggers:
                logger.experiment.add_image(f"{prefix}/{self.name}", figure, trainer.global_step, dataformats="HWC")

    def _lacking(self, trainer: Trainer, pl_module: LightningModule, logs: bool) -> str | None:
        """What stands in the way of a figure, if anything: the end of a sentence, the same in every process."""
        module = type(pl_module).__name__
        if not logs:
            return "the run has no TensorBoardLogger; add one to trainer.logger, or leave the callback out."
        if getattr(getattr(pl_module, "evaluation", None), "result", None) is None:
            return f"{module} has no retrieval evaluation; leave the callback out."
        if self.module_needs is not None and not hasattr(pl_module, self.module_needs):
            return f"{module} has no {self.module_needs}(); leave the callback out."
        if not hasattr(getattr(trainer, "datamodule", None), "image"):
            return "the run has no datamodule with image(), which opens an image again; leave the callback out."
        return None


class RetrievalFigures(_Figures):
    """A grid of text queries with the images that were found first, the right ones framed.

    The order is the final one, after re-ranking if there was any. Beside each image stand its rank and its score:
    the matching head's logit where it was asked, else the cosine similarity. The queries are the same every time, so
    the figures of a run, "val/retrieval" and "test/retrieval" in TensorBoard, show how it improves.

    Args:
        queries: number of texts, spread evenly over the evaluation set.
        top: number of images shown for each text.
        every_n_epochs: epochs of training between two figures of the validation.
    """

    name = "retrieval"

    def __init__(self, queries: int = 8, top: int = 5, every_n_epochs: int = 1) -> None:
        super().__init__(every_n_epochs, queries=queries, top=top)
        self.queries = queries
        self.top = top

    @override
    def rows(self, trainer: Trainer, pl_module: Any, split: Split) -> list[Row]:
        if not trainer.is_global_zero:
            return []
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        result: Any = pl_module.evaluation.result
        near, rows = result.near_images, []
        texts = _spread(len(result.input_ids), self.queries)
        for text, caption in zip(texts, _captions(data, split, result, texts), strict=True):
            images = near.index[text]
            right = torch.zeros(len(images), dtype=torch.bool)
            if result.matches is not None:
                right = result.matches.pairs(images, torch.tensor([text]))
            kind, scores = ("cosine", near.similarity) if near.match_score is None else ("match", near.match_score)
            panels = [
                Panel(
                    _image(data, split, result.sample_index[image]),
                    f"{rank}.  {kind} {scores[text, rank - 1]:.2f}",
                    bool(right[rank - 1]),
                )
                for rank, image in enumerate(images[: self.top].tolist(), 1)
            ]
            first = right.nonzero()[0].item() + 1 if right.any() else None
            note = f"none right among the first {len(images)}" if first is None else f"first right one: rank {first}"
            rows.append(Row(caption, note, panels))
        return rows


class WordMapFigures(_Figures):
    """Captions with their image, and for words of the caption a heat map of where in the image the model looks.

    The module says where, by a method `word_maps(image, input_ids, attention_mask)` that returns maps [B, L, g, g]
    over patches, one for each token. A word's map is the mean over its pieces, that of the whole text the mean over all
    tokens, [CLS] included. Heat shows where, since each map is scaled to its own maximum; the number above shows how
    much, as the share that the maximum has of the highest among the words shown. In TensorBoard: "val/words" and
    "test/words".

    Args:
        images: number of captions with their image, spread evenly over the evaluation set and the same every time.
        words: number of words with content of their own, spread evenly over the caption.
        every_n_epochs: epochs of training between two figures of the validation.
    """

    name = "words"
    module_needs = "word_maps"

    def __init__(self, images: int = 4, words: int = 5, every_n_epochs: int = 1) -> None:
        super().__init__(every_n_epochs, images=images, words=words)
        self.images = images
        self.words = words

    @override
    def rows(self, trainer: Trainer, pl_module: Any, split: Split) -> list[Row]:
        # Every process computes, because those that share a model's weights communicate.
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        result: Any = pl_module.evaluation.result
        if result.matches is None:
            return []
        texts = _spread(len(result.input_ids), self.images)
        owners = result.matches.text_image_id[texts]
        images = (result.matches.image_id == owners[:, None]).int().argmax(1)
        shown = [_image(data, split, index) for index in result.sample_index[images]]
        tensors = torch.stack([data.eval_transform(image) for image in shown])
        plugin, device = trainer.precision_plugin, pl_module.device
        try:
            with plugin.forward_context():
                maps: Tensor = pl_module.word_maps(
                    plugin.convert_input(tensors.to(device)),
                    result.input_ids[texts].to(device),
                    result.attention_mask[texts].to(device),
                )
        except ValueError as error:  # a model that has none
            raise _NoFigureError(str(error)) from error
        rows, captions = [], _captions(data, split, result, texts)
        for text, caption, image, own in zip(texts, captions, shown, maps.float().cpu(), strict=True):
            ids = _ids(result, text)
            tokens = data.tokenizer.convert_ids_to_tokens(ids.tolist())
            words = content_words(tokens, set(data.tokenizer.all_special_tokens))
            shown = [(words[place][0], own[words[place][1]].mean(0)) for place in _spread(len(words), self.words)]
            strongest = max((float(strength.max()) for _, strength in shown), default=0.0) or 1.0
            panels = [Panel(image), Panel(heat(image, own[: len(ids)].mean(0)), "whole text")]
            panels += [Panel(heat(image, map_), f"{word}  {map_.max() / strongest:.0%}") for word, map_ in shown]
            rows.append(Row(caption, panels=panels))
        return rows


class _NoFigureError(Exception):
    """Says why, as the end of a sentence."""


def _image(data: Any, split: Split, sample_index: Tensor) -> Image:
    try:
        image: Image = data.image(split, int(sample_index))
    except ValueError as error:  # streamed, or gone since it was evaluated: no reason to end a run
        raise _NoFigureError(f"an image could not be opened: {error}") from error
    return image


def _spread(total: int, count: int) -> list[int]:
    """At most `count` places of `total`, evenly spread, first and last among them."""
    count = min(count, total)
    return [number * (total - 1) // max(count - 1, 1) for number in range(count)]


def _ids(result: Any, text: int) -> Tensor:
    ids: Tensor = result.input_ids[text][result.attention_mask[text].bool()]
    return ids


def _captions(data: Any, split: Split, result: Any, texts: Sequence[int]) -> list[str]:
    """Texts as they are in the data, if its `captions(split, sample_index)` has them, else as the model read them."""
    read = [_text(data.tokenizer, result, text) for text in texts]
    matches = result.matches
    if matches is None or not hasattr(data, "captions"):
        return read
    owners = matches.text_image_id[texts]
    images = (matches.image_id == owners[:, None]).int().argmax(1)
    try:
        written = data.captions(split, result.sample_index[images].tolist())
    except ValueError:  # streamed: then there are no images either, which says why there is no figure
        return read
    for number, (text, owner) in enumerate(zip(texts, owners, strict=True)):
        # The captions of an image are evaluated together and in their order.
        of_image = (matches.text_image_id == owner).nonzero().flatten().tolist()
        if len(of_image) == len(written[number]):
            read[number] = " ".join(written[number][of_image.index(text)].split())
    return read


def _text(tokenizer: Any, result: Any, text: int) -> str:
    """The text as the model read it, unknown words included."""
    ends = {getattr(tokenizer, f"{name}_token_id", None) for name in ("cls", "sep", "pad", "bos", "eos")}
    return str(tokenizer.decode([number for number in _ids(result, text).tolist() if number not in ends]))


def content_words(tokens: Sequence[str], special: set[str]) -> list[tuple[str, list[int]]]:
    """The words that have content of their own, with the places of their tokens; all words if none has.

    Args:
        tokens: word pieces, of which "##" marks those that continue a word.
        special: tokens that are no words.
    """
    words: list[tuple[str, list[int]]] = []
    for place, token in enumerate(tokens):
        if token in special:
            continue
        if token.startswith("##") and words and words[-1][1][-1] == place - 1:
            word, places = words[-1]
            words[-1] = (word + token[2:], [*places, place])
        elif any(letter.isalnum() for letter in token):
            words.append((token, [place]))
    without = set(_FUNCTION_WORDS.split())
    return [word for word in words if word[0].lower() not in without] or words
