"""The listing's probe and fine-tuning: what trains and how fast, mixed batches, initial weights, and runs."""

import copy
import logging
import math
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback

from support.methods.groups import merged
from support.methods.probe import (
    CLASSES,
    ENCODER,
    PLAIN,
    SIZE,
    WIDTH,
    random_batch,
    shape_classes,
    shre_checkpoint,
    tiny_probe,
)
from support.methods.tiny_modules import trainer
from vlightning.callbacks import ClassPredictionWriter, StepSeedCallback
from vlightning.common.errors import UserError
from vlightning.lightning_modules import SHReImageClassifierModule

HEAD = 2 * WIDTH + WIDTH * CLASSES + CLASSES


def fit(module, *callbacks, ckpt_path=None, data=None, **options):
    fitted = trainer(*callbacks, **{"limit_val_batches": 0, **options})
    fitted.fit(module, data or shape_classes(), ckpt_path=ckpt_path)
    return fitted


class Watch(Callback):
    """The state that training starts from, the modes in it, and what the encoder is given."""

    def __init__(self):
        self.modes, self.images = [], {True: [], False: []}

    def on_train_start(self, trainer, module):
        self.start = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
        module.encoder.register_forward_pre_hook(lambda _, given: self._note(module, given[0]))

    def _note(self, module, image):
        self.modes.append((module.probe.training, {part.training for part in module.encoder.modules()}))
        self.images[module.probe.training].append(image.detach().clone())


@pytest.mark.parametrize("linear_probe", [True, False])
@torch.no_grad()
def test_changing_the_class_token_leaves_the_prediction_unchanged(linear_probe):
    module, image = tiny_probe(linear_probe=linear_probe).double().eval(), random_batch()["image"]
    expected = module(image)
    for token in (0, 1, 4):
        sign = torch.ones(5, 1).double().index_fill(0, torch.tensor(token), -1)
        handle = module.encoder.register_forward_hook(lambda _, __, tokens, sign=sign: tokens * sign)
        assert torch.equal(module(image), expected) == (token == 0)
        handle.remove()
    assert torch.equal(module(image), expected)


def test_probing_trains_the_head_alone_and_leaves_every_encoder_tensor_bit_identical():
    module, watch = tiny_probe(), Watch()
    fitted = fit(module, watch, max_epochs=2, limit_val_batches=1.0)
    state = module.state_dict()
    for name, tensor in watch.start.items():
        assert torch.equal(state[name], tensor) == (not name.startswith("probe.")), name
    assert sum(name.startswith("encoder.") for name in state) == 6 * 12 + 2 + 2 + 2
    assert sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad) == HEAD
    (optimizer,) = fitted.optimizers
    assert sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"]) == HEAD
    assert (True, {False}) in watch.modes
    assert {mode for _, modes in watch.modes for mode in modes} == {False}
    assert all(parameter.grad is None for parameter in module.encoder.parameters())


def test_a_probe_saves_no_activations_of_the_encoder():
    module, batch = tiny_probe(), random_batch(dtype=torch.float32)
    module.encoder.requires_grad_(True)  # as another callback might
    module(batch["image"]).sum().backward()
    assert all(parameter.grad is None for parameter in module.encoder.parameters())
    assert all(parameter.grad.any() for parameter in module.probe.parameters() if parameter.dim() == 1)


def test_fine_tuning_moves_the_encoder():
    module, watch = tiny_probe(linear_probe=False), Watch()
    fit(module, watch, max_epochs=2)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, watch.start[name]) == (name == "encoder.pos_embed" or "accuracy" in name), name
    assert watch.modes[0] == (True, {True})


def rates(module):
    """Learning rate of each parameter, by name, as the optimizer starts from."""
    module._trainer = None
    names = {parameter: name for name, parameter in module.named_parameters()}
    optimizer = module.configure_optimizers()["optimizer"]
    return {names[p]: group["initial_lr"] for group in optimizer.param_groups for p in group["params"]}, optimizer


