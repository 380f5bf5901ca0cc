"""Embeddings equal those of each image and text alone, independent of the batch; omitted pairs."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import open_clip
import pytest
import torch
import yaml
from open_clip import CLIP
from PIL import Image
from safetensors.torch import save_file

from support.data.images import draw_image, encoded
from support.methods.clip import NAME, SIZE, add_tiny_clip, randomized
from support.runs.command_line import run
from vlightning.common.errors import UserError
from vlightning.common.preprocessing import Preprocessing
from vlightning.datamodules.base.faults import Account, Fault
from vlightning.datamodules.reinforced.reinforcement_rows import (
    NetworkInputs,
    Original,
    View,
    batch_of,
)
from vlightning.datamodules.transforms.replay import OPERATIONS, Augmentation, Box, replay
from vlightning.lightning_modules.mobileclip.captioner import Captioner
from vlightning.lightning_modules.mobileclip.ensemble import Teacher
from vlightning.lightning_modules.mobileclip.reinforcement import ReinforcementModule
from vlightning.lightning_modules.networks.clip.files import save_open_clip
from vlightning.lightning_modules.networks.clip.models import build_model
from vlightning.lightning_modules.networks.published_clip import load_published

ROOT = Path(__file__).resolve().parents[3]
LARGER = {  # than the tiny CLIP of all tests, in all of its sizes
    "embed_dim": 12,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 24, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8},
    "text_cfg": {"context_length": 9, "vocab_size": 49408, "width": 24, "heads": 2, "layers": 1},
}
WIDTHS = [8, 12]
CAPTIONS = ["a red bus in the rain", "two dogs that sleep on the old sofa of my aunt", "snow"]
SYNTHETIC = [["a bus.", "rain on a street"], ["dogs"], ["white hills", "snow on hills", "a cold day"]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of two different teachers, and of one with the image size and interpolation of the first."""
    add_tiny_clip()
    root = tmp_path_factory.mktemp("teachers")
    for number, seed in ((0, 0), (2, 2)):
        model = randomized(build_model(NAME, context_length=None), seed, 3.0 + number)
        look = Preprocessing(SIZE, (0.5, 0.4, 0.3), (0.2, 0.3 + 0.1 * number, 0.25), "bicubic")
        save_open_clip(model, NAME, look, root / str(number))
    larger = root / "1"
    larger.mkdir()
    look = {"mean": [0.1, 0.2, 0.6], "std": [1.0, 0.9, 0.5], "interpolation": "bilinear"}
    (larger / "open_clip_config.json").write_text(json.dumps({"model_cfg": LARGER, "preprocess_cfg": look}))
    save_file(randomized(CLIP(**LARGER), 1, 4.0).state_dict(), larger / "open_clip_model.safetensors")
    return [str(root / str(number)) for number in range(3)]


def made(folders, **options):
    module = ReinforcementModule([Teacher(folder) for folder in folders], **options)
    module.load()
    return module


@pytest.fixture(scope="module")
def module(folders):
    return made(folders[:2])


def number_of(name):
    return OPERATIONS.index(name)


AUGMENTATIONS = [
    Augmentation(Box(2, 3, 20, 25), ((number_of("Rotate"), -9.0), (number_of("Color"), 0.27))),
    Augmentation(Box(0, 0, 32, 40), ((number_of("Identity"), 0.0), None)),
    Augmentation(Box(5, 10, 12, 9), ((number_of("TranslateX"), 3.0), (number_of("Posterize"), 7.0))),
    Augmentation(Box(7, 0, 25, 33), ((number_of("Equalize"), 0.0), (number_of("ShearY"), 0.09))),
]


def originals(synthetic=SYNTHETIC):
    pairs = []
    for row, (caption, texts) in enumerate(zip(CAPTIONS, synthetic, strict=True)):
        augmentations = [AUGMENTATIONS[(row + shift) % 4] for shift in range(3)]
        content = encoded(noisy(row))
        pairs.append(Original(10 + row, f"pair {row}", content, caption, texts, augmentations, (32, 40)))
    return pairs


def noisy(number):
    noise = np.random.default_rng(number).integers(-40, 40, (32, 40, 3))
    return Image.fromarray((np.array(draw_image(number)) + noise).clip(0, 255).astype(np.uint8))


def batch_for(module, pairs, faults=()):
    inputs = NetworkInputs([View(*view) for view in module.views], module.caption_transform)
    prepared = [inputs(Image.open(io.BytesIO(pair.image)), pair, 7 * pair.row) for pair in pairs]
    return batch_of(prepared, list(faults))


