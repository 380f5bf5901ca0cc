"""Two towers of one's own as a user types them: networks and folders, images and a CSV of captions."""

import json
import shutil
from pathlib import Path

import onnxruntime
import open_clip
import pyarrow.parquet as pq
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn.functional import cosine_similarity
from torch.testing import assert_close
from transformers import AutoImageProcessor, AutoTokenizer, VisionTextDualEncoderModel

from support.data.colors import read_table
from support.methods.encoders import COLORS, IMAGES, trained_without_text, write_encoder, write_towers
from support.runs.command_line import run
from vlightning.callbacks import AtomicCheckpointIO
from vlightning.commands.demo import command as demo
from vlightning.commands.evaluate.model import load_model
from vlightning.commands.export.reading import from_pretrained
from vlightning.common.errors import UserError
from vlightning.datamodules.stores.store import FeatureStore
from vlightning.lightning_modules import CLIPModule, MobileCLIPModule
from vlightning.lightning_modules.clip.interpolation import interpolated
from vlightning.lightning_modules.networks.clip.pair import TowerPair
from vlightning.lightning_modules.networks.published_clip import load_published

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs/clip/two_towers.yaml"
SIDE, LENGTH = 64, 10
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)  # others than timm's of the network
TEXTS = ["dark half", "full"]
SMALL = ("--num_workers=0", "--accelerator=cpu")


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
        f"--model.vision.image_mean={list(MEAN)}",
        f"--model.vision.image_std={list(STD)}",
    ]
    data = [f"--data.train={files}/pairs.csv", f"--data.validation={files}/held_out.csv", "--data.num_workers=0"]
    small = [f"--data.max_tokens={LENGTH}", f"--data.image_size={SIDE}", "--data.batch_size=8"]
    return run("fit", f"--config={CONFIG}", *model, *data, *small, "--trainer.accelerator=cpu", *words)


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
    """A checkpoint of two epochs, whose text tower has no file any more."""
    return trained_without_text(fit, files, tmp_path_factory.mktemp("run"), "--model.model.text.prefix=a ")


LAYOUTS = ("vlightning", "open_clip", "torch_export", "onnx", "onnx_int8")


@pytest.fixture(scope="module")
def exports(trained, tmp_path_factory):
    """The folder of each layout by its name."""
    folder = tmp_path_factory.mktemp("exports")
    for layout in LAYOUTS:
        done = run("export", "--layout", layout, str(trained), str(folder / layout))
        assert done.status == 0, done.err
    return folder


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
    texts, image = TEXTS, Image.open(files / "images/3.png")
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


@pytest.mark.slow
def test_a_moved_folder_of_open_clip_loads(files, trained, exports, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(exports / "open_clip", "second")
    config = Path("second/open_clip_config.json")
    config.write_text(config.read_text().replace(str(exports / "open_clip"), "gone"))
    texts, image = TEXTS, Image.open(files / "images/3.png")
    expected = embeddings(load_model(str(trained)), texts, image)
    moved = load_model("local-dir:second")
    torch.testing.assert_close(embeddings(moved, texts, image), expected)
    text = json.loads(config.read_text())["model_cfg"]["text_cfg"]
    loaded, _, _ = open_clip.create_model_and_transforms(
        "local-dir:second", text_cfg=text | {"hf_model_name": "second"}
    )
    ids = open_clip.get_tokenizer("local-dir:second")(texts)
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval().encode_text(ids, normalize=True), expected[1])


