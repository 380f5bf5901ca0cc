"""Order, position and state of the loaders under a real trainer."""

import contextlib
import gc
import itertools
import json
import os
import signal

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.trainer.states import TrainerFn

from support.runs.distributed import rank_trainer, run_distributed
from vlightning.common.errors import UserError
from vlightning.datamodules import ALBEFTrainTransform, ShapesDataModule
from vlightning.datamodules.base.mixing import Mix
from vlightning.datamodules.base.sampling import epoch_order


class Killed(Exception):
    pass


class Recorder(pl.LightningModule):
    """Trains one number and writes down what it is fed."""

    def __init__(self, kill_at=None, kill_in_validation=False, early_steps=False, cut_at=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen, self.sums, self.validated = [], [], []
        self.kill_at, self.kill_in_validation = kill_at, kill_in_validation
        self.early_steps, self.cut_at = early_steps, cut_at

    def configure_optimizers(self):
        if self.early_steps:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == self.cut_at else None

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["sample_index"].tolist())
        self.sums.append((batch["image"].double().sum().item(), batch["input_ids"].sum().item()))
        if self.kill_at is not None and len(self.seen) == self.kill_at:
            raise Killed
        return self.weight.sum()

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch["image_id"].tolist())
        if self.kill_in_validation and self.kill_at is not None and len(self.seen) >= self.kill_at:
            raise Killed


def data(**options):
    defaults = {"batch_size": 4, "length": 30, "eval_length": 6, "image_size": 16, "seed": 3, "rand_augment": True}
    return ShapesDataModule(**{**defaults, **options})


def trainer(folder, save_every=None, **options):
    callbacks = []
    if save_every:
        callbacks.append(
            pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=save_every, save_top_k=-1)
        )
    defaults = {
        "max_epochs": 3,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "callbacks": callbacks,
        "enable_checkpointing": bool(save_every),
        "default_root_dir": folder,
    }
    return pl.Trainer(**{**defaults, **options})