def unit(features):
    return features / features.square().sum(-1, keepdim=True).sqrt()


@torch.no_grad()
def alone(folders, pair, texts):
    """Embeddings [A, D] and [T, D] of each image and text alone, computed by open_clip."""
    images, words = [], []
    for folder in folders:
        look = json.loads((Path(folder) / "open_clip_config.json").read_text())["preprocess_cfg"]
        mean, std = np.array(look["mean"]), np.array(look["std"])
        source = f"local-dir:{folder}"
        network, tokenizer = open_clip.create_model(source).eval(), open_clip.get_tokenizer(source)
        rows = []
        for augmentation in pair.augmentations:
            size = network.visual.image_size[0]
            replayed = replay(Image.open(io.BytesIO(pair.image)), augmentation, size, look["interpolation"])
            pixels = (np.array(replayed) / 255 - mean) / std
            rows.append(network.encode_image(torch.from_numpy(pixels.transpose(2, 0, 1)[None]).float()))
        images.append(unit(torch.cat(rows)))
        words.append(unit(torch.cat([network.encode_text(tokenizer([text])) for text in texts])))
    return torch.cat(images, 1), torch.cat(words, 1)


def embeddings(record):
    return torch.cat([record.image_embeddings, record.text_embeddings, *record.synthetic_embeddings.values()])


def predicted(module, batch):
    with torch.inference_mode():
        return module.predict_step(batch, 0)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def attach(module, monkeypatch, **datamodule):
    """Attach a trainer with a datamodule."""
    strategy = SimpleNamespace(restore_checkpoint_after_setup=False)
    trainer = SimpleNamespace(datamodule=SimpleNamespace(**datamodule), strategy=strategy)
    monkeypatch.setattr(module, "_trainer", trainer)


@pytest.fixture(autouse=True)
def _trainer(module, monkeypatch):
    attach(module, monkeypatch)


def test_embeddings_equal_those_of_each_teacher_and_image_alone(folders, module):
    pairs = originals()
    reinforced = predicted(module, batch_for(module, pairs))
    assert module.widths == WIDTHS
    assert module.views == [(SIZE, "bicubic"), (24, "bilinear")]
    assert reinforced.left_out == []
    assert list(reinforced.records) == [10, 11, 12]
    for pair, texts in zip(pairs, SYNTHETIC, strict=True):
        record = reinforced.records[pair.row]
        images, words = alone(folders[:2], pair, [pair.caption, *texts])
        close(record.image_embeddings, images)
        close(record.text_embeddings, words[:1])
        close(record.synthetic_embeddings["syn_text"], words[1:])
        assert record.synthetic == {"syn_text": texts}
        for part in embeddings(record).split(WIDTHS, 1):
            close(part.norm(dim=1), torch.ones(len(part)))
    rows = torch.cat([embeddings(record) for record in reinforced.records.values()])
    assert torch.pdist(rows).min() > 1e-3  # so that no two can be mistaken for each other


def test_embeddings_are_in_the_order_of_the_teachers(folders, module):
    reversed_ = made([folders[1], folders[0]])
    attached = SimpleNamespace(datamodule=None)
    reversed_._trainer = attached
    one, two = (predicted(made_, batch_for(made_, originals())).records[11] for made_ in (module, reversed_))
    close(embeddings(one).roll(12, 1), embeddings(two))
    assert reversed_.widths == WIDTHS[::-1]


@pytest.mark.parametrize("forward_batch", [1, 3, 256])
@pytest.mark.parametrize("rows", [[0], [2, 0], [0, 1, 2]])
def test_embeddings_do_not_depend_on_the_batch(module, monkeypatch, forward_batch, rows):
    pairs = originals()
    whole = predicted(module, batch_for(module, pairs)).records
    monkeypatch.setattr(module.ensemble, "forward_batch", forward_batch)
    seen = []
    hooks = [
        teacher.network.visual.register_forward_hook(lambda _, given, __: seen.append(len(given[0])))
        for teacher in module.ensemble.loaded
    ]
    some = predicted(module, batch_for(module, [pairs[row] for row in rows])).records
    for hook in hooks:
        hook.remove()
    assert list(some) == [pairs[row].row for row in rows]
    for row, record in some.items():
        close(embeddings(record), embeddings(whole[row]))
    assert max(seen) <= forward_batch
    assert sum(seen) == 2 * 3 * len(rows)