@pytest.fixture(scope="module")
def expected(trained):
    """Two images, and the module's features of them and of `TEXTS`, each after the prefix."""
    module = CLIPModule.load_from_checkpoint(trained).eval()
    image = torch.rand(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return image, (module.encode_images(image)[0], module.encode_texts(**load_model(str(trained)).encoder(TEXTS)))


def test_this_package_reads_its_folder_and_a_published_model(trained, exports, expected):
    image, own = expected
    pretrained = from_pretrained(exports / "vlightning")
    with torch.no_grad():
        assert_close(pretrained.model.encode_images(image)[0], own[0])
        assert_close(pretrained.model.encode_texts(**pretrained.tokenizer(TEXTS)), own[1])
        teacher = load_published(None, str(exports / "vlightning"))
        assert_close(teacher.network.encode_text(teacher.tokenizer(TEXTS), normalize=True), own[1])
        assert_close(teacher.network.encode_image(image, normalize=True), own[0])
    assert teacher.preprocessing.image_size == SIDE
    assert load_published(None, str(trained)).sha256 == teacher.sha256


@torch.no_grad()
def test_open_clip_reads_its_folder(exports, expected):
    image, own = expected
    loaded, _, transform = open_clip.create_model_and_transforms(f"local-dir:{exports}/open_clip")
    ids = open_clip.get_tokenizer(f"local-dir:{exports}/open_clip")(TEXTS)
    loaded.eval()
    assert_close(loaded.encode_image(image, normalize=True), own[0])
    assert_close(loaded.encode_text(ids, normalize=True), own[1])
    assert ids.shape[1] == LENGTH
    normalization = transform.transforms[-1]
    assert (tuple(normalization.mean), tuple(normalization.std)) == (MEAN, STD)


@pytest.mark.parametrize("layout", ["torch_export", "onnx", "onnx_int8"])
@torch.no_grad()
def test_programs_and_their_tokenizer_need_no_code_of_this_package(exports, expected, layout):
    folder = exports / layout
    image, own = expected
    encoded = Tokenizer.from_file(str(folder / "tokenizer.json")).encode_batch(TEXTS)
    inputs = {"image": image, "text": torch.tensor([text.ids for text in encoded])}
    features = []
    for name, rows in inputs.items():
        if layout == "torch_export":
            features.append(torch.export.load(folder / f"{name}.pt2").module()(rows))
        else:
            session = onnxruntime.InferenceSession(folder / f"{name}.onnx")
            (given,) = session.get_inputs()
            features.append(torch.from_numpy(session.run(None, {given.name: rows.numpy()})[0]))
    for one, other in zip(features, own, strict=True):
        if layout == "onnx_int8":
            assert cosine_similarity(one, other).min() > 0.98
        else:
            assert_close(one, other, rtol=1e-4, atol=1e-5)
    preprocessing = json.loads((folder / "config.json").read_text())["preprocessing"]
    assert [preprocessing[name] for name in ("image_size", "mean", "std")] == [SIDE, list(MEAN), list(STD)]


def test_layouts_that_cannot_hold_the_towers_are_refused(trained, tmp_path):
    for layout, sentence in (
        ("transformers", "got a pooling without the encoder's own pooling layer: write another layout"),
        ("vendor", "got"),
    ):
        assert sentence in run("export", "--layout", layout, str(trained), str(tmp_path / layout)).sentence
        assert not (tmp_path / layout).exists()


def test_transformers_reads_a_pair_that_pools_by_a_layer(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prefix = "--model.model.text.prefix=a "
    done = fit(files, "--trainer.max_epochs=1", "--model.model.text.pooling=pooler", prefix)
    assert done.status == 0, done.err
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    done = run("export", "--layout=transformers", str(checkpoint), "dual")
    assert done.status == 0, done.err
    model = VisionTextDualEncoderModel.from_pretrained("dual").eval()
    tokens = AutoTokenizer.from_pretrained("dual")(TEXTS, padding=True, truncation=True, return_tensors="pt")
    image = Image.open(files / "images/3.png")
    pixels = AutoImageProcessor.from_pretrained("dual")(image, return_tensors="pt")["pixel_values"]
    module = load_model(str(checkpoint))
    assert_close(pixels[0], module.prepared(image), rtol=0, atol=0.02)  # another resize
    with torch.no_grad():
        read = model(pixel_values=pixels, input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
        assert_close(read.text_embeds, module.encode_texts(TEXTS), rtol=0, atol=1e-5)
        assert_close(read.image_embeds, module.network.encode_images(pixels)[0], rtol=0, atol=1e-5)


def test_each_command_answers_alike_from_a_checkpoint_and_its_exports(files, trained, exports, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = read_table(files / "held_out.csv")
    table, images = f"--data.predict={files}/held_out.csv", files / "images"
    served = []
    monkeypatch.setattr(demo, "find_spec", lambda name: name)
    monkeypatch.setattr(demo, "serve", lambda search, *_: served.append(search.model.encode_texts(TEXTS)))
    stored, classes, hits = [], [], []
    for name, model in {
        "checkpoint": trained,
        "vlightning": exports / "vlightning",
        "open_clip": exports / "open_clip",
    }.items():
        for words in (
            ("embed", model, table, f"--output={name}", *SMALL),
            ("evaluate", "--model", model, "--images", images, "--classes", *COLORS, f"--out={name}.parquet", *SMALL),
            ("demo", "--model", model, "--images", images, f"--cache={name}-cache", "--port=0", "--num_workers=0"),
            ("search", "checkpoint", "dark half", "--count=8", "--model", model),
        ):
            done = run(*words)
            assert done.status == 0, done.err
        store = FeatureStore(Path(name))
        stored.append(torch.stack([store.image(row) for row in range(len(rows))]))
        stored[-1] = torch.cat([stored[-1], torch.stack([store.text(row, text) for row, (_, text) in enumerate(rows)])])
        hits.append([line for line in done.out.splitlines() if line.startswith("  ")])
        classes.append([row["classes"][0] for row in pq.read_table(f"{name}.parquet").to_pylist()])
    assert len(hits[0]) == len(rows)
    assert hits[1] == hits[2] == hits[0]
    assert classes[1] == classes[2] == classes[0]
    for features in (stored, served):
        assert_close(features[1:], [features[0]] * 2, rtol=1e-4, atol=1e-5)
    for layout in ("onnx", "torch_export"):
        assert (
            "Expected the folder of an export" in run("embed", exports / layout, table, "--output=no", *SMALL).sentence
        )


def test_a_checkpoint_predicts_and_its_config_is_planned(files, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (f"--data.predict={files}/held_out.csv", f"--data.predict_texts=[{TEXTS[0]}]", "--data.num_workers=0")
    done = run("predict", f"--ckpt_path={trained}", *words, "--trainer.accelerator=cpu")
    assert done.status == 0, done.err
    (table,) = trained.parents[2].glob("version_0_predict_*/predictions/image_embeddings.parquet")
    predicted = torch.tensor(pq.read_table(table)["embedding"].to_pylist())
    model = load_model(str(trained))
    images = [model.transform(Image.open(files / name)) for name, _ in read_table(files / "held_out.csv")]
    assert_close(predicted, model.encode_images(torch.stack(images)), rtol=1e-4, atol=1e-5)
    text = f"--model.model.text.name={files}/text"  # in place of the folder that is gone
    done = run("plan", f"--config={trained.parents[1]}/config.yaml", text, "--batch=8", "--steps=10")
    assert done.status == 0, done.err
    assert "CLIPModule" in done.out


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
