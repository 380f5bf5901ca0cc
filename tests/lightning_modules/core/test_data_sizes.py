"""Data of unsupported sizes is refused before the first step, for every method."""

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from support.methods.albef import tiny_albef
from support.methods.captioning import caption_data, caption_module, write_data
from support.methods.cocord import HEADS
from support.methods.methods import METHODS, OTHERS
from support.methods.random_batches import Rows, random_rows, small
from vlightning.common.errors import UserError
from vlightning.datamodules import ShapeClassesDataModule, ShapesDataModule
from vlightning.lightning_modules import CoCoRDLinearProbeModule, CoCoRDModule

OF_ONE_SIZE = [name for name in (*METHODS, *OTHERS) if name not in ("cocord", "captioning")]
WITH_TEXTS = [name for name in METHODS if name != "cocord"]


def refused(module, data, folder, match):
    """Check that the run ends with the message and no weight has changed."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = pl.Trainer(
        max_steps=1,
        accelerator="cpu",
        default_root_dir=folder,
        enable_checkpointing=False,
        **quiet,
    )
    with pytest.raises(UserError, match=match):
        trainer.fit(module, data)
    # A trained tokenizer may have left fewer rows of words.
    for name, value in module.state_dict().items():
        assert torch.equal(before[name][: len(value)] if value.ndim else before[name], value)


@pytest.mark.parametrize("name", OF_ONE_SIZE)
def test_images_of_another_size_are_refused(name, tmp_path):
    method = (METHODS | OTHERS)[name]
    outside, options = method.prepare(tmp_path), {"seed": 0, "batch_size": 4, "num_workers": 0}
    module, data = method.build(outside, **options)
    module.load_initial_weights()
    side = data.image_size
    data = type(data)(**data.hparams | {"image_size": 2 * side})
    found = rf"images of {side} x {side} pixels, got {2 * side} x {2 * side} in the data: set the data's"
    refused(module, data, tmp_path, found)


@pytest.mark.parametrize("student", ["timm/vit_tiny_patch16_224", "resnet8"])
def test_image_size_of_a_library_transformer_is_checked_for_student_and_teacher(student, tmp_path):
    data = ShapeClassesDataModule(length=8, batch_size=4, num_workers=0, image_size=32)
    module = CoCoRDModule(student, data.num_classes, teacher={"name": "timm/vit_tiny_patch16_224"}, **HEADS)
    module.setup = lambda stage: None  # the teacher's weights do not matter
    refused(module, data, tmp_path, r"images of 224 x 224 pixels, got 32 x 32 in the data")


def test_image_size_of_a_probed_transformer_is_checked(tmp_path):
    data = ShapeClassesDataModule(length=8, batch_size=4, num_workers=0, image_size=32)
    module = CoCoRDLinearProbeModule("timm/vit_tiny_patch16_224", num_classes=data.num_classes)
    module.setup = lambda stage: None
    refused(module, data, tmp_path, r"images of 224 x 224 pixels, got 32 x 32 in the data")


@pytest.mark.parametrize("name", WITH_TEXTS)
def test_token_ids_of_a_plain_loader_are_checked(name, tmp_path):
    rows = random_rows(name, 4)
    rows["input_ids"][2, 1] = 10**6
    module = small(name, tmp_path)
    vocabulary = module.data_sizes().vocab_size
    refused(
        module,
        DataLoader(Rows(rows), 4),
        tmp_path,
        rf"ids below {vocabulary}, the model's vocabulary, got ids up to 1000000",
    )


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path):
    """Large ids may occur after the first batch, so the tokenizer is compared."""
    data = ShapesDataModule(length=8, batch_size=4, num_workers=0, image_size=16, vocab_size=200)
    data.setup("fit")
    entries = len(data.tokenizer)
    module = tiny_albef(text={"vocab_size": entries - 1})
    refused(module, data, tmp_path, rf"ids up to {entries - 1} .* set the model's vocab_size to {entries}, or give")


def test_captions_tokenized_for_another_language_model_are_refused(tmp_path):
    arguments = write_data(tmp_path / "captions", steps=8)
    data = caption_data(arguments, train=arguments["train"])
    module = caption_module(arguments, 0)
    module.load()
    module.language_model.network.resize_token_embeddings(20)
    refused(module, data, tmp_path, "below 20, the model's vocabulary, got .*: give the data")


def test_texts_longer_than_the_positions_are_refused(tmp_path):
    data = ShapesDataModule(length=8, batch_size=4, num_workers=0, image_size=16, vocab_size=200, max_tokens=25)
    refused(
        tiny_albef(text={"vocab_size": 200, "max_positions": 4}),
        data,
        tmp_path,
        r"at most 4 tokens, the model's positions, got \d+ in the data",
    )