def test_teachers_with_equal_inputs_share_a_view(folders):
    three = made(folders)
    three._trainer = SimpleNamespace(datamodule=None)
    assert three.views == [(SIZE, "bicubic"), (24, "bilinear")]
    pairs = originals()
    record = predicted(three, batch_for(three, pairs)).records[12]
    images, words = alone(folders, pairs[2], [CAPTIONS[2], *SYNTHETIC[2]])  # normalized in three ways
    close(embeddings(record), torch.cat([images, words]))


@pytest.mark.parametrize("whole", [False, True])  # the weights too, as the trainer's "bf16-true" has it
def test_bfloat16_embeddings_are_close(module, folders, whole):
    batch = batch_for(module, originals())
    exact = predicted(module, batch).records
    if whole:
        rounded = made(folders[:2]).bfloat16()
        rounded._trainer = SimpleNamespace(datamodule=None)
        half = predicted(rounded, batch).records
        assert rounded.settings() == module.settings()
    else:
        with torch.autocast("cpu", torch.bfloat16):
            half = predicted(module, batch).records
    for row, record in half.items():
        found, expected = embeddings(record), embeddings(exact[row])
        assert (found.dtype, found.device.type) == (torch.float32, "cpu")
        assert not torch.equal(found, expected)
        for one, other in zip(found.split(WIDTHS, 1), expected.split(WIDTHS, 1), strict=True):
            assert torch.cosine_similarity(one, other).min() >= 0.999
            close(one.norm(dim=1), torch.ones(len(one)))


class Parrot(Captioner):
    """Return given captions; by default the seed and a pixel of the image, and a blank text."""

    says: ClassVar[list[list[str]] | None] = None

    def __init__(self, captions: int = 2) -> None:
        super().__init__(captions, 0.9, 1.0, True)
        self.loads = 0

    def load(self) -> None:
        self.loads += 1
        self.network = torch.nn.Linear(1, 1)
        self.origin = {"model": "parrot"}

    @property
    def transform(self) -> Callable[[Image.Image], torch.Tensor]:
        return corner

    def forward(self, images, seeds):
        told = [[f"seed {seed} pixel {image[0, 0, 0]:.0f}", " \n"] for image, seed in zip(images, seeds, strict=True)]
        return self.says or told


def corner(image):
    return torch.tensor(np.array(image)[:1, :1]).permute(2, 0, 1).float()


@pytest.fixture
def captioned(folders, monkeypatch):
    """A module with a captioner, and the account of its datamodule."""
    module = made(folders[:2], captioner=Parrot())
    account = Account("predict", 0.5, "left out")
    attach(module, monkeypatch, account={"predict": account}.__getitem__)
    return module, account


def test_blank_captions_are_dropped(folders, captioned):
    module, account = captioned
    pairs = originals([[], [], []])
    reinforced = predicted(module, batch_for(module, pairs))
    assert reinforced.left_out == []
    assert account.causes.total() == account.num_read == 0
    for pair in pairs:
        corner_ = np.array(Image.open(io.BytesIO(pair.image)))[0, 0, 0]
        text = f"seed {7 * pair.row} pixel {corner_}"
        record = reinforced.records[pair.row]
        assert record.synthetic == {"syn_text": [text]}
        images, words = alone(folders[:2], pair, [pair.caption, text])
        close(embeddings(record), torch.cat([images, words]))


class Loud(Parrot):
    """Look at two pixels, and return the seed in capitals."""

    @property
    def transform(self) -> Callable[[Image.Image], torch.Tensor]:
        return two_pixels

    def forward(self, images, seeds):
        assert images.shape[1:] == (3, 1, 2)
        return [[f"SEED {seed}", f"PIXEL {image[0, 0, 1]:.0f}"] for image, seed in zip(images, seeds, strict=True)]


def two_pixels(image):
    return torch.tensor(np.array(image)[:1, :2]).permute(2, 0, 1).float()


def test_captions_of_several_captioners_are_stored_one_after_another(folders, monkeypatch):
    module = made(folders[:1], captioner=[Parrot(captions=1), Loud(captions=2), Parrot(captions=1)])
    attach(module, monkeypatch, account={"predict": Account("predict", 0.5, "left out")}.__getitem__)
    pairs = originals([[], [], []])
    reinforced = predicted(module, batch_for(module, pairs))
    seeds = set()
    for pair in pairs:
        pixels = np.array(Image.open(io.BytesIO(pair.image)))[0, :2, 0]
        record = reinforced.records[pair.row]
        first, second, third, fourth = record.synthetic["syn_text"]
        assert (first, third) == (f"seed {7 * pair.row} pixel {pixels[0]}", f"PIXEL {pixels[1]}")
        assert fourth.endswith(f"pixel {pixels[0]}")
        seeds |= {int(text.split()[1]) for text in (first, second, fourth)}
        _, words = alone(folders[:1], pair, [first, second, third, fourth])
        close(record.synthetic_embeddings["syn_text"], words)
    assert len(seeds) == 3 * len(pairs)  # no two captioners draw the same numbers
    assert module.captions == 4
    described = module.settings()["captioner"]
    assert [one["class"] for one in described] == ["Parrot", "Loud", "Parrot"]
    assert json.loads(json.dumps(described)) == described
    assert not any(part.training for part in module.captioner.modules())
    assert not any(parameter.requires_grad for parameter in module.captioner.parameters())
    with pytest.raises(UserError, match="got none: name some"):
        ReinforcementModule([Teacher(folders[0])], [])


