"""Content and place of the figures, which have no effect except in TensorBoard."""

import json
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from support.methods.albef import IMAGE_SIZE, pairs_loader, tiny_albef
from support.methods.tiny import TinyData, TinyModel
from support.runs.distributed import run_ddp_fit
from vlightning.callbacks import EmbeddingProjector, RetrievalFigures, WordMapFigures
from vlightning.callbacks.figures.word_maps import content_words
from vlightning.common.errors import UserError
from vlightning.datamodules import ImageTextDataModule, ShapesDataModule
from vlightning.metrics.retrieval import Candidates, Matches


class Shapes(ShapesDataModule):
    """Records which images are opened."""

    def __init__(self, **options):
        defaults = {"length": 24, "eval_length": 12, "batch_size": 8, "vocab_size": 200, "max_tokens": 16}
        super().__init__(image_size=IMAGE_SIZE, **defaults | options)
        self.opened = []

    def image(self, split, sample_index):
        self.opened.append((split, sample_index))
        return super().image(split, sample_index)


def _albef(**changes):
    return tiny_albef(changes=changes, text={"vocab_size": 200, "fusion_depth": 2}, rerank={"k": 10})


def _trainer(folder, callbacks, **changes):
    return Trainer(
        **{
            "accelerator": "cpu",
            "logger": TensorBoardLogger(folder, name="", version=""),
            "callbacks": callbacks,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "default_root_dir": folder,
            "max_epochs": 1,
            "log_every_n_steps": 1,
        }
        | changes
    )


def _events(folder):
    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    return events


def _steps(folder, tag):
    events = _events(folder)
    return [image.step for image in events.Images(tag)] if tag in events.Tags()["images"] else []


@pytest.mark.slow
def test_tensorboard_has_every_curve_and_both_figures(tmp_path):
    callbacks = [RetrievalFigures(queries=3), WordMapFigures(images=2)]
    trainer = _trainer(tmp_path, callbacks)
    module, data = _albef(), Shapes()
    trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
    events = _events(tmp_path)
    recalls = {f"{way}_r{k}" for way in ("text_to_image", "image_to_text") for k in (1, 5, 10)} | {"recall_mean"}
    expected = {
        *(f"train/loss{term}" for term in ("", "_itc", "_itm", "_mlm")),
        *("train/temperature", "train/alpha", "momentum/teacher", "queue/image_filled", "queue/text_filled"),
        *(f"val/{recall}" for recall in recalls),
        *(f"test/{prefix}{recall}" for prefix in ("", "rerank_") for recall in recalls),
    }
    assert expected <= set(events.Tags()["scalars"])
    assert set(events.Tags()["images"]) == {"val/retrieval", "test/retrieval", "val/words", "test/words"}
    assert [event.step for event in events.Scalars("queue/image_filled")] == [0, 1, 2]
    assert [split for split, _ in data.opened] == ["validation"] * (3 * 5 + 2) + ["test"] * (3 * 5 + 2)
    for tag in events.Tags()["images"]:
        (image,) = events.Images(tag)
        assert image.step == 3
        assert min(image.width, image.height) > 300


