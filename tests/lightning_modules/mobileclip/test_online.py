"""Teachers that run in the training step: the loss of stored embeddings, checkpoints, other sizes, errors."""

import json
import math

import lightning.pytorch as pl
import pytest
import torch
import yaml
from open_clip import SimpleTokenizer
from torch.nn import functional as F
from torch.nn.functional import normalize

from support.data.images import draw_image
from support.methods.clip import LENGTH, NAME, SIZE, add_tiny_clip, randomized, tiny_module
from support.runs.command_line import run
from vlightning.common.errors import UserError
from vlightning.common.preprocessing import Normalization, Preprocessing
from vlightning.datamodules import ReinforcedImageTextDataModule, ShapesDataModule
from vlightning.lightning_modules import MobileCLIPModule
from vlightning.lightning_modules.mobileclip.ensemble import Teacher, TeacherEnsemble
from vlightning.lightning_modules.mobileclip.module import captions_of
from vlightning.lightning_modules.mobileclip.teachers import TEACHER_TEXTS
from vlightning.lightning_modules.networks.clip.files import save_open_clip
from vlightning.lightning_modules.networks.clip.models import build_model

ROWS, LARGER = 5, 24
CAPTIONS = ["a red bus", "two dogs", "snow", "a cat on a mat", "rain"]
SYNTHETIC = ["a bus", "dogs", "white hills", "a cat", "an umbrella"]
SIZES = {"image_size": SIZE}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two teachers of the student's image size with other normalizations, and one of another size and text length."""
    add_tiny_clip()
    root = tmp_path_factory.mktemp("teachers")
    for number, (size, length) in enumerate([(SIZE, LENGTH), (SIZE, LENGTH), (LARGER, LENGTH + 3)]):
        model = randomized(build_model(NAME, size, length), number, 3.0 + number)
        look = Preprocessing(size, (0.5, 0.4, 0.3), (0.2, 0.3 + 0.1 * number, 0.25), "bicubic")
        save_open_clip(model, NAME, look, root / str(number))
    return [str(root / str(number)) for number in range(3)]


def online(folders, scales=(20.0, None), **options):
    models = [Teacher(folder, scale=scale) for folder, scale in zip(folders, scales, strict=False)]
    module = tiny_module(teacher={"models": models, "distillation_weight": 0.75}, vision=SIZES, **options)
    loaded(module)
    return module


def loaded(module):
    module.teachers.load(LENGTH, Normalization((0.0, 0.1, 0.2), (1.0, 0.9, 0.8)), None)


def embeddings_of(module, batch):
    """The embeddings of a batch by the names of stored ones."""
    captions = captions_of(batch, module.captions)
    image, texts = module.teachers.embed(batch, captions)
    return {"teacher_image": image} | {TEACHER_TEXTS[kind]: text for kind, text in texts.items()}


