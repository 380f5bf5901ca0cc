"""Retrieval evaluation and prediction for any module that puts images and texts into one space."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from ...callbacks.distributed.collectives import gather_uneven
from ...common.log import log_global
from ...metrics.finite import non_finite_last
from ...metrics.retrieval import (
    RECALLS,
    Matches,
    average_median_ranks,
    nearest_candidates,
    recalls,
    reranked_ranks,
    retrieval_ranks,
)
from ..base.checkpoints import CheckpointModule
from ..base.data_sizes import DataSizesModule
from .protocol import PREFIXES, Stage
from .reranking import NO_RERANKING, PairScorer, RerankScore, RerankSettings, TokenStore, match_candidates  # noqa: F401
from .retrieval_result import UNKNOWN, RetrievalResult

Batch = dict[str, Tensor]
Protocol = Literal["karpathy5", "paper"]


class RetrievalEvaluation:
    """Collects the images and texts of an evaluation over all processes, ranks them, and computes recall.

    Features are kept in main memory, so the size of an evaluation set is not bounded by a device's memory. Recall is at
    1, 5 and 10 in both directions, in percent; after re-ranking there are six more, and their mean, with the prefix
    `rerank_`.

    Args:
        match_equal_texts: whether an image also matches the texts that equal one of its own captions (web and shop
            data repeat titles); else only the captions of the same image match.
        rerank: when and how a matching head puts the best candidates of each row into a new order.
        protocols: which texts are ranked, each result named `<protocol>/<recall>`: "karpathy5" all, as is usual on
            Karpathy's splits of five captions an image; "paper" the first one of each image, as MM-LG and CLIP-KD do
            it. They are not comparable. None: all, and the names are plain.
        spaces: width of each feature space, by name. Features then come concatenated in this order, those of each space
            of unit length, and everything is measured in each space, named `<space>/...`. None: there is one space.
        prediction_space: whose features and candidates the result holds; by default the first one.
        median_rank_fold: images of a fold for `average_median_ranks`, which are then measured too, of all texts
            whatever the protocols say.

    Raises:
        ValueError: if `rerank.k` is too small or stands beside protocols or spaces, one of these is none, the space of
            the predictions is not among them, or a fold is empty.
    """

    def __init__(
        self,
        match_equal_texts: bool = False,
        rerank: RerankSettings = NO_RERANKING,
        protocols: Sequence[Protocol] | None = None,
        spaces: Mapping[str, int] | None = None,
        prediction_space: str | None = None,
        median_rank_fold: int | None = None,
    ) -> None:
        rerank_k = rerank.k
        if 0 < rerank_k < max(RECALLS):
            raise ValueError(
                f"rerank.k is {rerank_k}, below {max(RECALLS)}, so recall at {max(RECALLS)} would mix two orders: "
                "raise it, or set 0 to leave re-ranking out."
            )
        if protocols is not None and rerank_k:
            raise ValueError(
                f"Found protocols beside rerank.k={rerank_k}, but re-ranking takes all texts: leave one out."
            )
        if protocols is not None and not protocols:
            raise ValueError("Found no name in protocols, expected karpathy5, paper or both: name what to measure.")
        if spaces is not None and rerank_k:
            raise ValueError(f"Found spaces beside rerank.k={rerank_k}, but re-ranking takes one: leave one out.")
        if spaces is not None and not spaces:
            raise ValueError("Found no name in spaces, expected the width of each by its name: name them, or set None.")
        if prediction_space is not None and prediction_space not in (spaces or ()):
            raise ValueError(
                f"prediction_space={prediction_space!r} is not among the spaces {list(spaces or ())}: take one of them."
            )
        if median_rank_fold is not None and median_rank_fold < 1:
            raise ValueError(f"median_rank_fold={median_rank_fold} must be at least 1: raise it, or set None.")
        self.protocols = protocols
        self.spaces = spaces
        self.prediction_space = prediction_space
        self.median_rank_fold = median_rank_fold
        self.match_equal_texts = match_equal_texts
        self.rerank = rerank
        self.result: RetrievalResult | None = None
        self.reset()

    def step(self, module: Any, batch: Batch, stage: Stage) -> None:
        """Encode images and captions."""
        self._collect(module, batch, stage)

    def predict(self, module: Any, batch: Batch) -> dict[str, Any]:
        """Encode the images and the texts of a batch, and return the features with the ids that came with them."""
        ids = ("image_id", "sample_index", "text_image_id", "text_index")
        return {name: batch[name] for name in ids if name in batch} | self._collect(module, batch, "predict")

    def finish(self, module: Any, stage: Stage) -> None:
        """Rank what was collected; log recall in percent, in a validation or a test."""
        scorer = module if self.rerank.applies(stage) else None
        temperature = 1.0 if scorer is None else module.contrastive_temperature()
        # Lightning has left the precision's context by now, in which the towers ran.
        result = self.compute(scorer, module.trainer.precision_plugin.forward_context, temperature)
        self.start()
        result.warn()
        if stage != "predict":
            _log_recalls(module, result, PREFIXES[stage])

    def _collect(self, module: Any, batch: Batch, stage: Stage) -> dict[str, Tensor]:
        """Encode what a batch holds and keep it; with several spaces, of all of them."""
        features: dict[str, Tensor] = {}
        one = self.spaces is None
        if "image" in batch:
            encode = module.encode_images if one else module.ranked_images
            features["image_features"], tokens = encode(batch["image"])
            kept = _as_computed(tokens) if tokens is not None and self.rerank.applies(stage) else None
            self.add_images(features["image_features"], batch["image_id"], batch["sample_index"], kept)
        if "input_ids" in batch:
            encode = module.encode_texts if one else module.ranked_texts
            features["text_features"] = encode(batch["input_ids"], batch["attention_mask"])
            ids = (batch.get(name) for name in ("text_image_id", "text_id", "text_index"))
            self.add_texts(features["text_features"], batch["input_ids"], batch["attention_mask"], *ids)
        return features

    def start(self) -> None:
        """Forget what was collected; the last result stays."""
        self.reset()

    def reset(self) -> None:
        """Forget what was added; the last result stays."""
        self._images: list[tuple[Tensor, ...]] = []
        self._texts: list[tuple[Tensor, ...]] = []
        self._ids: list[tuple[Tensor, Tensor]] = []
        self._tokens = TokenStore(self.rerank.memory_gib * 2**30)

    def add_images(
        self, features: Tensor, image_id: Tensor, sample_index: Tensor, tokens: Tensor | None = None
    ) -> None:
        """Add images: features [B, E], ids and positions long [B], tokens [B, N, V] for re-ranking."""
        self._check_width(features)
        self._images.append((features.detach().float().cpu(), image_id.cpu(), sample_index.cpu()))
        if tokens is not None:
            self._tokens.append(tokens)

    def add_texts(
        self,
        features: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor,
        image_id: Tensor | None = None,
        text_id: Tensor | None = None,
        text_index: Tensor | None = None,
    ) -> None:
        """Add texts: features [T, E], ids and mask [T, L]; id of the image, of equal texts, and position, long [T].

        What is not known is None, for all texts of an evaluation alike.
        """
        self._check_width(features)
        none = torch.full((len(features),), UNKNOWN)
        columns = [none if column is None else column.cpu() for column in (image_id, text_id, text_index)]
        self._texts.append((features.detach().float().cpu(), *columns))
        self._ids.append((input_ids.cpu(), attention_mask.cpu()))

    @torch.no_grad()
    def compute(
        self,
        scorer: PairScorer | None = None,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
        temperature: float = 1.0,
    ) -> RetrievalResult:
        """Rank everything that was added. Every process must call it, and gets the same.

        Args:
            scorer: puts the `rerank.k` best of each row into a new order; needs the tokens of all images.
            precision: what the scorer runs in, such as autocast. Similarities are in float32 all the same.
            temperature: of the contrastive logits.
        """
        width = self._width()
        image_features, image_id, sample_index = _gathered(self._images, width, columns=3)
        text_features, text_image_id, text_id, text_index = _gathered(self._texts, width, columns=4)
        known = bool((text_image_id != UNKNOWN).all()) and len(image_features) > 0 and len(text_features) > 0
        matches = Matches(image_id, text_image_id, text_id if self.match_equal_texts else None) if known else None

        images, texts = self._by_space(image_features), self._by_space(text_features)
        ranks: dict[str, tuple[Tensor, Tensor]] = {}
        found: dict[str, float] = {}
        if matches is not None:
            for name in images:
                space = images[name], texts[name], matches
                ranks[name] = retrieval_ranks(*space)
                measured = self._recalls(*space, ranks[name]) | self._median_ranks(*space, sample_index)
                found |= {f"{name}/{key}" if name else key: value for key, value in measured.items()}

        predicted = self.prediction_space or next(iter(images))
        # A copy where it is a part, or the features of the other spaces would stay in memory with the result.
        features = images[predicted].contiguous(), texts[predicted].contiguous()
        near = nearest_candidates(*features, self.rerank.k or max(RECALLS))
        ids = _gathered_ids(self._ids)
        text_names = torch.where(text_index < 0, text_image_id, text_index)
        result = RetrievalResult(
            found,
            *features,
            sample_index,
            *ids,
            text_index,
            *near,
            matches,
            sample_index[~image_features.isfinite().all(1)],
            text_names[~text_features.isfinite().all(1)],
        )
        if scorer is not None and len(image_features) and len(text_features):
            with precision():
                scores = self._match(scorer, result)
            self._rerank(result, scores, ranks.get(predicted), temperature)
        self.result = result
        return result

    def _check_width(self, features: Tensor) -> None:
        if self.spaces is not None and features.shape[1] != sum(self.spaces.values()):
            raise ValueError(
                f"Found features of width {features.shape[1]}, expected {sum(self.spaces.values())}, the sum over the "
                f"spaces {dict(self.spaces)}: concatenate the features of all spaces, or correct their widths."
            )

    def _width(self) -> int:
        """Of the features that are added."""
        if self.spaces is not None:
            return sum(self.spaces.values())
        # A process may have got no batch at all, and then knows the width of the features from the others.
        widths = [batches[0][0].shape[1] for batches in (self._images, self._texts) if batches]
        return int(gather_uneven(torch.tensor([max(widths, default=0)])).max())

    def _by_space(self, features: Tensor) -> dict[str, Tensor]:
        """Views of the features [N, E] of each space; the only one has no name."""
        if self.spaces is None:
            return {"": features}
        return dict(zip(self.spaces, features.split(list(self.spaces.values()), dim=1), strict=True))

    def _recalls(
        self, image_features: Tensor, text_features: Tensor, matches: Matches, ranks: tuple[Tensor, Tensor]
    ) -> dict[str, float]:
        """Recall in one space, by protocol where there are any; `ranks` are those among all texts."""
        if self.protocols is None:
            return recalls(*ranks)
        by_protocol = {"karpathy5": recalls(*ranks)}
        if "paper" in self.protocols:
            first = matches.first_texts()
            by_protocol["paper"] = recalls(
                *retrieval_ranks(image_features, text_features[first], matches.of_texts(first))
            )
        return {
            f"{protocol}/{name}": value for protocol in self.protocols for name, value in by_protocol[protocol].items()
        }

    def _median_ranks(
        self, image_features: Tensor, text_features: Tensor, matches: Matches, sample_index: Tensor
    ) -> dict[str, float]:
        """Median ranks in one space, if they are asked for."""
        if self.median_rank_fold is None:
            return {}
        order = sample_index.argsort(stable=True)  # however the processes shared the images
        matches = replace(matches, image_id=matches.image_id[order])
        return average_median_ranks(image_features[order], text_features, matches, self.median_rank_fold)

    def _match(self, scorer: PairScorer, result: RetrievalResult) -> tuple[Tensor, Tensor]:
        """Matching scores of the candidates of the images and of the texts."""
        return match_candidates(
            scorer,
            result.near_texts,
            result.near_images,
            self._tokens,
            result.input_ids,
            result.attention_mask,
            self.rerank.rows,
            self.rerank.memory_gib * 2**30,
        )

    def _rerank(
        self,
        result: RetrievalResult,
        scores: tuple[Tensor, Tensor],
        ranks: tuple[Tensor, Tensor] | None,
        temperature: float,
    ) -> None:
        """Put the candidates into the order of their matching scores, and add recall, of which `ranks` is that before.

        Args:
            result: is changed in place.
            scores: of its candidates, [I, k] and [T, k].
            ranks: long [I] and [T], before; None where nobody said which texts belong to which images.
            temperature: of the contrastive logits.
        """
        near = result.near_texts, result.near_images
        weight = {"itm": 0.0, "itm+itc": 1.0, "itm+itc_logits": 1.0 / temperature}[self.rerank.score]
        result.non_finite_scores = sum(int((~score.isfinite()).sum()) for score in scores)
        # Zero times minus infinity is no number, so what is last by contrast stays last whatever the weight.
        orders = [non_finite_last(score + weight * found.similarity) for found, score in zip(near, scores, strict=True)]
        if result.matches is not None and ranks is not None:
            images, texts = (torch.arange(len(candidates.index))[:, None] for candidates in near)
            match = (
                result.matches.pairs(images, result.near_texts.index),
                result.matches.pairs(result.near_images.index, texts),
            )
            others = len(texts), len(images)
            new_ranks = (reranked_ranks(*row) for row in zip(orders, match, ranks, others, strict=True))
            result.recalls |= {f"rerank_{name}": value for name, value in recalls(*new_ranks).items()}
        result.near_texts, result.near_images = (
            candidates.reordered(*new) for candidates, *new in zip(near, scores, orders, strict=True)
        )


def _gathered(batches: Sequence[tuple[Tensor, ...]], width: int, columns: int) -> list[Tensor]:
    """Join the batches of this process, then of all processes; the first column holds features, the others ids."""
    if batches:
        own = [torch.cat(column) for column in zip(*batches, strict=True)]
    else:
        own = [torch.zeros(0, width)] + [torch.zeros(0, dtype=torch.long)] * (columns - 1)
    return [gather_uneven(column) for column in own]


def _gathered_ids(batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Token ids and masks of all processes, padded to the longest text of all."""
    longest = int(gather_uneven(torch.tensor([max((ids.shape[1] for ids, _ in batches), default=0)])).max())
    padded = [
        torch.cat(
            [torch.nn.functional.pad(batch[column], (0, longest - batch[column].shape[1])) for batch in batches]
            or [torch.zeros(0, longest, dtype=torch.long)]
        )
        for column in (0, 1)
    ]
    return gather_uneven(padded[0]), gather_uneven(padded[1])


