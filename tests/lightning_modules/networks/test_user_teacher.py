"""Teachers of the user's own in CoCoRD, SHRe, reinforcement and MobileCLIP, from the command line and from Python."""

import json
import re
from pathlib import Path

import open_clip
import pytest
import torch
import torch.nn.functional as F
import yaml
from lightning import Trainer

from support.data.images import draw_image
from support.methods.cocord import OFF
from support.methods.own_teacher import OwnClassifier, OwnPair
from support.methods.shre import WORDS, tiny_shre
from support.methods.tiny import TinyData
from support.runs.command_line import run
from vlightning import lightning_modules
from vlightning.commands.evaluate.model import load_model
from vlightning.commands.export import from_pretrained
from vlightning.common.errors import UserError
from vlightning.datamodules import ShapeClassesDataModule, ShapesDataModule
from vlightning.lightning_modules import CoCoRDModule
from vlightning.lightning_modules.cocord.settings import TeacherSettings
from vlightning.lightning_modules.cocord.teacher import UserClassifier as Wrapped
from vlightning.lightning_modules.mobileclip.ensemble import Teacher, TeacherEnsemble
from vlightning.lightning_modules.networks.user_teacher import teacher_images
from vlightning.lightning_modules.shre.settings import TeacherSettings as SHReTeacher
from vlightning.lightning_modules.shre.teacher import teacher_conversion as shre_images

CLASSIFIER, PAIR = "support.methods.own_teacher.OwnClassifier", "support.methods.own_teacher.OwnPair"
SHORT = ["--trainer.accelerator", "cpu", "--trainer.limit_val_batches", "1", "--data.num_workers", "0"]
SHORT += ["--trainer.limit_train_batches", "2", "--trainer.max_epochs", "1", "--data.batch_size", "16"]
SHORT += ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
COCORD = ["--model", "CoCoRDModule", "--model.student", "resnet8", "--model.heads", "{embed_dim: 8, hidden: 8}"]
COCORD += ["--model.contrast.queue_size", "64", "--model.num_classes", "40", "--data", "ShapeClassesDataModule"]
COCORD += ["--data.length", "64"]
SHRE = ["--model", "SHReModule", "--model.num_classes", "40", "--model.vision", "{width: 16, depth: 1, heads: 2}"]
SHRE += ["--model.text.depth", "1", "--data", "ShapesDataModule", "--data.image_size", "32", "--data.length", "64"]
GONE = "gone.OwnClassifier"
QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "max_steps": 1}
METHODS = {"CoCoRDModule": COCORD, "SHReModule": SHRE}


class Data:
    """The normalization of a datamodule's images."""

    preprocessing = {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7]}  # noqa: RUF012


def own(method, *words, network=CLASSIFIER):
    """Run `fit` with a network of the user's own as the teacher."""
    return run("fit", *METHODS[method], *SHORT, "--model.teacher.network", network, *words)


