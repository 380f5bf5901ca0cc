"""Answers to an evaluation batch: from the data's list, or written."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ....callbacks.distributed.collectives import all_reduce_max
from ....common.errors import UserError
from ...evaluation.protocol import Batch
from .answers import generate_answers, rank_answers

if TYPE_CHECKING:
    from .vqa import VQAModule


def answered(module: "VQAModule", batch: Batch, data: Any | None) -> dict[str, Any]:
    """Answer the questions of a batch; every process calls this.

    Args:
        module: the method.
        batch: `image` [I, 3, S, S], `input_ids` and `attention_mask` [Q, Lq], and `image_index` [Q].
        data: datamodule with the members of `ListsAnswers`.

    Returns:
        `top_answers`, for each question its best answers, best first; `top_probabilities` [Q, n], of the answers among
        the candidates, or for written answers the geometric mean of the tokens' probabilities; and `answer_ids`
        [Q, L] of the best, with [CLS] and [SEP].

    Raises:
        UserError: If the data is of no questions.
    """
    settings, text = module.answers, module.text
    if data is None or not hasattr(data, "encoded_answers"):
        raise UserError(
            f"Expected a datamodule of questions, which has a list of answers or decodes what is written, got "
            f"{type(data).__name__}: use VQADataModule."
        )
    count, (image, ids, mask, index) = len(batch["input_ids"]), _in_all_processes(batch)
    questions = module(image, ids, mask, index)
    if settings.how == "generate" or not data.answers:
        written, score = generate_answers(
            module.student, questions, text.cls_token_id, text.sep_token_id, settings.beams, settings.max_tokens
        )
        start = torch.full_like(written[:, :1], text.cls_token_id)
        texts = [[answer] for answer in data.decode_answers(written[:count].cpu())]
        whole = pad(torch.cat([start, written], 1), (0, 1), value=text.sep_token_id)
        ends = (whole == text.sep_token_id).cumsum(1) > 1
        answer_ids = whole.masked_fill(ends, text.pad_token_id)
        return {
            "top_answers": texts,
            "top_probabilities": score[:count, None].exp(),
            "answer_ids": answer_ids[:count],
        }
    listed = {name: tensor.to(ids.device) for name, tensor in data.encoded_answers.items()}
    ranked = rank_answers(
        module.student,
        questions,
        listed["answer_ids"],
        listed["answer_mask"],
        settings.candidates,
        settings.block,
        settings.first_token_twice,
    )
    best = ranked.place[:count, : settings.top]
    return {
        "top_answers": [[data.answers[place] for place in row] for row in best.tolist()],
        "top_probabilities": ranked.probability[:count, : settings.top],
        "answer_ids": listed["answer_ids"][best[:, 0]],
    }


def _in_all_processes(batch: Batch) -> tuple[Tensor, ...]:
    """Return images, ids, masks and image indices with as many questions, and an image, in every process.

    Sharded processes run the same layers, and the layers cannot reshape an empty batch.
    """
    image, ids, mask, index = (batch[name] for name in ("image", "input_ids", "attention_mask", "image_index"))
    rows = max(int(all_reduce_max(torch.tensor(len(ids)))), 1) - len(ids)
    image = image if len(image) else image.new_zeros(1, *image.shape[1:])
    return image, pad(ids, (0, 0, 0, rows)), pad(mask, (0, 0, 0, rows), value=1), pad(index, (0, rows))
