"""Conversion from and to the authors' checkpoints."""

import argparse
import copy
import json
import logging
from pathlib import Path

import pytest
import torch
from lightning import Trainer
from safetensors import safe_open
from torch.utils.data import DataLoader

from support.methods import golden_tasks
from support.methods.albef import load_official, pairs_loader, random_batch, tiny_albef
from support.methods.groups import merged
from vlightning.callbacks.queue import NO_ID
from vlightning.common.errors import UserError
from vlightning.lightning_modules import ALBEFModule
from vlightning.lightning_modules.albef.official import save_official, to_official

GOLDEN = Path(__file__).parents[2] / "golden" / "albef_pretrain.safetensors"


@pytest.fixture(scope="module")
def golden():
    with safe_open(GOLDEN, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["config"])  # noqa: SIM118


@pytest.fixture(scope="module")
def authors(golden):
    """A pre-training state dict that the authors' code wrote."""
    return {key.removeprefix("state."): value for key, value in golden[0].items() if key.startswith("state.")}


@pytest.fixture
def build(golden):
    """Makes a module of the reference's sizes."""
    config = golden[1]

    def make(**changes):
        torch.manual_seed(9)
        sizes = golden_tasks.sizes(config) | {
            "contrast": {"embed_dim": config["embed_dim"], "queue_size": config["queue_size"]},
        }
        return ALBEFModule(**merged(sizes, changes))

    return make