def test_the_projector_has_images_and_captions_with_thumbnails_and_labels(tmp_path):
    trainer = _trainer(tmp_path, [EmbeddingProjector(images=5, size=8)])
    module, data = _albef(), Shapes()
    trainer.validate(module, data, verbose=False)
    (labels,) = tmp_path.rglob("metadata.tsv")
    kinds, captions = zip(*(line.split("\t") for line in labels.read_text().splitlines()), strict=True)
    assert kinds == ("kind", *["image"] * 5, *["text"] * 5)
    assert captions[1:6] == captions[6:]
    features = torch.tensor(
        [
            [float(value) for value in line.split("\t")]
            for line in (labels.parent / "tensors.tsv").read_text().splitlines()
        ]
    )
    result = module.evaluation.result
    order = result.sample_index.argsort()
    chosen = order[[number * (len(order) - 1) // 4 for number in range(5)]]
    assert torch.allclose(features[:5], result.image_features[chosen], atol=1e-5)
    index = int(result.sample_index[chosen[0]])
    assert captions[1] in [" ".join(text.split()) for text in data.captions("validation", [index])[0]]
    with Image.open(labels.parent / "sprite.png") as sprite:  # 4 x 4 thumbnails for 10
        assert sprite.size == (32, 32)
        shown = np.asarray(sprite.convert("RGB"))[:8, :8].astype(int)
    thumbnail = np.asarray(data.image("validation", index).convert("RGB").resize((8, 8))).astype(int)
    assert abs(shown - thumbnail).max() <= 1
    (config,) = tmp_path.rglob("projector_config.pbtxt")
    assert 'tensor_name: "val/embeddings:00000"' in config.read_text()


def test_weights_and_random_draws_are_equal_with_and_without_figures(tmp_path):
    ends = []
    for number, callbacks in enumerate(([], [RetrievalFigures(queries=1, top=2), WordMapFigures(images=1)])):
        module = _albef(text={"dropout": 0.1})
        torch.manual_seed(3)
        trainer = _trainer(tmp_path / str(number), callbacks, max_epochs=2, val_check_interval=1)
        trainer.fit(module, Shapes(length=8, batch_size=4))
        assert _steps(tmp_path / str(number), "val/words") == ([1, 2, 3, 4] if callbacks else [])
        ends.append((module.state_dict(), torch.get_rng_state(), module.training, trainer.callback_metrics))
    for name, value in ends[0][0].items():
        assert torch.equal(value, ends[1][0][name]), name
    assert torch.equal(ends[0][1], ends[1][1])
    assert ends[0][2] == ends[1][2]
    assert ends[0][3] == ends[1][3]


def _result(match_score=None, text_id=None):
    """Five images and six texts, "word<n>", of which the last two belong to the last image."""
    owners = torch.tensor([0, 1, 2, 3, 4, 4])
    index = torch.stack([torch.arange(5).roll(-number) for number in range(6)])
    return SimpleNamespace(
        sample_index=torch.tensor([30, 31, 32, 33, 34]),
        input_ids=torch.stack([torch.tensor([101, 110 + number, 102, 0]) for number in range(6)]),
        attention_mask=torch.tensor([[1, 1, 1, 0]] * 6),
        near_images=Candidates(index, torch.linspace(1, 0, 5).expand(6, 5), match_score),
        matches=Matches(torch.arange(5), owners, text_id),
    )


def _parts(result, **module):
    words = {101: "[CLS]", 102: "[SEP]", 0: "[PAD]", 100: "[UNK]"}
    tokenizer = SimpleNamespace(
        cls_token_id=101,
        sep_token_id=102,
        pad_token_id=0,
        all_special_tokens=["[CLS]", "[SEP]", "[PAD]", "[UNK]"],
        decode=lambda ids: " ".join(words.get(number, f"word{number - 110}") for number in ids),
        convert_ids_to_tokens=lambda ids: [words.get(number, f"word{number - 110}") for number in ids],
    )
    opened = []

    def image(split, index):
        opened.append((split, index))
        return Image.new("RGB", (8, 8), (index, 0, 0))

    data = SimpleNamespace(tokenizer=tokenizer, image=image, eval_transform=lambda image: torch.zeros(3, 8, 8))
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.datamodule = data
    return (
        trainer,
        SimpleNamespace(evaluation=SimpleNamespace(result=result), device=torch.device("cpu"), **module),
        opened,
    )


def test_a_row_shows_the_first_images_in_the_final_order_and_marks_correct_ones():
    result = _result(match_score=torch.arange(30.0).view(6, 5).flip(1))
    trainer, module, opened = _parts(result)
    rows = RetrievalFigures(queries=3, top=2).rows(trainer, module, "test")
    assert [row.text for row in rows] == ["word0", "word2", "word5"]
    assert opened == [("test", 30), ("test", 31), ("test", 32), ("test", 33), ("test", 30), ("test", 31)]
    assert [panel.image.getpixel((0, 0))[0] for row in rows for panel in row.panels] == [30, 31, 32, 33, 30, 31]
    assert [panel.right for row in rows for panel in row.panels] == [True, False, True, False, False, False]
    assert [panel.title for panel in rows[0].panels] == ["1.  match 4.00", "2.  match 3.00"]
    assert [row.note for row in rows] == [
        "first match: rank 1",
        "first match: rank 1",
        "first match: rank 5",
    ]


def test_without_a_matching_score_the_cosine_is_shown():
    rows = RetrievalFigures(queries=1, top=2).rows(*_parts(_result())[:2], "validation")
    assert [panel.title for panel in rows[0].panels] == ["1.  cosine 1.00", "2.  cosine 0.75"]


def test_equal_texts_count_as_matches_if_the_module_gives_text_ids():
    equal = torch.tensor([7, 7, 2, 3, 4, 5])  # the first two texts read the same
    rows = RetrievalFigures(queries=1, top=3).rows(*_parts(_result(text_id=equal))[:2], "validation")
    assert [panel.right for panel in rows[0].panels] == [True, True, False]


def test_a_text_without_a_match_has_a_note_and_all_available_images():
    result = _result()
    result.matches = Matches(torch.arange(5), torch.full((6,), 99))
    rows = RetrievalFigures(queries=99, top=50).rows(*_parts(result)[:2], "validation")
    assert [len(row.panels) for row in rows] == [5] * 6
    assert {row.note for row in rows} == {"no match in the first 5"}


def test_figures_show_captions_as_they_are_in_the_data(tmp_path):
    """The tokenizer lowers the case, splits punctuation and replaces unknown words; figures do not show that."""
    rows = []
    for number in range(4):
        Image.new("RGB", (40, 40), (60 * number, 0, 0)).save(tmp_path / f"{number}.png")
        # The second row of an image comes after the other images.
        rows += [{"image": f"{number}.png", "caption": [f"Ann's DOG (no. {number}),  \u00fcber-cute!", " "]}]
    rows += [{"image": f"{number}.png", "caption": f"The {number}th: 50% off\u2026"} for number in range(4)]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    pairs = str(tmp_path / "pairs.json")
    sizes = {"image_size": IMAGE_SIZE, "vocab_size": 200, "max_tokens": 16}
    data = ImageTextDataModule(
        train=[pairs], validation=[pairs], batch_size=4, eval_batch_size=3, num_workers=0, max_bad_share=0.9, **sizes
    )
    module = _albef()
    _trainer(tmp_path / "logs", []).validate(module, data, verbose=False)
    expected = [
        text.format(n) for n in range(4) for text in ("Ann's DOG (no. {}), \u00fcber-cute!", "The {}th: 50% off\u2026")
    ]
    for figure in (RetrievalFigures(queries=8), WordMapFigures(images=8)):
        drawn = figure.rows(data.trainer, module, "validation")
        assert [row.text for row in drawn] == expected


def test_unknown_words_are_shown_and_special_tokens_are_not():
    result = _result()
    result.input_ids[0, 1] = 100
    rows = RetrievalFigures(queries=1).rows(*_parts(result)[:2], "validation")
    assert rows[0].text == "[UNK]"


def test_word_maps_belong_to_the_images_caption_and_average_word_pieces():
    seen = {}

    def word_maps(image, input_ids, attention_mask):
        seen.update(image=image, input_ids=input_ids, attention_mask=attention_mask)
        maps = torch.zeros(len(image), 4, 2, 2)
        maps[:, 1, 0, 0], maps[:, 2, 1, 1] = 1.0, 1.0
        return maps

    result = _result()
    result.input_ids[:, 2] = 120
    trainer, module, opened = _parts(result, word_maps=word_maps)
    trainer.datamodule.tokenizer.convert_ids_to_tokens = lambda ids: ["[CLS]", "tri", "##angle"]
    rows = WordMapFigures(images=2).rows(trainer, module, "validation")
    assert opened == [("validation", 30), ("validation", 34)]
    assert torch.equal(seen["input_ids"], result.input_ids[[0, 5]])
    assert torch.equal(seen["attention_mask"], result.attention_mask[[0, 5]])
    assert seen["image"].shape == (2, 3, 8, 8)
    assert [[panel.title for panel in row.panels] for row in rows] == [["", "whole text", "triangle  100%"]] * 2
    for panel in rows[0].panels[1:]:
        assert panel.heat[0, 0] == panel.heat[1, 1] > panel.heat[0, 1] == 0


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["[CLS]", "a", "small", "tri", "##ang", "##le", "[SEP]"], [("small", [2]), ("triangle", [3, 4, 5])]),
        (["to", "the", "left", "of", ",", "a", "ring"], [("left", [2]), ("ring", [6])]),
        (["the", "a"], [("the", [0]), ("a", [1])]),  # nothing else to show
        (["[UNK]", "##s", "Ring", "[PAD]"], [("##s", [1]), ("Ring", [2])]),
        (["円", "形"], [("円", [0]), ("形", [1])]),
        ([], []),
    ],
)
def test_word_pieces_are_joined_and_function_words_are_omitted(tokens, words):
    assert content_words(tokens, {"[CLS]", "[SEP]", "[PAD]", "[UNK]"}) == words


