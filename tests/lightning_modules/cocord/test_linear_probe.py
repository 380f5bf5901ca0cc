"""Linear probing: a frozen network, each training image encoded once, and SGD on one layer."""

from pathlib import Path

import datasets
import pytest
import torch
import torch.nn.functional as F
import yaml
from lightning import Trainer
from lightning.pytorch.callbacks import Callback

from support.data.images import draw_image, encoded
from support.methods.cocord import CLASSES, OFF, teacher_file
from support.runs.command_line import export, run
from support.runs.distributed import run_ddp_fit
from vlightning.common.errors import UserError
from vlightning.datamodules import ImageClassificationDataModule
from vlightning.datamodules.base.mixing import Mix
from vlightning.datamodules.base.sampling import epoch_order
from vlightning.datamodules.labels.rows import LabelTable
from vlightning.lightning_modules import CoCoRDLinearProbeModule, CoCoRDModule
from vlightning.lightning_modules.networks.classifier_files import load_classifier, read_classifier
from vlightning.lightning_modules.networks.classifiers import build_classifier

ROOT = Path(__file__).resolve().parents[3]
PROBED, SEED, BATCH = 3, 11, 4  # classes of the probe, run seed, images in a batch


@pytest.fixture(autouse=True)
def quiet_library():
    datasets.disable_progress_bars()


def _parquet(folder, name, count, bad=()):
    rows = {
        "image": [{"bytes": b"?" if n in bad else encoded(draw_image(n)), "path": None} for n in range(count)],
        "label": [n % PROBED for n in range(count)],
    }
    features = datasets.Dataset.from_dict(rows).features.copy()
    features["image"] = datasets.Image()
    path = folder / name
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    return str(path)


def _data(folder, bad=(), batch_size=BATCH, written=False):
    if not written:
        _parquet(folder, "train.parquet", 24, bad)
        _parquet(folder, "validation.parquet", 6)
    return ImageClassificationDataModule(
        train=str(folder / "train.parquet"),
        validation=str(folder / "validation.parquet"),
        test=str(folder / "validation.parquet"),
        num_classes=PROBED,
        batch_size=batch_size,
        num_workers=0,
        seed=SEED,
        cache_dir=str(folder / "cache"),
        max_bad_share=1,
    )


def _module(folder, **changes):
    weights = changes.pop("weights", None) or teacher_file(folder, "resnet8")
    torch.manual_seed(2)
    arguments = {"network": "resnet8", "network_classes": CLASSES, "num_classes": PROBED, "weights": weights}
    return CoCoRDLinearProbeModule(**arguments | changes)


