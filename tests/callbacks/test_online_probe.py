"""A probe beside a training learns and resumes, equals one process in several, and has no effect on the training."""

import copy

import numpy as np
import pytest
import torch
from lightning import LightningModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from support.methods.tiny_modules import trainer
from support.runs.distributed import run_ddp_fit, run_sharded_fit, whole_state
from vlightning.callbacks import OnlineLinearProbe, rank, world_size
from vlightning.common.errors import UserError
from vlightning.lightning_modules.base.sharding import shard

CLASSES, SIZE = 7, 4


def rows(count, seed=0, image="image"):
    """Images whose mean color approximately determines the class."""
    draws = torch.Generator().manual_seed(seed)
    colors = torch.randn(CLASSES, 3, generator=torch.Generator().manual_seed(9))
    label = torch.randint(CLASSES, (count,), generator=draws)
    images = colors[label][..., None, None] + 0.3 * torch.randn(count, 3, SIZE, SIZE, generator=draws)
    return [{image: one, "label": number} for one, number in zip(images, label, strict=True)]


def loader(count=24, batch_size=8, **options):
    return DataLoader(rows(count, **options), batch_size=batch_size)


class Encoder(LightningModule):
    """Learns a constant; has all kinds of state that a probe could change."""

    shape, key = "features", "image"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6))
        self.network[2].eval()  # differs from the other modules
        self.dropout = nn.Dropout(0.5)
        self.seen = set()

    def encode_images(self, image):
        self.seen.add((torch.is_grad_enabled(), self.training, image.dtype, torch.is_autocast_enabled("cpu")))
        features = self.network(image.mean((2, 3)))
        draws = torch.rand(3), np.random.rand(), self.training  # also in eval mode
        if self.shape == "tokens":
            features = torch.stack([3 * features.flip(1), features * 1.5, features * 0.5], 1)
        return (features, draws) if self.shape == "tuple" else features

    def training_step(self, batch, batch_idx):
        image = batch[self.key]
        noise = torch.randn(6) * np.random.rand()
        return (self.dropout(self.network(image.mean((2, 3)))) - noise).square().mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(module, *callbacks, data=None, val=None, ckpt_path=None, **options):
    torch.manual_seed(1)
    np.random.seed(1)
    fitted = trainer(*callbacks, **{"limit_val_batches": 0 if val is None else 1.0, **options})
    fitted.fit(module, data or loader(), val, ckpt_path=ckpt_path)
    return fitted


@pytest.mark.parametrize("shape", ["features", "tokens", "tuple"])
def test_training_is_bit_identical_with_and_without_the_probe(shape):
    states, draws, modes = [], [], []
    for callbacks in ([], [OnlineLinearProbe(CLASSES)]):
        module = Encoder()
        module.shape = shape
        fit(module, *callbacks, max_epochs=3, val=loader(8, seed=1))
        states.append(copy.deepcopy(module.state_dict()))
        draws.append((torch.rand(1).item(), np.random.rand()))
        modes.append([part.training for part in module.modules()])
    assert draws[0] == draws[1]
    assert modes[0] == modes[1]
    for name, tensor in states[0].items():
        assert torch.equal(states[1][name], tensor), name
    assert not torch.equal(Encoder().state_dict()["network.0.weight"], states[0]["network.0.weight"])
    # The probe encoded in eval mode and without gradient, in training and in validation.
    assert module.seen == {(False, False, torch.float32, False)}


class Modes(Callback):
    """Records the modes of the parts after each batch's callbacks."""

    def __init__(self):
        self.found = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.found.append((module.training, module.network.training, module.network[2].training))


def test_modes_of_all_submodules_are_restored_after_each_batch():
    modes = Modes()
    fit(Encoder(), OnlineLinearProbe(CLASSES), modes)
    assert modes.found == [(True, True, False)] * 3


