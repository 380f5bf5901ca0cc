import copy

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from torch import nn

from support.methods.tiny_modules import DIM, Student, loader, trainer
from support.runs.distributed import run_ddp_fit
from vlightning.callbacks import EMACallback, FeatureQueue, QueueCallback, rank
from vlightning.callbacks.queue import NO_ID
from vlightning.common.errors import UserError


class SlowQueue:
    """The definition: one finite row after the other."""

    def __init__(self, size, dim):
        self.features, self.ids = torch.zeros(size, dim), torch.full((size,), NO_ID)
        self.pointer = self.filled = 0

    def enqueue(self, features, ids):
        for row, number in zip(features, ids, strict=True):
            if not all(torch.isfinite(value) for value in row):
                continue
            self.features[self.pointer] = row
            self.ids[self.pointer] = number
            self.pointer = (self.pointer + 1) % len(self.ids)
            self.filled = min(self.filled + 1, len(self.ids))


def test_batches_of_any_size_equal_row_by_row_writing():
    random = torch.Generator().manual_seed(3)
    tried = {"wrapped": 0, "larger": 0, "dropped": 0, "all dropped": 0}
    for _ in range(150):
        size, dim = (int(torch.randint(1, 14, (), generator=random)) for _ in range(2))
        queue, slow = FeatureQueue(size, dim, ids=True), SlowQueue(size, dim)
        for _ in range(8):
            batch = int(torch.randint(0, 3 * size + 3, (), generator=random))
            rows = torch.randn(batch, dim, generator=random)
            ids = torch.randint(0, 1000, (batch,), generator=random)
            bad = torch.rand(batch, generator=random) < torch.rand((), generator=random) * 0.8
            spoilt = torch.tensor([torch.nan, torch.inf, -torch.inf])[torch.arange(batch) % 3]
            column = torch.randint(0, dim, (batch,), generator=random)
            rows[bad, column[bad]] = spoilt[bad]
            tried["wrapped"] += slow.pointer + int((~bad).sum()) > size
            tried["larger"] += batch > size
            tried["dropped"] += bool(bad.any() and not bad.all())
            tried["all dropped"] += bool(batch and bad.all())
            queue.enqueue(rows, ids)
            slow.enqueue(rows, ids)
            assert torch.equal(queue.features, slow.features)
            assert torch.equal(queue.ids, slow.ids)
            assert int(queue.pointer) == slow.pointer
            assert int(queue.filled) == slow.filled
            assert queue.valid.tolist() == [slot < slow.filled for slot in range(size)]
    assert min(tried.values()) >= 5, tried  # every case of interest did come up


def test_several_ids_of_a_row_are_written_as_one_queue_for_each_would():
    both, each = FeatureQueue(5, 2, ids=2), [FeatureQueue(5, 2, ids=1) for _ in range(2)]
    for batch in (3, 4, 9):
        rows, ids = torch.randn(batch, 2), torch.randint(0, 100, (batch, 2))
        rows[1] = torch.nan
        both.enqueue(rows, ids)
        for column, queue in enumerate(each):
            queue.enqueue(rows, ids[:, column])
            assert torch.equal(queue.ids, both.ids[:, column])
    with pytest.raises(ValueError, match=r"Expected ids \[3, 2\], 2 for each row, got ids of shape \[3\]"):
        both.enqueue(torch.zeros(3, 2), torch.arange(3))


def test_a_checkpoint_with_another_number_of_ids_keeps_those_that_the_queue_has():
    one, two = FeatureQueue(3, 1, ids=1), FeatureQueue(3, 1, ids=2)
    one.enqueue(torch.ones(2, 1), torch.tensor([5, 6]))
    two.load_state_dict(one.state_dict())
    assert two.ids.tolist() == [[5, NO_ID], [6, NO_ID], [NO_ID, NO_ID]]
    two.enqueue(torch.ones(1, 1), torch.tensor([[7, 8]]))
    one.load_state_dict(two.state_dict())
    assert one.ids.tolist() == [5, 6, 7]


def test_enqueueing_does_not_synchronize_with_the_device():
    # Meta tensors have no values: operations that read one (`.item()`, a boolean index) raise.
    queue = FeatureQueue(5, 3, ids=True).to("meta")
    for batch in (1, 5, 12):
        queue.enqueue(torch.empty(batch, 3, device="meta"), torch.empty(batch, dtype=torch.long, device="meta"))
    assert queue.valid.device.type == "meta"


