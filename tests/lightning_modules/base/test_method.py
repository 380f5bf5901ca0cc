"""The base of the methods, by a small method in one file: hooks, settings, optimizer, frozen networks, evaluation."""

import math

import pytest
import torch
from lightning.pytorch import Callback

from support.methods.tiny_modules import trainer
from support.methods.toy_method import CLASSES, ROWS, OptimSettings, ToyMethod, VisionSettings, toy_rows
from support.runs.command_line import run
from vlightning.common.errors import UserError
from vlightning.lightning_modules.core.settings import flat, settings


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("toy") / "toy.ckpt")
    runs = trainer()
    runs.fit(ToyMethod(VisionSettings(width=7)), toy_rows())
    runs.save_checkpoint(path)
    return path


# The hooks of `Method`'s docstring, in order.
ORDER = ["configure_callbacks", "setup", "configure_model", "on_load_checkpoint", "load_state_dict"]
ORDER += ["configure_optimizers", "on_fit_start", "load_initial_weights", "on_train_start", "on_train_batch_start"]
ORDER += ["optimizer_step", "training_step", "configure_gradient_clipping", "bounds", "on_save_checkpoint"]


def called(folder, path=None):
    calls = []

    def noted(name):
        def method(self, *args, **kwargs):
            calls.append(name)
            return getattr(super(Noted, self), name)(*args, **kwargs)

        return method

    Noted = type("Noted", (ToyMethod,), {name: noted(name) for name in ORDER})
    runs = trainer(max_epochs=2)
    runs.fit(Noted(VisionSettings(width=7)), toy_rows(), ckpt_path=path)
    runs.save_checkpoint(folder / "saved.ckpt")
    return [name for place, name in enumerate(calls) if name not in calls[:place]]


def test_hooks_run_in_the_order_of_the_docstring(checkpoint, tmp_path):
    loading = ("on_load_checkpoint", "load_state_dict")
    assert called(tmp_path) == [name for name in ORDER if name not in loading]
    assert called(tmp_path, checkpoint)[: len(loading) + 3] == ORDER[: len(loading) + 3]


def test_settings_are_plain_in_the_checkpoint_and_attributes_after_loading(checkpoint):
    saved = torch.load(checkpoint, weights_only=True)["hyper_parameters"]
    assert saved["vision"] == {"image_size": 2, "width": 7}
    assert saved["optim"]["betas"] == (0.9, 0.98)
    assert flat(saved)["vision.width"] == 7
    loaded = ToyMethod.load_from_checkpoint(checkpoint)
    assert loaded.vision == VisionSettings(width=7)
    assert loaded.optim == OptimSettings()
    assert loaded.hparams_initial["vision"] == saved["vision"]
    with pytest.raises(UserError, match=r"ToyMethod: vision\.width is 5, in the checkpoint 7; give what it"):
        trainer().validate(ToyMethod(), toy_rows(), ckpt_path=checkpoint, verbose=False)


def test_an_unknown_field_is_named_with_the_nearest_one():
    with pytest.raises(UserError, match=r"Expected fields of VisionSettings, got 'widht': did you mean 'width'"):
        ToyMethod(vision={"widht": 3})
    assert settings(OptimSettings, {"betas": [0.5, 0.6]}).betas == (0.5, 0.6)


def test_a_callable_given_in_python_is_not_in_the_checkpoint(tmp_path):
    module, runs = ToyMethod(optimizer=lambda groups: torch.optim.SGD(groups, 0.1, weight_decay=0.3)), trainer()
    runs.fit(module, toy_rows())
    (optimizer,) = runs.optimizers
    assert isinstance(optimizer, torch.optim.SGD)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    runs.save_checkpoint(tmp_path / "sgd.ckpt")
    assert torch.load(tmp_path / "sgd.ckpt", weights_only=True)["hyper_parameters"]["optimizer"] is None


def test_yaml_replaces_optimizer_and_schedule_and_the_checkpoint_rebuilds_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.yaml").write_text(
        "model:\n  class_path: ToyMethod\n  init_args:\n    vision: {width: 6}\n"
        "    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.25}}\n"
        "    lr_scheduler: {class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_size: 2, gamma: 0.5}}\n"
        "data: {class_path: ToyData}\n"
        "trainer: {max_epochs: 1, accelerator: cpu, enable_progress_bar: false, enable_model_summary: false}\n"
    )
    assert run("fit", "--config", "toy.yaml", "--model.init_args.optim.betas", "[0.5, 0.6]").status == 0
    path = next((tmp_path / "runs").rglob("last.ckpt"))
    saved = torch.load(path, weights_only=True)
    assert saved["hyper_parameters"]["vision"]["width"] == 6
    (state,) = saved["optimizer_states"]
    assert "momentum" in state["param_groups"][0]
    assert state["param_groups"][0]["lr"] == 0.125  # after 3 steps, halved once
    loaded = ToyMethod.load_from_checkpoint(path)
    assert loaded.vision == VisionSettings(width=6)
    assert loaded.optim.betas == (0.5, 0.6)
    assert isinstance(loaded.configure_optimizers()["optimizer"], torch.optim.SGD)


class Rates(Callback):
    """Records the learning rate of each optimizer step, and the scale after it."""

    def __init__(self):
        self.rates, self.scales = [], []

    def on_train_batch_start(self, trainer, *_):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.scales.append(pl_module.scale.item())


def test_the_papers_optimizer_follows_its_schedule_and_parameters_stay_in_bounds():
    noted = Rates()
    trainer(noted, max_epochs=2).fit(ToyMethod(), toy_rows())
    cosine = [0.1 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]
    assert noted.rates == pytest.approx([0.05, 0.1, *cosine])
    assert noted.scales == pytest.approx([1.01] * 6)


def test_initial_weights_are_evaluated_and_never_replace_a_checkpoint(checkpoint):
    module = ToyMethod(weights="ones")
    trainer().validate(module, toy_rows(), verbose=False)
    assert (module.student[1].weight == 1).all()
    restored = ToyMethod(VisionSettings(width=7), weights="ones")
    trainer(max_epochs=2).fit(restored, toy_rows(), ckpt_path=checkpoint)
    assert (restored.student[1].weight != 1).any()


def test_the_checkpoint_names_the_frozen_network_and_refuses_another(checkpoint, caplog):
    saved = torch.load(checkpoint, weights_only=True)
    assert saved["teacher"]["weights"] == "seed 0"
    assert not any(name.startswith("teacher") for name in saved["state_dict"])
    with pytest.raises(
        UserError, match=r"teacher that the checkpoint was trained with, linear of 'seed 0'.*give that one as"
    ):
        trainer(max_epochs=2).fit(ToyMethod(VisionSettings(width=7), teacher_seed=1), toy_rows(), ckpt_path=checkpoint)
    with caplog.at_level("INFO"):
        trainer(max_steps=1).fit(ToyMethod(), toy_rows())
    assert "The teacher is linear of 'seed 0'." in caplog.text


def test_evaluation_is_a_component():
    runs = trainer()
    runs.validate(ToyMethod(), toy_rows(), verbose=False)
    assert set(runs.callback_metrics) == {"val/loss", "val/top1", "val/top5"}
    predicted = runs.predict(ToyMethod(), toy_rows())
    assert torch.cat([batch["probabilities"] for batch in predicted]).shape == (ROWS, CLASSES)


def test_data_of_another_size_are_refused_before_the_network_sees_them():
    with pytest.raises(UserError, match="Expected images of 2 x 2 pixels, got 4 x 4 in the data"):
        trainer().fit(ToyMethod(), toy_rows(side=4))
