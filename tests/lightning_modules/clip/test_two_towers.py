"""Two towers of one's own as a user types them: networks and folders, images and a CSV of captions."""

import json
import shutil
from pathlib import Path

import open_clip
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from support.methods.encoders import IMAGES, write_encoder, write_towers
from support.runs.command_line import run
from vlightning.callbacks import AtomicCheckpointIO
from vlightning.commands.evaluate.model import load_model
from vlightning.commands.export.reading import from_pretrained
from vlightning.common.errors import UserError
from vlightning.lightning_modules import CLIPModule, MobileCLIPModule
from vlightning.lightning_modules.clip.interpolation import interpolated
from vlightning.lightning_modules.networks.clip.pair import TowerPair
from vlightning.lightning_modules.networks.published_clip import load_published

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs/clip/two_towers.yaml"
SIDE, LENGTH = 64, 10


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Towers and pairs: plain images, whose captions say which color they have."""
    return write_towers(tmp_path_factory.mktemp("towers"))


def fit(files, *words, text="text"):
    model = [
        f"--model.model.image.name={IMAGES}",
        f"--model.model.image.weights={files}/image.safetensors",
        f"--model.model.text.name={files}/{text}",
        "--model.model.projection_dim=8",
    ]
    data = [f"--data.train={files}/pairs.csv", f"--data.validation={files}/held_out.csv", "--data.num_workers=0"]
    small = [f"--data.max_tokens={LENGTH}", f"--data.image_size={SIDE}", "--data.batch_size=8"]
    return run("fit", f"--config={CONFIG}", *model, *data, *small, "--trainer.accelerator=cpu", *words)


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
    """A checkpoint of two epochs, whose text tower has no file any more."""
    work = tmp_path_factory.mktemp("run")
    shutil.copytree(files / "text", files / "gone")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        done = fit(
            files, "--trainer.max_epochs=2", "--checkpoint.save_top_k=2", "--model.model.text.prefix=a ", text="gone"
        )
    assert done.status == 0, done.err
    shutil.rmtree(files / "gone")
    return work / "runs/clip/two_towers/version_0/checkpoints/last.ckpt"


def test_the_locked_tower_does_not_change_and_all_else_trains(files, trained):
    state = AtomicCheckpointIO().load_checkpoint(trained)["state_dict"]
    given = timm.create_model(IMAGES, checkpoint_path=str(files / "image.safetensors"), num_classes=1000)
    for name, tensor in given.state_dict().items():
        if not name.startswith("classifier."):
            assert torch.equal(state[f"student.visual.trunk.{name}"], tensor)
    module = CLIPModule.load_from_checkpoint(trained)
    moving = {name for name, parameter in module.student.named_parameters() if parameter.requires_grad}
    assert "visual.head.proj.weight" in moving
    assert "text.transformer.embeddings.word_embeddings.weight" in moving
    assert not any(name.startswith("visual.trunk.") for name in moving)


def test_a_resumed_run_is_the_uninterrupted_one(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained.parents[1], tmp_path / "run")
    (tmp_path / "run/checkpoints/last.ckpt").unlink()
    again = run("fit", f"--ckpt_path={tmp_path}/run/checkpoints/best-step2.ckpt", "--checkpoint.save_top_k=0")
    assert again.status == 0, again.err
    (resumed,) = tmp_path.rglob("last.ckpt")
    contents = [AtomicCheckpointIO().load_checkpoint(path) for path in (trained, resumed)]
    assert [content["global_step"] for content in contents] == [4, 4]
    states = [content["state_dict"] for content in contents]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


def embeddings(model, texts, image):
    """Of a model as `evaluate`, `embed`, `search` and the demo load it."""
    return model.encode_images(model.transform(image)[None]), model.encode_texts(texts)


def test_without_a_saved_tokenizer_exports_have_that_of_the_tower(files, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts, image = ["dark half", "full"], Image.open(files / "images/3.png")
    expected = embeddings(load_model(str(trained)), texts, image)
    content = AtomicCheckpointIO().load_checkpoint(trained)
    content["hyper_parameters"]["model"]["text"]["name"] = str(files / "text")
    for name in [name for name in content if name.endswith("DataModule")]:
        del content[name]["tokenizer"]
    content["datamodule_hyper_parameters"]["tokenizer"] = None
    AtomicCheckpointIO().save_checkpoint(content, "bare.ckpt")
    torch.testing.assert_close(embeddings(load_model("bare.ckpt"), texts, image), expected)
    for layout in ("vlightning", "open_clip"):
        done = run("export", "--layout", layout, "bare.ckpt", layout)
        assert done.status == 0, done.err
        assert Path(layout, "tokenizer.json").is_file()
    torch.testing.assert_close(embeddings(load_model("vlightning"), texts, image), expected)
    CLIPModule.load_from_checkpoint("bare.ckpt").save_pretrained("python")
    torch.testing.assert_close(embeddings(load_model("python"), texts, image), expected)


def test_a_moved_folder_of_open_clip_loads(files, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("export", "--layout=open_clip", str(trained), "first").status == 0
    Path("first").rename("second")
    texts, image = ["dark half", "full"], Image.open(files / "images/3.png")
    expected = embeddings(load_model(str(trained)), texts, image)
    moved = load_model("local-dir:second")
    torch.testing.assert_close(embeddings(moved, [f"a {text}" for text in texts], image), expected)
    text = json.loads(Path("second/open_clip_config.json").read_text())["model_cfg"]["text_cfg"]
    loaded, _, _ = open_clip.create_model_and_transforms(
        "local-dir:second", text_cfg=text | {"hf_model_name": "second"}
    )
    ids = open_clip.get_tokenizer("local-dir:second")([f"a {text}" for text in texts])
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval().encode_text(ids, normalize=True), expected[1])


@torch.no_grad()
def test_each_layout_computes_what_the_checkpoint_does(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = CLIPModule.load_from_checkpoint(trained).eval()
    image = torch.rand(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    texts = ["dark half", "full"]
    encoded = load_model(str(trained)).encoder(texts)
    expected = module.encode_images(image)[0], module.encode_texts(**encoded)
    for layout in ("vlightning", "open_clip", "torch_export"):  # ONNX differs in the converter only
        done = run("export", "--layout", layout, str(trained), layout)
        assert done.status == 0, done.err

    pretrained = from_pretrained("vlightning")
    assert_close(pretrained.model.encode_images(image)[0], expected[0])
    assert_close(pretrained.model.encode_texts(**pretrained.tokenizer(texts)), expected[1])

    loaded, _, _ = open_clip.create_model_and_transforms(f"local-dir:{tmp_path}/open_clip")
    ids = open_clip.get_tokenizer(f"local-dir:{tmp_path}/open_clip")([f"a {text}" for text in texts])
    loaded.eval()
    assert_close(loaded.encode_image(image, normalize=True), expected[0])
    assert_close(loaded.encode_text(ids, normalize=True), expected[1])

    program = torch.export.load("torch_export/text.pt2").module()
    teacher = load_published(None, "vlightning")
    assert_close(program(teacher.tokenizer(texts)), expected[1], rtol=1e-4, atol=1e-5)
    assert_close(teacher.network.encode_image(image, normalize=True), expected[0])
    assert teacher.preprocessing.image_size == SIDE
    assert load_published(None, str(trained)).sha256 == teacher.sha256

    refused = run("export", "--layout", "transformers", str(trained), "transformers")
    assert "got a pooling without the encoder's own pooling layer: write another layout" in refused.sentence


def test_towers_start_with_those_of_a_checkpoint_and_of_an_export(files, trained, tmp_path):
    source = str(trained)
    module = CLIPModule(
        TowerPair({"name": IMAGES, "weights": source}, {"name": str(files / "text"), "weights": source}, 8),
        max_tokens=LENGTH,
    )
    module.load_initial_weights()
    state = AtomicCheckpointIO().load_checkpoint(trained)["state_dict"]
    for name, tensor in module.student.state_dict().items():
        if name != "logit_scale":
            assert torch.equal(tensor, state[f"student.{name}"]), name


def test_wise_ft_starts_with_the_networks_and_has_the_trained_projections(files, trained):
    content = AtomicCheckpointIO().load_checkpoint(trained)
    after = content["state_dict"]
    content["hyper_parameters"]["model"]["text"]["name"] = str(files / "text")
    state = interpolated(CLIPModule, content, "the run", 0.0)["state_dict"]
    start = load_file(files / "text/model.safetensors")
    name = "embeddings.word_embeddings.weight"
    assert torch.equal(state[f"student.text.transformer.{name}"], start[name])
    assert not torch.equal(after[f"student.text.transformer.{name}"], start[name])
    for kept in ("visual.head.proj.weight", "text.proj.weight", "logit_scale"):
        assert torch.equal(state[f"student.{kept}"], after[f"student.{kept}"])


@pytest.mark.parametrize("options", [{"loss": {"name": "sigmoid"}}, {"tuning": {"lora": {}}}])
def test_the_other_loss_and_adapters_train_the_towers(files, options):
    torch.manual_seed(0)
    pair = TowerPair({"name": IMAGES, "weights": "random", "projection": "mlp"}, {"name": str(files / "text")}, 8)
    module = CLIPModule(pair, max_tokens=LENGTH, **options)
    module.log = lambda *_, **__: None
    module.load_initial_weights()
    ids = torch.randint(110, 150, (4, 6))
    ids[0, 3:] = 0
    batch = {"image": torch.rand(4, 3, SIDE, SIDE), "input_ids": ids, "image_id": torch.arange(4)}
    module.training_step(batch, 0)["loss"].backward()
    without = [name for name, one in module.named_parameters() if one.requires_grad and one.grad is None]
    assert not without


@pytest.mark.parametrize("projection", ["linear", "mlp"])
def test_a_network_that_pools_to_another_width_is_projected_from_that(files, projection):
    pair = TowerPair(
        {"name": "test_mambaout", "weights": "random", "projection": projection}, {"name": str(files / "text")}
    )
    assert CLIPModule(pair, max_tokens=LENGTH).encode_images(torch.rand(2, 3, SIDE, SIDE))[0].shape == (2, 512)


def test_a_pair_is_a_student_of_mobileclip_with_captions_of_two_lengths(files):
    torch.manual_seed(0)
    pair = {"image": {"name": IMAGES, "weights": "random"}, "text": {"name": str(files / "text")}, "projection_dim": 8}
    module = MobileCLIPModule(pair, max_tokens=LENGTH, teacher={"distillation_weight": 0.0})
    module.log = lambda *_, **__: None
    module.load_initial_weights()
    ids = torch.randint(110, 150, (4, 6))
    batch = {"image": torch.rand(4, 3, SIDE, SIDE), "input_ids": ids, "synthetic_input_ids": ids[:, :4]}
    module.training_step(batch | {"image_id": torch.arange(4)}, 0).backward()
    assert module.student.text.proj.weight.grad.any()


def test_mistakes_are_one_sentence(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_encoder(tmp_path / "bare")
    shutil.copytree(tmp_path / "bare", files / "bare", dirs_exist_ok=True)
    no_tokenizer = fit(files, text="bare")
    assert "Expected a tokenizer in the folder" in no_tokenizer.sentence
    other = fit(files, "--data.tokenizer=clip", "--data.vocab_size=49408")
    assert "Expected the tokenizer of the text tower" in other.sentence
    image = {"name": "tf_efficientnet_lite00"}
    with pytest.raises(UserError, match="did you mean 'tf_efficientnet_lite0'"):
        TowerPair(image, {"name": "text"})
    wrong = tmp_path / "wrong.safetensors"
    save_file(timm.create_model("test_resnet").state_dict(), wrong)
    pair = TowerPair({"name": IMAGES, "weights": str(wrong)}, {"name": str(files / "text")}, 8)
    module = CLIPModule(pair, max_tokens=LENGTH)
    with pytest.raises(UserError, match=r"weights of this tower as model\.image\.weights, got \d+ missing"):
        module.load_initial_weights()