@pytest.mark.parametrize("decay", [0.81, 0.75, 1.0])
@pytest.mark.parametrize("post_norm", [True, False])
def test_learning_rates_fall_from_the_head_to_the_embeddings(decay, post_norm):
    module = tiny_probe(linear_probe=False, optim={"layer_decay": decay}, vision={"post_norm": post_norm})
    found, _ = rates(module)
    assert found.keys() == {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name, rate in found.items():
        layer = 0
        if name.startswith("encoder.blocks."):
            layer = 1 + int(name.split(".")[2])
        elif name.startswith("encoder.norm."):  # the norm after the last block
            layer = 6
        elif name.startswith("probe."):
            layer = 7
        assert rate == pytest.approx(1e-3 * decay ** (7 - layer), rel=1e-12), name
    if decay == 0.81:
        published = [2.3e-4, 2.8e-4, 3.5e-4, 4.3e-4, 5.3e-4, 6.6e-4, 8.1e-4, 1e-3]
        assert sorted(set(found.values())) == pytest.approx(published, rel=0.01)
    assert len(set(found.values())) == (1 if decay == 1.0 else 8)


def test_a_probe_has_one_rate_and_vectors_and_tokens_do_not_decay():
    found, optimizer = rates(tiny_probe())
    assert set(found.values()) == {1e-3}
    assert (optimizer.defaults["betas"], optimizer.defaults["eps"]) == ((0.9, 0.999), 1e-8)
    module = tiny_probe(linear_probe=False, vision={"post_norm": False})
    _, optimizer = rates(module)
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in module.named_parameters():
        spared = parameter.dim() < 2 or name in ("encoder.cls_token", "encoder.pos_embed")
        assert decays[parameter] == (0.0 if spared else 0.01), name


class Rates(Callback):
    """The highest learning rate of each step, and the lowest."""

    def __init__(self):
        self.found = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        every = [group["lr"] for group in optimizer.param_groups]
        self.found.append((max(every), min(every)))


def test_the_schedule_is_a_linear_rise_of_a_tenth_then_a_cosine_to_zero():
    rates = Rates()
    fit(tiny_probe(linear_probe=False), rates, max_epochs=5)  # 20 steps
    expected = [0, 5e-4] + [5e-4 * (1 + math.cos(math.pi * step / 18)) for step in range(18)]
    assert [high for high, _ in rates.found] == pytest.approx(expected)
    assert [low for _, low in rates.found] == pytest.approx([0.81**7 * rate for rate in expected])


def test_training_images_are_mixed_the_same_way_at_each_step_and_those_of_validation_never():
    seen = []
    for seed, options in ((0, {}), (0, {}), (1, {}), (0, merged(PLAIN, {"mix": {"probability": 1.0}}))):
        watch = Watch()
        torch.manual_seed(seed + 7)  # draws before training do not matter
        fit(tiny_probe(**options), watch, StepSeedCallback(seed), max_epochs=2, limit_val_batches=1.0)
        seen.append(watch.images)
    first, again, other, plain = seen
    for left, right in zip(first[True], again[True], strict=True):
        assert torch.equal(left, right)
    assert not all(map(torch.equal, first[True], other[True]))
    assert sum(map(torch.equal, first[True], plain[True])) < 4
    for found in (first, again, other):
        assert all(map(torch.equal, found[False], plain[False]))
    rows = {row["sample_index"]: row["image"] for row in iter_training_rows()}
    assert torch.equal(plain[True][0], torch.stack([rows[index] for index in plain_order()]))


def iter_training_rows():
    data = shape_classes()
    data.setup("fit")
    for batch in data.train_dataloader():
        for index, image in zip(batch["sample_index"].tolist(), batch["image"], strict=True):
            yield {"sample_index": index, "image": image}


def plain_order():
    data = shape_classes()
    data.setup("fit")
    return next(iter(data.train_dataloader()))["sample_index"].tolist()


def mixed_batches(count=2000, **options):
    """Batches whose images are constant, the number of the row, mixed again and again."""
    module = tiny_probe(**options)
    image = torch.arange(1.0, 6.0)[:, None, None, None].expand(5, 3, SIZE, SIZE)
    label = torch.tensor([3, 1, 4, 1, 5])
    torch.manual_seed(1)
    return [(image, label, *module.mix_batch(image, label)) for _ in range(count)]


def kind(image, mixed):
    """Which of the two it was: CutMix takes whole pixels."""
    if mixed is image:
        return "plain"
    return "cut" if torch.equal(mixed, mixed.round()) else "mixed"


def test_nine_batches_in_ten_are_mixed_half_of_them_by_cutmix_with_the_shares_as_labels():
    counts, lambdas = {"plain": 0, "cut": 0, "mixed": 0}, {"cut": [], "mixed": []}
    for image, label, mixed, target in mixed_batches():
        found = kind(image, mixed)
        counts[found] += 1
        if found == "plain":
            assert target is label
            continue
        # The share that a row has of itself, from its pixels: a CutMix of all or nothing is either.
        before = image.roll(1, 0)
        own = ((mixed - before) / (image - before)).mean((1, 2, 3))
        torch.testing.assert_close(own, own[:1].expand(5), rtol=0, atol=1e-5)
        one_hot = F.one_hot(label, CLASSES).float()
        expected = own[0] * one_hot + (1 - own[0]) * one_hot.roll(1, 0)
        torch.testing.assert_close(target, expected, rtol=0, atol=1e-5)
        lambdas[found].append(own[0].item())
    assert counts["plain"] == pytest.approx(200, abs=4 * math.sqrt(2000 * 0.9 * 0.1))
    assert counts["cut"] == pytest.approx(900, abs=4 * math.sqrt(1800 * 0.25) + 10)
    # The beta distribution of 0.8 and 0.8 has the variance 1 / (4 * 2.6).
    shares = torch.tensor(lambdas["mixed"])
    assert shares.mean().item() == pytest.approx(0.5, abs=0.05)
    assert shares.var().item() == pytest.approx(1 / 10.4, rel=0.12)


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"mix": {"mixup": 0.0}}, {"plain", "cut"}),
        ({"mix": {"cutmix": 0.0}}, {"plain", "mixed"}),
        ({"mix": {"probability": 0.0}}, {"plain"}),
        ({"mix": {"switch_probability": 1.0, "probability": 1.0}}, {"cut"}),
        ({"mix": {"switch_probability": 0.0, "probability": 1.0}}, {"mixed"}),
        (PLAIN, {"plain"}),
    ],
)
def test_mixup_and_cutmix_can_be_disabled(options, kinds):
    assert {kind(image, mixed) for image, _, mixed, _ in mixed_batches(60, **options)} == kinds


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_a_step_is_the_cross_entropy_with_smoothed_labels(probability):
    module, batch = tiny_probe(mix={"probability": probability}).double(), random_batch()
    module.log = lambda *_, **__: None
    torch.manual_seed(4)
    image, target = module.mix_batch(batch["image"], batch["label"])
    torch.manual_seed(4)
    loss = module.training_step(batch, 0)
    shares = target.double() if probability else F.one_hot(target, CLASSES).double()
    shares = 0.9 * shares + 0.1 / CLASSES
    expected = -(shares * module(image).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)


