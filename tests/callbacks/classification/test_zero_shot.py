"""Zero-shot accuracies against plain loops, over processes, and without an effect on training."""

import pickle

import pytest
import torch
from lightning import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader

from support.methods.classification import accuracies
from support.methods.tiny_modules import trainer
from support.methods.zero_shot import (
    IMAGES,
    NAMES,
    TEMPLATES,
    WORDS,
    Images,
    Linear,
    Pairs,
    Unquiet,
    Words,
    callback,
    found,
    shapes,
)
from vlightning.callbacks.classification import zero_shot
from vlightning.common.errors import UserError
from vlightning.datamodules import ShapeClassesDataModule


class OnlyValidation(LightningDataModule):
    class_names = NAMES

    def val_dataloader(self):
        return Images().val_dataloader()


class OnlyTest(LightningDataModule):
    class_names = NAMES

    def test_dataloader(self):
        return Images().test_dataloader()


class TensorOnly(Linear):
    def encode_images(self, image):
        return super().encode_images(image)[0]


def reference(module, data, split="val", names=NAMES, templates=TEMPLATES, of_prompts=True, of_classes=True):
    """The definition, one image and one prompt at a time, in float64."""
    module.eval()
    words, head = module.words.weight.detach().double(), module.head.weight.detach().double()

    def unit(vector, wanted=True):
        return vector / vector.norm() if wanted else vector

    classes = []
    for name in names:
        prompts = []
        for template in templates:
            (ids,) = Words()([template.format(name)])["input_ids"]
            prompts.append(unit(sum(words[number] for number in ids), of_prompts))
        classes.append(unit(sum(prompts) / len(prompts), of_classes))
    ranks, labels = [], []
    for batch in getattr(data, f"{split}_dataloader")():
        for image, label in zip(batch["image"].double(), batch["label"].tolist(), strict=True):
            features = head @ image.mean((1, 2))
            scores = [float(features @ embedding) for embedding in classes]
            ranks.append(sum(score > scores[label] for score in scores))
            labels.append(label)
    return accuracies(ranks, labels)


def validate(*callbacks, module=None, pairs=None, **options):
    runs = trainer(*callbacks, **options)
    runs.validate(module or Linear(), pairs or Pairs(), verbose=False)
    return runs


@pytest.mark.parametrize("module", [Linear, TensorOnly])
def test_accuracies_equal_plain_loops(module):
    module = module()
    data = Images()
    expected = reference(module, data)
    assert found(validate(callback(data), module=module)) == pytest.approx(expected, abs=1e-4)
    # The images distinguish the definition from similar ones, and the three metrics from each other.
    for changes in ({"of_prompts": False}, {"of_classes": False}, {"templates": TEMPLATES[:1]}):
        assert reference(module, data, **changes)["top1"] != expected["top1"], changes
    assert len({round(value) for value in expected.values()}) == 3
    assert data.calls == ["prepare", "validate", "no validate"]


@pytest.mark.parametrize("part", ["words", "head"])
def test_a_tower_with_non_finite_weights_has_accuracy_zero_and_warns(part):
    module = Linear()
    nn.init.constant_(getattr(module, part).weight, torch.nan)
    with pytest.warns(match=r"found non-finite scores for 53 of 53 images \(sample_index unknown\), which rank"):
        metrics = found(validate(callback(), module=module))
    assert metrics == {"top1": 0, "top5": 0, "class_recall": 0, "non_finite": IMAGES}


def test_the_test_split_is_measured_after_test():
    module, data = Linear(), Images()
    runs = trainer(callback(data, name="birds"))
    runs.test(module, Pairs(), verbose=False)
    expected = reference(module, data, "test")
    assert expected != reference(module, data)
    assert found(runs, "test", "birds") == pytest.approx(expected, abs=1e-4)
    assert data.calls == ["prepare", "test", "no test"]


