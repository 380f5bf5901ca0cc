"""The datamodule over files: captions, bad input, evaluation batches."""

import copy
import io
import os

import datasets
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from PIL import Image

from support.pictures import encoded, picture
from vlightning.datamodules import ALBEFEvalTransform, ImageTextDataModule, Source
from vlightning.datamodules.decode import BadDataError

SIDE = 16


def bomb():
    buffer = io.BytesIO()
    Image.new("1", (1200, 1200)).save(buffer, "PNG")
    return buffer.getvalue()


def bad_files():
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 50, 3), dtype=np.uint8))
    return {
        "truncated": encoded(noise, "JPEG")[:1000],
        "not a picture": b"<html>404 not found</html>",
        "too large": bomb(),
        "missing file": None,
    }


def items(files, count, bad=(), empty=()):
    paths = files.pictures(count)
    causes = bad_files()
    for number, cause in bad:
        path = files.folder / paths[number]
        path.unlink()
        if causes[cause] is not None:
            path.write_bytes(causes[cause])
    return [
        {"image": path, "caption": " " if number in empty else f"picture number {number}"}
        for number, path in enumerate(paths)
    ]


def opened(module, stage="fit", **options):
    data = module(**options)
    data.prepare_data()
    data.setup(stage)
    return data


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
        assert texts == [f"picture number {row}" for row in batch["sample_index"].tolist()]


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


def test_evaluation_uses_all_captions_of_each_picture(files, module):
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
    assert torch.equal(batch["image"][1], ALBEFEvalTransform(SIDE)(picture(2)))


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
        assert account.seen == 40 + account.causes.total()
        results.append((seen, dict(account.causes)))
    assert results[0] == results[1]
    assert "10.png" in caplog.text
    assert "not a picture" in caplog.text


def test_bad_pictures_are_left_out_of_evaluation(files, module):
    source = files.json(items(files, 9, bad=[(2, "truncated"), (8, "missing file")], empty=[4]))
    data = opened(module, "validate", train=source, validation=source, max_bad_share=0.5)
    batches = list(data.val_dataloader())
    assert torch.cat([batch["sample_index"] for batch in batches]).tolist() == [0, 1, 3, 5, 6, 7]
    assert data.account("validation").summary() in (
        "3 of 9 (truncated: 1, empty caption: 1, missing file: 1)",
        "3 of 9 (truncated: 1, missing file: 1, empty caption: 1)",
    )


def test_empty_captions_among_good_ones_are_left_out(files, module):
    paths = files.pictures(4)
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
        BadDataError, match=r"^found \d+ of \d+ \(truncated: \d+\) of the train samples unusable, expected at"
    ):
        list(data.train_dataloader())
    data.teardown()


def test_a_split_that_goes_bad_after_the_check_stops_the_run(files, module):
    source = files.json(items(files, 8))
    data = opened(module, train=source)
    for path in (files.folder / "pictures").iterdir():
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
    with pytest.raises(BadDataError, match=r"1 of 9 \(truncated: 1\) of the validation samples"):
        trainer.validate(Reader(), datamodule=data)


def test_batches_in_which_nothing_was_usable_are_left_out(files, module):
    source = files.json(items(files, 6, bad=[(0, "truncated"), (1, "truncated"), (2, "truncated")]))
    data = opened(module, "validate", train=source, validation=source, eval_batch_size=3, max_bad_share=0.6)
    assert [batch["sample_index"].tolist() for batch in data.val_dataloader()] == [[3, 4, 5]]


def test_prediction_takes_a_folder_of_pictures(files, module):
    files.pictures(3)
    data = opened(module, "predict", train=files.parquet(4), predict=str(files.folder / "pictures"))
    (batch,) = data.predict_dataloader()
    assert batch["sample_index"].tolist() == [0, 1, 2]
    assert batch["input_ids"].shape[0] == 0
    assert torch.equal(batch["image"][2], ALBEFEvalTransform(SIDE)(picture(2)))


def test_errors_come_before_training(files, module):
    with pytest.raises(ValueError, match="found no source for 'train', which 'fit' needs"):
        opened(module)
    with pytest.raises(ValueError, match="found no column 'text'"):
        opened(module, train=files.parquet(4), caption_column="text")
    with pytest.raises(ValueError, match="found no rows in the validation split"):
        opened(module, train=files.parquet(4), validation=files.json([], "empty.json"))
    with pytest.raises(ValueError, match="neither a tokenizer nor training captions"):
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
        assert data.sources["train"] == expected
        assert ImageTextDataModule(**data.hparams).sources == data.sources


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
    assert data.train_transform(picture(0)).shape == (3, 24, 24)


def test_flip_switch_reaches_the_transform(module):
    assert module().train_transform.flip.p == 0.5
    assert module(horizontal_flip=False).train_transform.flip is None


@pytest.mark.skipif("VLIGHTNING_TRIAL_DATA" not in os.environ, reason="VLIGHTNING_TRIAL_DATA names no trial data")
def test_real_pictures_load(tmp_path):
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