class RetrievalModule(DataSizesModule, CheckpointModule):
    """A LightningModule with the hooks of retrieval evaluation and prediction.

    A subclass sets `self.evaluation` and supplies `encode_images` and `encode_texts`; one with a matching head also
    supplies `text_states` and `match_scores` (see `PairScorer`) and says when it re-ranks.

    `test` and `validation` take images with their captions; `predict` takes images, texts, or both, in any number
    of loaders, and leaves the result in `self.evaluation.result`.
    """

    evaluation: RetrievalEvaluation

    def encode_images(self, image: Tensor) -> tuple[Tensor, Tensor | None]:
        """Unit-length features [B, E] of images [B, 3, H, W], and their tokens [B, N, V] if it re-ranks.

        Where the evaluation has several spaces, those of each have unit length and stand side by side; texts alike.
        """
        raise NotImplementedError

    def encode_texts(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Unit-length features [B, E] of texts, ids and mask [B, L]."""
        raise NotImplementedError

    def ranked_images(self, image: Tensor) -> tuple[Tensor, Tensor | None]:
        """What is ranked, as of `encode_images`; of several spaces the features stand side by side."""
        return self.encode_images(image)

    def ranked_texts(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """What is ranked, as of `encode_texts`; of several spaces the features stand side by side."""
        return self.encode_texts(input_ids, attention_mask)

    def reranks(self, stage: str) -> bool:
        """Whether candidates are re-ranked in a stage ("validate", "test" or "predict")."""
        return False

    def contrastive_temperature(self) -> float:
        """What cosines are divided by in the contrastive loss; every process asks, because it may be sharded."""
        return 1.0

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return unit-length features of the images [B, E] and the texts [T, E] of a batch."""
        return self.encode_images(batch["image"])[0], self.encode_texts(batch["input_ids"], batch["attention_mask"])

    def on_validation_epoch_start(self) -> None:
        """Start a new evaluation."""
        self.evaluation.reset()

    def on_test_epoch_start(self) -> None:
        """Start a new evaluation."""
        self.evaluation.reset()

    def on_predict_epoch_start(self) -> None:
        """Start a new evaluation."""
        self.evaluation.reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Encode images and captions for retrieval."""
        self._collect(batch, "validate")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Encode images and captions for retrieval."""
        self._collect(batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Encode the images and the texts of a batch, and return the features with the ids that came with them."""
        ids = ("image_id", "sample_index", "text_image_id", "text_index")
        return {name: batch[name] for name in ids if name in batch} | self._collect(batch, "predict")

    def on_validation_epoch_end(self) -> None:
        """Log retrieval recall in percent."""
        self._log_recalls("val", "validate")

    def on_test_epoch_end(self) -> None:
        """Log retrieval recall in percent."""
        self._log_recalls("test", "test")

    def on_predict_epoch_end(self) -> None:
        """Rank the images for every text and the texts for every image."""
        self._compute("predict")

    def _collect(self, batch: Batch, stage: str) -> dict[str, Tensor]:
        features = {}
        if "image" in batch:
            features["image_features"], tokens = self.ranked_images(batch["image"])
            kept = _as_computed(tokens) if tokens is not None and self.reranks(stage) else None
            self.evaluation.add_images(features["image_features"], batch["image_id"], batch["sample_index"], kept)
        if "input_ids" in batch:
            features["text_features"] = self.ranked_texts(batch["input_ids"], batch["attention_mask"])
            ids = (batch.get(name) for name in ("text_image_id", "text_id", "text_index"))
            self.evaluation.add_texts(features["text_features"], batch["input_ids"], batch["attention_mask"], *ids)
        return features

    def _compute(self, stage: str) -> RetrievalResult:
        scorer: Any = self if self.reranks(stage) else None
        # Lightning has left the precision's context by now, in which the towers ran.
        result = self.evaluation.compute(
            scorer, self.trainer.precision_plugin.forward_context, self.contrastive_temperature()
        )
        self.evaluation.reset()
        result.warn()
        return result

    def _log_recalls(self, prefix: str, stage: str) -> None:
        _log_recalls(self, self._compute(stage), prefix)


def _log_recalls(module: LightningModule, result: RetrievalResult, prefix: str) -> None:
    found = result.recalls
    if not found:
        raise RuntimeError("Retrieval recall was asked for, but no image with a caption was evaluated.")
    if "rerank_recall_mean" in found and module.trainer.state.fn != "fit":
        _compare_orders(found["recall_mean"], found["rerank_recall_mean"])
    for name, value in (found | result.non_finite).items():
        log_global(module, {f"{prefix}/{name}": value}, f"{prefix}/{name}" if name.endswith("recall_mean") else None)


def _compare_orders(plain: float, reranked: float) -> None:
    """Say which order of the candidates found more, in percent of mean recall."""
    advice = (
        "the matching head's order is the better one"
        if reranked > plain
        else "the order by contrast alone is no worse: the matching head is not trained well enough to help, and "
        "model.rerank.k 0 leaves it out"
    )
    rank_zero_info(f"Mean recall is {plain:.1f} by contrast alone and {reranked:.1f} after re-ranking: {advice}.")


def _as_computed(tokens: Tensor) -> Tensor:
    """Tokens in the precision in which a linear layer reads them: half the memory under autocast, and no less exact."""
    device = tokens.device.type
    return tokens.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tokens