@pytest.mark.parametrize(("kind", "count"), [("openai", 80), ("simple", 7)])
def test_templates_equal_open_clips(kind, count):
    import open_clip

    theirs = {"openai": open_clip.OPENAI_IMAGENET_TEMPLATES, "simple": open_clip.SIMPLE_IMAGENET_TEMPLATES}[kind]
    module, data = Linear(), Images()
    expected = reference(module, data, templates=[template("{}") for template in theirs])
    assert found(validate(callback(data, templates=kind), module=module)) == pytest.approx(expected, abs=1e-4)
    assert sum(module.record.texts) == count * len(NAMES)
    assert max(module.record.texts) <= 256
    assert [template.replace("{}", "cat") for template in callback(templates=kind).templates] == [
        template("cat") for template in theirs
    ]


@pytest.mark.parametrize("prompts", [1, 6, 7, 1000])
def test_prompts_are_encoded_in_batches(prompts, monkeypatch):
    monkeypatch.setattr(zero_shot, "_PROMPTS", prompts)
    module, data = Linear(), Images()
    assert found(validate(callback(data), module=module)) == pytest.approx(reference(module, data), abs=1e-4)
    assert max(module.record.texts) == {1: 3, 6: 6, 7: 6, 1000: 21}[prompts]


def test_five_classes_have_no_top5():
    data = Images(labels=torch.arange(IMAGES) % 5)
    assert set(found(validate(callback(data, class_names=NAMES[:5])))) == {"top1", "class_recall"}


def test_names_come_from_a_file_or_the_data_or_open_clip(tmp_path):
    expected = found(validate(callback()))
    file = tmp_path / "names.txt"
    file.write_text("\n".join(NAMES).replace("dark red", " dark red ") + "\n\n")
    assert found(validate(callback(class_names=str(file)))) == expected
    assert found(validate(callback(Images(tuple(NAMES)), class_names=None))) == expected
    imagenet = callback(class_names="imagenet").class_names
    assert (len(imagenet), imagenet[0], imagenet[999]) == (1000, "tench", "toilet paper")
    file.write_text("red\n\nblue\n")
    with pytest.raises(UserError, match=r"in .*names\.txt\', got an empty name for label 1"):
        callback(class_names=str(file))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"every_n_epochs": 0}, "every_n_epochs .* of at least 1, got 0"),
        ({"transform": "mine"}, "as transform .*, got 'mine'"),
        ({"class_names": "nowhere.txt"}, "got no file 'nowhere.txt'"),
        ({"class_names": []}, "in class_names, got no name"),
        ({"class_names": ["red", " "]}, "in class_names, got an empty name for label 1"),
        ({"templates": "imagenet"}, "as templates .*, got 'imagenet'"),
        ({"templates": []}, r"as templates .*, got \[\]"),
        ({"templates": ["a {}", "a photo"]}, r"as templates .*, got \['a {}', 'a photo'\]"),
        ({"templates": ["{} and {}"]}, "with one {} each"),
    ],
)
def test_invalid_arguments_are_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        callback(**options)


class NoTexts(LightningModule):
    validation_step = Linear.validation_step

    def encode_images(self, image):
        return image.mean((2, 3))


class NoEncoder(LightningDataModule):
    val_dataloader = Pairs.val_dataloader


class Prepared(Pairs):
    eval_transform = nn.Identity()


class NoLabels(Images):
    def split(self, length):
        return DataLoader(self.image, batch_size=8)


class NoImages(Images):
    def split(self, length):
        return []


