"""The datamodule over files: captions, bad input, evaluation batches."""

import copy
import os
from types import SimpleNamespace

import datasets
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser

from support.data.images import draw_image
from support.data.pair_files import Predictor, bad_files, items, opened, predicted
from vlightning.common.errors import UserError
from vlightning.datamodules import ALBEFEvalTransform, ImageTextDataModule, ShapesDataModule, Source
from vlightning.datamodules.base.faults import BadDataError

SIDE = 16


def test_training_batches_follow_the_contract(files, module):
    data = opened(module, train=files.parquet(10, image_id=list(range(100, 110))))
    batches = list(data.train_dataloader())
    assert len(batches) == 2
    for batch in batches:
        assert set(batch) == {"image", "input_ids", "attention_mask", "image_id", "sample_index"}
        assert batch["image"].shape == (4, 3, SIDE, SIDE)
        assert batch["image"].dtype == torch.float32
        assert all(batch[key].dtype == torch.long for key in batch if key != "image")
        assert (batch["image_id"] - 100).tolist() == batch["sample_index"].tolist()
        texts = data.tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True)
        assert texts == [f"image number {row}" for row in batch["sample_index"].tolist()]


def test_each_epoch_draws_one_caption_for_each_row(files, module):
    captions = [[f"row {row} first", f"row {row} second", f"row {row} third"] for row in range(8)]
    data = opened(module, train=files.parquet(8, captions=captions), num_workers=1)
    loader = data.train_dataloader()
    drawn = [set() for _ in range(8)]
    for _ in range(12):
        for batch in loader:
            texts = data.tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True)
            for row, text in zip(batch["sample_index"].tolist(), texts, strict=True):
                drawn[row].add(text)
    assert drawn == [set(texts) for texts in captions]
    data.teardown()
    again = opened(module, train=files.parquet(8, captions=captions))
    first = next(iter(again.train_dataloader()))
    same = next(iter(opened(module, train=files.parquet(8, captions=captions)).train_dataloader()))
    assert all(torch.equal(first[key], same[key]) for key in first)


def test_evaluation_uses_all_captions_of_each_image(files, module):
    captions = [["one", "two"], ["three"], ["two", "four"], ["five"], ["six"]]
    data = opened(
        module,
        "test",
        train=files.parquet(4, "t.parquet"),
        test=files.parquet(5, captions=captions, image_id=[9, 9, 4, 4, 2]),
    )
    batches = list(data.test_dataloader())
    assert [batch["image_id"].tolist() for batch in batches] == [[9, 4, 2]]
    (batch,) = batches
    assert batch["sample_index"].tolist() == [0, 2, 4]
    assert batch["text_image_id"].tolist() == [9, 9, 9, 4, 4, 4, 2]
    assert batch["image"].shape[0] == 3
    assert batch["input_ids"].shape[0] == 7
    assert batch["text_id"][1] == batch["text_id"][3]
    assert len(set(batch["text_id"].tolist())) == 6
    assert torch.equal(batch["image"][1], ALBEFEvalTransform(SIDE)(draw_image(2)))


def test_bad_rows_are_replaced_in_training_and_counted_by_cause(files, module, caplog):
    causes = list(bad_files())
    rows = items(files, 40, bad=[(10 * number, cause) for number, cause in enumerate(causes)], empty=[5])
    source = files.json(rows)
    bad = {0, 10, 20, 30, 5}
    options = {"train": source, "max_pixels": 1_000_000, "max_bad_share": 0.5}
    results = []
    for workers in (0, 2):
        data = opened(module, num_workers=workers, **options)
        loader = data.train_dataloader()
        seen = [batch["sample_index"].tolist() for batch in loader]
        data.teardown()
        assert [len(batch) for batch in seen] == [4] * 10
        assert not bad & {row for batch in seen for row in batch}
        account = data.account("train")
        assert dict(account.causes).keys() == {*causes, "empty caption"}
        assert account.causes.total() >= 5
        assert account.num_read == 40 + account.causes.total()
        results.append((seen, dict(account.causes)))
    assert results[0] == results[1]
    assert "10.png" in caplog.text
    assert "not an image" in caplog.text


