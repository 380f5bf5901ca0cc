"""What was typed wrongly ends in one sentence with the nearest valid name."""

import re
from pathlib import Path

import pytest

from support.runs.command_line import run, tiny_config


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    tiny_config(tmp_path)


# What is typed after `fit --config tiny.yaml`, and what the sentence must hold.
OPTIONS = {
    "trainer key": ("--trainer.max_epoch 3", ["'--trainer.max_epoch'", "'--trainer.max_epochs'"]),
    "module argument": ("--model.init_args.dmi 3", ["TinyModel", "'--model.init_args.dim'"]),
    "module argument, short form": ("--model.dmi 3", ["TinyModel", "'--model.dim'"]),
    "data argument": ("--data.batchsize=3", ["TinyData", "'--data.batch_size'"]),
    "checkpoint key": ("--checkpoint.monitr x", ["'--checkpoint.monitor'"]),
    "top-level key": ("--seed_everythin 3", ["'--seed_everything'"]),
    "module class": ("--model TinyModell", ["'TinyModell'", "'TinyModel'"]),
    "module class by path": ("--model support.methods.tiny.TinyModell", ["'TinyModel'"]),
    "data class": ("--data.class_path TnyData", ["'TinyData'"]),
    "module class of a missing module": ("--model nowhere.TinyModel", ["'nowhere'", "cannot be imported"]),
    "callback class": ("--trainer.callbacks+=UserCalback", ["'UserCallback'"]),
    "callback argument": ("--trainer.callbacks+=UserCallback --trainer.callbacks.evry=3", ["UserCallback", "every'"]),
    "callback value": ("--trainer.callbacks+=UserCallback --trainer.callbacks.every=x", ["'x'", "a whole number"]),
    "logger class": ("--trainer.logger TensorBordLogger", ["'TensorBoardLogger'"]),
    "strategy": ("--trainer.strategy ddpp", ["'ddpp'", "'ddp'"]),
    "number": ("--data.batch_size many", ["data.init_args.batch_size", "'many'", "a whole number"]),
    "trainer number": ("--trainer.max_epochs many", ["trainer.max_epochs", "'many'", "a whole number or null"]),
    "choice": ("--model.kind fanc", ["plain, fancy", "'fancy'"]),
    "text for dataclasses": (
        "--model ReinforcementModule --model.teachers ViT-B-32",
        ["model.init_args.teachers of ReinforcementModule, got 'ViT-B-32'", "a list of Teacher"],
    ),
    "stray word": ("stray", ["'stray'", "two dashes"]),
    "config file": ("--config tinny.yaml", ["'tinny.yaml'", "'tiny.yaml'"]),
    "checkpoint file": ("--ckpt_path nothing/last.ckpt", ["'nothing/last.ckpt'", "does not exist"]),
    "FSDP1": ("--trainer.strategy fsdp", ["configs/strategy/fsdp.yaml", "FSDP2"]),
    "FSDP1 by class": ("--trainer.strategy FSDPStrategy", ["configs/strategy/fsdp.yaml", "FSDP2"]),
    "link": ("--model.vocab_size 99", ["99", "data.init_args.vocab_size=10"]),
}


@pytest.mark.parametrize(("typed", "expected"), OPTIONS.values(), ids=OPTIONS)
def test_a_wrong_option_ends_in_one_sentence(typed: str, expected: list[str]):
    ran = run("fit", "--config", "tiny.yaml", *typed.split())
    assert ran.status == 2
    for part in expected:
        assert part in ran.sentence
    assert not Path("runs").exists()


FILES = {
    "section": ("modle: {class_path: TinyModel}", ["'modle'", "'model'"]),
    "trainer key": ("trainer: {max_epoch: 3}", ["'trainer.max_epoch'", "'max_epochs'"]),
    "module argument": ("model: {class_path: TinyModel, init_args: {dmi: 3}}", ["TinyModel", "'dim'"]),
    "module argument outside init_args": (
        "model: {class_path: TinyModel, dim: 3}",
        ["'dim' of TinyModel in second.yaml under model.init_args"],
    ),
    "arguments without a class": ("data: {class_path: Nothing}", ["class for 'data' in second.yaml, got 'Nothing'"]),
    "class": ("model: {class_path: TinyModell}", ["'TinyModell'", "'TinyModel'"]),
    "callback in a list": ("trainer: {callbacks: [{class_path: UserCalback}]}", ["'UserCallback'"]),
    "second callback in a list": (
        "trainer: {callbacks: [{class_path: UserCallback}, {class_path: UserCallback, init_args: {evry: 3}}]}",
        ["'every'"],
    ),
    "number": ("data: {class_path: TinyData, init_args: {batch_size: many}}", ["'many'", "a whole number"]),
    "not a section": ("trainer: 3", ["'trainer'", "3"]),
}


