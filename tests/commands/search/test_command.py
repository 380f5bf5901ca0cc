"""`vlightning search` and the demo answer from a store as a model over the images does."""

import shutil

import pytest
import torch
from PIL import Image
from torch.nn.functional import normalize

from support.data.colors import read_table, write_colors
from support.methods.published import tiny_clip, write_published
from support.runs.command_line import run
from vlightning.commands.demo.folder import read_folder
from vlightning.commands.demo.stored import stored_folder
from vlightning.commands.evaluate.model import load_model
from vlightning.commands.search import index
from vlightning.commands.search.index import StoreSearch
from vlightning.common.errors import UserError
from vlightning.datamodules.stores.store import FeatureStore


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = write_colors(tmp_path_factory.mktemp("search"))
    (folder / "images/5.png").write_bytes(b"no image")
    ran = run(
        *("embed", f"local-dir:{folder}/model", f"--data.train={folder}/pairs.csv", f"--output={folder}/store"),
        *("--shard_size=7", "--batch_size=16", "--num_workers=0", "--accelerator=cpu"),
    )
    assert ran.status == 0, ran.err
    return folder


@pytest.fixture(scope="module")
def expected(files):
    """The cosines of a text with all images, by the model itself."""
    model = load_model(f"local-dir:{files}/model")
    names = [files / name for name, _ in read_table(files / "pairs.csv") if name != "images/5.png"]
    pixels = torch.stack([model.transform(Image.open(name)) for name in names])
    with torch.no_grad():
        return {str(name): row for name, row in zip(names, normalize(model.encode_images(pixels), dim=-1), strict=True)}


def lines(ran):
    assert ran.status == 0, ran.err
    hits = [line.split(maxsplit=1) for line in ran.out.splitlines() if line.startswith("  ")]
    return [(name, float(score)) for score, name in hits]


def test_a_text_gets_the_images_that_the_model_ranks_first(files, expected):
    query = load_model(f"local-dir:{files}/model").encode_texts(["full half dark"])[0]
    cosines = sorted(((float(row @ query), name) for name, row in expected.items()), reverse=True)
    ran = run("search", f"{files}/store", "full half dark", "--count=6")
    assert "Exact search in 32 images of 16 dimensions." in ran.out
    shown = lines(ran)
    assert [score for _, score in shown] == pytest.approx([cosine for cosine, _ in cosines[:6]], abs=1e-4)
    for name, score in shown:
        assert score == pytest.approx(float(expected[name] @ query), abs=1e-4)
    everything = lines(run("search", f"{files}/store", "dark", "--count=100"))
    assert {name for name, _ in everything} == set(expected)


def test_an_image_gets_captions_and_itself(files, expected):
    image = f"{files}/images/9.png"
    assert lines(run("search", f"{files}/store", image, "--by=image", "--count=1")) == [
        (image, pytest.approx(1, abs=1e-4))
    ]
    captions = {caption for _, caption in read_table(files / "pairs.csv")}
    assert {name for name, _ in lines(run("search", f"{files}/store", image, "--by=image", "--of=text"))} <= captions


def test_above_a_number_of_rows_an_index_answers_with_its_recall(files, expected, monkeypatch):
    pytest.importorskip("usearch")
    exact = lines(run("search", f"{files}/store", "full half dark", "--count=5"))
    monkeypatch.setattr(index, "INDEXED_ABOVE", 20)
    ran = run("search", f"{files}/store", "full half dark", "--count=5")
    assert "usearch's index of 32 images of 16 dimensions" in ran.out
    assert "recall at 5 against the exact search: " in ran.out
    assert [score for _, score in lines(ran)] == pytest.approx([score for _, score in exact], abs=2e-3)
    written = files / "store/images.usearch"
    before = written.stat().st_mtime_ns
    assert lines(run("search", f"{files}/store", "full half dark", "--count=5")) == lines(ran)
    assert written.stat().st_mtime_ns == before  # made once
    monkeypatch.setattr(index, "find_spec", lambda name: None)
    assert "(the extra search has an index)" in run("search", f"{files}/store", "dark").out
    assert "pip install 'vlightning[search]'" in run("search", f"{files}/store", "dark", "--method=index").sentence


def test_a_model_is_that_of_the_store_in_any_layout(files, tmp_path):
    module = tiny_clip(weights=f"{files}/model")
    module.load_initial_weights()
    module.save_pretrained(tmp_path / "export")
    expected_lines = lines(run("search", f"{files}/store", "dark"))
    for model in (f"{files}/model", tmp_path / "export"):
        assert lines(run("search", f"{files}/store", "dark", f"--model={model}")) == expected_lines
    other = write_published(tmp_path / "other", seed=8)
    assert "Expected the model of the store" in run("search", f"{files}/store", "dark", f"--model={other}").sentence


def test_hits_are_the_same_for_blocks_of_any_size(files, monkeypatch):
    queries = load_model(f"local-dir:{files}/model").encode_texts(["dark", "full half half"])
    whole = StoreSearch(FeatureStore(files / "store"), "image").search(queries, 40)
    assert sorted(whole.row[0].tolist()) == [row for row in range(32) if row != 5]
    for size in (1, 3, 10):
        monkeypatch.setattr(index, "BLOCK", size)
        hits = StoreSearch(FeatureStore(files / "store"), "image").search(queries, 40)
        torch.testing.assert_close(hits.score, whole.score, atol=1e-6, rtol=0)


def test_the_demo_answers_from_the_store(files, expected, tmp_path):
    model = load_model(f"local-dir:{files}/model")
    query = model.encode_texts(["half dark full"])[0]
    stored = stored_folder(model, read_folder(f"{files}/images"), f"{files}/store")
    ranked = sorted(((float(row @ query), name) for name, row in expected.items()), reverse=True)
    best = stored.best(query, 4)
    assert [score for _, score in best] == pytest.approx([cosine for cosine, _ in ranked[:4]], abs=1e-5)
    assert all((files / "images" / name).is_file() for name, _ in best)
    (tmp_path / "others").mkdir()
    shutil.copy(files / "images/1.png", tmp_path / "others")
    with pytest.raises(UserError, match="with none: give the folder of its images after --images"):
        stored_folder(model, read_folder(f"{tmp_path}/others"), f"{files}/store")
    other = load_model(f"local-dir:{write_published(tmp_path / 'other', seed=8)}")
    with pytest.raises(UserError, match="Expected the model of the store"):
        stored_folder(other, read_folder(f"{files}/images"), f"{files}/store")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--count=0"], "Expected at least 1 after --count"),
        (["--by=image"], "Expected an image, got 'dark' (missing file)"),
        (["--model=gone"], "gone"),
        (["--html=page.html"], "Expected a model and a folder of images with --html, got the store"),
    ],
)
def test_wrong_words_are_refused_in_a_sentence(files, words, sentence):
    assert sentence in run("search", f"{files}/store", "dark", *words).sentence