def test_words_are_evenly_spread_with_their_relative_maximum():
    strength = torch.tensor([0.2, 0.4, 0.9, 0.1])[None, :, None, None]
    trainer, module, _ = _parts(_result(), word_maps=lambda *_: strength * torch.ones(6, 4, 2, 2))
    trainer.datamodule.tokenizer.convert_ids_to_tokens = lambda ids: ["one", "two", "three", "four"]
    rows = WordMapFigures(images=6, words=3).rows(trainer, module, "validation")
    assert [panel.title for panel in rows[0].panels] == ["", "whole text", "one  50%", "two  100%", "four  25%"]


def test_the_map_of_the_whole_text_excludes_padding():
    def word_maps(*_):
        maps = torch.zeros(1, 4, 2, 2)
        maps[0, 0, 0, 0], maps[0, 3, 1, 1] = 1.0, 9.0  # [CLS], padding
        return maps

    rows = WordMapFigures(images=1).rows(*_parts(_result(), word_maps=word_maps)[:2], "validation")
    _, whole, word = rows[0].panels
    assert whole.heat[0, 0] == pytest.approx(1 / 3)  # the mean over three tokens
    assert whole.heat[1, 1] == 0
    assert word.title == "word0  0%"


def test_the_sanity_check_and_skipped_epochs_draw_nothing(tmp_path):
    callbacks = [RetrievalFigures(queries=2, top=3, every_n_epochs=2)]
    trainer = _trainer(tmp_path, callbacks, max_epochs=5, limit_train_batches=1, num_sanity_val_steps=2)
    data = Shapes()
    trainer.fit(_albef(), data)
    assert _steps(tmp_path, "val/retrieval") == [2, 4]
    assert len(data.opened) == 2 * 2 * 3


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_validation_alone_is_drawn_in_every_epoch_and_precision(tmp_path, precision):
    callbacks = [RetrievalFigures(queries=1, every_n_epochs=3), WordMapFigures(images=1, every_n_epochs=3)]
    _trainer(tmp_path, callbacks, precision=precision).validate(_albef(), Shapes(), verbose=False)
    assert _steps(tmp_path, "val/retrieval") == _steps(tmp_path, "val/words") == [0]


