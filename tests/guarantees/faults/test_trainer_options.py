"""Options of the Trainer work with every method: each pair of a method and an option, and of two options, in a run."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, EMAWeightAveraging, WeightAveraging
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.plugins import MixedPrecision, Precision

from support.methods.methods import METHODS, OTHERS
from support.runs.command_line import run
from vlightning.callbacks import CompileCallback
from vlightning.common.errors import UserError

EVERY = METHODS | OTHERS
BUILDERS = {**METHODS, "clip": OTHERS["clip"]}
OPTIONS: dict[str, tuple[Any, ...]] = {
    "method": tuple(BUILDERS),
    "clipping": ("none", "norm", "value"),
    "output": ("none", "csv", "wandb", "barebones"),
    "compiled": (False, True),
    "average": ("none", "weights", "ema"),
    "accumulation": (1, 2),
    "overfit_batches": (0, 2),
    "precision": ("32-true", "bf16-mixed", "16-mixed"),
    "max_time": (None, "00:00:10:00"),
}
STEPS = 2
LATE = ("mmlg", "shre")
"""Methods that load a frozen network after Lightning's weight averaging has copied them."""


def covering_rows() -> list[dict[str, Any]]:
    """Rows in which each pair of values of two options occurs: the row with the most new pairs, again and again."""
    names = list(OPTIONS)
    places = itertools.combinations(range(len(names)), 2)
    open_pairs = {(i, a, j, b) for i, j in places for a in OPTIONS[names[i]] for b in OPTIONS[names[j]]}
    rows = []
    while open_pairs:
        i, a, j, b = min(open_pairs, key=repr)
        row = {i: a, j: b}
        for place in range(len(names)):
            if place in row:
                continue

            chosen = list(row.items())
            gains = {
                value: sum(
                    ((k, v, place, value) if k < place else (place, value, k, v)) in open_pairs for k, v in chosen
                )
                for value in OPTIONS[names[place]]
            }
            row[place] = max(gains, key=gains.__getitem__)
        open_pairs -= {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(names)), 2)}
        rows.append({names[place]: row[place] for place in sorted(row)})
    return rows


ROWS = covering_rows()


class Losses(Callback):
    """Keeps the losses of the batches, in their types."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.found.append(outputs["loss"].detach())


def test_the_rows_have_each_pair():
    for one, other in itertools.combinations(OPTIONS, 2):
        pairs = set(itertools.product(OPTIONS[one], OPTIONS[other]))
        assert {(row[one], row[other]) for row in ROWS} == pairs
    assert len(ROWS) <= 30


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Teachers and data of the methods, written once."""
    folder = tmp_path_factory.mktemp("outside")
    found = {}
    for name, method in EVERY.items():
        (folder / name).mkdir()
        found[name] = method.prepare(folder / name)
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_a_run_with_these_options_trains(row: dict[str, Any], outside: dict[str, Any], tmp_path: Path):
    name = row["method"]
    module, data = BUILDERS[name].build(outside[name], seed=0, batch_size=4, num_workers=0)
    losses = Losses()
    callbacks: list[Callback] = [losses]
    if row["average"] == "weights":
        callbacks.append(WeightAveraging(use_buffers=False))
    elif row["average"] == "ema":
        callbacks.append(EMAWeightAveraging(use_buffers=False))
    if row["compiled"]:
        callbacks.append(CompileCallback(backend="eager"))  # inductor takes minutes
    options: dict[str, Any] = {
        "accumulate_grad_batches": row["accumulation"],
        "overfit_batches": row["overfit_batches"],
        "precision": row["precision"],
        "max_time": row["max_time"],
    }
    if row["precision"] == "16-mixed":  # which Lightning makes bf16 on a CPU, unless the plugin has a scaler
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=1)
        options |= {"precision": None, "plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    if row["clipping"] != "none":
        options |= {"gradient_clip_val": 0.01, "gradient_clip_algorithm": row["clipping"]}
    if row["output"] == "barebones":
        options["barebones"] = True
    else:
        loggers = {"csv": lambda: CSVLogger(tmp_path), "wandb": lambda: WandbLogger(save_dir=tmp_path, offline=True)}
        logger = loggers.get(row["output"], lambda: False)()
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        options |= {"logger": logger, "log_every_n_steps": 1, "num_sanity_val_steps": 0, **quiet}
    runs = Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        limit_val_batches=0,
        callbacks=callbacks,
        default_root_dir=tmp_path,
        **options,
    )
    if row["average"] != "none" and name in LATE:
        with pytest.raises(UserError, match=r"Expected EMACallback with a .* that loads a frozen network"):
            runs.fit(module, data)
        wandb.finish()  # or the next logger goes on with this run
        return
    before = {key: weight.detach().clone() for key, weight in module.named_parameters() if weight.requires_grad}
    runs.fit(module, data)
    assert runs.global_step == STEPS
    assert len(losses.found) == STEPS * row["accumulation"]
    assert torch.stack(losses.found).isfinite().all()
    if row["precision"] == "16-mixed":  # no step was skipped: the scale doubled after each
        assert runs.precision_plugin.scaler.get_scale() == 2.0**4 * 2**STEPS
    if row["average"] == "none":  # otherwise the module has the average of the steps
        assert any(not torch.equal(weight, before[key]) for key, weight in module.named_parameters() if key in before)
    if row["output"] == "wandb":
        logged = runs.logger.experiment
        names = logged.summary.keys()
        assert any(name.startswith("train/") for name in names)
        assert list(tmp_path.rglob("run-*.wandb"))
        logged.finish()
    if row["output"] == "csv":
        assert "train/" in next(tmp_path.rglob("metrics.csv")).read_text().splitlines()[0]


