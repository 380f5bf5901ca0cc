"""Content of the files of `predict`, which is equal for any number of processes."""

from pathlib import Path
from types import SimpleNamespace

import datasets
import pandas
import pyarrow.parquet as pq
import pytest
import torch
from lightning import Trainer
from torch.utils.data import DataLoader

from support.data.images import draw_image
from support.methods.albef import IMAGE_SIZE, random_batch, tiny_albef
from support.methods.tiny import TinyData, TinyModel
from support.runs.command_line import run
from support.runs.distributed import rank_trainer, run_distributed
from vlightning.callbacks import RetrievalPredictionWriter
from vlightning.callbacks.writers import retrieval as predictions
from vlightning.common.errors import UserError
from vlightning.datamodules import ImageTextDataModule, ShapesDataModule
from vlightning.lightning_modules import ALBEFModule

NAMES = ("image_embeddings", "text_embeddings", "text_to_image", "image_to_text")
WORDS = ["red", "green", "blue", "small", "large", "circle", "square", "ring", "above", "below"]
TEXTS = [f"{a} {b} {c}" for a, b, c in zip(WORDS, WORDS[3:] + WORDS[:3], WORDS[5:] + WORDS[:5], strict=True)] + ["Red"]


@pytest.fixture(autouse=True)
def quiet_library():
    datasets.disable_progress_bars()


@pytest.fixture
def folder(tmp_path):
    """Thirteen images, of which number 7 is unreadable, and a vocabulary."""
    (tmp_path / "images").mkdir()
    for number in range(13):
        draw_image(number).save(tmp_path / f"images/{number:02}.png")
    (tmp_path / "images/07.png").write_bytes(b"<html>404</html>")
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    return tmp_path


def _data(folder, **options):
    defaults = {
        "predict": str(folder / "images"),
        "predict_texts": TEXTS,
        "batch_size": 4,
        "num_workers": 0,
        "image_size": IMAGE_SIZE,
        "tokenizer": str(folder / "vocab.txt"),
        "vocab_size": 120,
        "max_bad_share": 0.5,
        "cache_dir": str(folder / "cache"),
    }
    return ImageTextDataModule(**defaults | options)


def _albef(rerank_k=10):
    module = tiny_albef(rerank={"k": rerank_k, "when": "always"})
    with torch.no_grad():  # weights with which images and texts differ by more than rounding
        for parameter in module.student.parameters():
            parameter.mul_(3.0)
    return module


def _trainer(folder, *callbacks, **options):
    return Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **options,
    )


def _predict(folder, *callbacks, module=None, **options):
    trainer = _trainer(folder, *callbacks)
    returned = trainer.predict(module or _albef(), _data(folder, **options))
    return _tables(folder / "predictions"), returned


def _tables(folder):
    return SimpleNamespace(**{name: pandas.read_parquet(folder / f"{name}.parquet") for name in NAMES})


@torch.no_grad()
def _brute_force(folder, module, top_k, rerank_k):
    """Encode every image and every text separately, and sort all matches."""
    module.eval()
    data = _data(folder)
    data.setup("predict")
    images = {n: data.eval_transform(draw_image(n))[None] for n in range(13) if n != 7}
    texts = {n: data.encoder()([text]) for n, text in enumerate(TEXTS)}
    tokens = {n: module.encode_images(image)[1] for n, image in images.items()}
    image_features = {n: module.encode_images(image)[0][0] for n, image in images.items()}
    text_features = {n: module.encode_texts(**text)[0] for n, text in texts.items()}
    cosine = {(i, t): float(image_features[i] @ text_features[t]) for i in images for t in texts}
    score = {
        (i, t): float(module.match_scores(module.text_states(**texts[t]), texts[t]["attention_mask"], tokens[i]))
        for i in images
        for t in texts
    }

    def ranked(pairs):
        nearest = sorted(pairs, key=lambda pair: -cosine[pair])
        scored = sorted(nearest[:rerank_k], key=lambda pair: -score[pair])
        rows = [(pair, cosine[pair], score[pair]) for pair in scored]
        rows += [(pair, cosine[pair], None) for pair in nearest[rerank_k:]]
        return rows[:top_k]

    def table(queries):
        return [
            (i, t, rank, similarity, match)
            for pairs in queries
            for rank, ((i, t), similarity, match) in enumerate(ranked(pairs), 1)
        ]

    by_text = table([[(i, t) for i in images] for t in texts])
    by_image = table([[(i, t) for t in texts] for i in images])
    return image_features, text_features, by_text, by_image


