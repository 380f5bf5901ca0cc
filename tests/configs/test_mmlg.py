"""MM-LG's configs: the settings of the paper, and the quickstart."""

import re
from pathlib import Path

import pytest
import yaml
from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from support.runs.command_line import run
from support.runs.recipes import ROOT, compose, says
from vlightning.callbacks.learngene.file import load_learngene
from vlightning.lightning_modules.core.settings import flat


def test_extraction_and_activation_have_the_papers_settings():
    configs = [ROOT / f"configs/mmlg/{name}.yaml" for name in ("extract", "activate")]
    extract, activate = compose(configs[0]), compose(*configs)
    model, data, trainer = extract["model"]["init_args"], extract["data"]["init_args"], extract["trainer"]
    assert model["student"] == "MM-LG"
    assert (model["towers"]["depth"], model["towers"]["width"]) == (12, 384)
    teacher = {"model": "ViT-B-16", "weights": "openai", "distillation_weight": 1.0, "mask_same_text": True}
    assert model["teacher"] == teacher
    expected = {"learning_rate": 1e-3, "warmup_steps": 10_000, "weight_decay": 0.1}
    assert {name: model["optim"][name] for name in expected} == expected
    assert (data["global_batch_size"], trainer["max_epochs"]) == (512, 32)
    crop = {"scale": [0.9, 1.0], "rand_augment": False, "horizontal_flip": 0.0}
    assert {name: data["train_transform"]["init_args"][name] for name in crop} == crop
    assert [callback["class_path"].split(".")[-1] for callback in trainer["callbacks"]][:1] == ["LearngeneWriter"]

    (expansion,) = activate["trainer"]["callbacks"]
    assert expansion["class_path"].endswith("LearngeneExpansionCallback")
    place = trainer["logger"]["init_args"] if isinstance(trainer["logger"], dict) else trainer["logger"][0]["init_args"]
    assert expansion["init_args"]["file"] == f"{place['save_dir']}/{place['name']}"
    assert (activate["model"]["init_args"]["student"], activate["trainer"]["max_epochs"]) == ("plain", 1)
    assert activate["model"]["init_args"]["teacher"]["distillation_weight"] == 1.0
    assert activate["data"]["init_args"]["samples_per_epoch"] * 10 == data["samples_per_epoch"]


def test_ten_thirty_and_fifty_percent_of_activation_are_documented_as_options():
    header = (ROOT / "configs/mmlg/activate.yaml").read_text().partition("\nneeds:")[0]
    page = (ROOT / "docs/methods/mmlg.md").read_text()
    configs = [ROOT / f"configs/mmlg/{name}.yaml" for name in ("extract", "activate")]
    extract, activate = (compose(*configs[:count]) for count in (1, 2))
    pairs, batch = (extract["data"]["init_args"][name] for name in ("samples_per_epoch", "global_batch_size"))
    model, data = activate["model"]["init_args"], activate["data"]["init_args"]
    found = {10: (data["samples_per_epoch"], model["optim"]["warmup_steps"])}
    thirty = re.search(r"for 30%, --data.samples_per_epoch (\d+) --model.optim.warmup_steps (\d+)", header)
    fifty = re.search(r"for 50%, (\d+) and (\d+)", header)
    found |= {30: tuple(map(int, thirty.groups())), 50: tuple(map(int, fifty.groups()))}
    for percent, (samples, warmup) in found.items():
        assert samples == pairs * percent // 100
        assert warmup == pytest.approx(samples / batch / 10, rel=0.01)
        assert f"| {percent}% | {samples} | {warmup} |" in page


def test_an_extraction_is_checked_as_in_the_paper():
    configs = [ROOT / f"configs/mmlg/{name}.yaml" for name in ("extract", "extract_check")]
    extract, check = (compose(*configs[:count]) for count in (1, 2))
    assert check["model"] == extract["model"]
    (callback,) = check["trainer"]["callbacks"]
    assert callback["class_path"].endswith("ZeroShotClassification")
    assert says(callback["init_args"], {"class_names": "imagenet", "templates": "openai", "name": "zero_shot"})
    images = callback["init_args"]["data"]["init_args"]
    assert says(images["validation"], {"path": "ILSVRC/imagenet-1k", "split": "validation"})
    assert "cc3m" in check["data"]["init_args"]["validation"]
    assert "cc3m_val" not in str(check["data"]["init_args"]["train"])


