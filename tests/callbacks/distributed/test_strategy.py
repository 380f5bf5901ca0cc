import os
import shutil

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from support.methods.tiny_modules import DIM, Student, loader, trainer
from support.runs.distributed import WorkerError, rank_trainer, run_distributed, run_sharded_fit, whole_state
from support.runs.processes import by_another_process
from vlightning.callbacks import (
    AtomicCheckpointIO,
    EMACallback,
    consolidate_checkpoint,
    divide_checkpoint_file,
    rank,
)
from vlightning.callbacks.checkpoints import checkpoint_io
from vlightning.callbacks.distributed import strategy as module_under_test
from vlightning.common.errors import UserError
from vlightning.common.files import replaced_beside, unfinished_beside


class Sharded(Student):
    """Uneven rows, a tied weight, a parameter and a buffer of the module's own, and Adam."""

    def __init__(self):
        first, tied = nn.Linear(DIM, 7), nn.Linear(DIM, DIM)
        network = nn.Sequential(first, nn.ReLU(), nn.Linear(7, DIM), tied, nn.Linear(DIM, DIM))
        network[4].weight = tied.weight
        super().__init__(network, momentum=0.9)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.tensor(0))

    def configure_model(self):
        if self.device_mesh is None or isinstance(self, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for network in (self.student, self.teacher):
            for block in network[:3:2]:
                fully_shard(block, mesh=mesh)
            fully_shard(network, mesh=mesh, reshard_after_forward=True)
        fully_shard(self, mesh=mesh)
        register_fsdp_forward_method(self, "training_step")
        register_fsdp_forward_method(self, "validation_step")

    def error(self, batch):
        with torch.no_grad():
            target = self.teacher(batch.flip(1))
        return (self.student(batch) * self.scale - target - batch.flip(1)).square().mean()

    def training_step(self, batch, batch_idx):
        self.seen += len(batch)
        self.log("falling", -float(batch_idx))
        return {"loss": self.error(batch)}

    def configure_optimizers(self):
        groups = [{"params": self.student.parameters(), "lr": 0.05}, {"params": [self.scale], "lr": 0.01}]
        return torch.optim.AdamW(groups, fused=True)


def make():
    torch.manual_seed(0)
    return Sharded(), loader(8)


def state_of(run):
    """Return the whole state that a checkpoint stores."""
    optimizer = run.optimizers[0].state_dict()
    moments = {
        f"{number}.{name}": value.full_tensor() if isinstance(value, DTensor) else value
        for number, state in optimizer["state"].items()
        for name, value in state.items()
    }
    return {"weights": whole_state(run.lightning_module), "moments": moments, "step": run.global_step}


def assert_same(one, other):
    assert one["step"] == other["step"]
    for part in ("weights", "moments"):
        assert one[part].keys() == other[part].keys()
        for name, tensor in one[part].items():
            assert torch.equal(tensor, other[part][name]), name


FIT = {"max_steps": 4, "callbacks": [EMACallback(log=False)]}


def fit_and_save(run):
    run.save_checkpoint(os.environ["CHECKPOINT"])
    return state_of(run)


def placement(run):
    mesh = run.strategy.device_mesh
    held = sum(p.to_local().numel() for p in run.lightning_module.parameters())
    whole = sum(p.numel() for p in run.lightning_module.parameters())
    loops = [loop.inference_mode for loop in (run.validate_loop, run.test_loop, run.predict_loop)]
    return mesh.mesh_dim_names, list(mesh.shape), held, whole, loops


def place_and_save(run):
    return placement(run), fit_and_save(run)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "last.ckpt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHECKPOINT", str(path))
        (first_place, first), (second_place, second) = run_sharded_fit(make, FIT, collect=place_and_save)
    assert_same(first, second)
    return path, first, (first_place, second_place)


@pytest.fixture
def saved(original, tmp_path, monkeypatch):
    """A checkpoint of two processes after four steps, and the state that they had."""
    monkeypatch.setenv("CHECKPOINT", str(tmp_path / "last.ckpt"))
    shutil.copytree(original[0], tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt", original[1]


# Training


def test_all_processes_share_the_parameters(original):
    first, second = original[2]
    assert first[:2] == (("data_parallel", "tensor_parallel"), [2, 1])
    assert first[2] + second[2] == first[3] == second[3]
    assert first[2] < 0.6 * first[3]
    assert not any(first[4])  # what is gathered in inference mode cannot be trained afterwards


def trained(kind, validate=False, **options):
    module, batches = make()
    run = rank_trainer(kind, max_steps=4, callbacks=[EMACallback(log=False)], **options)
    if validate:
        run.validate(module, batches, verbose=False)
    run.fit(module, batches)
    return whole_state(module)


def trained_in_three_ways():
    options = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}
    return trained("sharded", **options), trained("ddp", **options), trained("sharded", validate=True)


