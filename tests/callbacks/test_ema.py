import copy
import math

import pytest
import torch
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn

from support.methods.tiny_modules import DIM, Recorder, Student, loader, slow_average, trainer
from support.runs.distributed import run_ddp_fit, run_distributed
from vlightning.callbacks import EMACallback, EMAPair, ema_momentum, rank
from vlightning.common.errors import UserError


def assert_equal_states(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_after_k_updates_the_target_is_the_weighted_average_of_all_sources():
    module = Student(momentum=0.995).double()
    callback = EMACallback()
    start, seen = module.teacher.weight.clone(), []
    for _ in range(40):
        nn.init.normal_(module.student.weight)
        seen.append(module.student.weight.detach().clone())
        callback.update(module)
    m, k = 0.995, len(seen)
    expected = m**k * start + sum((1 - m) * m ** (k - 1 - i) * weight for i, weight in enumerate(seen))
    assert (module.teacher.weight - expected).abs().max() < 1e-12


def test_training_updates_once_per_optimizer_step_under_accumulation():
    module, recorder = Student(momentum=0.7), Recorder()
    module = module.double()
    start = copy.deepcopy(module.teacher.state_dict())
    callback = EMACallback()
    run = trainer(recorder, callback, accumulate_grad_batches=3, precision="64-true")
    run.fit(module, loader(8))
    assert run.global_step == 3
    assert callback.updates == {"teacher": 3}
    expected = slow_average(start, recorder.students, [0.7] * 3)
    for name, tensor in module.teacher.state_dict().items():
        assert (tensor - expected[name]).abs().max() < 1e-12
    assert not torch.equal(module.teacher.weight, start["weight"])


class DropsGradients(Student):
    def on_before_optimizer_step(self, optimizer):
        if self.trainer.global_step == 1:
            optimizer.zero_grad(set_to_none=True)


def test_a_step_without_gradients_does_not_change_the_average():
    module, recorder, callback = DropsGradients(momentum=0.5), Recorder(), EMACallback()
    start = copy.deepcopy(module.teacher.state_dict())
    trainer(recorder, callback).fit(module, loader(4))
    assert callback.updates == {"teacher": 3}
    del recorder.students[1]
    expected = slow_average(start, recorder.students, [0.5] * 3)
    torch.testing.assert_close(dict(module.teacher.state_dict()), expected)


class TwoTeachers(Student):
    def __init__(self):
        super().__init__()
        self.slow = copy.deepcopy(self.teacher)
        self.bag = nn.ModuleDict({"fast": copy.deepcopy(self.teacher)})


def test_two_callbacks_have_separate_averages_and_states(tmp_path):
    module, recorder = TwoTeachers(), Recorder()
    start = copy.deepcopy(module.teacher.state_dict())
    slow = EMACallback({"slow": EMAPair("student", "slow", 0.9)})
    fast = EMACallback({"fast": EMAPair("student", "bag.fast", 0.2)})
    run = trainer(recorder, slow, fast)
    run.fit(module, loader(5))
    for target, momentum in ((module.slow, 0.9), (module.bag["fast"], 0.2)):
        expected = slow_average(start, recorder.students, [momentum] * 5)
        torch.testing.assert_close(dict(target.state_dict()), expected)
    run.save_checkpoint(tmp_path / "x.ckpt")
    states = torch.load(tmp_path / "x.ckpt", weights_only=True)["callbacks"]
    assert states["EMACallback{'pairs': ['slow']}"] == {"updates": {"slow": 5}}
    assert states["EMACallback{'pairs': ['fast']}"] == {"updates": {"fast": 5}}


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        ("constant", [0.9, 0.9, 0.9, 0.9]),
        ("linear", [0.9, 0.925, 0.95, 1.0]),
        ("cosine", [0.9, 1 - 0.1 * (math.cos(math.pi / 4) + 1) / 2, 0.95, 1.0]),
    ],
)
def test_schedule_values(schedule, values):
    final = None if schedule == "constant" else 1.0
    steps = None if schedule == "constant" else 100
    found = [ema_momentum(update, 0.9, final, schedule, steps) for update in (0, 25, 50, 100)]
    assert found == pytest.approx(values, abs=1e-12)
    assert ema_momentum(1000, 0.9, final, schedule, steps) == pytest.approx(values[-1], abs=1e-12)


