"""What the demo answers, its embeddings on disk, and what it refuses; none of it needs Gradio."""

import asyncio
import json
import os
import shutil
import socket

import numpy as np
import pytest
import torch
from PIL import Image

from support.data.images import draw_image
from support.project.demo import TEXT, write_images, write_model
from support.runs.command_line import run
from vlightning.commands.demo import command, index
from vlightning.commands.demo.folder import captions_beside, read_captions, read_folder
from vlightning.commands.demo.index import Index, embed_captions, embed_folder
from vlightning.commands.demo.search import SHOWN, Search
from vlightning.commands.demo.server import Guard
from vlightning.commands.evaluate.encoding import Loading
from vlightning.commands.evaluate.model import load_model
from vlightning.commands.search.index import StoreSearch
from vlightning.datamodules.base.faults import BadSample
from vlightning.datamodules.stores.store import FeatureStore
from vlightning.lightning_modules.evaluation.reranking import Orders

HERE = Loading(8, 0)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [write_model(folder, seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def search(models, tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    write_images(root)
    (root / "broken.png").write_bytes(b"none")
    model, cache = load_model(str(models[0])), tmp_path_factory.mktemp("cache")
    folder = read_folder(str(root))
    images = embed_folder(model, folder, cache, HERE)
    return Search(model, folder, images, embed_captions(model, captions_beside(root)[0], cache))


def embedding(search, name):
    """As the module computes it, without the code of the demo."""
    with Image.open(search.folder.root / name) as image:
        return search.model.encode_images(search.model.transform(image.convert("RGB"))[None])[0]


def tokens_of(search, name):
    with Image.open(search.folder.root / name) as image:
        pixels = search.model.transform(image.convert("RGB"))[None]
    return search.model.network.encode_images(search.model.finish(pixels))[1]


def test_the_images_of_a_text_are_those_with_the_highest_cosines(search):
    names = [name for name in search.folder.names if name != "broken.png"]
    text = search.model.encode_texts([TEXT])[0]
    cosines = torch.stack([embedding(search, name) for name in names]) @ text
    top = cosines.topk(SHOWN)
    hits = search.find(TEXT)
    assert [hit.ranked.name for hit in hits] == [names[place] for place in top.indices]
    assert [hit.ranked.cosine for hit in hits] == pytest.approx(top.values.tolist(), abs=1e-5)
    assert "below/00.png" in names
    shares = (search.model.logit_scale * cosines).softmax(0)[top.indices]
    assert [hit.ranked.share for hit in hits] == pytest.approx(shares.tolist(), rel=1e-4)


def test_the_matching_head_reorders_the_images_if_the_models_evaluation_found_this_better(search, monkeypatch):
    network, text = search.model.network, search.model.encoder([TEXT])
    plain = search.find(TEXT)
    assert "in the order by contrast: no evaluation" in search.order
    monkeypatch.setattr(network.evaluation, "orders", Orders(40.0, 50.0))
    reordered = Search(search.model, search.folder, search.images, search.captions)
    assert "in the order of the matching head, the better one" in reordered.order
    hits = reordered.find(TEXT)
    with torch.no_grad():
        states = network.text_states(**text)
        scores = {
            name: float(network.match_scores(states, text["attention_mask"], tokens_of(search, name)))
            for name in search.images.names
        }
    assert [hit.ranked.name for hit in hits] == sorted(scores, key=scores.get, reverse=True)[:SHOWN]
    assert [hit.ranked.name for hit in hits] != [hit.ranked.name for hit in plain]
    monkeypatch.setattr(network.evaluation, "orders", Orders(50.0, 40.0))
    assert [hit.ranked.name for hit in reordered.find(TEXT)] == [hit.ranked.name for hit in plain]


def test_a_word_colors_the_region_that_the_model_maps(search):
    assert search.why_no_maps is None
    words = search.words(TEXT)
    assert words == ["large", "red", "circle", "above", "small", "blue", "square"]
    plain, seen = search.find(TEXT), search.look(TEXT, 2)
    assert [hit.ranked.name for hit in seen] == [hit.ranked.name for hit in plain]
    assert max(hit.strength for hit in seen) == 1
    (_, places) = search._word_positions(TEXT)[2]
    pixels = search.model.transform(plain[0].image)[None]
    heat = search.model.network.word_maps(search.model.finish(pixels), **search.model.encoder([TEXT]))[0, places].mean(
        0
    )
    found = torch.from_numpy(np.asarray(seen[0].image.convert("HSV"))[..., 1].copy())
    # Gray is unsaturated: the most saturated quarter of the image is that of the strongest patch.
    quarters = found.float().unfold(0, 16, 16).unfold(1, 16, 16).mean((-1, -2))
    assert quarters.argmax() == heat.argmax()
    assert search.look(TEXT, 5)[0].image.tobytes() != seen[0].image.tobytes()


def test_an_image_gets_the_captions_and_classes_with_the_highest_cosines(search):
    file, captions = search.folder.root / "03.png", search.captions.names
    assert len(captions) == 20
    cosines = search.model.encode_texts(captions) @ embedding(search, "03.png")
    best = search.describe(str(file))
    top = cosines.topk(5)
    assert [each.name for each in best] == [captions[place] for place in top.indices]
    shares = (search.model.logit_scale * cosines).softmax(0)[top.indices]
    assert [each.share for each in best] == pytest.approx(shares.tolist())
    typed = ["a ring", "a cross"]
    assert sorted(each.name for each in search.describe(str(file), typed)) == sorted(typed)
    shares = search.classify(str(file), ["ring", "cross", "circle"])
    assert sum(share for _, share in shares) == pytest.approx(1)
    assert [share for _, share in shares] == sorted((share for _, share in shares), reverse=True)
    with pytest.raises(BadSample):
        search.describe(str(search.folder.root / "captions.json"))


def test_only_new_and_changed_images_are_embedded_and_all_by_another_model(models, tmp_path, monkeypatch, capsys):
    root, cache = tmp_path / "images", tmp_path / "cache"
    write_images(root, 6)
    embedded = []
    encode = index.encode_images

    def counting(model, samples, loading):
        embedded.append(sorted(samples.names))
        return encode(model, samples, loading)

    monkeypatch.setattr(index, "encode_images", counting)

    def embed(model):
        embedded.clear()
        return embed_folder(model, read_folder(str(root)), cache, HERE)

    first, other = (load_model(str(path)) for path in models)
    before = embed(first)
    assert embedded == [sorted(before.names)]
    assert torch.equal(embed(first).embeddings, before.embeddings)
    assert embedded == []
    state = (root / "03.png").stat()
    draw_image(5).save(root / "03.png")
    os.utime(root / "03.png", ns=(state.st_atime_ns, state.st_mtime_ns))  # only the size tells
    draw_image(6).save(root / "new.png")
    (root / "01.png").unlink()
    after = embed(first)
    assert embedded == [["03.png", "new.png"]]
    assert [name for name in after.names] == sorted({*before.names, "new.png"} - {"01.png"})
    (folder,) = cache.iterdir()
    store = FeatureStore(folder)  # which `vlightning search` reads
    assert sorted(store.names()) == [str(root / name) for name in after.names]
    for name, embedding in zip(after.names, after.embeddings, strict=True):
        hits = StoreSearch(store, "image").search(embedding[None], 1)
        assert store.name(int(hits.row)) == str(root / name)
    embed(other)
    assert len(embedded[0]) == 6
    for file in cache.rglob("*.arrow"):  # damaged files are written again
        file.write_bytes(b"\0" * 20)
    embed(first)
    assert len(embedded[0]) == 6


def test_an_image_with_a_non_finite_embedding_is_found_last():
    images = Index(["bad", "far", "near"], torch.tensor([[torch.nan, 0.0], [0.0, 1.0], [1.0, 0.0]]))
    assert [name for name, _ in images.best(torch.tensor([1.0, 0.0]), 3)] == ["near", "far", "bad"]


def test_a_stopped_embedding_goes_on(models, tmp_path, monkeypatch):
    root, cache = tmp_path / "images", tmp_path / "cache"
    names, model, encode = write_images(root, 6), load_model(str(models[0])), index.encode_images
    monkeypatch.setattr(index, "_BLOCK", 4)
    calls = []

    def stopping(model, samples, loading):
        calls.append(len(samples.names))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return encode(model, samples, loading)

    monkeypatch.setattr(index, "encode_images", stopping)
    with pytest.raises(KeyboardInterrupt):
        embed_folder(model, read_folder(str(root)), cache, HERE)
    assert len(embed_folder(model, read_folder(str(root)), cache, HERE).names) == len(names)
    assert calls == [4, 2, 2]


def test_nothing_outside_of_the_folder_is_read(tmp_path):
    root, outside = tmp_path / "images", tmp_path / "outside"
    write_images(root, 2)
    outside.mkdir()
    draw_image(1).save(outside / "secret.png")
    (outside / "captions.json").write_text(json.dumps([{"caption": "secret"}]))
    (root / "link.png").symlink_to(outside / "secret.png")
    (root / "folder").symlink_to(outside)
    (root / "a.json").symlink_to(outside / "captions.json")
    (root / "within.png").symlink_to(root / "01.png")
    folder = read_folder(str(root))
    assert folder.names == ("01.png", "below/00.png", "within.png")
    assert folder.outside == 1
    assert captions_beside(folder.root)[1] == root / "captions.json"
    for name in ("../outside/secret.png", "folder/secret.png", "link.png", str(outside / "secret.png")):
        with pytest.raises(BadSample):
            folder.open(name)
    (root / "01.png").unlink()
    (root / "01.png").symlink_to(outside / "secret.png")  # after the folder was read
    with pytest.raises(BadSample):
        folder.open("01.png")


def test_files_that_the_page_did_not_receive_and_other_addresses_are_refused(tmp_path):
    guard = Guard(None, str(tmp_path / "files"))
    (tmp_path / "files").mkdir()
    (tmp_path / "files/link").symlink_to("/etc")
    received = tmp_path / "files/a/cat.png"
    assert all(map(guard.allows, ("/", "/assets/index.js", "/theme.css", f"/gradio_api/file={received}")))
    for path in (
        "/etc/hostname",
        tmp_path / "images/1.png",
        f"{tmp_path}/files/../x",
        f"{tmp_path}/files/link/hostname",
    ):
        assert not guard.allows(f"/gradio_api/file={path}")
        assert not guard.allows(f"/file={path}")
        assert not guard.allows(f"/gradio_api/file/{path}")
    assert not guard.allows("/gradio_api/file=https://example.org/cat.png")
    assert not guard.allows("/gradio_api/proxy=https://example.org/cat.png")


def test_only_the_page_itself_may_send_a_request(tmp_path):
    async def page(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    def status(path="/", **headers):
        sent = []

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "path": path, "headers": [(name.encode(), value) for name, value in headers.items()]}
        asyncio.run(Guard(page, str(tmp_path))(scope, None, send))
        return sent[0]["status"]

    host = b"localhost:7860"
    assert status(host=host) == 200  # typed by a person
    assert status(host=host, origin=b"http://localhost:7860") == 200
    others = (
        b"https://localhost:7860",
        b"http://localhost:7861",
        b"http://localhost",
        b"http://127.0.0.1:7860",
        b"null",
    )
    malformed = (b"http://[", b"http://[::1", b"http://localhost:port", b"\xff\xfe", b"http://localhost:7860, http://a")
    for origin in (b"https://evil.example", *others, *malformed):
        assert status(host=host, origin=origin) == 403, origin
    assert status(f"/gradio_api/file={tmp_path}/a\0b", host=host) == 403


def test_captions_are_read_from_lines_and_tables(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\none\n")
    (tmp_path / "b.jsonl").write_text('{"image": "1.png", "caption": ["one", "two"]}\nbroken\n{"caption": "three"}\n')
    (tmp_path / "c.csv").write_text("image,caption\n1.png,one\n2.png,two\n")
    assert [read_captions(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.csv")] == [
        ["one", "two"],
        ["one", "two", "three"],
        ["one", "two"],
    ]


def test_a_mistake_is_one_sentence(models, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    root, empty = tmp_path / "images", tmp_path / "empty"
    write_images(root, 2)
    empty.mkdir()

    def sentence(model, images=root, *words):
        ran = run("demo", "--model", model, "--images", images, "--cache", tmp_path / "cache", "--port=0", *words)
        return ran.sentence.removesuffix(" (--debug shows the traceback)")

    model = models[0]
    assert sentence(model) == (
        "Expected the package gradio for vlightning demo, got none: pip install 'vlightning[demo]'."
    )
    monkeypatch.setattr(command, "find_spec", lambda name: name)
    monkeypatch.setattr(command, "serve", lambda *_: pytest.fail("served"))
    gone = f"Expected a folder of images after --images, got '{tmp_path}/gone': correct it."
    assert sentence(model, tmp_path / "gone") == gone
    assert sentence(model, empty) == f"Expected images in '{empty}', got no image files: give another folder."
    (empty / "1.png").write_bytes(b"none")
    assert sentence(model, empty).startswith(f"Expected images in '{empty}', got 1 that cannot be read")
    assert sentence(model, root, "--captions", tmp_path / "no.txt").startswith("Expected a file of captions after")
    assert sentence(tmp_path / "runs/none").startswith("Expected an existing checkpoint or export as the model, got")
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    assert sentence(tmp_path / "run") == (
        f"Expected a checkpoint in the run folder '{tmp_path}/run', got none: name another run or checkpoint."
    )
    shutil.copytree(model, tmp_path / "classifier")
    config = tmp_path / "classifier/config.json"
    config.write_text(config.read_text().replace("ALBEFModule", "CoCoRDModule"))
    assert sentence(tmp_path / "classifier").startswith("Expected a model of images and texts (ALBEFModule, ")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert sentence(model, root, f"--port={port}").startswith(f"Expected a free port after --port, got {port} (")
    assert sentence(model, root, "--port=99999").startswith("Expected a free port after --port, got 99999 (")


def test_a_run_is_served_by_its_best_checkpoint(models, tmp_path, monkeypatch):
    served = []
    monkeypatch.setattr(command, "find_spec", lambda name: name)
    monkeypatch.setattr(command, "serve", lambda search, *others: served.append((search, *others)))
    write_images(tmp_path / "images", 2)
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    shutil.copy(models[0].parent / "0.ckpt", tmp_path / "run/checkpoints/last.ckpt")
    words = ("--images", tmp_path / "images", "--cache", tmp_path / "cache", "--port=0", "--num_workers=0")
    ran = run("demo", "--model", tmp_path / "run", *words, "--classes", "ring", "cross")
    assert ran.status == 0, ran.err
    ((search, source, classes, _),) = served
    assert (source, classes) == ("captions.json", ["ring", "cross"])
    assert len(search.folder.titles) == 2
    torch.testing.assert_close(search.model.encode_texts([TEXT]), load_model(str(models[0])).encode_texts([TEXT]))


def test_titles_are_found_by_the_column_that_names_the_images(models, tmp_path, monkeypatch):
    served = []
    monkeypatch.setattr(command, "find_spec", lambda name: name)
    monkeypatch.setattr(command, "serve", lambda search, *others: served.append(search.folder.titles))
    names = write_images(tmp_path / "images", 2)
    rows = [{"photo": name, "caption": f"title {name}"} for name in names]
    table, lines = tmp_path / "images/photos.json", tmp_path / "lines.txt"
    table.write_text(json.dumps(rows))
    lines.write_text("a ring\na cross\n")
    words = ("--model", models[0], "--images", tmp_path / "images", "--cache", tmp_path / "cache", "--num_workers=0")
    named = run("demo", *words, "--port=0", "--captions", table, "--image_column=photo")
    unnamed = run("demo", *words, "--port=0", "--captions", table)
    untitled = run("demo", *words, "--port=0", "--captions", lines)
    assert served == [{name: f"title {name}" for name in names}, {}, {}]
    assert "No titles" not in named.err + untitled.err  # a text file of captions names no images
    assert f"No titles: {table} names no image of {tmp_path}/images under 'image'" in unnamed.err
