"""Runs of the classifier: resume, two processes, and the shipped configs on the command line."""

import math
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from lightning import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from support.data.images import draw_image, encoded
from support.methods.groups import merged
from support.methods.probe import (
    CLASSES,
    ENCODER,
    PLAIN,
    SIZE,
    shape_classes,
    shre_checkpoint,
    tiny_probe,
)
from support.methods.tiny_modules import trainer
from support.runs.command_line import run
from support.runs.distributed import run_ddp_fit, run_sharded_fit, whole_state

ROOT = Path(__file__).resolve().parents[3]


def fit(module, *callbacks, ckpt_path=None, data=None, **options):
    fitted = trainer(*callbacks, **{"limit_val_batches": 0, **options})
    fitted.fit(module, data or shape_classes(), ckpt_path=ckpt_path)
    return fitted


def rates(module):
    """Learning rate of each parameter, by name, as the optimizer starts from."""
    module._trainer = None
    names = {parameter: name for name, parameter in module.named_parameters()}
    optimizer = module.configure_optimizers()["optimizer"]
    return {names[p]: group["initial_lr"] for group in optimizer.param_groups for p in group["params"]}, optimizer


def loaded(**options):
    module = tiny_probe(seed=8, **options)
    module.load_initial_weights()
    return module


@pytest.mark.parametrize("linear_probe", [True, False])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, linear_probe):
    def make(seed):
        seed_everything(seed, verbose=False)
        return tiny_probe(seed, linear_probe=linear_probe)

    data = {"seed": None}
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=6, save_top_k=-1)  # inside the 2nd epoch
    options = {"max_epochs": 3, "limit_val_batches": 1.0}
    whole = fit(make(0), saver, enable_checkpointing=True, data=shape_classes(**data), **options)
    with pytest.warns(UserWarning, match="started with seed 0, this one with 1"):
        resumed = fit(make(1), ckpt_path=tmp_path / "step=6.ckpt", data=shape_classes(**data), **options)
    assert resumed.global_step == whole.global_step == 12
    expected, found = (fitted.lightning_module.state_dict() for fitted in (whole, resumed))
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    left, right = (fitted.optimizers[0].state_dict() for fitted in (whole, resumed))
    for number, state in left["state"].items():
        for name, tensor in state.items():
            assert torch.equal(right["state"][number][name], tensor), (number, name)
    assert left["param_groups"] == right["param_groups"]
    assert dict(resumed.callback_metrics) == dict(whole.callback_metrics)


def module_and_data(weights, linear_probe, batch_size=4):
    return tiny_probe(weights=weights, linear_probe=linear_probe, **PLAIN), shape_classes(batch_size=batch_size)


def saved(fitted):
    fitted.save_checkpoint(Path(fitted.default_root_dir) / f"{type(fitted.strategy).__name__}.ckpt")
    metrics = {name: value.item() for name, value in fitted.callback_metrics.items()}
    return {"state": whole_state(fitted.lightning_module), "metrics": metrics}


@pytest.mark.parametrize(
    ("run_fit", "linear_probe"),
    [(run_ddp_fit, True), pytest.param(run_sharded_fit, True, marks=pytest.mark.slow), (run_sharded_fit, False)],
)
def test_two_processes_train_as_one_process(tmp_path, run_fit, linear_probe):
    shre_checkpoint(tmp_path / "a.ckpt")
    arguments = (str(tmp_path / "a.ckpt"), linear_probe)
    module, data = module_and_data(*arguments, batch_size=8)
    one = fit(module, data=data, max_epochs=2, limit_val_batches=1.0)
    options = {"max_epochs": 2, "default_root_dir": str(tmp_path)}
    (found, _) = run_fit(module_and_data, options, make_args=arguments, collect=saved)
    for name, tensor in module.state_dict().items():
        pair = [found["state"][name], tensor]
        if name.endswith("attn.qkv.bias"):  # keys' bias has no gradient but rounding errors, which Adam makes steps of
            pair = [torch.cat([query, value]) for query, _, value in (each.chunk(3) for each in pair)]
        torch.testing.assert_close(*pair, rtol=1e-4, atol=2e-5, msg=name)
    for name in ("val/top1", "val/top5"):
        assert found["metrics"][name] == pytest.approx(one.callback_metrics[name].item()), name
    if run_fit is run_sharded_fit:
        again = loaded(weights=str(tmp_path / "ShardedStrategy.ckpt"))
        for name, tensor in again.encoder.state_dict().items():
            assert torch.equal(tensor, found["state"][f"encoder.{name}"]), name


