"""Zero-shot accuracies against plain loops, over processes, and without an effect on training."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from lightning import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader

from support.methods.classification import accuracies, metrics_of
from support.methods.tiny_modules import trainer
from vlightning.callbacks import ZeroShotClassification
from vlightning.callbacks.classification import zero_shot
from vlightning.common.errors import UserError
from vlightning.datamodules import ShapeClassesDataModule

NAMES = ["red", "green", "blue", "dark red", "pale green", "grey", "orange fish"]
WORDS = ["", "a", "photo", "of", "bad", "the", "red", "green", "blue", "dark", "pale", "grey", "orange", "fish"]
TEMPLATES = ["a photo of {}", "{}", "a bad {} of the photo"]
IMAGES = 53


class Words:
    """Numbers of words, padded with 0; unknown words count as "a"."""

    def __call__(self, texts):
        rows = [[WORDS.index(word) if word in WORDS else 1 for word in text.split()] for text in texts]
        longest = max(len(row) for row in rows)
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def word_vectors():
    draws = torch.Generator().manual_seed(3)
    lengths = torch.logspace(-1, 1, len(WORDS))[torch.randperm(len(WORDS), generator=draws), None]
    return (torch.randn(len(WORDS), 3, generator=draws) * lengths).index_fill(0, torch.tensor([0]), 0)


VECTORS = word_vectors()


class Pairs(LightningDataModule):
    """Training data with an encoder of texts."""

    def encoder(self):
        return Words()

    def train_dataloader(self):
        return DataLoader(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), batch_size=2, shuffle=True)

    def val_dataloader(self):
        return DataLoader(torch.zeros(4, 3), batch_size=2)

    test_dataloader = val_dataloader


class Images(LightningDataModule):
    """Labeled images in plain loaders, as another project may have them; the test split has fewer.

    Class 5 occurs in neither, and the others not equally often.
    """

    def __init__(self, class_names=None, labels=None, batch_size=8):
        super().__init__()
        if class_names is not None:
            self.class_names = class_names
        self.label = torch.tensor([0, 1, 1, 2, 3, 3, 3, 4, 6, 6] * 6)[:IMAGES] if labels is None else labels
        draws = torch.Generator().manual_seed(1)
        colors = torch.stack([VECTORS[Words()([name])["input_ids"][0]].sum(0) for name in NAMES])
        colors = nn.functional.normalize(colors, dim=-1)[self.label.clamp(0, 6)][..., None, None]
        noise = torch.randn(IMAGES, 3, 4, 4, generator=draws) + 0.4 * torch.randn(IMAGES, 3, 1, 1, generator=draws)
        self.image = colors + noise
        self.batch_size = batch_size
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare")

    def setup(self, stage):
        self.calls.append(stage)

    def teardown(self, stage):
        self.calls.append(f"no {stage}")

    def split(self, length):
        rows = [{"image": image, "label": label} for image, label in zip(self.image, self.label, strict=True)]
        return DataLoader(rows[:length], batch_size=self.batch_size)

    def val_dataloader(self):
        return self.split(IMAGES)

    def test_dataloader(self):
        return self.split(20)


class OnlyValidation(LightningDataModule):
    class_names = NAMES

    def val_dataloader(self):
        return Images().val_dataloader()


class OnlyTest(LightningDataModule):
    class_names = NAMES

    def test_dataloader(self):
        return Images().test_dataloader()


class Linear(LightningModule):
    """Images by their mean color, texts by the sum of their words, both in three dimensions."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding.from_pretrained(VECTORS.clone(), freeze=False)
        self.head = nn.Linear(3, 3)
        nn.init.eye_(self.head.weight)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.record = SimpleNamespace(images=0, texts=[], modes=set(), dtypes=set(), autocast=set(), sizes=set())

    def encode_images(self, image):
        self._note(image)
        self.record.images += len(image)
        self.record.sizes.add(tuple(image.shape[1:]))
        return self.dropout(image.mean((2, 3)) @ self.head.weight.T), None

    def encode_texts(self, input_ids, attention_mask):
        self._note(self.words.weight)
        self.record.texts.append(len(input_ids))
        assert torch.equal(attention_mask, (input_ids > 0).long())
        return self.dropout(self.words(input_ids).sum(1))

    def _note(self, tensor):
        assert not torch.is_grad_enabled()
        if self.dropout.training:
            self.seen += 1  # as a BatchNorm does
        self.record.modes.add((self.training, self.dropout.training))
        self.record.dtypes.add(tensor.dtype)
        self.record.autocast.add(torch.is_autocast_enabled("cpu"))

    def training_step(self, batch, batch_idx):
        loss = (self.dropout(self.head(batch)) + torch.randn(3)).square().mean()
        return loss + self.words.weight.square().mean()

    def validation_step(self, batch, batch_idx):
        pass

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


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


def found(run, prefix="val", name="zero_shot"):
    """The metrics of a callback, by name."""
    return metrics_of(run, prefix, name)


def callback(data=None, **options):
    return ZeroShotClassification(data or Images(), **{"class_names": NAMES, "templates": TEMPLATES} | options)


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


def shapes(kind=ShapeClassesDataModule, **options):
    return kind(**{"eval_length": 43, "eval_batch_size": 4, "image_size": 8, "seed": 0} | options)


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


class Unquiet(Linear):
    """Keeps one part in eval mode while it trains, and another in train mode while it is validated."""

    def on_train_start(self):
        self.head.eval()

    def on_validation_model_eval(self):
        self.eval()
        self.dropout.train()

    def on_validation_epoch_end(self):  # after the callbacks
        self.left = (self.training, self.dropout.training)


def test_modes_of_all_submodules_are_restored():
    module = Unquiet()
    runs = trainer(callback())
    runs.fit(module, Pairs())
    assert module.record.modes == {(False, False)}
    assert module.left == (False, True)
    assert [module.training, module.dropout.training, module.head.training] == [True, True, False]


def test_the_callback_can_be_pickled():
    assert pickle.loads(pickle.dumps(callback(templates="openai"))).templates == callback(templates="openai").templates
