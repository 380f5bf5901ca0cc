"""Modules that the import of a callback or of a method loads."""

import ast
import inspect
import subprocess
import sys

import pytest

import vlightning.callbacks
import vlightning.lightning_modules

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
