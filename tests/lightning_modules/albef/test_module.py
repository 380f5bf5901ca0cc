import contextlib
import copy
import logging

import pytest
import torch
from lightning import Trainer
from torch.utils.data import DataLoader

from support.methods.albef import pairs_loader, random_batch, tiny_albef
from vlightning.callbacks import EMACallback
from vlightning.common.errors import UserError
from vlightning.lightning_modules import ALBEFModule
from vlightning.lightning_modules.albef import itc, itm, mlm
from vlightning.lightning_modules.albef.official import to_official


def _trainer(tmp_path, **changes):
    return Trainer(
        **{
            "accelerator": "cpu",
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "default_root_dir": tmp_path,
            "max_epochs": 1,
        }
        | changes
    )


def _step(module, monkeypatch, batch=None, alpha=0.4, seed=0):
    monkeypatch.setattr(module, "current_alpha", lambda: alpha)
    torch.manual_seed(seed)
    return module.training_step(batch or random_batch(8), 0)


def fusion(module):
    """The teacher's layers with cross-attention."""
    encoder = module.teacher.text_encoder
    return encoder.layers[encoder.fusion_layer :]


def test_paper_sizes_give_the_papers_counts():
    with torch.device("meta"):
        module = ALBEFModule()
    count = lambda part: sum(p.numel() for p in part.parameters())  # noqa: E731
    assert count(module.student.visual_encoder) == 85_844_736
    assert count(module.student.text_encoder) == 123_697_722
    assert sum(p.numel() for p in module.parameters() if p.requires_grad) == 209_937_725
    assert count(module) == 419_873_911
    assert len(to_official(module)) == 844


def test_teacher_is_initialized_as_the_student():
    module = tiny_albef()
    assert all(torch.equal(a, b) for a, b in zip(module.student.parameters(), module.teacher.parameters(), strict=True))


def test_gradient_reaches_every_trainable_parameter_and_nothing_else(monkeypatch):
    module = tiny_albef(text={"mask_probability": 0.5})
    outputs = _step(module, monkeypatch)
    outputs["loss"].backward()
    for name, parameter in module.named_parameters():
        assert (parameter.grad is None) == (name.startswith("teacher.")), name
    dead = [n for n, p in module.named_parameters() if p.requires_grad and not p.grad.any()]
    assert dead == []
    assert not outputs["keys"]["image"].requires_grad
    assert not module.image_queue.features.requires_grad


def test_matching_loss_reaches_the_unimodal_encoders(monkeypatch):
    """Image tokens and text states are not detached on their way into the fusion encoder."""
    module = tiny_albef()
    for part, name in ((itc, "itc_loss"), (mlm, "mlm_loss")):
        monkeypatch.setattr(part, name, lambda *args: args[0].sum() * 0)
    _step(module, monkeypatch)["loss"].backward()
    assert module.student.visual_encoder.patch_embed.proj.weight.grad.any()
    assert module.student.text_encoder.layers[0].attention.self.query.weight.grad.any()


@pytest.mark.parametrize("official", [False, True])
def test_teacher_dropout_is_a_switch_in_every_mode_of_lightning(tmp_path, official):
    seen = []

    class Recorded(ALBEFModule):
        def on_train_batch_start(self, batch, batch_idx):
            drops = [
                any(part.training and part.p > 0 for part in network.modules() if isinstance(part, torch.nn.Dropout))
                for network in (self.teacher.text_encoder, self.student.text_encoder)
            ]
            drops += [layer.crossattention.training and layer.crossattention.dropout > 0 for layer in fusion(self)]
            seen.append(drops)

    module = tiny_albef(kind=Recorded, momentum={"teacher_dropout": official})
    evaluation = random_batch(8)
    evaluation |= {"text_image_id": evaluation["image_id"], "text_id": evaluation["image_id"]}
    trainer = _trainer(tmp_path, max_epochs=2, limit_train_batches=2)
    trainer.fit(module, pairs_loader(16, 8), DataLoader([evaluation], batch_size=None))
    assert seen == [[official, True, official]] * 4
    assert not module.eval().teacher.training