def _fit(module, data, epochs=3, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    ckpt_path = options.pop("ckpt_path", None)
    trainer = Trainer(accelerator="cpu", max_epochs=epochs, **quiet | {"enable_checkpointing": False} | options)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return trainer


def _copied(state):
    return {name: tensor.clone() for name, tensor in state.items()}


def test_each_training_image_is_read_and_encoded_once_in_all_epochs(tmp_path, monkeypatch):
    module, data = _module(tmp_path), _data(tmp_path)
    assert module.views == ()
    decoded, batches, steps = [], [], []
    encode, decode, step = module.encode, LabelTable.image, module.training_step

    def counted_encode(image):
        batches.append(len(image))
        return encode(image)

    def counted_decode(table, row):
        decoded.append(row)
        return decode(table, row)

    def watched_step(batch, batch_idx):
        steps.append((set(batch), len(decoded)))
        return step(batch, batch_idx)

    monkeypatch.setattr(module, "encode", counted_encode)
    monkeypatch.setattr(module, "training_step", watched_step)
    monkeypatch.setattr(LabelTable, "image", counted_decode)
    _fit(module, data, num_sanity_val_steps=0, limit_val_batches=0)
    assert sum(batches) == 24
    # Opening a split decodes one image, of each split's first row, to see that some can be used.
    assert sorted(decoded) == sorted([0, 0, *range(24)])
    names = {"label", "sample_index", "feature_row", "feature_label"}
    assert steps == [(names, 26)] * (3 * 24 // BATCH)


def test_backbone_stays_bit_for_bit_equal(tmp_path):
    module = _module(tmp_path)
    module.setup("fit")
    before = _copied(module.backbone.network.state_dict())
    file = read_classifier(teacher_file(tmp_path, "resnet8"))
    assert any("running_mean" in name and tensor.any() for name, tensor in before.items())
    linear = module.linear.weight.detach().clone()
    _fit(module, _data(tmp_path))
    after = module.backbone.network.state_dict()
    assert before.keys() == after.keys() == file.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(after[name], tensor) for name, tensor in file.items())
    assert not torch.equal(module.linear.weight, linear)
    assert not any(part.training for part in module.backbone.modules())


def _expected(module, data, epochs, bad):
    """Weight and bias after SGD as its definition has it, on features that are computed here; and the losses."""
    network = build_classifier("resnet8", CLASSES)
    load_classifier(network, read_classifier(module.hparams["weights"]), "the file")
    network.eval()
    data.setup("fit")
    table = data._opened("train")
    values = [p.detach().clone() for p in module.linear.parameters()]
    speeds = [torch.zeros_like(value) for value in values]
    losses = []
    for epoch in range(epochs):
        rate = module.optim.learning_rate * 0.1 ** sum(epoch >= m for m in module.optim.lr_milestones)
        order = epoch_order(SEED, epoch, Mix([len(table)])).tolist()
        for start in range(0, len(order) - BATCH + 1, BATCH):
            rows = [row for row in order[start : start + BATCH] if row not in bad]
            if rows:
                with torch.no_grad():
                    features = network.forward_features(
                        torch.stack([data.eval_transform(table.image(row)) for row in rows])
                    )
                weight, bias = (value.requires_grad_() for value in values)
                loss = F.cross_entropy(features @ weight.T + bias, torch.tensor([row % PROBED for row in rows]))
                gradients = torch.autograd.grad(loss, (weight, bias))
                losses.append(loss.item())
            else:
                gradients = [torch.zeros_like(value) for value in values]
            values = [value.detach() for value in values]
            for number, gradient in enumerate(gradients):
                speeds[number] = 0.9 * speeds[number] + gradient + 5e-4 * values[number]
                values[number] = values[number] - rate * speeds[number]
    return values, losses


@pytest.mark.parametrize("bad", [(), (0, 5, 23)])
def test_training_is_sgd_on_the_features_of_a_frozen_network(bad, tmp_path):
    module = _module(tmp_path, optim={"lr_milestones": [2, 3]})
    (weight, bias), losses = _expected(module, _data(tmp_path, bad), epochs=4, bad=bad)
    assert sum(losses[-6:]) < sum(losses[:6])
    data = _data(tmp_path, bad)
    images = data.every_image
    if bad:  # the order in which images are encoded is not specified
        data.every_image = lambda split: reversed(list(images(split)))
    trainer = _fit(module, data, epochs=4)
    torch.testing.assert_close(module.linear.weight.detach(), weight, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(module.linear.bias.detach(), bias, rtol=1e-4, atol=1e-6)
    assert trainer.callback_metrics["train/left_out"] == len(bad)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05 * 0.01)


def test_batch_without_any_feature_changes_the_layer_by_momentum_and_decay_only(tmp_path):
    order = epoch_order(SEED, 0, Mix([24])).tolist()
    bad = tuple(order[BATCH : 2 * BATCH])
    module = _module(tmp_path)
    (weight, _), _ = _expected(module, _data(tmp_path, bad), epochs=1, bad=bad)
    _fit(module, _data(tmp_path, bad), epochs=1)
    torch.testing.assert_close(module.linear.weight.detach(), weight, rtol=1e-4, atol=1e-6)


def _rank_make(folder, bad):
    return _module(Path(folder)), _data(Path(folder), bad, batch_size=BATCH // 2, written=True)


def _rank_result(trainer):
    return trainer.lightning_module.linear.weight.detach(), trainer.callback_metrics["val/top1"]


def test_two_processes_train_as_one_process(tmp_path):
    bad = (1, 20)
    alone = _module(tmp_path)
    trainer = _fit(alone, _data(tmp_path, bad), epochs=2)
    for weight, top1 in run_ddp_fit(
        _rank_make, {"max_epochs": 2}, make_args=(str(tmp_path), bad), collect=_rank_result
    ):
        torch.testing.assert_close(weight, alone.linear.weight.detach(), rtol=1e-4, atol=1e-6)
        assert top1 == trainer.callback_metrics["val/top1"]


class _Accuracy(Callback):
    """Accuracy as counted here."""

    def __init__(self):
        self.hits = []

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        with torch.no_grad():
            self.hits += (pl_module(batch["image"]).argmax(-1) == batch["label"]).tolist()


def test_checkpoint_holds_the_layer_alone_and_is_tested_with_the_same_backbone(tmp_path):
    module, data = _module(tmp_path), _data(tmp_path)
    trainer = _fit(module, data, enable_checkpointing=True, default_root_dir=tmp_path)
    path = trainer.checkpoint_callback.best_model_path
    saved = torch.load(path, weights_only=True)
    assert saved["state_dict"].keys() == {"linear.weight", "linear.bias"}
    backbone = module.backbone
    assert saved["backbone"] == {
        "name": "resnet8",
        "weights": module.hparams["weights"],
        "sha256": backbone.fingerprint(),
    }
    again, counted = _module(tmp_path), _Accuracy()
    tester = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[counted])
    (metrics,) = tester.test(again, data, ckpt_path=path)
    assert torch.equal(again.linear.weight, module.linear.weight)
    assert len(counted.hits) == 6
    assert metrics["test/top1"] == pytest.approx(100 * sum(counted.hits) / 6)
    assert metrics["test/top5"] == 100
    assert "val/top1" in trainer.callback_metrics


@pytest.mark.parametrize("way", ["resume", "test", "load_from_checkpoint"])
def test_another_backbone_than_the_checkpoints_is_refused(way, tmp_path):
    data = _data(tmp_path)
    trainer = _fit(_module(tmp_path), data, epochs=1, enable_checkpointing=True, default_root_dir=tmp_path)
    path = trainer.checkpoint_callback.best_model_path
    other = teacher_file(tmp_path, "resnet8", seed=2)
    trainer = Trainer(accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False)
    run_it = {
        "resume": lambda: trainer.fit(_module(tmp_path, weights=other), data, ckpt_path=path),
        "test": lambda: trainer.test(_module(tmp_path, weights=other), data, ckpt_path=path),
        "load_from_checkpoint": lambda: trainer.test(
            CoCoRDLinearProbeModule.load_from_checkpoint(path, weights=other), data
        ),
    }[way]
    with pytest.raises(UserError, match=r"backbone that .*resnet8 of .*give that one as model\.weights"):
        run_it()


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path):
    whole, half, rest = (_module(tmp_path, optim={"lr_milestones": [1, 3]}) for _ in range(3))
    data = _data(tmp_path)
    _fit(whole, data, epochs=4)
    trainer = _fit(half, data, epochs=2, enable_checkpointing=True, default_root_dir=tmp_path)
    _fit(rest, data, epochs=4, ckpt_path=trainer.checkpoint_callback.best_model_path)
    assert torch.equal(rest.linear.weight, whole.linear.weight)
    assert not torch.equal(half.linear.weight, whole.linear.weight)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_training_features_equal_validation_features(precision, tmp_path, monkeypatch):
    module, data = _module(tmp_path), _data(tmp_path)
    features = {}
    encode = module.encode

    def kept(image):
        features.setdefault(image[0].float().sum().item(), []).append(encode(image))
        return features[image[0].float().sum().item()][-1]

    monkeypatch.setattr(module, "encode", kept)
    data.sources["validation"] = data.sources["train"]
    _fit(module, data, epochs=1, precision=precision, num_sanity_val_steps=0)
    assert len(features) == 24 // BATCH
    for before, after in features.values():
        assert before.dtype == torch.bfloat16
        assert torch.equal(before, after)


