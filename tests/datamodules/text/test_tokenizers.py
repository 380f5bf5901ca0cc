import os
import random
import re
import string

import pytest
import torch

from support.runs.distributed import run_distributed
from vlightning.common.errors import UserError
from vlightning.common.tokenizers import open_tokenizer, set_ending, tokenizer_from_json
from vlightning.datamodules.text import tokenizers
from vlightning.datamodules.text.captions import clean_caption, text_id, usable_caption
from vlightning.datamodules.text.tokenizers import TextEncoder, train_wordpiece

CAPTIONS = ["A red circle above a blue square", "a small Green cross, left of it", "naïve café: the square's edge"] * 3
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "circle", "##s"]


def plain_cleaning(caption, max_words):
    """Character by character, in the order of the specification."""
    text = "".join(" " if c in "-/" else c for c in caption.lower() if c not in ",.'!?\"()*#:;~")
    text = text.replace("<person>", "person")
    out = ""
    while text:
        run = re.match(r"\s+", text)
        if run and len(run[0]) >= 2:
            out, text = out + " ", text[len(run[0]) :]
        else:
            out, text = out + text[0], text[1:]
    while out.endswith("\n"):
        out = out[:-1]
    while out.startswith(" "):
        out = out[1:]
    while out.endswith(" "):
        out = out[:-1]
    return " ".join(out.split(" ")[:max_words])


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("A man, riding a horse.", "a man riding a horse"),
        ("well-known black/white photo", "well known black white photo"),
        ("<PERSON> and <person>'s dog!", "person and persons dog"),
        ("too   many \t spaces\n\n", "too many spaces"),
        ("one trailing newline\n", "one trailing newline"),
        ('(a) "b" *c* #d: e; f~', "a b c d e f"),
        ("...", ""),
        ("tab\tstays", "tab\tstays"),
    ],
)
def test_cleaning_follows_the_authors_rules(raw, clean):
    assert clean_caption(raw) == clean


def test_cleaning_equals_a_plain_reference_on_random_text():
    draws = random.Random(0)
    letters = string.ascii_letters + ",.'!?\"()*#:;~-/ \n\t  " * 3 + "é"
    for _ in range(500):
        text = "".join(draws.choices(letters, k=draws.randrange(60)))
        text = text.replace("a", "<person>", draws.randrange(2))
        words = draws.choice([2, 5, 30])
        assert clean_caption(text, words) == plain_cleaning(text, words)


def test_cleaning_keeps_so_many_words():
    assert clean_caption("a b c d e", max_words=3) == "a b c"


def test_trained_tokenizer_has_berts_ids_and_at_most_vocab_size_entries():
    tokenizer = tokenizer_from_json(train_wordpiece(CAPTIONS, 200))
    assert len(tokenizer) <= 200
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused1]", "[unused99]"]
    assert tokenizer.convert_tokens_to_ids(tokens) == [0, 100, 101, 102, 103, 1, 99]
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    set_ending(tokenizer, append_sep=True)
    assert tokenizer.decode(tokenizer("A RED café")["input_ids"]) == "[CLS] a red cafe [SEP]"


def test_reserved_slots_are_not_matched_inside_text():
    tokenizer = tokenizer_from_json(train_wordpiece(CAPTIONS, 200))
    assert 5 not in tokenizer("the [unused5] square", add_special_tokens=False)["input_ids"]


def test_training_gives_the_same_tokenizer_in_every_process():
    assert run_distributed(train_wordpiece, CAPTIONS, 190) == [train_wordpiece(CAPTIONS, 190)] * 2


def test_captions_that_are_normalized_together_train_the_tokenizer_of_single_ones(monkeypatch):
    draws = random.Random(0)
    letters = "abcdefgh AB é ü Σσς 中文 \u0301\u0323 .,!?'-()\t\nİß"
    captions = ["".join(draws.choices(letters, k=draws.randint(0, 40))) for _ in range(1500)]
    for size in (140, 200, 600):
        together = train_wordpiece(captions, size)
        with monkeypatch.context() as patch:
            patch.setattr(tokenizers, "_CAPTIONS_AT_ONCE", 1)
            assert train_wordpiece(captions, size) == together


def test_rare_letters_give_way_in_a_small_vocabulary():
    captions = ["red circle"] * 50 + ["".join(chr(0x4E00 + i) for i in range(500))]
    tokenizer = tokenizer_from_json(train_wordpiece(captions, 160))
    assert len(tokenizer) <= 160
    assert "[UNK]" not in tokenizer.tokenize("red circle")


def test_a_vocabulary_without_room_is_an_error():
    with pytest.raises(UserError, match=r"vocab_size of at least 108 .* got 104"):
        train_wordpiece(CAPTIONS, 104)