def _retrieval(state):
    """Convert a pre-training state dict to that of the authors' retrieval fine-tuning."""
    flat = {key.replace("bert.", ""): value for key, value in state.items() if ".cls." not in key}
    columns = state["image_queue"].shape[1]
    ids = torch.where(torch.arange(columns) < 10, torch.arange(columns) // 2, -100)
    return flat | {"idx_queue": ids[None]}


def _noisy(module, seed=0):
    """Every weight different from every other, also between student and teacher."""
    torch.manual_seed(seed)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def _equal(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype, name
        assert torch.equal(value, second[name]), name


def test_a_pre_training_file_of_the_authors_round_trips(authors, build):
    module = build()
    line = load_official(module, authors)
    assert line == "a state dict of the authors"
    _equal(to_official(module), authors)
    assert module.text_queue.valid.all()
    assert (module.image_queue.ids == NO_ID).all()


def test_a_retrieval_file_of_the_authors_round_trips(authors, build):
    module = build(mlm=False)
    retrieval = _retrieval(authors)
    load_official(module, retrieval)
    _equal(to_official(module), retrieval)
    for queue in module.queues().values():
        assert queue.ids[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4] + [NO_ID] * 54


@pytest.mark.parametrize("bare", [True, False])
def test_a_refcoco_file_starts_grounding_and_is_written_again(authors, build, tmp_path, bare):
    """A file of the authors' grounding is of the retrieval family, with or without the entry "model"."""
    state = _retrieval(authors)
    torch.save(state if bare else {"model": state, "epoch": 4}, tmp_path / "refcoco.pth")
    module = build(mlm=False, grounding={"evaluate": True}, weights=str(tmp_path / "refcoco.pth"))
    module.load_initial_weights()
    found = to_official(module)
    assert found.keys() == state.keys()
    queues = {name for name in state if "queue" in name}  # their keys are negatives of another run
    _equal(*({name: part[name] for name in part if name not in queues} for part in (found, state)))


@pytest.mark.parametrize("changes", [{}, {"mlm": False}, {"contrast": {"queue_start": "random"}}])
def test_our_state_through_the_authors_layout_round_trips(tmp_path, changes):
    module, other = _noisy(tiny_albef(0, **changes)), tiny_albef(1, **changes)
    rows = torch.nn.functional.normalize(torch.randn(5, 8), dim=1)
    for queue in module.queues().values():  # filled in part, unless it started with random rows
        queue.enqueue(rows, queue.fitting_ids(torch.tensor([3, 4, 4, -1, 5])))
    save_official(module, tmp_path / "albef.pth")
    load_official(other, torch.load(tmp_path / "albef.pth", weights_only=True)["model"])
    expected = module.state_dict()
    if module.mlm:  # pre-training files have no ids
        for name in ("image_queue.ids", "text_queue.ids"):
            expected[name] = torch.full((16, 2), NO_ID)
    _equal(other.state_dict(), expected)


def test_queue_slots_of_two_images_are_written_without_an_id():
    module = tiny_albef(mlm=False)
    module.image_queue.ids[:3, 0] = torch.tensor([5, 6, 7])
    module.text_queue.ids[:3, 0] = torch.tensor([5, 8, 7])
    for queue in module.queues().values():
        queue.filled.fill_(3)
    assert to_official(module)["idx_queue"][0, :4].tolist() == [5, -100, 7, -100]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    (tmp_path / "albef.pth").write_text("old")
    monkeypatch.setattr(torch, "save", lambda content, file: file.write(b"half") and (_ for _ in ()).throw(OSError()))
    with pytest.raises(OSError, match=r"albef\.pth could not be written"):
        save_official(tiny_albef(), tmp_path / "albef.pth")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("albef.pth", "old")]


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("family", ["pre-training", "retrieval"])
@pytest.mark.parametrize("teacher", [True, False])
@pytest.mark.parametrize("position_ids", [True, False])
def test_every_form_of_the_authors_files_initializes_a_module(
    golden, authors, build, tmp_path, bare, family, teacher, position_ids
):
    state = authors if family == "pre-training" else _retrieval(authors)
    state = {key: value for key, value in state.items() if teacher or "_m." not in key}
    state = {key: value for key, value in state.items() if position_ids or "position_ids" not in key}
    whole = {"model": state, "optimizer": {"state": {}}, "lr_scheduler": {}, "config": {"queue_size": 64}, "epoch": 29}
    torch.save(state if bare else whole, tmp_path / "theirs.pth")

    module = build(weights=str(tmp_path / "theirs.pth"), mlm=family == "pre-training")
    module.load_initial_weights()

    tensors = golden[0]
    with torch.no_grad():
        features = module.eval()({name: tensors[f"in.{name}"] for name in ("image", "input_ids", "attention_mask")})
    torch.testing.assert_close(features[0], tensors["out.image_feat"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(features[1], tensors["out.text_feat"], rtol=1e-5, atol=1e-5)
    suffix = "_m" if teacher else ""
    assert torch.equal(module.teacher.text_proj.weight, authors[f"text_proj{suffix}.weight"])
    assert not torch.equal(authors["text_proj.weight"], authors["text_proj_m.weight"])
    assert torch.equal(module.temperature, authors["temp"].reshape(1))
    assert not module.image_queue.valid.any()  # keys of another model


def test_omitted_parts_are_logged(authors, build, tmp_path, caplog):
    torch.save(authors, tmp_path / "theirs.pth")
    module = build(weights=str(tmp_path / "theirs.pth"), mlm=False, vision={"image_size": 96})
    with caplog.at_level(logging.INFO):
        module.load_initial_weights()
    assert (
        f"ALBEF starts with the authors' checkpoint '{tmp_path}/theirs.pth', without its language-model head, "
        "without its queues, positions resized from 16 to 36 patches."
    ) in caplog.text
    few = {key: value for key, value in authors.items() if "_m." not in key}
    assert load_official(build(), few) == "a state dict of the authors, the teacher as the student's copy"


def test_queues_of_another_size_are_not_loaded(authors, build):
    module = build(contrast={"queue_size": 32, "queue_start": "random"})
    before = copy.deepcopy(module.image_queue.state_dict())
    assert "without its queues, which have another size" in load_official(module, authors)
    _equal(module.image_queue.state_dict(), before)


@pytest.mark.parametrize("image_size", [256, 384, 224])
def test_a_224_pixel_checkpoint_initializes_other_sizes(tmp_path, image_size):
    source = _noisy(tiny_albef(mlm=False, vision={"image_size": 224, "patch_size": 16}))
    save_official(source, tmp_path / "theirs.pth")
    module = tiny_albef(
        mlm=False, weights=str(tmp_path / "theirs.pth"), vision={"image_size": image_size, "patch_size": 16}
    )
    module.load_initial_weights()
    side = image_size // 16
    for name in ("student", "teacher"):
        old = getattr(source, name).visual_encoder.pos_embed.detach()
        new = getattr(module, name).visual_encoder.pos_embed.detach()
        grid = old[:, 1:].unflatten(1, (14, 14)).permute(0, 3, 1, 2)
        expected = torch.nn.functional.interpolate(grid, (side, side), mode="bicubic", align_corners=False)
        assert torch.equal(new[:, :1], old[:, :1])
        torch.testing.assert_close(new[:, 1:], expected.flatten(2).transpose(1, 2))


def _without(*names):
    return lambda state: [state.pop(name) for name in names]


@pytest.mark.parametrize(
    ("spoil", "changes", "sentence"),
    [
        (_without("temp"), {}, r"missing temp, unknown nothing, of another shape nothing"),
        (lambda state: state.update({"cls_head.0.weight": torch.zeros(2)}), {}, r"unknown cls_head\.0\.weight, of"),
        (_without("text_proj_m.bias"), {}, r"missing text_proj_m\.bias, "),
        (_without("image_queue"), {}, r"missing image_queue, "),
        (_without("queue_ptr"), {}, r"missing queue_ptr, "),
        (
            lambda state: None,
            {"text": {"vocab_size": 210}},
            r"word_embeddings\.weight \(200, 64\) instead of \(210, 64\)",
        ),
        (
            lambda state: None,
            {"vision": {"depth": 2}},
            r"unknown visual_encoder.* and 21 more, of another shape nothing",
        ),
        (
            lambda state: None,
            {"vision": {"image_size": 80, "patch_size": 20}},
            r"patch_embed\.proj\.weight \(64, 3, 16, 16\) inst",
        ),
        (
            lambda state: state.update({"visual_encoder.pos_embed": torch.zeros(1, 13, 64)}),
            {},
            r"visual_encoder\.pos_embed \(1, 13, 64\) instead of \(1, 17, 64\)",
        ),
        (
            lambda state: state.update({"text_encoder.embeddings.LayerNorm.bias": torch.zeros(64)}),
            {},
            r"unknown text_encoder\.embeddings\.LayerNorm\.bias",
        ),
        (
            lambda state: state.update({"text_encoder.cls.predictions.bias": torch.ones(200)}),
            {},
            r"equal values of text_encoder\.cls\.predictions\.bias and .*decoder\.bias.* got different values",
        ),
    ],
)
def test_a_wrong_file_names_its_keys_and_changes_nothing(authors, build, spoil, changes, sentence):
    module = build(**changes)
    before = copy.deepcopy(module.state_dict())
    state = dict(authors)
    spoil(state)
    with pytest.raises(UserError, match=sentence) as raised:
        load_official(module, state)
    assert "\n" not in str(raised.value)
    _equal(module.state_dict(), before)


def test_names_in_errors_are_those_of_the_retrieval_family(authors, build):
    state = _retrieval(authors)
    del state["text_encoder.encoder.layer.3.output.dense.bias"]
    with pytest.raises(UserError, match=r"missing text_encoder\.encoder\.layer\.3\.output\.dense\.bias, unknown"):
        load_official(build(mlm=False), state)


def test_a_retrieval_file_cannot_start_masked_language_modeling(authors, build):
    with pytest.raises(UserError, match=r"a language-model head in .*, got none: set model.mlm to false"):
        load_official(build(), _retrieval(authors))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"model": {}, "config": argparse.Namespace(a=1)}, r"got argparse\.Namespace: if you trust"),
        ([1, 2], "Expected a state dict, or one under .*, got neither"),
        ({"model": {"depth": 12}}, "Expected a state dict, or one under .*, got neither"),
        (b"no checkpoint", "Expected a file of torch.save in"),
    ],
)
def test_other_files_are_refused_as_checkpoints(tmp_path, content, sentence):
    if isinstance(content, bytes):
        (tmp_path / "theirs.pth").write_bytes(content)
    else:
        torch.save(content, tmp_path / "theirs.pth")
    with pytest.raises(UserError, match=sentence) as raised:
        tiny_albef(weights=str(tmp_path / "theirs.pth")).load_initial_weights()
    assert "\n" not in str(raised.value)