def loaded(**options):
    module = tiny_probe(seed=8, **options)
    module.load_initial_weights()
    return module


def assert_encoder(module, expected):
    found = module.encoder.state_dict()
    assert found.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_an_encoder_is_initialized_from_shre_or_an_earlier_run(tmp_path, caplog):
    encoder = shre_checkpoint(tmp_path / "a.ckpt")
    with caplog.at_level(logging.INFO):
        module = loaded(weights=str(tmp_path / "a.ckpt"))
        assert_encoder(module, encoder)
        loaded()
    assert f"The image encoder starts from {str(tmp_path / 'a.ckpt')!r}." in caplog.text
    assert "The image encoder starts at random." in caplog.text
    probed = tiny_probe(linear_probe=False, weights=str(tmp_path / "a.ckpt"))
    fit(probed, max_epochs=1).save_checkpoint(tmp_path / "b.ckpt")
    again = loaded(weights=str(tmp_path / "b.ckpt"), num_classes=7)
    assert_encoder(again, probed.encoder)
    assert not torch.equal(probed.encoder.cls_token, encoder.cls_token)
    start = Watch()
    resumed = tiny_probe(1, linear_probe=False, weights=str(tmp_path / "gone"))
    fit(resumed, start, max_epochs=2, ckpt_path=tmp_path / "b.ckpt")
    for name, tensor in probed.state_dict().items():  # a resumed run needs no weights and keeps its own
        assert torch.equal(start.start[name], tensor), name


TIMM = {"encoder": "vit_tiny_patch16_224", "vision": {"image_size": 32}}


