"""Evaluation of a method by its component `evaluation`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from lightning import LightningModule
from torch import Tensor

from ..core.data_sizes import DataSizes, compare_sizes
from ..evaluation.protocol import Batch, Evaluation
from ..evaluation.reranking import Orders
from ..evaluation.retrieval import RetrievalEvaluation


class EvaluatedModule(LightningModule):
    """A module whose validation, test and prediction are those of `self.evaluation`.

    A method sets `self.evaluation`.
    """

    evaluation_note: ClassVar[str | None] = None
    """Statement that `vlightning evaluate` prints beside each result of the method; None for none."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluation: Evaluation | None = None

    def similarity_scale(self) -> float:
        """Return the factor by which cosines of image and text features become logits, 1 / temperature.

        By default the exponential of `student.logit_scale`; 1 without such a parameter. Every process must call this.
        """
        logit_scale = getattr(getattr(self, "student", None), "logit_scale", None)
        return 1.0 if logit_scale is None else float(logit_scale.exp())

    def image_features(self, image: Tensor) -> Tensor:
        """Return the features [B, E] of images [B, 3, S, S] that are stored; by default those of `encode_images`.

        A method with towers whose features have any length returns these: captioning is trained on them.
        """
        encoded: Any = self
        features: Tensor = encoded.encode_images(image)[0]
        return features

    def text_features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the features [B, E] of texts [B, L] that are stored; by default those of `encode_texts`."""
        encoded: Any = self
        features: Tensor = encoded.encode_texts(input_ids, attention_mask)
        return features

    def data_sizes(self) -> DataSizes:
        """Return the sizes that the networks accept; by default from the settings `vision` and `text`."""
        return DataSizes(
            self._setting("vision", "image_size"),
            self._setting("text", "vocab_size"),
            self._setting("text", "max_tokens"),
        )

    def _setting(self, group: str, name: str) -> Any:
        return getattr(getattr(self, group, None), name, None)

    def compare_sizes(self, batch: Any) -> None:
        """Compare images and token ids of a batch with `data_sizes()`.

        Raises:
            UserError: If a size does not fit.
        """
        free = self._setting("text", "vocab_size") is not None and self.hparams.get("weights") is None
        compare_sizes(self, batch, self.data_sizes(), free)

    def on_train_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Compare the sizes of the first batch."""
        if batch_idx == 0:
            self.compare_sizes(batch)

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = on_train_batch_start

    def on_validation_epoch_start(self) -> None:
        """Start the evaluation."""
        self._evaluation().start()

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Evaluate a batch."""
        self._evaluation().step(self, batch, "validate")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Evaluate a batch."""
        self._evaluation().step(self, batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Return predictions of a batch."""
        return self._evaluation().predict(self, batch)

    def on_validation_epoch_end(self) -> None:
        """Log the results."""
        self._evaluation().finish(self, "validate")

    def on_test_epoch_end(self) -> None:
        """Log the results."""
        self._evaluation().finish(self, "test")

    def on_predict_epoch_end(self) -> None:
        """Finish the predictions."""
        self._evaluation().finish(self, "predict")

    def _evaluation(self) -> Evaluation:
        if self.evaluation is None:
            raise NotImplementedError(
                f"Expected {type(self).__name__}.evaluation, got none: set it, or leave out the data."
            )
        return self.evaluation

    def retrieval_orders(self) -> dict[str, float] | None:
        """Return the mean recall of both orders of retrieval in the last evaluation that re-ranked; else None."""
        orders = getattr(self.evaluation, "orders", None)
        return None if orders is None else dataclasses.asdict(orders)

    def retrieval_order(self) -> str | None:
        """Return a sentence about the order in which predictions rank; None for a method without a matching head."""
        evaluation = self.evaluation
        return evaluation.order() if isinstance(evaluation, RetrievalEvaluation) and evaluation.rerank.k else None

    def adopt_retrieval_orders(self, record: Mapping[str, float] | None) -> None:
        """Set the orders that the evaluation of a checkpoint or of an export measured; they order predictions."""
        if isinstance(self.evaluation, RetrievalEvaluation):
            self.evaluation.orders = None
            if record is not None:
                self.evaluation.orders = Orders(float(record["contrast"]), float(record["reranked"]))
