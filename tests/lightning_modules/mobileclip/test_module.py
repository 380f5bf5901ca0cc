"""The training step against plain formulas; slices, schedule, parameter groups, moving average, errors."""

import math

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from support.methods.clip import DIMS, SCALES, reinforced_batch, tiny_module
from vlightning.callbacks import EMACallback, FinalExport
from vlightning.common.errors import UserError
from vlightning.datamodules import ReinforcedShapesDataModule, ShapesDataModule
from vlightning.lightning_modules import MobileCLIPModule

ROWS = 6
BATCH_NORM = nn.modules.batchnorm._BatchNorm


def plain_loss(module, batch, share, synthetic=True):
    """Section 3 of the paper, for one teacher, row and direction at a time."""
    student, scale = module.student, module.student.logit_scale.exp()
    image = normalize(student.encode_image(batch["image"]), dim=-1)
    total, logged = 0, {}
    kinds = {"real": ("input_ids", "teacher_text"), "synthetic": ("synthetic_input_ids", "teacher_synthetic")}
    for kind, (ids, theirs) in list(kinds.items())[: 2 if synthetic else 1]:
        text = normalize(student.encode_text(batch[ids]), dim=-1)
        logits = scale * image @ text.T
        labels = torch.arange(len(image))
        contrast = (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2
        divergence = 0
        start = 0
        for width, teacher_scale in zip(DIMS, SCALES, strict=True):
            part = slice(start, start + width)
            start += width
            teacher = teacher_scale * batch["teacher_image"][:, part] @ batch[theirs][:, part].T
            for own, others in ((logits, teacher), (logits.T, teacher.T)):
                for row in range(len(image)):
                    p, q = others[row].softmax(0), own[row].softmax(0)
                    divergence = divergence + (p * (p / q).log()).sum() / (2 * len(image) * len(DIMS))
        logged |= {f"train/contrast_{kind}": contrast, f"train/distillation_{kind}": divergence}
        total = total + (1 - share) * contrast + share * divergence
    return total, logged


def gradients(module, loss):
    names, parameters = zip(*((n, p) for n, p in module.named_parameters() if p.requires_grad), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("synthetic", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.75, 1.0])
def test_training_step_equals_plain_formulas(share, synthetic):
    module = tiny_module(distillation_weight=share).double()
    logged = {}
    module.log = lambda name, value, **_: logged.update({name: value})
    batch = reinforced_batch(ROWS)
    if not synthetic:
        batch = {name: column for name, column in batch.items() if "synthetic" not in name}
    loss = module.training_step(batch, 0)
    expected, terms = plain_loss(module, batch, share, synthetic)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    found, wanted = gradients(module, loss), gradients(module, expected)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-13, msg=name)
    for name, value in terms.items():
        if share or "distillation" not in name:
            torch.testing.assert_close(logged[name], value.detach(), rtol=1e-10, atol=0)


