"""What helps an ALBEF of random weights: no queue, soft targets and hard negatives that follow the accuracy."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import normalize

from support.methods.albef import pairs_loader, random_batch, tiny_albef
from support.methods.tiny_modules import trainer
from support.runs.distributed import run_distributed
from vlightning.callbacks import FeatureQueue, rank, world_size
from vlightning.common.errors import UserError
from vlightning.lightning_modules.albef import module as step
from vlightning.lightning_modules.albef.itc import Accuracies, Contrast, Keys, image_text_contrast
from vlightning.lightning_modules.albef.itm import draw_negatives
from vlightning.lightning_modules.albef.network import Encoded
from vlightning.lightning_modules.albef.official import from_official, to_official
from vlightning.lightning_modules.albef.settings import ContrastSettings
from vlightning.lightning_modules.albef.weights import load_state

FOLLOWS = {"contrast": {"negatives": "ramped", "queue_size": 0}, "momentum": {"alpha_by_accuracy": True}}


def _encoded(image, text):
    return Encoded(None, None, None, image, text)


def _contrast(student, teacher, ids, queue, positives="image_id", slice_rows=None):
    keys = Keys(*teacher, ids, 0, False)
    temperature = torch.tensor([0.1])
    return image_text_contrast(
        _encoded(*student.clone().requires_grad_()),
        _encoded(*teacher),
        keys,
        queue,
        temperature,
        0.4,
        positives,
        slice_rows,
    )


@pytest.mark.parametrize("slice_rows", [None, 2])
@pytest.mark.parametrize("positives", ["image_id", "diagonal"])
def test_hits_equal_a_slow_reference_and_the_queue_does_not_count(positives, slice_rows):
    torch.manual_seed(0)
    student = normalize(torch.randn(7, 4) + torch.randn(2, 7, 4) / 2, dim=-1)
    teacher = normalize(student + torch.randn(2, 7, 4) / 2, dim=-1)
    ids = torch.tensor([0, 0, 1, 2, 3, 4, 5])
    queue = FeatureQueue(7, 4, ids=1)
    queue.enqueue(student[0], ids)  # better than any key of the batch, if it counted
    contrast = _contrast(student, teacher, ids, {"image": queue, "text": queue}, positives, slice_rows)
    expected = [0.0, 0.0, 0.0]
    for row in range(7):
        matches = [column for column in range(7) if ids[row] == ids[column] or column == row]
        matches = [row] if positives == "diagonal" else matches
        for number, (image, text) in enumerate((student, teacher)):
            for query, candidates in ((image[row], teacher[1]), (text[row], teacher[0])):
                similarity = [float(query @ key) for key in candidates]
                expected[number] += (similarity.index(max(similarity)) in matches) / 14
        expected[2] += len(matches) / 49
    assert contrast.hits.tolist() == pytest.approx(expected)
    assert 0 < expected[0] < 1


def test_running_accuracies_are_zero_at_chance_and_rise_to_one():
    accuracies = Accuracies()
    logits = torch.zeros(1, 1)
    by_hits = {
        (0.25, 0.75, 0.25): [0.0, 0.02 * 2 / 3],  # (0.75 - 0.25) / (1 - 0.25)
        (0.0, 1.0, 0.5): [0.0, 0.98 * 0.02 * 2 / 3 + 0.02],  # worse than chance is as bad as chance
        (1.0, 1.0, 1.0): [0.0, 0.98 * (0.98 * 0.02 * 2 / 3 + 0.02)],  # a batch of one pair says nothing
    }
    for hits, expected in by_hits.items():
        accuracies.update(Contrast(torch.zeros(()), logits, logits, torch.tensor(hits)))
        assert accuracies.mean.tolist() == pytest.approx(expected)
    for _ in range(500):
        accuracies.update(Contrast(torch.zeros(()), logits, logits, torch.tensor([1.0, 1.0, 0.1])))
    assert float(accuracies.student) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("hardness", [0.0, 0.5, 1.0])
def test_hardness_is_a_factor_of_the_similarities_by_which_negatives_are_drawn(hardness):
    rows = 2_000
    similarity = torch.tensor([9.0, 1.0, 0.0, 3.0]).repeat(rows, rows // 4)
    batch = {"image_id": torch.arange(rows), "input_ids": torch.arange(rows)[:, None]}
    contrast = Contrast(torch.zeros(()), similarity, similarity, torch.zeros(3))
    torch.manual_seed(0)
    drawn = draw_negatives(contrast, batch, ContrastSettings(negatives="ramped"), torch.tensor(hardness))
    expected = torch.tensor([9.0, 1.0, 0.0, 3.0]).mul(hardness).softmax(0)
    for side in (drawn.image.row, drawn.text.row):
        torch.testing.assert_close((side % 4).bincount(minlength=4) / rows, expected, atol=0.05, rtol=0)


def _losses(monkeypatch, module, alpha):
    logged = {}
    module._trainer = SimpleNamespace()
    monkeypatch.setattr(step, "ramped_alpha", lambda *_: alpha)
    monkeypatch.setattr(module, "log", lambda *_, **__: None)
    monkeypatch.setattr(module, "log_dict", lambda values, **_: logged.update(values))
    torch.manual_seed(0)
    module.training_step(random_batch(8), 0)
    return {name: float(value) for name, value in logged.items()}


def test_alpha_is_in_proportion_to_the_teachers_accuracy(monkeypatch):
    changes = {"text": {"mask_probability": 0.5, "dropout": 0.0}, "contrast": {"negatives": "random"}}
    plain = _losses(monkeypatch, tiny_albef(changes=changes), 0.1)
    module = tiny_albef(changes=changes, momentum={"alpha_by_accuracy": True})
    module.accuracies.mean.copy_(torch.tensor([1.0, 0.25]))
    found = _losses(monkeypatch, module, 0.4)
    assert found["train/alpha"] == pytest.approx(0.1)
    for name, value in plain.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name
    assert "train/accuracy" in found
    assert "train/accuracy" not in plain
    assert module.accuracies.teacher != 0.25  # for the next batch


def test_ramped_negatives_are_as_hard_as_the_student_is_accurate(monkeypatch):
    seen = []
    original = step.draw_negatives
    monkeypatch.setattr(step, "draw_negatives", lambda *given: seen.append(given[3]) or original(*given))
    module = tiny_albef(contrast={"negatives": "ramped"})
    module.accuracies.mean.copy_(torch.tensor([0.75, 0.0]))
    _losses(monkeypatch, module, 0.0)
    assert torch.equal(seen[0], module.accuracies.student)
    assert 0.7 < float(seen[0]) < 0.8
    _losses(monkeypatch, tiny_albef(), 0.0)
    assert seen[1] == 1.0


def test_without_contrast_there_is_no_accuracy_to_follow():
    with pytest.raises(UserError, match=r"Expected contrast.negatives: random without contrast.itc, .* got ramped"):
        tiny_albef(contrast={"itc": False, "negatives": "ramped"})
    with pytest.raises(UserError, match=r"Expected momentum.alpha_by_accuracy false without contrast.itc"):
        tiny_albef(contrast={"itc": False, "negatives": "random"}, momentum={"alpha_by_accuracy": True})


def test_without_a_queue_the_losses_are_those_of_an_empty_queue(monkeypatch):
    expected = _losses(monkeypatch, tiny_albef(), 0.4)
    assert _losses(monkeypatch, tiny_albef(contrast={"queue_size": 0}), 0.4) == pytest.approx(expected, rel=1e-6)


def test_a_resumed_run_has_the_accuracies_of_the_uninterrupted_run(tmp_path):
    changes = FOLLOWS | {"optim": {"learning_rate": 1e-2}}
    halfway = ModelCheckpoint(tmp_path, "half", every_n_train_steps=12, save_top_k=-1)
    whole = tiny_albef(changes=changes)
    whole.accuracies.mean.fill_(0.5)  # features of a few steps may rank the same key first in all rows, which is chance
    run = trainer(halfway, max_steps=20, max_epochs=-1, enable_checkpointing=True)
    run.fit(whole, pairs_loader(16, 8))
    assert not {"queue/image_filled", "queue/text_filled"} & run.callback_metrics.keys()
    assert run.callback_metrics["train/accuracy_teacher"] == whole.accuracies.teacher
    resumed = tiny_albef(seed=1, changes=changes)
    again = trainer(max_steps=20, max_epochs=-1)
    again.fit(resumed, pairs_loader(16, 8), ckpt_path=tmp_path / "half.ckpt")
    assert (whole.accuracies.mean > 0.3).all()
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def _accuracies_of_steps():
    module = tiny_albef(changes=FOLLOWS, text={"dropout": 0.0}).double()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)  # so that features differ, and not all rows rank the same key first
    size = 12 // world_size()
    own = slice(rank() * size, (rank() + 1) * size)
    module.current_alpha = lambda: 0.4
    module.log = module.log_dict = lambda *_, **__: None
    for seed in range(6):
        whole = random_batch(12, seed=seed, dtype=torch.float64)
        module.training_step({name: column[own] for name, column in whole.items()}, 0)
    return module.accuracies.mean.tolist()


def test_the_accuracies_of_two_processes_are_those_of_one():
    whole = _accuracies_of_steps()
    assert min(whole) > 0
    for found in run_distributed(_accuracies_of_steps):
        assert found == pytest.approx(whole, rel=1e-12)


def test_weights_are_exchanged_with_models_that_do_not_follow():
    follows = tiny_albef(changes=FOLLOWS)
    follows.accuracies.mean.fill_(0.5)
    official = to_official(follows)
    assert not [name for name in official if name.startswith("accuracies")]
    assert not [name for name in follows.pretrained_state(follows.state_dict()) if name.startswith("accuracies")]
    sources = (follows.state_dict(), from_official(official), follows.pretrained_state(follows.state_dict()))
    for source in sources:
        for module in (tiny_albef(seed=1), tiny_albef(seed=1, changes=FOLLOWS)):
            module.load_pretrained_state(source, "a state")
            assert torch.equal(module.itm_head.weight, follows.itm_head.weight)
            assert not module.image_queue.filled
            assert module.accuracies is None or not module.accuracies.mean.any()
            load_state(module, source, "a state", queues=False)
    follows.load_pretrained_state(tiny_albef(seed=2).state_dict(), "a state")
    assert follows.accuracies.student == 0.5