@pytest.fixture
def bert(tmp_path):
    path = tmp_path / "some-vocab.txt"
    path.write_text("\n".join(VOCABULARY))
    return open_tokenizer(str(path))


def test_vocabulary_file_and_its_folder_open_alike(bert, tmp_path):
    assert bert.tokenize("A red circles") == ["a", "red", "circle", "##s"]
    assert open_tokenizer(str(tmp_path)).get_vocab() == bert.get_vocab()


def test_saved_folder_opens(bert, tmp_path):
    bert.save_pretrained(tmp_path / "saved")
    assert open_tokenizer(str(tmp_path / "saved")).get_vocab() == bert.get_vocab()


def test_wrong_tokenizers_are_named(tmp_path):
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(UserError, match=r"without \[PAD\], \[UNK\]"):
        open_tokenizer(str(tmp_path / "vocab.txt"))
    with pytest.raises(UserError, match="got '/nowhere/at/all': correct the path"):
        open_tokenizer("/nowhere/at/all")


@pytest.mark.parametrize(("append_sep", "expected"), [(True, [2, 5, 6, 3, 0]), (False, [2, 5, 6, 0])])
def test_sequences_end_in_sep_or_not(bert, append_sep, expected):
    set_ending(bert, append_sep)
    encode = TextEncoder(bert, max_tokens=25, clean=False, max_words=30)
    batch = encode(["a red", "a red circle"])
    assert batch["input_ids"][0].tolist() == expected
    assert batch["attention_mask"].sum(1).tolist() == [3 + append_sep, 4 + append_sep]
    assert batch["input_ids"].dtype == torch.long


@pytest.mark.parametrize(("append_sep", "end"), [(True, 3), (False, 5)])
def test_long_captions_are_cut_to_max_tokens_with_cls_and_sep(bert, append_sep, end):
    set_ending(bert, append_sep)
    batch = TextEncoder(bert, max_tokens=6, clean=False, max_words=30)(["a " * 50])
    assert batch["input_ids"].shape == (1, 6)
    assert batch["input_ids"][0, 0] == 2
    assert batch["input_ids"][0, -1] == end


@pytest.mark.parametrize(("multiple", "lengths"), [(1, [*range(1, 11)]), (4, [4, 8, 10]), (10, [10]), (64, [10])])
def test_texts_are_padded_to_a_multiple_at_most_to_max_tokens(bert, multiple, lengths):
    encode = TextEncoder(bert, max_tokens=10, clean=False, max_words=30, pad_to_multiple_of=multiple)
    plain = TextEncoder(bert, max_tokens=10, clean=False, max_words=30)
    found = set()
    for words in range(1, 20):
        batch, shorter = encode(["a", "a " * words]), plain(["a", "a " * words])
        length = shorter["input_ids"].shape[1]
        found.add(batch["input_ids"].shape[1])
        assert batch["input_ids"].shape == batch["attention_mask"].shape
        assert all(torch.equal(batch[key][:, :length], shorter[key]) for key in shorter)
        assert (batch["input_ids"][:, length:] == bert.pad_token_id).all()
        assert not batch["attention_mask"][:, length:].any()
    assert sorted(found) == lengths


def test_cleaning_happens_before_encoding(bert):
    batch = TextEncoder(bert, max_tokens=25, clean=True, max_words=2)(["A-red circle"])
    assert batch["input_ids"].tolist() == [[5, 6]]


def test_usable_captions():
    assert usable_caption("...", clean=False, max_words=30)
    assert not usable_caption("...", clean=True, max_words=30)
    assert not usable_caption(" \n", clean=False, max_words=30)
    assert not usable_caption(None, clean=False, max_words=30)


def test_text_ids_are_stable_63_bit_numbers():
    assert text_id("a") == text_id("a") != text_id("a ")
    assert 0 <= text_id("a") < 2**63
    assert text_id("a") == 2340832890917691671


@pytest.mark.skipif("VLIGHTNING_TRIAL_DATA" not in os.environ, reason="VLIGHTNING_TRIAL_DATA names no trial data")
def test_bert_vocabulary_has_the_same_layout():
    path = os.path.join(os.environ["VLIGHTNING_TRIAL_DATA"], "..", "vocab", "bert-base-uncased-vocab.txt")
    tokenizer = open_tokenizer(path)
    assert len(tokenizer) == 30522
    assert tokenizer.convert_tokens_to_ids(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]) == [0, 100, 101, 102, 103]
    set_ending(tokenizer, append_sep=True)
    assert tokenizer("Hello, world!")["input_ids"] == [101, 7592, 1010, 2088, 999, 102]