def _assert_matches(found, expected):
    assert [tuple(row) for row in found[["sample_index", "text_index", "rank"]].values] == [r[:3] for r in expected]
    assert found["similarity"].tolist() == pytest.approx([row[3] for row in expected], abs=1e-5)
    assert [None if pandas.isna(score) else pytest.approx(score, abs=1e-4) for score in found["match_score"]] == [
        row[4] for row in expected
    ]


@pytest.mark.parametrize(("top_k", "rerank_k"), [(5, 0), (5, 10), (99, 10), (99, 0)])
def test_the_files_equal_a_brute_force(folder, top_k, rerank_k):
    module = _albef(rerank_k)
    found, _ = _predict(folder, RetrievalPredictionWriter(top_k), module=module)
    image_features, text_features, by_text, by_image = _brute_force(folder, module, top_k, rerank_k)
    _assert_matches(found.text_to_image, by_text)
    _assert_matches(found.image_to_text, by_image)
    for table, number, features in (
        (found.image_embeddings, "sample_index", image_features),
        (found.text_embeddings, "text_index", text_features),
    ):
        assert table[number].tolist() == list(features)
        for row, expected in zip(table["embedding"], features.values(), strict=True):
            assert row.tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_images_have_paths_and_texts_have_words(folder):
    found, _ = _predict(folder)
    path = {number: str(folder / f"images/{number:02}.png") for number in range(13)}
    for table in (found.image_embeddings, found.text_to_image, found.image_to_text):
        assert table["image"].tolist() == [path[number] for number in table["sample_index"]]
    for table in (found.text_embeddings, found.text_to_image, found.image_to_text):
        assert table["text"].tolist() == [TEXTS[number] for number in table["text_index"]]
    assert len(found.text_to_image) == 10 * len(TEXTS)


def test_an_unreadable_image_and_empty_texts_are_left_out(folder):
    (folder / "texts.txt").write_text("red circle\n\n   \nblue ring\n")
    found, _ = _predict(folder, predict_texts=str(folder / "texts.txt"))
    assert found.image_embeddings["sample_index"].tolist() == [n for n in range(13) if n != 7]
    assert 7 not in found.text_to_image["sample_index"].tolist()
    assert found.text_embeddings["text_index"].tolist() == [0, 3]
    assert found.text_embeddings["text"].tolist() == ["red circle", "blue ring"]


def test_columns_have_the_documented_names_and_types(folder):
    _predict(folder)
    schemas = {name: pq.read_schema(folder / f"predictions/{name}.parquet") for name in NAMES}
    image, text = {"sample_index": "int64", "image": "string"}, {"text_index": "int64", "text": "string"}
    rank, scores = {"rank": "int32"}, {"similarity": "float", "match_score": "float"}
    embedding = {"embedding": "list<element: float>"}
    expected = {
        "image_embeddings": image | embedding,
        "text_embeddings": text | embedding,
        "text_to_image": text | rank | image | scores,
        "image_to_text": image | rank | text | scores,
    }
    for name, schema in schemas.items():
        assert {field.name: str(field.type) for field in schema} == expected[name]
        assert list(schema.names) == list(expected[name])


def test_a_score_that_was_not_computed_is_null(folder):
    for rerank_k, nulls in ((0, 12 * len(TEXTS)), (10, 2 * len(TEXTS))):
        _predict(folder, RetrievalPredictionWriter(top_k=12), module=_albef(rerank_k))
        assert pq.read_table(folder / "predictions/text_to_image.parquet")["match_score"].null_count == nulls


def test_texts_alone_and_images_alone_leave_files_without_matches(folder):
    found, _ = _predict(folder)
    assert len(found.text_to_image) > 0
    found, _ = _predict(folder, predict=None)
    assert [len(vars(found)[name]) for name in NAMES] == [0, len(TEXTS), 0, 0]
    found, _ = _predict(folder, predict_texts=None)
    assert [len(vars(found)[name]) for name in NAMES] == [12, 0, 0, 0]


def test_outputs_of_predict_are_not_changed(folder):
    _, (images, texts) = _predict(folder)
    assert [len(batch["image_features"]) for batch in images] == [4, 3, 2, 3]
    assert torch.cat([batch["text_index"] for batch in texts]).tolist() == list(range(len(TEXTS)))


