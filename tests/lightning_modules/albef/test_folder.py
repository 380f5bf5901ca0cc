"""The exported folder of a model, and a module that is loaded from it without a Trainer."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.methods.albef import random_batch, tiny_albef
from support.runs.forked import run_script
from vlightning.common.errors import UserError
from vlightning.common.tokenizers import open_tokenizer, set_ending, tokenizer_from_json
from vlightning.datamodules.text.tokenizers import train_wordpiece
from vlightning.datamodules.transforms.albef import ALBEFEvalTransform
from vlightning.datamodules.transforms.normalize import CLIP_MEAN, CLIP_STD
from vlightning.lightning_modules import ALBEFModule

FRESH = """
import socket, sys

def refuse(*args, **kwargs):
    raise AssertionError("the network was asked")

socket.socket.connect = socket.getaddrinfo = refuse

import torch
from vlightning.lightning_modules import ALBEFModule

module = ALBEFModule.from_pretrained(sys.argv[1])
batch = torch.load(sys.argv[2], weights_only=True)
with torch.no_grad():
    torch.save(module(batch), sys.argv[3])
"""


def _noisy(seed=0, **changes):
    module = tiny_albef(seed, changes, text={"dropout": 0.1})
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    module.image_queue.enqueue(torch.randn(3, 8), module.image_queue.fitting_ids(torch.arange(3)))
    return module


def test_a_fresh_process_rebuilds_the_same_function_without_network_or_trainer(tmp_path):
    module = _noisy(vision={"weights": "a-model-of-the-hub"}, text={"weights": "another"})
    module.save_pretrained(tmp_path / "export")
    batch = random_batch(4)
    torch.save(batch, tmp_path / "batch.pt")
    (tmp_path / "fresh.py").write_text(FRESH)
    words = [tmp_path / name for name in ("fresh.py", "export", "batch.pt", "features.pt")]
    done = run_script(words, cwd="/")
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = module.eval()(batch)
    for feature, own in zip(torch.load(tmp_path / "features.pt", weights_only=True), expected, strict=True):
        assert torch.equal(feature, own)


def test_a_later_training_does_not_load_the_initial_weights_again(tmp_path):
    module = _noisy(weights="gone.pth")
    module.save_pretrained(tmp_path / "export")
    loaded = ALBEFModule.from_pretrained(tmp_path / "export")
    assert [loaded.weights, loaded.vision.weights, loaded.text.weights] == [None] * 3
    loaded._load_initial_weights_once()  # as fit does: nothing, or the teacher would become the student's copy
    assert torch.equal(loaded.teacher.text_proj.weight, module.teacher.text_proj.weight)
    assert not torch.equal(loaded.teacher.text_proj.weight, loaded.student.text_proj.weight)


@pytest.mark.parametrize("mlm", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_folder_holds_every_weight_once_and_no_queue(tmp_path, mlm, dtype):
    module = _noisy(mlm=mlm, optim={"betas": (0.8, 0.9)}).to(dtype)
    module.save_pretrained(tmp_path / "export")
    names = sorted(path.name for path in (tmp_path / "export").iterdir())
    assert names == ["README.md", "config.json", "model.safetensors"]
    written = load_file(tmp_path / "export" / "model.safetensors")
    # named_parameters names tied weights once, and the queues are buffers
    assert written.keys() == dict(module.named_parameters()).keys()
    assert {tensor.dtype for tensor in written.values()} == {dtype}

    loaded = ALBEFModule.from_pretrained(tmp_path / "export")
    own = {name: value for name, value in module.state_dict().items() if "queue" not in name}
    for name, value in own.items():
        assert loaded.state_dict()[name].dtype == value.dtype
        assert torch.equal(loaded.state_dict()[name], value), name
    assert not loaded.training
    assert not loaded.image_queue.valid.any()
    assert dict(loaded.hparams) == dict(module.hparams)
    if mlm:
        head = loaded.student.text_encoder.cls.predictions.decoder
        assert head.weight is loaded.student.text_encoder.bert.embeddings.word_embeddings.weight


def test_config_is_plain_data_with_the_normalization(tmp_path):
    module = _noisy()
    module.save_pretrained(tmp_path / "unknown")
    assert json.loads((tmp_path / "unknown" / "config.json").read_text())["preprocessing"] is None  # it has seen none
    module.adopt_preprocessing(ALBEFEvalTransform(16).preprocessing)
    module.save_pretrained(tmp_path / "export")
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["class"] == "ALBEFModule"
    assert config["arguments"]["contrast"]["queue_size"] == 16
    assert config["vlightning_version"]
    look = config["preprocessing"]
    assert (tuple(look["mean"]), tuple(look["std"]), look["resize_mode"]) == (CLIP_MEAN, CLIP_STD, "squash")


@pytest.mark.parametrize("append_sep", [True, False])
def test_tokenizer_beside_the_weights_gives_the_same_ids(tmp_path, append_sep):
    text = train_wordpiece(["a red circle", "a blue ring above a square"], 140)
    tokenizer = tokenizer_from_json(text)
    set_ending(tokenizer, append_sep)
    _noisy(text={"vocab_size": 140}).save_pretrained(tmp_path / "export", tokenizer.backend_tokenizer.to_str())
    opened = open_tokenizer(str(tmp_path / "export"))  # what `--data.tokenizer <folder>` does
    sentence = "A red ring, above zebras [SEP]"
    assert opened(sentence)["input_ids"] == tokenizer(sentence)["input_ids"]
    assert opened.special_tokens_map == tokenizer.special_tokens_map
    assert ALBEFModule.from_pretrained(tmp_path / "export").text.vocab_size == 140


def test_an_existing_folder_is_refused_unless_it_is_empty(tmp_path):
    module = _noisy()
    (tmp_path / "empty").mkdir()
    module.save_pretrained(tmp_path / "empty")
    before = (tmp_path / "empty" / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="empty', which exists"):
        _noisy(seed=1).save_pretrained(tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").read_bytes() == before


def test_a_failed_export_leaves_nothing(tmp_path):
    with pytest.raises(Exception, match="expected"):
        _noisy().save_pretrained(tmp_path / "export", tokenizer_json="no JSON")
    assert list(tmp_path.iterdir()) == []


def _change(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def _lose_a_weight(folder):
    state = load_file(folder / "model.safetensors")
    del state["itm_head.bias"]
    save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: _change(folder, **{"class": "CLIP"}), "export of ALBEFModule in .*, got one of CLIP"),
        (lambda folder: _change(folder, arguments={"depth": 1}), "arguments of ALBEFModule in .*, got 'depth'"),
        (lambda folder: (folder / "config.json").write_text("{"), "Expected a readable export .* damaged"),
        (
            lambda folder: (folder / "config.json").write_text("{}"),
            r"config\.json of an export in .*, got another file",
        ),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), "Expected a readable export .* damaged"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"without model\.safetensors"),
        (_lose_a_weight, r"missing itm_head\.bias, unknown nothing"),
    ],
)
def test_an_incomplete_export_is_refused(tmp_path, damage, sentence):
    _noisy().save_pretrained(tmp_path / "export")
    damage(tmp_path / "export")
    with pytest.raises(UserError, match=sentence) as raised:
        ALBEFModule.from_pretrained(tmp_path / "export")
    assert "\n" not in str(raised.value)
