"""`benchmarks/cocord_detection.py`: an exported backbone in a detector, one step on drawn boxes, VOC's precision."""

import csv
import sys
from functools import partial
from pathlib import Path
from typing import Any

import cocord_detection
import pytest
import torch
import yaml
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torchvision.models import resnet18, resnet50
from voc_metric import average_precision, voc_precision

from support.data.images import draw_image

PAGE = Path(__file__).resolve().parents[2] / "docs/detection.md"
OBJECT = """<object><name>{name}</name><difficult>{difficult}</difficult>
<bndbox><xmin>{0}</xmin><ymin>{1}</ymin><xmax>{2}</xmax><ymax>{3}</ymax></bndbox></object>"""


def write_voc(folder, year, split, names):
    root = folder / "VOCdevkit" / f"VOC{year}"
    for part in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (root / part).mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        draw_image(number, (60, 40)).save(root / "JPEGImages" / f"{name}.jpg")
        boxes = [OBJECT.format(5, 3, 30, 25, name="dog", difficult=0)]
        boxes += [OBJECT.format(31, 11, 59, 39, name="tvmonitor", difficult=number % 2)]
        (root / "Annotations" / f"{name}.xml").write_text(f"<annotation>{''.join(boxes)}</annotation>")
    (root / "ImageSets/Main" / f"{split}.txt").write_text("\n".join(names))


def exported(network, classes=1000):
    """What `vlightning export --layout torchvision` writes: see `lightning_modules/cocord/test_export.py`."""
    state = network.state_dict()
    return {name: value for name, value in state.items() if not name.startswith("fc.") and "num_batch" not in name}


def test_a_step_trains_the_whole_detector_and_the_test_reads_it(tmp_path, monkeypatch):
    torch.manual_seed(0)
    state = exported(resnet18())
    torch.save(state, tmp_path / "backbone.pth")
    write_voc(tmp_path, 2007, "trainval", ["a", "b"])
    write_voc(tmp_path, 2012, "trainval", ["c", "d"])
    write_voc(tmp_path, 2007, "test", ["e"])
    words = ["detection", str(tmp_path / "backbone.pth"), "--network=resnet18", "--data", str(tmp_path)]
    words += ["--folder", str(tmp_path / "run"), "--steps=1", "--batch=2", "--workers=0", "--sides", "48", "64"]
    monkeypatch.setattr(sys, "argv", words)
    few = partial(cocord_detection.detector, box_batch_size_per_image=8, rpn_post_nms_top_n_test=8)
    monkeypatch.setattr(cocord_detection, "detector", few)
    cocord_detection.main()
    trained = torch.load(tmp_path / "run/detector.ckpt", weights_only=True)["state_dict"]
    places = {"backbone.0": "conv1", "backbone.4.0.conv1": "layer1.0.conv1"}
    places["roi_heads.box_head.0.1.conv2"] = "layer4.1.conv2"
    for place, public in places.items():
        change = trained[f"model.{place}.weight"] - state[f"{public}.weight"]
        assert 0 < float(change.abs().max()) < 0.05, place
    assert int(trained["model.backbone.1.num_batches_tracked"]) == 2  # statistics of the two batches of an epoch
    monkeypatch.setattr(sys, "argv", [*words, "--test"])
    cocord_detection.main()
    with next((tmp_path / "run").glob("version_1/metrics.csv")).open(newline="") as file:
        (line,) = csv.DictReader(file)
    assert all(0 <= float(line[f"test/{name}"]) <= 100 for name in ("ap", "ap50", "ap75"))