def test_fine_tuning_learns_the_built_in_images():
    module = tiny_probe(
        linear_probe=False,
        vision={"width": 48, "depth": 2},
        optim={"learning_rate": 1e-2},
        **merged(PLAIN, {"mix": {"label_smoothing": 0.0}}),
    )
    fitted = fit(module, max_epochs=25, data=shape_classes(augment=False, length=16))
    assert fitted.callback_metrics["train/loss"] < 0.3 < math.log(CLASSES)


def _parquet(folder, name, count):
    rows = {
        "img": [{"bytes": encoded(draw_image(n)), "path": None} for n in range(count)],
        "fine_label": [n % 100 for n in range(count)],
    }
    features = datasets.Dataset.from_dict(rows).features.copy()
    features["img"] = datasets.Image()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / name)
    return str(folder / name)


@pytest.mark.parametrize("finetune", [False, True])
def test_shipped_configs_fit_test_and_predict_on_the_command_line(tmp_path, monkeypatch, finetune):
    monkeypatch.chdir(tmp_path)
    datasets.disable_progress_bars()
    encoder = shre_checkpoint(tmp_path / "a.ckpt")
    train, other = _parquet(tmp_path, "train.parquet", 24), _parquet(tmp_path, "other.parquet", 6)
    files = {"train": train, "validation": other, "test": other, "predict": other, "cache_dir": "cache"}
    size = {"init_args": {"size": SIZE}}
    small = {
        "model": {
            "init_args": {"vision": {n: v for n, v in ENCODER.items() if n != "image_size"}, "weights": "a.ckpt"}
        },
        "data": {
            "init_args": {**files, "image_size": SIZE, "global_batch_size": 8, "num_workers": 0}
            | {"train_transform": size, "eval_transform": size}
        },
        "trainer": {"accelerator": "cpu", "max_epochs": 2, "precision": "32-true"},
    }
    Path("small.yaml").write_text(yaml.safe_dump(small))
    names = ["probe", "probe_cifar100", *(["finetune"] if finetune else [])]
    configs = [word for name in names for word in ("--config", str(ROOT / f"configs/shre/{name}.yaml"))]
    ran = run("fit", *configs, "--config", "small.yaml")
    assert ran.status == 0, ran.err
    (last,) = Path("runs", f"{'shre_finetune' if finetune else 'shre_probe_cifar100'}_small").rglob("last.ckpt")
    content = torch.load(last, weights_only=True)
    for name, tensor in encoder.state_dict().items():
        same = torch.equal(content["state_dict"][f"encoder.{name}"], tensor)
        assert same == (not finetune or name == "pos_embed"), name
    assert content["state_dict"]["probe.linear.bias"].shape == (100,)
    rates = {group["initial_lr"] for group in content["optimizer_states"][0]["param_groups"]}
    assert min(rates) == pytest.approx(1e-3 * 0.75**7 if finetune else 1e-3)
    ran = run("test", "--ckpt_path", str(last))
    assert ran.status == 0, ran.err
    assert "test/top1" in ran.out
    ran = run("predict", "--ckpt_path", str(last))
    assert ran.status == 0, ran.err
    (table,) = Path().rglob("predictions.parquet")
    probabilities = pq.read_table(table).column("probability").to_pylist()
    assert len(probabilities) == 6
    assert all(0 < probability < 1 for probability in probabilities)


def test_shipped_configs_are_the_thesis_recipe():
    def composed(*names):
        words = [word for name in names for word in ("--config", str(ROOT / f"configs/shre/{name}.yaml"))]
        ran = run("fit", *words, "--print_config")
        assert ran.status == 0, ran.err
        return yaml.safe_load(ran.out)

    optim = {"learning_rate": 1e-3, "warmup_share": 0.1, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8}
    mix = {"mixup": 0.8, "cutmix": 1.0, "probability": 0.9, "switch_probability": 0.5, "label_smoothing": 0.1}
    vision = {"image_size": 224, "patch_size": 16, "width": 768, "depth": 6, "heads": 12, "post_norm": True}
    for names, probe, decay, classes in (
        (("probe",), True, 0.81, 1000),
        (("probe", "finetune"), False, 0.81, 1000),
        (("probe", "probe_cifar10"), True, 0.75, 10),
        (("probe", "probe_cifar10", "finetune"), False, 0.75, 10),
        (("probe", "probe_cifar100", "finetune"), False, 0.75, 100),
    ):
        config = composed(*names)
        model, data = config["model"]["init_args"], config["data"]["init_args"]
        assert (model["vision"], model["mix"]) == (vision, mix)
        assert model["optim"] == optim | {"layer_decay": decay}
        assert (model["linear_probe"], data["num_classes"]) == (probe, classes)
        assert (config["trainer"]["max_epochs"], config["trainer"]["devices"], data["global_batch_size"]) == (
            15,
            1,
            256,
        )
        sizes = {data[name]["init_args"]["size"] for name in ("train_transform", "eval_transform")}
        assert sizes == {224}
