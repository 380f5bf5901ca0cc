"""Grounding: maps against a slow reference, and accuracy against hand-made boxes on one process and on two."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from support.methods.albef import tiny_albef
from support.methods.gradcam import exact_inputs, reference_maps, spread_albef
from support.runs.distributed import run_distributed
from vlightning.callbacks import GroundingFigures, GroundingWriter
from vlightning.common.errors import UserError
from vlightning.datamodules import GroundingShapesDataModule
from vlightning.lightning_modules import ALBEFModule
from vlightning.lightning_modules.albef.grounding import GroundingEvaluation, GroundingSettings


def _vit_reference(module, image, input_ids, attention_mask, chosen):
    """The image encoder written out, with attention weights that hooks ask a gradient for."""
    vit, asked = module.student.visual_encoder, []
    states = vit._pos_embed(vit.patch_embed(image))
    for index, block in enumerate(vit.blocks):
        attention, inner = block.attn, block.norm1(states)
        query, key, value = attention.qkv(inner).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1)
        if index == chosen:
            weights.retain_grad()
            asked.append(weights)
        states = states + attention.proj((weights @ value).transpose(1, 2).flatten(2))
        states = states + block.mlp(block.norm2(states))
    image_features = F.normalize(module.student.vision_proj(vit.norm(states)[:, 0]), dim=-1)
    texts = module.student.encode_text(input_ids, attention_mask)
    text_features = F.normalize(module.student.text_proj(texts[:, 0]), dim=-1)
    (image_features @ text_features.T / module.temperature).diag().sum().backward()
    maps = []
    for own, gradient in zip(asked[0], asked[0].grad, strict=True):
        heads = [own[head, 0, 1:] * gradient[head, 0, 1:].clamp(0) for head in range(len(own))]
        maps.append((sum(heads) / len(heads)).reshape(2, 2))
    module.zero_grad()
    return torch.stack(maps).detach()


@pytest.mark.parametrize(("itm_layer", "itc_block"), [(1, 0), (2, 1), (3, 1)])
def test_maps_equal_slow_references(itm_layer, itc_block):
    module = spread_albef(grounding={"itm_layer": itm_layer, "itc_block": itc_block})
    image, input_ids, attention_mask = exact_inputs()
    maps = module.grounding_maps(image, input_ids, attention_mask)
    tokens = reference_maps(module, image, input_ids, attention_mask, itm_layer)
    expected = tokens.sum(1) / attention_mask.sum(1)[:, None, None]
    assert (expected > 1e-6).any()
    torch.testing.assert_close(maps["itm"], expected, rtol=1e-9, atol=1e-14)
    expected = _vit_reference(module, image, input_ids, attention_mask, itc_block)
    assert (expected > 1e-6).any()
    torch.testing.assert_close(maps["itc"], expected, rtol=1e-9, atol=1e-14)


def test_layer_and_block_8_of_12_are_the_default():
    module = spread_albef(fusion_layers=6, vision={"depth": 6})
    named = spread_albef(fusion_layers=6, vision={"depth": 6}, grounding={"itm_layer": 3, "itc_block": 4})
    for name, found in module.grounding_maps(*exact_inputs()).items():
        assert torch.equal(found, named.grounding_maps(*exact_inputs())[name])


def test_one_fusion_layer_has_a_map_of_cls_alone():
    module = spread_albef(fusion_layers=1)
    expected = reference_maps(module, *exact_inputs(), layer=1).sum(1) / exact_inputs()[2].sum(1)[:, None, None]
    torch.testing.assert_close(module.grounding_maps(*exact_inputs())["itm"], expected, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(("settings", "words"), [({"itm_layer": 0}, "from 1 to 3"), ({"itc_block": 2}, "from 0 to 1")])
def test_a_layer_that_does_not_exist_is_refused(settings, words):
    with pytest.raises(UserError, match=words):
        spread_albef(grounding=settings).grounding_maps(*exact_inputs())


def test_an_empty_batch_has_empty_maps():
    """A process without texts calls the networks as the others do, which may share its weights."""
    image, input_ids, attention_mask = exact_inputs()
    maps = spread_albef().grounding_maps(image[:0], input_ids[:0], attention_mask[:0])
    assert {name: found.shape for name, found in maps.items()} == dict.fromkeys(maps, (0, 2, 2))


def test_maps_need_no_gradient_mode_and_change_nothing():
    module = spread_albef()
    expected = module.grounding_maps(*exact_inputs())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    with torch.inference_mode():
        found = module.grounding_maps(*exact_inputs())
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=0)
        assert not found[name].requires_grad
    assert all((p.grad == 1).all() for p in module.parameters() if p.grad is not None)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def _sharded():
    module = spread_albef()
    module._device_mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    module.configure_model()
    with torch.no_grad():
        return [module.grounding_maps(*exact_inputs()) for _ in range(2)]


def test_a_sharded_model_gives_the_same_maps():
    expected = spread_albef().grounding_maps(*exact_inputs())
    for looks in run_distributed(_sharded):
        for found in looks:
            for name in expected:
                torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-14)


# Hand-made maps and boxes. Images of 40 x 40 pixels, maps of 4 x 4 cells: a hot cell is a square of 10 pixels.

BOXES = [[0.0, 0.0, 10.0, 10.0], [20.0, 20.0, 10.0, 10.0], [30.0, 0.0, 10.0, 40.0]]
CASES = [  # the right box, the hot cell (row, column) of itm and of itc, and the part
    (0, (0, 0), (0, 0), "testA"),
    (1, (2, 2), (0, 0), "testA"),
    (0, (2, 2), (2, 2), "testB"),
    (1, None, (2, 2), "testB"),
    (2, (1, 3), None, "testB"),
]


class _Given:
    """A module whose maps are in the images, and that keeps what is logged."""

    def __init__(self):
        self.logged = {}

    def grounding_maps(self, image, input_ids, attention_mask):
        return {"itm": image[:, 0], "itc": image[:, 1]}

    def log(self, name, value, **_):
        self.logged[name] = float(value)


def _batch(rows):
    image = torch.zeros(len(rows), 2, 4, 4)
    for place, row in enumerate(rows):
        for channel, cell in enumerate(CASES[row][1:3]):
            if cell is not None:
                image[(place, channel, *cell)] = 1
    return {
        "image": image,
        "input_ids": None,
        "attention_mask": None,
        "sample_index": torch.tensor(rows),
        "ref_id": torch.tensor(rows),
        "size": torch.full((len(rows), 2), 40),
        "boxes": [torch.tensor(BOXES)] * len(rows),
        "right_box": torch.tensor([BOXES[CASES[row][0]] for row in rows]).reshape(-1, 4),
        "part": [CASES[row][3] for row in rows],
    }


def _evaluated(batches):
    module, evaluation = _Given(), GroundingEvaluation(GroundingSettings())
    for rows in batches:
        evaluation.step(module, _batch(rows), "test")
    evaluation.finish(module, "test")
    return module.logged, evaluation.result


EXPECTED = {
    "itm_accuracy": 60.0,
    "itc_accuracy": 40.0,
    "itm_no_box": 20.0,
    "itc_no_box": 20.0,
    "chance_accuracy": 100 / 3,
    "testA/itm_accuracy": 100.0,
    "testA/itc_accuracy": 50.0,
    "testA/chance_accuracy": 100 / 3,
    "testB/itm_accuracy": 100 / 3,
    "testB/itc_accuracy": 100 / 3,
    "testB/itm_no_box": 100 / 3,
    "testB/itc_no_box": 100 / 3,
    "testB/chance_accuracy": 100 / 3,
}


def test_accuracy_of_hand_made_boxes():
    logged, result = _evaluated([[3, 0], [], [4, 1, 2]])
    assert logged == pytest.approx({f"test/{name}": value for name, value in EXPECTED.items()})
    assert result.sample_index.tolist() == [0, 1, 2, 3, 4]
    assert result.right.tolist() == [BOXES[case[0]] for case in CASES]
    assert result.chosen["itm"][1].tolist() == BOXES[1]
    assert result.chosen["itm"][3].isnan().all()
    assert result.iou["itm"].tolist() == [1, 1, 0, 0, 1]


def _share():
    rank = torch.distributed.get_rank()
    logged, result = _evaluated([[[0, 1], [2, 3]], [[4]]][rank])
    return logged, result.sample_index, result.iou["itm"]


def test_two_processes_have_the_results_of_one():
    for logged, index, iou in run_distributed(_share):
        assert logged == pytest.approx({f"test/{name}": value for name, value in EXPECTED.items()})
        assert (index.tolist(), iou.tolist()) == ([0, 1, 2, 3, 4], [1, 1, 0, 0, 1])


def test_an_evaluation_without_texts_is_refused():
    with pytest.raises(UserError, match="Expected a text with boxes to evaluate, got none"):
        _evaluated([[]])


def test_data_without_boxes_is_refused():
    batch = _batch([0])
    del batch["boxes"]
    with pytest.raises(UserError, match=r"Expected boxes in the batches .*GroundingDataModule"):
        GroundingEvaluation(GroundingSettings()).step(_Given(), batch, "validate")


def test_a_run_draws_figures_and_predicts_boxes(tmp_path):
    """In Lightning's inference mode, whose tensors take no gradients."""
    sizes = {"vision": {"image_size": 24}, "text": {"vocab_size": 320}}
    module = tiny_albef(0, sizes, mlm=False, grounding={"evaluate": True})
    data = GroundingShapesDataModule(length=8, eval_length=3, image_size=24, batch_size=4)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=TensorBoardLogger(tmp_path),
        callbacks=[GroundingFigures(texts=2)],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    )
    figures = []
    trainer.logger.experiment.add_figure = lambda name, figure, step: figures.append((name, figure))
    trainer.fit(module, data)
    assert {"val/itm_accuracy", "val/itc_accuracy", "val/chance_accuracy"} <= trainer.callback_metrics.keys()
    assert float(trainer.callback_metrics["val/chance_accuracy"]) == 25
    assert module.evaluation.summary.chance == {"itm_accuracy": 25, "itc_accuracy": 25}
    ((name, figure),) = figures
    drawn = [cell for cell in figure.axes if cell.images]
    assert (name, len(drawn)) == ("val/grounding", 6)
    greens = [cell.patches[0].get_edgecolor() for cell in drawn]
    assert all(np.allclose(color[:3], (0, 150 / 255, 60 / 255)) for color in greens)
    trainer.predict(module, data)
    table = pq.read_table(tmp_path / "predictions/boxes.parquet").to_pylist()
    rows = data._opened("predict")
    assert [row["sample_index"] for row in table] == list(range(6))
    assert [[row["text"]] for row in table] == [rows.captions(number) for number in range(6)]
    chosen = [row for row in table if row["itm_box"] is not None]
    assert chosen
    for row in chosen:
        boxes = torch.tensor(rows.target(row["sample_index"]).boxes, dtype=torch.float32).double().tolist()
        assert row["itm_box"] in boxes
        assert row["itm_score"] > 0
    assert all(row["ref_id"] is None for row in table)


def test_the_writer_names_what_is_missing():
    writer = GroundingWriter()
    with pytest.raises(UserError, match="Expected sample_index, ref_id, itm_box"):
        writer.on_predict_batch_end(None, tiny_albef(), {"sample_index": torch.zeros(1)}, None, 0)


def test_the_writer_of_the_task_is_the_default():
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    for evaluate, kind in ((True, "GroundingWriter"), (False, "RetrievalPredictionWriter")):
        module: ALBEFModule = tiny_albef(grounding={"evaluate": evaluate})
        module._trainer = trainer
        assert kind in [type(callback).__name__ for callback in module.configure_callbacks()]
