"""Questions about images: the authors' lists, tables of one's own, cleaning, weights, batches, held-out images."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from support.data.images import draw_image, encoded
from vlightning.common.errors import UserError
from vlightning.common.tokenizers import tokenizer_from_json
from vlightning.datamodules import ShapesVQADataModule, VQADataModule
from vlightning.datamodules.questions.samples import clean_question
from vlightning.datamodules.text.tokenizers import train_wordpiece

WORDS = "what is it a dog cat red two on the left side of table maybe"
TEN = ["dog"] * 6 + ["a dog"] * 3 + ["cat"]


@pytest.fixture
def folder(tmp_path):
    for root in ("coco", "vg"):
        (tmp_path / root).mkdir()
        for number in range(4):
            draw_image(number + (10 if root == "vg" else 0)).save(tmp_path / root / f"{number}.png")
    vocabulary = tokenizer_from_json(train_wordpiece([WORDS] * 3, 200)).get_vocab()
    (tmp_path / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.get)))
    return tmp_path


def data(folder, **options):
    options = {"image_roots": {"vqa": str(folder / "coco"), "vg": str(folder / "vg")}} | options
    return VQADataModule(
        tokenizer=str(folder / "vocab.txt"),
        vocab_size=200,
        image_size=16,
        num_workers=0,
        cache_dir=str(folder / "cache"),
        **{"batch_size": 2} | options,
    )


def write(folder, name, rows):
    path = folder / name
    path.write_text(json.dumps(rows) if name.endswith(".json") else "\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize(
    ("raw", "words", "expected"),
    [
        ("What's on the Left-side/table?", 30, "whats on the left side table"),
        ("is  it,  red ? ", 30, "is  it  red"),  # runs of spaces stay
        ("#1: (yes); ~no!", 30, "1 yes no"),
        ("one two three", 2, "one two"),
        ("one  two three", 2, "one "),  # each space but the first is a word
        ("<person> left", 30, "<person> left"),
    ],
)
def test_questions_are_cleaned_as_the_authors_do(raw, words, expected):
    assert clean_question(raw, words) == expected


def test_a_training_batch_has_the_weighted_answers_of_both_data_sets(folder):
    vqa = [{"dataset": "vqa", "image": f"{n}.png", "question": "what is it?", "answer": TEN} for n in range(2)]
    vg = [{"dataset": "vg", "image": f"{n}.png", "question": "what is red?", "answer": "table"} for n in range(2)]
    module = data(folder, train=[write(folder, "vqa.json", vqa), write(folder, "vg.json", vg)], batch_size=4)
    module.setup("fit")
    batch = next(iter(module.train_dataloader()))
    rows, tokenizer = module._opened("train"), module.tokenizer
    for place, row in enumerate(batch["sample_index"].tolist()):
        own = (batch["answer_index"] == place).nonzero()[:, 0]
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in batch["answer_ids"][own]]
        weights = dict(zip(texts, batch["answer_weight"][own].tolist(), strict=True))
        expected = {"dog": 0.6, "a dog": 0.3, "cat": 0.1} if row < 2 else {"table": 0.5}
        assert weights == pytest.approx(expected)
        assert ("coco" if row < 2 else "vg") in rows.image_name(row)
    ends = batch["answer_mask"].sum(1) - 1
    assert (batch["answer_ids"][torch.arange(len(ends)), ends] == tokenizer.sep_token_id).all()
    assert (batch["answer_ids"][:, 0] == tokenizer.cls_token_id).all()
    assert (batch["input_ids"] != tokenizer.sep_token_id).all()  # questions have none
    assert len(batch["answer_positions"]) == int(ends.sum())


def test_questions_are_truncated_in_training_only(folder):
    long = " ".join(["dog"] * 60)
    rows = [{"image": f"{n}.png", "question": long, "answers": ["cat"], "question_id": n} for n in range(2)]
    path = write(folder, "rows.jsonl", rows)
    module = data(folder, train=path, test=path, image_root=str(folder / "coco"))
    module.setup("fit")
    module.setup("test")
    assert next(iter(module.train_dataloader()))["input_ids"].shape == (2, 25)
    assert next(iter(module.test_dataloader()))["input_ids"].shape == (2, 51)  # [CLS] and 50 words


def test_evaluation_reads_an_image_once_with_all_of_its_questions(folder):
    rows = [
        {"dataset": "vqa", "image": f"{n % 2}.png", "question": f"what {n}", "question_id": 10 + n} for n in range(5)
    ]
    module = data(folder, test=write(folder, "test.json", rows), eval_batch_size=2)
    module.setup("test")
    (batch,) = module.test_dataloader()
    assert len(batch["image"]) == 2
    assert batch["image_index"].tolist() == [0, 0, 0, 1, 1]
    assert batch["sample_index"].tolist() == [0, 2, 4, 1, 3]
    assert batch["question_id"] == ["10", "12", "14", "11", "13"]
    assert batch["answers"] == [[]] * 5


def test_parquet_with_embedded_images_and_csv_are_read(folder):
    images = [{"bytes": encoded(draw_image(n), "PNG"), "path": None} for n in range(3)]
    table = {"image": images, "question": ["what is it?"] * 3, "answers": [["dog", "dog"], ["cat"], ["red"]]}
    pq.write_table(pa.table(table), folder / "own.parquet")
    (folder / "own.csv").write_text("image,question,answers\n0.png,is it red?,two\n")
    options = {"image_root": str(folder / "coco"), "image_roots": None, "batch_size": 4}
    module = data(folder, train=[str(folder / "own.parquet"), str(folder / "own.csv")], **options)
    module.setup("fit")
    batch = next(iter(module.train_dataloader()))
    assert sorted(batch["answer_weight"].tolist()) == [1.0] * 4
    assert len(module._opened("train").images()) == 4


def test_bad_rows_are_counted_by_cause(folder):
    good = {"dataset": "vqa", "image": "0.png", "question": "what is it?", "answer": ["dog"]}
    bad = [
        good | {"image": "none.png"},
        good | {"image": "../vg/0.png"},
        good | {"question": "?!"},
        good | {"question": None},
        good | {"answer": ["", " "]},
        "text",
    ]
    module = data(folder, train=write(folder, "rows.json", [good] * 20 + bad), batch_size=26, max_bad_share=0.5)
    module.setup("fit")
    next(iter(module.train_dataloader()))
    causes = module.account("train").causes
    named = {"missing file", "outside image_root", "empty question", "no question", "no answer", "no object"}
    assert set(causes) == named


@pytest.mark.parametrize("most", [2, 3])
def test_questions_of_an_image_share_it_and_each_is_asked_once_in_an_epoch(folder, most):
    vqa = [
        {"dataset": "vqa", "image": f"{n % 3}.png", "question": f"what {n} is it?", "answer": ["dog"]} for n in range(8)
    ]
    vg = [{"dataset": "vg", "image": "0.png", "question": f"is it {n}?", "answer": "red"} for n in range(5)]
    sources = [write(folder, "vqa.json", vqa), write(folder, "vg.json", vg)]
    module = data(folder, train=sources, questions_per_image=most, batch_size=1)
    module.setup("fit")
    rows, asked = module._opened("train"), []
    sizes = {2: [2 + 2 + 1, 3], 3: [3, 2]}[most]  # images of 3, 3 and 2 questions, and of 5
    assert module.training_mix(rows).sizes == sizes
    batches = list(module.train_dataloader())
    assert len(batches) == sum(sizes)
    for batch in batches:
        indices = batch["sample_index"].tolist()
        asked += indices
        assert batch["image_index"].tolist() == [0] * len(indices)
        assert len(batch["image"]) == 1
        assert 1 <= len(indices) <= most
        assert len({rows.image_name(row) for row in indices}) == 1
        assert batch["answer_index"].tolist() == list(range(len(indices)))
        assert batch["answer_weight"].tolist() == [1.0 if row < 8 else 0.5 for row in indices]
    assert sorted(asked) == list(range(13))


def test_an_unusable_question_of_a_group_is_counted_and_the_others_are_asked(folder):
    good = {"dataset": "vqa", "image": "0.png", "question": "what is it?", "answer": ["dog"]}
    rows = [good, good | {"question": "?!"}, good, good | {"answer": [" "]}]
    options = {"questions_per_image": 4, "batch_size": 1, "max_bad_share": 0.5}
    module = data(folder, train=write(folder, "rows.json", rows), **options)
    module.setup("fit")
    (batch,) = module.train_dataloader()
    assert batch["sample_index"].tolist() == [0, 2]
    account = module.account("train")
    assert (account.num_read, dict(account.causes)) == (4, {"empty question": 1, "no answer": 1})


def test_drawn_images_have_questions_of_all_kinds():
    module = ShapesVQADataModule(length=3, questions_per_image=4, batch_size=3, image_size=16, num_workers=0)
    module.setup("fit")
    rows = module._opened("train")
    (batch,) = module.train_dataloader()
    assert batch["image_index"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    indices = batch["sample_index"].tolist()
    assert sorted(indices) == list(range(12))
    for place in range(3):
        own = indices[4 * place : 4 * place + 4]
        assert len({rows.image_name(row) for row in own}) == 1
        assert rows.question(own[3]).startswith("is there")


def test_a_share_of_the_images_is_held_out(folder):
    for number in range(4, 40):
        draw_image(0).save(folder / "coco" / f"{number}.png")
    rows = [
        {"dataset": "vqa", "image": f"{number}.png", "question": f"what is {turn}?", "answer": ["dog"]}
        for turn in range(2)
        for number in range(40)
    ]
    path = write(folder, "rows.json", rows)
    module = data(folder, train=path, held_out=0.3)
    module.setup("fit")
    parts = {split: module._opened(split) for split in ("train", "validation")}
    images = {split: {table.image_name(row) for row in range(len(table))} for split, table in parts.items()}
    assert len(images["train"] & images["validation"]) == 0
    assert len(images["train"] | images["validation"]) == 40
    assert 4 <= len(images["validation"]) <= 20
    assert sum(map(len, parts.values())) == 80
    other = data(folder, train=write(folder, "shuffled.json", rows[::-1]), held_out=0.3)
    other.setup("fit")
    again = other._opened("validation")
    assert {again.image_name(row) for row in range(len(again))} == images["validation"]


def test_the_list_of_answers_is_read_without_empty_and_repeated_ones(folder):
    module = data(folder, answer_list=write(folder, "answers.json", ["dog", "", "cat", "dog"]))
    assert module.answers == ("dog", "cat")
    assert module.decode_answers(module.encoded_answers["answer_ids"]) == ["dog", "cat"]
    with pytest.raises(UserError, match="Expected a JSON list of answers"):
        _ = data(folder, answer_list=write(folder, "object.json", {"dog": 1})).answers


def test_a_missing_column_is_named(folder):
    module = data(folder, train=write(folder, "rows.json", [{"image": "0.png", "questions": "what", "answer": "dog"}]))
    with pytest.raises(UserError, match=r"Expected the column 'question'.*'questions'"):
        module.setup("fit")


def test_drawn_questions_have_true_answers():
    module = ShapesVQADataModule(length=200, eval_length=40)
    module.setup("fit")
    table = module._opened("validation")
    for row in range(len(table)):
        scene, (question, answer) = table._shapes.scene(row // 4), table.asked(row)
        things = (scene.first, scene.second)
        words = question.rstrip("?").split()
        if question.startswith("what color"):
            assert [thing.color for thing in things if thing.shape == words[-1]] == [answer]
        elif question.startswith("what shape"):
            assert [thing.shape for thing in things if thing.color == words[-1]] == [answer]
        elif question.startswith("how many"):
            count = sum(words[2].startswith(thing.shape) for thing in things)
            assert answer == ("none", "one", "two")[count]
        else:
            there = any((thing.color, thing.shape) == (words[3], words[4]) for thing in things)
            assert answer == ("yes" if there else "no")
        assert answer in module.answers
    assert table.images()[1] == [4, 5, 6, 7]
