"""Zero-shot accuracies in whole runs: over processes, sharded, from the command line, without an effect on training."""

import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader

from support.methods.albef import IMAGE_SIZE, tiny_albef
from support.methods.tiny_modules import trainer
from support.methods.zero_shot import (
    IMAGES,
    NAMES,
    Images,
    Linear,
    Pairs,
    Unquiet,
    callback,
    found,
    shapes,
)
from support.runs.command_line import run
from support.runs.distributed import rank_trainer, run_distributed
from vlightning.common.errors import UserError
from vlightning.datamodules import ShapesDataModule


class Drawing(Images):
    """Draws from every global generator, in every place."""

    def setup(self, stage):
        self.draw()

    def draw(self):
        return torch.rand(1), np.random.rand(), random.random()

    def split(self, length):
        self.draw()
        rows = [{"image": image, "label": label} for image, label in zip(self.image, self.label, strict=True)]
        return DataLoader(rows[:length], batch_size=8, shuffle=True)


def test_training_is_bit_identical_with_and_without_the_callback():
    ends = []
    for callbacks in ([], [callback(Drawing())]):
        torch.manual_seed(5), np.random.seed(5), random.seed(5)
        module = Unquiet()
        trainer(*callbacks, max_epochs=2, val_check_interval=2).fit(module, Pairs())
        assert bool(module.record.images) == bool(callbacks)
        ends.append((module.state_dict(), torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()))
    for name, value in ends[0][0].items():
        assert torch.equal(value, ends[1][0][name]), name
    assert torch.equal(ends[0][1], ends[1][1])
    assert ends[0][2:] == ends[1][2:]


class Watcher(ModelCheckpoint):
    """Records the metrics that a monitor sees."""

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.saw = [*getattr(self, "saw", []), "val/zero_shot_top1" in trainer.callback_metrics]
        super().on_validation_end(trainer, pl_module)


def test_every_second_epoch_can_be_monitored(tmp_path):
    module = Linear()
    best = Watcher(tmp_path, monitor="val/zero_shot_top1", mode="max", every_n_epochs=2, save_top_k=-1)
    runs = trainer(callback(every_n_epochs=2), best, max_epochs=5, enable_checkpointing=True, num_sanity_val_steps=0)
    runs.fit(module, Pairs())
    assert module.record.images == 2 * IMAGES
    assert best.saw == [False, True, True, True, True]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("options", [{"num_sanity_val_steps": 2, "limit_train_batches": 0}, {"fast_dev_run": True}])
def test_sanity_check_and_fast_dev_run_use_one_batch_and_one_template(options):
    module = Linear()
    data = Images(labels=torch.full((IMAGES,), 6))
    runs = trainer(callback(data, every_n_epochs=9), **options)
    runs.fit(module, Pairs())
    assert (module.record.images, module.record.texts) in [(8, [7]), (0, [])]
    if "fast_dev_run" not in options:
        assert module.record.images == 8
        assert found(runs) == {}
    with pytest.raises(UserError, match="Expected labels from 0 to 5"):
        trainer(callback(data, class_names=NAMES[:6]), **options).fit(module, Pairs())


