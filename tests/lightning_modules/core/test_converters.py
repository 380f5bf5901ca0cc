"""What a converter says of its programs is compared with the towers; the converters themselves run in test_packages."""

import pytest
import torch

from vlightning.common.errors import UserError
from vlightning.lightning_modules.core import converters
from vlightning.lightning_modules.core.programs import Tower, write_programs


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, image):
        return self.layer(image)


def written(monkeypatch, folder, format, **changes):
    """Write a tower by a converter that says what the tower is, except for the changes."""

    def convert(jobs, target, format, dtype):
        (job,) = jobs
        assert job.inputs["image"].shape == (5, 3)  # each row that was not traced
        (target / "image.pte").touch()
        said = {
            "inputs": {"image": [1, 3]},
            "output": {"image_features": [1, 2]},
            "weights": 2,
            "missing": [],
            "features": job.program.module()(job.inputs["image"][:1]).expand(5, 2)
            if "features" in changes
            else torch.cat([job.program.module()(row) for row in job.inputs["image"].split(1)]),
        }
        return {"image": said | {name: value for name, value in changes.items() if name != "features"}}

    monkeypatch.setattr(converters, "convert", convert)
    rows = torch.rand(6, 3, generator=torch.Generator().manual_seed(0))
    tower = Tower("image", Tiny().eval().requires_grad_(False), {"image": rows})
    return write_programs([tower], folder / "made", format, {})


def test_a_model_without_a_tokenizer_is_none_for_immich(tmp_path):
    towers = [Tower(name, Tiny().eval(), {name: torch.rand(6, 3)}) for name in ("image", "text")]
    with pytest.raises(UserError, match=r"^Expected a model with its tokenizer for Immich, got none: "):
        write_programs(towers, tmp_path / "made", "immich", {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ["coreml", "executorch"])
def test_a_program_that_is_the_tower_is_written_and_described(format, tmp_path, monkeypatch, capsys):
    written(monkeypatch, tmp_path, format)
    said = capsys.readouterr().out
    if format == "coreml":
        assert "features were not compared; image: inputs, output and 2 of 2 tensors of weights are torch's." in said
    else:
        assert "against torch's: image.pte differs by at most 0.0e+00." in said


@pytest.mark.parametrize(
    ("format", "changes", "message"),
    [
        (
            "coreml",
            {"inputs": {"image": [1, 4]}},
            r"Expected the inputs \{'image': \[1, 3\]\} .* got \{'image': \[1, 4\]\}",
        ),
        ("coreml", {"output": {"div": [1, 2]}}, r"Expected the output .* got \{'div': \[1, 2\]\}"),
        ("coreml", {"missing": ["layer.weight"]}, r"in Core ML's program, got it without layer\.weight"),
        ("executorch", {"features": "of the first row"}, r"Expected a difference of at most .* exported image tower"),
    ],
)
def test_another_program_is_refused_and_not_written(format, changes, message, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=message):
        written(monkeypatch, tmp_path, format, **changes)
    assert list(tmp_path.iterdir()) == []
