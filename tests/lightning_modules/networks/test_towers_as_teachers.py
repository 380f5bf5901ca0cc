"""Pairs of towers with a tokenizer of their own as teachers: online in MobileCLIP and MM-LG, and in reinforcements."""

import csv
import shlex

import pytest
import torch
from lightning import Trainer
from torch.nn.functional import normalize
from torch.testing import assert_close

from support.methods.clip import LENGTH, SIZE, add_tiny_clip, randomized
from support.methods.encoders import IMAGES, write_pair, write_towers
from support.methods.mmlg import tiny_extraction
from support.project.pages import commands
from support.runs.command_line import run
from vlightning.common.errors import UserError
from vlightning.common.preprocessing import Preprocessing
from vlightning.datamodules import ImageTextDataModule
from vlightning.datamodules.transforms.normalize import CLIP_MEAN, CLIP_STD
from vlightning.lightning_modules import MMLGModule, MobileCLIPModule
from vlightning.lightning_modules.mobileclip.ensemble import Teacher, TeacherEnsemble
from vlightning.lightning_modules.mobileclip.module import captions_of
from vlightning.lightning_modules.networks.clip.files import save_open_clip
from vlightning.lightning_modules.networks.clip.models import build_model
from vlightning.lightning_modules.networks.published_clip import load_published

SIDE, TOKENS = 64, 10
CLIP_TEXTS = {"tokenizer": "clip", "vocab_size": 49408, "max_tokens": LENGTH}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Towers and pairs, an export of a pair of towers with the normalization of the data, and a model of open_clip."""
    folder = write_towers(tmp_path_factory.mktemp("towers"))
    write_pair(
        folder / "teacher", files=folder, max_tokens=TOKENS, image_size=SIDE, image_mean=CLIP_MEAN, image_std=CLIP_STD
    )
    clip = randomized(build_model(add_tiny_clip(), SIZE, LENGTH))
    save_open_clip(clip, add_tiny_clip(), Preprocessing(SIZE, CLIP_MEAN, CLIP_STD, "bicubic"), folder / "clip")
    return folder


def shown(method):
    """The command of the method's page with a teacher of two towers."""
    (command,) = [line for line in commands(f"vlightning fit --model {method} ") if "exported/vlightning" in line]
    return shlex.split(command)[1:]


def captions(files):
    with (files / "pairs.csv").open(newline="") as file:
        return [row["caption"] for row in csv.DictReader(file)]


def pairs(files, **options):
    sources = {"train": str(files / "pairs.csv"), "num_workers": 1, "image_size": SIDE, "batch_size": 8}
    return ImageTextDataModule(**sources | {"horizontal_flip": False} | options)


def batches_of(module, data, folder):
    """Train for two steps, and return the batches."""
    batches = []
    module.on_train_batch_end = lambda outputs, batch, batch_idx: batches.append(batch)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=2,
        logger=False,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, data)
    return batches


def student(teachers, model=None, length=LENGTH, **options):
    torch.manual_seed(0)
    teacher = {"models": [Teacher(str(weights)) for weights in teachers]}
    vision = {"image_size": SIDE}
    return MobileCLIPModule(model or add_tiny_clip(), max_tokens=length, vision=vision, teacher=teacher, **options)


def test_a_student_of_clips_tokens_learns_from_towers_with_another_tokenizer(files, tmp_path):
    module = student([files / "clip", files / "teacher"])
    batches = batches_of(module, pairs(files, **CLIP_TEXTS), tmp_path)
    teacher = load_published(None, str(files / "teacher"))
    texts = captions(files)
    for batch in batches:
        assert "teacher0_input_ids" not in batch  # it takes the student's
        given = [texts[index] for index in batch["sample_index"]]
        assert torch.equal(batch["teacher1_input_ids"], teacher.tokenizer(given))
        _, embedded = module.teachers.embed(batch, captions_of(batch, "both"))
        with torch.no_grad():
            expected = normalize(teacher.network.encode_text(teacher.tokenizer(given)), dim=-1)
        assert_close(embedded["real"][:, 8:], expected)