def reference(batches, rate=1e-3, decay=0.01):
    """The head's weights after AdamW with its definition written out, in float64; losses before each step."""
    weights = [torch.ones(6), torch.zeros(6), torch.zeros(CLASSES, 6), torch.zeros(CLASSES)]
    weights = [weight.double().requires_grad_() for weight in weights]
    first, second, losses = [0.0] * 4, [0.0] * 4, []
    for step, (features, label) in enumerate(batches, 1):
        gain, shift, weight, bias = weights
        x = features.double()
        x = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-6).sqrt() * gain + shift
        loss = -(x @ weight.T + bias).log_softmax(1)[torch.arange(len(label)), label].mean()
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for index, (value, gradient) in enumerate(zip(weights, gradients, strict=True)):
                first[index] = 0.9 * first[index] + 0.1 * gradient
                second[index] = 0.999 * second[index] + 0.001 * gradient**2
                update = (first[index] / (1 - 0.9**step)) / ((second[index] / (1 - 0.999**step)).sqrt() + 1e-8)
                value.mul_(1 - rate * decay).sub_(rate * update)
    return [weight.detach() for weight in weights], losses


class Losses(Callback):
    """The features of each batch after the module's step, and the logged losses; runs after the probe."""

    def __init__(self, name="probe"):
        self.batches, self.losses, self.name = [], [], name

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        assert module.training
        network = copy.deepcopy(module.network).eval()
        features = network(batch[module.key].mean((2, 3))).detach()
        self.batches.append((features, batch["label"]))
        self.losses.append(trainer.callback_metrics[f"train/{self.name}_loss"].item())


@pytest.mark.parametrize("shape", ["features", "tokens", "tuple"])
def test_the_head_takes_adamw_steps_on_the_modules_features(shape):
    module = Encoder()
    module.shape = shape
    probe, losses = OnlineLinearProbe(CLASSES, learning_rate=0.05, weight_decay=0.1), Losses()
    fit(module, probe, losses, max_epochs=2)
    expected, expected_losses = reference(losses.batches, 0.05, 0.1)
    for found, tensor in zip(probe.state_dict()["head"].values(), expected, strict=True):
        torch.testing.assert_close(found.double(), tensor, rtol=1e-3, atol=2e-4)
    assert losses.losses == pytest.approx(expected_losses, rel=1e-4)
    assert losses.losses[0] == pytest.approx(np.log(CLASSES), rel=1e-5)