@pytest.fixture(scope="module")
def states():
    """Of each rank at the end of a training: sharded, under DDP, and sharded after a validation."""
    return run_distributed(trained_in_three_ways)


def test_training_equals_ddp_with_clipping_and_accumulation(states):
    start = make()[0].state_dict()
    for sharded, plain, _ in states:
        for name, tensor in plain.items():
            torch.testing.assert_close(sharded[name], tensor, rtol=1e-6, atol=1e-7)
            assert not torch.equal(tensor, start[name]), name


def test_training_after_an_evaluation_trains_every_parameter(states):
    start = make()[0].state_dict()
    for *_, state in states:
        for name, tensor in state.items():
            assert not torch.equal(tensor, start[name]), name


class Unsharded(Student):
    def configure_model(self):
        pass


def unsharded(cls):
    return cls(), loader(2)


def test_a_module_that_does_not_shard_itself_is_refused():
    with pytest.raises(WorkerError, match=r"a configure_model\(\) that shards"):
        run_sharded_fit(unsharded, make_args=(Student,))
    with pytest.raises(WorkerError, match=r"a configure_model\(\) that shards .* got none sharded by Unsharded"):
        run_sharded_fit(unsharded, make_args=(Unsharded,))


# Checkpoints


def test_a_checkpoint_is_a_folder_of_plain_data_with_half_of_the_weights_in_each_file(saved):
    path, state = saved
    assert sorted(file.name for file in path.parent.iterdir()) == ["last.ckpt"]
    assert sorted(file.name for file in path.iterdir()) == ["meta.pt", "shard-00000.pt", "shard-00001.pt"]
    meta, *shards = (torch.load(path / name, weights_only=True) for name in sorted(os.listdir(path)))
    assert meta["global_step"] == 4
    assert shards[0].keys() == shards[1].keys()
    whole = state["weights"]["student.0.weight"]
    assert [len(shard["state_dict/student.0.weight"]) for shard in shards] == [4, 3]
    assert torch.equal(torch.cat([shard["state_dict/student.0.weight"] for shard in shards]), whole)
    assert len(torch.load(path / "shard-00001.pt", weights_only=True)["state_dict/scale"]) == 0
    for shard in shards:
        tied = (shard[f"state_dict/student.{layer}.weight"].data_ptr() for layer in (3, 4))
        assert len(set(tied)) == 1


def resume(path, plugins):
    module, batches = make()
    run = trainer(EMACallback(log=False), max_steps=4, plugins=plugins)
    run.fit(module, batches, ckpt_path=path)
    return state_of(run)


def test_one_process_resumes_from_the_folder_of_two(saved):
    path, state = saved
    resumed = resume(path, [AtomicCheckpointIO()])
    assert set(resumed["moments"]) == {f"{n}.{name}" for n in range(8) for name in ("step", "exp_avg", "exp_avg_sq")}
    assert_same(resumed, state)


def test_a_folder_is_converted_to_a_file(saved, tmp_path):
    path, state = saved
    consolidate_checkpoint(path, tmp_path / "one.ckpt")
    assert_same(resume(tmp_path / "one.ckpt", None), state)
    loaded = Sharded.load_from_checkpoint(tmp_path / "one.ckpt").state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in state["weights"].items())


def test_a_file_is_converted_to_a_folder(saved, tmp_path):
    path, state = saved
    consolidate_checkpoint(path, tmp_path / "one.ckpt")
    divide_checkpoint_file(tmp_path / "one.ckpt", tmp_path / "three.ckpt", 3)
    for resumed in run_sharded_fit(make, FIT, collect=state_of, ckpt_path=str(tmp_path / "three.ckpt")):
        assert_same(resumed, state)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_any_number_of_processes_resume_from_the_folder(saved, processes):
    path, state = saved
    for resumed in run_sharded_fit(make, FIT, collect=state_of, ckpt_path=str(path), processes=processes):
        assert_same(resumed, state)