def test_teacher_is_the_weighted_average_of_the_students(tmp_path):
    students = []

    class Recorded(ALBEFModule):
        def on_train_batch_start(self, batch, batch_idx):
            students.append(copy.deepcopy(self.student.state_dict()))

    module = tiny_albef(kind=Recorded)
    _trainer(tmp_path, limit_train_batches=5).fit(module, pairs_loader(40, 8))
    students.append(module.student.state_dict())
    for name, value in module.teacher.state_dict().items():
        average = students[0][name].double()
        for student in students[1:]:
            average = 0.995 * average + 0.005 * student[name].double()
        torch.testing.assert_close(value.double(), average, rtol=1e-6, atol=1e-7)


def test_alpha_rises_by_batch_over_the_first_epoch_then_stays(tmp_path):
    seen = []

    class Recorded(ALBEFModule):
        def current_alpha(self):
            seen.append(super().current_alpha())
            return seen[-1]

    _trainer(tmp_path, max_epochs=2).fit(tiny_albef(kind=Recorded), pairs_loader(40, 8))
    assert seen == pytest.approx([0, 0.08, 0.16, 0.24, 0.32] + [0.4] * 5)


def test_temperature_is_clamped_after_each_optimizer_step(tmp_path):
    for start, rate, bound in ((0.0011, 1.0, 0.001), (0.49, 10.0, 0.5)):
        module = tiny_albef(contrast={"temperature": start}, optim={"learning_rate": rate, "warmup_steps": 0})
        _trainer(tmp_path, limit_train_batches=1).fit(module, pairs_loader(8, 8))
        assert 0.001 - 1e-9 <= module.temperature.item() <= 0.5
        assert module.temperature.item() in (pytest.approx(0.001), pytest.approx(0.5)), bound


def test_optimizer_decays_matrices_only_and_the_temperature_on_request():
    for decayed in (False, True):
        module = tiny_albef(optim={"decay_temperature": decayed})
        first, second = module.configure_optimizers()["optimizer"].param_groups
        assert first["weight_decay"] == 0.02
        assert second["weight_decay"] == 0
        assert any(p is module.temperature for p in first["params"]) == decayed
        assert all(p.ndim >= 2 or p is module.temperature for p in first["params"])
        ids = [id(p) for group in (first, second) for p in group["params"]]
        trainable = [id(p) for p in module.parameters() if p.requires_grad]
        assert sorted(ids) == sorted(trainable)


def test_language_head_on_masked_rows_equals_the_head_on_all_rows(monkeypatch):
    module = tiny_albef().double()
    batch = random_batch(8, dtype=torch.float64)
    few = _step(module.eval(), monkeypatch, batch)
    gradients = torch.autograd.grad(few["loss"], module.student.text_encoder.cls.predictions.transform.dense.weight)
    select = mlm.select_positions
    monkeypatch.setattr(mlm, "select_positions", lambda ids, masked, chosen, rows: select(ids, masked, chosen, 48))
    full = _step(module, monkeypatch, batch)
    torch.testing.assert_close(few["loss"], full["loss"], rtol=1e-12, atol=0)
    expected = torch.autograd.grad(full["loss"], module.student.text_encoder.cls.predictions.transform.dense.weight)
    torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(("mask_probability", "size"), [(0.0, 8), (0.15, 1)])
def test_a_batch_without_masked_words_or_without_negatives_trains(monkeypatch, mask_probability, size):
    module = tiny_albef(text={"mask_probability": mask_probability})
    loss = _step(module, monkeypatch, random_batch(size))["loss"]
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in module.parameters() if p.requires_grad)


def test_images_and_texts_that_repeat_are_positives_and_never_negatives(monkeypatch):
    module = tiny_albef()
    batch = random_batch(6)
    batch["image_id"] = torch.tensor([0, 0, 1, 2, 3, 4])
    batch["input_ids"][5] = batch["input_ids"][4]
    seen = []
    original = itm.draw_hard_negatives
    monkeypatch.setattr(itm, "draw_hard_negatives", lambda s, f: seen.append(f) or original(s, f))
    matches, targets = [], itc.contrastive_targets
    monkeypatch.setattr(itc, "contrastive_targets", lambda s, m, a: matches.append(m) or targets(s, m, a))
    _step(module, monkeypatch, batch)
    expected = torch.eye(6, dtype=torch.bool)
    for a, b in ((0, 1), (4, 5)):
        expected[a, b] = expected[b, a] = True
    assert torch.equal(seen[0], expected)
    assert torch.equal(seen[1], expected)
    assert matches[0][:, :6].sum() == matches[1][:, :6].sum() == 8