class Still(Encoder):
    """Does not change."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


@torch.no_grad()
def percentages(module, head, images):
    """Top-1 and top-5, one image at a time."""
    network, ranks = copy.deepcopy(module.network).eval(), []
    for row in images:
        features = network(row["image"].mean((1, 2))[None])[0]
        normal = (features - features.mean()) / (features.var(unbiased=False) + 1e-6).sqrt()
        scores = head["1.weight"] @ (normal * head["0.weight"] + head["0.bias"]) + head["1.bias"]
        ranks.append(int((scores > scores[row["label"]]).sum()))
    return [100 * sum(rank < k for rank in ranks) / len(ranks) for k in (1, 5)]


def test_the_probe_learns_and_validation_counts_all_labeled_images():
    module, probe = Still(), OnlineLinearProbe(CLASSES, name="color", learning_rate=0.03)
    unlabeled = [{"image": row["image"]} for row in rows(8, seed=5)]
    images = rows(50, seed=2)
    loaders = [DataLoader(images[:30], 8), DataLoader(unlabeled, 8), DataLoader(images[30:], 8)]
    fitted = fit(module, probe, max_epochs=20, val=loaders, num_sanity_val_steps=2)
    found = [fitted.callback_metrics[f"val/color_top{k}"].item() for k in (1, 5)]
    assert found == pytest.approx(percentages(module, probe.state_dict()["head"], images))
    assert found[0] > 60
    assert found[0] < found[1]


class Blind(Still):
    """Returns non-finite features for black images."""

    def encode_images(self, image):
        black = (image == 0).all((1, 2, 3))
        return super().encode_images(image).masked_fill(black[:, None], torch.nan)


def blacken(images, places):
    return [
        row | {"sample_index": place, "image": row["image"] * 0 if place in places else row["image"]}
        for place, row in enumerate(images)
    ]


def test_non_finite_features_are_misses_and_are_not_trained_on():
    module, probe, losses = Blind(), OnlineLinearProbe(CLASSES, learning_rate=0.03), Losses()
    images, dead = blacken(rows(50, seed=2), (2, 30)), [3, *range(16, 24)]
    data = DataLoader(blacken(rows(24), dead), 8)
    with pytest.warns(match=r"features for 2 of 50 images \(sample_index 2, 30\), none of which counts as right"):
        fitted = fit(module, probe, losses, data=data, val=DataLoader(images, 8), max_epochs=20, num_sanity_val_steps=0)
    metrics = {name: value.item() for name, value in fitted.callback_metrics.items()}
    assert metrics["val/probe_non_finite"] == 2
    seen = [row for place, row in enumerate(images) if place not in (2, 30)]
    expected = [share * 48 / 50 for share in percentages(module, probe.state_dict()["head"], seen)]
    assert [metrics[f"val/probe_top{k}"] for k in (1, 5)] == pytest.approx(expected)
    assert expected[0] > 50
    # The third batch is all black: it has no loss, which must not count as loss 0.
    assert np.isnan(losses.losses).tolist() == [False, False, True] * 20


def test_fewer_classes_than_six_have_no_top_five_and_validation_alone_logs_nothing():
    images = [row for row in rows(60) if row["label"] < 5]
    data = DataLoader(images[:16], 8)
    fitted = fit(Encoder(), OnlineLinearProbe(5), data=data, val=data)
    assert {"val/probe_top1", "train/probe_loss"} <= set(fitted.callback_metrics)
    assert "val/probe_top5" not in fitted.callback_metrics
    alone = trainer(OnlineLinearProbe(5))
    alone.validate(Encoder(), data, verbose=False)
    assert not alone.callback_metrics


def assert_same(found, expected, path=""):
    assert type(found) is type(expected), path
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key in expected:
            assert_same(found[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), path
    else:
        assert found == expected, path


def test_a_resumed_run_equals_the_uninterrupted_run(tmp_path):
    def probes():
        return [
            OnlineLinearProbe(CLASSES, learning_rate=0.05),
            OnlineLinearProbe(CLASSES, name="other", learning_rate=0.01),
        ]

    class Plain(Encoder):  # draws nothing, since nothing here seeds the steps
        def training_step(self, batch, batch_idx):
            return self.network(batch["image"].mean((2, 3))).square().mean()

    whole = probes()
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    first = fit(Plain(), *whole, saver, max_epochs=3, val=loader(16, seed=1), enable_checkpointing=True)
    content = torch.load(tmp_path / "step=3.ckpt", weights_only=True)["callbacks"]
    again = probes()
    assert {probe.state_key for probe in again} < set(content)
    second = fit(Plain(), *again, max_epochs=3, val=loader(16, seed=1), ckpt_path=tmp_path / "step=3.ckpt")
    for left, right in zip(again, whole, strict=True):
        assert_same(left.state_dict(), right.state_dict())
        assert not torch.equal(content[right.state_key]["head"]["1.weight"], right.state_dict()["head"]["1.weight"])
    assert_same(dict(second.callback_metrics), dict(first.callback_metrics))
    assert not torch.equal(whole[0].state_dict()["head"]["1.weight"], whole[1].state_dict()["head"]["1.weight"])
    first.save_checkpoint(tmp_path / "end.ckpt")
    validated = trainer(*(late := probes()))
    validated.validate(Plain(), loader(16, seed=1), ckpt_path=tmp_path / "end.ckpt", verbose=False)
    for name, value in validated.callback_metrics.items():
        assert value == first.callback_metrics[name], name
    assert len(validated.callback_metrics) == 4
    fit(Plain(), *late, max_epochs=1)  # what validation restored can train
    with pytest.raises(UserError, match=r"a probe for 9 classes in the checkpoint for .*'probe', got one for 7"):
        fit(Plain(), OnlineLinearProbe(9), max_epochs=4, ckpt_path=tmp_path / "end.ckpt")


class ShardedEncoder(Encoder):
    """Without statistics of a batch, which processes do not share."""

    def __init__(self, rate):
        super().__init__()
        torch.manual_seed(3)
        self.network = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 6))
        self.rate = rate

    def configure_model(self):
        shard(self, [self.network])

    def training_step(self, batch, batch_idx):
        return self.network(batch["image"].mean((2, 3))).square().mean()

    def val_dataloader(self):
        """Images that two processes share unequally, in equally many batches."""
        images = rows(20, seed=4)
        if world_size() == 1:
            return DataLoader(images, 4)
        return DataLoader(images[4:], 4) if rank() == 0 else DataLoader(images[:4], 1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def module_and_data(rate=0.05, first=4):
    """Batches of 8 images; of two processes the one has so many of each, the other the rest."""
    places = [range(8)] if world_size() == 1 else [range(first), range(first, 8)]
    batches = [[start + place for place in places[rank()]] for start in (0, 8, 16)]
    return ShardedEncoder(rate), DataLoader(rows(24), batch_sampler=batches)


def outcome(fitted):
    heads = [callback.state_dict()["head"] for callback in fitted.callbacks if isinstance(callback, OnlineLinearProbe)]
    metrics = {name: value.item() for name, value in fitted.callback_metrics.items()}
    return {"head": heads, "metrics": metrics, "state": whole_state(fitted.lightning_module)}


def options(*callbacks):
    return {"callbacks": list(callbacks), "max_epochs": 2, "use_distributed_sampler": False, "num_sanity_val_steps": 2}


# With parts of different size the module's loss would differ, so its learning rate is 0.
@pytest.mark.parametrize(
    ("run_fit", "rate", "first"), [(run_ddp_fit, 0.05, 4), (run_sharded_fit, 0.05, 4), (run_ddp_fit, 0.0, 5)]
)
def test_two_processes_equal_one(run_fit, rate, first):
    fitted = trainer(OnlineLinearProbe(CLASSES, learning_rate=0.05), max_epochs=2)
    fitted.fit(*module_and_data(rate))
    expected = outcome(fitted)
    assert {"val/probe_top1", "val/probe_top5", "train/probe_loss"} == set(expected["metrics"])
    found = run_fit(
        module_and_data,
        options(OnlineLinearProbe(CLASSES, learning_rate=0.05)),
        make_args=(rate, first),
        collect=outcome,
    )
    for process in found:
        torch.testing.assert_close(process["head"], [dict(head) for head in expected["head"]], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(process["state"], expected["state"], rtol=1e-4, atol=1e-6)
        assert process["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
    assert_same(found[0]["head"][0], found[1]["head"][0])


def test_sharded_training_is_bit_identical_with_and_without_the_probe():
    before, after = (
        run_sharded_fit(module_and_data, options(*callbacks), collect=outcome)
        for callbacks in ([], [OnlineLinearProbe(CLASSES)])
    )
    assert_same(after[0]["state"], before[0]["state"])


def test_images_and_labels_may_have_other_keys():
    class Other(Encoder):
        key = "view"

        def look(self, image):
            return self.encode_images(image)

    probe = OnlineLinearProbe(CLASSES, method="look", image="view", label="label")
    fit(Other(), probe, data=loader(image="view"))
    assert probe.state_dict()["head"]["1.weight"].any()


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.float32), ("64-true", torch.float64)])
def test_features_have_the_trainers_precision_and_the_head_is_float32(precision, dtype):
    module, probe = Encoder(), OnlineLinearProbe(CLASSES)
    fit(module, probe, precision=precision)
    assert module.seen == {(False, False, dtype, precision == "bf16-mixed")}
    assert {tensor.dtype for tensor in probe.state_dict()["head"].values()} == {torch.float32}


def test_invalid_modules_and_data_are_refused_with_one_sentence():
    def refused(message, *callbacks, module=None, **options):
        with pytest.raises(UserError, match=message):
            fit(module or Encoder(), *callbacks, **options)

    bare = DataLoader([{"image": row["image"]} for row in rows(8)], 8)
    refused(
        r"Expected training batches with 'image' and 'label' for .*'probe', got \['image'\]",
        OnlineLinearProbe(7),
        data=bare,
    )
    refused(
        r"a method encode\(\) .*, got Encoder without .*'encode_images'.*: set method",
        OnlineLinearProbe(7, method="encode"),
    )
    refused(r"Expected labels from 0 to 3 .*, got \d+ labels outside: set num_classes", OnlineLinearProbe(4))

    class Maps(Encoder):
        def encode_images(self, image):
            return image

    refused(
        r"Expected features .*, got \[8, 3, 4, 4\] from Maps.encode_images\(\)", OnlineLinearProbe(7), module=Maps()
    )

    class OneToken(Encoder):
        def encode_images(self, image):
            return super().encode_images(image)[:, None]

    refused(r"got \[8, 1, 6\] from OneToken", OnlineLinearProbe(7), module=OneToken())