def test_a_student_of_two_towers_learns_from_a_clip_in_slices(files, tmp_path):
    pair = {"image": {"name": IMAGES, "weights": "random"}, "text": {"name": str(files / "text")}, "projection_dim": 8}
    module = student([files / "clip"], pair, TOKENS, memory={"micro_batch_size": 4})
    batch = batches_of(module, pairs(files, max_tokens=TOKENS), tmp_path)[0]
    clip = load_published(None, str(files / "clip"))
    ids = clip.tokenizer([captions(files)[index] for index in batch["sample_index"]])
    assert torch.equal(batch["teacher0_input_ids"], ids)
    assert batch["input_ids"].max() < 300
    assert_close(
        module.teachers.embed(batch, captions_of(batch, "both"))[1]["real"], clip.network.encode_text(ids, True)
    )


def test_synthetic_captions_have_no_ids_for_such_a_teacher(files, tmp_path):
    module = student([files / "teacher"])
    batch = batches_of(module, pairs(files, **CLIP_TEXTS), tmp_path)[0]
    with pytest.raises(UserError, match="got real and synthetic captions in a batch of image"):
        module.teachers.targets(batch, {"real": batch["input_ids"], "synthetic": batch["input_ids"]})


def test_mmlg_distils_from_towers_with_another_tokenizer(files, tmp_path):
    module = tiny_extraction(
        None, distillation_weight=1.0, image_size=SIDE, **{"teacher.weights": str(files / "teacher")}
    )
    batch = batches_of(module, pairs(files, **CLIP_TEXTS), tmp_path)[0]
    teacher = load_published(None, str(files / "teacher"))
    texts = [captions(files)[index] for index in batch["sample_index"]]
    assert torch.equal(batch["teacher_input_ids"], teacher.tokenizer(texts))
    del batch["teacher_input_ids"]
    with pytest.raises(UserError, match="Expected teacher_input_ids in the training batch"):
        module.training_step(batch, 0)


def test_the_command_line_distils_from_an_export_in_both_methods(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported/vlightning").symlink_to(files / "teacher")
    data = {"train": f"{files}/pairs.csv", "num_workers": 0, "image_size": SIDE, "batch_size": 8, "max_tokens": LENGTH}
    words = [f"--data.{name}={value}" for name, value in data.items()]
    words += ["--trainer.accelerator=cpu", "--trainer.max_steps=2", "--trainer.limit_val_batches=0"]
    done = run(*shown("MobileCLIPModule"), f"--model.model={add_tiny_clip()}", *words)
    assert done.status == 0, done.err
    first = set(tmp_path.rglob("last.ckpt"))
    sizes = {"towers.width": 16, "towers.heads": 2, "towers.depth": 4, "towers.embed_dim": 12, "optim.warmup_steps": 1}
    done = run(*shown("MMLGModule"), *(f"--model.{name}={value}" for name, value in sizes.items()), *words)
    assert done.status == 0, done.err
    (checkpoint,) = set(tmp_path.rglob("last.ckpt")) - first
    assert MMLGModule.load_from_checkpoint(checkpoint).distillation.weights == "exported/vlightning"


@torch.no_grad()
def test_a_reinforcement_encodes_texts_with_the_teachers_own_tokenizer(files):
    ensemble = TeacherEnsemble([Teacher(str(files / "teacher")), Teacher(str(files / "clip"))], 2)
    ensemble.load()
    texts = ["dark half full", "full", "a photo"]
    found = ensemble.embed_texts(texts, torch.device("cpu"))
    parts = [load_published(None, str(files / name)) for name in ("teacher", "clip")]
    expected = [normalize(part.network.encode_text(part.tokenizer(texts)), dim=-1) for part in parts]
    assert not torch.equal(*(part.tokenizer(texts)[:, :LENGTH] for part in parts))
    assert_close(found, torch.cat(expected, 1))