def test_bad_images_are_left_out_of_evaluation(files, module):
    source = files.json(items(files, 9, bad=[(2, "truncated"), (8, "missing file")], empty=[4]))
    data = opened(module, "validate", train=source, validation=source, max_bad_share=0.5)
    batches = list(data.val_dataloader())
    assert torch.cat([batch["sample_index"] for batch in batches]).tolist() == [0, 1, 3, 5, 6, 7]
    assert data.account("validation").summary() in (
        "3 of 9 (truncated: 1, empty caption: 1, missing file: 1)",
        "3 of 9 (truncated: 1, missing file: 1, empty caption: 1)",
    )


def test_empty_captions_among_good_ones_are_left_out(files, module):
    paths = files.images(4)
    rows = [{"image": path, "caption": ["good", "", "also good"]} for path in paths]
    data = opened(module, "validate", train=files.json(rows), validation=files.json(rows), max_bad_share=0.5)
    (batch,) = data.val_dataloader()
    assert len(batch["text_id"]) == 8
    assert data.account("validation").summary() == "4 of 12 (empty caption: 4)"


@pytest.mark.parametrize("workers", [0, 1])
def test_past_the_share_the_run_stops_with_one_sentence(files, module, workers):
    source = files.json(items(files, 24, bad=[(number, "truncated") for number in range(1, 9)]))
    data = opened(module, train=source, max_bad_share=0.1, num_workers=workers)
    with pytest.raises(
        BadDataError, match=r"^Expected at most .* unusable train samples .*, got \d+ of \d+ \(truncated: \d+\)"
    ):
        list(data.train_dataloader())
    data.teardown()


def test_a_split_that_goes_bad_after_the_check_stops_the_run(files, module):
    source = files.json(items(files, 8))
    data = opened(module, train=source)
    for path in (files.folder / "images").iterdir():
        path.unlink()
    with pytest.raises(BadDataError, match=r"missing file: 80\)"):
        next(iter(data.train_dataloader()))


def test_a_short_split_is_judged_at_its_end_under_a_trainer(files, module, tmp_path):
    class Reader(pl.LightningModule):
        def validation_step(self, batch, batch_idx):
            pass

    source = files.json(items(files, 9, bad=[(0, "truncated")]))
    data = module(train=source, validation=source)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    with pytest.raises(BadDataError, match=r"unusable validation samples .* got 1 of 9 \(truncated: 1\)"):
        trainer.validate(Reader(), datamodule=data)


def test_batches_in_which_nothing_was_usable_are_left_out(files, module):
    source = files.json(items(files, 6, bad=[(0, "truncated"), (1, "truncated"), (2, "truncated")]))
    data = opened(module, "validate", train=source, validation=source, eval_batch_size=3, max_bad_share=0.6)
    assert [batch["sample_index"].tolist() for batch in data.val_dataloader()] == [[3, 4, 5]]


def test_prediction_takes_a_folder_of_images(files, module):
    files.images(3)
    data = opened(module, "predict", train=files.parquet(4), predict=str(files.folder / "images"))
    (batch,) = data.predict_dataloader()
    assert batch["sample_index"].tolist() == [0, 1, 2]
    assert batch["input_ids"].shape[0] == 0
    assert torch.equal(batch["image"][2], ALBEFEvalTransform(SIDE)(draw_image(2)))


def test_errors_come_before_training(files, module):
    with pytest.raises(UserError, match="Expected a train source for 'fit', got none"):
        opened(module)
    with pytest.raises(UserError, match="the column 'text'"):
        opened(module, train=files.parquet(4), caption_column="text")
    with pytest.raises(UserError, match="Expected rows in the validation split"):
        opened(module, train=files.parquet(4), validation=files.json([], "empty.json"))
    with pytest.raises(UserError, match="a tokenizer or training captions to train one on, got neither"):
        _ = opened(module, "test", test=files.parquet(4)).tokenizer


def test_cleaning_and_sep_are_options(files, module):
    source = files.parquet(4, captions=["Black-and-white!"] * 4)
    plain = next(iter(opened(module, train=source).train_dataloader()))
    official = opened(module, train=source, clean_captions=True, append_sep=False)
    batch = next(iter(official.train_dataloader()))
    assert official.tokenizer.decode(batch["input_ids"][0]) == "[CLS] black and white"
    assert plain["input_ids"][0, -1] == 103 - 1
    assert (batch["input_ids"] != 102).all()


