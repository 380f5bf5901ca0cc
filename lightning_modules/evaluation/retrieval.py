"""Retrieval evaluation and prediction of methods with a common embedding space of images and texts."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from ...callbacks.modules import on_any_rows
from ...common.errors import UserError
from ...common.log import log_global
from ...metrics.retrieval import RECALLS, Matches, nearest_candidates, retrieval_ranks
from .protocol import PREFIXES, Batch, Stage, Summary
from .ranking import (
    Protocol,
    Ranks,
    fold_median_ranks,
    protocol_chance,
    protocol_recalls,
    rerank_candidates,
    with_prefix,
)
from .reranking import (
    NO_RERANKING,
    Orders,
    PairScorer,
    RerankSettings,
    TokenStore,
    match_candidates,
)
from .retrieval_result import UNKNOWN, CollectedFeatures, Gathered, HardPairs, RetrievalResult

EQUAL = "equal_texts_"
"""Prefix of the results in which an image also matches texts that are equal to one of its captions."""


class RetrievalEvaluation:
    """Collect the images and texts of an evaluation over all processes, rank them, and compute recall.

    Recall is computed at 1, 5 and 10 in both directions, in percent, with the mean of the six; re-ranking adds the same
    with the prefix `rerank_`, and `rerank_pair_accuracy`: how often the matching head ranks a match above the nearest
    wrong candidate, in percent. Validation and test process images with their captions; prediction processes images,
    texts, or both, from any number of loaders. The result is in `result`. `orders` has the mean recalls of the last
    evaluation that re-ranked, which a checkpoint keeps; prediction uses the better order.

    A module supplies `encode_images`, from images [B, 3, H, W] to unit-length features [B, E] and their tokens
    [B, N, V] (None without re-ranking), and `encode_texts`, from ids and mask [B, L] to such features [B, E]. A
    module with several spaces supplies `ranked_images` and `ranked_texts` instead, which return the concatenated
    features of all spaces. A module that re-ranks is a `PairScorer` and supplies `contrastive_temperature`, the
    temperature of its contrastive loss.

    Args:
        match_equal_texts: whether an image also matches texts that are equal to one of its captions, after the cleaning
            of captions (web and shop data repeat titles); if false, only the captions of the same image match, as in
            the literature. None: results with plain names are those of false; where a text is equal to one of another
            image, results of true are beside them, with the prefix `equal_texts_`.
        rerank: settings of re-ranking.
        protocols: texts to rank, with results named `<protocol>/<recall>`: "karpathy5" ranks all texts, as is usual on
            Karpathy's splits with five captions per image; "paper" the first text of each image, as MM-LG and CLIP-KD.
            The protocols are not comparable. None: all texts, with plain names.
        spaces: width of each feature space by name, in the order of concatenation. All results are computed in each
            space, named `<space>/...`. None: one space.
        prediction_space: space of the features and candidates in the result; by default the first one.
        median_rank_fold: number of images of a fold for `average_median_ranks`, computed for all texts in every
            protocol. None: not computed.

    Raises:
        UserError: If `rerank.k` is too small or is given with protocols or spaces, protocols or spaces are empty,
            `prediction_space` is unknown, or a fold is empty.
    """

    def __init__(
        self,
        match_equal_texts: bool | None = None,
        rerank: RerankSettings = NO_RERANKING,
        protocols: Sequence[Protocol] | None = None,
        spaces: Mapping[str, int] | None = None,
        prediction_space: str | None = None,
        median_rank_fold: int | None = None,
    ) -> None:
        if 0 < rerank.k < max(RECALLS):
            raise UserError(
                f"Expected a rerank.k of at least {max(RECALLS)}, so that recall at {max(RECALLS)} uses one "
                f"order, got {rerank.k}: raise it, or set 0 to disable re-ranking."
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
        self.summary: Summary | None = None
        self.orders: Orders | None = None
        self.start()

    def start(self) -> None:
        """Clear the collected features; the last result is kept."""
        self._collected = CollectedFeatures()
        self._tokens = TokenStore(self.rerank.memory_gib * 2**30)

    def step(self, module: Any, batch: Batch, stage: Stage) -> None:
        """Encode images and captions."""
        self._encode(module, batch, stage)

    def predict(self, module: Any, batch: Batch) -> Batch:
        """Encode the images and the texts of a batch, and return the features with their ids."""
        ids = ("image_id", "sample_index", "text_image_id", "text_index")
        return {name: batch[name] for name in ids if name in batch} | self._encode(module, batch, "predict")

    def finish(self, module: Any, stage: Stage) -> None:
        """Rank the collected features; log recall in percent in a validation or a test."""
        scorer = module if self.reranks(stage) else None
        temperature = 1.0 if scorer is None else module.contrastive_temperature()
        # Lightning has left the context of the precision, in which the towers ran.
        result = self.compute(scorer, module.trainer.precision_plugin.forward_context, temperature)
        self.start()
        result.warn()
        if stage == "predict":
            if self.rerank.k and result.near_images.index.numel():
                rank_zero_info(self.order())
            return
        _log_recalls(module, result, PREFIXES[stage])
        self.summary = self._summary(result)
        if "rerank_recall_mean" in result.recalls and not module.trainer.sanity_checking:
            self.orders = _orders(result)

    def order(self) -> str:
        """Return a sentence about the order in which prediction ranks, for a module with a matching head."""
        which = "of the matching head" if self.reranks("predict") else "by contrast"
        if self.rerank.when == "never" or not self.rerank.k:
            return f"Matches are in the order {which}, as model.rerank says."
        if self.orders is not None:
            return f"Matches are in the order {which}, the better one: in the last evaluation {self.orders}."
        return (
            f"Matches are in the order {which}: no evaluation has compared it with the other one, which "
            f"`--model.rerank.when {'never' if self.reranks('predict') else 'always'}` uses."
        )

    def reranks(self, stage: Stage) -> bool:
        """Return whether candidates are re-ranked in a stage; in prediction if the last evaluation says so."""
        if stage != "predict" or not self.rerank.k or self.rerank.when == "never":
            return self.rerank.applies(stage)
        return self.rerank.when == "always" if self.orders is None else self.orders.reranks

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

        Unknown values are None for all texts of an evaluation.
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
        """Rank all added images and texts. Every process must call this, and gets the same result.

        Args:
            scorer: reorders the `rerank.k` best candidates of each row; needs the tokens of all images.
            precision: context for the scorer, such as autocast. Similarities are in float32.
            temperature: temperature of the contrastive logits.
        """
        all_of = self._collected.gather(None if self.spaces is None else sum(self.spaces.values()))
        not_empty = len(all_of.image_features) > 0 and len(all_of.text_features) > 0
        matches, equal = self._matches(all_of) if not_empty else (None, None)

        images = self._by_space(all_of.image_features)
        texts = self._by_space(all_of.text_features)
        ranks: dict[str, dict[str, tuple[Matches, Ranks]]] = {name: {} for name in images}
        results: dict[str, float] = {}
        for name in images:
            for prefix, right in (("", matches), (EQUAL, equal)):
                if right is None:
                    continue
                space = images[name], texts[name], right
                ranks[name][prefix] = right, retrieval_ranks(*space)
                measured = protocol_recalls(*space, ranks[name][prefix][1], self.protocols)
                if right is matches:
                    measured |= fold_median_ranks(*space, all_of.sample_index, self.median_rank_fold)
                measured = with_prefix(prefix, measured)
                results |= {f"{name}/{key}" if name else key: value for key, value in measured.items()}

        predicted = self.prediction_space or next(iter(images))
        # A copy of a part, because a view would keep the features of the other spaces in memory.
        features = images[predicted].contiguous(), texts[predicted].contiguous()
        text_names = torch.where(all_of.text_index < 0, all_of.text_image_id, all_of.text_index)
        result = RetrievalResult(
            results,
            *features,
            all_of.sample_index,
            all_of.input_ids,
            all_of.attention_mask,
            all_of.text_index,
            *nearest_candidates(*features, self.rerank.k or max(RECALLS)),
            matches,
            all_of.sample_index[~_finite(all_of.image_features)],
            text_names[~_finite(all_of.text_features)],
            equal_matches=equal,
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
            rerank_candidates(result, scores, ranks[predicted], self.rerank.score, temperature)
        self.result = result
        return result

    def _matches(self, gathered: Gathered) -> tuple[Matches | None, Matches | None]:
        """Return the matches, None if unknown, and those by equal texts to measure beside them, if there are any."""
        if bool((gathered.text_image_id == UNKNOWN).any()):
            return None, None
        matches = Matches(gathered.image_id, gathered.text_image_id)
        if self.match_equal_texts is False or bool((gathered.text_id == UNKNOWN).any()):
            return matches, None
        equal = Matches(gathered.image_id, gathered.text_image_id, gathered.text_id)
        if self.match_equal_texts:
            return equal, None
        return matches, equal if equal.repeated_texts else None

    def _summary(self, result: RetrievalResult) -> Summary:
        assert result.matches is not None  # there is a recall
        one = protocol_chance(result.matches, self.protocols)
        if result.equal_matches is not None:
            one |= with_prefix(EQUAL, protocol_chance(result.equal_matches, self.protocols))
        chance = {
            f"{space}/{name}" if space else name: of for space in self.spaces or ("",) for name, of in one.items()
        }
        chance |= {f"rerank_{name}": of for name, of in chance.items()}
        chance |= {f"rerank_{prefix}pair_accuracy": 50.0 for prefix in ("", EQUAL)}
        return Summary({"images": len(result.image_features), "texts": len(result.text_features)}, chance)

    def _encode(self, module: Any, batch: Batch, stage: Stage) -> dict[str, Tensor]:
        """Encode the images and texts of a batch, and collect the features."""
        features: dict[str, Tensor] = {}
        if "image" in batch or "image_features" in batch:  # the latter are from a store
            images = batch["image_features"] if "image_features" in batch else batch["image"]
            encode_images = module.encode_images if self.spaces is None else module.ranked_images
            features["image_features"], tokens = on_any_rows(encode_images, images)
            kept = _as_computed(tokens) if tokens is not None and self.reranks(stage) else None
            self.add_images(features["image_features"], batch["image_id"], batch["sample_index"], kept)
        if "input_ids" in batch:
            encode_texts = module.encode_texts if self.spaces is None else module.ranked_texts
            texts = batch["text_features"] if "text_features" in batch else batch["input_ids"]
            features["text_features"] = on_any_rows(encode_texts, texts, batch["attention_mask"])
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
        """Return views of the features [N, E] of each space; a single space has no name."""
        if self.spaces is None:
            return {"": features}
        return dict(zip(self.spaces, features.split(list(self.spaces.values()), dim=1), strict=True))


def _finite(features: Tensor) -> Tensor:
    """Return which rows of features [N, E] are finite, boolean [N], without a tensor of their size."""
    if not features.shape[1]:
        return torch.ones(len(features), dtype=torch.bool)
    least, largest = features.aminmax(dim=1)
    return least.isfinite() & largest.isfinite()


def _log_recalls(module: LightningModule, result: RetrievalResult, prefix: str) -> None:
    if not result.recalls:
        raise UserError("Expected an image with a caption to evaluate, got none: check the evaluation data.")
    if "rerank_recall_mean" in result.recalls and module.trainer.state.fn != "fit":
        orders = _orders(result)
        at_chance = result.hard_pairs is not None and result.hard_pairs.at_chance
        if orders.reranks and not at_chance:
            advice = "re-ranking improves it"
        else:
            effect = "shows no gain" if orders.reranks else "does not improve it"
            advice = (
                f"re-ranking {effect}, because the matching head is not trained well enough"
                f"{_matching(result.hard_pairs)}; set model.rerank.k 0 to disable it"
            )
        rank_zero_info(
            f"Mean recall is {orders.contrast:.1f} by contrast alone and {orders.reranked:.1f} after re-ranking: "
            f"{advice}."
        )
    if result.equal_matches is not None and module.trainer.state.fn != "fit":
        rank_zero_info(
            f"{result.equal_matches.repeated_texts} of {len(result.text_features)} texts equal a text of another "
            f"image: an error in the results, and a match in those named {EQUAL}*."
        )
    for name, value in (result.recalls | result.non_finite).items():
        shown = f"{prefix}/{name}"
        log_global(module, {shown: value}, shown if name.endswith("recall_mean") and EQUAL not in name else None)


def _matching(pairs: HardPairs | None) -> str:
    """Return a clause about the accuracy of the matching head."""
    if pairs is None:
        return ""
    chance = ", no better than chance" if pairs.at_chance else ""
    return (
        f": it ranks a match above the nearest wrong candidate in {pairs.head:.1f}% of {pairs.pairs} cases{chance}, "
        f"the contrast in {pairs.contrast:.1f}%"
    )


def _orders(result: RetrievalResult) -> Orders:
    return Orders(result.recalls["recall_mean"], result.recalls["rerank_recall_mean"])


def _as_computed(tokens: Tensor) -> Tensor:
    """Cast tokens to the precision of a linear layer's input: half the memory under autocast, without loss."""
    device = tokens.device.type
    return tokens.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tokens
