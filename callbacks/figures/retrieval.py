"""Figures of retrieval results, and embeddings in TensorBoard's projector."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor
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
        near = result.near_images
        rows = []
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


class EmbeddingProjector(EvaluationFigures):
    """Show embeddings of images and of their first captions in TensorBoard's projector, with thumbnails and labels.

    The features are those of the evaluation, which ranks them; the datamodule opens the images again. A caption has the
    thumbnail of its image, so that both points of a pair are recognized. In the tab "projector", "val/embeddings"
    and "test/embeddings" can be colored by kind, image or text, and searched for words of the captions.

    Args:
        images: Number of images, spread evenly over the evaluation set.
        size: Side of a thumbnail in pixels.
        every_n_epochs: Epochs of training between two projections of the validation.
    """

    name = "embeddings"
    result_needs = "image_features"

    def __init__(
        self, images: Annotated[int, COUNT] = 500, size: Annotated[int, COUNT] = 48, every_n_epochs: int = 1
    ) -> None:
        super().__init__(every_n_epochs)
        self.images = images
        self.size = size

    @override
    def rows(self, trainer: Trainer, pl_module: Any, split: Split) -> list[Row]:
        if not trainer.is_global_zero:
            return []
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        result: Any = pl_module.evaluation.result
        order = result.sample_index.argsort()
        first = {int(result.matches.text_image_id[text]): text for text in result.matches.first_texts().tolist()}
        shown = [
            (row, first[image])
            for row in order[evenly_spread(len(order), self.images)].tolist()
            if (image := int(result.matches.image_id[row])) in first
        ]
        image_rows = [row for row, _ in shown]
        texts = [text for _, text in shown]
        self._features = torch.cat([result.image_features[image_rows], result.text_features[texts]]).float().cpu()
        captions = captions_of(data, split, result, texts)
        thumbnails = [open_image(data, split, result.sample_index[row]).convert("RGB") for row in image_rows]
        pairs = list(zip(captions, thumbnails, strict=True))
        return [Row(text, kind, [Panel(image)]) for kind in ("image", "text") for text, image in pairs]

    @override
    def show(self, trainer: Trainer, name: str, rows: list[Row]) -> None:
        thumbnails = torch.stack([self._thumbnail(row) for row in rows])
        labels = [[row.note, " ".join(row.text.split())] for row in rows]
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_embedding(
                    self._features, labels, thumbnails, trainer.global_step, name, ["kind", "caption"]
                )

    def _thumbnail(self, row: Row) -> Tensor:
        small = row.panels[0].image.resize((self.size, self.size))
        return pil_to_tensor(small).float() / 255

    @override
    def _lacking(self, trainer: Trainer, pl_module: LightningModule) -> str | None:
        if not any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
            return "the run has no TensorBoardLogger; add one to trainer.logger, or leave the callback out."
        return super()._lacking(trainer, pl_module)
