"""Arguments of a method: groups become attributes, and a checkpoint or an export builds the class again."""

from importlib import import_module

import pytest
import torch
from lightning import LightningDataModule

from support.methods.tiny_modules import trainer
from support.methods.toy_method import OptimSettings, ToyMethod, VisionSettings, toy_rows
from support.runs.command_line import run
from vlightning.common.errors import UserError

# A user's class in a file of its own, with types as text, an argument and a group more, and a group that may be absent.
MODULE = '''
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.methods.toy_method import ToyMethod, VisionSettings


@dataclass(frozen=True)
class NoiseSettings:
    scale: float = 0.0
    shape: tuple[int, ...] = (1, 2)


class NoisyMethod(ToyMethod):
    """A subclass.

    Args:
        steps: a number.
        noise: a group.
        absent: a group that may be absent.
        **kwargs: arguments of `ToyMethod`.
    """

    noise: NoiseSettings
    absent_group: NoiseSettings | None

    def __init__(
        self,
        steps: int,
        noise: NoiseSettings = NoiseSettings(),
        absent: NoiseSettings | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.take_arguments(locals(), absent="absent_group")
        self.steps = steps


class WideMethod(ToyMethod):
    def __init__(self, depth: int = 2) -> None:
        super().__init__(VisionSettings(width=10 * depth))
'''


class NoisyData(LightningDataModule):
    """The toy method's batches, for the command line."""

    def train_dataloader(self):
        return toy_rows()


@pytest.fixture
def users(tmp_path, monkeypatch):
    (tmp_path / "users_method.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return import_module("users_method")


def test_a_group_is_given_as_an_instance_or_as_a_mapping():
    module = ToyMethod(vision={"width": 7}, optim=OptimSettings(betas=(0.5, 0.6)))
    assert module.vision == VisionSettings(width=7)
    assert module.optim == OptimSettings(betas=(0.5, 0.6))
    assert module.hparams["vision"] == {"image_size": 2, "width": 7}
    assert module.hparams["optim"]["betas"] == (0.5, 0.6)


@pytest.mark.parametrize("value", [None, 3, "small"])
def test_a_group_that_is_neither_is_named(value):
    with pytest.raises(UserError, match=f"Expected VisionSettings or a mapping of its fields, got {value!r}"):
        ToyMethod(vision=value)


def test_an_unknown_field_is_named():
    with pytest.raises(UserError, match="Expected fields of OptimSettings, got 'beta': did you mean 'betas'"):
        ToyMethod(optim={"beta": [0.1, 0.2]})


def test_types_that_are_imported_for_type_checkers_only_are_named():
    class Hidden(ToyMethod):
        def __init__(self, size: "Missing" = 3) -> None:  # type: ignore[name-defined]  # noqa: F821
            super().__init__()
            self.take_arguments(locals())

    with pytest.raises(UserError, match=r"types of Hidden's arguments .* got name 'Missing' is not defined: import"):
        Hidden()


def test_a_subclass_with_more_arguments_is_saved_whole(users, tmp_path):
    module = users.NoisyMethod(4, noise={"scale": 0.5, "shape": [3]}, vision=VisionSettings(width=7))
    assert module.noise == users.NoiseSettings(0.5, (3,))
    assert module.absent_group is None
    runs = trainer()
    runs.fit(module, toy_rows())
    runs.save_checkpoint(tmp_path / "noisy.ckpt")

    saved = torch.load(tmp_path / "noisy.ckpt", weights_only=True)["hyper_parameters"]
    assert saved["steps"] == 4
    assert saved["vision"] == {"image_size": 2, "width": 7}
    assert saved["teacher_seed"] == 0
    loaded = users.NoisyMethod.load_from_checkpoint(tmp_path / "noisy.ckpt")
    assert (loaded.steps, loaded.noise, loaded.vision) == (4, module.noise, module.vision)

    module.save_pretrained(tmp_path / "export")
    exported = users.NoisyMethod.from_pretrained(tmp_path / "export")
    assert (exported.steps, exported.noise, exported.vision) == (4, module.noise, module.vision)


def test_a_subclass_that_chooses_a_group_itself_is_built_again(users, tmp_path):
    module = users.WideMethod(depth=3)
    assert module.hparams["vision"] == {"image_size": 2, "width": 30}
    runs = trainer()
    runs.fit(module, toy_rows())
    runs.save_checkpoint(tmp_path / "wide.ckpt")
    module.save_pretrained(tmp_path / "export")
    assert users.WideMethod.load_from_checkpoint(tmp_path / "wide.ckpt").vision == VisionSettings(width=30)
    assert users.WideMethod.from_pretrained(tmp_path / "export").vision == VisionSettings(width=30)


def test_a_subclass_of_the_command_line_is_built_again(users, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "noisy.yaml").write_text(
        "model:\n  class_path: users_method.NoisyMethod\n"
        "  init_args: {steps: 2, noise: {scale: 0.5}, absent: {scale: 0.25}, vision: {width: 6}}\n"
        "data: {class_path: NoisyData}\n"
        "trainer: {max_epochs: 1, accelerator: cpu, enable_progress_bar: false, enable_model_summary: false}\n"
    )
    assert run("fit", "--config", "noisy.yaml").status == 0
    path = next((tmp_path / "runs").rglob("last.ckpt"))
    saved = torch.load(path, weights_only=True)["hyper_parameters"]
    assert saved["_class_path"] == "users_method.NoisyMethod"
    loaded = users.NoisyMethod.load_from_checkpoint(path)
    assert (loaded.steps, loaded.noise.scale, loaded.absent_group.scale) == (2, 0.5, 0.25)
    assert loaded.vision == VisionSettings(width=6)
