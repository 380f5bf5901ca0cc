"""Extraction: the step against plain formulas, slices, teacher, schedule, groups, and a file at the end."""

import math

import lightning.pytorch as pl
import open_clip
import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from support.methods.clip import LENGTH, SIZE, reinforced_batch
from support.methods.mmlg import ready, tiny_extraction, write_teacher
from vlightning.callbacks import LearngeneExpansionCallback, LearngeneWriter
from vlightning.callbacks.learngene.expansion import expand_learngene
from vlightning.callbacks.learngene.file import load_learngene
from vlightning.common.errors import UserError
from vlightning.datamodules import ShapesDataModule
from vlightning.lightning_modules import MMLGModule
from vlightning.lightning_modules.mmlg.settings import TeacherSettings, TextSettings, VisionSettings
from vlightning.lightning_modules.mmlg.teacher import check_teacher
from vlightning.lightning_modules.networks.clip.preprocessing import preprocessing_of
from vlightning.lightning_modules.networks.published_clip import PublishedCLIP

ROWS = 6


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return write_teacher(tmp_path_factory.mktemp("teacher") / "teacher.safetensors")


def batch():
    columns = reinforced_batch(ROWS)
    return {name: columns[name] for name in ("image", "input_ids")}


def plain_loss(module, batch, weight):
    """Equations 3 to 8 of the paper, with whole matrices of logits."""
    image, text = (normalize(part, dim=-1) for part in module.student.encode_pairs(batch["image"], batch["input_ids"]))
    logits = module.student.logit_scale.exp() * image @ text.T
    labels = torch.arange(ROWS)
    contrast = (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2
    if not weight:
        return contrast, None
    network = module.teacher.network
    with torch.no_grad():
        theirs = normalize(network.encode_image(batch["image"]), dim=-1)
        theirs = module.teacher_scale * theirs @ normalize(network.encode_text(batch["input_ids"]), dim=-1).T
    distillation = (cross_entropy(logits, theirs.softmax(1)) + cross_entropy(logits.T, theirs.T.softmax(1))) / 2
    return contrast + weight * distillation, distillation


def gradients(module, loss):
    names, parameters = zip(*((n, p) for n, p in module.named_parameters() if p.requires_grad), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize(
    ("weight", "options"),
    [
        (1.0, {}),
        (1.0, {"student": "TLEG"}),
        (1.0, {"student": "plain", "micro_batch_size": 4, "depth": 3}),
        (0.5, {"micro_batch_size": 4, "loss_rows": 4}),
        (0.0, {"micro_batch_size": 1}),
        (2.0, {"loss_rows": 1}),
    ],
)
def test_a_step_equals_the_papers_loss_with_and_without_slices(teacher, weight, options):
    module = ready(tiny_extraction(teacher if weight else None, distillation_weight=weight, **options))
    logged = {}
    module.log = lambda name, value, **_: logged.update({name: value})
    loss = module.training_step(batch(), 0)
    expected, distillation = plain_loss(module, batch(), weight)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    found, wanted = gradients(module, loss), gradients(module, expected)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-13, msg=name)
        assert found[name].any(), name
    if weight:
        torch.testing.assert_close(logged["train/distillation"], distillation, rtol=1e-12, atol=0)
        assert module.teacher_scale == pytest.approx(20.0, rel=1e-6)
    else:
        assert "train/distillation" not in logged


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_other_pairs_of_an_image_are_no_negatives_without_a_teacher(teacher, weight):
    ids = torch.tensor([4, 7, 4, 4, 9, 7])
    module = ready(tiny_extraction(teacher if weight else None, distillation_weight=weight))
    loss = module.training_step(batch() | {"image_id": ids}, 0)
    if weight:
        torch.testing.assert_close(loss, module.training_step(batch(), 0), rtol=0, atol=0)
        return
    image, text = (normalize(part, dim=-1) for part in module.student.encode_pairs(*batch().values()))
    others = ids[:, None].eq(ids) & ~torch.eye(ROWS, dtype=torch.bool)
    logits = (module.student.logit_scale.exp() * image @ text.T).masked_fill(others, -torch.inf)
    expected = (cross_entropy(logits, torch.arange(ROWS)) + cross_entropy(logits.T, torch.arange(ROWS))) / 2
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def test_slices_give_bit_identical_gradients(teacher):
    whole, sliced = (ready(tiny_extraction(teacher, **options)) for options in ({}, {"micro_batch_size": 4}))
    losses = [module.training_step(batch(), 0) for module in (whole, sliced)]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    found, wanted = gradients(sliced, losses[1]), gradients(whole, losses[0])
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-13, msg=name)