# 10 / (1 - 0.375) is 16 steps.
@pytest.mark.parametrize(
    ("pair", "steps", "warms_up"),
    [
        ({"momentum": 0.9995}, 4, False),
        ({"momentum": 0.9995, "warmup": "always"}, 12, True),
        ({"momentum": 0.9995, "warmup": "short"}, 12, True),
        ({"momentum": 0.375, "warmup": "short"}, 15, True),
        ({"momentum": 0.375, "warmup": "short"}, 16, False),
        ({"momentum": 1.0, "warmup": "short"}, 4, True),
    ],
)
def test_the_average_of_a_short_run_warms_up(pair, steps, warms_up):
    module, recorder = Student(**pair).double(), Recorder()
    start = copy.deepcopy(module.teacher.state_dict())
    trainer(recorder, EMACallback(log=False), precision="64-true").fit(module, loader(steps))
    momenta = [min(pair["momentum"], (1 + n) / (10 + n)) if warms_up else pair["momentum"] for n in range(steps)]
    for name, tensor in slow_average(start, recorder.students, momenta).items():
        assert (module.teacher.state_dict()[name] - tensor).abs().max() < 1e-12


def test_a_run_of_unknown_length_warms_up_and_resumes_its_schedule(tmp_path, caplog):
    def run(steps, ckpt_path=None):
        torch.manual_seed(0)
        module, stop = Student(momentum=0.9995, warmup="short"), Stop(steps)
        callbacks = [EMACallback(), stop]
        fitted = trainer(*callbacks, max_epochs=-1)
        fitted.fit(module, loader(12), ckpt_path=ckpt_path)
        fitted.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return fitted.callback_metrics["momentum/teacher"].item(), module.state_dict()

    with caplog.at_level("INFO"):
        assert run(5)[0] == pytest.approx(5 / 14)
    assert "average 'teacher' of momentum 0.9995 warms up, since the run is too short" in caplog.text
    momentum, state = run(9)
    assert momentum == pytest.approx(9 / 18)
    resumed = run(9, tmp_path / "5.ckpt")
    assert resumed[0] == momentum
    assert resumed[1].keys() == state.keys()


class Stop(Callback):
    """Ends a run of unknown length."""

    def __init__(self, steps):
        self.steps = steps

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.global_step >= self.steps


class Notes(EMACallback):
    def __init__(self):
        super().__init__()
        self.used = []

    def on_optimizer_step(self, trainer, pl_module):
        super().on_optimizer_step(trainer, pl_module)
        self.used.append(trainer.callback_metrics["momentum/teacher"].item())


def test_a_schedule_ends_with_the_run_and_is_logged():
    callback = Notes()
    module = Student(momentum=0.5, final_momentum=1.0, schedule="linear")
    trainer(callback, max_epochs=2, accumulate_grad_batches=2).fit(module, loader(5))
    # 5 batches make 3 steps an epoch
    assert callback.used == pytest.approx([0.5 + 0.5 * update / 6 for update in range(6)])


def test_a_schedule_without_an_end_is_refused():
    module = Student(final_momentum=1.0, schedule="cosine")
    with pytest.raises(UserError, match="got one of unknown length: set the pair's schedule_steps"):
        trainer(EMACallback(), max_epochs=-1).fit(module, loader(2))


def test_a_schedule_with_steps_does_not_need_the_length_of_the_run():
    callback = Notes()
    module = Student(momentum=0.5, final_momentum=1.0, schedule="linear", schedule_steps=2)
    run = trainer(callback, max_epochs=-1, max_time="00:00:00:30", limit_train_batches=4)
    module.on_train_epoch_end = lambda: setattr(run, "should_stop", True)
    run.fit(module, loader(4))
    assert callback.used == pytest.approx([0.5, 0.75, 1.0, 1.0])


def normalized():
    network = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM))
    network.register_buffer("mask", torch.full([], -torch.inf), persistent=False)  # has no average
    return network


