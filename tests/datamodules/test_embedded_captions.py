"""Captions meet the embeddings of their images, without the images."""

import json

import pytest
import torch

from support.data.images import draw_image
from support.methods.captioning import CAPTIONS, TOWER, caption_data, embedding, image_name, write_data
from support.methods.captioning import write_embeddings as write
from vlightning.common.errors import UserError
from vlightning.datamodules import EmbeddedCaptionsDataModule
from vlightning.datamodules.base.faults import BadDataError
from vlightning.datamodules.stores.store import FeatureStore

TEXTS = [text for texts in CAPTIONS for text in texts]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("captions") / "data")


def ready(arguments, stage="fit", **options):
    data = caption_data(arguments, **options)
    data.setup(stage)
    return data


def texts_of(data, batch):
    ids = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [data.tokenizer.decode(row[mask.bool()][:-1]) for row, mask in ids]


@pytest.mark.parametrize("workers", [0, 2])
def test_each_caption_is_a_row_beside_the_embedding_of_its_image(arguments, workers):
    data = ready(arguments, num_workers=workers)
    epochs = []
    for _ in range(2):
        batches = list(data.train_dataloader())
        assert [len(batch["sample_index"]) for batch in batches] == [6, 6, 6]
        seen = {}
        for batch in batches:
            last = batch["attention_mask"].sum(1) - 1
            assert (batch["input_ids"].gather(1, last[:, None]) == data.tokenizer.eos_token_id).all()
            rows = zip(texts_of(data, batch), batch["sample_index"].tolist(), batch["image_id"].tolist(), strict=True)
            for (text, row, image_id), features in zip(rows, batch["embedding"], strict=True):
                assert text == TEXTS[row]
                assert image_id == 100 + row // 3
                assert torch.equal(features, embedding(row // 3))
                seen[row] = text
        assert sorted(seen) == list(range(18))
        epochs.append(list(seen))
    assert epochs[0] == epochs[1]  # a new loader begins again at epoch 0; a trainer's counter leads on
    loader = data.train_dataloader()
    orders = [[batch["sample_index"].tolist() for batch in loader] for _ in range(2)]
    assert orders[0] != orders[1]
    data.teardown()


def test_evaluation_shows_each_image_once_with_all_its_captions(arguments):
    data = ready(arguments)
    batches = list(data.val_dataloader())
    assert [references for batch in batches for references in batch["references"]] == CAPTIONS
    assert torch.cat([batch["sample_index"] for batch in batches]).tolist() == list(range(6))
    for number, features in enumerate(torch.cat([batch["embedding"] for batch in batches])):
        assert torch.equal(features, embedding(number))
    assert data.tower == TOWER


def test_a_caption_in_a_row_of_its_own_counts_as_one_of_its_image(arguments, tmp_path):
    rows = [{"image": image_name(0), "caption": "one"}, {"image": image_name(1), "caption": ["two", " \n"]}]
    rows.append({"image": image_name(0), "caption": "three\n  four"})
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    root = {"image_root": str(tmp_path / "nowhere"), "validation": str(tmp_path / "rows.json")}
    names = [str(tmp_path / "nowhere" / image_name(number)) for number in range(2)]
    found = arguments | root | {"embeddings": write(tmp_path / "embeddings", names)}
    data = ready(found, "validate", max_bad_share=0.5)
    (batch,) = data.val_dataloader()
    assert batch["references"] == [["one", "three four"], ["two"]]


def test_long_captions_are_cut_and_their_end_is_not_shown(arguments):
    data = ready(arguments, max_tokens=4, batch_size=18)
    (batch,) = data.train_dataloader()
    assert batch["input_ids"].shape == (18, 4)
    end = data.tokenizer.eos_token_id
    rows = zip(batch["sample_index"].tolist(), batch["input_ids"], batch["attention_mask"], strict=True)
    for row, ids, mask in rows:
        expected = [*data.tokenizer(TEXTS[row])["input_ids"], end][:4]
        assert ids[mask.bool()].tolist() == expected
    assert 0 < (batch["input_ids"] == end).any(1).sum() < 18


def test_images_that_have_moved_are_found_by_their_id(arguments, tmp_path):
    moved = {"image_root": str(tmp_path / "elsewhere")}
    with pytest.raises(UserError, match=r"no embedding: 6, for example .*elsewhere.*set data.join_on"):
        ready(arguments | moved)
    data = ready(arguments | moved, join_on="image_id")
    (batch,) = list(data.val_dataloader())[:1]
    assert torch.equal(batch["embedding"][2], embedding(2))


def test_images_without_an_embedding_are_replaced_and_end_the_run_where_they_are_many(arguments, tmp_path):
    names = FeatureStore(arguments["embeddings"]).names()
    some = arguments | {"embeddings": write(tmp_path / "some", names[:5])}
    data = ready(some, max_bad_share=0.5)
    batches = list(data.train_dataloader())
    assert [len(batch["embedding"]) for batch in batches] == [6, 6, 6]
    assert torch.cat([batch["sample_index"] for batch in batches]).max() < 15
    assert sum(len(batch["references"]) for batch in data.val_dataloader()) == 5
    with pytest.raises(BadDataError, match="no embedding"):
        list(ready(some, max_bad_share=0.01).train_dataloader())


def test_prediction_needs_no_captions(arguments, tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(3):
        draw_image(number).save(folder / f"{number}.png")
    names = [str(folder / f"{number}.png") for number in range(3)]
    found = arguments | {"embeddings": write(tmp_path / "embeddings", names), "predict": str(folder)}
    data = ready(found, "predict")
    (batch,) = data.predict_dataloader()
    assert torch.equal(batch["embedding"], torch.stack([embedding(number) for number in range(3)]))
    assert [data.image_name("predict", number) for number in range(3)] == names


@pytest.mark.parametrize(
    ("images", "sentence"),
    [
        ({"views": 2}, "with plain views of images as data.embeddings, .* 2 augmented views .*without --views"),
        ({"normalized": True}, "Expected a store of `vlightning embed` .* with normalized embeddings"),
    ],
)
def test_stores_of_other_features_are_refused(arguments, tmp_path, images, sentence):
    names = [str(tmp_path / image_name(number)) for number in range(6)]
    other = write(tmp_path / "other", names, **images)
    with pytest.raises(UserError, match=sentence):
        ready(arguments | {"embeddings": other})
    with pytest.raises(UserError, match="Expected a store that `vlightning embed` wrote in"):
        ready(arguments | {"embeddings": str(tmp_path / "none.parquet")})


def test_a_language_model_without_a_tokenizer_is_refused(arguments, tmp_path):
    data = ready(arguments | {"language_model": str(tmp_path / "nothing")})
    with pytest.raises(UserError, match=r"of a tokenizer, got|Expected a tokenizer folder"):
        next(iter(data.train_dataloader()))
    with pytest.raises(UserError, match=r"data.max_tokens of at least 2, got 1"):
        EmbeddedCaptionsDataModule("embeddings", max_tokens=1)
