"""Conversion of a checkpoint to the other kind and back is bit-exact, including tied tensors."""

import pytest
import torch

from support.runs.command_line import convert as main
from vlightning.callbacks import AtomicCheckpointIO


@pytest.fixture
def checkpoint(tmp_path):
    tied = torch.randn(7, 3)
    content = {
        "epoch": 2,
        "state_dict": {"a.weight": tied, "b.weight": tied, "scale": torch.randn(1), "pointer": torch.tensor(4)},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.randn(7, 3), "step": torch.tensor(9.0)}}}],
        "loops": {"seen": torch.arange(5)},
    }
    AtomicCheckpointIO().save_checkpoint(content, tmp_path / "one.ckpt")
    return tmp_path / "one.ckpt"


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_conversion_to_a_folder_and_back_is_exact(checkpoint, tmp_path, processes, capsys):
    folder, again = tmp_path / "many.ckpt", tmp_path / "again.ckpt"
    main([str(checkpoint), str(folder), "--processes", str(processes)])
    assert capsys.readouterr().out == f"Wrote {folder}.\n"
    shards = [f"shard-{number:05d}.pt" for number in range(processes)]
    assert sorted(file.name for file in folder.iterdir()) == ["meta.pt", *shards]
    first = torch.load(folder / "shard-00000.pt", weights_only=True)
    assert first["state_dict/a.weight"].shape == (-(-7 // processes), 3)
    assert first["state_dict/a.weight"].data_ptr() == first["state_dict/b.weight"].data_ptr()
    main([str(folder), str(again)])
    one, other = (torch.load(path, weights_only=True) for path in (checkpoint, again))
    torch.testing.assert_close(other, one, rtol=0, atol=0)
    assert other["state_dict"]["a.weight"].data_ptr() == other["state_dict"]["b.weight"].data_ptr()


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (("missing.ckpt", "new.ckpt"), 1, "a file or a folder, got 'missing.ckpt', which does not exist"),
        (("one.ckpt", "one.ckpt"), 1, "Expected a new name or an empty folder, got 'one.ckpt', which exists"),
        (("one.ckpt", "new.ckpt", "--processes", "0"), 1, "Expected a number of processes of at least 1, got 0"),
        ((".", "new.ckpt", "--processes", "2"), 2, "Expected --processes with a checkpoint in one file, got a folder"),
        ((".", "new.ckpt"), 1, "not a checkpoint (there is no meta.pt in the folder"),
    ],
)
def test_user_errors_are_one_sentence(checkpoint, monkeypatch, capsys, words, status, sentence):
    monkeypatch.chdir(checkpoint.parent)
    with pytest.raises(SystemExit) as stopped:
        main(list(words))
    assert stopped.value.code == status
    assert sentence in capsys.readouterr().err
    assert [path.name for path in checkpoint.parent.iterdir()] == ["one.ckpt"]
