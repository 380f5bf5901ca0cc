"""An evaluation whose rows are in files is that of rows in main memory, on one process and on two."""

import os
import tempfile
from pathlib import Path

import pytest
import torch

from support.runs.distributed import run_distributed
from vlightning.callbacks import rank
from vlightning.common.errors import UserError
from vlightning.lightning_modules.evaluation import rows
from vlightning.lightning_modules.evaluation.retrieval import RetrievalEvaluation
from vlightning.lightning_modules.evaluation.rows import CollectedRows

IMAGES = 301
TENSORS = ("image_features", "text_features", "sample_index", "input_ids", "attention_mask", "text_index")


def evaluated(shares, limit, folder):
    """What an evaluation has, with rows of some bytes in main memory and the others in a folder."""
    rows.IN_MEMORY = limit
    rows._BLOCK = 1000  # rows of a process are sent in many blocks
    tempfile.tempdir = str(folder)
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(IMAGES, 16, generator=generator)
    text = image.repeat_interleave(3, 0) + torch.randn(3 * IMAGES, 16, generator=generator)
    image[7] = torch.nan
    evaluation = RetrievalEvaluation(protocols=["karpathy5", "paper"], median_rank_fold=50)
    start, stop = shares[rank()]
    for first in range(start, stop, 32):
        numbers = torch.arange(first, min(first + 32, stop))
        texts = (3 * numbers[:, None] + torch.arange(3)).flatten()
        ids = texts[:, None].expand(-1, 4 + first // 32 % 3)  # batches are padded to their own longest text
        ids = ids * (torch.arange(ids.shape[1]) < 4)  # by which all texts have four tokens
        evaluation.add_images(image[numbers], numbers, numbers)
        evaluation.add_texts(text[texts], ids, (ids > 0).long(), texts // 3, texts // 2, texts)
    result = evaluation.compute()
    tempfile.tempdir = None  # that of the processes that a test starts
    tensors = [getattr(result, name).clone() for name in TENSORS]
    near = [result.near_texts.index, result.near_images.index, result.non_finite_images]
    return result.recalls, tensors + near


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(rows, "IN_MEMORY", rows.IN_MEMORY)
    monkeypatch.setattr(rows, "_BLOCK", rows._BLOCK)


def test_rows_in_files_have_the_metrics_of_rows_in_main_memory(tmp_path):
    recalls, tensors = evaluated([(0, IMAGES)], 2**30, tmp_path)
    assert len(recalls) == 4 * 7 + 2
    assert 20 < recalls["karpathy5/recall_mean"] < 99
    found, in_files = evaluated([(0, IMAGES)], 3000, tmp_path)
    assert found == recalls
    assert not list(tmp_path.iterdir())
    for one, other in zip(tensors, in_files, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shares", [[(0, 150), (150, IMAGES)], [(0, IMAGES), (0, 0)], [(0, 20), (20, IMAGES)]])
def test_two_processes_share_a_file_with_the_rows_of_both(tmp_path, shares):
    recalls, tensors = evaluated([(0, IMAGES)], 2**30, tmp_path)
    for found, in_files in run_distributed(evaluated, shares, 3000, tmp_path):
        assert found == recalls
        for one, other in zip(tensors, in_files, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def mapped_file():
    rows.IN_MEMORY = 100
    column = CollectedRows()
    column.add(torch.full((50, 2), float(rank())))
    gathered = column.gathered(torch.zeros(0, 2))
    maps = Path("/proc/self/maps").read_text().splitlines()
    return gathered[[0, 49, 50, 99], 0], {line.split()[4] for line in maps if "vlightning-" in line}


def test_processes_of_a_machine_hold_the_rows_of_all_once():
    found = run_distributed(mapped_file)
    for values, _ in found:
        assert values.tolist() == [0, 0, 1, 1]
    (one,), (other,) = (inodes for _, inodes in found)
    assert one == other


def test_a_full_disk_is_one_sentence(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"Expected room for 4,000 bytes of features in .*: set TMPDIR to a folder"):
        rows._new_file(4000)
