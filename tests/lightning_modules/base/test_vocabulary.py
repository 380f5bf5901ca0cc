"""The vocabulary of ALBEF and SHRe is that of the trained tokenizer, in new and resumed runs."""

import json
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch.nn import Embedding

from support.data.images import draw_image
from support.methods.albef import tiny_albef
from support.methods.shre import tiny_shre
from support.runs.command_line import export as main
from support.runs.command_line import run
from support.runs.distributed import rank_trainer, run_distributed, whole_state
from vlightning.common.errors import UserError
from vlightning.common.tokenizers import tokenizer_from_json
from vlightning.datamodules import ImageTextDataModule, ShapesDataModule
from vlightning.lightning_modules import ALBEFModule

TINY = Path(__file__).resolve().parents[3] / "configs/albef/tiny.yaml"
SMALL = {"vision.width": 8, "vision.depth": 1, "vision.heads": 1, "text.width": 8, "text.heads": 1, "text.depth": 1}
SMALL |= {"text.ffn_width": 8, "contrast.embed_dim": 8, "contrast.queue_size": 8, "rerank.k": 0}
WORDS = 2000
"""More than any tokenizer of these captions has."""
MODULES = {"albef": tiny_albef, "shre": lambda seed=0, **options: tiny_shre(None, seed, **options)}


def shapes(**options):
    sizes = {"image_size": 16, "max_tokens": 8, "length": 16, "eval_length": 4, "batch_size": 8}
    return ShapesDataModule(**{"vocab_size": WORDS, "num_workers": 0, "seed": 0} | sizes | options)


def trainer(folder, *callbacks, epochs=1):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0}
    saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    options = {"accelerator": "cpu", "default_root_dir": folder, "callbacks": [saving, *callbacks]}
    return pl.Trainer(max_epochs=epochs, **quiet, **options)


def word_rows(module):
    """Rows of all word embeddings; and the head for words has as many outputs."""
    rows = {part.weight.shape[0] for part in module.modules() if isinstance(part, Embedding) and part.padding_idx == 0}
    if isinstance(module, ALBEFModule):
        for network in (module.student, module.teacher):
            head = network.text_encoder.cls.predictions
            assert head.decoder.weight is network.text_encoder.bert.embeddings.word_embeddings.weight
            assert head.decoder.bias is head.bias
            rows |= {head.decoder.out_features, len(head.bias)}
    (entries,) = rows
    assert module.hparams["text"]["vocab_size"] == entries
    return entries


def same(module, other):
    states = module.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][name], states[1][name]) for name in states[0]
    )


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    """A config for images with captions, in the working folder."""
    monkeypatch.chdir(tmp_path)
    rows = []
    for number in range(8):
        draw_image(number).save(f"{number}.png")
        rows.append({"image": f"{number}.png", "caption": f"an image that shows number {number}"})
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = dict.fromkeys(("train", "validation", "test", "predict"), "pairs.jsonl")
    arguments = {"batch_size": 4, "num_workers": 0, "image_size": 16, "cache_dir": "cache", **sources}
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "max_epochs": 2}
    config = {"data": {"class_path": "ImageTextDataModule", "init_args": arguments}, "trainer": quiet}
    Path("my_data.yaml").write_text(json.dumps(config))


@pytest.mark.slow
def test_the_command_line_shrinks_tiny_to_its_tokenizer_and_resumes(pairs):
    # The recipe has no head for words, which is shrunk too where there is one.
    small = ["--model.mlm=true", *(f"--model.{name}={value}" for name, value in SMALL.items())]
    configs = ["--config", TINY, "--config", "my_data.yaml"]
    ran = run("fit", *configs, *small)
    assert ran.status == 0, ran.err
    (path,) = Path().rglob("last.ckpt")
    saved = torch.load(path, weights_only=True)
    entries = len(tokenizer_from_json(saved["ImageTextDataModule"]["tokenizer"]))
    assert entries < 200
    module = ALBEFModule.load_from_checkpoint(path)
    assert word_rows(module) == entries
    trained = sum(parameter.numel() for parameter in module.parameters())
    assert any(f"{trained / 1e3:.1f} K" in line and "Total params" in line for line in (ran.out + ran.err).splitlines())

    # Neither a typed vocabulary nor other captions change the checkpoint's vocabulary.
    Path("other.jsonl").write_text(json.dumps({"image": "0.png", "caption": "a b"}))
    typed = ("--data.vocab_size=30522", "--data.train=other.jsonl", "--data.batch_size=1")
    for words in (["test"], ["predict", *configs, *small], ["validate", *typed]):
        ran = run(*words, f"--ckpt_path={path}")
        assert ran.status == 0, ran.err
    resumed = run("fit", f"--ckpt_path={path}", "--trainer.max_epochs=3", *typed)
    assert resumed.status == 0, resumed.err
    newest = max(Path().rglob("last.ckpt"), key=lambda file: file.stat().st_mtime)
    assert newest != path
    assert word_rows(ALBEFModule.load_from_checkpoint(newest)) == entries

    main([str(path), "out"])
    assert word_rows(ALBEFModule.from_pretrained("out")) == entries
    ran = run("fit", *configs, *small, "--model.weights=out", "--data.tokenizer=out", "--trainer.max_epochs=1")
    assert ran.status == 0, ran.err