def test_buffers_are_copied_by_default():
    module = Student(normalized(), momentum=0.9)
    trainer(EMACallback()).fit(module, loader(7))
    assert module.teacher[1].num_batches_tracked == 7
    assert_equal_states(dict(module.teacher.named_buffers()), dict(module.student.named_buffers()))
    assert not torch.equal(module.teacher[0].weight, module.student[0].weight)


def test_buffers_are_kept_on_request():
    module = Student(normalized(), momentum=0.9, buffers="keep")
    start = copy.deepcopy(dict(module.teacher.named_buffers()))
    trainer(EMACallback()).fit(module, loader(7))
    assert_equal_states(dict(module.teacher.named_buffers()), start)
    assert module.student[1].num_batches_tracked == 7


def test_buffers_of_floats_are_averaged_on_request_and_counters_copied():
    module = Student(normalized(), momentum=0.75, buffers="average")
    expected = copy.deepcopy(dict(module.teacher.named_buffers()))

    class Averages(Recorder):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            for name, buffer in pl_module.student.named_buffers():
                averaged = 0.75 * expected[name] + 0.25 * buffer
                counts = not buffer.is_floating_point() or name == "mask"
                expected[name] = buffer.clone() if counts else averaged

    trainer(EMACallback(), Averages()).fit(module, loader(5))
    found = dict(module.teacher.named_buffers())
    for name, buffer in expected.items():
        torch.testing.assert_close(found[name], buffer)
    assert not torch.equal(found["1.running_mean"], module.student[1].running_mean)
    assert module.teacher[1].num_batches_tracked == 5


def cosine():
    return Student(normalized(), momentum=0.5, final_momentum=1.0, schedule="cosine")


def test_a_resumed_run_equals_the_uninterrupted_run(tmp_path):
    torch.manual_seed(0)
    straight = cosine()
    broken = copy.deepcopy(straight)
    callback = EMACallback()
    trainer(callback, max_epochs=1).fit(straight, loader(7))

    # The estimate of the run's length must be the same, so the first part is cut by hand.
    class Stop(Recorder):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "three.ckpt")
                trainer.should_stop = True

    trainer(EMACallback(), Stop(), max_epochs=1, min_epochs=0).fit(broken, loader(7))
    torch.load(tmp_path / "three.ckpt", weights_only=True)

    # Lightning does not skip the batches before the checkpoint; the datamodule must.
    resumed, again = cosine(), EMACallback()
    run = trainer(again, max_epochs=1)
    run.fit(resumed, Skipping(loader(7), 3), ckpt_path=tmp_path / "three.ckpt")
    assert run.global_step == 7
    assert again.updates == callback.updates == {"teacher": 7}
    assert_equal_states(resumed.state_dict(), straight.state_dict())


class Skipping:
    """A loader of the same length whose first pass starts late."""

    def __init__(self, loader, skip):
        self.loader, self.skip = loader, skip

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        batches = list(self.loader)
        yield from batches[self.skip :]


def test_the_update_is_in_place():
    module = Student(normalized())
    before = [(tensor, tensor.data_ptr()) for tensor in [*module.teacher.parameters(), *module.teacher.buffers()]]
    trainer(EMACallback()).fit(module, loader(3))
    after = [*module.teacher.parameters(), *module.teacher.buffers()]
    assert [id(tensor) for tensor in after] == [id(tensor) for tensor, _ in before]
    assert [tensor.data_ptr() for tensor in after] == [pointer for _, pointer in before]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(DIM, DIM, bias=False)
        self.decoder = nn.Linear(DIM, DIM, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, x):
        return self.decoder(self.embedding(x))


def test_tied_parameters_are_updated_once():
    module = Student(Tied(), momentum=0.5).double()
    with torch.no_grad():
        module.student.embedding.weight.fill_(2.0)
        module.teacher.embedding.weight.fill_(0.0)
    EMACallback().update(module)
    assert module.teacher.decoder.weight is module.teacher.embedding.weight
    assert torch.all(module.teacher.decoder.weight == 1.0)