def fit(folder, module=None, save_every=None, ckpt_path=None, datamodule=None, **options):
    module = module or Recorder()
    run = trainer(folder, save_every, **options)
    with contextlib.suppress(Killed):
        run.fit(module, datamodule=datamodule or data(), ckpt_path=ckpt_path, weights_only=True)
    return module


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Runs without workers that are not killed, each made once."""
    runs = {}

    def run(**options):
        key = tuple(options.items())
        if key not in runs:
            runs[key] = fit(tmp_path_factory.mktemp("whole"), **options)
        return runs[key]

    return run


def test_training_reads_the_promised_order(uninterrupted):
    module = uninterrupted()
    for epoch in range(3):
        expected = epoch_order(3, epoch, Mix([30]))[:28].reshape(7, 4).tolist()
        assert module.seen[7 * epoch : 7 * epoch + 7] == expected


def test_images_and_captions_are_the_same_for_any_number_of_workers(tmp_path, uninterrupted):
    plain = uninterrupted(max_epochs=2)
    workers = fit(tmp_path, max_epochs=2, datamodule=data(num_workers=2))
    fresh = fit(tmp_path, max_epochs=2, datamodule=data(num_workers=2, persistent_workers=False))
    assert plain.seen == workers.seen == fresh.seen
    assert plain.sums == workers.sums == fresh.sums
    assert len(set(plain.sums)) == 14


CASES = {
    "mid-epoch": (4, {}),
    "mid-epoch with workers": (4, {"num_workers": 2}),
    "last batch of an epoch": (7, {"num_workers": 2}),
    "first batch of the second epoch": (8, {}),
    "limit as a number": (4, {"limit_train_batches": 3}),
    "limit as a share": (5, {"limit_train_batches": 0.6}),
    "accumulation": (2, {"accumulate_grad_batches": 2}),
    "validation within the epoch": (4, {"val_check_interval": 2}),
    "reloaded loaders": (8, {"reload_dataloaders_every_n_epochs": 1}),
    "steps asked for early": (4, {"early_steps": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_reads_on_where_the_killed_one_was(tmp_path, uninterrupted, case):
    saved, options = CASES[case][0], dict(CASES[case][1])
    workers, early = options.pop("num_workers", 0), options.pop("early_steps", False)
    accumulate = options.get("accumulate_grad_batches", 1)
    whole = uninterrupted(**options)
    done = saved * accumulate
    killed = fit(
        tmp_path / "killed",
        Recorder(kill_at=done + 1, early_steps=early),
        saved,
        datamodule=data(num_workers=workers),
        **options,
    )
    assert killed.seen == whole.seen[: done + 1]
    resumed = fit(
        tmp_path / "resumed",
        Recorder(early_steps=early),
        ckpt_path=tmp_path / "killed" / f"step={saved}.ckpt",
        datamodule=data(num_workers=workers, seed=99),
        **options,
    )
    assert resumed.seen == whole.seen[done:]
    assert resumed.sums == whole.sums[done:]


def test_a_run_killed_in_validation_reads_on(tmp_path, uninterrupted):
    whole = uninterrupted()
    killed = Recorder(kill_at=7, kill_in_validation=True)
    killed.on_validation_start = lambda: killed.trainer.save_checkpoint(tmp_path / "at.ckpt")
    killed.training_step = lambda batch, batch_idx: (
        killed.seen.append(batch["sample_index"].tolist()),
        killed.weight.sum(),
    )[1]
    fit(tmp_path / "killed", killed, datamodule=data(num_workers=2))
    assert killed.seen == whole.seen[:7]
    resumed = fit(tmp_path / "resumed", ckpt_path=tmp_path / "at.ckpt", datamodule=data(num_workers=2))
    assert resumed.seen == whole.seen[7:]


def test_reloaded_loaders_leave_no_workers_behind(tmp_path, started):
    alive = []

    class Counter(Recorder):
        def on_train_epoch_end(self):
            gc.collect()
            alive.append(len(started.children()))

    fit(
        tmp_path,
        Counter(),
        datamodule=data(num_workers=2),
        max_epochs=2,
        reload_dataloaders_every_n_epochs=1,
        limit_val_batches=0,
    )
    assert alive == [2, 2]
    assert not started.children()


def test_an_epoch_cut_short_is_followed_by_the_whole_next(tmp_path):
    module = fit(tmp_path, Recorder(cut_at=3), max_epochs=2)
    expected = [epoch_order(3, epoch, Mix([30]))[:12].reshape(3, 4).tolist() for epoch in (0, 1)]
    assert module.seen == expected[0] + expected[1]


def test_overfitting_reads_the_same_rows_each_epoch(tmp_path):
    module = fit(tmp_path, overfit_batches=2)
    assert module.seen[:2] == module.seen[2:4] == module.seen[4:]


def test_loading_leaves_the_training_generator_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    module = data()
    module.setup("fit")
    loader = module.train_dataloader()
    assert len(list(loader)) == 7
    assert len(list(module.val_dataloader())) == 2
    assert torch.equal(torch.rand(1), expected)


def test_evaluation_reads_everything_once_each_time(tmp_path):
    module = fit(tmp_path, max_epochs=2, datamodule=data(num_workers=1))
    assert sorted(itertools.chain(*module.validated)) == sorted([*range(6), *range(6)])


def test_fitting_without_validation(tmp_path):
    class TrainOnly(ShapesDataModule):
        def open_split(self, split):
            return super().open_split(split) if split == "train" else None

    module = fit(tmp_path, max_epochs=1, datamodule=TrainOnly(batch_size=4, length=8, image_size=16))
    assert len(module.seen) == 2
    assert module.validated == []
    with pytest.raises(UserError, match="Expected a test source for 'test', got none"):
        TrainOnly().setup(TrainerFn.TESTING)  # what the Trainer passes prints as its member's name


def test_checkpoints_hold_seed_and_tokenizer_as_plain_data(tmp_path):
    fit(tmp_path, save_every=2, max_epochs=1, datamodule=data(train_transform=ALBEFTrainTransform(16)))
    saved = torch.load(tmp_path / "step=2.ckpt", weights_only=True)
    state = saved["ShapesDataModule"]
    assert state["seed"] == 3
    assert json.loads(state["tokenizer"])["model"]["type"] == "WordPiece"
    assert saved["datamodule_hyper_parameters"]["batch_size"] == 4
    assert "train_transform" not in saved["datamodule_hyper_parameters"]
    again = ShapesDataModule.load_from_checkpoint(tmp_path / "step=2.ckpt", weights_only=True)
    assert (again.content[:2], again.batch_size) == ((30, 6), 4)


def test_the_checkpoints_seed_wins_with_a_warning():
    module = data(seed=1)
    state = data(seed=3).state_dict()
    with pytest.warns(UserWarning, match="data seed 1 is replaced by 3 from the checkpoint"):
        module.load_state_dict(state)
    assert module.run_seed == 3
    assert module.state_dict()["seed"] == 3


def test_the_checkpoints_tokenizer_is_used():
    one, other = data(), data()
    one.setup("fit")
    assert one.tokenizer is one.tokenizer
    state = one.state_dict()
    changed = state["tokenizer"].replace('"circle"', '"cercle"')
    other.setup("fit")
    assert "circle" in other.tokenizer.get_vocab()
    other.load_state_dict({**state, "tokenizer": changed})
    assert "cercle" in other.tokenizer.get_vocab()
    assert other.state_dict()["tokenizer"] == changed


def test_a_changed_global_batch_is_said():
    one, other = data(), data(batch_size=5)
    one.setup("fit")
    other.setup("fit")
    with pytest.warns(UserWarning, match=r"global batch of 4 from 30 training rows, this run has 5 from 30"):
        other.load_state_dict(one.state_dict())


def test_the_seed_defaults_to_lightnings(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "17")
    assert ShapesDataModule().run_seed == 17
    assert ShapesDataModule(seed=4).run_seed == 4
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert ShapesDataModule().run_seed == 0


def test_wrong_arguments_are_named():
    with pytest.raises(UserError, match=r"data.batch_size of at least 1, got 0"):
        data(batch_size=0)
    with pytest.raises(UserError, match=r"data.max_bad_share from 0 to 1, got 2"):
        data(max_bad_share=2)
    with pytest.raises(UserError, match=r"data.seed of at least 0 and less than 4294967296, got 4294967296"):
        data(seed=2**32)
    module = data(batch_size=31)
    module.setup("fit")
    with pytest.raises(UserError, match=r"at least one global batch of 31 training rows .* got 30"):
        module.train_dataloader()
    module = data(vocab_size=150)
    module.setup("fit")
    assert len(module.tokenizer) <= 150


def test_a_given_tokenizer_larger_than_vocab_size_is_an_error(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(50))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    module = data(tokenizer=str(tmp_path / "vocab.txt"), vocab_size=54)
    with pytest.raises(UserError, match=r"at most data.vocab_size=54 entries in the tokenizer .* got 55"):
        _ = module.tokenizer
    assert data(tokenizer=str(tmp_path / "vocab.txt"), vocab_size=55).special_token_ids["cls"] == 2


def test_prediction_tells_writers_what_each_batch_holds(tmp_path):
    class Writer(pl.callbacks.BasePredictionWriter):
        def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
            self.found = predictions, batch_indices

    class Predictor(Recorder):
        def predict_step(self, batch, batch_idx):
            return batch["sample_index"].tolist()

    writer = Writer("epoch")
    trainer(tmp_path, callbacks=[writer]).predict(Predictor(), datamodule=data(num_workers=1))
    predictions, indices = writer.found
    assert predictions == indices[0] == [[0, 1, 2], [3, 4, 5]]


class Shares(Recorder):
    """Writes down the samples of each split."""

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch["sample_index"].tolist())

    def predict_step(self, batch, batch_idx):
        self.predicted.append(batch["sample_index"].tolist())


def shares_of_one_rank():
    """What this rank reads, with and without Lightning's own sampler."""
    found = []
    for injected in (True, False):
        module, module.predicted = Shares(), []
        shapes = ShapesDataModule(batch_size=2, length=30, eval_length=7, image_size=16, seed=3)
        run = rank_trainer("ddp", max_epochs=2, num_sanity_val_steps=0, use_distributed_sampler=injected)
        run.fit(module, datamodule=shapes)
        run.predict(module, datamodule=shapes, return_predictions=False)
        found.append({"train": module.seen, "val": module.validated, "predict": module.predicted})
    return found