def test_captions_of_images_are_numbered_after_the_list(folder):
    (folder / "pairs.jsonl").write_text(
        "".join(f'{{"image": "images/0{n}.png", "caption": ["Red ring {n}", "blue"]}}\n' for n in (2, 0, 1))
    )
    found, _ = _predict(folder, predict=str(folder / "pairs.jsonl"), predict_texts=["large circle", "", "ring"])
    assert found.text_embeddings["text_index"].tolist() == [0, 2, 3, 4, 5, 6, 7, 8]
    assert found.text_embeddings["text"].tolist() == ["large circle", "ring", *["red ring [UNK]", "blue"] * 3]
    assert found.image_embeddings["image"].tolist() == [str(folder / f"images/0{n}.png") for n in (2, 0, 1)]


def test_without_a_datamodule_names_are_null(folder):
    batch = random_batch(4)
    images = {name: batch[name] for name in ("image", "image_id", "sample_index")}
    texts = {name: batch[name] for name in ("input_ids", "attention_mask")} | {"text_index": torch.tensor([3, 1, 2, 0])}
    images["sample_index"] = torch.tensor([1, 0, 3, 2])
    loaders = [DataLoader([rows], batch_size=None) for rows in (images, texts)]
    _trainer(folder).predict(_albef(), loaders)
    found = _tables(folder / "predictions")
    assert found.text_embeddings["text_index"].tolist() == [0, 1, 2, 3]
    assert found.image_embeddings["sample_index"].tolist() == [0, 1, 2, 3]
    assert found.image_embeddings["image"].isna().all()
    assert found.text_to_image["text"].isna().all()
    assert len(found.text_to_image) == 16


def test_the_users_writer_replaces_the_default(folder):
    trainer = _trainer(folder, RetrievalPredictionWriter(top_k=3, folder=str(folder / "mine")))
    trainer.predict(_albef(), _data(folder))
    assert len(_tables(folder / "mine").text_to_image) == 3 * len(TEXTS)
    assert not (folder / "predictions").exists()


def test_a_failed_write_keeps_the_old_files(folder, monkeypatch):
    _predict(folder, predict_texts=TEXTS[:2])
    before = {file: file.read_bytes() for file in (folder / "predictions").iterdir()}
    write = predictions._write

    def fails(file, schema, blocks):
        write(file, schema, blocks)
        if schema.names[:3] == ["sample_index", "image", "rank"]:  # the last of the four
            raise OSError("No space left on device")

    monkeypatch.setattr(predictions, "_write", fails)
    with pytest.raises(OSError, match="No space left"):
        _predict(folder)
    assert {file: file.read_bytes() for file in (folder / "predictions").iterdir()} == before


def test_blocks_of_queries_equal_a_single_block(folder, monkeypatch):
    whole, _ = _predict(folder, RetrievalPredictionWriter(top_k=99))
    monkeypatch.setattr(predictions, "_ROWS", 5)
    parts, _ = _predict(folder, RetrievalPredictionWriter(top_k=99))
    for name in NAMES:
        pandas.testing.assert_frame_equal(vars(whole)[name], vars(parts)[name])
    assert pq.ParquetFile(folder / "predictions/text_to_image.parquet").num_row_groups == 3


def test_a_fast_dev_run_writes_nothing(folder):
    trainer = _trainer(folder, fast_dev_run=True)
    trainer.predict(_albef(), _data(folder))
    assert not (folder / "predictions").exists()


def test_invalid_modules_are_refused_before_encoding(folder):
    with pytest.raises(UserError, match="Expected top_k of RetrievalPredictionWriter of at least 1, got 0"):
        RetrievalPredictionWriter(top_k=0)
    with pytest.raises(UserError, match=r"`evaluation.result`.*, got TinyModel: leave the callback out"):
        _trainer(folder, RetrievalPredictionWriter()).predict(TinyModel(), TinyData())


def _predict_one_rank(folder):
    rank_trainer("ddp", default_root_dir=folder).predict(_albef(), _data(folder, batch_size=3))