def test_parameters_tied_in_the_target_only_are_refused():
    module = Student(Tied())
    module.student.decoder.weight = nn.Parameter(torch.zeros(DIM, DIM))
    with pytest.raises(UserError, match=r"got 'decoder\.weight' tied in the target 'teacher' but not in the source"):
        EMACallback().update(module)


def test_types_may_differ_and_be_mixed():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.low = nn.Parameter(torch.full((3,), 1.0, dtype=torch.bfloat16))
            self.high = nn.Parameter(torch.full((3,), 1.0, dtype=torch.float64))

    module = Student(Mixed(), momentum=0.75)
    module.teacher.float()
    with torch.no_grad():
        module.student.low.fill_(2.0)
        module.student.high.fill_(3.0)
    EMACallback().update(module)
    assert module.teacher.low.dtype == torch.float32
    assert torch.all(module.teacher.low == 1.25)
    assert torch.all(module.teacher.high == 1.5)


def test_a_compiled_source_matches_its_plain_copy():
    module = Student(momentum=0.0)
    module.student = torch.compile(module.student)
    nn.init.normal_(module.student.weight)
    EMACallback().update(module)
    assert torch.equal(module.teacher.weight, module.student.weight)


def test_checkpoints_hold_average_and_weights_also_when_saved_in_validation_or_without_optimizer(tmp_path):
    module = Student(normalized(), momentum=0.9)
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_epochs=1, save_weights_only=True)

    class InValidation(Recorder):
        def on_validation_batch_start(self, trainer, pl_module, *args):
            trainer.save_checkpoint(tmp_path / "validating.ckpt")

    run = trainer(EMACallback(), InValidation(), saver, enable_checkpointing=True)
    run.fit(module, loader(3), loader(1))
    expected = module.state_dict()
    assert not torch.equal(expected["teacher.0.weight"], expected["student.0.weight"])
    for name in ("validating.ckpt", "step=3.ckpt"):
        assert_equal_states(torch.load(tmp_path / name, weights_only=True)["state_dict"], expected)


@pytest.mark.parametrize(
    ("pairs", "error", "message"),
    [
        ({"t": EMAPair("studnt", "teacher")}, UserError, r"source of the EMA pair 't'.*'studnt'.*'student'"),
        (
            {"t": EMAPair("student", "teacher.head")},
            UserError,
            r"got no 'head' in Student\.teacher: there are",
        ),
        (
            {"t": EMAPair("student", "pair")},
            UserError,
            r"Module at the path 'pair' \(the target of the EMA pair 't'\), got a dict",
        ),
        (
            {"t": EMAPair("teacher", "student")},
            UserError,
            r"got a trainable parameter 'weight'.*requires_grad_\(False\)",
        ),
        (
            {"a": EMAPair("student", "teacher"), "b": EMAPair("student", "teacher", 0.5)},
            UserError,
            "got 'a' and 'b', which update the same parameters",
        ),
    ],
)
def test_invalid_pairs_are_refused_before_the_first_batch(pairs, error, message):
    module = Student()
    module.on_train_start = lambda: pytest.fail("training began")
    with pytest.raises(error, match=message):
        trainer(EMACallback(pairs)).fit(module, loader(1))


def test_two_callbacks_on_one_target_are_refused():
    first, second = (EMACallback({name: EMAPair("student", "teacher")}) for name in ("one", "two"))
    with pytest.raises(UserError, match="got 'one' and 'two', which update the same parameters"):
        trainer(first, second).fit(Student(), loader(1))


def test_the_first_difference_of_source_and_target_is_named():
    module = Student(nn.Linear(DIM, DIM, bias=False))
    module.teacher = nn.Linear(DIM, DIM).requires_grad_(False)
    with pytest.raises(UserError, match=r"parameters, got 'bias' in the target but not in the source"):
        EMACallback().update(module)
    module.teacher = nn.Linear(DIM, 2 * DIM, bias=False).requires_grad_(False)
    with pytest.raises(UserError, match=r"'weight' with \[8, 4\] in the target and \[4, 4\] in the source"):
        EMACallback().update(module)
    module.teacher = nn.Linear(DIM, DIM, bias=False).requires_grad_(False)
    module.student.register_buffer("count", torch.zeros(()))
    with pytest.raises(UserError, match="buffers, got 'count' in the source but not in the target"):
        EMACallback().update(module)


