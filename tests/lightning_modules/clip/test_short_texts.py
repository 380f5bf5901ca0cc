"""A short and a long text of an image in one step, as in Long-CLIP."""

import csv
import json

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from support.methods.published import LENGTH, WORDS, tiny_clip, write_published
from support.runs.command_line import run
from vlightning.callbacks import AtomicCheckpointIO
from vlightning.datamodules.pairs.samples import drawn_captions, first_sentence
from vlightning.lightning_modules.losses.contrast import PairFeatures, coarse

SIDE = 32


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("A dog runs. It is brown.", "A dog runs."),
        ("a dog runs", "a dog runs"),
        ("Is it 3.5 m long? Yes.", "Is it 3.5 m long?"),
        ("  Title of it\nA text. More.", "Title of it"),
    ],
)
def test_the_first_sentence_ends_at_a_mark_before_white_space(text, sentence):
    assert first_sentence(text) == sentence


class Rows:
    """One row with given captions."""

    def __init__(self, *captions):
        self.texts = captions

    def captions(self, row):
        return list(self.texts)

    def name(self, row):
        return "row"


class Usable:
    """An encoder that can use all but empty texts."""

    def usable(self, text):
        return bool(text.strip())


def test_the_short_text_is_the_first_sentence_or_the_shortest_caption():
    rows = Rows("One two. Three.", "short", " ", "The longest of all captions.")
    usable = ["One two. Three.", "short", "The longest of all captions."]
    sentences = ["One two.", "short", "The longest of all captions."]
    for number in range(6):
        assert drawn_captions(rows, 0, number, Usable()) == [usable[number % 3]]
        assert drawn_captions(rows, 0, number, Usable(), "sentence") == [usable[number % 3], sentences[number % 3]]
        assert drawn_captions(rows, 0, number, Usable(), "shortest") == [usable[2 * (number % 2)], "short"]
    assert drawn_captions(Rows("alone"), 0, 5, Usable(), "shortest") == ["alone", "alone"]


def test_coarse_features_are_the_reconstruction_from_the_first_singular_vectors():
    torch.manual_seed(0)
    image = F.normalize(torch.randn(12, 6), dim=-1)
    text = F.normalize(torch.randn(12, 6), dim=-1)
    features = PairFeatures(image[4:8], text[4:8], image, text, 10.0)
    mean = image.mean(0)
    left, values, right = torch.linalg.svd(image - mean, full_matrices=False)
    expected = mean + left[:, :2] * values[:2] @ right[:2]
    kept = coarse(features, 2)
    torch.testing.assert_close(kept.all_image, expected)
    torch.testing.assert_close(kept.image, expected[4:8])
    assert kept.text is features.text
    torch.testing.assert_close(coarse(features, 32).all_image, image)


def batch_of(rows):
    torch.manual_seed(3)
    ids = torch.randint(1, WORDS - 1, (2, rows, LENGTH))
    ids[..., -1] = WORDS - 1
    mask = torch.ones(rows, LENGTH, dtype=torch.long)
    batch = {"image": torch.randn(rows, 3, SIDE, SIDE), "image_id": torch.arange(rows)}
    batch |= {"input_ids": ids[0], "attention_mask": mask}
    return batch | {"short_input_ids": ids[1], "short_attention_mask": mask}