def test_the_teacher_gets_no_gradient_stays_in_eval_mode_and_out_of_optimizer_and_checkpoint(teacher):
    module = ready(tiny_extraction(teacher)).train()
    assert module.training
    assert not any(part.training for part in module.teacher.modules())
    module.training_step(batch(), 0).backward()
    theirs = {id(parameter) for parameter in module.teacher.parameters()}
    assert len(theirs) > 20
    assert all(parameter.grad is None for parameter in module.teacher.parameters())
    module._trainer = None
    groups = module.configure_optimizers()["optimizer"].param_groups
    assert not theirs & {id(parameter) for group in groups for parameter in group["params"]}
    assert all(name.startswith("student.") for name in module.state_dict())


def test_weight_decay_spares_norms_biases_coefficients_and_the_scale():
    module = tiny_extraction(None)
    module._trainer = None
    decayed, spared = (
        {id(parameter) for parameter in group["params"]}
        for group in module.configure_optimizers()["optimizer"].param_groups
    )
    names = {id(parameter): name for name, parameter in module.student.named_parameters()}
    assert decayed | spared == names.keys()
    found = {names[key] for key in spared}
    assert {name for name in names.values() if name.startswith(("coefficients.", "norms."))} < found
    assert {"logit_scale", "vision.ln_pre.weight", "blocks.text.1.fc1.bias", "vision.class_embedding"} < found
    assert all("weight" not in name or "norm" in name or ".ln_" in name for name in found)


@pytest.mark.parametrize(("warmup", "used"), [(0, 0), (4, 4), (19, 19), (20, 2), (500, 2)])
def test_the_schedule_is_open_clips_with_a_warm_up_that_fits(warmup, used):
    schedule = tiny_extraction(None, learning_rate=2.0, warmup_steps=warmup).paper_schedule()
    assert schedule.rate(0, 2**62) == pytest.approx(2.0 / max(warmup, 1))
    for step in range(1, 20):
        if step < used:
            expected = 2.0 * (step + 1) / used
        else:
            expected = 0.5 * (1 + math.cos(math.pi * (step - used) / (20 - used))) * 2.0
        assert schedule.rate(step, 20) == pytest.approx(expected), step


def shapes(**options):
    defaults = {"batch_size": 8, "length": 32, "eval_length": 8, "image_size": SIZE, "max_tokens": LENGTH}
    return ShapesDataModule(tokenizer="clip", vocab_size=49408, num_workers=0, **{**defaults, **options})


def quiet_trainer(folder, *callbacks, **options):
    silent = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return pl.Trainer(
        accelerator="cpu", default_root_dir=folder, enable_checkpointing=False, callbacks=list(callbacks),
        **silent, **options,
    )  # fmt: skip


def test_a_warm_up_longer_than_the_run_is_cut_with_a_warning(tmp_path):
    with pytest.warns(
        UserWarning, match="warmup_steps is 10000, but the run has 4 optimizer steps: the warm-up takes 0"
    ):
        quiet_trainer(tmp_path, max_epochs=1, limit_val_batches=0).fit(
            tiny_extraction(None, warmup_steps=10_000), shapes()
        )


