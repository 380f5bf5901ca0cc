"""Initial weights of the tasks: each source, both layouts, teacher and heads."""

import pytest
import torch

from support.methods.albef import tiny_albef
from support.methods.tasks import KINDS, tiny_task
from support.runs.command_line import run
from vlightning.common.errors import UserError
from vlightning.lightning_modules import EntailmentModule, NLVR2Module
from vlightning.lightning_modules.albef.official import save_official, to_official

HEADS = {"entailment": "cls_head", "nlvr": "cls_head", "assignment": "ta_head"}


@pytest.fixture
def trained():
    """An ALBEF whose teacher is not its student."""
    module = tiny_albef(3)
    with torch.no_grad():
        for parameter in module.teacher.parameters():
            parameter.add_(0.01)
    return module


@pytest.fixture(params=["authors", "retrieval", "checkpoint", "export"])
def source(request, trained, tmp_path):
    """The same weights in each form."""
    path = tmp_path / "trained"
    if request.param == "authors":
        torch.save({"model": to_official(trained)}, path)
    elif request.param == "retrieval":  # another family: no head, no level `bert.`
        small = tiny_albef(0, {"mlm": False})
        small.load_pretrained_state({n: t for n, t in trained.state_dict().items() if ".cls." not in n}, "it")
        torch.save(to_official(small), path)
    elif request.param == "checkpoint":
        torch.save({"state_dict": trained.state_dict(), "hyper_parameters": {"text": {"vocab_size": 120}}}, path)
    else:
        trained.save_pretrained(path)
    return str(path)


def _same(own, expected):
    for name, tensor in own.state_dict().items():
        if not name.startswith(("cls_head.", "ta_head.")):
            assert torch.equal(tensor, expected(name)), name


def _half(name):
    return name.replace(".first.", ".").replace(".second.", ".")


@pytest.mark.parametrize("name", KINDS)
def test_a_task_starts_from_a_trained_albef_and_its_teacher_from_the_trained_teacher(name, source, trained):
    module = tiny_task(name, 5, weights=source)
    head = [tensor.clone() for key, tensor in module.student.state_dict().items() if key.startswith(HEADS[name])]
    module.load_initial_weights()
    state = trained.state_dict()
    _same(module.student, lambda key: state[f"student.{_half(key)}"])
    kept = [tensor for key, tensor in module.student.state_dict().items() if key.startswith(HEADS[name])]
    assert all(map(torch.equal, kept, head))
    if module.teacher is not None:
        _same(module.teacher, lambda key: state[f"teacher.{_half(key)}"])
        for key, tensor in module.teacher.state_dict().items():
            assert not key.startswith("cls_head.") or torch.equal(tensor, module.student.state_dict()[key])


def test_nlvr_starts_from_text_assignment_with_the_teacher_as_its_copy_or_as_the_authors(tmp_path):
    stage = tiny_task("assignment", 4)
    save_official(stage, tmp_path / "stage.pth")
    assert not any("_m." in name for name in to_official(stage))
    official = tiny_task("nlvr", 5, weights=str(tmp_path / "stage.pth"), momentum={"start": "random", "momentum": 0.9})
    random = {name: tensor.clone() for name, tensor in official.teacher.state_dict().items()}
    module = tiny_task("nlvr", 5, weights=str(tmp_path / "stage.pth"))
    for each in (module, official):
        each.load_initial_weights()
        _same(each.student, lambda key: stage.student.state_dict()[key])
    for name, tensor in module.teacher.state_dict().items():
        assert torch.equal(tensor, module.student.state_dict()[name]), name
    for name, tensor in official.teacher.state_dict().items():
        expected = 0.9 * random[name] + 0.1 * official.student.state_dict()[name]
        torch.testing.assert_close(tensor, expected, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", KINDS)
def test_every_layout_that_a_task_is_exported_to_is_read_again(name, tmp_path):
    module = tiny_task(name, 5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))
    checkpoint = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
    module.on_save_checkpoint(checkpoint)
    torch.save(checkpoint, tmp_path / "task.ckpt")
    for words in (["task"], ["task.pth", "--layout", "albef"]):
        ran = run("export", tmp_path / "task.ckpt", tmp_path / words[0], *words[1:])
        assert ran.status == 0, ran.err
    read = [KINDS[name].from_pretrained(tmp_path / "task")]
    for source in ("task.pth", "task"):
        read.append(tiny_task(name, 6, weights=str(tmp_path / source)))
        read[-1].load_initial_weights()
    for other in read:
        for key, tensor in module.state_dict().items():
            assert torch.equal(other.state_dict()[key], tensor), key


def test_without_distillation_there_is_no_teacher_and_a_teacher_in_the_weights_is_left_out(source, trained):
    module = tiny_task("entailment", weights=source, momentum={"distill": False})
    module.load_initial_weights()
    assert module.teacher is None
    assert module.momentum_pairs() == {}
    assert module.current_alpha() == 0
    _same(module.student, lambda key: trained.state_dict()[f"student.{key}"])


def test_positions_are_resized_to_larger_images(source):
    module = tiny_task("entailment", weights=source, vision={"image_size": 32})
    module.load_initial_weights()
    assert module.student.visual_encoder.pos_embed.shape[1] == 17


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("text_encoder.bert.encoder.layer.1.output.dense.weight"), "layer.1.output.dense.wei"),
        (lambda state: state.update({"other.weight": torch.ones(1)}), "unknown other.weight"),
        (lambda state: state.update({"text_encoder.other": torch.ones(1)}), "unknown text_encoder.other"),
        (lambda state: state.update({"visual_encoder.norm.bias": torch.ones(3)}), r"visual_encoder.norm.bias \(3,\)"),
    ],
)
@pytest.mark.parametrize("kind", [EntailmentModule, NLVR2Module])
def test_other_weights_are_refused_and_nothing_is_loaded(trained, tmp_path, kind, change, message):
    state = to_official(trained)
    change(state)
    torch.save({"model": state}, tmp_path / "wrong.pth")
    name = "entailment" if kind is EntailmentModule else "nlvr"
    module = tiny_task(name, weights=str(tmp_path / "wrong.pth"))
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    with pytest.raises(UserError, match=message):
        module.load_initial_weights()
    assert all(torch.equal(tensor, before[key]) for key, tensor in module.state_dict().items())


def test_different_shared_projections_and_weights_of_parts_are_refused(tmp_path):
    state = to_official(tiny_task("nlvr"))
    state = {name: tensor.clone() for name, tensor in state.items()}
    state["text_encoder.encoder.layer.2.crossattention.self.key.weight"] += 1
    torch.save({"model": state}, tmp_path / "wrong.pth")
    module = tiny_task("nlvr", weights=str(tmp_path / "wrong.pth"))
    with pytest.raises(UserError, match=r"layer\.1\.crossattention\.self\.key\.weight and .*layer\.2\.crossattention"):
        module.load_initial_weights()
    with pytest.raises(UserError, match=r"set model\.weights"):
        tiny_task("entailment", text={"weights": "bert-base-uncased"})
