"""Every method sharded over processes with FSDP2: the same training, with the memory of its state divided."""

import functools

import pytest
import torch
from lightning import Callback
from torch.distributed.tensor import DTensor

from support.methods.clip import SIZE, add_tiny_clip
from support.methods.methods import METHODS, OTHERS
from support.runs.distributed import WorkerError, rank_trainer, run_distributed, whole_state
from vlightning.callbacks import world_size
from vlightning.lightning_modules.base.sharding import NORMS

STEPS, FEW = 20, 4
PLAIN, SHARDED, RECOMPUTED = ("ddp", {}), ("sharded", {}), ("sharded", {"activation_checkpointing": True})


def build(method, outside, **data):
    """Towers of two layers for MobileCLIP, since its own have a hundred groups."""
    small = {"model": add_tiny_clip(), "image_size": SIZE} if method == "mobileclip" else {}
    return (METHODS | OTHERS)[method].build(outside, seed=0, num_workers=0, **small, **data)


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """Files of a method, made once."""

    @functools.cache
    def prepared(method):
        path = (METHODS | OTHERS)[method].prepare(tmp_path_factory.mktemp(method))
        build(method, path)[1].prepare_data()
        return path

    return prepared


class Watch(Callback):
    """Gives data the type that the networks have; keeps losses, states, and the numbers that await a backward pass."""

    def __init__(self, dtype, steps):
        self.dtype, self.steps, self.losses, self.kept, self.states = dtype, steps, [], 0, {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for name, value in batch.items():
            if torch.is_tensor(value) and value.is_floating_point():
                batch[name] = value.to(self.dtype)

        def pack(tensor):
            self.kept += tensor.numel()
            return tensor

        self.hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        self.hooks.__enter__()

    def on_before_backward(self, *_):
        self.hooks.__exit__(None, None, None)

    def on_train_batch_end(self, trainer, pl_module, outputs, *_):
        self.losses.append((outputs["loss"] if isinstance(outputs, dict) else outputs).item())
        trainer.should_stop = trainer.global_step == self.steps

    def on_train_epoch_end(self, trainer, pl_module):  # every four steps, and after averages have moved
        if trainer.global_step in (FEW, STEPS):
            self.states[trainer.global_step] = whole_state(pl_module)


def fit(method, outside, kind, strategy, steps=STEPS, dtype=torch.float64, callbacks=(), **options):
    torch.set_default_dtype(dtype)
    module, data = build(method, outside, batch_size=8 // world_size())
    module.change_settings("optim", learning_rate=0.01)  # something has to happen within a few steps
    configure = module.configure_model
    module.configure_model = lambda: (module.to(dtype), configure())  # with the teacher, which comes in `setup`
    watch = Watch(dtype, steps)
    # Schedules are those of the longest run.
    options |= {"max_steps": max(steps, STEPS), "max_epochs": -1, "limit_val_batches": 0, "min_epochs": 0}
    trainer = rank_trainer(kind, strategy, callbacks=[watch, *callbacks], **options)
    trainer.fit(module, data)
    assert trainer.global_step == steps
    return module, trainer, watch


def trajectories(method, outside):
    start = build(method, outside)[0].state_dict()
    plain, sharded = (fit(method, outside, *how)[2] for how in (PLAIN, SHARDED))
    few = fit(method, outside, *RECOMPUTED, steps=FEW)[2]
    return start, *((watch.states, torch.tensor(watch.losses), watch.kept) for watch in (plain, sharded, few))


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [*METHODS, "albef_vqa", "clip", "adapters", "towers", "new_text", "new_image", "new_from_pair", "new_text_any"],
)
def test_twenty_sharded_steps_equal_ddp(outside, method):
    """In float64: the difference is what sharding does, and not noise that AdamW makes steps of."""
    for start, plain, sharded, recomputed in run_distributed(trajectories, method, outside(method), timeout=300):
        (states, losses, kept), end = plain, plain[0][STEPS]
        for part in (METHODS | OTHERS)[method].state:
            names = [name for name in end if name.startswith(part) and name in start]
            assert max((end[name] - start[name]).abs().max() for name in names) > 1e-3, part
        for found, steps in ((sharded, STEPS), (recomputed, FEW)):
            torch.testing.assert_close(found[1], losses[:steps], rtol=1e-6, atol=0)
            assert found[0][steps].keys() == end.keys()
            for name, tensor in states[steps].items():
                torch.testing.assert_close(
                    found[0][steps][name], tensor, rtol=1e-6, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
                )
        assert sharded[2] == kept
        if method in ("albef", "cocord"):  # the others run in slices, which keep as little
            assert recomputed[2] < 0.4 * kept * FEW / STEPS


# In float32


class Gradients(Callback):
    """Bytes of the gradients at the optimizer step."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.bytes = held_bytes(p.grad for p in pl_module.parameters() if p.grad is not None)


class Types(Callback):
    """Types of the parameters of the student's layers while they run."""

    def __init__(self):
        self.norms, self.others = set(), set()

    def on_train_start(self, trainer, pl_module):
        for name, part in pl_module.named_modules():
            if name.startswith("student.") and any(True for _ in part.parameters(recurse=False)):
                types = self.norms if isinstance(part, NORMS) else self.others
                part.register_forward_hook(lambda part, *_, types=types: types.update(own_types(part)))


def own_types(part):
    return {parameter.dtype for parameter in part.parameters(recurse=False) if not isinstance(parameter, DTensor)}


def held_bytes(tensors):
    """Of the memory that belongs to tensors, whatever part of it they use."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def one_step(method, outside, strategy, *callbacks, **options):
    return fit(method, outside, "sharded", strategy, steps=1, dtype=torch.float32, callbacks=callbacks, **options)


def state_bytes(method, outside, **options):
    """Return the bytes of this process and of the whole model, by kind, and the first loss."""
    gradients = Gradients()
    module, trainer, watch = one_step(method, outside, {}, gradients, **options)
    moments = [value for state in trainer.optimizers[0].state.values() for value in state.values() if value.dim()]
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    return {
        "parameters": (
            held_bytes(module.parameters()),
            4 * sum(parameter.numel() for parameter in module.parameters()),
        ),
        "gradients": (gradients.bytes, 4 * trained),
        "moments": (held_bytes(moments), 4 * trained * (1 if method == "cocord" else 2)),  # SGD has one, AdamW two
    }, watch.losses[0]


def two_first_steps(method, outside):
    """Bytes and first loss with parameters gathered as they are; first loss and types with smaller ones."""
    kinds, whole = state_bytes(method, outside, precision="bf16-mixed")
    smaller, seen = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}, Types()
    module, _, half = one_step(method, outside, smaller, seen, precision="bf16-mixed")
    kept = {parameter.dtype for parameter in module.parameters()}
    return kinds, (whole, half.losses[0], seen.norms, seen.others, kept)


@pytest.fixture(scope="module")
def first_steps(outside):
    """What the first steps of a method showed on each of two ranks, made once."""
    return functools.cache(lambda method: run_distributed(two_first_steps, method, outside(method)))


def assert_divided(kinds, processes):
    for kind, (held, whole) in kinds.items():
        assert held == pytest.approx(whole / processes, rel=0.02), kind


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_memory_of_the_state_is_divided_among_the_processes(first_steps, method):
    for kinds, _ in first_steps(method):
        assert_divided(kinds, 2)


@pytest.mark.slow
def test_the_memory_of_the_state_is_divided_among_four_processes(outside):
    for kinds, _ in run_distributed(state_bytes, "albef", outside("albef"), processes=4):
        assert_divided(kinds, 4)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_parameters_are_gathered_in_a_smaller_type_and_stored_in_float32(first_steps, method):
    for _, (whole, half, norms, others, kept) in first_steps(method):
        assert half == pytest.approx(whole, rel=1e-2)  # a number of bfloat16 is exact to 4e-3
        assert norms == kept == {torch.float32}
        assert others == {torch.float32 if method == "mmlg" else torch.bfloat16}  # MM-LG sums its blocks before


def gather_small():
    return fit("albef", None, "sharded", {"param_dtype": "bfloat16"}, dtype=torch.float32)


def test_smaller_types_require_autocast():
    with pytest.raises(
        WorkerError, match="Expected the precision 'bf16-mixed' with param_dtype 'bfloat16', got '32-true'"
    ):
        run_distributed(gather_small)