def test_rows_are_written_in_place_and_without_gradient():
    queue = FeatureQueue(4, 2)
    pointers = {name: buffer.data_ptr() for name, buffer in queue.named_buffers()}
    queue.enqueue(torch.ones(3, 2, requires_grad=True))
    assert {name: buffer.data_ptr() for name, buffer in queue.named_buffers()} == pointers
    assert not queue.features.requires_grad


def test_a_value_that_overflows_the_buffer_is_not_written():
    queue = FeatureQueue(2, 1)
    queue.enqueue(torch.tensor([[1e300], [7.0]], dtype=torch.float64))
    assert queue.features.flatten().tolist() == [7.0, 0.0]


def test_an_empty_queue_has_no_valid_slot_and_a_random_one_unit_rows():
    empty, full = FeatureQueue(6, 3, ids=True), FeatureQueue(6, 3, ids=True, random_start=True)
    assert not empty.valid.any()
    assert full.valid.all()
    torch.testing.assert_close(full.features.norm(dim=1), torch.ones(6))
    assert full.ids.tolist() == [NO_ID] * 6
    assert empty.pointer.shape == empty.filled.shape == ()


def test_the_checkpoint_contains_the_whole_queue():
    queue, other = FeatureQueue(6, 3, ids=True), FeatureQueue(6, 3, ids=True)
    queue.enqueue(torch.randn(8, 3), torch.arange(8))
    assert set(queue.state_dict()) == {"features", "ids", "pointer", "filled"}
    assert set(FeatureQueue(6, 3).state_dict()) == {"features", "pointer", "filled"}
    other.load_state_dict(queue.state_dict())
    rows = torch.randn(11, 3)  # a larger batch than before
    for each in (queue, other):
        each.enqueue(rows, torch.arange(11))
    for name, tensor in queue.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])


def test_a_checkpoint_of_another_size_is_refused():
    module, other = nn.ModuleDict({"image": FeatureQueue(6, 3)}), nn.ModuleDict({"image": FeatureQueue(8, 3)})
    with pytest.raises(
        UserError, match=r"Expected 8 rows of 3 values in the checkpoint of the queue 'image', got 6 rows of 3"
    ):
        other.load_state_dict(module.state_dict(), strict=False)


@pytest.mark.parametrize(
    ("with_ids", "features", "ids", "message"),
    [
        (False, (2, 4), None, r"Expected features \[B, 3\], got features of shape \[2, 4\]"),
        (False, (3,), None, r"shape \[3\]"),
        (True, (2, 3), None, "Expected ids with the features, .* got none"),
        (False, (2, 3), (2,), "Expected no ids with the features, .* got ids"),
        (True, (2, 3), (3,), r"Expected ids \[2\], .* got ids of shape \[3\]"),
    ],
)
def test_invalid_rows_are_refused(with_ids, features, ids, message):
    queue = FeatureQueue(5, 3, ids=with_ids)
    with pytest.raises(ValueError, match=message):
        queue.enqueue(torch.zeros(features), None if ids is None else torch.zeros(ids, dtype=torch.long))


@pytest.mark.parametrize("ids", [0, 1, 2])
def test_a_queue_of_size_zero_stays_empty_and_a_negative_one_is_refused(ids):
    queue = FeatureQueue(0, 3, ids=ids, random_start=True)
    row_ids = torch.zeros((4, ids) if ids > 1 else 4, dtype=torch.long) if ids else None
    before = queue.next_slots(4)
    queue.enqueue(torch.randn(4, 3), row_ids)
    queue.put_back(before)
    assert queue.features.shape == (0, 3)
    assert (int(queue.pointer), int(queue.filled), len(queue.valid)) == (0, 0, 0)
    other = FeatureQueue(0, 3, ids=ids)
    other.load_state_dict(queue.state_dict())
    with pytest.raises(ValueError, match=r"Expected features \[B, 3\]"):
        queue.enqueue(torch.randn(4, 2), row_ids)
    with pytest.raises(UserError, match="Expected size of FeatureQueue of at least 0, got -1"):
        FeatureQueue(-1, 3)


