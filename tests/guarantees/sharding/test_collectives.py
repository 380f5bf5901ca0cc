"""NCCL's rules, on what two processes of each method send over gloo."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from support.methods.random_batches import NAMES, random_rows, small
from support.runs.collectives import RecordCollectives, first_difference, object_collectives_in_steps
from support.runs.distributed import rank_trainer, run_distributed
from vlightning.callbacks import SkipNonFiniteSteps, StepSeedCallback, StopOnSignal

ROWS, STEPS, BAD = 4, 4, 2


class Evaluated(torch.utils.data.IterableDataset):
    """A batch of an evaluation; in the first pass the last process has fewer rows, then none, as with bad rows."""

    def __init__(self, name):
        self.name, self.rows = name, [ROWS, ROWS - 1][dist.get_rank()]

    def __iter__(self):
        rows = random_rows(self.name, ROWS)
        if self.name != "cocord":
            ids = dist.get_rank() * ROWS + torch.arange(ROWS)
            rows |= {key: ids for key in ("image_id", "sample_index", "text_image_id", "text_id")}
            rows = {"attention_mask": torch.ones_like(rows["input_ids"])} | rows
        yield {key: column[: self.rows] for key, column in rows.items()}
        self.rows = 0 if dist.get_rank() else ROWS

    def __len__(self):
        return 1


def batches(name):
    """One batch of the last process has a NaN, for which all skip the step."""
    for number in range(STEPS):
        rows = {key: column.clone() for key, column in random_rows(name, ROWS).items()}
        if number == BAD and dist.get_rank():
            rows["image"][0, 0, 0, 0] = torch.nan
        yield rows


def record(name, kind="ddp", plant=None):
    with tempfile.TemporaryDirectory() as folder:
        module, own, skip = small(name, Path(folder)), RecordCollectives(), SkipNonFiniteSteps()
        callbacks = [own, skip, StopOnSignal(), StepSeedCallback()]
        options = {"max_steps": STEPS, "val_check_interval": STEPS // 2, "num_sanity_val_steps": 0}
        trainer = rank_trainer(kind, callbacks=callbacks, default_root_dir=folder, **options)
        if plant is not None:
            step = module.training_step
            module.training_step = lambda *given: plant() or step(*given)
        train = DataLoader(list(batches(name)), batch_size=None)
        trainer.fit(module, train, DataLoader(Evaluated(name), batch_size=None))
    assert skip.skipped_steps == 1
    return own.recorded.calls


def another_order():
    """Two sums of equal size that gloo cannot tell apart."""
    types = [torch.float32, torch.int32]
    for dtype in types if dist.get_rank() else reversed(types):
        dist.all_reduce(torch.zeros(3, dtype=dtype))


def an_object():
    dist.all_gather_object([None] * dist.get_world_size(), "text")


def record_all():
    found = {name: record(name) for name in NAMES}
    found["sharded"] = record("mmlg", "sharded")
    for plant in (another_order, an_object):
        found[plant.__name__] = record("mmlg", plant=plant)
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_distributed(record_all, timeout=300)


@pytest.mark.parametrize("name", [*NAMES, "sharded"])
def test_processes_send_the_same_in_the_same_order_and_no_objects_in_steps(name, ranks):
    calls = [rank[name] for rank in ranks]
    assert first_difference(calls) is None
    assert object_collectives_in_steps(calls[0]) == []
    names = [call[0] for call in calls[0]]
    assert names.count("batch") == names.count("end of batch") == STEPS
    assert {"allreduce_", "broadcast_"} & set(names) or name == "sharded"
    assert sum(name.endswith(("base_", "out", "tensor_coalesced_")) for name in names) > STEPS


def test_another_order_and_objects_are_found(ranks):
    found = first_difference([rank["another_order"] for rank in ranks])
    assert [call[1][0][0] for call in found] == ["torch.int32", "torch.float32"]
    for rank in ranks:
        assert object_collectives_in_steps(rank["an_object"]) == ["object: all_gather_object"] * STEPS
