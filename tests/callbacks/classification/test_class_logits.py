"""Accuracies of a module's own class logits against plain loops, over processes, and without an effect on training."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader

from support.methods.classification import accuracies, metrics_of
from support.methods.tiny_modules import trainer
from support.methods.zero_shot import PlainPairs
from support.runs.command_line import run
from support.runs.distributed import rank_trainer, run_distributed
from vlightning.callbacks import OwnClassification, ZeroShotClassification, rank, world_size
from vlightning.common.errors import UserError
from vlightning.datamodules import ShapeClassesDataModule

CLASSES, IMAGES = 7, 53


class Images(LightningDataModule):
    """Labeled images; class 5 does not occur, and the others not equally often. The test split has fewer."""

    def __init__(self, labels=None):
        super().__init__()
        self.label = torch.tensor([0, 1, 1, 2, 3, 3, 3, 4, 6, 6] * 6)[:IMAGES] if labels is None else labels
        self.image = torch.randn(IMAGES, 3, 4, 4, generator=torch.Generator().manual_seed(1))

    def split(self, length):
        rows = [{"image": image, "label": label} for image, label in zip(self.image, self.label, strict=True)]
        return DataLoader(rows[:length], batch_size=8)

    def val_dataloader(self):
        return self.split(IMAGES)

    def test_dataloader(self):
        return self.split(20)


class Classifier(LightningModule):
    """Logits from the mean color, without texts."""

    def __init__(self, classes=CLASSES):
        super().__init__()
        self.head = nn.Linear(3, classes)
        draws = torch.Generator().manual_seed(2)
        self.head.weight.data = torch.randn(classes, 3, generator=draws)
        self.head.bias.data = 0.2 * torch.randn(classes, generator=draws)
        self.dropout = nn.Dropout(0.5)
        self.record = SimpleNamespace(images=0, modes=set(), dtypes=set(), autocast=set(), sizes=set())

    def classify_images(self, image):
        assert not torch.is_grad_enabled()
        self.record.images += len(image)
        self.record.modes.add((self.training, self.dropout.training))
        self.record.dtypes.add(image.dtype)
        self.record.autocast.add(torch.is_autocast_enabled("cpu"))
        self.record.sizes.add(tuple(image.shape[1:]))
        return self.head(self.dropout(image.mean((2, 3))))

    def training_step(self, batch, batch_idx):
        return (self.dropout(self.head(batch)) + torch.randn(CLASSES)).square().mean()

    def validation_step(self, batch, batch_idx):
        pass

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def reference(module, data, length=IMAGES):
    """The definition, one image at a time, in float64."""
    weight, bias = module.head.weight.detach().double(), module.head.bias.detach().double()
    ranks, labels = [], data.label[:length].tolist()
    for image, label in zip(data.image.double(), labels, strict=False):
        scores = (weight @ image.mean((1, 2)) + bias).tolist()
        ranks.append(sum(score > scores[label] for score in scores))
    return accuracies(ranks, labels)


def found(run, prefix="val", name="supervised_teacher"):
    """The metrics of a callback, by name."""
    return metrics_of(run, prefix, name)


def callback(data=None, **options):
    return OwnClassification(data or Images(), **options)


def validate(*callbacks, module=None, pairs=None, **options):
    runs = trainer(*callbacks, **options)
    runs.validate(module or Classifier(), pairs or PlainPairs(), verbose=False)
    return runs


def test_accuracies_equal_plain_loops_under_the_default_name():
    module, data = Classifier(), Images()
    runs = validate(callback(data), module=module)
    expected = reference(module, data)
    assert found(runs) == pytest.approx(expected, abs=1e-4)
    assert set(runs.callback_metrics) == {f"val/supervised_teacher_{key}" for key in expected}
    assert len({round(value) for value in expected.values()}) == 3
    assert (module.record.images, module.record.modes) == (IMAGES, {(False, False)})


def test_the_test_split_is_measured_after_test():
    module, data = Classifier(), Images()
    runs = trainer(callback(data, name="birds"))
    runs.test(module, PlainPairs(), verbose=False)
    expected = reference(module, data, 20)
    assert expected != reference(module, data)
    assert found(runs, "test", "birds") == pytest.approx(expected, abs=1e-4)


def test_five_classes_have_no_top5():
    runs = validate(callback(Images(torch.arange(IMAGES) % 5)), module=Classifier(5))
    assert set(found(runs)) == {"top1", "class_recall"}


@pytest.mark.parametrize(
    ("precision", "dtype", "autocast"),
    [
        ("bf16-mixed", torch.float32, True),
        ("bf16-true", torch.bfloat16, False),
        ("64-true", torch.float64, False),
    ],
)
def test_logits_are_computed_in_the_trainers_precision(precision, dtype, autocast):
    module = Classifier()
    validate(callback(), module=module, precision=precision)
    assert (module.record.dtypes, module.record.autocast) == ({dtype}, {autocast})


class Sized(PlainPairs):
    """A datamodule with a transform, like those of this package."""

    @staticmethod
    def eval_transform(image):
        return torch.full((3, 2, 6), image.size[0] / 255)


def shapes(**options):
    return ShapeClassesDataModule(**{"eval_length": 43, "eval_batch_size": 4, "image_size": 8, "seed": 0} | options)


@pytest.mark.parametrize(("transform", "size"), [("trainer", (3, 2, 6)), ("own", (3, 8, 8))])
def test_images_are_transformed_as_configured(transform, size):
    module = Classifier(shapes().num_classes)
    validate(callback(shapes(), transform=transform), module=module, pairs=Sized())
    assert module.record.sizes == {size}


class NoLogits(LightningModule):
    validation_step = Classifier.validation_step


class Named(Images):
    class_names = ("red", "green", "blue")


class SomeNamed(Named):
    num_classes = CLASSES


class NoImages(Images):
    def split(self, length):
        return []


@pytest.mark.parametrize(
    ("callbacks", "module", "sentence"),
    [
        ([callback()], NoLogits(), r"a module that classifies images .* by classify_images\(\) for .*, got NoLogits"),
        ([callback(), callback()], None, r"Expected one OwnClassification .*, got two"),
        ([callback()], Classifier(6), "labels from 0 to 5 .*, got 10 of 53 labels outside: .* the 6 classes"),
        ([callback(Images(torch.arange(IMAGES) % 7 - 1))], None, "labels from 0 to 6 .*, got 8 of 53 labels outside"),
        ([callback(Named())], None, "7 classes, one for each logit .*, got 3 from Named"),
        ([callback(NoImages())], None, "images in the validation split .*, got none from NoImages"),
    ],
)
def test_invalid_runs_are_refused(callbacks, module, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        validate(*callbacks, module=module)
    assert "OwnClassification 'supervised_teacher'" in str(error.value)
    assert "\n" not in str(error.value)


def test_data_may_name_some_of_its_classes():
    module = Classifier()
    assert found(validate(callback(SomeNamed()), module=module)) == pytest.approx(reference(module, Images()))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"every_n_epochs": 0}, "OwnClassification of at least 1, got 0"), ({"transform": "a"}, "got 'a'")],
)
def test_invalid_arguments_are_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        callback(**options)


def test_both_kinds_of_classification_need_different_names():
    class Both(Classifier):
        encode_images = encode_texts = Classifier.classify_images

    zero_shot = ZeroShotClassification(Images(), ["red"] * CLASSES, ["{}"], name="supervised_teacher")
    with pytest.raises(UserError, match="Expected one OwnClassification 'supervised_teacher', got two"):
        validate(callback(), zero_shot, module=Both())


def test_training_is_bit_identical_with_and_without_the_callback():
    ends = []
    for callbacks in ([], [callback()]):
        torch.manual_seed(5)
        module = Classifier()
        trainer(*callbacks, max_epochs=2, val_check_interval=2).fit(module, PlainPairs())
        assert bool(module.record.images) == bool(callbacks)
        assert module.training
        assert module.dropout.training
        ends.append((module.head.weight, module.head.bias, torch.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_every_second_epoch_is_measured():
    module = Classifier()
    trainer(callback(every_n_epochs=2), max_epochs=5, num_sanity_val_steps=0).fit(module, PlainPairs())
    assert module.record.images == 2 * IMAGES


def test_the_sanity_check_takes_one_batch_and_logs_nothing():
    module = Classifier()
    runs = trainer(callback(), num_sanity_val_steps=1, limit_train_batches=0)
    runs.fit(module, PlainPairs())
    assert (module.record.images, found(runs)) == (8, {})
    with pytest.raises(UserError, match="Expected labels from 0 to 2"):
        trainer(callback(Images(torch.full((IMAGES,), 3))), num_sanity_val_steps=1).fit(Classifier(3), PlainPairs())


class OnFirst(Images):
    """Only the first process has images."""

    def split(self, length):
        return super().split(length if rank() == 0 else 0)


def both_kinds(make):
    """Return metrics and numbers of images for data that only rank 0 has, and for distributed data."""
    ends = []
    for data, classes in ((OnFirst(), CLASSES), (shapes(), shapes().num_classes)):
        module, runs = Classifier(classes), make(callbacks=[callback(data)])
        runs.validate(module, PlainPairs(), verbose=False)
        ends.append((found(runs), module.record.images))
    return ends


class SomeDead(Images):
    """Images 4 and 40 have non-finite scores; the second process, if any, has a part."""

    def split(self, length):
        self.image[[4, 40]] = torch.nan
        rows = [
            {"image": image, "label": label, "sample_index": place}
            for place, (image, label) in enumerate(zip(self.image, self.label, strict=True))
        ]
        parts = [rows] if world_size() == 1 else [rows[:16], rows[16:]]
        return DataLoader(parts[rank()], batch_size=8)


def with_dead_ones(make):
    """A module that has no logit of class 6, which is the right one of ten images, and cannot see two images."""
    module, runs = Classifier(), make(callbacks=[callback(SomeDead())])
    module.head.bias.data[6] = torch.inf
    runs.validate(module, PlainPairs(), verbose=False)
    return found(runs)


def with_dead_ones_on_rank():
    return with_dead_ones(lambda **options: rank_trainer("ddp", **options))


def test_non_finite_scores_are_misses_in_one_and_two_processes():
    module, data = Classifier(), Images()
    ranks = []
    for place, (image, label) in enumerate(zip(data.image, data.label.tolist(), strict=True)):
        scores = module.head(image.mean((1, 2)))
        dead = label == 6 or place in (4, 40)
        ranks.append(CLASSES if dead else int((scores[:6] > scores[label]).sum()))
    expected = accuracies(ranks, data.label.tolist()) | {"non_finite": IMAGES}
    with pytest.warns(
        match=r"non-finite scores for 53 of 53 images \(sample_index 0, 1, .* 37 more; of the classes 6\)"
    ):
        one = with_dead_ones(lambda callbacks: trainer(*callbacks))
    assert one == pytest.approx(expected, abs=1e-4)
    for process in run_distributed(with_dead_ones_on_rank):
        assert process == pytest.approx(expected, abs=1e-4)


def both_on_rank():
    return both_kinds(lambda **options: rank_trainer("ddp", **options))


def test_two_processes_equal_one():
    expected, images = zip(*both_kinds(lambda callbacks: trainer(*callbacks)), strict=True)
    assert images == (IMAGES, 43)
    assert expected[0] == pytest.approx(reference(Classifier(), Images()), abs=1e-4)
    for ends, images in zip(run_distributed(both_on_rank), ([IMAGES, 22], [0, 21]), strict=True):
        assert [number for _, number in ends] == images
        assert [metrics for metrics, _ in ends] == [pytest.approx(one, abs=1e-4) for one in expected]


def test_the_command_line_builds_the_callback_and_reports_a_missing_method(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = run(
        *("validate", "--config", str(Path(__file__).parents[3] / "configs/albef/quickstart.yaml")),
        *("--trainer.callbacks+=OwnClassification", "--trainer.callbacks.data=ShapeClassesDataModule"),
        *("--trainer.callbacks.data.eval_length=43", "--trainer.callbacks.name=theirs", "--trainer.logger=false"),
    )
    assert ran.status == 1
    assert "by classify_images() for OwnClassification 'theirs', got ALBEFModule" in ran.sentence