def pixels():
    return torch.randint(0, 256, (ROWS, SIZE, SIZE, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def batch():
    image = pixels().permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(part)[:, None, None] for part in ([0.0, 0.1, 0.2], [1.0, 0.9, 0.8]))
    tokenizer = SimpleTokenizer(context_length=LENGTH)
    return {
        "image": (image - mean) / std,
        "input_ids": tokenizer(CAPTIONS),
        "synthetic_input_ids": tokenizer(SYNTHETIC),
    }


@torch.no_grad()
def stored(folders):
    """The embeddings of a reinforcement."""
    ensemble = TeacherEnsemble([Teacher(folder) for folder in folders], 2)
    ensemble.load()
    texts = ensemble.embed_texts(CAPTIONS + SYNTHETIC, torch.device("cpu"))
    image = ensemble.embed_images([pixels()[:, None]])[:, 0]
    return {"teacher_image": image, "teacher_text": texts[:ROWS], "teacher_synthetic": texts[ROWS:]}, ensemble


@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_the_loss_is_that_of_stored_embeddings(folders, micro_batch_size):
    embeddings, ensemble = stored(folders[:2])
    teacher = {"dims": ensemble.widths, "scales": [20.0, ensemble.scales[1]], "distillation_weight": 0.75}
    expected = tiny_module(teacher=teacher, vision=SIZES).training_step(batch() | embeddings, 0)
    module = online(folders, memory={"micro_batch_size": micro_batch_size})
    found = module.training_step(batch(), 0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    found.backward()
    assert all(parameter.grad is None for parameter in module.teachers.parameters())
    computed = embeddings_of(module, batch())
    for name, embedding in embeddings.items():
        torch.testing.assert_close(computed[name], embedding, rtol=0, atol=1e-5)


def test_one_kind_of_captions_suffices(folders):
    module = online(folders, captions="real")
    plain = {name: column for name, column in batch().items() if "synthetic" not in name}
    both = online(folders).training_step(plain, 0)
    torch.testing.assert_close(module.training_step(batch(), 0), both)
    assert set(embeddings_of(module, plain)) == {"teacher_image", "teacher_text"}


def test_images_and_texts_are_resized_for_a_teacher(folders):
    module = online([folders[2]])
    network = module.teachers.network[0]
    found = embeddings_of(module, batch())
    mean, std = (torch.tensor(part)[:, None, None] for part in ([0.5, 0.4, 0.3], [0.2, 0.5, 0.25]))
    image = F.interpolate(pixels().permute(0, 3, 1, 2) / 255, (LARGER, LARGER), mode="bicubic", antialias=True)
    ids = SimpleTokenizer(context_length=LENGTH + 3)(CAPTIONS)
    with torch.no_grad():
        expected = normalize(network.encode_image((image - mean) / std), dim=-1)
        texts = normalize(network.encode_text(ids), dim=-1)
    torch.testing.assert_close(found["teacher_image"], expected, rtol=0, atol=1e-4)
    short = ids[:, LENGTH:].sum(1) == 0  # longer captions are cut for the student
    assert short.sum() > 2
    torch.testing.assert_close(found["teacher_text"][short], texts[short], rtol=0, atol=1e-5)


def test_teachers_are_frozen_and_in_no_checkpoint(folders):
    module = online(folders).train()
    assert not any(part.training for part in module.teachers.modules())
    assert not any(parameter.requires_grad for parameter in module.teachers.parameters())
    assert len(list(module.teachers.parameters())) > 20
    assert not any(name.startswith("teachers") for name in module.state_dict())
    checkpoint = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)
    assert checkpoint["teacher"]["weights"] == ", ".join(folders[:2])
    other = online(folders[::-1])
    with pytest.raises(UserError, match="Expected the teacher that the checkpoint was trained with"):
        other.on_load_checkpoint(checkpoint)
    again = MobileCLIPModule(**module.hparams)  # plain data
    assert again.teacher.online() == module.teacher.online()
    again.load_state_dict(module.state_dict())


@pytest.fixture
def trainer(tmp_path):
    silent = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    short = {"enable_checkpointing": False, "max_steps": 2, "limit_val_batches": 0}
    return pl.Trainer(accelerator="cpu", default_root_dir=tmp_path, **silent, **short)


def pairs(**options):
    clip = {"tokenizer": "clip", "vocab_size": 49408}
    sizes = {"batch_size": 4, "length": 8, "eval_length": 4, "image_size": SIZE, "max_tokens": LENGTH}
    return ShapesDataModule(num_workers=0, **{**sizes, **clip, **options})


def student(folders):
    teacher = {"models": [Teacher(folders[0]), Teacher(folders[2])]}
    return MobileCLIPModule(add_tiny_clip(), max_tokens=LENGTH, vision=SIZES, teacher=teacher)


def test_training_on_plain_pairs_with_teachers(folders, trainer):
    module = student(folders)
    before = [parameter.clone() for parameter in module.student.parameters()]
    trainer.fit(module, pairs())
    assert any(not torch.equal(*both) for both in zip(before, module.student.parameters(), strict=True))
    assert {"train/distillation_real", "train/contrast_real"} < trainer.callback_metrics.keys()
    assert module.teachers.scales == pytest.approx([math.exp(3), math.exp(5)])
    numbers = [part for one in pairs().normalization for part in one]
    assert [part for one in module.teachers._images[0].numbers[:2] for part in one] == pytest.approx(numbers)


def test_another_tokenizer_is_refused(folders, trainer):
    with pytest.raises(UserError, match="Expected CLIP's token ids"):
        trainer.fit(student(folders), pairs(tokenizer=None, vocab_size=300))


def test_settings_that_do_not_fit_are_refused(folders):
    with pytest.raises(UserError, match=r"got teacher\.scales beside them"):
        tiny_module(teacher={"models": [{"weights": folders[0]}], "scales": [1.0]})
    with pytest.raises(UserError, match=r"Expected teacher\.models .*, got none"):
        tiny_module(teacher={"models": []})
    unused = tiny_module(teacher={"models": [{"weights": "nowhere"}], "distillation_weight": 0.0})
    loaded(unused)
    assert not unused.teachers.networks
    longer = MobileCLIPModule(add_tiny_clip(), max_tokens=LENGTH + 1, teacher={"models": [{"weights": folders[0]}]})
    longer.teachers.load(LENGTH + 1, Normalization((0.0,) * 3, (1.0,) * 3), None)
    with pytest.raises(UserError, match="Expected real captions of a datamodule of pairs for a teacher with another"):
        embeddings_of(longer, batch())


def test_the_command_line_takes_teachers():
    words = ("fit", "--model", "MobileCLIPModule", "--data", "ImageTextDataModule", "--print_config")
    ran = run(*words, "--model.teacher.models", '[{"model": "ViT-L-14", "weights": "openai", "scale": 100}]')
    assert ran.status == 0, ran.err
    found = yaml.safe_load(ran.out)["model"]["init_args"]["teacher"]["models"]
    assert found == [{"model": "ViT-L-14", "weights": "openai", "scale": 100.0, "network": None}]


def shards(tmp_path, name, teachers):
    """Reinforce pairs by teachers with the command; return the datamodule of the shards, and a training batch."""
    pairs = [{"image": f"{row}.png", "caption": CAPTIONS[row], "synthetic": [SYNTHETIC[row]]} for row in range(ROWS)]
    for row in range(ROWS):
        draw_image(row).save(tmp_path / f"{row}.png")
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    data = {"pairs": str(tmp_path / "pairs.json"), "folder": str(tmp_path / name), "synthetic_column": "synthetic"}
    data |= {"image_root": str(tmp_path), "augmentations": 2, "num_workers": 0, "cache_dir": str(tmp_path / "cache")}
    config = {
        "model": {"class_path": "ReinforcementModule", "init_args": {"teachers": teachers}},
        "data": {"class_path": "ReinforcementDataModule", "init_args": data},
        "trainer": {"accelerator": "cpu", "devices": 1, "logger": False},
    }
    (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config))
    assert run("predict", "--config", tmp_path / f"{name}.yaml").status == 0
    datamodule = ReinforcedImageTextDataModule(
        str(tmp_path / name), batch_size=ROWS, num_workers=0, image_size=SIZE, cache_dir=str(tmp_path / "cache")
    )
    datamodule.setup("fit")
    return datamodule, next(iter(datamodule.train_dataloader()))


