"""Evaluation of generated captions."""

from typing import Any, Protocol

import torch

from ...callbacks.distributed.collectives import gather_texts, gather_uneven
from ...common.log import log_global
from ...metrics.captions import caption_scores
from .protocol import PREFIXES, Batch, Stage, Summary


class CaptioningMethod(Protocol):
    """Methods that `CaptionEvaluation` calls on a module."""

    def write_captions(self, batch: Batch) -> list[str]:
        """Return a caption of each image of a batch."""


class CaptionEvaluation:
    """BLEU, ROUGE-L and CIDEr-D, times 100, over the images of all processes.

    An evaluation batch holds the `references` of each image, a prediction batch `sample_index` and `image_id`.
    """

    def __init__(self) -> None:
        self.summary: Summary | None = None
        self.start()

    def start(self) -> None:
        """Clear the captions."""
        self._written: list[str] = []
        self._references: list[list[str]] = []

    def step(self, module: CaptioningMethod, batch: Batch, stage: Stage) -> None:
        """Write captions for comparison with the references."""
        self._written += module.write_captions(batch)
        self._references += batch["references"]

    def predict(self, module: CaptioningMethod, batch: Batch) -> Batch:
        """Return captions, with the positions [B] of the images in their data set and their ids."""
        return {name: batch[name] for name in ("sample_index", "image_id")} | {"caption": module.write_captions(batch)}

    def finish(self, module: Any, stage: Stage) -> None:
        """Log the scores."""
        if stage == "predict":
            return
        counts = gather_uneven(torch.tensor([len(texts) for texts in self._references], dtype=torch.long))
        references = iter(gather_texts([text for texts in self._references for text in texts]))
        grouped = [[next(references) for _ in range(count)] for count in counts.tolist()]
        self.summary = Summary({"images": len(grouped)})
        scores = caption_scores(gather_texts(self._written), grouped)
        self.start()
        prefix = PREFIXES[stage]
        named = {f"{prefix}/{name}": value for name, value in scores.items()}
        log_global(module, named, progress_bar=f"{prefix}/cider_d")