class RaisesScale(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        with torch.no_grad():
            module.student.logit_scale.fill_(7.0)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        assert module.student.logit_scale.item() <= math.log(50.0) + 1e-6


def test_an_extraction_writes_a_file_that_expands_to_the_evaluated_network(tmp_path, teacher):
    module, file = tiny_extraction(teacher, max_logit_scale=50.0), tmp_path / "learngene.safetensors"
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trainer = quiet_trainer(tmp_path, LearngeneWriter(str(file)), RaisesScale(), max_epochs=1)
    trainer.fit(module, shapes())
    assert {
        "train/loss",
        "train/contrast",
        "train/distillation",
        "val/karpathy5/recall_mean",
        "val/paper/image_to_text_r1",
    } < trainer.callback_metrics.keys()
    assert trainer.callback_metrics["train/coefficient_vision"] > 0
    for name, values in module.learngene_terms().norms.items():
        assert trainer.callback_metrics[f"train/summand_norm_{name}"] == pytest.approx(sum(values) / 2)
    for name, tensor in module.state_dict().items():
        assert not torch.equal(tensor, before[name]), name
    learngene = load_learngene(file)
    assert (learngene.step, learngene.teacher) == (4, module.teacher.origin)
    assert learngene.data["class"] == "ShapesDataModule"
    sizes = {"layers": 4, "width": 16}
    descendant = open_clip.CLIP(
        12,
        {**sizes, "image_size": SIZE, "head_width": 8, "patch_size": 8},
        {**sizes, "context_length": LENGTH, "vocab_size": 49408, "heads": 2},
    ).eval()
    expand_learngene(learngene, descendant)
    columns = reinforced_batch(ROWS, dtype=torch.float32)
    module.eval()
    with torch.no_grad():
        image, text, scale = descendant(columns["image"], columns["input_ids"])
        torch.testing.assert_close(module.encode_images(columns["image"])[0], image, rtol=1e-5, atol=1e-5)
        found = module.encode_texts(columns["input_ids"], columns["input_ids"])
    torch.testing.assert_close(found, text, rtol=1e-5, atol=1e-5)
    assert module.student.logit_scale.exp().item() == pytest.approx(scale.item())


def test_a_checkpoint_names_its_teacher_and_refuses_another(tmp_path, teacher):
    trainer = quiet_trainer(tmp_path, max_steps=2, limit_val_batches=0)
    module = tiny_extraction(teacher)
    trainer.fit(module, shapes())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert content["teacher"] == module.teacher.origin
    assert content["teacher"]["weights"] == teacher
    assert not any("teacher" in name for name in content["state_dict"])
    read = MMLGModule.load_from_checkpoint(tmp_path / "a.ckpt")
    assert all(torch.equal(read.state_dict()[name], tensor) for name, tensor in content["state_dict"].items())
    other = write_teacher(tmp_path / "other.safetensors", seed=8)
    with pytest.raises(UserError, match="Expected the teacher that the checkpoint was trained with"):
        quiet_trainer(tmp_path, max_steps=3, limit_val_batches=0).fit(
            tiny_extraction(other), shapes(), ckpt_path=tmp_path / "a.ckpt"
        )


def test_half_precision_trains(tmp_path, teacher):
    trainer = quiet_trainer(tmp_path, max_steps=2, precision="bf16-mixed", limit_val_batches=0)
    trainer.fit(tiny_extraction(teacher, micro_batch_size=4), shapes())
    assert trainer.callback_metrics["train/loss"].isfinite()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 24}, "Expected image_size 16 for the teacher tiny-clip-of-the-tests of '.*', got 24: set data"),
        ({"max_tokens": 7}, "Expected max_tokens 6 for the teacher .*, got 7"),
        ({"vocab_size": 30}, "Expected vocab_size 49408 for the teacher .*, got 30"),
        ({"image_mean": [0.0, 0.0, 0.0]}, r"Expected image_mean \(0.48.* for the teacher .*, got \(0.0, 0.0, 0.0\)"),
        ({"teacher.weights": "gone.safetensors"}, "found no file 'gone.safetensors'"),
    ],
)
def test_a_misfitting_teacher_is_refused_with_one_sentence(teacher, options, message):
    with pytest.raises(UserError, match=message):
        tiny_extraction(teacher, **options).setup("fit")


def test_a_captioner_as_teacher_is_refused_with_one_sentence():
    config = open_clip.get_model_config("coca_ViT-B-32")
    with torch.device("meta"):
        network = open_clip.CoCa(**{name: part for name, part in config.items() if name != "custom_text"})
    outside = PublishedCLIP(network, preprocessing_of("ViT-B-32"), list, "coca_ViT-B-32", "tag", "0")
    with pytest.raises(UserError, match="Expected max_tokens 76 for the teacher coca_ViT-B-32 of 'tag', got 77"):
        check_teacher(outside, VisionSettings(), TextSettings(), {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 3}, "Expected an even number of layers, which come in pairs, got 3"),
        ({"distillation_weight": -1.0}, "Expected teacher.distillation_weight of at least 0, got -1.0"),
        ({"micro_batch_size": 0}, "Expected memory.micro_batch_size of at least 1, got 0"),
        ({"loss_rows": 0}, "Expected memory.loss_rows of at least 1, got 0"),
    ],
)
def test_invalid_arguments_are_refused_with_one_sentence(options, message):
    with pytest.raises(UserError, match=message):
        tiny_extraction(None, **options)


def test_captions_of_another_length_are_refused_with_one_sentence():
    columns = batch()
    columns["input_ids"] = columns["input_ids"][:, 1:]
    with pytest.raises(UserError, match="Expected captions of 6 tokens, got 5"):
        ready(tiny_extraction(None)).training_step(columns, 0)


def test_the_papers_teacher_has_the_papers_size():
    config = open_clip.get_model_config("ViT-B-16")
    with torch.device("meta"):
        network = open_clip.CLIP(**config)
    assert sum(parameter.numel() for parameter in network.parameters()) == 149_620_737
    chosen = TeacherSettings().model, TeacherSettings().weights
    assert chosen == ("ViT-B-16", "openai")
    assert open_clip.get_pretrained_cfg(*chosen)["quick_gelu"]  # which `load_published` switches on then


def checkpoint(folder, **options):
    trainer = quiet_trainer(folder, max_steps=1, limit_val_batches=0)
    module = tiny_extraction(None, **options)
    trainer.fit(module, shapes())
    trainer.save_checkpoint(folder / "first.ckpt")
    return str(folder / "first.ckpt"), {name: tensor.clone() for name, tensor in module.state_dict().items()}