def test_losses_of_both_kinds_of_captions_add_up():
    batch = reinforced_batch(ROWS)
    losses = {
        kind: tiny_module(distillation_weight=0.75, captions=kind).double().training_step(batch, 0)
        for kind in ("real", "synthetic", "both")
    }
    expected, _ = plain_loss(tiny_module().double(), batch, 0.75, synthetic=False)
    torch.testing.assert_close(losses["real"], expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(losses["real"] + losses["synthetic"], losses["both"], rtol=1e-12, atol=0)
    plain = {name: column for name, column in batch.items() if "synthetic" not in name}
    with pytest.raises(UserError, match=r"Expected synthetic_input_ids .*: train on reinforced data"):
        tiny_module(captions="synthetic").double().training_step(plain, 0)


@pytest.mark.parametrize("share", [0.0, 0.75])
def test_other_pairs_of_an_image_are_no_negatives_without_teachers(share):
    ids = torch.tensor([4, 7, 4, 4, 9, 7])
    module, batch = tiny_module(distillation_weight=share, captions="real").double(), reinforced_batch(ROWS)
    loss = module.training_step(batch | {"image_id": ids}, 0)
    if share:
        torch.testing.assert_close(loss, module.training_step(batch, 0), rtol=0, atol=0)
        return
    image, text = (
        normalize(encode(batch[name]), dim=-1)
        for encode, name in ((module.student.encode_image, "image"), (module.student.encode_text, "input_ids"))
    )
    others = ids[:, None].eq(ids) & ~torch.eye(ROWS, dtype=torch.bool)
    logits = (module.student.logit_scale.exp() * image @ text.T).masked_fill(others, -torch.inf)
    expected = (cross_entropy(logits, torch.arange(ROWS)) + cross_entropy(logits.T, torch.arange(ROWS))) / 2
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def test_teachers_and_average_have_no_gradient():
    module = tiny_module().double()
    batch = reinforced_batch(ROWS)
    batch["teacher_text"].requires_grad_(True)
    module.training_step(batch, 0).backward()
    assert batch["teacher_text"].grad is None
    assert all(parameter.grad is None for parameter in module.average.parameters())


@pytest.mark.parametrize(("size", "rows"), [(2, None), (4, None), (None, 1), (None, 4), (4, 4)])
def test_slices_have_the_loss_and_gradients_of_the_whole_batch(size, rows):
    batch = reinforced_batch(ROWS)
    whole = tiny_module(distillation_weight=0.7).double()
    sliced = tiny_module(distillation_weight=0.7, memory={"micro_batch_size": size, "loss_rows": rows}).double()
    loss, other = (module.training_step(batch, 0) for module in (whole, sliced))
    torch.testing.assert_close(other, loss, rtol=1e-12, atol=0)
    found, wanted = gradients(sliced, other), gradients(whole, loss)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-14, msg=name)


def mci(**options):
    torch.manual_seed(0)
    options = {"max_tokens": 8, "teacher": {"dims": DIMS, "scales": SCALES}, **options}
    module = MobileCLIPModule("MobileCLIP-tiny", vision={"image_size": 48}, **options)
    module.log = lambda *_, **__: None
    return module


def mci_batch(rows):
    return reinforced_batch(rows, dtype=torch.float32, size=48, length=8, words=300)


def norms(module):
    return {name: part for name, part in module.student.named_modules() if isinstance(part, BATCH_NORM)}


def test_running_statistics_move_once_a_step_towards_the_mean_over_the_slices():
    batch = mci_batch(6)
    sliced = mci(memory={"micro_batch_size": 2})
    parts = []
    for start in range(0, 6, 2):
        one = mci()
        part = {name: column[start : start + 2] for name, column in batch.items()}
        one.training_step(part, 0)
        parts.append(norms(one))
    sliced.training_step(batch, 0).backward()
    assert len(norms(sliced)) > 20
    for name, norm in norms(sliced).items():
        assert int(norm.num_batches_tracked) == 1, name
        assert norm.momentum == 0.1
        for statistic in ("running_mean", "running_var"):
            mean = torch.stack([getattr(part[name], statistic) for part in parts]).mean(0)
            torch.testing.assert_close(getattr(norm, statistic), mean, rtol=1e-4, atol=1e-6, msg=name)