def test_the_command_line_takes_several_captioners(tmp_path):
    captioner = [{"class_path": "CoCaCaptioner", "init_args": {"weights": name}} for name in ("one.pt", "two.pt")]
    config = {"model": {"init_args": {"captioner": captioner}}}
    (tmp_path / "several.yaml").write_text(yaml.safe_dump(config))
    base = str(ROOT / "configs/mobileclip/reinforce.yaml")
    ran = run("predict", "--config", base, "--config", str(tmp_path / "several.yaml"), "--print_config")
    assert ran.status == 0, ran.err
    found = yaml.safe_load(ran.out)["model"]["init_args"]["captioner"]
    assert [one["init_args"]["weights"] for one in found] == ["one.pt", "two.pt"]


def test_a_pair_without_captions_is_left_out_and_counted(folders, captioned, monkeypatch):
    module, account = captioned
    monkeypatch.setattr(Parrot, "says", [["one", "two"], ["", " \t"], [" ", "three"]])
    pairs = originals([[], [], []])
    reinforced = predicted(module, batch_for(module, pairs))
    assert list(reinforced.records) == [10, 12]
    assert reinforced.left_out == [(11, "no synthetic caption", "pair 1")]
    assert dict(account.causes) == {"no synthetic caption": 1}
    for row, texts in ((0, ["one", "two"]), (2, ["three"])):
        images, words = alone(folders[:2], pairs[row], [pairs[row].caption, *texts])
        close(embeddings(reinforced.records[10 + row]), torch.cat([images, words]))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("tower", ["image", "text"])
def test_non_finite_embeddings_are_left_out_and_counted(module, monkeypatch, tower, value):
    account = Account("predict", 0.5, "left out")
    attach(module, monkeypatch, account={"predict": account}.__getitem__)
    batch = batch_for(module, originals(), [(13, Fault("damaged", "pair 3"))])
    expected = predicted(module, batch).records
    network = module.ensemble.loaded[1].network
    encode, place = (network.encode_image, 4) if tower == "image" else (network.encode_text, 4)

    def overflow(rows):
        features = encode(rows).clone()
        features[place, 3] = value
        return features

    monkeypatch.setattr(network, f"encode_{tower}", overflow)  # the second pair's second image, or its second text
    reinforced = predicted(module, batch)
    assert reinforced.left_out == [(13, "damaged", "pair 3"), (11, "embedding not finite", "pair 1")]
    assert dict(account.causes) == {"embedding not finite": 1}  # the loader has counted the other
    assert list(reinforced.records) == [10, 12]
    for row, record in reinforced.records.items():
        close(embeddings(record), embeddings(expected[row]))


def test_a_batch_without_pairs(captioned):
    module, account = captioned
    reinforced = predicted(module, batch_for(module, [], [(3, Fault("damaged", "pair 3"))]))
    assert reinforced == ({}, [(3, "damaged", "pair 3")])
    assert predicted(module, batch_for(module, [])) == ({}, [])
    assert account.causes.total() == 0


def test_settings_describe_teachers_and_captioner(folders):
    module = ReinforcementModule([Teacher(folders[0]), Teacher(folders[1], scale=50.0)], Parrot(captions=3))
    module.load()
    settings = module.settings()
    assert json.loads(json.dumps(settings)) == settings
    first, second = settings["teachers"]
    for teacher, folder, width in ((first, folders[0], 8), (second, folders[1], 12)):
        assert (teacher["model"], teacher["weights"], teacher["width"]) == (Path(folder).name, folder, width)
        assert teacher["sha256"] == load_published(None, folder).sha256
    assert first["scale"] == pytest.approx(np.exp(3.0))
    assert first["temperature"] == pytest.approx(np.exp(-3.0))
    assert (second["scale"], second["temperature"]) == (50.0, 0.02)
    look = {"image_size": 24, "interpolation": "bilinear", "mean": [0.1, 0.2, 0.6], "std": [1.0, 0.9, 0.5]}
    assert {name: second[name] for name in look} == look
    assert settings["captioner"] == module.captioner.description()
    assert settings["captioner"]["model"] == "parrot"
    assert module.captions == 3


