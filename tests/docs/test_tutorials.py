"""The tutorials run from top to bottom at small sizes, and their pages show the cells that they have."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from support.project.pages import PAGES, ROOT

SIZES = {
    "search_albef": {"IMAGES": 64, "EPOCHS": 1, "FOLDER": 24},
    "own_project": {"IMAGES": 256, "EPOCHS": 1},
    "distil_classifier": {"IMAGES": 80, "EPOCHS": 1},
    "mobileclip": {"PAIRS": 64, "TEACHER_STEPS": 1, "STEPS": 1, "TESTED": 32},
    "learngene": {"EXTRACTION_STEPS": 2, "STEPS": 1, "DEPTHS": [6]},
    "finetune_clip": {"PUBLISHED_STEPS": 2, "STEPS": 2, "TESTED": 40},
}
PRINTED = {
    "mobileclip": ["image_emb (3, 128), text_emb (2, 128)", "layers of the image tower", "of the features of both"],
    "learngene": ["auxiliary of 12 layers", "337,305 numbers"],
    "search_albef": ["million parameters", "re-ranked", "24 images, 64 numbers each"],
    "distil_classifier": ["CoCoRD: ", "the student resnet8"],
    "finetune_clip": ["the layout 'open_clip'", "layer-wise decay"],
    "own_project": ["the probe is right in", "14 of 14 tensors are equal"],
}
RENDER = runpy.run_path(str(ROOT / "docs/site/tutorials.py"))


def test_every_tutorial_is_tried():
    assert set(SIZES) == {path.stem for path in (ROOT / "docs/tutorials").glob("*.py")}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_the_tutorial_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tutorial"])
    outputs = RENDER["run"](name, **SIZES[name])
    said = "\n".join(output.text for output in outputs)
    assert not [text for text in PRINTED[name] if text not in said], said
    shown = re.findall(r"\.\./images/tutorials/\w+_\d+\.png", PAGES[f"docs/tutorials/{name}.md"])
    assert len(shown) == sum(len(output.figures) for output in outputs)


@pytest.mark.parametrize("name", SIZES)
def test_the_page_has_the_cells_of_the_tutorial(name: str):
    shown = re.sub(r"```text\n.*?\n```\n\n|!\[output of [^\n]*\n\n", "", PAGES[f"docs/tutorials/{name}.md"], flags=re.S)
    assert shown == RENDER["page"](name, None)


def test_a_size_that_a_tutorial_does_not_set_is_an_error():
    with pytest.raises(KeyError, match="IMGAES"):
        RENDER["run"]("own_project", IMGAES=1)
