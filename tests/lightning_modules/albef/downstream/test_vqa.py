"""The module of VQA: the authors' step and checkpoints, its start from a trained ALBEF, and what it answers."""

import pytest
import torch

from support.methods import golden_tasks
from support.methods.albef import tiny_albef
from vlightning.common.errors import UserError
from vlightning.datamodules import ShapesVQADataModule
from vlightning.lightning_modules import VQAModule
from vlightning.lightning_modules.albef.downstream.answers import target_positions
from vlightning.lightning_modules.albef.downstream.weights import with_decoder
from vlightning.lightning_modules.albef.official import to_official


@pytest.fixture(scope="module")
def golden():
    return golden_tasks.read("vqa")


def build(golden, folder, **arguments):
    return golden_tasks.built(VQAModule, *golden, folder, **arguments)


def training_batch(tensors):
    counts, mask = tensors["in.k"], tensors["in.answer_mask"]
    return {
        **{name: tensors[f"in.{name}"] for name in ("image", "input_ids", "attention_mask")},
        "answer_ids": tensors["in.answer_ids"],
        "answer_mask": mask,
        "answer_index": torch.arange(len(counts)).repeat_interleave(counts),
        "answer_weight": tensors["in.weights"],
        "answer_positions": target_positions(mask),
    }


@pytest.mark.parametrize("memory", [{}, {"micro_batch_size": 3, "activation_checkpointing": True}])
def test_the_step_is_the_authors(golden, tmp_path, monkeypatch, memory):
    module = build(golden, tmp_path, memory=memory)
    names = golden_tasks.check_step(module, golden[0], training_batch(golden[0]), monkeypatch)
    assert {name.split(".")[0] for name in names} == {"visual_encoder", "text_encoder", "text_decoder"}


@pytest.mark.parametrize("memory", [{}, {"micro_batch_size": 1}])
def test_questions_that_share_an_image_train_as_with_a_copy_each(golden, tmp_path, monkeypatch, memory):
    module, batch = build(golden, tmp_path, memory=memory), training_batch(golden[0])
    monkeypatch.setattr(module, "current_alpha", lambda: 0.4)
    index = torch.arange(len(batch["input_ids"])) // 3
    found = []
    for given in ({"image": batch["image"][index]}, {"image": batch["image"][: index[-1] + 1], "image_index": index}):
        module.zero_grad()
        loss = module.training_step(batch | given, 0)
        loss.backward()
        found.append((loss.detach(), {name: part.grad for name, part in module.student.named_parameters()}))
    (loss, gradients), (shared, shared_gradients) = found
    torch.testing.assert_close(shared, loss, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(shared_gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: n + m)


def test_the_authors_checkpoint_comes_in_and_goes_out_key_by_key(golden, tmp_path):
    official, expected = to_official(build(golden, tmp_path)), golden_tasks.part(golden[0], "state.")
    assert official.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(official[name], tensor), name


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_a_checkpoint_that_does_not_fit_is_refused(golden, tmp_path, change):
    tensors = dict(golden[0])
    name = "state.text_decoder.bert.encoder.layer.3.output.dense.weight"
    if change == "shape":
        tensors[name] = tensors[name][:5]
    elif change == "missing":
        del tensors[name]
    else:
        tensors["state.text_decoder.bert.more.weight"] = torch.zeros(2)
    with pytest.raises(UserError, match=r"text_decoder\.bert"):
        build((tensors, golden[1]), tmp_path)


def test_a_trained_albef_starts_the_decoder_with_its_fusion_layers(tmp_path):
    trained = tiny_albef(3)
    state = trained.state_dict()
    groups = {name: trained.hparams[name] for name in ("vision", "text")}
    torch.save({"state_dict": state, "hyper_parameters": dict(trained.hparams)}, tmp_path / "albef.ckpt")
    module = VQAModule(**groups, weights=str(tmp_path / "albef.ckpt"))
    module.load_initial_weights()
    own, depth = module.state_dict(), trained.text.depth
    for root in ("student", "teacher"):
        for name, tensor in own.items():
            part, _, inner = name.removeprefix(f"{root}.").partition(".")
            if not name.startswith(root):
                continue
            if part == "text_decoder":
                part = "text_encoder"
                for layer in reversed(range(trained.text.fusion_depth)):
                    inner = inner.replace(f"layer.{layer}.", f"layer.{layer + depth}.")
            assert torch.equal(tensor, state[f"{root}.{part}.{inner}"]), name
    assert with_decoder(own, depth).keys() == own.keys()


def test_without_distillation_there_is_no_teacher(golden, tmp_path):
    module = build(golden, tmp_path, momentum={"distill": False})
    assert module.teacher is None
    assert module.current_alpha() == 0
    assert not module.momentum_pairs()


def test_an_export_is_the_model(golden, tmp_path):
    module = build(golden, tmp_path)
    module.save_pretrained(tmp_path / "vqa")
    read = VQAModule.from_pretrained(tmp_path / "vqa").state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in module.state_dict().items())


def shapes(**arguments):
    return ShapesVQADataModule(length=16, eval_length=3, image_size=64, batch_size=4, vocab_size=160, **arguments)


class _Run:
    """A trainer as far as the module asks for one."""

    def __init__(self, data):
        self.datamodule = data


@torch.no_grad()
def test_an_image_is_encoded_once_for_all_of_its_questions(golden, tmp_path, monkeypatch):
    data, module = shapes(), build(golden, tmp_path, answers={"top": 3, "candidates": 6})
    monkeypatch.setattr(VQAModule, "datamodule", data)
    data.setup("test")
    batch = next(iter(data.test_dataloader()))
    assert (len(batch["image"]), len(batch["input_ids"])) == (3, 12)
    seen = []
    module.student.visual_encoder.register_forward_hook(lambda _, images, __: seen.append(len(images[0])))
    found = module.answer_questions(batch)
    assert seen == [3]
    for row in range(12):
        alone = {name: value[row : row + 1] for name, value in batch.items() if name != "image"}
        alone |= {"image": batch["image"][batch["image_index"][row]][None], "image_index": torch.zeros(1).long()}
        alone["input_ids"], alone["attention_mask"] = (
            alone[name][:, : int(alone["attention_mask"].sum())] for name in ("input_ids", "attention_mask")
        )
        single = module.answer_questions(alone)
        assert single["top_answers"] == found["top_answers"][row : row + 1]
        torch.testing.assert_close(single["top_probabilities"], found["top_probabilities"][row : row + 1])


@torch.no_grad()
def test_answers_are_written_on_request_and_end_once(golden, tmp_path, monkeypatch):
    data, module = shapes(), build(golden, tmp_path, answers={"how": "generate", "max_tokens": 4})
    monkeypatch.setattr(VQAModule, "datamodule", data)
    data.setup("test")
    found = module.answer_questions(next(iter(data.test_dataloader())))
    ids = found["answer_ids"]
    assert (ids[:, 0] == 101).all()
    assert ((ids == 102).sum(1) == 1).all()
    assert found["top_probabilities"].shape == (12, 1)
    assert [len(top) for top in found["top_answers"]] == [1] * 12
