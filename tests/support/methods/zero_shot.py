"""A linear model of images and texts, its data, and a slow reference of zero-shot accuracies."""

from types import SimpleNamespace

import torch
from lightning import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader

from support.methods.classification import metrics_of
from vlightning.callbacks import ZeroShotClassification
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


class PlainPairs(LightningDataModule):
    """Training data without an encoder of texts."""

    def train_dataloader(self):
        return DataLoader(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), batch_size=2, shuffle=True)

    def val_dataloader(self):
        return DataLoader(torch.zeros(4, 3), batch_size=2)

    test_dataloader = val_dataloader


class Pairs(PlainPairs):
    """Training data with an encoder of texts."""

    def encoder(self):
        return Words()


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


def found(run, prefix="val", name="zero_shot"):
    """The metrics of a callback, by name."""
    return metrics_of(run, prefix, name)


def callback(data=None, **options):
    return ZeroShotClassification(data or Images(), **{"class_names": NAMES, "templates": TEMPLATES} | options)


def shapes(kind=ShapeClassesDataModule, **options):
    return kind(**{"eval_length": 43, "eval_batch_size": 4, "image_size": 8, "seed": 0} | options)


class Unquiet(Linear):
    """Keeps one part in eval mode while it trains, and another in train mode while it is validated."""

    def on_train_start(self):
        self.head.eval()

    def on_validation_model_eval(self):
        self.eval()
        self.dropout.train()

    def on_validation_epoch_end(self):  # after the callbacks
        self.left = (self.training, self.dropout.training)
