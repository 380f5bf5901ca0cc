"""`vlightning fit --model.weights` takes what a training wrote: each row of the second table of `docs/export.md`."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer

from support.methods.methods import METHODS, OTHERS
from support.runs.command_line import run

TAKEN: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("albef", {}, {"checkpoint": "", "vlightning": "folder", "albef": "albef.pth"}),
    ("clip", {}, {"checkpoint": "", "open_clip": "folder"}),
    ("cocord", {}, {"checkpoint": "", "student": "student.pth"}),
    ("mmlg", {}, {"checkpoint": "", "vlightning": "folder"}),
    ("mobileclip", {}, {"checkpoint": "", "open_clip": "folder/open_clip_model.safetensors"}),
    ("mobileclip", {"model": "MobileCLIP-tiny"}, {"vendor": "vendor.pt"}),
    ("shre", {}, {"checkpoint": "", "vlightning": "folder"}),
]
"""Methods, options of their builders, and what `model.weights` takes, by layout."""
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "max_steps": 1}
QUIET |= {"limit_val_batches": 0}
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Of BatchNorm, which a step changes at any learning rate."""


def trained(name: str, options: dict[str, Any], folder: Path) -> Path:
    """Train for a step; return the checkpoint, and write its settings as a config."""
    method = (METHODS | OTHERS)[name]
    module, data = method.build(method.prepare(folder), seed=3, batch_size=8, num_workers=0, **options)
    trainer = Trainer(**QUIET, logger=False, enable_checkpointing=False)
    trainer.fit(module, data)
    trainer.save_checkpoint(folder / "trained.ckpt")
    content = torch.load(folder / "trained.ckpt", weights_only=True)
    config: dict[str, Any] = {"trainer": QUIET | {"logger": {"class_path": "CSVLogger"}}}
    for section, part, key in (("model", module, "hyper_parameters"), ("data", data, "datamodule_hyper_parameters")):
        own = {name: value for name, value in content[key].items() if not name.startswith("_")}
        config[section] = {"class_path": type(part).__name__, "init_args": own}
    for group, size in (("vision", "image_size"), ("text", "vocab_size")):  # are the data's
        config["model"]["init_args"].get(group, {}).pop(size, None)
    (folder / "again.yaml").write_text(yaml.safe_dump(config))
    return folder / "trained.ckpt"


@pytest.mark.parametrize(
    ("name", "options", "layouts"), TAKEN, ids=[" ".join((name, *layouts)) for name, _, layouts in TAKEN]
)
def test_a_training_starts_from_what_another_wrote(name, options, layouts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint = trained(name, options, tmp_path)
    before = torch.load(checkpoint, weights_only=True)["state_dict"]
    for layout, place in layouts.items():
        weights = tmp_path / place if place else checkpoint
        if place:
            ran = run("export", checkpoint, place.partition("/")[0], "--layout", layout)
            assert ran.status == 0, ran.err
        words = [f"--model.weights={weights}", "--model.optimizer=SGD", "--model.optimizer.lr=0", "--seed_everything=9"]
        ran = run("fit", "--config=again.yaml", *words, f"--trainer.logger.save_dir={layout}-run")
        assert ran.status == 0, (layout, ran.err)
        (last,) = tmp_path.glob(f"{layout}-run/**/last.ckpt")
        after = torch.load(last, weights_only=True)["state_dict"]
        # A training with an average of the weights, which it evaluates, passes that on.
        first = {key: before.get(key.replace("student.", "average.", 1), value) for key, value in before.items()}
        compared = [key for key in first if key.startswith("student.") and not key.endswith(STATISTICS)]
        assert compared
        assert not [key for key in compared if not torch.equal(after[key], first[key])], layout