def test_the_command_line_reads_every_form_of_source(files, module):
    path = files.parquet(4)
    parser = ArgumentParser()
    parser.add_subclass_arguments(ImageTextDataModule, "data")
    for given in (path, [path], {"path": path, "image_root": "/x"}, [{"path": path}, path]):
        config = parser.parse_object(
            {"data": {"class_path": "ImageTextDataModule", "init_args": {"train": copy.deepcopy(given)}}}
        )
        data = parser.instantiate(config).data
        expected = given if isinstance(given, list) else [given]
        expected = [Source(**source) if isinstance(source, dict) else source for source in expected]
        assert data.pairs.sources["train"] == expected
        assert ImageTextDataModule(**data.hparams).pairs.sources == data.pairs.sources


def test_transforms_can_be_named_on_the_command_line():
    parser = ArgumentParser()
    parser.add_subclass_arguments(ImageTextDataModule, "data")
    transform = {
        "class_path": "vlightning.datamodules.ALBEFTrainTransform",
        "init_args": {"size": 24, "scale": [0.5, 1.0]},
    }
    config = parser.parse_object(
        {"data": {"class_path": "ImageTextDataModule", "init_args": {"train_transform": transform}}}
    )
    data = parser.instantiate(config).data
    assert data.train_transform.crop.scale == (0.5, 1.0)
    assert data.train_transform(draw_image(0)).shape == (3, 24, 24)


def test_flip_switch_reaches_the_transform(module):
    assert module().train_transform.flip.p == 0.5
    assert module(horizontal_flip=False).train_transform.flip is None


@pytest.mark.skipif("VLIGHTNING_TRIAL_DATA" not in os.environ, reason="VLIGHTNING_TRIAL_DATA names no trial data")
def test_real_images_load(tmp_path):
    folder = os.path.join(os.environ["VLIGHTNING_TRIAL_DATA"], "fashion")
    data = ImageTextDataModule(
        validation=f"{folder}/validation.parquet",
        train=f"{folder}/validation.parquet",
        cache_dir=str(tmp_path),
        image_size=96,
        num_workers=0,
        vocab_size=2000,
    )
    data.setup("fit")
    assert sum(len(batch["image"]) for batch in data.val_dataloader()) == 507
    assert data.account("validation").causes.total() == 0


def test_library_features_without_a_schema_are_found(files):
    assert isinstance(
        datasets.Dataset.from_parquet(files.parquet(1), cache_dir=str(files.folder)).features["image"], datasets.Image
    )


def authors_json(files, ids):
    """Three images with two captions each, in the two forms of the ALBEF authors."""
    paths = files.images(3)
    train = [
        {"image": path, "caption": f"{letter} of {path}", "image_id": image_id}
        for path, image_id in zip(paths, ids, strict=True)
        for letter in "ab"
    ]
    evaluated = [{"image": path, "caption": [f"{letter} of {path}" for letter in "ab"]} for path in paths]
    return files.json(train, "train.json"), files.json(evaluated, "val.json")


@pytest.mark.parametrize(
    "ids", [["flickr30k-images/1.jpg", "flickr30k-images/2.jpg", "b"], ["coco_9", "10", "011"], [4, 5, 6]]
)
def test_the_authors_lists_for_training_and_for_evaluation_name_the_same_images(files, module, ids):
    train, evaluated = authors_json(files, ids)
    data = opened(module, train=train, validation=evaluated, batch_size=6)
    (batch,) = data.train_dataloader()
    owner = dict(zip(batch["sample_index"].tolist(), batch["image_id"].tolist(), strict=True))
    assert len(set(owner.values())) == 3
    assert all(owner[2 * number] == owner[2 * number + 1] for number in range(3))
    (batch,) = data.val_dataloader()
    assert batch["text_image_id"].tolist() == [image_id for image_id in batch["image_id"].tolist() for _ in "ab"]
    assert len(set(batch["image_id"].tolist())) == 3
    # A list with one item for each caption evaluates like the other.
    by_caption = opened(module, "validate", train=train, validation=train, batch_size=6)
    (again,) = by_caption.val_dataloader()
    assert torch.equal(again["image"], batch["image"])
    assert torch.equal(again["input_ids"], batch["input_ids"])
    assert [again["image_id"].tolist().index(owner) for owner in again["text_image_id"]] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("append_sep", [True, False])