def test_layer_starts_small_with_a_zero_bias():
    torch.manual_seed(0)
    module = CoCoRDLinearProbeModule("wrn_16_2", num_classes=200)
    assert module.linear.weight.shape == (200, 128)
    assert module.linear.weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert not module.linear.bias.any()


def test_errors_of_a_probe_name_the_setting_to_change(tmp_path):
    with pytest.raises(UserError, match=r"weights of the backbone resnet8, got none: set model\.weights, or train"):
        CoCoRDLinearProbeModule("resnet8").setup("fit")
    with pytest.raises(UserError, match=r"^Expected a trained backbone in 'runs/gone', got no file"):
        CoCoRDLinearProbeModule("resnet8", weights="runs/gone").setup("fit")
    with pytest.raises(UserError, match=r"as in the model, 4, got 3: set model\.num_classes"):
        _fit(_module(tmp_path, num_classes=4), _data(tmp_path))
    loader = torch.utils.data.DataLoader([{"label": torch.tensor(0), "sample_index": torch.tensor(0)}])
    with pytest.raises(UserError, match=r"^Expected a datamodule that reads each training image once, got none"):
        _fit(_module(tmp_path), loader)
    data = _data(tmp_path)
    data.every_image = lambda split: []
    with pytest.raises(UserError, match=r"^Expected training images that can be read, got none"):
        _fit(_module(tmp_path), data)