@pytest.mark.parametrize("components", [2, None])
@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_the_loss_is_that_of_both_texts(components, loss, monkeypatch):
    module = tiny_clip(loss={"name": loss, "short_weight": 0.3, "short_components": components})
    monkeypatch.setattr(module, "log", lambda *args, **options: None)
    batch = batch_of(6)
    with torch.no_grad():
        both = module.training_step(batch, 0)["loss"]
        image = F.normalize(module.student.encode_image(batch["image"]), dim=-1)
        texts = [F.normalize(module.student.encode_text(batch[f"{kind}input_ids"]), dim=-1) for kind in ("", "short_")]
        kept = image
        if components is not None:
            left, values, right = torch.linalg.svd(image - image.mean(0), full_matrices=False)
            kept = image.mean(0) + left[:, :components] * values[:components] @ right[:components]
        expected = 0
        for weight, images, text in ((1.0, image, texts[0]), (0.3, kept, texts[1])):
            logits = module.student.logit_scale.exp() * images @ text.T
            if loss == "sigmoid":
                signs = 2 * torch.eye(6) - 1
                one = -F.logsigmoid(signs * (logits + module.student.logit_bias)).sum() / 6
            else:
                pairs = torch.arange(6)
                one = (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2
            expected = expected + weight * one
    torch.testing.assert_close(both, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, and pairs whose captions have two sentences."""
    folder = tmp_path_factory.mktemp("short_texts")
    write_published(folder / "model")
    rows = []
    for number in range(16):
        Image.new("RGB", (40, 36), (15 * number, 120, 255 - 15 * number)).save(folder / f"{number}.png")
        rows.append((f"{number}.png", f"Image {number}. Its second sentence has more words, {number} of them."))
    for name in ("pairs", "held_out"):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("image", "caption"), *rows])
    lists = [{"image": image, "caption": [text, "short"]} for image, text in rows]
    (folder / "lists.json").write_text(json.dumps(lists))
    return folder


def fit(files, *words):
    given = ("fit", "--model=CLIPModule", "--data=ImageTextDataModule", f"--model.weights={files}/model")
    data = (f"--data.validation={files}/held_out.csv", "--data.num_workers=0", f"--data.max_tokens={LENGTH}")
    data += ("--data.tokenizer=clip", "--data.vocab_size=49408", "--data.batch_size=8", "--data.image_size=32")
    return run(*given, f"--model.max_tokens={LENGTH}", *data, "--trainer.accelerator=cpu", *words)


def weights_of(folder):
    checkpoint = max(folder.rglob("last.ckpt"), key=lambda path: path.stat().st_mtime)
    return AtomicCheckpointIO().load_checkpoint(checkpoint)["state_dict"], checkpoint


@pytest.mark.slow
def test_the_command_line_trains_on_both_texts_and_resumes_exactly(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    both = (f"--data.train={files}/pairs.csv", "--data.short_texts=sentence", "--model.optim.learning_rate=1e-3")
    both += ("--trainer.logger=CSVLogger", "--trainer.logger.save_dir=whole")
    both += ("--model.lr_scheduler=ConstantLR", "--model.lr_scheduler.factor=1")  # of no length
    whole = fit(files, *both, "--trainer.max_epochs=2")
    assert whole.status == 0, whole.err
    split = [word.replace("whole", "split") for word in both]
    assert fit(files, *split, "--trainer.max_epochs=2", "--trainer.max_steps=2").status == 0
    _, checkpoint = weights_of(tmp_path / "split")
    assert fit(files, *split, "--trainer.max_epochs=2", f"--ckpt_path={checkpoint}").status == 0
    torch.testing.assert_close(weights_of(tmp_path / "split")[0], weights_of(tmp_path / "whole")[0], rtol=0, atol=0)
    alone = [word.replace("whole", "without") for word in both if "data.short_texts" not in word]
    without = fit(files, *alone, "--trainer.max_epochs=2")
    assert without.status == 0, without.err
    name = "student.logit_scale"
    assert weights_of(tmp_path / "without")[0][name] != weights_of(tmp_path / "whole")[0][name]


def test_a_list_of_captions_has_its_shortest_as_the_short_text(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = fit(files, f"--data.train={files}/lists.json", "--data.short_texts=shortest", "--trainer.max_steps=1")
    assert trained.status == 0, trained.err
    refused = fit(files, f"--data.train={files}/lists.json", "--data.short_texts=shortest", "--data.samples=captions")
    assert refused.sentence.startswith("Expected data.samples: images with data.short_texts: shortest, got captions")