LOSS_TYPES = {"32-true": torch.float32, "64-true": torch.float64, "bf16-true": torch.float32, "16-true": torch.float32}
WITH_AVERAGE = ("albef", "albef_fine_tuning", "albef_vqa", "cocord", "entailment", "mobileclip", "nlvr")
"""Methods whose momentum teacher or average `bf16-true` would round."""


class Engine(Precision):
    """Stands in for Lightning's plugin of TransformerEngine, a package for some GPUs."""

    precision = "transformer-engine"


def one_step(name: str, prepared: Any, precision: str | Precision, folder: Path) -> tuple[Any, Any, Trainer]:
    """Return module, data and Trainer of one step and a validation."""
    module, data = EVERY[name].build(prepared, seed=0, batch_size=4, num_workers=0)
    losses = Losses()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    plugin = {"plugins": [precision]} if isinstance(precision, Precision) else {"precision": precision}
    limits = {"max_steps": 1, "limit_val_batches": 2, "limit_test_batches": 2, "num_sanity_val_steps": 0}
    runs = Trainer(
        accelerator="cpu", logger=False, callbacks=[losses], default_root_dir=folder, **plugin, **limits, **quiet
    )
    return module, data, runs


@pytest.mark.parametrize("name", EVERY)
def test_each_precision_trains_and_evaluates_or_is_refused_in_one_sentence(
    name: str, outside: dict[str, Any], tmp_path: Path
):
    found: dict[str, float] = {}
    for precision, dtype in LOSS_TYPES.items():
        module, data, runs = one_step(name, outside[name], precision, tmp_path)
        if precision == "16-true" or (precision == "bf16-true" and name in WITH_AVERAGE):
            with pytest.raises(UserError, match=f"^Expected a .* to train {type(module).__name__}, .* {precision}"):
                runs.fit(module, data)
            module, data, runs = one_step(name, outside[name], precision, tmp_path)
        else:
            runs.fit(module, data)
            (loss,) = runs.callbacks[0].found
            assert loss.dtype == dtype
            found[precision] = float(loss)
        if module.evaluation is not None:
            runs.test(module, data, verbose=False)
    tolerance = 0.05 if name == "new_image" else 0.02  # BatchNorm of two rows, in bfloat16
    assert list(found.values()) == pytest.approx([found["32-true"]] * len(found), rel=tolerance)


def test_an_engine_that_replaces_layers_is_refused(outside: dict[str, Any], tmp_path: Path):
    module, data, runs = one_step("albef", outside["albef"], Engine(), tmp_path)
    for stage in (runs.fit, runs.test):
        with pytest.raises(UserError, match=r"^Expected layers of torch in ALBEFModule, got .* transformer-engine"):
            stage(module, data)


def test_a_precision_without_its_package_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = Path(__file__).resolve().parents[3] / "configs/albef/quickstart.yaml"
    ran = run("fit", "--config", config, "--trainer.precision=transformer-engine", "--data.length=64")
    assert ran.status == 1
    assert "TransformerEnginePrecision needs the package 'transformer_engine'" in ran.sentence


@pytest.mark.parametrize("name", BUILDERS)
def test_the_batch_size_finder_changes_the_batches(name: str, outside: dict[str, Any], tmp_path: Path):
    module, data = BUILDERS[name].build(outside[name], seed=0, batch_size=2, num_workers=0)
    finder = BatchSizeFinder(mode="power", steps_per_trial=1, init_val=2, max_trials=2)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    runs = Trainer(
        accelerator="cpu",
        max_steps=1,
        limit_val_batches=0,
        enable_checkpointing=False,
        callbacks=[finder],
        default_root_dir=tmp_path,
        **quiet,
    )
    rows = []
    transfer = module.on_train_batch_start
    module.on_train_batch_start = lambda batch, index: (
        rows.append(len(batch["sample_index"])),
        transfer(batch, index),
    )[1]
    runs.fit(module, data)
    assert data.batch_size == rows[-1] == 4
    assert runs.global_step == 1


def test_the_learning_rate_finder_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = Path(__file__).resolve().parents[3] / "configs/albef/quickstart.yaml"
    ran = run("fit", "--config", config, "--trainer.callbacks+=LearningRateFinder", "--data.length=64")
    assert ran.status == 1
    assert ran.sentence.startswith("Expected a learning rate from the model's options, got Lightning's LearningRate")