class Downloaded(Images):
    """Data whose preparation takes time; one process prepares it."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def prepare_data(self):
        time.sleep(0.3)
        (self.folder / f"by-{os.getpid()}").touch()

    def setup(self, stage):
        assert len(list(self.folder.iterdir())) == 1


def both_kinds(folder, make):
    """Return metrics and numbers of encoded images and texts for distributed data and for a plain loader."""
    ends = []
    for each in (callback(shapes(), class_names=None), callback(Downloaded(folder))):
        module, runs = Linear(), make(callbacks=[each])
        runs.validate(module, Pairs(), verbose=False)
        ends.append((found(runs), module.record.images, sum(module.record.texts)))
    return ends


def both_on_rank(folder):
    return both_kinds(folder, lambda **options: rank_trainer("ddp", **options))


def test_two_processes_equal_one(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    (shared, *shared_work), (plain, *plain_work) = both_kinds(one, lambda callbacks: trainer(*callbacks))
    assert (shared_work, plain_work) == ([43, 3 * 40], [IMAGES, 3 * 7])
    for ends, images in zip(run_distributed(both_on_rank, two), (22, 21), strict=True):
        (found_shared, *shared_work), (found_plain, *plain_work) = ends
        assert found_shared == pytest.approx(shared, abs=1e-4)
        assert found_plain == pytest.approx(plain, abs=1e-4)
        assert (shared_work, plain_work) == ([images, 3 * 20], [IMAGES, 3 * 4])


def refused_on_rank():
    try:
        rank_trainer("ddp", callbacks=[callback(shapes(), class_names=NAMES[:6])]).validate(
            Linear(), Pairs(), verbose=False
        )
    except UserError as error:
        return str(error)


def test_invalid_labels_in_one_process_stop_both():
    first, second = run_distributed(refused_on_rank)
    assert first == second
    assert "labels from 0 to 5" in first
    assert "got 34 of 43 labels outside" in first


class Split(Linear):
    def configure_model(self):
        pass


def layers_shared_on_rank():
    runs = rank_trainer("ddp", callbacks=[callback()])
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, process_group_backend="gloo")
    strategy.cluster_environment = runs.strategy.cluster_environment
    from lightning import Trainer

    try:
        Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, callbacks=[callback()]).validate(
            Split(), Pairs(), verbose=False
        )
    except UserError as error:
        return str(error)


def test_tensor_parallel_processes_are_refused():
    for sentence in run_distributed(layers_shared_on_rank):
        assert "got 2 processes with 1 models" in sentence


def albef_and_shapes():
    pairs = ShapesDataModule(
        image_size=IMAGE_SIZE, length=16, eval_length=8, batch_size=4, vocab_size=200, max_tokens=16, seed=0
    )
    return tiny_albef(text={"vocab_size": 200}, rerank={"k": 0}), pairs


def albef_on_rank(kind):
    runs = rank_trainer(kind, callbacks=[callback(shapes(), class_names=None)])
    runs.validate(*albef_and_shapes(), verbose=False)
    return found(runs)


def test_a_sharded_albef_equals_an_unsharded_one():
    runs = trainer(callback(shapes(), class_names=None))
    runs.validate(*albef_and_shapes(), verbose=False)
    for metrics in run_distributed(albef_on_rank, "sharded"):
        assert metrics == pytest.approx(found(runs), abs=1e-4)


SMALL = """
model:
  init_args:
    vision: {width: 16, depth: 1, heads: 2}
    text: {width: 16, heads: 2, ffn_width: 32, depth: 1}
    contrast: {embed_dim: 8, queue_size: 16}
data: {init_args: {image_size: 16, batch_size: 8, num_workers: 0, length: 16, eval_length: 8}}
trainer: {max_epochs: 1, enable_progress_bar: false, enable_model_summary: false, logger: {init_args: {name: small}}}
"""
QUICKSTART = str(Path(__file__).parents[3] / "configs/albef/quickstart.yaml")


def test_albef_on_the_command_line_and_again_from_its_saved_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(SMALL)
    Path("names.txt").write_text("\n".join(f"thing {number}" for number in range(40)))
    ran = run(
        *("fit", "--config", QUICKSTART, "--config", "small.yaml", "--checkpoint.monitor", "val/zero_shot_top1"),
        *("--trainer.callbacks+=ZeroShotClassification", "--trainer.callbacks.data=ShapeClassesDataModule"),
        *("--trainer.callbacks.data.eval_length=40", "--trainer.callbacks.templates=simple"),
        *("--trainer.callbacks+=ZeroShotClassification", "--trainer.callbacks.data=ShapeClassesDataModule"),
        *("--trainer.callbacks.name=other", "--trainer.callbacks.class_names=names.txt"),
        *('--trainer.callbacks.templates=["a {}", "the {}"]', "--trainer.callbacks.data.eval_length=80"),
    )
    assert ran.status == 0, ran.err
    checkpoints = Path("runs/small/version_0/checkpoints")
    (best,) = checkpoints.glob("best-step*.ckpt")
    state = torch.load(best, weights_only=True)["callbacks"]
    (score,) = (s["best_model_score"] for s in state.values() if s.get("monitor") == "val/zero_shot_top1")
    assert 0 <= float(score) <= 100
    saved = yaml.safe_load(Path("runs/small/version_0/config.yaml").read_text())
    first, second = (each["init_args"] for each in saved["trainer"]["callbacks"])
    assert (first["templates"], second["templates"]) == ("simple", ["a {}", "the {}"])
    assert first["data"]["class_path"].endswith("ShapeClassesDataModule")
    assert first["data"]["init_args"]["eval_length"] == 40
    ran = run("fit", "--config", "runs/small/version_0/config.yaml", "--trainer.max_epochs", "1")
    assert ran.status == 0, ran.err
    assert list(Path("runs/small/version_1/checkpoints").glob("best-step*.ckpt"))
    ran = run("test", "--config", "runs/small/version_0/config.yaml", "--ckpt_path", str(best))
    assert ran.status == 0, ran.err
    assert {"test/zero_shot_top1", "test/other_class_recall"} <= set(ran.out.split())