class Queued(Student):
    """Enqueues its inputs, and records for each batch whether its own rows were in the queue of its loss."""

    def __init__(self, size=7):
        super().__init__()
        self.bank = FeatureQueue(size, DIM, ids=True)
        self.seen, self.saw_itself = [], []

    def queues(self):
        return {"rows": self.bank}

    def training_step(self, batch, batch_idx):
        own = (batch[:, None, :] == self.bank.features[self.bank.valid]).all(dim=2)
        self.saw_itself.append(bool(own.any()))
        self.seen.append(batch)
        keys = self.student(batch) * 0 + batch  # with a gradient, as a forgetful module would return them
        ids = torch.arange(len(batch)) + 100 * batch_idx
        return {"loss": super().training_step(batch, batch_idx), "keys": {"rows": keys}, "key_ids": {"rows": ids}}


def test_every_batch_is_enqueued_after_its_loss_also_under_accumulation():
    module = Queued(size=7)
    run = trainer(QueueCallback(), accumulate_grad_batches=4)
    run.fit(module, loader(5))
    assert run.global_step == 2
    assert module.saw_itself == [False] * 5
    slow = SlowQueue(7, DIM)
    for number, rows in enumerate(module.seen):
        slow.enqueue(rows, torch.arange(2) + 100 * number)
    assert torch.equal(module.bank.features, slow.features)
    assert torch.equal(module.bank.ids, slow.ids)
    assert not module.bank.features.requires_grad
    assert run.callback_metrics["queue/rows_filled"] == 1.0


def test_paths_name_queues_that_the_module_does_not_list():
    module = Queued(size=20)
    module.queues = None
    run = trainer(QueueCallback({"rows": "bank"}))
    run.fit(module, loader(3))
    assert int(module.bank.filled) == 6
    assert run.callback_metrics["queue/rows_filled"].item() == pytest.approx(0.3)


def test_validation_enqueues_nothing():
    module = Queued(size=50)
    trainer(QueueCallback()).fit(module, loader(3), loader(4, seed=1))
    assert int(module.bank.filled) == 6


def returning(result):
    module = Queued()
    module.training_step = lambda batch, batch_idx: result(module.student(batch).sum(), batch)
    return module


def test_a_step_that_returns_none_enqueues_nothing():
    module = returning(lambda loss, batch: None)
    trainer(QueueCallback()).fit(module, loader(2))
    assert int(module.bank.filled) == 0


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            lambda loss, batch: loss,
            r"'keys': \{'rows'.* from training_step of Queued, got a dict with \['loss'\]",
        ),
        (lambda loss, batch: {"loss": loss, "keys": batch}, "Expected .*'keys': {'rows'"),
        (lambda loss, batch: {"loss": loss, "keys": {}}, "keys for the queue 'rows' .*, got none: there are none"),
        (
            lambda loss, batch: {"loss": loss, "keys": {"row": batch}},
            "got keys 'row': did you mean 'rows'",
        ),
        (
            lambda loss, batch: {"loss": loss, "keys": {"rows": batch}, "key_ids": {"rosw": batch}},
            "keys of known queues .*, got keys 'rosw'",
        ),
        (
            lambda loss, batch: {"loss": loss, "keys": {"rows": batch[:, 1:]}},
            r"Expected features \[B, 4\], got features of shape \[2, 3\].*keys of the queue 'rows'",
        ),
        (lambda loss, batch: {"loss": loss, "keys": {"rows": batch}}, r"Expected ids.*keys of the queue 'rows'"),
    ],
)
def test_invalid_outputs_of_a_step_are_refused_with_one_sentence(result, message):
    with pytest.raises(UserError, match=message):
        trainer(QueueCallback()).fit(returning(result), loader(1))


@pytest.mark.parametrize(
    ("queues", "error", "message"),
    [
        ({"rows": "bnak"}, UserError, r"path 'bnak' \(the queue 'rows'\).*did you mean 'bank'"),
        ({"rows": "student"}, UserError, "Expected a FeatureQueue .*, got a Linear"),
    ],
)
def test_invalid_paths_are_refused_before_the_first_batch(queues, error, message):
    module = Queued()
    module.on_train_start = lambda: pytest.fail("training began")
    with pytest.raises(error, match=message):
        trainer(QueueCallback(queues)).fit(module, loader(1))


class Weights(EMAWeightAveraging):
    """A subclass of another project."""


@pytest.mark.parametrize("kind", [WeightAveraging, EMAWeightAveraging, Weights])
def test_lightnings_weight_averaging_is_refused_if_it_averages_the_queue(kind):
    with pytest.raises(UserError, match=rf"use_buffers=False of Lightning's {kind.__name__} beside a queue, got True"):
        trainer(kind(), QueueCallback()).fit(Queued(), loader(2))
    module = Queued()
    trainer(QueueCallback(), kind(use_buffers=False)).fit(module, loader(2))
    assert int(module.bank.filled) == 4