def test_sharded_processes_resume_from_the_file_of_one(tmp_path):
    module, batches = make()
    run = trainer(EMACallback(log=False), max_steps=4)
    run.fit(module, batches)
    run.save_checkpoint(tmp_path / "one.ckpt")
    for resumed in run_sharded_fit(make, FIT, collect=state_of, ckpt_path=str(tmp_path / "one.ckpt")):
        assert_same(resumed, state_of(run))


def test_one_file_can_be_written_and_replaces_a_folder(saved):
    path, state = saved
    assert path.is_dir()
    one_file = {"save_distributed_checkpoint": False}
    first, _ = run_sharded_fit(make, FIT, strategy_kwargs=one_file, collect=fit_and_save)
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]
    assert path.is_file()
    assert_same(first, state)
    assert_same(resume(path, None), state)
    content = torch.load(path, weights_only=True)["state_dict"]
    assert content["student.3.weight"].data_ptr() == content["student.4.weight"].data_ptr()
    run_sharded_fit(make, FIT, collect=fit_and_save)
    assert path.is_dir()


def callbacks_keep_folders():
    folder = os.path.dirname(os.environ["CHECKPOINT"])
    best = ModelCheckpoint(folder, "{step}", monitor="falling", save_top_k=1, save_last=True, every_n_train_steps=1)
    run = rank_trainer("sharded", max_steps=4, callbacks=[best, EMACallback(log=False)], enable_checkpointing=True)
    run.fit(*make())
    return best.best_model_path


def test_lightnings_checkpoint_callback_keeps_and_removes_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("CHECKPOINT", str(tmp_path / "last.ckpt"))
    best, other = run_distributed(callbacks_keep_folders)
    assert best == other
    assert sorted(file.name for file in tmp_path.iterdir()) == ["last.ckpt", "step=4.ckpt"]
    assert AtomicCheckpointIO().load_checkpoint(best)["global_step"] == 4


# Failures


# What fails, in which process, at which of its calls.
FAILURES = [("write", 1, 1), ("write", 0, 1), ("write", 0, 2), ("rename", 0, 1), ("rename", 0, 2)]


def save_with_failures():
    run = rank_trainer("sharded", max_steps=1, callbacks=[EMACallback(log=False)])
    run.fit(*make())
    messages = []
    for fail, on, number in FAILURES:
        owner, name = {"write": (module_under_test, "write_file"), "rename": (os, "rename")}[fail]
        real, calls = getattr(owner, name), []

        def failing(*args, real=real, calls=calls, on=on, number=number):
            calls.append(args)
            if rank() == on and len(calls) == number:
                raise OSError(28, "No space left on device")
            return real(*args)

        setattr(owner, name, failing)
        try:
            run.save_checkpoint(os.environ["CHECKPOINT"])
            messages.append("saved")
        except OSError as error:
            messages.append(str(error))
        setattr(owner, name, real)
        torch.distributed.barrier()  # process 0 tidies up
        messages.append(sorted(os.listdir(os.path.dirname(os.environ["CHECKPOINT"]))))
        messages.append(AtomicCheckpointIO().load_checkpoint(os.environ["CHECKPOINT"])["global_step"])
        torch.distributed.barrier()
    return messages


@pytest.mark.fault(
    "full disk or failing rename in one of two sharded processes",
    "its write, sync, or rename raises",
    "all raise; the old checkpoint unchanged",
)
def test_a_failure_in_one_process_is_raised_in_all_and_keeps_the_old_checkpoint(saved):
    path, state = saved
    messages = run_distributed(save_with_failures)
    for number, (_, on, _) in enumerate(FAILURES):
        said, beside, step = (messages[on][3 * number + what] for what in range(3))
        assert "last.ckpt could not be written ([Errno 28] No space left on device); what was there" in said
        assert messages[1 - on][3 * number] == f"Process {on} failed, so no checkpoint was written: {said}"
        assert (beside, step) == (["last.ckpt"], 4)
    assert_same(resume(path, [AtomicCheckpointIO()]), state)


def save_what_cannot_be_pickled():
    module, batches = make()
    run = rank_trainer("sharded", max_steps=1, callbacks=[EMACallback(log=False)])
    run.fit(module, batches)
    module.on_save_checkpoint = lambda checkpoint: checkpoint.update(hook=lambda: None)
    try:
        run.save_checkpoint(os.environ["CHECKPOINT"])
    except Exception as error:
        return str(error)
    return "saved"


def test_an_unpicklable_object_keeps_the_old_checkpoint(saved):
    path, state = saved
    assert all("lambda" in message for message in run_distributed(save_what_cannot_be_pickled))
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]
    assert_same(resume(path, [AtomicCheckpointIO()]), state)