def test_two_processes_divide_the_data_whatever_lightning_would_inject():
    for seen in zip(*run_distributed(shares_of_one_rank), strict=True):
        union = [one + other for one, other in zip(seen[0]["train"], seen[1]["train"], strict=True)]
        expected = [epoch_order(3, epoch, Mix([30]))[:28].reshape(7, 4).tolist() for epoch in (0, 1)]
        assert union == expected[0] + expected[1]
        for split, passes in (("val", 2), ("predict", 1)):
            both = itertools.chain(*seen[0][split], *seen[1][split])
            assert sorted(both) == sorted(list(range(7)) * passes)
            assert len(seen[0][split]) == len(seen[1][split])
        assert np.ptp([len(batch) for batch in seen[0]["val"]]) <= 1


def test_the_command_line_records_transforms_by_name(tmp_path):
    class Transformed(Recorder):
        pass

    transform = {"class_path": "vlightning.datamodules.ALBEFTrainTransform", "init_args": {"size": 16}}
    section = {
        "class_path": "vlightning.datamodules.ShapesDataModule",
        "init_args": {"train_transform": transform, "batch_size": 4},
    }
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"data": section}))
    cli = LightningCLI(
        Transformed,
        pl.LightningDataModule,
        subclass_mode_data=True,
        run=False,
        save_config_callback=None,
        args=[f"--config={config}"],
    )
    saved = dict(cli.datamodule.hparams)
    assert saved["_class_path"] == "vlightning.datamodules.ShapesDataModule"
    assert saved["train_transform"]["init_args"]["size"] == 16
    torch.save(saved, tmp_path / "saved.pt")
    assert torch.load(tmp_path / "saved.pt", weights_only=True) == saved


def test_loader_workers_outlast_the_signals_of_a_run(started):
    shapes = data(num_workers=2, length=120)
    shapes.setup("fit")
    batches = iter(shapes.train_dataloader())
    whole = [next(batches)["sample_index"].tolist() for _ in range(2)]  # one of each worker, which has begun then
    workers = started.children()
    assert len(workers) == 2
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        for worker in workers:
            os.kill(worker.pid, number)
    whole += [batch["sample_index"].tolist() for batch in batches]
    assert len(whole) == 30
    shapes.teardown("fit")