def test_students_of_exports_and_of_checkpoints_are_the_same_backbone(tmp_path):
    """Also of a library's network, whose names in our checkpoints are not the public ones."""
    module = CoCoRDModule("resnet18", CLASSES, **OFF)
    trainer = Trainer(logger=False, accelerator="cpu", enable_checkpointing=False, default_root_dir=tmp_path)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    prints = set()
    export([str(tmp_path / "x.ckpt"), str(tmp_path / "student.safetensors")])
    export([str(tmp_path / "x.ckpt"), str(tmp_path / "student.pth")])
    for name in ("x.ckpt", "student.safetensors", "student.pth"):
        probe = _module(tmp_path, network="resnet18", weights=str(tmp_path / name))
        probe.setup("fit")
        prints.add(probe.backbone.fingerprint())
    assert len(prints) == 1
    assert torch.equal(probe.backbone.network.network.conv1.weight, module.student.network.conv1.weight)


def test_shipped_config_fits_and_tests_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights = teacher_file(tmp_path, "wrn_16_2")
    files = {"train": _parquet(tmp_path, "train.parquet", 130), "validation": _parquet(tmp_path, "other.parquet", 6)}
    small = {
        "model": {"init_args": {"network_classes": CLASSES, "weights": weights}},
        "data": {
            "init_args": {**files, "test": files["validation"], "num_classes": PROBED, "num_workers": 0}
            | {"cache_dir": "cache"}
        },
        "trainer": {"accelerator": "cpu", "max_epochs": 2},
    }
    Path("small.yaml").write_text(yaml.safe_dump(small))
    ran = run("fit", "--config", str(ROOT / "configs/cocord/probe_stl10.yaml"), "--config", "small.yaml")
    assert ran.status == 0, ran.err
    (last,) = Path("runs/cocord_probe_stl10_small").rglob("last.ckpt")
    ran = run("test", "--ckpt_path", str(last))
    assert ran.status == 0, ran.err
    assert ran.out.endswith("Evaluated: 6 images\n")
    chance = {line.split()[0]: line.split()[2:] for line in ran.out.splitlines() if line.startswith("test/")}
    assert PROBED == 3
    assert chance == {"test/loss": [], "test/top1": ["33.33"], "test/top5": ["100"]}