def test_settings_without_a_captioner(module):
    assert module.settings()["captioner"] is None
    assert module.captions is None
    assert module.caption_transform is None


def test_networks_are_loaded_once_frozen_and_in_no_checkpoint(folders, monkeypatch):
    module = ReinforcementModule([Teacher(folders[0])], Parrot())
    attach(module, monkeypatch, has_synthetic=False)
    module.setup("predict")
    module.setup("predict")
    module.train()
    assert module.captioner.loads == len(module.ensemble.loaded) == len(module.ensemble.networks) == 1
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert not any(part.training for network in module.ensemble.networks for part in network.modules())
    assert not module.captioner.training
    assert [name for name in module.state_dict() if name.startswith("ensemble")] == []
    assert len(list(module.ensemble.networks.parameters())) > 10  # which move to the device with the module


def test_synthetic_captions_have_one_source(folders, monkeypatch):
    both, neither = ReinforcementModule([Teacher(folders[0])], Parrot()), ReinforcementModule([Teacher(folders[0])])
    attach(both, monkeypatch, has_synthetic=True)
    attach(neither, monkeypatch, has_synthetic=False)
    with pytest.raises(UserError, match=r"leave out model.captioner or data.synthetic_column\.$"):
        both.setup("predict")
    with pytest.raises(UserError, match=r"got neither a captioner nor .* name a column as data.synthetic_column\.$"):
        neither.setup("predict")
    assert both.ensemble.loaded == neither.ensemble.loaded == []
    attach(neither, monkeypatch, has_synthetic=True)
    neither.setup("predict")
    assert neither.ensemble.loaded


def test_arguments_out_of_range():
    with pytest.raises(UserError, match="at least one teacher"):
        ReinforcementModule([])
    with pytest.raises(UserError, match="forward_batch of at least 1, got 0"):
        ReinforcementModule([Teacher("folder")], forward_batch=0)


def test_the_released_settings_parse(tmp_path):
    config = ROOT / "configs/mobileclip/reinforce.yaml"
    words = ("--config", str(config), "--data.pairs", "pairs.jsonl", "--data.folder", str(tmp_path))
    ran = run("predict", *words, "--print_config")
    assert ran.status == 0, ran.err
    model = yaml.safe_load(ran.out)["model"]["init_args"]
    shared = {"model": "ViT-L-14", "scale": None, "network": None}
    assert model["teachers"] == [shared | {"weights": name} for name in ("openai", "datacomp_xl_s13b_b90k")]
    assert model["captioner"]["class_path"].endswith("CoCaCaptioner")
    assert model["captioner"]["init_args"]["captions"] == 5


def test_the_command_reinforces_a_table(tmp_path, folders, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open("pairs.jsonl", "w") as lines:
        for row, (caption, synthetic) in enumerate(zip(CAPTIONS, SYNTHETIC, strict=True)):
            noisy(row).save(f"{row}.png")
            lines.write(json.dumps({"image": f"{row}.png", "caption": caption, "synthetic": synthetic}) + "\n")
    data = {"pairs": "pairs.jsonl", "folder": "made", "synthetic_column": "synthetic", "augmentations": 2}
    data |= {"batch_size": 2, "num_workers": 0, "cache_dir": "cache", "image_root": "."}
    teachers = [{"weights": folders[0], "scale": 50.0}, {"weights": folders[1]}]
    config = {
        "model": {"class_path": "ReinforcementModule", "init_args": {"teachers": teachers}},
        "data": {"class_path": "ReinforcementDataModule", "init_args": data},
        "trainer": {"accelerator": "cpu", "devices": 1, "precision": "bf16-mixed", "logger": False},
    }
    Path("reinforce.yaml").write_text(yaml.safe_dump(config))
    ran = run("predict", "--config", "reinforce.yaml")
    assert ran.status == 0, ran.err
    manifest = json.loads(Path("made/manifest.json").read_text())
    assert manifest["complete"]
    assert manifest["samples"] == 3
    assert [teacher["width"] for teacher in manifest["teachers"]] == WIDTHS
    assert manifest["teachers"][0]["scale"] == 50.0
    assert manifest["self_check"]["least_cosine"] > 0.999
