"""Figures of retrieval results."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from lightning.pytorch import Trainer
from typing_extensions import override

from ...common.ranges import COUNT
from .evaluation import EvaluationFigures, Split, captions_of, evenly_spread, open_image
from .grid import Panel, Row


class RetrievalFigures(EvaluationFigures):
    """Draw text queries with the images that were ranked first, correct images in a green frame.

    Images are in their final order, after re-ranking if there is any. Above each image are its rank and its score:
    the matching head's logit if the image was re-ranked, else the cosine similarity. The queries stay the same, so the
    figures "val/retrieval" and "test/retrieval" show how a run improves.

    Args:
        queries: Number of texts, spread evenly over the evaluation set.
        top: Number of images of each text.
        every_n_epochs: Epochs of training between two figures of the validation.
    """

    name = "retrieval"

    def __init__(
        self, queries: Annotated[int, COUNT] = 8, top: Annotated[int, COUNT] = 5, every_n_epochs: int = 1
    ) -> None:
        super().__init__(every_n_epochs)
        self.queries = queries
        self.top = top

    @override
    def rows(self, trainer: Trainer, pl_module: Any, split: Split) -> list[Row]:
        if not trainer.is_global_zero:
            return []
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        result: Any = pl_module.evaluation.result
        near, rows = result.near_images, []
        texts = evenly_spread(len(result.input_ids), self.queries)
        for text, caption in zip(texts, captions_of(data, split, result, texts), strict=True):
            images = near.index[text]
            right = torch.zeros(len(images), dtype=torch.bool)
            if result.matches is not None:
                right = result.matches.pairs(images, torch.tensor([text]))
            kind, scores = ("cosine", near.similarity) if near.match_score is None else ("match", near.match_score)
            panels = [
                Panel(
                    open_image(data, split, result.sample_index[image]),
                    f"{rank}.  {kind} {scores[text, rank - 1]:.2f}",
                    bool(right[rank - 1]),
                )
                for rank, image in enumerate(images[: self.top].tolist(), 1)
            ]
            first = right.nonzero()[0].item() + 1 if right.any() else None
            note = f"no match in the first {len(images)}" if first is None else f"first match: rank {first}"
            rows.append(Row(caption, note, panels))
        return rows