class Notes(pl.Callback):
    """Return the state that a run starts from."""

    def on_train_start(self, trainer, module):
        self.state = {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("options", [{}, {"student": "plain", "depth": 3}, {"student": "TLEG"}])
def test_a_student_starts_from_an_earlier_one_and_a_resumed_run_from_its_checkpoint(tmp_path, caplog, options):
    file, state = checkpoint(tmp_path, **options)
    notes, data = Notes(), shapes()
    trainer = quiet_trainer(tmp_path, notes, max_steps=2, limit_val_batches=0)
    trainer.fit(tiny_extraction(None, seed=5, weights=file, **options), data)
    assert f"The student starts from {file!r}." in caplog.text
    assert notes.state.keys() == state.keys()
    assert all(torch.equal(notes.state[name], tensor) for name, tensor in state.items())
    trainer.save_checkpoint(tmp_path / "second.ckpt")
    second = torch.load(tmp_path / "second.ckpt", weights_only=True)["state_dict"]
    resumed = quiet_trainer(tmp_path, notes, max_steps=3, limit_val_batches=0)
    resumed.fit(tiny_extraction(None, weights="gone.ckpt", **options), data, ckpt_path=tmp_path / "second.ckpt")
    assert all(torch.equal(notes.state[name], tensor) for name, tensor in second.items())


def test_misfitting_weights_are_refused(tmp_path):
    file, _ = checkpoint(tmp_path, student="plain", depth=3)
    torch.save({"state_dict": {"other.weight": torch.ones(1)}}, tmp_path / "other.ckpt")
    for weights, options, message in (
        (
            file,
            {"student": "plain", "depth": 4},
            "Expected the tensors of the student from '.*first.ckpt', got missing .* set the",
        ),
        (file, {}, "Expected the tensors of the student"),
        (str(tmp_path / "other.ckpt"), {}, "Expected a checkpoint of MMLGModule, got '.*other.ckpt' without a student"),
        ("gone.ckpt", {}, "Expected a checkpoint to start from, got no file or folder 'gone.ckpt'"),
    ):
        with pytest.raises(UserError, match=message):
            quiet_trainer(tmp_path, max_steps=1).fit(tiny_extraction(None, weights=weights, **options), shapes())
    both = tiny_extraction(None, weights=file, student="plain", depth=3)
    with pytest.raises(UserError, match=r"got weights '.*first.ckpt' beside a LearngeneExpansionCallback"):
        quiet_trainer(tmp_path, LearngeneExpansionCallback("any", "student"), max_steps=1).fit(both, shapes())


@pytest.mark.parametrize("student", ["TLEG", "plain"])
def test_baselines_of_mm_lg_write_a_file(tmp_path, student):
    module, file = tiny_extraction(None, student=student), tmp_path / "learngene.safetensors"
    quiet_trainer(tmp_path, LearngeneWriter(str(file)), max_steps=2, limit_val_batches=0).fit(module, shapes())
    found, state = load_learngene(file), module.student.state_dict()
    if student == "TLEG":
        assert found.method == "TLEG"
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in state.items())
    else:
        assert found.method == "He-LG"
        assert torch.equal(found.tensors["layers.text.2.fc1.weight"], state["transformer.resblocks.3.mlp.c_fc.weight"])
        vision = state["visual.transformer.resblocks.1.attn.in_proj_weight"]
        assert torch.equal(found.tensors["layers.vision.0.qkv.weight"], vision)


def test_a_descendant_is_activated_from_its_file(tmp_path, teacher):
    """Extraction, expansion by the callback, and a step with the same teacher."""
    module, file = tiny_extraction(teacher), tmp_path / "learngene.safetensors"
    quiet_trainer(tmp_path, LearngeneWriter(str(file)), max_steps=2, limit_val_batches=0).fit(module, shapes())
    notes, descendant = Notes(), tiny_extraction(teacher, seed=3, student="plain")
    callback = LearngeneExpansionCallback(str(file), "student")
    quiet_trainer(tmp_path, callback, notes, max_steps=1, limit_val_batches=0).fit(descendant, shapes())
    state = {name.removeprefix("student."): tensor for name, tensor in notes.state.items()}
    start = tiny_extraction(None, student="plain").student
    start.load_state_dict(state)
    columns = reinforced_batch(ROWS, dtype=torch.float32)
    with torch.no_grad():
        expected = module.student.eval().encode_pairs(columns["image"], columns["input_ids"])
        for one, other in zip(start.eval().encode_pairs(columns["image"], columns["input_ids"]), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert not torch.equal(descendant.student.visual.proj, start.visual.proj)
