"""Weakly supervised grounding (sections 4 and 6 of the paper): the box of an image that a text refers to.

The model is that of retrieval, fine-tuned on images with texts and without boxes. Grad-CAM gives two maps of a pair:
"itm" of the cross-attention to the image for the logit of a match, and "itc" of the image encoder's own attention for
the contrastive similarity. The candidate box with the highest score under a map is chosen.

Shapes: B pairs, L text tokens, N image tokens (CLS first), V image width, g patches along a side, K candidate boxes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from ...callbacks.distributed.collectives import gather_texts, gather_uneven
from ...common.errors import UserError
from ...common.log import log_global
from ...common.ranges import NOT_NEGATIVE, SettingsGroup
from ...metrics.grounding import NO_BOX, box_iou, box_scores, choose_box
from ..evaluation.protocol import PREFIXES, Batch, Stage, Summary
from .gradcam import cross_attention, recording, relevance, token_maps
from .network import ALBEFNetwork

MapName = Literal["itm", "itc"]
MAPS: tuple[MapName, ...] = get_args(MapName)
IOU = 0.5
"""Overlap with the right box from which on a chosen box is correct."""


@dataclass(frozen=True)
class GroundingSettings(SettingsGroup, option="grounding"):
    """Evaluation of grounding; see `GroundingEvaluation`.

    Args:
        evaluate: whether to validate, test and predict the boxes that texts refer to, instead of retrieval.
        map: the map whose accuracy is shown in the progress bar; both are evaluated.
        itm_layer: fusion layer of the "itm" map, counted from the first text layer. By default the middle one, in the
            paper's model 8 of 0 to 11 (the authors').
        itc_block: block of the image encoder of the "itc" map. By default the one after two thirds of the blocks, in
            the paper's model 8 of 0 to 11 (the authors').
    """

    evaluate: bool = False
    map: MapName = "itm"
    itm_layer: Annotated[int | None, NOT_NEGATIVE] = None
    itc_block: Annotated[int | None, NOT_NEGATIVE] = None


@torch.inference_mode(False)  # in which Lightning evaluates, and which has no gradients
def grounding_maps(
    network: ALBEFNetwork,
    itm_head: nn.Module,
    temperature: float,
    settings: GroundingSettings,
    image: Tensor,
    input_ids: Tensor,
    attention_mask: Tensor,
) -> dict[str, Tensor]:
    """Return both maps of each pair; in eval mode, without a change of any parameter's `grad`.

    Args:
        network: the student.
        itm_head: the matching head, fused [CLS] to two logits.
        temperature: of the contrastive similarities.
        settings: the layers of the maps.
        image: [B, 3, S, S].
        input_ids: long [B, L].
        attention_mask: [B, L], 1 for tokens and 0 for padding.

    Returns:
        "itm", the mean of `gradcam.token_maps` over the tokens of the text, and "itc", both [B, g, g] in float32 at
        least.

    Raises:
        UserError: If the model has no such layer or block.
    """
    if not len(image):  # a dummy row, as in `BertTrunk.encode`, because sharded networks communicate
        row = (each.new_ones(1, *each.shape[1:]) for each in (image, input_ids, attention_mask))
        maps = grounding_maps(network, itm_head, temperature, settings, *row)
        return {name: heat[:0] for name, heat in maps.items()}
    vit = network.visual_encoder
    attention = cross_attention(network.text_encoder, settings.itm_layer, of_words=False)
    block = _block(len(vit.blocks), settings.itc_block)
    block_inputs: list[Tensor] = []

    def keep_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        block_inputs.append(inputs[0])

    hook = vit.blocks[block].register_forward_pre_hook(keep_input)
    try:
        with torch.no_grad():
            image_tokens = network.encode_image(image)
            states = network.encode_text(input_ids, attention_mask)
            text_features = network.project_text(states)
    finally:
        hook.remove()
    tokens = token_maps(network, itm_head, attention, image_tokens, states, attention_mask)  # zero at padding
    itm = tokens.sum(1) / attention_mask.sum(1)[:, None, None]

    self_attention: Any = vit.blocks[block].attn
    with torch.enable_grad(), recording({"qkv": self_attention.qkv}, self_attention.proj) as record:
        image_features = network.project_image(network.finish_image(block_inputs[0], block))
        similarity = (image_features * text_features).sum() / temperature
        (gradient,) = torch.autograd.grad(similarity, record["context"])
    query, key, value = record["qkv"].chunk(3, -1)
    itc = relevance(query[:, :1], key, value, gradient[:, :1], self_attention.num_heads)[:, 0]
    return {"itm": itm, "itc": itc.unflatten(-1, vit.patch_embed.grid_size)}


def _block(depth: int, block: int | None) -> int:
    if block is None:
        return 2 * depth // 3
    if not 0 <= block < depth:
        raise UserError(f"Expected a model.grounding.itc_block from 0 to {depth - 1}, got {block}: correct it.")
    return block


@dataclass
class GroundingResult:
    """Result of one evaluation, equal in every process.

    Attributes:
        sample_index: long [N], sorted.
        right: float64 [N, 4], the right boxes (x, y, width, height).
        chosen: float64 [N, 4] by map, NaN where no box was chosen.
        iou: float64 [N] by map, overlap of the chosen box with the right one, 0 where none was chosen.
        part: the part of the data set that each text belongs to, such as "testA"; empty if it has no parts.
    """

    sample_index: Tensor
    right: Tensor
    chosen: dict[MapName, Tensor]
    iou: dict[MapName, Tensor]
    part: list[str]


class GroundingEvaluation:
    """Accuracy of the boxes that texts refer to, in percent, over the texts of all processes.

    A chosen box is correct if its IoU with the right box is at least 0.5. Where no box has a positive score, none is
    chosen, and the text counts as wrong; `<map>_no_box` is the share of such texts, logged if there are any.
    `chance_accuracy` is the expected accuracy of a box drawn at random. Data sets with parts, such as RefCOCO+ with
    testA and testB, also have the results of each part, `<part>/<name>`.

    The module's method `grounding_maps(image, input_ids, attention_mask)` returns maps [B, g, g] by name. An evaluation
    batch holds one text per image: `image`, `input_ids`, `attention_mask`, `sample_index` and `ref_id` [B], `size`
    long [B, 2] of the images (height, width), `boxes`, a list of B tensors [K, 4], `part`, a list of B strings, and but
    for predictions `right_box` [B, 4]. Boxes are (x, y, width, height) in pixels of the image.

    Args:
        settings: settings of the maps.
    """

    def __init__(self, settings: GroundingSettings) -> None:
        self.settings = settings
        self.result: GroundingResult | None = None
        self.summary: Summary | None = None
        self.start()

    def start(self) -> None:
        """Clear the collected boxes; the last result is kept."""
        self._rows: list[Tensor] = []
        self._parts: list[str] = []

    def step(self, module: Any, batch: Batch, stage: Stage) -> None:
        """Choose a box for each text of a batch, by each map."""
        choices = self._choose(module, batch)
        right_boxes = batch["right_box"].double().cpu()
        index = batch["sample_index"].double().cpu()
        for row, (boxes, right) in enumerate(zip(batch["boxes"], right_boxes, strict=True)):
            correct = box_iou(boxes.double().cpu(), right) >= IOU
            columns = [index[row : row + 1], right, correct.double().mean()[None]]
            for name in MAPS:
                chosen = choices[name][row, :4]
                columns += [chosen, box_iou(chosen[None], right).nan_to_num(0)]
            self._rows.append(torch.cat(columns))
        self._parts += batch["part"]

    def predict(self, module: Any, batch: Batch) -> dict[str, Any]:
        """Return the chosen box of each text, [B, 4] with NaN for none, and its score [B], by each map."""
        values = {name: batch[name] for name in ("sample_index", "ref_id")}
        for name, choices in self._choose(module, batch).items():
            values |= {f"{name}_box": choices[:, :4], f"{name}_score": choices[:, 4]}
        return values

    def finish(self, module: Any, stage: Stage) -> None:
        """Log accuracy in percent; every process calls this."""
        if stage == "predict":
            return
        width = 6 + 5 * len(MAPS)
        rows = gather_uneven(torch.cat([torch.zeros(0, width).double(), *[row[None] for row in self._rows]]))
        parts = gather_texts(self._parts)
        self.start()
        if not len(rows):
            raise UserError("Expected a text with boxes to evaluate, got none: check the evaluation data.")
        order = rows[:, 0].argsort()
        rows = rows[order]
        columns = {name: rows[:, 6 + 5 * index : 11 + 5 * index] for index, name in enumerate(MAPS)}
        self.result = GroundingResult(
            sample_index=rows[:, 0].long(),
            right=rows[:, 1:5],
            chosen={name: of_map[:, :4] for name, of_map in columns.items()},
            iou={name: of_map[:, 4] for name, of_map in columns.items()},
            part=[parts[index] for index in order.tolist()],
        )
        accuracies = _accuracies(self.result, rows[:, 5])
        # The name of an accuracy is [<part>/]<map>_accuracy, that of its chance level [<part>/]chance_accuracy.
        chance = {
            name.replace("chance", of): value for name, value in accuracies.items() if "chance_" in name for of in MAPS
        }
        self.summary = Summary({"texts": len(rows)}, chance)
        for name in MAPS:
            if none := int(self.result.chosen[name].isnan().any(1).sum()):
                rank_zero_warn(f"No box has a positive score under the {name} map for {none} of {len(rows)} texts.")
        prefix = PREFIXES[stage]
        results = {f"{prefix}/{name}": value for name, value in accuracies.items()}
        log_global(module, results, f"{prefix}/{self.settings.map}_accuracy")

    def _choose(self, module: Any, batch: Batch) -> dict[MapName, Tensor]:
        """Return the chosen box of each text and its score, float64 [B, 5] by map; NaN for no box."""
        if "boxes" not in batch:
            raise UserError(
                "Expected boxes in the batches of an evaluation with model.grounding.evaluate, got none: give the data "
                "by GroundingDataModule, or set it to false."
            )
        # Also for a process without texts, since processes that share a model's weights communicate.
        maps = module.grounding_maps(batch["image"], batch["input_ids"], batch["attention_mask"])
        choices: dict[MapName, Tensor] = {}
        for name in MAPS:
            choices[name] = torch.full((len(batch["boxes"]), 5), torch.nan).double()
            for row, (heat, size, boxes) in enumerate(
                zip(maps[name].cpu(), batch["size"].tolist(), batch["boxes"], strict=True)
            ):
                scores = box_scores(heat, (size[0], size[1]), boxes.cpu())
                index = choose_box(scores)
                if index != NO_BOX:
                    choices[name][row] = torch.cat([boxes[index].double().cpu(), scores[index : index + 1]])
        return choices


def _accuracies(result: GroundingResult, chance: Tensor) -> dict[str, float]:
    """Return the results of all texts and of each part, in percent, by name."""
    accuracies: dict[str, float] = {}
    parts = sorted({part for part in result.part if part})
    for part in [""] + (parts if len(parts) > 1 else []):
        rows = torch.tensor([not part or part_of_text == part for part_of_text in result.part])
        prefix = f"{part}/" if part else ""
        for name in MAPS:
            accuracies[f"{prefix}{name}_accuracy"] = 100 * float((result.iou[name][rows] >= IOU).double().mean())
            no_box = 100 * float(result.chosen[name][rows].isnan().any(1).double().mean())
            if no_box:
                accuracies[f"{prefix}{name}_no_box"] = no_box
        accuracies[f"{prefix}chance_accuracy"] = 100 * float(chance[rows].mean())
    return accuracies
