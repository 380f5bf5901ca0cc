"""Evaluation and prediction of SHRe."""

from collections.abc import Mapping
from typing import Any

from ...callbacks import ClassPredictionWriter, TextClassPredictionWriter
from ...callbacks.modules import on_any_rows
from ..core.trainers import callbacks_of
from ..evaluation.protocol import Batch
from ..evaluation.retrieval import RetrievalEvaluation
from .settings import EvaluationSettings

MEDIAN_RANK_FOLD = 1000  # images (Aytar et al.)


class SHReEvaluation(RetrievalEvaluation):
    """Retrieval in several spaces; class probabilities where a callback writes them.

    Args:
        evaluation: settings.
        match_equal_texts: as in `RetrievalEvaluation`.
        spaces: width of each space by name.
    """

    def __init__(
        self, evaluation: EvaluationSettings, match_equal_texts: bool | None, spaces: Mapping[str, int]
    ) -> None:
        super().__init__(
            match_equal_texts,
            spaces=spaces,
            prediction_space=evaluation.features,
            median_rank_fold=MEDIAN_RANK_FOLD,
        )

    def predict(self, module: Any, batch: Batch) -> dict[str, Any]:
        """Return features as for retrieval, and class probabilities [B, C] of the images, or else of the texts."""
        prediction = super().predict(module, batch)
        writers = (ClassPredictionWriter, TextClassPredictionWriter)
        if any(isinstance(callback, writers) for callback in callbacks_of(module)):
            if "image" in batch:
                logits = on_any_rows(module.classify_images, batch["image"])
            else:
                logits = on_any_rows(module.classify_texts, batch["input_ids"], batch["attention_mask"])
            prediction["probabilities"] = logits.softmax(-1)
        return prediction
