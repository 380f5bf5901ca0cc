"""The figures of the pages are drawn from the runs' own files and show the numbers of the tables."""

import runpy
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch.utils.tensorboard import SummaryWriter

from support.project.pages import ROOT

QUICKSTARTS = runpy.run_path(str(ROOT / "docs/figures/quickstarts.py"))


def events(folder: Path, tag: str, points: dict[int, float]) -> None:
    """Write the events of one run folder."""
    with SummaryWriter(str(folder)) as writer:
        for step, value in points.items():
            writer.add_scalar(tag, value, step)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """All quickstarts, the first stopped after step 19 and resumed from step 9."""
    for run, (_, accuracy, _) in QUICKSTARTS["PANELS"].items():
        for tag in ("train/loss", accuracy):
            events(tmp_path / run / "version_0", tag, {9: 4.0, 19: 3.0})
    events(tmp_path / "albef_quickstart" / "version_1", "train/loss", {19: 2.5, 29: 2.123456})
    values = {f"coefficients.{name}": torch.arange(6) / 10 for name in ("vision", "text")}
    values |= {f"{name}_multimodal": value + 1 for name, value in values.items()}
    save_file({"blocks.text": torch.zeros(2), **values}, tmp_path / "mmlg_quickstart/version_0/learngene.safetensors")
    return tmp_path


def test_the_curves_of_a_stopped_and_a_resumed_run_are_put_together(runs: Path):
    found = {(curve["run"], curve["tag"]): curve for curve in QUICKSTARTS["collect"](runs)}
    loss = found["albef_quickstart", "train/loss"]
    assert (loss["steps"], loss["values"], loss["stopped"]) == ([9, 19, 29], [4.0, 2.5, 2.123], 19)
    other = found["shre_quickstart", "train/loss"]
    assert (other["values"], other["stopped"]) == ([4.0, 3.0], None)
    assert found["mmlg_quickstart", "coefficients.text_multimodal"]["values"] == [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    assert len(found) == 2 * len(QUICKSTARTS["PANELS"]) + 4


def test_the_figures_are_drawn(runs: Path):
    found = {(curve["run"], curve["tag"]): curve for curve in QUICKSTARTS["collect"](runs)}
    drawn = {"draw_curves": found, "draw_coefficients": found}
    for name, data in drawn.items():
        QUICKSTARTS[name](data, runs / f"{name}.png")
    for name in drawn:
        with Image.open(runs / f"{name}.png") as image:
            assert image.width > 600
            assert len(image.convert("RGB").resize((64, 64)).getcolors(4096)) > 10


def test_what_is_shown_of_the_quickstarts_is_complete():
    found = QUICKSTARTS["read"]()
    for run, (_, accuracy, _) in QUICKSTARTS["PANELS"].items():
        loss, percent = found[run, "train/loss"], found[run, accuracy]
        assert loss["values"][-1] < 0.5 * loss["values"][0]
        assert loss["stopped"] in (None, *loss["steps"])
        assert percent["steps"][-1] == pytest.approx(loss["steps"][-1], abs=10)
        assert 30 < percent["values"][-1] < 100
    assert sum(loss["stopped"] is not None for (_, tag), loss in found.items() if tag == "train/loss") == 3  # README
