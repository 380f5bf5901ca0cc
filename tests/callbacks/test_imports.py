"""Modules that the import of a callback or of a method loads."""

import ast
import inspect
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import vlightning.callbacks
import vlightning.lightning_modules
from support.project.wheel import ROOT

CODE = """
import sys
import lightning.pytorch
from torch.utils.tensorboard import SummaryWriter
before = set(sys.modules)  # with what lightning itself loads, which may be transformers and matplotlib
from vlightning.callbacks import {}
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(*loaded & {{"open_clip", "timm", "transformers", "pyarrow", "matplotlib", "datasets", "safetensors"}})
"""


def loaded_by(names):
    found = subprocess.run([sys.executable, "-c", CODE.format(names)], capture_output=True, text=True, check=True)
    return found.stdout.split()


@pytest.mark.slow
def test_a_callback_does_not_import_libraries_of_other_callbacks():
    light = "EMACallback, QueueCallback, OnlineLinearProbe, SkipNonFiniteSteps, StepSeedCallback, StopOnSignal"
    others = "FinalExport, AtomicCheckpointIO, ShardedStrategy, OwnClassification, ZeroShotClassification"
    assert loaded_by(f"{light}, {others}") == []


@pytest.mark.parametrize("package", [vlightning.callbacks, vlightning.lightning_modules])
def test_every_public_name_is_found_lazily_and_by_type_checkers(package):
    (checked,) = (node for node in ast.parse(inspect.getsource(package)).body if isinstance(node, ast.If))
    imported = {alias.name: node.module for node in checked.body for alias in node.names}
    assert imported == package._LAZY.modules
    assert sorted(package.__all__) == sorted([*imported, "load_all"])
    package.load_all()
    for name, module in imported.items():
        assert getattr(package, name) is getattr(sys.modules[f"{package.__name__}.{module}"], name)
    assert set(package.__all__) <= set(dir(package))


FIT = """
import copy
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
import vlightning.callbacks
from vlightning.callbacks import EMACallback, EMAPair, ProgressLines, SkipNonFiniteSteps, StepSeedCallback


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.average = copy.deepcopy(self.layer).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.layer.parameters(), lr=0.1)


model = Model()
before = model.layer.weight.detach().clone()
ema = EMACallback({"layer": EMAPair("layer", "average", momentum=0.5)})
callbacks = [ema, StepSeedCallback(), SkipNonFiniteSteps(), ProgressLines()]
options = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False, max_steps=1)
Trainer(callbacks=callbacks, **options).fit(model, DataLoader(torch.ones(4, 2), batch_size=2))
assert not torch.equal(model.layer.weight, before)
print("fitted", *model.average.weight.flatten().tolist())
print("half", *((before + model.layer.weight) / 2).flatten().tolist())
for name in vlightning.callbacks.__all__:
    try:
        getattr(vlightning.callbacks, name)
    except ImportError as error:
        print("missing", name, error.name)
        assert str(error) == f"vlightning.callbacks.{name} needs {error.name}, which is not installed."
"""
HEAVY = {
    **dict.fromkeys(("AnswerWriter", "CaptionWriter", "ClassPredictionWriter", "GroundingWriter"), "pyarrow"),
    **dict.fromkeys(("RetrievalPredictionWriter", "TextClassPredictionWriter"), "pyarrow"),
    **dict.fromkeys(("AnswerFigures", "GroundingFigures", "PredictionFigures"), "matplotlib"),
    **dict.fromkeys(("LearngeneFigures", "WordMapFigures"), "matplotlib"),
    **dict.fromkeys(("EmbeddingProjector", "RetrievalFigures"), "torchvision"),
    **dict.fromkeys(("LearngeneExpansionCallback", "LearngeneWriter"), "safetensors"),
}


def link_distribution(name: str, folder: Path, seen: set[str]) -> None:
    """Link the files of an installed distribution, and of all that it requires without extras, into a folder."""
    try:
        installed = distribution(name)
    except PackageNotFoundError:  # for another platform
        return
    if installed.metadata["Name"] in seen:
        return
    seen.add(installed.metadata["Name"])
    for entry in {file.parts[0] for file in installed.files or []} - {"..", "__pycache__"}:
        link = folder / entry
        if not link.exists():
            link.symlink_to(Path(str(installed.locate_file(entry))))
    for line in installed.requires or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            link_distribution(requirement.name, folder, seen)


@pytest.mark.slow
def test_callbacks_alone_need_torch_and_lightning_only(tmp_path: Path):
    """In an environment with these two, callbacks run, and each other one names in a sentence what it needs."""
    seen: set[str] = set()
    for name in ("torch", "lightning"):
        link_distribution(name, tmp_path, seen)
    assert not seen & {"pyarrow", "matplotlib", "torchvision", "safetensors", "transformers", "rich"}
    (tmp_path / "vlightning").symlink_to(ROOT)
    for folder in Path(str(distribution("vlightning").locate_file(""))).glob("vlightning-*.dist-info"):
        (tmp_path / folder.name).symlink_to(folder)
    # -S: no site-packages, so that only what is linked can be imported.
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-S", "-c", FIT]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    (fitted,) = (line[1:] for line in lines if line[:1] == ["fitted"])
    (half,) = (line[1:] for line in lines if line[:1] == ["half"])
    assert [float(value) for value in fitted] == pytest.approx([float(value) for value in half])
    assert {line[1]: line[2] for line in lines if line[:1] == ["missing"]} == HEAVY