@pytest.mark.parametrize("max_tokens", [5, 30])
def test_a_caption_that_is_too_long_is_cut_in_training_and_in_evaluation(files, module, append_sep, max_tokens):
    paths = files.images(4)
    words = [f"w{number}" for number in range(60)]
    source = files.json([{"image": path, "caption": [" ".join(words), "w1 w2"]} for path in paths])
    (files.folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    data = opened(
        module,
        train=source,
        validation=source,
        tokenizer=str(files.folder / "vocab.txt"),
        max_tokens=max_tokens,
        append_sep=append_sep,
        clean_captions=True,
        max_words=30,
    )
    kept = words[: max_tokens - 1 - append_sep]
    expected = data.tokenizer.convert_tokens_to_ids(["[CLS]", *kept, *["[SEP]"] * append_sep])
    assert len(expected) == max_tokens
    batches = [batch for _ in range(4) for batch in data.train_dataloader()] + list(data.val_dataloader())
    longest = [ids for batch in batches for ids in batch["input_ids"].tolist() if 0 not in ids[:5]]
    assert len(longest) > 4
    assert all(ids == expected for ids in longest)
    assert max(batch["input_ids"].shape[1] for batch in batches) == max_tokens


def test_another_datamodules_tokenizer_is_taken_from_the_checkpoint(module, tmp_path):
    class Fitted(Predictor):
        def training_step(self, batch, batch_idx):
            return None

        def configure_optimizers(self):
            return None

    shapes = ShapesDataModule(batch_size=4, length=4, eval_length=1, image_size=16)
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, default_root_dir=tmp_path, limit_val_batches=0)
    trainer.fit(Fitted(), datamodule=shapes)
    trainer.save_checkpoint(tmp_path / "shapes.ckpt")
    data = module(predict_texts=["a large red circle"], vocab_size=320)
    (batch,), _ = predicted(tmp_path, data, tmp_path / "shapes.ckpt")
    assert data.tokenizer.get_vocab() == shapes.tokenizer.get_vocab()
    assert batch["input_ids"] == shapes.encoder()(["a large red circle"])["input_ids"].tolist()
    sharded = tmp_path / "sharded.ckpt"
    sharded.mkdir()
    (tmp_path / "shapes.ckpt").rename(sharded / "meta.pt")
    again = module(vocab_size=320)
    again.trainer = SimpleNamespace(ckpt_path=sharded)
    assert again.tokenizer.get_vocab() == shapes.tokenizer.get_vocab()


def test_images_are_opened_again_as_they_are_read_for_evaluation(files, module):
    paths = files.images(3)
    listed = files.json([{"image": paths[number], "caption": "text"} for number in (2, 2, 0, 1)])
    data = opened(module, "test", train=files.parquet(4), test=[files.parquet(2), listed], eval_batch_size=9)
    (batch,) = data.test_dataloader()
    assert batch["sample_index"].tolist() == [0, 1, 2, 4, 5]
    for index, image in zip(batch["sample_index"].tolist(), batch["image"], strict=True):
        assert torch.equal(data.eval_transform(data.image("test", index)), image)
    assert data.image("test", 4).mode == "RGB"
    assert data.image_name("test", 4) == str(files.folder / "images/0.png")
    assert data.image_name("test", 1) == f"{files.folder}/pairs.parquet, row 1"
    (files.folder / paths[0]).unlink()
    with pytest.raises(UserError, match=r"^Expected a usable image, got .*/0.png \(missing file\)"):
        data.image("test", 4)
    with pytest.raises(UserError, match="Expected an open predict split"):
        data.image_name("predict", 0)


def test_a_streamed_image_has_a_name_and_cannot_be_opened_again(files, module):
    source = files.parquet(3)
    data = opened(module, "test", train=source, test=source, streaming=True, samples_per_epoch=4)
    (batch,) = data.test_dataloader()
    names = [data.image_name("test", index) for index in batch["sample_index"].tolist()]
    assert names == [f"{source}, shard 0, row {number}" for number in range(3)]
    with pytest.raises(UserError, match=r"^Expected a test split .* got a streamed one: set data.streaming to false.$"):
        data.image("test", 0)


def test_without_workers_the_random_states_are_kept_once_a_batch(files, module, monkeypatch):
    data = module(train=files.parquet(8), validation=files.parquet(8, "validation.parquet"))
    data.setup("fit")
    data.tokenizer  # noqa: B018 (trained now, so that only loading is counted)
    calls = []
    get_state = np.random.get_state
    monkeypatch.setattr(np.random, "get_state", lambda: calls.append(1) or get_state())
    batches = [*data.train_dataloader(), *data.val_dataloader()]
    assert len(calls) == len(batches) == 4