def test_a_module_without_pairs_is_refused_with_advice():
    class Plain(Student):
        momentum_pairs = None

    with pytest.raises(UserError, match=r"none from momentum_pairs\(\) of Plain"):
        trainer(EMACallback()).fit(Plain(), loader(1))
    with pytest.raises(UserError, match="empty dict"):
        EMACallback({})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"momentum": 1.5}, r"Expected momentum .* from 0 to 1, got 1\.5"),
        ({"schedule": "cosin"}, "constant, linear, cosine as schedule .*, got 'cosin'"),
        ({"buffers": "mean"}, "copy, keep, average as buffers .*, got 'mean'"),
        ({"schedule": "linear"}, "Expected final_momentum .*, got none"),
        ({"final_momentum": 1.0}, "Expected neither final_momentum nor schedule_steps"),
        ({"schedule": "linear", "final_momentum": 1.0, "schedule_steps": 0}, "at least 1"),
    ],
)
def test_invalid_values_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        EMAPair("student", "teacher", **values)


def test_pairs_can_be_written_in_a_configuration():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(EMACallback, "ema")
    config = parser.parse_object({"ema": {"pairs": {"t": {"source": "a", "target": "b", "momentum": 0.9}}}})
    callback = parser.instantiate(config).ema
    assert callback.pairs == {"t": EMAPair("a", "b", 0.9)}
    with pytest.raises(ArgumentError, match="average"):
        parser.parse_object({"ema": {"pairs": {"t": {"source": "a", "target": "b", "buffers": "mean"}}}})


def test_a_checkpoint_with_other_pairs_warns():
    callback = EMACallback()
    callback.load_state_dict({"updates": {"image": 3, "teacher": 5}})
    with pytest.warns(UserWarning, match=r"\['image', 'teacher'\], this run has the pairs \['teacher'\]"):
        trainer(callback).fit(Student(), loader(1))
    assert callback.updates == {"teacher": 6}


def make_ddp():
    torch.manual_seed(0)
    return Student(momentum=0.9).double(), loader(6)


def collect(run):
    module: LightningModule = run.lightning_module
    recorder = next(callback for callback in run.callbacks if isinstance(callback, Recorder))
    return {"teacher": module.teacher.state_dict(), "students": recorder.students, "rows": rank()}


def test_ranks_have_equal_averages():
    start = copy.deepcopy(make_ddp()[0].teacher.state_dict())
    callbacks = [Recorder(), EMACallback()]
    ranks = run_ddp_fit(make_ddp, {"callbacks": callbacks, "max_epochs": 1, "precision": "64-true"}, collect=collect)
    assert [result["rows"] for result in ranks] == [0, 1]
    assert_equal_states(ranks[0]["teacher"], ranks[1]["teacher"])
    assert len(ranks[0]["students"]) == 3  # six batches over two ranks
    expected = slow_average(start, ranks[0]["students"], [0.9] * 3)
    for name, tensor in ranks[1]["teacher"].items():
        assert (tensor - expected[name]).abs().max() < 1e-12
    assert not torch.equal(start["weight"], expected["weight"])


def sharded_average():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    module = Student(nn.Sequential(nn.Linear(DIM, 5), nn.Linear(5, DIM)), momentum=0.75)
    plain = copy.deepcopy(module)
    mesh = init_device_mesh("cpu", (2,))
    for network in (module.student, module.teacher):
        fully_shard(network, mesh=mesh)
    for student in (module.student, plain.student):
        for number, weight in enumerate(student.parameters()):
            with torch.no_grad():
                weight.fill_(float(number))
    with torch.no_grad():
        module.teacher(torch.zeros(1, DIM))  # FSDP2 leaves its parameters whole after this
    EMACallback().update(module)
    EMACallback().update(plain)
    for shard, whole in zip(module.teacher.parameters(), plain.teacher.parameters(), strict=True):
        assert torch.equal(shard.full_tensor(), whole)
    return len(list(module.teacher.parameters()))


def test_shards_are_averaged_locally():
    assert run_distributed(sharded_average) == [4, 4]