def test_missing_weights_are_named(tmp_path):
    with pytest.raises(UserError, match=r"no file or folder '.*gone\.pth'"):
        tiny_albef(weights=str(tmp_path / "gone.pth")).load_initial_weights()
    with pytest.raises(UserError, match=r"without config\.json and without model\.safetensors"):
        tiny_albef(weights=str(tmp_path)).load_initial_weights()


def test_two_sources_of_weights_are_an_error():
    for group in ("vision", "text"):
        with pytest.raises(UserError, match=r"one source of weights, .*: set the latter to null"):
            tiny_albef(weights="a.pth", **{group: {"weights": "b"}})


def _trainer(folder, **changes):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return Trainer(**quiet | {"enable_checkpointing": False, "default_root_dir": folder, "max_epochs": 1} | changes)


def test_own_checkpoint_and_export_initialize_a_fine_tuning(tmp_path, caplog):
    source = _noisy(tiny_albef())
    trainer = _trainer(tmp_path, limit_train_batches=2)
    trainer.fit(source, pairs_loader(16, 8))
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    source.save_pretrained(tmp_path / "export")
    for name in ("run.ckpt", "export"):
        module = tiny_albef(seed=1, weights=str(tmp_path / name), mlm=False, vision={"image_size": 32})
        caplog.clear()
        with caplog.at_level(logging.INFO):
            _trainer(tmp_path, max_steps=0).fit(module, pairs_loader(8, 8))
        assert "without its language-model head, " in caplog.text
        assert "positions resized from 4 to 16 patches" in caplog.text
        for part in ("student.text_proj.weight", "teacher.text_proj.weight", "itm_head.weight", "temperature"):
            assert torch.equal(module.state_dict()[part], source.state_dict()[part]), part
        assert not torch.equal(module.student.text_proj.weight, module.teacher.text_proj.weight)
        assert not module.image_queue.valid.any()


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_without_a_checkpoint_uses_the_weights(tmp_path, stage):
    source = _noisy(tiny_albef()).eval()
    save_official(source, tmp_path / "theirs.pth")
    batch = random_batch(12) | {"text_image_id": torch.arange(12), "text_id": torch.arange(12)}
    loader = DataLoader([batch], batch_size=None)
    module = tiny_albef(seed=1, weights=str(tmp_path / "theirs.pth"), rerank={"when": "never"})
    getattr(_trainer(tmp_path), stage)(module, loader)
    with torch.no_grad():
        assert torch.equal(module.evaluation.result.image_features, source(batch)[0])


def test_evaluation_of_a_checkpoint_does_not_need_the_weights(tmp_path):
    source = tiny_albef(weights=str(tmp_path / "gone.pth"), rerank={"when": "never"})
    source._initial.loaded = True
    trainer = _trainer(tmp_path, limit_train_batches=1)
    trainer.fit(source, pairs_loader(8, 8))
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    batch = random_batch(12) | {"text_image_id": torch.arange(12), "text_id": torch.arange(12)}
    module = tiny_albef(seed=1, weights=str(tmp_path / "gone.pth"), rerank={"when": "never"})
    _trainer(tmp_path).test(module, DataLoader([batch], batch_size=None), ckpt_path=tmp_path / "run.ckpt")
    assert torch.equal(module.student.text_proj.weight, source.student.text_proj.weight)