def test_two_processes_write_the_files_of_one(folder):
    one, _ = _predict(folder)
    run_distributed(_predict_one_rank, folder)
    two = _tables(folder / "predictions")
    for name in NAMES:
        first, second = vars(one)[name], vars(two)[name]
        if "embedding" in first:
            first, second = (
                table.join(pandas.DataFrame(table.pop("embedding").tolist()).add_prefix("e"))
                for table in (first, second)
            )
        pandas.testing.assert_frame_equal(first, second, check_exact=False, atol=1e-5)


SMALL = """
model:
  init_args:
    vision: {width: 16, depth: 1, heads: 2}
    text: {width: 16, heads: 2, ffn_width: 32, depth: 1}
    contrast: {embed_dim: 8, queue_size: 16}
data: {init_args: {image_size: 16, batch_size: 8, num_workers: 0, length: 16, eval_length: 8}}
trainer: {max_steps: 2, enable_progress_bar: false, enable_model_summary: false, logger: {init_args: {name: small}}}
"""


def _cli(*words):
    ran = run(*words)
    assert ran.status == 0, ran.err
    return ran


def test_a_quickstart_model_retrieves_images_of_a_folder_for_texts(folder, monkeypatch, caplog):
    monkeypatch.chdir(folder)
    Path("small.yaml").write_text(SMALL)
    Path("texts.txt").write_text("a small red circle\na large blue ring\n")
    _cli("fit", "--config", "configs/albef/quickstart.yaml", "--config", "small.yaml", "--model.rerank.when", "always")
    checkpoint = ("--ckpt_path", "runs/small/version_0/checkpoints/last.ckpt")
    asked = ("--data.predict", "images/", "--data.predict_texts", "texts.txt", "--data.max_bad_share", "0.5")
    machine = ("--data.num_workers", "0", "--data.cache_dir", "cache", "--trainer.enable_progress_bar", "false")
    _cli("predict", *checkpoint, "--data", "ImageTextDataModule", *asked, *machine)
    folder = "runs/small/version_0_predict_0/predictions"
    assert f"12 images and 2 texts: embeddings and matches are in {folder}" in caplog.text
    found = _tables(Path(folder))
    assert found.text_to_image["text"].tolist() == ["a small red circle"] * 10 + ["a large blue ring"] * 10
    saved = torch.load(checkpoint[1], weights_only=True)
    orders = saved["retrieval_orders"]  # of the last validation
    better = orders["reranked"] > orders["contrast"]
    assert found.text_to_image["match_score"].notna().all() == better
    assert (
        f"the order {'of the matching head' if better else 'by contrast'}, the better one: in the last" in caplog.text
    )
    exported = run("export", checkpoint[1], "exported")
    assert f"in the last evaluation mean recall was {orders['contrast']:.1f} by contrast alone" in exported.out
    assert f"mean recall was {orders['contrast']:.1f} by contrast" in Path("exported/README.md").read_text()
    assert ALBEFModule.from_pretrained("exported").retrieval_orders() == orders
    # The words are those that the drawn shapes taught.
    shapes = ShapesDataModule(vocab_size=320)
    shapes.setup("fit")
    module = ALBEFModule(**{name: value for name, value in saved["hyper_parameters"].items() if name[0] != "_"})
    module.load_state_dict(saved["state_dict"])
    with torch.no_grad():
        expected = module.eval().encode_texts(**shapes.encoder()(["a small red circle"]))[0]
    assert found.text_embeddings["embedding"][0].tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_model_data_settings_and_tokenizer_come_from_the_checkpoint(folder, monkeypatch):
    monkeypatch.chdir(folder)
    Path("small.yaml").write_text(SMALL.replace(", length: 16, eval_length: 8", ", train: pairs.jsonl, max_tokens: 9"))
    Path("pairs.jsonl").write_text('{"image": "images/00.png", "caption": "red circle"}\n' * 16)
    Path("texts.txt").write_text("red circle\n")
    data = ("--data", "ImageTextDataModule", "--data.cache_dir", "cache")
    _cli("fit", "--config", "configs/albef/tiny.yaml", *data, "--config", "small.yaml")
    Path("pairs.jsonl").unlink()  # the training data is not needed any more
    _cli(
        *("predict", "--ckpt_path", "runs/small/version_0/checkpoints/last.ckpt", "--data.predict", "images/"),
        *("--data.predict_texts", "texts.txt", "--data.max_bad_share", "0.5", "--trainer.logger", "false"),
    )
    (written,) = folder.glob("runs/**/predictions")
    assert len(_tables(written).text_to_image) == 10
