"""Figures of the boxes that texts refer to."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from lightning.pytorch import Trainer
from typing_extensions import override

from ...common.ranges import COUNT
from .evaluation import EvaluationFigures, Split, evenly_spread, open_image
from .grid import CHOSEN, RIGHT, Panel, Row


class GroundingFigures(EvaluationFigures):
    """Draw texts with their image, and both maps with the right box in green and the chosen box in white.

    "itm" is the map of the matching head, "itc" that of the contrastive similarity; the frame of a map is green if the
    chosen box is correct. The figures are "val/grounding" and "test/grounding". The module has a method
    `grounding_maps(image, input_ids, attention_mask)` that returns maps [B, g, g] by name, and its evaluation a
    `GroundingResult`.

    Args:
        texts: Number of texts, spread evenly over the evaluation set, the same every time.
        every_n_epochs: Epochs of training between two figures of the validation.
    """

    name = "grounding"
    module_needs = "grounding_maps"
    evaluates = "grounding"
    result_needs = "chosen"

    def __init__(self, texts: Annotated[int, COUNT] = 6, every_n_epochs: int = 1) -> None:
        super().__init__(every_n_epochs)
        self.texts = texts

    @override
    def rows(self, trainer: Trainer, pl_module: Any, split: Split) -> list[Row]:
        # Every process computes the maps, since processes that share a model's weights communicate.
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        result: Any = pl_module.evaluation.result
        places = evenly_spread(len(result.sample_index), self.texts)
        index = result.sample_index[places]
        texts = [" ".join(own) for own in data.captions(split, index.tolist())]
        shown = [open_image(data, split, one) for one in index]
        plugin, device = trainer.precision_plugin, pl_module.device
        images = plugin.convert_input(torch.stack([data.eval_transform(image) for image in shown]).to(device))
        encoded = {name: tensor.to(device) for name, tensor in data.encoder()(texts).items()}
        with plugin.forward_context():
            maps = pl_module.grounding_maps(images, encoded["input_ids"], encoded["attention_mask"])
        rows = []
        for row, (place, text, image) in enumerate(zip(places, texts, shown, strict=True)):
            right = (result.right[place], RIGHT)
            panels = [Panel(image, boxes=[right])]
            for name, heat in maps.items():
                chosen, overlap = result.chosen[name][place], float(result.iou[name][place])
                boxes = [right] if chosen.isnan().any() else [right, (chosen, CHOSEN)]
                title = f"{name}  no box" if chosen.isnan().any() else f"{name}  IoU {overlap:.2f}"
                panels.append(Panel(image, title, overlap >= 0.5, heat[row], boxes))
            rows.append(Row(text, panels=panels))
        return rows