def test_empty_queue_slots_carry_no_loss_and_filled_ones_do(monkeypatch):
    module = tiny_albef().eval()
    empty = _step(module, monkeypatch)["loss"]
    module.image_queue.features.normal_()
    module.text_queue.features.normal_()
    assert torch.equal(_step(module, monkeypatch)["loss"], empty)
    for queue in module.queues().values():
        queue.enqueue(torch.nn.functional.normalize(torch.randn(3, 8)), queue.fitting_ids(torch.arange(100, 103)))
    assert _step(module, monkeypatch)["loss"] > empty


@pytest.mark.parametrize("queue_start", ["empty", "random"])
def test_any_integer_may_be_an_image_id(monkeypatch, queue_start):
    losses = []
    for own in (77, -1):
        module = tiny_albef(contrast={"queue_start": queue_start, "queue_size": 24})
        for queue in module.queues().values():
            queue.enqueue(
                torch.nn.functional.normalize(torch.eye(queue.dim), dim=1)[:3],
                queue.fitting_ids(torch.tensor([5, own, 6])),
            )
        batch = random_batch(8)
        batch["image_id"] = batch["image_id"].clone()
        batch["image_id"][3] = own
        losses.append(_step(module, monkeypatch, batch)["loss"])
    assert torch.equal(*losses)


def test_itc_does_not_depend_on_the_order_of_the_batch(monkeypatch):
    """No row depends on its position."""
    module = tiny_albef(text={"mask_probability": 0.0}).double().eval()
    batch = random_batch(8, dtype=torch.float64)
    order = torch.randperm(8)
    monkeypatch.setattr(itm, "itm_loss", lambda *args: args[0].sum() * 0)
    first = _step(module, monkeypatch, batch)["loss"]
    second = _step(module, monkeypatch, {name: column[order] for name, column in batch.items()})["loss"]
    torch.testing.assert_close(first, second, rtol=1e-12, atol=0)


def test_user_callback_is_not_replaced(tmp_path):
    own = EMACallback(tiny_albef().momentum_pairs())
    trainer = _trainer(tmp_path, callbacks=[own], limit_train_batches=1)
    trainer.fit(tiny_albef(), pairs_loader(8, 8))
    assert [c for c in trainer.callbacks if isinstance(c, EMACallback)] == [own]


def test_initial_weights_are_loaded_once_and_do_not_replace_a_checkpoint(tmp_path, caplog):
    def starts(module, ckpt_path=None, epochs=1):
        caplog.clear()
        trainer = _trainer(tmp_path, limit_train_batches=1, max_epochs=epochs)
        with caplog.at_level(logging.INFO):
            trainer.fit(module, pairs_loader(8, 8), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / "run.ckpt")
        return caplog.text.count("ALBEF starts with image encoder at random; text and fusion encoder at random")

    module = tiny_albef()
    assert starts(module) == 1
    assert starts(module) == 0  # a second training of the same module
    assert starts(tiny_albef(seed=1), ckpt_path=tmp_path / "run.ckpt", epochs=2) == 0
    assert starts(ALBEFModule.load_from_checkpoint(tmp_path / "run.ckpt", weights_only=True)) == 0


def test_resume_does_not_need_the_initial_weights(tmp_path):
    trainer = _trainer(tmp_path, limit_train_batches=1)
    trainer.fit(tiny_albef(), pairs_loader(8, 8))
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    gone = tiny_albef(seed=1, vision={"weights": str(tmp_path / "gone.safetensors")})
    resumed = _trainer(tmp_path, limit_train_batches=1, max_epochs=2)
    resumed.fit(gone, pairs_loader(8, 8), ckpt_path=tmp_path / "run.ckpt")
    assert resumed.global_step == 2