@pytest.mark.parametrize(
    ("callbacks", "options", "sentence"),
    [
        ([callback()], {"module": NoTexts()}, r"by encode_texts\(\) for .*, got NoTexts"),
        (
            [callback()],
            {"pairs": NoEncoder()},
            r"a method encoder\(\) in the trainer's datamodule.*, got NoEncoder without",
        ),
        ([callback()], {"pairs": Prepared()}, "got none in Images: .*set transform to 'own'"),
        ([callback(class_names=None)], {}, "got no class_names in Images"),
        ([callback(), callback(), callback(name="other")], {}, "Expected one .* 'zero_shot', got two"),
        ([callback(LightningDataModule())], {}, "a validation or a test split .*, got neither in LightningDataModule"),
        (
            [callback(class_names=NAMES[:6])],
            {},
            r"labels from 0 to 5 .*, got 10 of 53 labels outside: .*there are 6 names",
        ),
        ([callback(Images(labels=torch.arange(IMAGES) - 1))], {}, "labels from 0 to 6 .*, got 46 of 53 labels outside"),
        ([callback(NoLabels())], {}, "batches with 'image' .*, got Tensor from NoLabels"),
        ([callback(NoImages())], {}, "images in the validation split .*, got none from NoImages"),
    ],
)
def test_invalid_runs_are_refused(callbacks, options, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        validate(*callbacks, **options)
    assert "ZeroShotClassification 'zero_shot'" in str(error.value)
    assert "\n" not in str(error.value)


def test_loaders_are_released_when_a_run_fails():
    class Watched(NoLabels):
        def on_exception(self, exception):
            self.calls.append(type(exception).__name__)

    data = Watched()
    with pytest.raises(UserError, match="got Tensor from Watched"):
        validate(callback(data))
    assert data.calls == ["prepare", "validate", "UserError"]


class ShapesWithoutTest(ShapeClassesDataModule):
    def open_split(self, split):
        return None if split == "test" else super().open_split(split)


@pytest.mark.parametrize("stage", ["val", "test"])
@pytest.mark.parametrize("data", [OnlyValidation, OnlyTest, lambda: shapes(ShapesWithoutTest)])
def test_data_with_one_split_serves_both_stages(data, stage):
    data, module = data(), Linear()
    runs = trainer(callback(data, class_names=None))
    (runs.validate if stage == "val" else runs.test)(module, Pairs(), verbose=False)
    if isinstance(data, ShapeClassesDataModule):
        assert module.record.images == 43
        assert list(data._rows) == ["validation"]
    else:
        only = "test" if isinstance(data, OnlyTest) else "val"
        assert found(runs, stage) == pytest.approx(reference(module, data, only), abs=1e-4)


class Sized(Pairs):
    """A datamodule with a transform, like those of this package."""

    @staticmethod
    def eval_transform(image):
        return torch.full((3, 2, 6), image.size[0] / 255)


@pytest.mark.parametrize(("transform", "size"), [("trainer", (3, 2, 6)), ("own", (3, 8, 8))])
def test_images_are_transformed_as_configured(transform, size):
    module = Linear()
    validate(callback(shapes(), class_names=None, transform=transform), module=module, pairs=Sized())
    assert module.record.sizes == {size}


@pytest.mark.parametrize(
    ("precision", "dtype", "autocast"),
    [
        ("bf16-mixed", torch.float32, True),
        ("bf16-true", torch.bfloat16, False),
        ("64-true", torch.float64, False),
    ],
)
def test_encoders_run_in_the_trainers_precision_and_cosines_in_float32(precision, dtype, autocast):
    class Close(Linear):
        """Features that are exact in bf16, with cosines that are equal in bf16."""

        def encode_images(self, image):
            self._note(image)
            return image.mean((2, 3)).sign()

        def encode_texts(self, input_ids, attention_mask):
            self._note(self.words.weight)
            last = input_ids.gather(1, attention_mask.sum(1, keepdim=True) - 1)[:, 0]
            near = torch.stack([torch.tensor([128.0, 128 - number, 128]) for number in range(len(WORDS))])
            return near[last].to(self.words.weight.dtype)

    module = Close()
    data = Images()
    data.image = torch.ones(IMAGES, 3, 4, 4)
    for names in (["a", "photo", "of"], ["photo", "of", "a"]):  # later words are further from (1, 1, 1)
        data.label = torch.full((IMAGES,), names.index("a"))
        runs = validate(callback(data, class_names=names, templates=["{}"]), module=module, precision=precision)
        assert found(runs) == {"top1": 100.0, "class_recall": 100.0}
    assert module.record.dtypes == {dtype}
    assert module.record.autocast == {autocast}


def test_modes_of_all_submodules_are_restored():
    module = Unquiet()
    runs = trainer(callback())
    runs.fit(module, Pairs())
    assert module.record.modes == {(False, False)}
    assert module.left == (False, True)
    assert [module.training, module.dropout.training, module.head.training] == [True, True, False]


def test_the_callback_can_be_pickled():
    assert pickle.loads(pickle.dumps(callback(templates="openai"))).templates == callback(templates="openai").templates