class _Streamed(Shapes):
    def image(self, split, sample_index):
        raise ValueError("a stream has no random access")


def _case(name, folder):
    module, data, changes = _albef(), Shapes(), {}
    if name == "stream":
        data = _Streamed()
    elif name == "logger":
        changes["logger"] = False
    elif name == "module":
        module, data = TinyModel(), TinyData()
    elif name == "no datamodule":
        data = Shapes()
        data.setup("fit")
        return module, data.val_dataloader(), changes
    return module, data, changes


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("logger", "RetrievalFigures draws nothing: the run has no TensorBoardLogger"),
        ("module", "RetrievalFigures draws nothing: TinyModel has no retrieval evaluation"),
        ("stream", "draws nothing: an image could not be opened: a stream has no random access"),
        ("no datamodule", "draws nothing: the run has no datamodule with image()"),
    ],
)
def test_an_impossible_figure_warns_once_and_the_run_continues(tmp_path, case, sentence):
    module, data, changes = _case(case, tmp_path)
    trainer = _trainer(tmp_path, [RetrievalFigures()], **changes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer.validate(module, data, verbose=False)
    said = [str(warning.message) for warning in caught if "Figures" in str(warning.message)]
    assert len(said) == 1
    assert sentence in said[0]
    assert _steps(tmp_path, "val/retrieval") == []


def test_a_module_without_word_maps_warns_and_the_other_figure_is_drawn(tmp_path, monkeypatch):
    monkeypatch.delattr("vlightning.lightning_modules.ALBEFModule.word_maps")
    trainer = _trainer(tmp_path, [WordMapFigures(), RetrievalFigures(queries=1)])
    with pytest.warns(UserWarning, match=r"WordMapFigures draws nothing: ALBEFModule has no word_maps\(\)"):
        trainer.validate(_albef(), Shapes(), verbose=False)
    assert _events(tmp_path).Tags()["images"] == ["val/retrieval"]


def test_a_model_without_maps_of_words_warns(tmp_path):
    trainer = _trainer(tmp_path, [WordMapFigures()])
    with pytest.warns(UserWarning, match="WordMapFigures draws nothing: Expected two or more fusion layers"):
        trainer.validate(_albef(text={"fusion_depth": 1}), Shapes(), verbose=False)
    assert _steps(tmp_path, "val/words") == []


def test_a_fast_dev_run_does_not_warn(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _trainer(tmp_path, [RetrievalFigures(), WordMapFigures()], fast_dev_run=True).fit(_albef(), Shapes())
    assert not [warning for warning in caught if "Figures" in str(warning.message)]


@pytest.mark.parametrize("wrong", [{"queries": 0}, {"top": 0}, {"every_n_epochs": 0}])
def test_numbers_below_one_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(UserError, match=f"Expected {name} of RetrievalFigures of at least 1, got 0"):
        RetrievalFigures(**wrong)


def _counted(folder):
    module, data = _albef(), Shapes(batch_size=4)
    module.asked = []
    word_maps = module.word_maps

    def counted(image, *text):
        module.asked.append(len(image))
        return word_maps(image, *text)

    module.word_maps = counted
    return module, data


def _what_was_done(trainer):
    return {"asked": trainer.lightning_module.asked, "opened": len(trainer.datamodule.opened)}


@pytest.mark.slow
def test_both_processes_compute_and_rank_0_draws(tmp_path):
    options = {
        "callbacks": [RetrievalFigures(), WordMapFigures()],
        "max_epochs": 1,
        "logger": TensorBoardLogger(tmp_path, name="", version=""),
    }
    first, second = run_ddp_fit(_counted, options, make_args=(str(tmp_path),), collect=_what_was_done)
    assert first == {"asked": [4], "opened": 8 * 5 + 4}
    assert second == {"asked": [4], "opened": 4}
    assert len(list(tmp_path.glob("events*"))) == 1
    assert len(_steps(tmp_path, "val/words")) == 1


def test_loaders_instead_of_a_datamodule_train_without_figures(tmp_path):
    trainer = _trainer(tmp_path, [RetrievalFigures()], limit_val_batches=0)
    trainer.fit(_albef(), pairs_loader(16, 8))
    assert _events(tmp_path).Tags()["images"] == []