def test_a_teacher_of_a_stored_ensemble_is_distilled_as_from_shards_that_it_wrote_alone(folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    teachers = [{"weights": folders[0], "scale": 20.0}, {"weights": folders[1], "scale": 40.0}]
    both, batch = shards(tmp_path, "both", teachers)
    for number, teacher in enumerate(teachers):
        alone, batch_of_one = shards(tmp_path, f"one_{number}", [teacher])
        losses = []
        for data, rows, distilled in ((both, batch, [number]), (alone, batch_of_one, None)):
            module = tiny_module(teacher={"distilled": distilled, "distillation_weight": 0.75}, max_tokens=77)
            module.teachers.load(77, Normalization((0.0,) * 3, (1.0,) * 3), data)
            losses.append(module.training_step(rows, 0))
        assert torch.equal(*losses)
    ensemble = tiny_module(teacher={"distillation_weight": 0.75}, max_tokens=77)
    ensemble.teachers.load(77, Normalization((0.0,) * 3, (1.0,) * 3), both)
    assert ensemble.training_step(batch, 0) != losses[0]


@pytest.mark.parametrize(
    ("distilled", "sentence"),
    [([2], "the 2 stored teachers, from 0 to 1"), ([], "different numbers"), ([1, 1], "different numbers")],
)
def test_distilled_teachers_are_stored_and_named_once(distilled, sentence):
    with pytest.raises(UserError, match=sentence):
        tiny_module(teacher={"dims": [5, 7], "distilled": distilled}).teachers.load(LENGTH, None, None)
    with pytest.raises(UserError, match=r"without settings of stored teachers, got teacher\.distilled"):
        tiny_module(teacher={"models": [Teacher("one")], "distilled": [0]})