def test_the_detectors_of_resnet50_have_trainable_norms(tmp_path, monkeypatch):
    torch.manual_seed(0)
    state = exported(resnet50())
    assert len(state) == 265
    torch.save(state, tmp_path / "backbone.pth")
    model = cocord_detection.detector(cocord_detection.body_of(tmp_path / "backbone.pth", "resnet50"), 21)
    assert model.backbone.out_channels == 1024
    assert model.roi_heads.box_predictor.cls_score.weight.shape == (21, 2048)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model.roi_heads.box_head[0][2].conv3.weight, state["layer4.2.conv3.weight"])
    assert isinstance(model.roi_heads.box_head[1], torch.nn.BatchNorm2d)
    with pytest.raises(SystemExit, match=r"the backbone of resnet18 in .*, got another layer1\.0\.bn3\.bias: export"):
        cocord_detection.body_of(tmp_path / "backbone.pth", "resnet18")
    monkeypatch.chdir(tmp_path)
    documented: dict[str, Any] = {}
    exec(PAGE.read_text().split("```python\n")[1].partition("```")[0], documented)  # with a feature pyramid
    backbone = documented["model"].backbone
    assert torch.equal(backbone.body.layer4[2].conv3.weight, state["layer4.2.conv3.weight"])
    assert all(parameter.requires_grad for parameter in backbone.parameters())


def test_the_rate_warms_up_and_decays():
    module = cocord_detection.Detection(torch.nn.Linear(1, 1), 0.02, 24_000)
    steps = {0: 0.001, 50: 0.5005, 100: 1, 17_999: 1, 18_000: 0.1, 21_999: 0.1, 22_000: 0.01}
    assert {step: module.factor(step) for step in steps} == pytest.approx(steps)


def objects(boxes, labels, **more):
    found = {"boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4), "labels": torch.tensor(labels)}
    return found | {name: torch.tensor(value) for name, value in more.items()}


def test_precision_is_that_of_a_list_ranked_by_hand():
    square, other, far = [0, 0, 10, 10], [20, 0, 30, 10], [50, 50, 60, 60]
    truth = [
        objects([square, other], [1, 1], difficult=[False, False]),
        objects([square, far], [1, 1], difficult=[False, True]),
    ]
    found = [
        objects([square, square, [20, 0, 30, 8]], [1, 1, 1], scores=[0.9, 0.8, 0.5]),
        objects([[0, 0, 10, 4], far, square], [1, 1, 2], scores=[0.7, 0.95, 0.99]),
    ]
    # By score: far is difficult and ignored; square correct, again square wrong, a small square wrong, other correct.
    # Precision 1, 1/2, 1/3, 1/2 at recall 1/3, 1/3, 1/3, 2/3: four recalls have precision 1, three 1/2, four none.
    assert average_precision(found, truth, 1, 0.5) == pytest.approx((4 * 1 + 3 * 0.5) / 11)
    assert average_precision(found, truth, 1, 0.85) == pytest.approx(4 / 11)  # other overlaps by 0.8
    found = voc_precision(found, truth)  # of class 1; six overlaps are below 0.8
    assert found.ap50 == pytest.approx(100 * (4 + 1.5) / 11)
    assert found.ap75 == found.ap50
    assert found.ap == pytest.approx(100 * (6 * (4 + 1.5) + 4 * 4) / 11 / 10)


def test_the_documented_configs_have_the_export_and_the_recipe():
    blocks = PAGE.read_text().split("```yaml\n")[1:]
    voc, coco = (yaml.safe_load(block.partition("```")[0]) for block in blocks)
    for config in (voc, coco):
        model = config["MODEL"]
        assert config["INPUT"]["FORMAT"] == "RGB"
        assert model["PIXEL_MEAN"] == pytest.approx([255 * value for value in IMAGENET_DEFAULT_MEAN])
        assert model["PIXEL_STD"] == pytest.approx([255 * value for value in IMAGENET_DEFAULT_STD])
        assert model["RESNETS"] == {"DEPTH": 50, "NORM": "SyncBN", "STRIDE_IN_1X1": False}
        assert model["BACKBONE"] == {"FREEZE_AT": 0}
        assert (config["SOLVER"]["IMS_PER_BATCH"], config["SOLVER"]["BASE_LR"]) == (16, 0.02)
    assert voc["SOLVER"]["STEPS"] == "(18000, 22000)"
    assert (voc["SOLVER"]["MAX_ITER"], voc["MODEL"]["ROI_HEADS"]["NUM_CLASSES"]) == (24_000, 20)
    assert (coco["SOLVER"]["MAX_ITER"], coco["MODEL"]["MASK_ON"]) == (180_000, True)
