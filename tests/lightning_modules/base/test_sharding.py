import copy

import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from support.runs.distributed import run_distributed
from vlightning.callbacks import rank, world_size
from vlightning.lightning_modules.base.sharding import shard

METHODS = ("encode_image", "encode_text", "predict_words")


class Network(nn.Module):
    """Blocks in both kinds of list, one list inside the other, and a head that is tied to the embeddings."""

    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(9, 4)
        stages = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
        self.image = nn.Sequential(*stages)
        self.text = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)])
        self.mixed = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.decoder = nn.Linear(4, 9)
        self.decoder.weight = self.embeddings.weight

    def encode_image(self, image):
        return self.mixed(self.image(image))

    def encode_text(self, ids):
        states = self.embeddings(ids)
        for layer in self.text:
            states = layer(states)
        return states

    def predict_words(self, states):
        return self.decoder(states)


class Towers(LightningModule):
    def __init__(self):
        super().__init__()
        self.student = Network()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.head = nn.Linear(4, 1)
        self.temperature = nn.Parameter(torch.tensor([0.5]))
        self.register_buffer("queue", torch.randn(3))
        self.register_buffer("flags", torch.rand(5) < 0.5)
        self.register_buffer("pointer", torch.randint(9, ()))

    def training_step(self, batch, batch_idx):
        states = self.student.encode_image(batch) + self.student.encode_text(torch.arange(len(batch)))
        with torch.no_grad():
            target = self.teacher.encode_image(batch)
            target = target + self.teacher.predict_words(target).mean()
        self.gathered = sum(not isinstance(parameter, DTensor) for parameter in self.teacher.parameters())
        words = self.student.predict_words(states)
        return {"loss": (self.head(states - target) / self.temperature).square().mean() + words.square().mean()}


def towers(seed=0):
    torch.manual_seed(seed)
    return Towers().double()


def batches():
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def sharded_towers(seed=0):
    module = towers(seed)
    names = ("data_parallel", "tensor_parallel")
    module._device_mesh = init_device_mesh("cpu", (world_size(), 1), mesh_dim_names=names)
    shard(module, [module.student, module.teacher], METHODS)
    return module


def layout():
    module = sharded_towers()
    step = module.training_step
    shard(module, [module.student, module.teacher], METHODS)  # as at the next stage
    assert module.training_step is step
    student = {name for name, part in module.student.named_modules() if isinstance(part, FSDPModule)}
    teacher = {name for name, part in module.teacher.named_modules() if isinstance(part, FSDPModule)}
    assert student == teacher
    assert isinstance(module, Towers)
    assert module.student.decoder.weight is module.student.embeddings.weight
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    numbers = [(p.to_local().numel(), p.numel()) for p in module.parameters()]
    return sorted(student), [sum(column) for column in zip(*numbers, strict=True)]


def test_every_block_is_a_group_and_each_process_holds_about_half():
    (groups, (first, whole)), (_, (second, _)) = run_distributed(layout)
    blocks = ["image.0", "image.0.0", "image.0.1", "image.1", "image.1.0", "image.1.1", "text.0", "text.1"]
    assert groups == ["", *blocks]
    assert first + second == whole == sum(parameter.numel() for parameter in towers().parameters())
    assert abs(first - second) < 0.2 * whole


def gradients():
    module = sharded_towers()
    loss = module.training_step(batches()[rank()], 0)["loss"]
    loss.backward()
    return module.gathered, {name: p.grad.full_tensor() for name, p in module.named_parameters() if p.grad is not None}


def test_gradients_are_averaged_over_processes_and_a_teacher_is_resharded():
    module = towers()
    sum(module.training_step(batch, 0)["loss"] / 2 for batch in batches()).backward()
    expected = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert {"temperature", "head.weight", "student.embeddings.weight"} < set(expected)
    for gathered, found in run_distributed(gradients):
        assert gathered == 0
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-14)


def started():
    module = sharded_towers(seed=rank())
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in module.state_dict().items()}


def test_every_process_starts_with_rank_0s_weights_and_buffers():
    expected = towers().state_dict()
    for name in ("queue", "flags", "pointer", "student.decoder.weight"):
        assert not torch.equal(expected[name], towers(seed=1).state_dict()[name]), name
    for state in run_distributed(started):
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor), name


def test_without_a_device_mesh_nothing_changes():
    module = towers()
    shard(module, [module.student, module.teacher], METHODS)
    assert not any(isinstance(part, FSDPModule) for part in module.modules())
    assert "training_step" not in vars(module)


def test_a_parameter_without_dimensions_is_named():
    module = towers()
    module.student.scale = nn.Parameter(torch.tensor(1.0))
    module._device_mesh = object()
    with pytest.raises(ValueError, match=r"got the 0-D 'student.scale': give it the shape \[1\]"):
        shard(module, [module.student, module.teacher], METHODS)
