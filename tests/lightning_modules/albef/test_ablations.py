"""The switches of the paper's first table: contrast, hard negatives, and distillation of each loss."""

import pytest
import torch

from support.methods.albef import random_batch, tiny_albef
from vlightning.common.errors import UserError
from vlightning.lightning_modules.albef.itc import Contrast
from vlightning.lightning_modules.albef.itm import draw_negatives
from vlightning.lightning_modules.albef.network import ALBEFNetwork
from vlightning.lightning_modules.albef.settings import ContrastSettings

RANDOM = {"negatives": "random"}


def _losses(monkeypatch, alpha, **changes):
    module = tiny_albef(0, {"text": {"dropout": 0.0}}, **changes)
    logged = {}
    monkeypatch.setattr(module, "current_alpha", lambda: alpha)
    monkeypatch.setattr(module, "log_dict", lambda values, **_: logged.update(values))
    torch.manual_seed(0)
    outputs = module.training_step(random_batch(8), 0)
    outputs["loss"].backward()
    return module, {name[11:]: float(value) for name, value in logged.items() if "loss_" in name}, outputs


def test_random_negatives_are_even_over_the_admissible_rows_whatever_their_similarity():
    batch = random_batch(5) | {"image_id": torch.tensor([0, 0, 1, 2, 3])}
    peaked = torch.zeros(5, 5)
    peaked[:, 4] = 50.0
    contrast = Contrast(torch.zeros(()), peaked, peaked, torch.zeros(3))
    torch.manual_seed(0)
    counts = {"hard": torch.zeros(5), "random": torch.zeros(5)}
    for negatives, count in counts.items():
        for _ in range(600):
            drawn = draw_negatives(contrast, batch, ContrastSettings(negatives=negatives))
            count += torch.bincount(drawn.image.row[:1], minlength=5) + torch.bincount(drawn.text.row[:1], minlength=5)
    assert counts["hard"].tolist() == [0, 0, 0, 0, 1200]
    assert counts["random"][:2].tolist() == [0, 0]  # of the same image
    assert all(330 < count < 470 for count in counts["random"][2:])


def test_without_contrast_projections_and_temperature_are_not_trained_and_all_else_is(monkeypatch):
    module, losses, outputs = _losses(monkeypatch, 0.4, contrast={"itc": False, **RANDOM})
    assert losses.keys() == {"itm", "mlm"}
    assert float(outputs["loss"]) == pytest.approx(losses["itm"] + losses["mlm"])
    frozen = {name for name, parameter in module.student.named_parameters() if not parameter.requires_grad}
    assert frozen == {f"{part}_proj.{name}" for part in ("vision", "text") for name in ("weight", "bias")}
    assert not module.temperature.requires_grad
    trained = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert all(gradient is not None for gradient in trained.values())
    assert all(parameter.requires_grad for group in module.parameter_groups() for parameter in group["params"])


def test_hard_negatives_need_the_contrast():
    with pytest.raises(UserError, match=r"Expected contrast.negatives: random without contrast.itc"):
        tiny_albef(contrast={"itc": False})


@pytest.mark.parametrize("switched", ["itc", "mlm"])
def test_each_loss_is_distilled_or_not(monkeypatch, switched):
    settings = {"contrast": RANDOM, "text": {"mask_probability": 0.5}}
    _, distilled, _ = _losses(monkeypatch, 0.4, **settings)
    _, plain, _ = _losses(monkeypatch, 0.0, **settings)
    _, found, _ = _losses(monkeypatch, 0.4, **settings, momentum={f"distill_{switched}": False})
    assert distilled[switched] != pytest.approx(plain[switched])
    expected = distilled | {switched: plain[switched]}
    assert found == pytest.approx(expected)


def test_a_teacher_that_does_not_distil_words_does_not_read_masked_texts(monkeypatch):
    seen = []
    encode, fuse = ALBEFNetwork.encode_text, ALBEFNetwork.fuse
    monkeypatch.setattr(ALBEFNetwork, "encode_text", lambda *given: seen.append(len(given[1])) or encode(*given))
    monkeypatch.setattr(ALBEFNetwork, "fuse", lambda *given: seen.append("fused") or fuse(*given))
    for distils, expected in ((True, [16, 16, "fused", "fused"]), (False, [16, 8, "fused"])):
        seen.clear()
        _losses(monkeypatch, 0.4, momentum={"distill_mlm": distils})
        assert seen == expected