def test_pt_ft_is_the_extraction_with_a_plain_student_with_and_without_distillation():
    base, part = (ROOT / f"configs/mmlg/{name}.yaml" for name in ("extract", "pt_ft"))
    extract, distilled = compose(base), compose(base, part)
    differing = {name for name, value in flat(distilled["model"]).items() if value != flat(extract["model"])[name]}
    assert differing == {"init_args.student"}
    assert distilled["model"]["init_args"]["student"] == "plain"
    assert (distilled["data"], distilled["trainer"]["max_epochs"]) == (extract["data"], 32)
    assert distilled["model"]["init_args"]["teacher"]["distillation_weight"] == 1.0
    assert distilled["trainer"]["callbacks"][0]["class_path"].endswith("LearngeneWriter")  # He-LG's
    options = re.search(r"PT-FT without distillation: add\n#   (.*)", part.read_text())[1].split()
    ran = run("fit", "--config", str(base), "--config", str(part), *options, "--print_config")
    plain = yaml.safe_load(ran.out)
    assert plain["model"]["init_args"]["teacher"]["distillation_weight"] == 0.0
    assert plain["trainer"]["logger"]["init_args"]["name"] == "mmlg_pt_ft_without_distillation"


@pytest.mark.parametrize("names", [["flickr30k"], ["flickr30k", "coco"]])
def test_retrieval_of_a_descendant_has_the_papers_recipe(names):
    composed = compose(*[ROOT / f"configs/mmlg/retrieval_{name}.yaml" for name in names])
    model, data, trainer = composed["model"]["init_args"], composed["data"]["init_args"], composed["trainer"]
    assert (model["student"], model["teacher"]["distillation_weight"]) == ("plain", 0.0)
    assert (model["optim"]["learning_rate"], model["optim"]["weight_decay"]) == (5e-5, 0.01)
    assert (data["global_batch_size"], trainer["max_epochs"]) == (256, 50)
    assert (model["optim"]["warmup_steps"], data["samples"]) == (10_000, "captions")
    assert model["evaluation"]["protocols"] == ["karpathy5", "paper"]
    assert composed["checkpoint"]["monitor"] == "val/paper/recall_mean"


def test_captioning_has_the_papers_recipe():
    composed = compose(ROOT / "configs/mmlg/caption_coco.yaml")
    model = composed["model"]["init_args"]
    assert (model["optim"]["learning_rate"], model["optim"]["warmup_steps"]) == (2e-5, 5_000)
    assert (model["mapper"]["prefix_length"], model["mapper"]["clip_length"]) == (10, 10)
    assert model["generation"]["num_beams"] == 5
    assert (composed["data"]["init_args"]["global_batch_size"], composed["trainer"]["max_epochs"]) == (256, 10)