def test_training_checkpoint_holds_plain_data_and_the_whole_method(tmp_path):
    module = tiny_albef()
    trainer = _trainer(tmp_path, limit_train_batches=3, enable_checkpointing=True)
    trainer.fit(module, pairs_loader(24, 8))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    checkpoint = torch.load(tmp_path / "x.ckpt", weights_only=True)
    for name in ("teacher.vision_proj.weight", "image_queue.features", "text_queue.pointer", "temperature"):
        assert torch.equal(checkpoint["state_dict"][name], module.state_dict()[name])
    again = ALBEFModule.load_from_checkpoint(tmp_path / "x.ckpt")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in module.state_dict().items())


def test_validation_logs_recall_of_the_student(tmp_path):
    module = tiny_albef()

    def flattened(rows):
        batch = torch.utils.data.default_collate(rows)
        twice = {name: batch[name].repeat_interleave(2, 0) for name in ("input_ids", "attention_mask")}
        texts = batch["image_id"].repeat_interleave(2)
        return batch | twice | {"text_image_id": texts, "text_id": texts}

    loader = DataLoader(pairs_loader(20, 1).dataset, batch_size=8, collate_fn=flattened)
    (result,) = _trainer(tmp_path).validate(module, loader, verbose=False)
    everything = random_batch(20)
    with torch.no_grad():
        image, text = module.eval()(everything)
    scores = text @ image.T
    ranks = (scores > scores.diag()[:, None]).sum(1)
    assert result["val/text_to_image_r5"] == pytest.approx(100 * (ranks < 5).double().mean().item())
    assert set(result) == {f"val/{d}_r{k}" for d in ("image_to_text", "text_to_image") for k in (1, 5, 10)} | {
        "val/recall_mean"
    }


def test_empty_evaluation_batches_change_nothing(tmp_path):
    """A process whose share was unusable gets a batch without rows; an image to predict may have no caption."""
    batch = random_batch(12) | {"text_image_id": torch.arange(12), "text_id": torch.arange(12)}
    nothing = {name: column[:0] for name, column in batch.items()}
    module = tiny_albef()
    (alone,) = _trainer(tmp_path).validate(module, DataLoader([batch], batch_size=None), verbose=False)
    (mixed,) = _trainer(tmp_path).validate(module, DataLoader([nothing, batch], batch_size=None), verbose=False)
    assert mixed == alone
    assert alone["val/text_to_image_r10"] > 0
    without_texts = batch | {name: nothing[name] for name in ("input_ids", "attention_mask", "text_image_id")}
    features = module.eval().predict_step(without_texts, 0)
    assert torch.equal(features["image_features"], module.predict_step(batch, 0)["image_features"])
    assert features["text_features"].shape == (0, features["image_features"].shape[1])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"vision": {"image_size": 20}}, "image size that patches of 8 pixels divide, got 20"),
        ({"vision": {"heads": 3}}, "width that 3 heads divide, got 16"),
        ({"text": {"vocab_size": 50}}, "special token ids below text.vocab_size 50"),
        ({"contrast": {"temperature": 0.9}}, r"contrast.temperature of at most contrast.temperature_max, 0.5, got 0.9"),
    ],
)
def test_wrong_settings_are_refused(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        tiny_albef(**changes)


def test_special_token_ids_that_differ_from_the_data_are_an_error(tmp_path):
    module = tiny_albef()
    trainer = _trainer(tmp_path)
    module._trainer = trainer
    trainer.datamodule = type("Data", (), {"special_token_ids": {"pad": 1, "cls": 101, "sep": 102, "mask": 103}})()
    with pytest.raises(UserError, match=r"special ids .*'pad': 1"):
        module.on_fit_start()


def test_a_step_does_not_synchronise_with_the_device(monkeypatch):
    """On the meta device, reading a value raises."""
    module = tiny_albef().to("meta")
    batch = {name: column.to("meta") for name, column in random_batch(8).items()}
    monkeypatch.setattr(
        torch, "autocast", lambda *_, **__: contextlib.nullcontext()
    )  # does not support the meta device
    outputs = _step(module, monkeypatch, batch)
    outputs["loss"].backward()
    for name, queue in module.queues().items():
        queue.enqueue(outputs["keys"][name], outputs["key_ids"][name])
    EMACallback(module.momentum_pairs(), log=False).update(module)
    with pytest.raises(RuntimeError, match="meta"):
        outputs["loss"].item()