def test_a_module_without_queues_is_refused_with_advice():
    with pytest.raises(UserError, match=r"none from queues\(\) of Student"):
        trainer(QueueCallback()).fit(Student(), loader(1))
    with pytest.raises(UserError, match="empty dict"):
        QueueCallback({})
    module = Queued()
    module.queues = lambda: {"rows": torch.zeros(2)}
    with pytest.raises(UserError, match=r"Expected a FeatureQueue as 'rows' .*, got a Tensor"):
        trainer(QueueCallback()).fit(module, loader(1))


def make_ddp():
    torch.manual_seed(0)
    return Queued(size=9), loader(8, batch_size=3)


def collect(run):
    module: LightningModule = run.lightning_module
    return {"bank": module.bank.state_dict(), "seen": module.seen, "itself": module.saw_itself, "rank": rank()}


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_ranks_have_equal_queues_with_all_rows_in_rank_order(broadcast_buffers):
    kwargs = {"callbacks": [QueueCallback()], "max_epochs": 1}
    ranks = run_ddp_fit(make_ddp, kwargs, ddp_kwargs={"broadcast_buffers": broadcast_buffers}, collect=collect)
    assert [result["rank"] for result in ranks] == [0, 1]
    assert not torch.equal(ranks[0]["seen"][0], ranks[1]["seen"][0])
    slow = SlowQueue(9, DIM)
    for number in range(4):
        for result in ranks:
            slow.enqueue(result["seen"][number], torch.arange(3) + 100 * number)
    for result in ranks:
        assert result["itself"] == [False] * 4
        assert torch.equal(result["bank"]["features"], slow.features)
        assert torch.equal(result["bank"]["ids"], slow.ids)
        assert int(result["bank"]["pointer"]) == slow.pointer == 24 % 9


def make_unlike():
    torch.manual_seed(rank())
    module = Queued(size=9)
    module.bank = FeatureQueue(9, DIM, ids=True, random_start=True)
    module.register_buffer("other", torch.zeros(2))
    module.start = {}

    def look():
        module.start["bank"] = module.bank.features.clone()
        module.start["sent"] = [tuple(buffer.shape) for buffer in module.trainer.strategy.model.modules_buffers]

    module.on_train_start = look
    return module, loader(2, batch_size=3)


def collect_start(run):
    return run.lightning_module.start


def test_ranks_start_with_rank_0s_queue_which_ddp_does_not_broadcast():
    kwargs = {"callbacks": [QueueCallback()], "max_epochs": 1}
    first, second = run_ddp_fit(make_unlike, kwargs, collect=collect_start)
    torch.manual_seed(0)
    Queued(size=9)
    assert torch.equal(first["bank"], FeatureQueue(9, DIM, ids=True, random_start=True).features)
    assert torch.equal(first["bank"], second["bank"])
    assert first["sent"] == second["sent"] == [(2,)]


def make_resumable():
    torch.manual_seed(0)
    return Queued(size=9), loader(8, batch_size=3)


def save(run):
    run.save_checkpoint(run.default_root_dir + "/half.ckpt")
    return collect(run)


def test_every_rank_resumes_with_the_whole_queue(tmp_path):
    # Lightning saves the buffers of rank 0 only.
    callbacks = {"callbacks": [QueueCallback(), EMACallback()], "default_root_dir": str(tmp_path)}
    half = run_ddp_fit(make_resumable, callbacks | {"max_epochs": 1}, collect=save)
    path = str(tmp_path / "half.ckpt")
    rest = run_ddp_fit(make_resumable, callbacks | {"max_epochs": 2}, collect=collect, ckpt_path=path)
    whole = run_ddp_fit(make_resumable, callbacks | {"max_epochs": 2}, collect=collect)
    for stopped, resumed, straight in zip(half, rest, whole, strict=True):
        assert not torch.equal(stopped["bank"]["features"], straight["bank"]["features"])
        # The loader of this test shuffles by Lightning's sampler, from the epoch alone.
        assert torch.equal(resumed["seen"][-1], straight["seen"][-1])
        for name, tensor in straight["bank"].items():
            assert torch.equal(resumed["bank"][name], tensor), name


def test_a_copied_queue_is_independent():
    queue = FeatureQueue(3, 2)
    other = copy.deepcopy(queue)
    other.enqueue(torch.ones(1, 2))
    assert int(queue.filled) == 0
