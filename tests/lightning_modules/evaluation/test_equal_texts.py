"""Texts that are equal to a text of another image: errors or matches, one option in every method."""

import dataclasses
import inspect
import json
import re

import pytest
import torch

from support.data.images import draw_image
from support.runs.command_line import run
from vlightning.lightning_modules import (
    ALBEFModule,
    CLIPModule,
    MMLGModule,
    MobileCLIPModule,
    SHReModule,
)
from vlightning.lightning_modules.evaluation.reranking import RerankSettings
from vlightning.lightning_modules.evaluation.retrieval import RetrievalEvaluation

IMAGES = 24
METHODS = [ALBEFModule, CLIPModule, MMLGModule, MobileCLIPModule, SHReModule]


class Scorer:
    """Prefers images and texts with close numbers, independent of the features."""

    device = torch.device("cpu")

    def text_states(self, input_ids, attention_mask):
        return input_ids[..., None].float()

    def match_scores(self, text_states, attention_mask, image_tokens):
        return -(text_states[:, 0, 0] - image_tokens[0, 0, 0]).abs()


def results(repeats, match_equal_texts=None, text_id=True, scorer=None, **options):
    """Results of an evaluation in which each text stands for `repeats` images in a row."""
    evaluation = RetrievalEvaluation(match_equal_texts, **options)
    generator = torch.Generator().manual_seed(4)
    width = sum(options["spaces"].values()) if "spaces" in options else 6
    image, text = (torch.randn(IMAGES, width, generator=generator) for _ in range(2))
    numbers = torch.arange(IMAGES)
    ids = numbers[:, None]
    evaluation.add_images(image, numbers, numbers, None if scorer is None else numbers[:, None, None].float())
    known = numbers // repeats if text_id else None
    evaluation.add_texts(text, ids, torch.ones_like(ids), numbers, known)
    return evaluation.compute(scorer).recalls


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"protocols": ("karpathy5", "paper")},
        {"spaces": {"h2": 4, "h3": 3}, "median_rank_fold": 8},
        {"rerank": RerankSettings(10), "scorer": Scorer()},
    ],
    ids=["plain", "protocols", "spaces", "re-ranked"],
)
def test_both_numbers_are_measured_where_texts_repeat_and_the_plain_names_are_the_strict_ones(options):
    both = results(3, **options)
    strict, equal = results(3, False, **options), results(3, True, **options)
    beside = {name.replace("equal_texts_", ""): value for name, value in both.items() if "equal_texts_" in name}
    assert {name: value for name, value in both.items() if "equal_texts_" not in name} == strict
    assert beside == {name: value for name, value in equal.items() if "median" not in name}
    assert all(beside[name] > strict[name] for name in beside if name.endswith("recall_mean"))
    assert len(both) == len(strict) + len(beside)


def test_texts_that_do_not_repeat_or_are_unknown_give_one_number():
    assert results(1) == results(1, True) == results(1, False)
    assert results(3, text_id=False) == results(3, False)
    assert results(3, True, text_id=False) == results(3, False)


def titles(folder, texts):
    """A list of images with titles."""
    for number in range(len(texts)):
        draw_image(number).save(folder / f"{number}.png")
    rows = [{"image": f"{number}.png", "caption": text} for number, text in enumerate(texts)]
    (folder / "rows.json").write_text(json.dumps(rows))
    return str(folder / "rows.json")


def words(command, source, *others):
    small = ["--model.vision", "{width: 16, depth: 1, heads: 2}", "--model.text.depth", "1", "--model.num_classes", "4"]
    data = {"train": source, "validation": source, "test": source, "image_size": 32, "batch_size": 4, "num_workers": 0}
    options = [f"--data.{name}={value}" for name, value in data.items()]
    return (
        command,
        "--model=SHReModule",
        *small,
        "--data=ImageTextDataModule",
        *options,
        "--data.vocab_size=200",
        "--data.clean_captions=true",
        "--trainer.accelerator=cpu",
        *others,
    )


@pytest.mark.parametrize("command", ["validate", "test"])
def test_a_shop_with_repeated_titles_gets_both_numbers_on_the_command_line(tmp_path, monkeypatch, caplog, command):
    monkeypatch.chdir(tmp_path)
    source = titles(
        tmp_path, ["red shirt", "Red  shirt", "blue shirt", "green hat", "green hat", "sock", "belt", "tie"]
    )
    ran = run(*words(command, source))
    assert ran.status == 0, ran.err
    assert "4 of 8 texts equal a text of another image" in caplog.text
    prefix = {"validate": "val", "test": "test"}[command]
    table = re.findall(r"^(\S+) +([\d.]+) +([\d.]+)$", ran.out, re.MULTILINE)
    rows = {name: (float(value), float(chance)) for name, value, chance in table}
    for space in ("h2", "h3"):
        strict, equal = rows[f"{prefix}/{space}/recall_mean"], rows[f"{prefix}/{space}/equal_texts_recall_mean"]
        assert equal[1] > strict[1]  # chance
        assert equal[0] >= strict[0]
    caplog.clear()
    alone = run(*words(command, source, "--model.match_equal_texts=true"))
    assert alone.status == 0, alone.err
    assert "equal_texts_" not in alone.out + caplog.text
    assert f"{prefix}/h2/recall_mean" in alone.out


@pytest.mark.parametrize("method", METHODS)
def test_the_option_has_one_address(method):
    parameters = inspect.signature(method.__init__).parameters
    assert parameters["match_equal_texts"].default is None
    groups = [value.default for value in parameters.values() if dataclasses.is_dataclass(value.default)]
    assert groups
    assert not any(hasattr(group, "match_equal_texts") for group in groups)