@pytest.mark.parametrize(("text", "expected"), FILES.values(), ids=FILES)
def test_a_wrong_key_in_a_file_is_named_with_the_file(tmp_path: Path, text: str, expected: list[str]):
    tiny_config(tmp_path, "second.yaml", text)
    ran = run("fit", "--config", "tiny.yaml", "--config", "second.yaml")
    assert ran.status == 2
    for part in [*expected, "second.yaml"]:
        assert part in ran.sentence


def test_a_yaml_syntax_error_names_the_line(tmp_path: Path):
    tiny_config(tmp_path, "broken.yaml", "model:\n  class_path: TinyModel\n   init_args: {}\n")
    ran = run("fit", "--config", "broken.yaml")
    assert ran.status == 2
    assert "broken.yaml, line 3" in ran.sentence


def test_a_file_that_is_a_list_is_refused(tmp_path: Path):
    tiny_config(tmp_path, "list.yaml", "- model\n- data\n")
    assert "got a list" in run("fit", "--config", "list.yaml").sentence


def test_a_missing_required_argument_is_named(tmp_path: Path):
    tiny_config(tmp_path, "needy.yaml", "model: {class_path: NeedyModel}\ndata: {class_path: TinyData}\n")
    ran = run("fit", "--config", "needy.yaml")
    assert ran.status == 2
    assert "the argument model.init_args.width of NeedyModel" in ran.sentence


def test_a_missing_model_and_missing_data_name_the_known_classes():
    assert "Expected a class for model, got none" in run("fit", "--data", "TinyData").sentence
    assert "ALBEFModule" in run("fit", "--data", "TinyData").sentence
    assert "Expected a class for data, got none" in run("fit", "--model", "TinyModel").sentence


@pytest.mark.parametrize("words", [["fti"], ["--trainer.max_epochs", "3"]])
def test_a_missing_or_misspelt_subcommand_names_the_four(words: list[str]):
    ran = run(*words)
    assert ran.status == 2
    assert "fit" in ran.sentence


def test_abbreviated_options_are_not_accepted():
    assert "'--trainer.max_epochs'" in run("fit", "--config", "tiny.yaml", "--trainer.max_epo=3").sentence
    for option in ("--model.text.fusion_depth", "--model.contrast.queue_size"):  # fields of a class's groups
        said = run("fit", "--config", "configs/albef/quickstart.yaml", f"{option[:-1]}=2").sentence
        assert f"did you mean '{option}'?" in said


def test_two_configs_of_different_methods_are_one_sentence():
    """Both classes have the group `optim`, with other fields."""
    ran = run("fit", "--config=configs/cocord/quickstart.yaml", "--config=configs/albef/quickstart.yaml")
    assert ran.status == 2
    assert re.search(r"got CoCoRDModule from .*cocord/.*\.yaml and ALBEFModule from .*albef/.*\.yaml, ", ran.sentence)
    assert "groups 'optim' have different fields" in ran.sentence


TWO_KINDS = {
    "two files": (
        "--config shape.yaml --config pair.yaml",
        ["'image_tower' from shape.yaml", "'text' from pair.yaml", "exclude each other"],
    ),
    "one option": ("--model.model={'name':'a','image_tower':'b'}", ["'name'", "'image_tower'", "exclude each other"]),
    "typo in a field": ("--model.model={'image_towr':'x'}", ["'image_tower'"]),
    "value of a field": ("--config shape.yaml --model.model.layers=x", ["layers of ModelShape", "a whole number"]),
    # An option replaces the fields of another kind, so that the number of epochs is the first mistake.
    "replaced": (
        "--config shape.yaml --model.model.image.name=resnet18 --trainer.max_epochs=x",
        ["a whole number or null for trainer.max_epochs"],
    ),
}


@pytest.mark.parametrize(("typed", "expected"), TWO_KINDS.values(), ids=TWO_KINDS)
def test_fields_of_two_kinds_of_model_end_in_one_sentence(typed: str, expected: list[str]):
    head = "model: {class_path: CLIPModule, init_args: {model: {"
    Path("shape.yaml").write_text(head + "image_tower: fastvit_mci_tiny, layers: 3}}}")
    Path("pair.yaml").write_text(head + "image: {name: resnet18}, text: {name: bert}}}}")
    ran = run("fit", "--model=CLIPModule", "--data=ImageTextDataModule", "--data.train=pairs.csv", *typed.split())
    assert ran.status == 2
    for part in expected:
        assert part in ran.sentence