def test_metadata_is_written_last_before_the_rename(tmp_path, monkeypatch):
    order = []
    monkeypatch.setenv("CHECKPOINT", str(tmp_path / "last.ckpt"))
    monkeypatch.setenv("ORDER", str(tmp_path / "order"))
    run_distributed(save_in_order)
    order = (tmp_path / "order").read_text().split()
    assert sorted(order[:2]) == ["shard-00000.pt", "shard-00001.pt"]
    assert order[2:] == ["meta.pt", "last.ckpt"]


def save_in_order():
    def say(name):
        with open(os.environ["ORDER"], "a") as file:
            file.write(f"{name}\n")

    write, swap = module_under_test.write_file, module_under_test.swap_in
    module_under_test.write_file = lambda content, path: (write(content, path), say(path.name))
    module_under_test.swap_in = lambda staged, target: (swap(staged, target), say(target.name))
    run = rank_trainer("sharded", max_steps=1, callbacks=[EMACallback(log=False)])
    run.fit(*make())
    run.save_checkpoint(os.environ["CHECKPOINT"])


@pytest.mark.fault(
    "killed between the renames of a sharded checkpoint",
    "the folders as they are then",
    "the old one is found again; no debris after the next save",
)
def test_the_next_save_removes_files_of_a_killed_save(saved):
    path, state = saved
    earlier = path.with_name("earlier.ckpt")
    unfinished, replaced = by_another_process(lambda: (unfinished_beside(path), replaced_beside(earlier)))
    unfinished.mkdir()
    (unfinished / "shard-00000.pt").touch()
    os.rename(path, replaced)  # killed between the two renames
    run_sharded_fit(make, FIT, collect=fit_and_save)
    assert sorted(file.name for file in path.parent.iterdir()) == ["earlier.ckpt", "last.ckpt"]
    assert_same(resume(earlier, [AtomicCheckpointIO()]), state)


@pytest.mark.fault("damaged sharded checkpoint", "a shard or the metadata missing", "named as damaged in one sentence")
def test_an_incomplete_folder_is_refused_with_one_sentence(saved):
    path, _ = saved
    for name, what in (("shard-00001.pt", "1 of 2 files with pieces are missing"), ("meta.pt", "no meta.pt")):
        (path / name).unlink()
        with pytest.raises(RuntimeError, match=rf"last.ckpt, which .* not a checkpoint \(.*{what}.*use an earlier"):
            AtomicCheckpointIO().load_checkpoint(path)
    torch.save({"epoch": 1}, path / "meta.pt")
    with pytest.raises(UserError, match=r"format of torch.distributed.checkpoint.*consolidate_checkpoint"):
        AtomicCheckpointIO().load_checkpoint(path)


class Arbitrary:
    pass


@pytest.mark.fault(
    "pickle bomb in a sharded checkpoint", "an object of a class in the metadata", "refused, and nothing of it runs"
)
def test_only_plain_data_is_loaded(saved):
    path, _ = saved
    meta = torch.load(path / "meta.pt", weights_only=True)
    torch.save(meta | {"hook": Arbitrary()}, path / "meta.pt")
    for load in (
        lambda: AtomicCheckpointIO().load_checkpoint(path),
        lambda: run_sharded_fit(make, FIT, ckpt_path=path),
    ):
        with pytest.raises((RuntimeError, WorkerError), match=r"of tensors and plain data, got .*Arbitrary"):
            load()


def test_a_partly_removed_folder_is_not_a_checkpoint(saved, monkeypatch):
    path, _ = saved
    link = path.with_name("link.ckpt")
    link.symlink_to(path)
    removed = []
    monkeypatch.setattr(checkpoint_io.TorchCheckpointIO, "remove_checkpoint", lambda self, path: removed.append(path))
    AtomicCheckpointIO().remove_checkpoint(link)
    assert (path / "meta.pt").exists()
    AtomicCheckpointIO().remove_checkpoint(path)
    assert not (path / "meta.pt").exists()
    assert removed == [link, path]


def save_remote():
    run = rank_trainer("sharded", max_steps=1, callbacks=[EMACallback(log=False)])
    run.fit(*make())
    run.save_checkpoint("memory://run/last.ckpt")


def test_a_folder_at_a_remote_path_is_refused():
    with pytest.raises(
        WorkerError, match=r"local folder.*got 'memory://run/last.ckpt'.*save_distributed_checkpoint=False"
    ):
        run_distributed(save_remote)
