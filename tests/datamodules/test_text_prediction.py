"""Texts to predict: beside images or alone, from files or a list, over processes."""

import pytest
import torch
from jsonargparse import ArgumentParser

from support.data.pair_files import opened, predicted
from support.runs.distributed import run_distributed
from vlightning.common.errors import UserError
from vlightning.datamodules import ImageTextDataModule


def test_texts_are_predicted_beside_images_or_alone(files, module):
    files.images(3)
    images = str(files.folder / "images")
    options = {"train": files.parquet(4), "eval_batch_size": 2}
    texts = ["image number 1", "number", "image"]
    data = opened(module, "predict", predict=images, predict_texts=texts, **options)
    of_images, of_texts = data.predict_dataloader()
    assert [batch["sample_index"].tolist() for batch in of_images] == [[0, 1], [2]]
    batches = list(of_texts)
    assert [set(batch) for batch in batches] == [{"input_ids", "attention_mask", "text_index"}] * 2
    assert [batch["text_index"].tolist() for batch in batches] == [[0, 1], [2]]
    assert all(batch["text_index"].dtype == torch.long for batch in batches)
    assert data.tokenizer.batch_decode(batches[0]["input_ids"], skip_special_tokens=True) == texts[:2]
    assert batches[0]["attention_mask"].sum(1).tolist() == [5, 3]
    alone = opened(module, "predict", predict_texts=texts, **options)
    assert [batch["text_index"].tolist() for batch in alone.predict_dataloader()] == [[0, 1], [2]]


def test_a_text_files_lines_keep_their_numbers_and_empty_ones_are_left_out_and_counted(files, module, caplog):
    file = files.folder / "texts.txt"
    file.write_bytes("\ufeffimage one\r\n\r\n  \nnumber\u2028two\n?!\nthrée".encode())
    options = {"train": files.parquet(4), "predict_texts": str(file)}
    data = opened(module, "predict", **options)
    assert data.predict_texts == ["image one", "", "  ", "number\u2028two", "?!", "thrée"]
    (batch,) = data.predict_dataloader()
    assert batch["text_index"].tolist() == [0, 3, 4, 5]
    assert "2 of the 6 texts to predict are empty and skipped" in caplog.text
    (batch,) = opened(module, "predict", clean_captions=True, **options).predict_dataloader()
    assert batch["text_index"].tolist() == [0, 3, 5]


def test_texts_that_cannot_be_read_are_one_sentence(files, module):
    with pytest.raises(UserError, match=r"^Expected a UTF-8 text file .*, got 'gone.txt' \(No such file.*\)"):
        opened(module, "predict", predict_texts="gone.txt")
    (files.folder / "latin.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(UserError, match=r"latin.txt' \(it is not UTF-8\)"):
        opened(module, "predict", predict_texts=str(files.folder / "latin.txt"))
    (files.folder / "blank.txt").write_text("\n\n")
    with pytest.raises(UserError, match=r"^Expected at least one text .*, got 2 empty texts in '.*blank.txt'"):
        opened(module, "predict", predict_texts=str(files.folder / "blank.txt"))
    with pytest.raises(UserError, match=r"^Expected a predict source .*: set data.predict or data.predict_texts"):
        opened(module, "predict")


def share_of_texts(folder):
    data = ImageTextDataModule(
        predict_texts=[f"w{number % 5}" if number % 4 else "" for number in range(11)],
        tokenizer=f"{folder}/vocab.txt",
        eval_batch_size=3,
    )
    data.setup("predict")
    return [batch["text_index"].tolist() for batch in data.predict_dataloader()]


def test_two_processes_divide_the_texts_without_duplicates(files):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(5))]
    (files.folder / "vocab.txt").write_text("\n".join(words))
    assert run_distributed(share_of_texts, str(files.folder)) == [[[1, 2], [3, 5]], [[6, 7], [9, 10]]]


def test_prediction_writers_learn_the_numbers_of_images_and_texts(files, module, tmp_path):
    files.images(3)
    options = {"predict": str(files.folder / "images"), "predict_texts": ["a", "", "b", "c"], "batch_size": 2}
    (images, texts), items = predicted(tmp_path, module(train=files.parquet(4), **options))
    assert [batch["text_index"] for batch in texts] == items[1] == [[0, 2], [3]]
    assert [batch["sample_index"] for batch in images] == items[0] == [[0, 1], [2]]


def test_prediction_needs_none_of_the_training_files(files, module, tmp_path):
    files.images(2)
    (files.folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]))
    gone = {"train": "gone/train.jsonl", "validation": "gone/validation.jsonl"}
    data = module(predict=str(files.folder / "images"), tokenizer=str(files.folder / "vocab.txt"), **gone)
    returned, _ = predicted(tmp_path, data)
    assert [batch["sample_index"] for batch in returned] == [[0, 1]]
    with pytest.raises(UserError, match=r"got 'gone/train.jsonl', which does not exist"):
        module(**gone).prepare_data()


@pytest.mark.parametrize("given", ["texts.txt", ["a red ring", "b"], None])
def test_the_command_line_takes_texts_as_a_file_or_a_list(given):
    parser = ArgumentParser()
    parser.add_subclass_arguments(ImageTextDataModule, "data")
    config = parser.parse_object({"data": {"class_path": "ImageTextDataModule", "init_args": {"predict_texts": given}}})
    data = parser.instantiate(config).data
    assert data.hparams["predict_texts"] == given
    if not isinstance(given, str):
        assert data.predict_texts == (given or [])