@pytest.mark.parametrize("name", MODULES)
def test_a_resumed_run_equals_the_uninterrupted_run(name, tmp_path):
    build = MODULES[name]
    whole, data = build(text={"vocab_size": WORDS}), shapes()
    start = {key: value.clone() for key, value in whole.state_dict().items()}
    entries = []

    class Start(pl.Callback):
        """Initial values do not change, except for the removed rows."""

        def on_fit_start(self, trainer, pl_module):
            entries.append(word_rows(pl_module))
            for key, value in pl_module.state_dict().items():
                assert torch.equal(value, start[key][: len(value)] if value.ndim else start[key]), key

    trainer(tmp_path / "whole", Start(), epochs=2).fit(whole, data)
    assert entries == [len(data.tokenizer)]
    assert len(data.tokenizer) < WORDS
    again = build(text={"vocab_size": WORDS})
    trainer(tmp_path / "again", epochs=2).fit(again, shapes())
    assert same(again, whole)
    resumed = build(text={"vocab_size": WORDS})
    trainer(tmp_path / "resumed", epochs=2).fit(resumed, shapes(), ckpt_path=tmp_path / "whole/epoch=0.ckpt")
    assert same(resumed, whole)
    tested = build(seed=1, text={"vocab_size": WORDS})
    trainer(tmp_path).test(tested, shapes(), ckpt_path=tmp_path / "whole/epoch=1.ckpt", verbose=False)
    assert same(tested, whole)
    assert same(type(whole).load_from_checkpoint(tmp_path / "whole/epoch=1.ckpt"), whole)


@pytest.mark.parametrize("name", MODULES)
def test_weights_of_a_training_determine_the_vocabulary(name, tmp_path):
    module, data = MODULES[name](text={"vocab_size": WORDS}), shapes()
    trainer(tmp_path).fit(module, data)
    data.tokenizer.backend_tokenizer.save(str(tmp_path / "vocabulary.json"))
    further = MODULES[name](text={"vocab_size": WORDS}, weights=str(tmp_path / "epoch=0.ckpt"))
    assert word_rows(further) == word_rows(module)
    with pytest.raises(UserError, match=r"the model's vocabulary, got .*: give the data a tokenizer of at most"):
        trainer(tmp_path).fit(further, shapes(tokenizer=more_words(tmp_path)))


def more_words(folder):
    """A BERT vocabulary with more words than the captions."""
    special = ["[PAD]", *(f"[unused{number}]" for number in range(1, 100)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    path = folder / "vocab.txt"
    path.write_text("\n".join([*special, *(f"w{number}" for number in range(1000))]))
    return str(path)


@pytest.mark.parametrize("name", MODULES)
def test_a_given_tokenizer_does_not_change_the_vocabulary(name, tmp_path):
    module = MODULES[name](text={"vocab_size": WORDS})
    trainer(tmp_path).fit(module, shapes(tokenizer=more_words(tmp_path)))
    assert word_rows(module) == WORDS
    other = MODULES[name](text={"vocab_size": WORDS + 1})
    with pytest.raises(UserError, match=r"text\.vocab_size is 2001, in the checkpoint 2000"):
        trainer(tmp_path).test(other, shapes(), ckpt_path=tmp_path / "epoch=0.ckpt", verbose=False)


def test_a_training_on_other_data_keeps_its_vocabulary(pairs, tmp_path):
    """Their tokenizer would be a smaller one."""
    module = tiny_albef(text={"vocab_size": WORDS})
    trainer(tmp_path).fit(module, shapes())
    arguments = json.loads(Path("my_data.yaml").read_text())["data"]["init_args"] | {"max_tokens": 8}
    own, data = ImageTextDataModule(**arguments), ImageTextDataModule(**arguments)
    own.setup("fit")
    assert len(own.tokenizer) < word_rows(module)
    other = tiny_albef(text={"vocab_size": WORDS})
    trainer(tmp_path, epochs=2).fit(other, data, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert word_rows(other) == word_rows(module) == len(data.tokenizer)


def test_a_callback_copies_the_shrunk_module(tmp_path):
    """Lightning sets callbacks up before the module."""
    module, averaging = tiny_shre(text={"vocab_size": WORDS}), WeightAveraging()
    trainer(tmp_path, averaging).fit(module, shapes())
    assert word_rows(module) < WORDS
    assert word_rows(averaging._average_model.module) == word_rows(module)


def on_rank(kind, folder):
    """Return the states of an uninterrupted run of two epochs and of a run resumed after the first."""
    states = []
    for start in (None, folder / "epoch=0.ckpt"):
        saving = ModelCheckpoint(folder if start is None else folder / "further", filename="{epoch}", save_top_k=-1)
        fitting = rank_trainer(kind, max_epochs=2, limit_val_batches=0, enable_checkpointing=True, callbacks=[saving])
        module = tiny_albef(text={"vocab_size": WORDS})
        fitting.fit(module, shapes(batch_size=4, length=8), ckpt_path=start)
        states.append(whole_state(module) | {"entries": torch.tensor(module.hparams["text"]["vocab_size"])})
    return states


@pytest.mark.parametrize("kind", ["ddp", "sharded"])
def test_processes_agree_on_the_vocabulary_before_sharding(kind, tmp_path):
    data = shapes(length=8)
    data.setup("fit")
    (whole, resumed), others = run_distributed(on_rank, kind, tmp_path)
    assert int(whole["entries"]) == int(others[0]["entries"]) == len(data.tokenizer)
    assert len(whole["teacher.text_encoder.bert.embeddings.word_embeddings.weight"]) == len(data.tokenizer)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