def test_one_slice_equals_the_whole_batch_with_batch_norm():
    batch = mci_batch(4)
    whole, sliced = mci(), mci(memory={"micro_batch_size": 4})
    for module in (whole, sliced):
        module.training_step(batch, 0).backward()
    for (name, one), (_, other) in zip(whole.named_parameters(), sliced.named_parameters(), strict=True):
        if one.requires_grad:
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-6, msg=name)
    for (name, one), (_, other) in zip(whole.named_buffers(), sliced.named_buffers(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-7, msg=name)


def test_convolutions_are_channels_last_except_those_of_images():
    """Channels-last convolutions of images make the backward pass write out of bounds."""
    module = mci()
    module.configure_model()
    plain, last = [], []

    def note(part, inputs, output):
        strides = inputs[0].stride()
        (last if strides[1] == 1 and strides[3] > 1 else plain).append(part.in_channels)

    for part in module.student.visual.modules():
        if isinstance(part, nn.Conv2d):
            part.register_forward_hook(note)
    module.training_step(mci_batch(4), 0).backward()
    assert 3 not in last
    assert len(last) > 30
    assert plain.count(3) == 2


def optimizer_of(module):
    module._trainer = None
    return module.configure_optimizers()["optimizer"]


@pytest.mark.parametrize("decays", [False, True])
def test_weight_decay_spares_norms_biases_and_scales(decays):
    module = mci(optim={"decay_layer_scales": decays})
    decayed, spared = ({id(parameter) for parameter in group["params"]} for group in optimizer_of(module).param_groups)
    trained = ((name, parameter) for name, parameter in module.student.named_parameters() if parameter.requires_grad)
    names = {id(parameter): name for name, parameter in trained}
    assert "visual.trunk.head.fc.bias" not in names.values()
    assert decayed | spared == names.keys()
    assert not decayed & spared
    scales = {name for name in names.values() if name.endswith(".gamma")}
    assert len(scales) > 8
    found = {names[key] for key in decayed}
    assert (scales <= found) if decays else not (scales & found)
    assert all(dict(module.student.named_parameters())[name].ndim >= 2 for name in found)
    assert "logit_scale" not in found
    assert "text.token_embedding.weight" in found


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_schedule_equals_open_clips_with_a_floor(warmup):
    module = tiny_module(optim={"learning_rate": 2.0, "min_learning_rate": 0.0, "warmup_steps": warmup})
    schedule = module.paper_schedule()
    for step in range(20):
        if step < warmup:
            expected = 2.0 * (step + 1) / warmup
        else:
            expected = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (20 - warmup))) * 2.0
        assert schedule.rate(step, 20) == pytest.approx(expected), step
    module.change_settings("optim", min_learning_rate=0.5)
    assert module.paper_schedule().rate(20, 20) == pytest.approx(0.5)


def test_a_constant_phase_precedes_the_cosine():
    optim = {"learning_rate": 2.0, "min_learning_rate": 0.5, "warmup_steps": 2, "constant_steps": 10}
    schedule = tiny_module(optim=optim).paper_schedule()
    assert [schedule.rate(step, 20) for step in range(11)] == [1.0, *[2.0] * 10]
    expected = [0.5 + 1.5 * (1 + math.cos(math.pi * (step - 10) / 10)) / 2 for step in range(10, 21)]
    assert [schedule.rate(step, 20) for step in range(10, 21)] == pytest.approx(expected)
    with pytest.warns(UserWarning, match="constant_steps is 10, but the run has 10 optimizer steps"):
        schedule.warn(10)


def test_a_warm_up_longer_than_the_run_is_cut_with_a_warning():
    module = tiny_module(optim={"learning_rate": 2.0, "min_learning_rate": 0.5, "warmup_steps": 2000})
    module._trainer = type("Trainer", (), {"estimated_stepping_batches": 20, "lr_scheduler_configs": []})()
    module.configure_optimizers()
    with pytest.warns(
        UserWarning, match="warmup_steps is 2000, but the run has 20 optimizer steps: the warm-up takes 2"
    ):
        module.on_train_start()
    schedule = module.paper_schedule()
    assert [schedule.rate(step, 20) for step in (1, 2, 11, 20)] == pytest.approx([2.0, 2.0, 1.25, 0.5])


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    def make(**options):
        folder = str(tmp_path_factory.getbasetemp() / "reinforced_shapes")
        defaults = {"length": 40, "eval_length": 8, "augmentations": 2, "image_size": 32, "batch_size": 8}
        return ReinforcedShapesDataModule(folder, num_workers=0, **{**defaults, **options})

    return make


def quiet_trainer(tmp_path, **options):
    silent = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return pl.Trainer(accelerator="cpu", default_root_dir=tmp_path, enable_checkpointing=False, **silent, **options)


def student_of_shapes(**options):
    torch.manual_seed(0)
    teacher = {"dims": [64, 96], "scales": [30.0, 30.0]}
    defaults = {"vision": {"image_size": 32}, "max_tokens": 16, "teacher": teacher}
    return MobileCLIPModule("MobileCLIP-tiny", **{**defaults, **options})


