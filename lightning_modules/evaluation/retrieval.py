"""Retrieval evaluation and prediction of methods that put images and texts into one space."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from ...common.errors import UserError
from ...common.log import log_global
from ...metrics.retrieval import RECALLS, Matches, nearest_candidates, retrieval_ranks
from .collected import CollectedFeatures
from .protocol import PREFIXES, Batch, Stage
from .ranking import Protocol, Ranks, fold_median_ranks, protocol_recalls, rerank_candidates
from .reranking import NO_RERANKING, PairScorer, RerankSettings, TokenStore, match_candidates
from .retrieval_result import UNKNOWN, RetrievalResult


class RetrievalEvaluation:
    """Collects the images and texts of an evaluation over all processes, ranks them, and computes recall.

    Recall is at 1, 5 and 10 in both directions, in percent; after re-ranking there are six more, and their mean, with
    the prefix `rerank_`. Validation and test take images with their captions; prediction takes images, texts, or both,
    in any number of loaders. The result is in `result`.

    A module supplies `encode_images`, from images [B, 3, H, W] to unit-length features [B, E] and their tokens
    [B, N, V] (None if it does not re-rank), and `encode_texts`, from ids and mask [B, L] to such features [B, E]. With
    several spaces, it supplies `ranked_images` and `ranked_texts` instead, in whose results the features of all spaces
    are concatenated. One that re-ranks is a `PairScorer`, and supplies `contrastive_temperature`, what cosines are
    divided by in its contrastive loss.

    Args:
        match_equal_texts: whether an image also matches the texts that equal one of its own captions (web and shop
            data repeat titles); else only the captions of the same image match.
        rerank: when and how a matching head puts the best candidates of each row into a new order.
        protocols: which texts are ranked, each result named `<protocol>/<recall>`: "karpathy5" all, as is usual on
            Karpathy's splits of five captions an image; "paper" the first one of each image, as MM-LG and CLIP-KD do
            it. They are not comparable. None: all, and the names are plain.
        spaces: width of each feature space, by name, in the order of concatenation. Everything is measured in each
            space, named `<space>/...`. None: there is one space.
        prediction_space: whose features and candidates the result holds; by default the first one.
        median_rank_fold: images of a fold for `average_median_ranks`, which are then measured too, of all texts in
            every protocol.

    Raises:
        UserError: if `rerank.k` is too small or is given with protocols or spaces, one of these is empty, the space of
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
        if 0 < rerank.k < max(RECALLS):
            raise UserError(
                f"Expected a rerank.k of at least {max(RECALLS)}, so that recall at {max(RECALLS)} does not mix two "
                f"orders, got {rerank.k}: raise it, or set 0 to leave re-ranking out."
            )
        if protocols is not None and rerank.k:
            raise UserError(f"Expected no protocols with re-ranking, got rerank.k {rerank.k}: leave one of them out.")
        if protocols is not None and not protocols:
            raise UserError("Expected karpathy5, paper or both as protocols, got none: name what to measure.")
        if spaces is not None and rerank.k:
            raise UserError(f"Expected one space with re-ranking, got rerank.k {rerank.k}: leave spaces out.")
        if spaces is not None and not spaces:
            raise UserError("Expected the width of each space by its name, got none: name them, or set None.")
        if prediction_space is not None and prediction_space not in (spaces or ()):
            raise UserError(
                f"Expected a prediction_space among {list(spaces or ())}, got {prediction_space!r}: take one of them."
            )
        if median_rank_fold is not None and median_rank_fold < 1:
            raise UserError(f"Expected a median_rank_fold of at least 1, got {median_rank_fold}: raise it.")
        self.match_equal_texts = match_equal_texts
        self.rerank = rerank
        self.protocols = protocols
        self.spaces = spaces
        self.prediction_space = prediction_space
        self.median_rank_fold = median_rank_fold
        self.result: RetrievalResult | None = None
        self.start()

    def start(self) -> None:
        """Forget what was collected; the last result stays."""
        self._collected = CollectedFeatures()
        self._tokens = TokenStore(self.rerank.memory_gib * 2**30)

    def step(self, module: Any, batch: Batch, stage: Stage) -> None:
        """Encode images and captions."""
        self._encode(module, batch, stage)

    def predict(self, module: Any, batch: Batch) -> Batch:
        """Encode the images and the texts of a batch, and return the features with the ids that came with them."""
        ids = ("image_id", "sample_index", "text_image_id", "text_index")
        return {name: batch[name] for name in ids if name in batch} | self._encode(module, batch, "predict")

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

    def add_images(
        self, features: Tensor, image_id: Tensor, sample_index: Tensor, tokens: Tensor | None = None
    ) -> None:
        """Add images: features [B, E], ids and positions long [B], tokens [B, N, V] for re-ranking."""
        self._check_width(features)
        self._collected.add_images(features, image_id, sample_index)
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
        self._collected.add_texts(features, input_ids, attention_mask, image_id, text_id, text_index)

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
        all_of = self._collected.gather(None if self.spaces is None else sum(self.spaces.values()))
        not_empty = len(all_of.image_features) > 0 and len(all_of.text_features) > 0
        matches = None
        if not_empty and bool((all_of.text_image_id != UNKNOWN).all()):
            text_id = all_of.text_id if self.match_equal_texts else None
            matches = Matches(all_of.image_id, all_of.text_image_id, text_id)

        images, texts = self._by_space(all_of.image_features), self._by_space(all_of.text_features)
        ranks: dict[str, Ranks] = {}
        found: dict[str, float] = {}
        if matches is not None:
            for name in images:
                space = images[name], texts[name], matches
                ranks[name] = retrieval_ranks(*space)
                measured = protocol_recalls(*space, ranks[name], self.protocols)
                measured |= fold_median_ranks(*space, all_of.sample_index, self.median_rank_fold)
                found |= {f"{name}/{key}" if name else key: value for key, value in measured.items()}

        predicted = self.prediction_space or next(iter(images))
        # A copy where it is a part, or the features of the other spaces would stay in memory with the result.
        features = images[predicted].contiguous(), texts[predicted].contiguous()
        text_names = torch.where(all_of.text_index < 0, all_of.text_image_id, all_of.text_index)
        result = RetrievalResult(
            found,
            *features,
            all_of.sample_index,
            all_of.input_ids,
            all_of.attention_mask,
            all_of.text_index,
            *nearest_candidates(*features, self.rerank.k or max(RECALLS)),
            matches,
            all_of.sample_index[~all_of.image_features.isfinite().all(1)],
            text_names[~all_of.text_features.isfinite().all(1)],
        )
        if scorer is not None and not_empty:
            with precision():
                scores = match_candidates(
                    scorer,
                    result.near_texts,
                    result.near_images,
                    self._tokens,
                    result.input_ids,
                    result.attention_mask,
                    self.rerank.rows,
                    self.rerank.memory_gib * 2**30,
                )
            rerank_candidates(result, scores, ranks.get(predicted), self.rerank.score, temperature)
        self.result = result
        return result

    def _encode(self, module: Any, batch: Batch, stage: Stage) -> dict[str, Tensor]:
        """Encode what a batch holds and keep it."""
        features: dict[str, Tensor] = {}
        if "image" in batch:
            encode_images = module.encode_images if self.spaces is None else module.ranked_images
            features["image_features"], tokens = encode_images(batch["image"])
            kept = _as_computed(tokens) if tokens is not None and self.rerank.applies(stage) else None
            self.add_images(features["image_features"], batch["image_id"], batch["sample_index"], kept)
        if "input_ids" in batch:
            encode_texts = module.encode_texts if self.spaces is None else module.ranked_texts
            features["text_features"] = encode_texts(batch["input_ids"], batch["attention_mask"])
            ids = (batch.get(name) for name in ("text_image_id", "text_id", "text_index"))
            self.add_texts(features["text_features"], batch["input_ids"], batch["attention_mask"], *ids)
        return features

    def _check_width(self, features: Tensor) -> None:
        if self.spaces is not None and features.shape[1] != sum(self.spaces.values()):
            raise ValueError(
                f"Expected features of width {sum(self.spaces.values())}, the sum over the spaces "
                f"{dict(self.spaces)}, got {features.shape[1]}: concatenate the features of all spaces."
            )

    def _by_space(self, features: Tensor) -> dict[str, Tensor]:
        """Views of the features [N, E] of each space; the only one has no name."""
        if self.spaces is None:
            return {"": features}
        return dict(zip(self.spaces, features.split(list(self.spaces.values()), dim=1), strict=True))


def _log_recalls(module: LightningModule, result: RetrievalResult, prefix: str) -> None:
    if not result.recalls:
        raise UserError("Expected an image with a caption to evaluate, got none: check the evaluation data.")
    if "rerank_recall_mean" in result.recalls and module.trainer.state.fn != "fit":
        _compare_orders(result.recalls["recall_mean"], result.recalls["rerank_recall_mean"])
    for name, value in (result.recalls | result.non_finite).items():
        shown = f"{prefix}/{name}"
        log_global(module, {shown: value}, shown if name.endswith("recall_mean") else None)


def _compare_orders(plain: float, reranked: float) -> None:
    """Log which order of the candidates has the higher mean recall."""
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
