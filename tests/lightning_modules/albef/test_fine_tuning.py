"""Fine-tuning for retrieval: contrast and matching with image ids, without masked words."""

import pytest
import torch
from lightning import Trainer

from support.methods.albef import pairs_loader, random_batch, tiny_albef
from vlightning.lightning_modules.albef import itc, itm
from vlightning.lightning_modules.albef import module as step


def _step(module, monkeypatch, batch):
    logged = {}
    monkeypatch.setattr(module, "current_alpha", lambda: 0.4)
    monkeypatch.setattr(module, "log_dict", lambda values, **_: logged.update(values))
    return module.training_step(batch, 0), logged


def test_no_word_is_masked_and_every_parameter_has_a_gradient(monkeypatch):
    module = tiny_albef(mlm=False)
    assert module.student.text_encoder.cls is None
    assert not any(".cls." in name for name in module.state_dict())
    monkeypatch.setattr(step, "draw_masked_tokens", lambda *_: pytest.fail("words were masked"))
    outputs, logged = _step(module, monkeypatch, random_batch(8))
    outputs["loss"].backward()
    assert {name for name in logged if "loss_" in name} == {"train/loss_itc", "train/loss_itm"}
    torch.testing.assert_close(outputs["loss"].detach(), logged["train/loss_itc"] + logged["train/loss_itm"])
    assert all(p.grad is not None for name, p in module.named_parameters() if p.requires_grad)


def test_contrast_and_matching_equal_pre_training(monkeypatch):
    with_words, without = tiny_albef(text={"dropout": 0.0}), tiny_albef(mlm=False, text={"dropout": 0.0})
    without.load_state_dict({name: t for name, t in with_words.state_dict().items() if ".cls." not in name})
    losses = []
    monkeypatch.setattr(itm, "draw_hard_negatives", lambda s, f: itm.Negatives((i := torch.arange(8)).roll(1), i > -1))
    for module in (with_words, without):
        losses.append(_step(module, monkeypatch, random_batch(8))[1])
    for name in ("train/loss_itc", "train/loss_itm"):
        torch.testing.assert_close(losses[1][name], losses[0][name])


def test_keys_of_the_same_image_share_the_target_in_batch_and_queue(monkeypatch):
    module = tiny_albef(mlm=False)
    batch = random_batch(4)
    batch["image_id"] = torch.tensor([7, 7, 8, 9])
    ids = torch.tensor([9, 1, 7, 7])
    for queue in module.queues().values():
        queue.enqueue(torch.nn.functional.normalize(torch.randn(4, 8)), queue.fitting_ids(ids))
    seen = []
    monkeypatch.setattr(
        itc,
        "contrastive_targets",
        lambda logits, positives, alpha: seen.append(positives) or torch.zeros_like(logits),
    )
    outputs, _ = _step(module, monkeypatch, batch)
    rows = torch.zeros(4, 20, dtype=torch.bool)
    for row, columns in enumerate([[0, 1, 6, 7], [0, 1, 6, 7], [2], [3, 4]]):
        rows[row, columns] = True
    assert len(seen) == 2
    assert all(torch.equal(positives, rows) for positives in seen)
    assert torch.equal(outputs["key_ids"]["image"][:, 0], batch["image_id"])


def test_ids_go_into_the_queue_and_the_temperature_stays_in_its_bounds(tmp_path):
    module = tiny_albef(mlm=False, contrast={"temperature": 0.0011}, optim={"learning_rate": 1.0, "warmup_steps": 0})
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False, max_steps=1
    )
    trainer.fit(module, pairs_loader(8, 8))
    assert sorted(module.text_queue.ids[:8, 0].tolist()) == list(range(8))
    assert torch.equal(module.text_queue.ids, module.image_queue.ids)
    assert module.temperature.item() in (pytest.approx(0.001), pytest.approx(0.5))  # Adam's first step is of length 1


@pytest.mark.parametrize("counts", [True, False])
def test_keys_of_the_same_text_share_the_target_in_batch_and_queue_unless_switched_off(monkeypatch, counts):
    module = tiny_albef(mlm=False, contrast={"match_same_text": counts})
    first, batch = random_batch(4), random_batch(4)
    for name, column in (("image_id", torch.tensor([10, 11, 12, 13])), ("input_ids", batch["input_ids"][[1, 1, 2, 3]])):
        first[name], batch[name] = column, batch[name].clone()
    first["attention_mask"] = batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    batch["input_ids"][0] = batch["input_ids"][3]
    for name, queue in module.queues().items():
        outputs, _ = _step(module, monkeypatch, first)
        queue.enqueue(outputs["keys"][name], outputs["key_ids"][name])
    seen = []
    monkeypatch.setattr(
        itc,
        "contrastive_targets",
        lambda logits, positives, alpha: seen.append(positives) or torch.zeros_like(logits),
    )
    _step(module, monkeypatch, batch)
    same = [[0, 3, 7], [1, 4, 5], [2, 6], [0, 3, 7]] if counts else [[0], [1], [2], [3]]
    rows = torch.zeros(4, 20, dtype=torch.bool)
    for row, columns in enumerate(same):
        rows[row, columns] = True
    assert len(seen) == 2
    assert all(torch.equal(positives, rows) for positives in seen)
