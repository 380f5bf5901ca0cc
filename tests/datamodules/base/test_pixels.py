"""Images travel to the device as uint8, and are there the floats of the transform, bit for bit."""

import pickle
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from support.methods.tiny_modules import trainer
from vlightning.datamodules import (
    ALBEFTrainTransform,
    ProbeTrainTransform,
    ReinforcedShapesDataModule,
    ShapeClassesDataModule,
    ShapesDataModule,
    ShapesNLVR2DataModule,
    ShapesVQADataModule,
)
from vlightning.datamodules.transforms.normalize import (
    CLIP_MEAN,
    CLIP_STD,
    ToNormalized,
    normalized,
)


class InFloats(nn.Module):
    """A transform of a user, which no datamodule divides."""

    def __init__(self, transform):
        super().__init__()
        self.transform = transform

    def forward(self, *given):
        return self.transform(*given)


class Seen(pl.LightningModule):
    """Keeps the batches before and after their transfer."""

    def __init__(self, views=("image",)):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.views = views
        self.sent, self.arrived = [], []

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.sent.append(batch)
        return batch

    def training_step(self, batch, batch_idx):
        self.arrived.append(batch)
        return self.weight.sum()

    def validation_step(self, batch, batch_idx):
        self.arrived.append(batch)

    predict_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Kept(Callback):
    """Keeps the batches that callbacks see."""

    def __init__(self):
        self.batches = []

    def on_train_batch_end(self, runs, module, outputs, batch, batch_idx):
        self.batches.append(batch)


def passed(data, stage="fit", views=("image",), **options):
    """The module after two batches of each loader of a stage."""
    module, kept = Seen(views), Kept()
    runs = trainer(kept, max_epochs=1, limit_train_batches=2, limit_val_batches=2, limit_predict_batches=2, **options)
    getattr(runs, stage)(module, datamodule=data)
    assert all(batch[name].is_floating_point() for batch in kept.batches for name in views)
    assert len(module.sent) == len(module.arrived) > 1
    return module


def size(batch, names):
    return sum(batch[name].nbytes for name in names)


VIEWS = ("image", "image_slow", "image_teacher")
CASES = {
    "pairs": (lambda folder: ShapesDataModule(length=8, eval_length=4, batch_size=4), ("image",)),
    "pairs from a worker": (lambda folder: ShapesDataModule(length=8, batch_size=4, num_workers=1), ("image",)),
    "views": (lambda folder: ShapeClassesDataModule(length=8, eval_length=4, batch_size=4), VIEWS),
    "two images": (
        lambda folder: ShapesNLVR2DataModule(length=8, eval_length=4, batch_size=4),
        ("image_left", "image_right"),
    ),
    "questions": (
        lambda folder: ShapesVQADataModule(length=8, eval_length=4, batch_size=4, image_size=16, num_workers=0),
        ("image",),
    ),
    "reinforced": (
        lambda folder: ReinforcedShapesDataModule(
            folder=str(folder), length=8, eval_length=4, batch_size=4, image_size=16, num_workers=0
        ),
        ("image",),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_batches_arrive_as_the_floats_of_the_transform_from_a_quarter_of_the_bytes(case, tmp_path):
    make, views = CASES[case]
    found, expected = make(tmp_path), make(tmp_path)
    expected.train_transform = InFloats(expected.train_transform)
    expected.eval_transform = InFloats(expected.eval_transform)
    found, expected = passed(found, views=views), passed(expected, views=views)
    assert len(found.arrived) == len(expected.arrived)
    training = [batch for batch in found.sent if set(views) <= batch.keys()]
    assert training
    for sent, floats in zip(found.sent, expected.sent, strict=True):
        names = [name for name in views if name in sent]
        assert {sent[name].dtype for name in names} == {torch.uint8}
        assert 4 * size(sent, names) == size(floats, names)
    for arrived, floats in zip(found.arrived, expected.arrived, strict=True):
        assert arrived.keys() == floats.keys()
        for name, value in floats.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(arrived[name], value, rtol=0, atol=0, msg=name)
            else:
                assert arrived[name] == value, name


def test_predicted_images_arrive_normalized(tmp_path):
    module = passed(ShapesDataModule(eval_length=4, eval_batch_size=2, tokenizer="clip", vocab_size=49408), "predict")
    assert {batch["image"].dtype for batch in module.sent} == {torch.uint8}
    assert {batch["image"].dtype for batch in module.arrived} == {torch.float32}
    assert min(float(batch["image"].min()) for batch in module.arrived) < 0  # normalized


@pytest.mark.parametrize(("precision", "dtype"), [("64-true", torch.float64), ("bf16-true", torch.bfloat16)])
def test_images_arrive_in_the_precision_of_the_trainer(precision, dtype):
    given = {"length": 8, "eval_length": 4, "batch_size": 4}
    floats = ShapesDataModule(**given)
    floats.train_transform, floats.eval_transform = (
        InFloats(transform) for transform in (floats.train_transform, floats.eval_transform)
    )
    found, expected = (passed(data, precision=precision) for data in (ShapesDataModule(**given), floats))
    for arrived, other in zip(found.arrived, expected.arrived, strict=True):
        assert arrived["image"].dtype == other["image"].dtype == dtype
        assert torch.equal(arrived["image"], other["image"])


def test_transforms_that_do_more_after_the_normalization_send_floats():
    class Doubles(ALBEFTrainTransform):
        def forward(self, image):
            return 2 * super().forward(image)

    for transform in (ProbeTrainTransform(16), Doubles(16)):
        module = passed(ShapesDataModule(length=8, eval_length=4, batch_size=4, train_transform=transform))
        sent = {batch["image"].dtype for batch in module.sent if "text_id" not in batch}
        assert sent == {torch.float32}, type(transform)


def test_loaders_without_a_running_trainer_yield_floats():
    data = ShapesDataModule(length=8, eval_length=4, batch_size=4)
    passed(data)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        assert next(iter(loader))["image"].dtype == torch.float32


def test_other_bytes_of_a_batch_are_left_alone():
    batch = {"image": torch.zeros(2, 3, 4, 4, dtype=torch.uint8), "flag": torch.ones(2, dtype=torch.uint8), "name": "a"}
    found = normalized(batch, ToNormalized(CLIP_MEAN, CLIP_STD))
    assert (found["image"].dtype, found["flag"].dtype, found["name"]) == (torch.float32, torch.uint8, "a")
    assert normalized(batch, None) is batch
    floats = {"image": torch.zeros(2, 3, 4, 4)}
    assert normalized(floats, ToNormalized(CLIP_MEAN, CLIP_STD)) is floats


def test_constants_are_made_once_for_a_device_and_stay_out_of_the_workers():
    data = ShapesDataModule(length=8, batch_size=4)
    data.setup("fit")
    finish = ToNormalized(CLIP_MEAN, CLIP_STD)
    meta = torch.zeros(2, 3, 4, 4, dtype=torch.uint8, device="meta")
    finish(meta)
    made = finish._constants[meta.device]
    finish(meta)
    assert finish._constants[meta.device] is made
    sent = data.worker_transform(training=True)
    data.normalized_batch({"image": meta}, training=True)
    assert not any(
        part._constants for part in pickle.loads(pickle.dumps(sent)).modules() if hasattr(part, "_constants")
    )


@pytest.mark.parametrize(("device", "pins"), [("cuda", True), ("cpu", False)])
def test_batches_are_pinned_for_a_gpu(device, pins):
    data = ShapesDataModule(length=8, batch_size=4)
    data.setup("fit")
    data.trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)))
    loader = data.torch_loader([], None, workers=0)
    assert loader.pin_memory == pins
