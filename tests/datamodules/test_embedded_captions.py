"""Captions meet the embeddings of their images, without the images."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from support.data.images import draw_image
from support.methods.captioning import CAPTIONS, EMBED_DIM, TOWER, caption_data, embedding, image_name, write_data
from support.methods.captioning import write_embeddings as write
from vlightning.common.errors import UserError
from vlightning.datamodules import EmbeddedCaptionsDataModule
from vlightning.datamodules.base.faults import BadDataError

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
    found = arguments | root | {"embeddings": write(tmp_path / "embeddings.parquet", names)}
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
    table = pq.read_table(arguments["embeddings"])
    pq.write_table(table.slice(0, 5), tmp_path / "some.parquet")
    some = arguments | {"embeddings": str(tmp_path / "some.parquet")}
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
    found = arguments | {"embeddings": write(tmp_path / "embeddings.parquet", names), "predict": str(folder)}
    data = ready(found, "predict")
    (batch,) = data.predict_dataloader()
    assert torch.equal(batch["embedding"], torch.stack([embedding(number) for number in range(3)]))
    assert [data.image_name("predict", number) for number in range(3)] == names


def test_files_are_read_from_folders_and_patterns(arguments, tmp_path):
    table = pq.read_table(arguments["embeddings"])
    for start in (0, 2, 4):
        pq.write_table(table.slice(start, 2), tmp_path / f"part{start}.parquet")
    for files in (
        str(tmp_path),
        str(tmp_path / "part*.parquet"),
        [str(tmp_path / f"part{s}.parquet") for s in (4, 0, 2)],
    ):
        data = ready(arguments | {"embeddings": files}, "validate")
        batches = list(data.val_dataloader())
        for number, features in enumerate(torch.cat([batch["embedding"] for batch in batches])):
            assert torch.equal(features, embedding(number))


def refused(arguments, files, message):
    with pytest.raises(UserError, match=message):
        ready(arguments | {"embeddings": files})


def test_other_files_are_refused(arguments, tmp_path):
    refused(arguments, str(tmp_path / "none.parquet"), "Expected Parquet files of embeddings, .*embed the images first")
    # What a retrieval prediction writes, of unit length, has no ids.
    table = pq.read_table(arguments["embeddings"])
    pq.write_table(table.drop_columns(["image_id"]), tmp_path / "unit.parquet")
    refused(
        arguments,
        str(tmp_path / "unit.parquet"),
        "Expected the columns image, image_id, embedding in .*, as `vlightning predict`",
    )
    refused(arguments, [arguments["embeddings"]] * 2, r"one embedding per image .* got several for .*0\.jpg")
    names = [f"/other/{number}" for number in range(3)]
    other = write(tmp_path / "other.parquet", names, TOWER | {"sha256": "1" * 64})
    refused(arguments, [arguments["embeddings"], other], "got those of 2 towers with the dimensions")
    narrow = write(tmp_path / "narrow.parquet", names, width=EMBED_DIM - 1)
    refused(arguments, [arguments["embeddings"], narrow], r"of 1 towers with the dimensions \[11, 12\]")
    pq.write_table(table.slice(0, 0), tmp_path / "empty.parquet")
    refused(arguments, str(tmp_path / "empty.parquet"), "got 0 of 0 dimensions")
    mixed = table.set_column(3, "embedding", pa.array([[1.0] * (1 + row % 2) for row in range(6)]))
    pq.write_table(mixed, tmp_path / "mixed.parquet")
    refused(arguments, str(tmp_path / "mixed.parquet"), "got 6 of 2 dimensions")


def test_a_language_model_without_a_tokenizer_is_refused(arguments, tmp_path):
    data = ready(arguments | {"language_model": str(tmp_path / "nothing")})
    with pytest.raises(UserError, match=r"of a tokenizer, got|Expected a tokenizer folder"):
        next(iter(data.train_dataloader()))
    with pytest.raises(UserError, match=r"data.max_tokens of at least 2, got 1"):
        EmbeddedCaptionsDataModule("embeddings.parquet", max_tokens=1)