def of_the_network(image):
    """The images as the network expects them, from those of `Data`."""
    sides = [
        torch.tensor(part)[:, None, None] for part in (*Data.preprocessing.values(), (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    ]
    mean, std, own_mean, own_std = sides
    return (image * std + mean - own_mean) / own_std


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_needs_its_teachers_code_for_training_alone(method, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    ran = own(method, "--model.teacher.network.image_size", "24")
    assert ran.status == 0, ran.err
    assert f"The teacher is {CLASSIFIER} of 'model.teacher.network'." in caplog.text
    (checkpoint,) = Path().rglob("last.ckpt")
    content = torch.load(checkpoint, weights_only=True)
    assert content["teacher"]["name"] == CLASSIFIER
    assert not any(name.startswith("teacher.") for name in content["state_dict"])

    # The class cannot be imported any more.
    content["hyper_parameters"]["teacher"]["network"]["class_path"] = GONE
    torch.save(content, "gone.ckpt")
    ran = run("validate", "--ckpt_path", "gone.ckpt", "--trainer.limit_val_batches", "1")
    assert ran.status == 0, ran.err
    content["hyper_parameters"]["optimizer"] = {"class_path": "gone.Optimizer"}
    torch.save(content, "gone_optimizer.ckpt")
    if method == "SHReModule":
        assert load_model("gone_optimizer.ckpt").network.hparams["teacher"]["network"] == {"class_path": GONE}
    loaded = getattr(lightning_modules, method).load_from_checkpoint("gone.ckpt")
    assert loaded.hparams["teacher"]["network"] == {"class_path": GONE}
    with pytest.raises(UserError, match=f"{GONE} for training.* type --model.teacher.network {GONE}, or .* in Python"):
        Trainer(**QUIET).fit(loaded, ShapesDataModule(length=16, image_size=32, num_workers=0))
    ran = run("plan", "--ckpt_path", "gone.ckpt")
    assert ran.status == 0, ran.err
    assert f"Without the teacher {GONE} of the checkpoint" in ran.out
    ran = run("export", "gone.ckpt", "exported", "--layout", "vlightning")
    assert ran.status == 0, ran.err
    read = from_pretrained("exported")
    images = torch.rand(2, 3, 32, 32)
    found = read.model(images) if method == "CoCoRDModule" else read.model.classify_images(images)
    assert found.shape == (2, 40)

    # Training goes on only with a class that is typed, and only with the same weights.
    ran = run("fit", "--ckpt_path", str(checkpoint), *SHORT[-4:], "--trainer.max_epochs", "2")
    assert "which could run any code: if you trust it, type --model.init_args.teacher.network" in ran.sentence
    again = ["--ckpt_path", str(checkpoint), "--model.teacher.network", CLASSIFIER, "--trainer.max_epochs", "2"]
    ran = run("fit", *again)
    assert ran.status == 0, ran.err
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)  # other random weights
    ran = run("fit", *again, "--trainer.logger.version", "9")
    assert "teacher that the checkpoint was trained with" in ran.sentence
    assert "give that one as model.teacher.network" in ran.sentence


def test_features_and_logits_are_those_of_the_network_on_its_own_images():
    network = OwnClassifier().eval()
    wrapped, image = Wrapped(network, 40).eval(), torch.randn(4, 3, 32, 32)
    wrapped.images = teacher_images(network, Data())
    features = wrapped.forward_features(image)
    torch.testing.assert_close(features, network.body(of_the_network(image)).mean((2, 3)))
    torch.testing.assert_close(wrapped.classify(features), network(of_the_network(image)))
    assert wrapped.feature_dim == 6
    converted = shre_images(network, SHReTeacher(network=network), Data())(image)
    torch.testing.assert_close(converted, of_the_network(image))
    small = OwnClassifier(image_size=24)
    assert teacher_images(small, Data())(image).shape == (4, 3, 24, 24)
    assert shre_images(small, SHReTeacher(network=small), Data())(image).shape == (4, 3, 24, 24)


@pytest.mark.parametrize(("data", "named"), [(None, "the run, which has no datamodule"), (TinyData(), "TinyData")])
def test_data_that_do_not_state_their_normalization_are_refused(data, named):
    network = OwnClassifier()
    for images in (
        lambda: teacher_images(network, data),
        lambda: shre_images(network, SHReTeacher(network=network), data),
    ):
        with pytest.raises(UserError, match=f"Expected the normalization of the images.* got none from {named}: "):
            images()


def test_shre_refuses_another_normalization_than_the_network_states():
    network = OwnClassifier()
    shre_images(network, SHReTeacher(network=network, mean=network.mean, std=network.std), Data())
    for name in ("mean", "std"):
        settings = SHReTeacher(network=network, **{name: (0.5071, 0.4867, 0.4408)})
        with pytest.raises(UserError, match=rf"Expected no model.teacher.{name}, since .*OwnClassifier states \["):
            shre_images(network, settings, Data())


def test_the_teacher_of_shre_is_frozen(tmp_path):
    network = OwnClassifier()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    module = tiny_shre(num_classes=40, teacher={"network": network}, kl={"weight": 1.0}, **WORDS)
    data = ShapesDataModule(length=16, eval_length=8, batch_size=8, image_size=16, max_tokens=8, vocab_size=320)
    runs = Trainer(max_steps=2, accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    runs.fit(module, data)
    assert not any(part.training for part in network.modules())
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_an_object_in_python_is_frozen_and_stored_by_the_name_of_its_class(tmp_path):
    network = OwnClassifier()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    module = CoCoRDModule("resnet8", 40, teacher=TeacherSettings(network=network), kd={"weight": 1.0}, **OFF)
    data = ShapeClassesDataModule(length=32, eval_length=10, batch_size=8, image_size=16, num_workers=0)
    runs = Trainer(max_steps=2, accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    runs.fit(module, data)
    assert not any(part.training for part in network.modules())
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    runs.save_checkpoint(tmp_path / "own.ckpt")
    again = CoCoRDModule.load_from_checkpoint(tmp_path / "own.ckpt")
    assert again.hparams["teacher"]["network"] == {"class_path": CLASSIFIER}
    assert again.hparams["teacher"]["feature_dim"] == 6
    with pytest.raises(UserError, match="OwnClassifier for training, got its name from a checkpoint"):
        Trainer(max_steps=1, accelerator="cpu", logger=False, enable_progress_bar=False).fit(again, data)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--model.teacher.network.classes", "7"],
            r"\[1, 40\] of support\S+ for an input of .* \[1, 7\]: ",
        ),
        (["--model.teacher.network.mean", "null"], "attributes mean and std of .* got mean None and std"),
        (["--model.teacher.network.std", "[1, 0, 1]"], r"std above 0, got mean .* and std \[?\(?1.0, 0.0, 1.0"),
        (
            ["--model.teacher.network.mean", "[0, 0, 0]", "--model.teacher.network.clases", "1"],
            "did you mean .*classes",
        ),
    ],
)
def test_a_network_that_does_not_fit_is_one_sentence(method, words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = own(method, *words)
    assert ran.status != 0
    assert re.search(sentence, ran.sentence)


@pytest.mark.parametrize(
    ("network", "sentence"),
    [
        ("support.methods.own_teacher.OwnClasifier", "did you mean 'OwnClassifier'?"),
        ("gone.OwnClassifier", "the module 'gone' cannot be imported."),
        ("collections.OrderedDict", "it is not a Module."),
        ("support.methods.own_teacher.Scaled", "return the output of an nn.Linear."),
        ("support.methods.own_teacher.Deep", "got shape [1, 40, 1]"),
        ("support.methods.own_teacher.Twice", "got shape [2, 40]"),
        (PAIR, "got an error (NotImplementedError: "),
    ],
)
def test_a_class_that_cannot_be_a_teacher_is_named(network, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sentence in own("CoCoRDModule", network=network).sentence


def test_a_config_names_the_network_and_the_config_of_the_run_resumes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    teacher = {"name": None, "weights": None, "network": {"class_path": CLASSIFIER, "init_args": {"image_size": 24}}}
    Path("own.yaml").write_text(yaml.safe_dump({"model": {"init_args": {"teacher": teacher}}}))
    ran = run("fit", *COCORD, *SHORT, "--config", "own.yaml")
    assert ran.status == 0, ran.err
    (checkpoint,) = Path().rglob("last.ckpt")
    config = checkpoint.parents[1] / "config.yaml"
    ran = run("fit", "--config", str(config), "--ckpt_path", str(checkpoint), "--trainer.max_epochs", "2")
    assert ran.status == 0, ran.err
    newest = max(Path().rglob("last.ckpt"), key=lambda file: file.stat().st_mtime_ns)
    assert torch.load(newest, weights_only=True)["global_step"] == 4


def test_shres_target_may_be_the_networks_embeddings(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    words = [
        "--model.num_classes",
        "24",
        "--model.teacher.target",
        "embedding",
        "--model.teacher.network.classes",
        "24",
    ]
    ran = own("SHReModule", *words)
    assert ran.status == 0, ran.err
    assert f"The teacher is {CLASSIFIER} of 'model.teacher.network'." in caplog.text


@pytest.mark.parametrize("loss", ["attention_weight", "hint_weight"])
def test_losses_of_stages_need_a_named_teacher(loss, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "stages of student and teacher" in own("CoCoRDModule", f"--model.kd.{loss}", "1").sentence


def test_two_teachers_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "leave one out" in own("CoCoRDModule", "--model.teacher.name", "resnet8").sentence


def reinforced(folder, *teachers):
    """Run `predict` over two pairs with teachers, and return the result."""
    for row in range(2):
        draw_image(row).save(f"{row}.png")
    rows = [{"image": f"{row}.png", "caption": f"a picture of {row}", "made": "a drawing"} for row in range(2)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"pairs": "pairs.jsonl", "folder": folder, "synthetic_column": "made", "augmentations": 2, "batch_size": 2}
    config = {
        "model": {"class_path": "ReinforcementModule", "init_args": {"teachers": list(teachers)}},
        "data": {"class_path": "ReinforcementDataModule", "init_args": data | {"num_workers": 0, "image_root": "."}},
        "trainer": {"accelerator": "cpu", "logger": False},
    }
    Path("reinforce.yaml").write_text(yaml.safe_dump(config))
    return run("predict", "--config", "reinforce.yaml")


def test_pairs_are_reinforced_by_a_network_of_the_user(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = reinforced("made", {"network": {"class_path": PAIR, "init_args": {"width": 7}}, "scale": 50.0})
    assert ran.status == 0, ran.err
    (teacher,) = json.loads(Path("made/manifest.json").read_text())["teachers"]
    assert (teacher["model"], teacher["width"], teacher["scale"]) == (PAIR, 7, 50.0)
    assert (teacher["image_size"], teacher["mean"], teacher["std"]) == (24, [0.4, 0.5, 0.6], [0.2, 0.3, 0.4])

    ensemble, network = TeacherEnsemble([Teacher(network=OwnPair(), scale=50.0)], 2), OwnPair()
    ensemble.load()
    pixels = torch.randint(0, 256, (2, 3, 24, 24, 3), dtype=torch.uint8)
    image = (pixels.flatten(0, 1).permute(0, 3, 1, 2) / 255 - torch.tensor(network.mean)[:, None, None]) / torch.tensor(
        network.std
    )[:, None, None]
    expected = F.normalize(network.encode_image(image), dim=-1).unflatten(0, (2, 3))
    torch.testing.assert_close(ensemble.embed_images([pixels]), expected.detach())
    texts = ["a picture", "two"]
    expected = F.normalize(network.encode_text(open_clip.SimpleTokenizer()(texts)), dim=-1)
    torch.testing.assert_close(ensemble.embed_texts(texts, torch.device("cpu")), expected.detach())


def test_a_network_has_its_own_scale_and_tokenizer():
    network, modes = OwnPair(scale=30.0), []
    network.tokenizer = lambda texts: modes.append(network.training) or torch.tensor([[len(text), 3] for text in texts])
    ensemble = TeacherEnsemble([Teacher(network=network)], 2)
    ensemble.load()
    assert ensemble.scales == pytest.approx([30.0])
    expected = F.normalize(network.encode_text(torch.tensor([[4, 3], [2, 3], [6, 3]])), dim=-1)
    found = ensemble.embed_texts(["four", "ab", "sixsix"], torch.device("cpu"))
    torch.testing.assert_close(found, expected.detach())
    assert modes
    assert not any(modes)  # also when it is checked: statistics of BatchNorm would change


@pytest.mark.parametrize(
    ("teacher", "sentence"),
    [
        ({"network": {"class_path": PAIR}}, "got none of the name logit_scale (or a scale beside the network)"),
        ({"network": {"class_path": PAIR, "init_args": {"text_width": 5}}, "scale": 1.0}, "[1, 7] of support"),
        ({"network": {"class_path": CLASSIFIER}, "scale": 1.0}, "got none of the name encode_image, encode_text"),
        (
            {"network": {"class_path": PAIR, "init_args": {"image_size": None}}, "scale": 1.0},
            "the name image_size: add",
        ),
        (
            {"network": {"class_path": PAIR}, "weights": "openai"},
            f"got both ('openai' and {PAIR})",
        ),
        ({"model": "ViT-B-32"}, "weights or a network of each teacher in model.teachers, got neither: give one."),
    ],
)
def test_teachers_of_pairs_that_do_not_fit_are_one_sentence(teacher, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sentence in reinforced("made", teacher).sentence


@pytest.mark.slow
def test_mobileclip_runs_a_network_of_the_user_in_its_step(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    teachers = [{"network": {"class_path": PAIR}, "scale": 20.0}]
    words = ["--model", "MobileCLIPModule", "--model.model", "MobileCLIP-tiny", "--data", "ShapesDataModule"]
    words += [
        "--data.image_size",
        "64",
        "--data.length",
        "64",
        "--data.tokenizer",
        "clip",
        "--data.vocab_size",
        "49408",
    ]
    ran = run("fit", *words, *SHORT, "--model.teacher.models", json.dumps(teachers))
    assert ran.status == 0, ran.err
    assert f"The teacher is {PAIR} of" in caplog.text
    (checkpoint,) = Path().rglob("last.ckpt")
    content = torch.load(checkpoint, weights_only=True)
    content["hyper_parameters"]["teacher"]["models"][0]["network"]["class_path"] = "gone.OwnPair"
    torch.save(content, "gone.ckpt")
    ran = run("fit", "--ckpt_path", "gone.ckpt")
    assert "could run any code: if you trust it, give the config.yaml of the run with --config." in ran.sentence
    (teacher,) = lightning_modules.MobileCLIPModule.load_from_checkpoint("gone.ckpt").hparams["teacher"]["models"]
    assert teacher["network"] == {"class_path": "gone.OwnPair"}
    ran = run("plan", "--ckpt_path", "gone.ckpt", "--trainer.precision", "32-true")
    assert ran.status == 0, ran.err
    ran = run("validate", "--ckpt_path", "gone.ckpt", "--trainer.limit_val_batches", "1")
    assert ran.status == 0, ran.err


def test_a_report_on_data_builds_no_teacher(tmp_path, monkeypatch, recwarn):
    """A teacher that loads its weights warns for each tensor on the meta device."""
    monkeypatch.chdir(tmp_path)
    words = [
        "--model.teacher.network",
        "support.methods.own_teacher.Loading",
        "--data.num_workers",
        "0",
        "--limit",
        "4",
    ]
    ran = run("data", *METHODS["SHReModule"], *words, "--data.eval_length", "8")
    assert ran.status == 0, ran.err
    planned = run("plan", *METHODS["SHReModule"], *words[:2])
    assert planned.status == 0, planned.err
    assert not [warning for warning in recwarn if "non-meta" in str(warning.message)]