class Watch(pl.Callback):
    """Compute the moving average independently, and raise the scale above its bound."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 0:
            self.expected = {name: value.clone() for name, value in module.average.state_dict().items()}
        with torch.no_grad():
            module.student.logit_scale.fill_(7.0)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        assert module.student.logit_scale.item() <= math.log(50.0) + 1e-6
        for name, value in module.student.state_dict().items():
            old = self.expected[name]
            self.expected[name] = old + 0.25 * (value - old) if value.is_floating_point() else value.clone()


def test_average_with_its_statistics_is_evaluated(tmp_path, shapes):
    options = {"momentum": {"momentum": 0.75, "warmup": "never"}, "optim": {"learning_rate": 1e-2}}
    module, watch = student_of_shapes(max_logit_scale=50.0, **options), Watch()
    quiet_trainer(tmp_path, max_steps=3, callbacks=[EMACallback(log=False), watch], limit_val_batches=0).fit(
        module, shapes()
    )
    for name, value in module.average.state_dict().items():
        torch.testing.assert_close(value, watch.expected[name], rtol=1e-5, atol=1e-6, msg=name)
    assert not any(part.training for part in module.average.modules())
    image = torch.rand(2, 3, 32, 32)
    average, student = (
        normalize(network.eval().encode_image(image), dim=-1) for network in (module.average, module.student)
    )
    assert not torch.allclose(average, student, atol=1e-4)
    torch.testing.assert_close(module.eval().encode_images(image)[0], average)
    alone = student_of_shapes(momentum={"momentum": None}).eval()
    torch.testing.assert_close(alone.encode_images(image)[0], normalize(alone.student.encode_image(image), dim=-1))


@pytest.mark.slow
def test_distillation_reaches_the_teachers_similarities():
    """The student overfits a few pairs: the KL divergence falls to almost zero."""
    torch.manual_seed(0)
    module = tiny_module(teacher={"dims": [5], "scales": [5.0]}, momentum={"momentum": None})
    batch = reinforced_batch(8, dtype=torch.float32)
    for name in ("teacher_image", "teacher_text", "teacher_synthetic"):
        batch[name] = batch[name][:, :5]
    logged = {}
    module.log = lambda name, value, **_: logged.update({name: float(value)})
    optimizer = torch.optim.Adam(module.student.parameters(), lr=5e-3)
    for step in range(350):
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        optimizer.step()
        if step == 0:
            first = logged["train/distillation_real"]
    assert first > 0.05
    assert logged["train/distillation_real"] < first / 100
    assert logged["train/distillation_synthetic"] < first / 100


def test_training_on_plain_pairs(tmp_path):
    data = ShapesDataModule(
        batch_size=8, length=32, eval_length=8, image_size=32, tokenizer="clip", vocab_size=49408, max_tokens=16
    )
    module = student_of_shapes(teacher={"distillation_weight": 0.0})
    trainer = quiet_trainer(tmp_path, max_steps=2)
    trainer.fit(module, data)
    assert trainer.global_step == 2
    assert {"train/contrast_real", "train/logit_scale"} < trainer.callback_metrics.keys()
    assert not any("synthetic" in name or "distillation" in name for name in trainer.callback_metrics)


@pytest.mark.parametrize(
    ("options", "data", "message"),
    [
        (
            {"teacher": {"dims": [64, 64]}},
            {},
            r"width 128, the sum of teacher.dims \[64, 64\], got 160 in the data: set model.teacher.dims",
        ),
        ({"max_tokens": 20}, {}, "captions of 20 tokens, got 16"),
    ],
)
def test_misfitting_data_raise_one_sentence(tmp_path, shapes, options, data, message):
    with pytest.raises(UserError, match=message):
        quiet_trainer(tmp_path, max_steps=1, limit_val_batches=0).fit(student_of_shapes(**options), shapes(**data))


def test_distillation_refuses_plain_pairs(tmp_path):
    data = ShapesDataModule(
        batch_size=8, length=32, eval_length=8, image_size=32, tokenizer="clip", vocab_size=49408, max_tokens=16
    )
    with pytest.raises(UserError, match=r"Expected teacher_image, teacher_text in .*: train on reinforced data"):
        quiet_trainer(tmp_path, max_steps=1, limit_val_batches=0).fit(student_of_shapes(), data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distillation_weight": 1.5}, "distillation_weight from 0 to 1, got 1.5"),
        ({"teacher": {"dims": [5], "scales": [1.0, 2.0]}}, "got 1 teacher.dims and 2 teacher.scales"),
        ({"teacher": {"dims": [], "scales": []}}, "Expected a teacher to distill from"),
        ({"memory": {"micro_batch_size": 0}}, "micro_batch_size of at least 1, got 0"),
        ({"memory": {"loss_rows": 0}}, "loss_rows of at least 1, got 0"),
    ],
)
def test_misfitting_arguments_raise_one_sentence(options, message):
    with pytest.raises(UserError, match=message):
        tiny_module(**options)


def test_any_model_of_open_clip_is_a_student_and_starts_from_trained_weights(tmp_path, shapes):
    trained = tiny_module(seed=7)
    torch.save(trained.student.state_dict(), tmp_path / "trained.pt")
    module = tiny_module(weights=str(tmp_path / "trained.pt"))
    trainer = quiet_trainer(tmp_path, max_steps=1)
    module._trainer = trainer
    module.on_fit_start()
    for network in (module.student, module.average):
        for name, value in trained.student.state_dict().items():
            assert torch.equal(network.state_dict()[name], value), name


@pytest.mark.slow
def test_final_export_is_reparameterized(tmp_path, shapes):
    module = student_of_shapes(momentum={"momentum": 0.5})
    target = tmp_path / "out"
    trainer = quiet_trainer(tmp_path, max_steps=2, limit_val_batches=0, callbacks=[FinalExport(str(target))])
    trainer.fit(module, shapes())
    image, ids = torch.rand(5, 3, 32, 32), reinforced_batch(5, length=16, words=49408)["input_ids"]
    programs = {name: torch.export.load(target / f"{name}.pt2").module() for name in ("image", "text")}
    module.eval()
    with torch.no_grad():
        torch.testing.assert_close(programs["image"](image), module.encode_images(image)[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(programs["text"](ids), module.encode_texts(ids, ids), rtol=0, atol=1e-5)
    assert not any("batch_norm" in str(node.target) for node in programs["image"].graph.nodes)
    with pytest.raises(UserError, match="which exists"):
        quiet_trainer(tmp_path, max_steps=1, callbacks=[FinalExport(str(target))]).fit(student_of_shapes(), shapes())


def test_export_to_a_taken_folder_is_refused_before_training(tmp_path):
    """A run that resumes or repeats in the folder of its export."""
    (tmp_path / "export").mkdir()
    trainer = quiet_trainer(tmp_path, max_steps=1, callbacks=[FinalExport()])
    trainer.fit(Exported())  # an empty folder is accepted
    (tmp_path / "export" / "image.pt2").touch()
    again = quiet_trainer(tmp_path, max_steps=1, callbacks=[FinalExport()])
    with pytest.raises(UserError, match=r"Expected a new name .*export', which exists"):
        again.fit(Exported())
    assert (trainer.global_step, again.global_step) == (1, 0)


class Exported(BoringModel):
    def export(self, folder):
        pass


def test_an_export_is_refused_before_training_where_the_module_has_none(tmp_path):
    with pytest.raises(UserError, match=r"a method export\(folder\) for FinalExport, got BoringModel"):
        quiet_trainer(tmp_path, max_steps=1, callbacks=[FinalExport()]).fit(BoringModel())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="SyncBatchNorm needs CUDA")
def test_synchronized_batch_norm(tmp_path, shapes):
    module = student_of_shapes()
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, strategy="ddp", sync_batchnorm=True, max_steps=2, default_root_dir=tmp_path
    )
    trainer.fit(module, shapes())
    assert any(isinstance(part, nn.SyncBatchNorm) for part in module.student.modules())
