"""Image-text retrieval recall, shared by all methods."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..callbacks.distributed import gather_uneven

RECALLS = (1, 5, 10)
# Pictures whose similarities to all texts are held at a time: 1024 rows by 25,000 texts are 100 MB.
_CHUNK = 1024


def retrieval_ranks(
    image_features: Tensor,
    text_features: Tensor,
    image_id: Tensor,
    text_image_id: Tensor,
    text_id: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rank of the best match of every picture among the texts, and of every text among the pictures.

    A candidate that is no match and scores as high as the best match ranks before it, so a model that gives
    everything the same feature gets no recall.

    Args:
        image_features: [I, E].
        text_features: [T, E].
        image_id: long [I].
        text_image_id: long [T], id of the picture that the text belongs to.
        text_id: long [T], equal for equal texts. If given, a picture also matches the texts that equal one of its own.

    Returns:
        long [I] and long [T], ranks from 0. A row without any match gets the number of candidates.
    """
    images, texts = len(image_features), len(text_features)
    groups = text_id.unique(return_inverse=True)[1] if text_id is not None else None

    def block(start: int) -> tuple[Tensor, Tensor]:
        rows = slice(start, start + _CHUNK)
        match = image_id[rows, None] == text_image_id
        if groups is not None:
            own_groups = torch.zeros(len(match), texts).index_add_(1, groups, match.float()) > 0
            match = own_groups[:, groups]
        return image_features[rows] @ text_features.T, match

    starts = range(0, images, _CHUNK)
    image_ranks = torch.full((images,), texts)
    best = torch.full((texts,), -torch.inf, dtype=image_features.dtype)
    for start in starts:
        scores, match = block(start)
        own_best = scores.masked_fill(~match, -torch.inf).amax(1, keepdim=True)
        image_ranks[start : start + _CHUNK] = ((scores >= own_best) & ~match).sum(1)
        best = torch.maximum(best, scores.masked_fill(~match, -torch.inf).amax(0))
    text_ranks = torch.zeros(texts, dtype=torch.long)
    for start in starts:
        scores, match = block(start)
        text_ranks += ((scores >= best) & ~match).sum(0)
    return image_ranks, text_ranks


class RetrievalRecall:
    """Recall at 1, 5 and 10 in both directions, in percent, over all processes.

    Features are kept in main memory, so the size of an evaluation set is not bounded by a device's memory.

    Args:
        match_equal_texts: whether a picture also matches the texts that equal one of its own captions (web and shop
            data repeat titles); else only the captions of the same picture match.
    """

    def __init__(self, match_equal_texts: bool = False) -> None:
        self.match_equal_texts = match_equal_texts
        self.reset()

    def reset(self) -> None:
        """Forget what was added."""
        self._image: list[tuple[Tensor, Tensor]] = []
        self._text: list[tuple[Tensor, Tensor, Tensor]] = []

    def update(
        self, image_features: Tensor, text_features: Tensor, image_id: Tensor, text_image_id: Tensor, text_id: Tensor
    ) -> None:
        """Add the pictures [B, E] and the texts [T, E] of one batch; ids as in `retrieval_ranks`."""
        self._image.append((image_features.detach().float().cpu(), image_id.cpu()))
        self._text.append((text_features.detach().float().cpu(), text_image_id.cpu(), text_id.cpu()))

    def compute(self) -> dict[str, float]:
        """Return the six recalls and their mean, in percent. Every process must call it, and gets the same.

        Raises:
            RuntimeError: if no process has added anything.
        """
        # A process may have got no batch at all, and then knows the width from the others.
        width = int(gather_uneven(torch.tensor([self._image[0][0].shape[1] if self._image else 0])).max())
        image = _concatenate(self._image, width, columns=2)
        text = _concatenate(self._text, width, columns=3)
        if not len(image[0]) or not len(text[0]):
            raise RuntimeError("Retrieval recall was asked for, but no picture with a caption was evaluated.")
        image_ranks, text_ranks = retrieval_ranks(
            image[0], text[0], image[1], text[1], text[2] if self.match_equal_texts else None
        )
        result = {}
        for direction, ranks in (("text_to_image", text_ranks), ("image_to_text", image_ranks)):
            for k in RECALLS:
                result[f"{direction}_r{k}"] = 100 * (ranks < k).double().mean().item()
        result["recall_mean"] = sum(result.values()) / len(result)
        return result


def _concatenate(batches: Sequence[tuple[Tensor, ...]], width: int, columns: int) -> list[Tensor]:
    """Join the batches of this process, then of all processes; the first column has `width` features."""
    if batches:
        own = [torch.cat(column) for column in zip(*batches, strict=True)]
    else:
        own = [torch.zeros(0, width)] + [torch.zeros(0, dtype=torch.long)] * (columns - 1)
    return [gather_uneven(column) for column in own]