@pytest.mark.slow
def test_the_mmlg_quickstart_writes_a_learngene_and_trains_a_descendant(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    configs = [("--config", str(ROOT / f"configs/mmlg/quickstart{name}.yaml")) for name in ("", "_descendant")]
    small = ("--data.eval_length", "8", "--data.batch_size", "16", "--data.length", "32")
    ran = run("fit", *configs[0], *configs[1], *small)
    assert ran.status != 0
    assert "found none at 'runs/mmlg_quickstart'" in ran.err
    ran = run("fit", *configs[0], *small, "--trainer.max_epochs", "1")
    assert ran.status == 0, ran.err
    learngene = load_learngene("runs/mmlg_quickstart/version_0/learngene.safetensors")
    assert (learngene.step, learngene.data["class"]) == (2, "ShapesDataModule")
    (events,) = Path("runs/mmlg_quickstart/version_0").glob("events*")
    found = EventAccumulator(str(events)).Reload().Tags()
    assert {"train/coefficients", "train/summand_norms"} <= set(found["images"])
    assert {"val/karpathy5/recall_mean", "val/paper/recall_mean"} <= set(found["scalars"])
    Path("runs/mmlg_quickstart/version_1").mkdir()  # of an extraction that was stopped and resumed
    Path("runs/mmlg_quickstart/version_0/learngene.safetensors").rename(
        "runs/mmlg_quickstart/version_1/learngene.safetensors"
    )
    ran = run("fit", *configs[0], *configs[1], *small)
    assert ran.status == 0, ran.err
    assert "6 vision layers and 6 text layers start from the learngene of MM-LG." in caplog.text


def test_classification_with_a_descendant_has_the_papers_recipe():
    composed = compose(ROOT / "configs/mmlg/classify_cifar100.yaml")
    model, data, trainer = composed["model"]["init_args"], composed["data"]["init_args"], composed["trainer"]
    assert (data["global_batch_size"], trainer["max_epochs"]) == (256, 500)
    expected = {"learning_rate": 1e-4, "weight_decay": 0.01, "warmup_steps": 5000}
    assert {name: model["optim"][name] for name in expected} == expected
    assert (model["vision"]["width"], model["vision"]["patch_size"]) == (384, 16)
    sizes = {model["vision"]["image_size"], data["image_size"]}
    for transform in (data["train_transform"]["init_args"], data["eval_transform"]["init_args"]):
        assert (transform["mean"], transform["std"]) == (list(OPENAI_DATASET_MEAN), list(OPENAI_DATASET_STD))
        sizes.add(transform["size"])
    assert sizes == {224}
    assert composed["checkpoint"]["monitor"] == "val/top1"


@pytest.mark.parametrize(
    ("name", "classes", "folder"), [("pets", 37, "data/oxford-iiit-pet"), ("food101", 101, "data/food-101")]
)
def test_the_papers_other_classifications_differ_in_their_data_alone(name, classes, folder):
    base = ROOT / "configs/mmlg/classify_cifar100.yaml"
    cifar, other = compose(base), compose(base, ROOT / f"configs/mmlg/classify_{name}.yaml")
    own = {"train", "validation", "test", "num_classes"}
    data = other["data"]["init_args"]
    assert (data["train"], data["test"], data["num_classes"]) == (folder, folder, classes)
    assert says(data["validation"], {"path": folder, "split": "test"})
    assert {key for key, value in data.items() if value != cifar["data"]["init_args"][key]} == own
    assert {key for key, value in flat(other["model"]).items() if value != flat(cifar["model"])[key]} <= {
        "init_args.num_classes"
    }
    assert (other["trainer"]["max_epochs"], other["checkpoint"]) == (500, cifar["checkpoint"])


@pytest.mark.parametrize(
    ("name", "file", "components"),
    [
        ("activate_tleg", "extract_tleg", "both"),
        ("activate_he_lg", "pt_ft", "both"),
        ("activate_without_mm", "extract", "unimodal"),
        ("activate_only_mm", "extract", "multimodal"),
    ],
)
def test_baselines_and_ablations_are_activated_like_a_descendant_from_the_run_that_is_named(name, file, components):
    base, activate, extract, own = (ROOT / f"configs/mmlg/{each}.yaml" for each in ("extract", "activate", file, name))
    activated, other = compose(base, activate), compose(base, activate, own)
    source = compose(base) if file == "extract" else compose(base, extract)
    assert (other["model"], other["data"]) == (activated["model"], activated["data"])
    (expansion,) = other["trainer"]["callbacks"]
    assert expansion["init_args"]["components"] == components
    assert expansion["init_args"]["file"] == f"runs/{source['trainer']['logger']['init_args']['name']}"
    assert other["trainer"]["logger"]["init_args"]["name"] == f"mmlg_{name}"
    assert any(each["class_path"].endswith("LearngeneWriter") for each in source["trainer"]["callbacks"])


def test_tleg_and_scratch_differ_in_one_setting_from_what_they_are_added_to():
    for base, part, setting in (
        ("extract", "extract_tleg", ("init_args.student", "TLEG")),
        ("retrieval_flickr30k", "retrieval_scratch", ("init_args.weights", None)),
    ):
        files = [ROOT / f"configs/mmlg/{name}.yaml" for name in (base, part)]
        before, after = flat(compose(files[0])["model"]), flat(compose(*files)["model"])
        assert [(name, value) for name, value in after.items() if value != before[name]] == [setting]
