"""Generated texts in a Parquet file: answers to questions about images, and captions."""

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from ...common.files import replacing
from .rows import PredictionRowsWriter, prediction_folder


class AnswerWriter(PredictionRowsWriter):
    """Write `answers.parquet` and `answers.json` after `predict`, each question once, in the order of the data.

    Columns: sample_index; image, its path, or its source and row, from the datamodule's `image_name`, or null;
    question_id; question; answer, the best; probability of the best; top_answers and top_probabilities, best first. The
    JSON file is what the challenge's server takes: `[{"question_id": ..., "answer": ...}]`; ids of digits are numbers.
    The files are written atomically.

    The module's `predict_step` returns `{"sample_index": long [Q], "question": Q texts, "question_id": Q texts,
    "answers": Q lists of n texts, "probabilities": [Q, n]}`.

    Args:
        folder: Folder of the files, by default `predictions` in the Trainer's `default_root_dir`.

    Raises:
        UserError: If `predict_step` returns something else.
    """

    returned = ("question", "question_id", "answers", "probabilities")
    empty = (torch.zeros(0, 1), None, None, None)
    file = "answers.parquet"
    content = "answers"

    @override
    def kept(self, outputs: dict[str, Any]) -> Sequence[Any]:
        answers = [text for top in outputs["answers"] for text in top]
        return outputs["probabilities"].float().cpu(), answers, outputs["question"], outputs["question_id"]

    @override
    def columns(self, gathered: Sequence[Any], order: Tensor, trainer: Trainer) -> dict[str, Any]:
        probabilities, answers, questions, numbers = gathered
        width = probabilities.shape[1]
        indices = order.tolist()
        top = [answers[index * width : (index + 1) * width] for index in indices]
        best = [row[0] for row in top]
        ids = [numbers[index] for index in indices]
        file = prediction_folder(trainer, self.folder) / "answers.json"
        with replacing(file) as staged:
            rows = [
                {"question_id": int(number) if number.isdecimal() else number, "answer": answer}
                for number, answer in zip(ids, best, strict=True)
            ]
            staged.write_text(json.dumps(rows) + "\n", encoding="utf-8")
        rank_zero_info(f"The challenge's form of the answers is in {file}.")
        return {
            "question_id": pa.array(ids, "string"),
            "question": pa.array([questions[index] for index in indices], "string"),
            "answer": pa.array(best, "string"),
            "probability": probabilities[order, 0].numpy(),
            "top_answers": pa.array(top, pa.list_(pa.string())),
            "top_probabilities": pa.array(list(probabilities[order].numpy()), pa.list_(pa.float32())),
        }


class CaptionWriter(PredictionRowsWriter):
    """Write `captions.parquet` after `predict`: sample_index, image, image_id, caption.

    `image` is the image's path, or its source and row, from the datamodule's `image_name`, or null.
    The file is written atomically.

    The module's `predict_step` returns `{"sample_index": long [B], "image_id": long [B], "caption": list of B texts}`.

    Args:
        folder: Folder of the file, by default `predictions` in the Trainer's `default_root_dir`.

    Raises:
        UserError: If `predict_step` returns something else.
    """

    returned = ("image_id", "caption")
    empty = (torch.zeros(0, dtype=torch.long), None)
    file = "captions.parquet"
    content = "captions"

    @override
    def kept(self, outputs: dict[str, Any]) -> Sequence[Any]:
        return outputs["image_id"].cpu(), outputs["caption"]

    @override
    def columns(self, gathered: Sequence[Any], order: Tensor, trainer: Trainer) -> dict[str, Any]:
        ids, captions = gathered
        texts = pa.array([captions[index] for index in order.tolist()], "string")
        return {"image_id": ids[order].numpy(), "caption": texts}