def test_an_encoder_of_timm_and_its_weights_are_used_unchanged(monkeypatch, tmp_path):
    module = SHReImageClassifierModule(3, **TIMM)
    assert module(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
    assert (len(module.encoder.blocks), module.probe.norm.weight.shape) == (12, (192,))
    found, _ = rates(SHReImageClassifierModule(3, linear_probe=False, **TIMM))
    assert found["encoder.pos_embed"] == pytest.approx(1e-3 * 0.81**13)
    torch.manual_seed(1)
    pretrained = timm.create_model("vit_tiny_patch16_224", num_classes=0, global_pool="", img_size=32)

    def download(name, **options):
        assert name == "vit_tiny_patch16_224"
        assert options == {"pretrained": True, "num_classes": 0, "global_pool": "", "img_size": 32}
        return copy.deepcopy(pretrained)

    module = SHReImageClassifierModule(3, weights="pretrained", **TIMM)
    monkeypatch.setattr(timm, "create_model", download)
    module.load_initial_weights()
    assert_encoder(module, pretrained)
    monkeypatch.undo()
    trainer(max_epochs=1).strategy.connect(module)
    torch.save({"state_dict": module.state_dict()}, tmp_path / "a.ckpt")
    other = SHReImageClassifierModule(3, weights=str(tmp_path / "a.ckpt"), **TIMM)
    other.load_initial_weights()
    assert_encoder(other, pretrained)
    with pytest.raises(UserError, match="got 'pretrained' without an encoder of timm"):
        tiny_probe(weights="pretrained")


def test_misfitting_weights_are_refused(tmp_path):
    path = str(tmp_path / "a.ckpt")
    with pytest.raises(UserError, match=r"Expected a checkpoint in '.*gone', got no file: correct model.weights"):
        loaded(weights=str(tmp_path / "gone"))
    shre_checkpoint(path, depth=5)
    with pytest.raises(UserError, match=r"the image encoder from '.*', got missing blocks.5.attn.proj"):
        loaded(weights=path)
    shre_checkpoint(path, heads=4)
    with pytest.raises(UserError, match=r"with heads 2 in '.*a.ckpt', got 4: set model.vision.heads"):
        loaded(weights=path)
    shre_checkpoint(path, post_norm=False)
    with pytest.raises(UserError, match=r"with post_norm True in '.*a.ckpt', got False: set model.vision.post_norm"):
        loaded(weights=path)
    torch.save({"state_dict": {"student.text_encoder.weight": torch.zeros(1)}}, path)
    with pytest.raises(UserError, match=r"Expected a checkpoint of SHReModule or .* got one without an image encoder"):
        loaded(weights=path)
    Path(path).write_text("no checkpoint")
    with pytest.raises(RuntimeError, match="Expected a readable checkpoint"):
        loaded(weights=path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vision": {"heads": 3}}, "Expected a width that 3 heads divide, got 16"),
        ({"vision": {"image_size": 20}}, "Expected an image size that patches of 8 pixels divide, got 20"),
        ({"mix": {"probability": 1.1}}, "Expected mix.probability from 0 to 1, got 1.1"),
        ({"optim": {"warmup_share": -0.1}}, "Expected optim.warmup_share of at least 0 and less than 1, got -0.1"),
        ({"mix": {"mixup": -1.0}}, "Expected mix.mixup of at least 0, got -1.0"),
        ({"encoder": "nothing"}, r"Expected a vision transformer of timm .* got 'nothing' \(Unknown model"),
        ({"encoder": "resnet18"}, "transformer of timm as model.encoder, got 'resnet18'"),
        (
            {"encoder": "vit_small_patch14_reg4_dinov2", "vision": {"image_size": 28}},
            "dinov2' with 5: name another",
        ),
    ],
)
def test_invalid_settings_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        SHReImageClassifierModule(**merged({"vision": ENCODER}, options))


def test_another_number_of_classes_is_refused():
    with pytest.raises(UserError, match=r"as in the model, 7, got 40: set model\.num_classes"):
        fit(tiny_probe(num_classes=7))


def test_required_callbacks_are_added_and_half_precision_trains():
    fitted = fit(tiny_probe(linear_probe=False), precision="bf16-mixed")
    assert fitted.callback_metrics["train/loss"].isfinite()
    found = [type(callback) for callback in fitted.callbacks]
    assert (found.count(StepSeedCallback), found.count(ClassPredictionWriter)) == (1, 1)
