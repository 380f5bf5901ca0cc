"""The contract between module and datamodule, and the constructor arguments that checkpoints record."""

import ast

import pytest

import vlightning.datamodules
from support.project.sources import TREES
from vlightning.common.errors import UserError
from vlightning.common.private_api import constructor_parameters
from vlightning.datamodules import (
    EmbeddedCaptionsDataModule,
    ShapeClassesDataModule,
    ShapesDataModule,
)
from vlightning.datamodules.base import contract
from vlightning.datamodules.base.contract import (
    AdoptsVocabulary,
    EmbedsAugmentations,
    NamesViews,
    asked,
)
from vlightning.datamodules.base.hyperparameters import constructor_arguments
from vlightning.datamodules.base.sampled import SampledDataModule

LOADER = {"batch_size", "num_workers", "pin_memory", "seed", "max_bad_share"}
CLASSES = [name for name in vlightning.datamodules.__all__ if name.endswith("DataModule")]


def attached(data, module):
    data.trainer = type("Trainer", (), {"lightning_module": module})()
    return data


def test_a_member_that_is_missing_is_not_asked_for():
    assert asked(object(), NamesViews) is None
    module = type("Module", (), {"views": ["image"]})()
    assert asked(module, NamesViews) is module


def test_setup_refuses_a_module_that_breaks_the_contract():
    module = type("Module", (), {"adopt_vocabulary": 3})()
    with pytest.raises(UserError, match=r"Module\.adopt_vocabulary to be a method .* got 3"):
        attached(ShapesDataModule(length=8, eval_length=4), module).setup("fit")
    with pytest.raises(UserError, match="adopt_vocabulary"):
        asked(module, AdoptsVocabulary)
    with pytest.raises(UserError, match=r"Module\.caption_transform to be a property .* got 'nothing'"):
        asked(type("Module", (), {"views": [(16, "bicubic")]})(), EmbedsAugmentations)


def test_views_of_the_module_have_different_names():
    module = type("Module", (), {"views": ["image", "image"]})()
    with pytest.raises(UserError, match="different names of views"):
        _ = attached(ShapeClassesDataModule(), module).views


def test_training_images_tell_their_normalization():
    mean, std = ShapeClassesDataModule().normalization
    assert (list(mean), list(std)) == ([0.5071, 0.4867, 0.4408], [0.2675, 0.2565, 0.2761])


@pytest.mark.parametrize("name", CLASSES)
def test_every_datamodule_takes_the_loader_arguments(name):
    assert constructor_arguments(getattr(vlightning.datamodules, name)).keys() >= LOADER


@pytest.mark.parametrize("name", CLASSES)
def test_a_datamodule_is_at_most_three_classes_deep(name):
    def depth(cls):
        return 1 + max((depth(base) for base in cls.__bases__ if issubclass(base, SampledDataModule)), default=0)

    assert depth(getattr(vlightning.datamodules, name)) <= 3


@pytest.mark.parametrize("name", CLASSES)
def test_every_option_has_a_description_of_its_own(name):
    options = constructor_parameters(getattr(vlightning.datamodules, name))
    assert [
        option.name for option in options if not option.doc or option.doc.startswith(("see ", "options: see"))
    ] == []


@pytest.mark.parametrize("name", CLASSES)
def test_the_arguments_are_those_of_the_command_line(name):
    cls = getattr(vlightning.datamodules, name)
    options = {parameter.name for parameter in constructor_parameters(cls)}
    assert constructor_arguments(cls).keys() == options


def test_arguments_of_the_bases_are_recorded_with_their_defaults():
    recorded = dict(ShapesDataModule(batch_size=3, max_bad_share=0.5).hparams)
    assert recorded.keys() == constructor_arguments(ShapesDataModule).keys()
    assert (recorded["batch_size"], recorded["max_bad_share"], recorded["num_workers"]) == (3, 0.5, 0)
    assert ShapesDataModule(**recorded).hparams == recorded


def test_arguments_that_a_class_decides_itself_are_not_recorded():
    recorded = dict(EmbeddedCaptionsDataModule("embeddings").hparams)
    assert recorded.keys() == constructor_arguments(EmbeddedCaptionsDataModule).keys()
    assert "train_transform" not in recorded


def test_a_wrong_argument_is_refused_in_python():
    with pytest.raises(TypeError, match="bacth_size"):
        ShapesDataModule(bacth_size=3)


def members_read_of_data(tree):
    """Names that a file reads of `datamodule`, `self.datamodule` or `data` by `getattr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 1:
            owner = ast.unparse(node.args[0])
            if isinstance(node.args[1], ast.Constant) and (
                owner.endswith("datamodule") or owner in ("data", "self.data")
            ):
                yield node.args[1].value


def test_modules_read_only_members_of_the_contract():
    protocols = [each for each in vars(contract).values() if getattr(each, "_is_protocol", False)]
    members = {name for protocol in protocols for name in vars(protocol)} | {"hparams"}  # Lightning's
    read = {
        name
        for file, tree in TREES.items()
        if file.startswith(("lightning_modules/", "callbacks/"))
        for name in members_read_of_data(tree)
    }
    assert read >= {"preprocessing", "tokenizer", "teachers"}
    assert read <= members
