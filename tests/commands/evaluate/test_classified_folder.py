"""One's own classes on one's own images, and the models that classify them."""

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest
import torch

from support.data.evaluation_sets import (
    COLORS,
    NAMES,
    color_model,
    picture,
)
from support.methods.clip import add_tiny_clip
from support.methods.methods import METHODS, OTHERS
from support.runs.command_line import run
from vlightning.commands.evaluate.classified_folder import classify_folder, write_sheet
from vlightning.commands.evaluate.encoding import Loading, encode_classes


def with_non_finite_features(model, color):
    """The model, with a feature that is NaN for images of a color."""

    def images(pixels):
        features = model.images(pixels)
        shown = 2 * torch.tensor(COLORS[color]) / 255 - 1
        return features.masked_fill((features - shown).abs().amax(1, keepdim=True) < 0.3, torch.nan)

    return replace(model, images=images)


def test_own_images_get_their_best_classes_and_a_page(tmp_path):
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    for number, color in enumerate(NAMES):
        (folder / "more" / f"{color} & co.png").write_bytes(picture(color, number))
    (folder / "broken.jpg").write_bytes(b"x")
    table, found = classify_folder(color_model(), folder, NAMES, ["a {} thing"], Loading(2, 0), best=2)
    assert found.bad == {"not an image": 1}
    rows = {row["image"]: row for row in table.to_pylist()}
    assert {name: row["classes"][0] for name, row in rows.items()} == {f"more/{c} & co.png": c for c in NAMES}
    assert all(1 >= row["scores"][0] >= row["scores"][1] >= 0 for row in rows.values())
    write_sheet(table, folder, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<img ") == 6
    assert "more/red &amp; co.png" in page
    assert "data:image/jpeg;base64," in page
    file = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(table, file)
    assert pyarrow.parquet.read_table(file).column_names == ["image", "label", "classes", "scores"]


def test_a_folder_for_each_class_gives_accuracy_and_a_table_of_confusions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = {"red": ["red", "red", "blue"], "blue": ["blue"], "yellow": ["yellow"]}
    for label, colors in shown.items():
        Path("photos", label).mkdir(parents=True)
        for number, color in enumerate(colors):
            Path("photos", label, f"{number}.png").write_bytes(picture(color, number))
    model = with_non_finite_features(color_model(), "yellow")
    monkeypatch.setattr("vlightning.commands.evaluate.command.load_model", lambda *_: model)
    words = ("evaluate", "--model", "colors", "--images", "photos", "--num_workers=0", "--html=page.html")
    ran = run(*words)
    assert ran.status == 0, ran.err
    assert "Accuracy: 60.00% of 5 images in folders of their classes." in ran.out
    assert "| label | blue | red | yellow | (non-finite) | right |" in ran.out
    assert "| red | 1 | 2 | 0 | 0 | 66.7% |" in ran.out
    assert "| yellow | 0 | 0 | 0 | 1 | 0.0% |" in ran.out
    rows = pyarrow.parquet.read_table("classes.parquet").to_pylist()
    assert [(row["label"], len(row["classes"])) for row in rows] == [("blue", 3), *[("red", 3)] * 3, ("yellow", 0)]
    printed = run(*words, "--classes", "green", "white").out  # none of the folders is a class
    assert "Accuracy" not in printed
    assert "No class has the name of these folders" in printed
    assert "accuracy: 'blue' (1), 'red' (3), 'yellow' (1)." in printed
    printed = run(*words, "--classes", "Red", "Blue").out
    assert "Accuracy: 75.00% of 4 images in folders of their classes." in printed
    assert "accuracy: 'yellow' (1)." in printed
    assert "got 'gone.txt', which does not exist: correct the path." in run(*words, "--classes", "gone.txt").sentence
    Path("photos/more.png").write_bytes(picture("red", 0))
    assert "Expected --classes with --images, or a folder of each class, got neither" in run(*words).sentence


@pytest.mark.parametrize("scale", [1.0, 14.0])
def test_scores_are_the_softmax_by_the_models_own_temperature(tmp_path, scale):
    (tmp_path / "red.png").write_bytes(picture("red", 0))
    model = replace(color_model(), logit_scale=scale)
    table, found = classify_folder(model, tmp_path, NAMES, ["a {} thing"], Loading(2, 0), best=6)
    cosines = found.features @ encode_classes(model, NAMES, ["a {} thing"]).T
    expected = (scale * cosines[0]).softmax(0).sort(descending=True).values
    assert table["scores"][0].as_py() == pytest.approx(expected.tolist())


def test_a_model_of_open_clip_runs_with_untrained_weights(tmp_path):
    (tmp_path / "red.png").write_bytes(picture("red", 0))
    words = ("--images", tmp_path, "--classes", "red", "blue", "--num_workers=0", "--out", tmp_path / "c.parquet")
    ran = run("evaluate", "--model", add_tiny_clip(), "--weights", "random", *words)
    assert ran.status == 0, ran.err
    assert f"Classified 1 images by {add_tiny_clip()} (random)" in ran.out
    refused = run("evaluate", "--model", "ViT-B-3", "--weights", "random", *words)
    assert refused.sentence.startswith("Expected a model of open_clip for the weights 'random', got 'ViT-B-3': did you")


@pytest.mark.parametrize("name", ["albef", "clip", "mmlg", "mobileclip", "shre"])
def test_the_temperature_is_that_of_the_method(name, tmp_path):
    method = (METHODS | OTHERS)[name]
    module, _ = method.build(method.prepare(tmp_path), seed=0, batch_size=4, num_workers=0)
    temperatures = {
        "albef": lambda: module.temperature,
        "shre": lambda: (-module.scales["h2"]).exp(),
    }
    temperature = temperatures.get(name, lambda: (-module.student.logit_scale).exp())()
    assert module.similarity_scale() == pytest.approx(1 / float(temperature))
