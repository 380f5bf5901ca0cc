"""Devices of tests of golden numbers, which `pytest -m gpu` repeats on a GPU."""

import pytest
import torch

GPU = "cuda"
DEVICES = [
    "cpu",
    pytest.param(
        GPU, marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
    ),
]
TOLERANCE = {"cpu": 1e-5, GPU: 1e-4}
"""Of float32 numbers that a CPU computed."""


@pytest.fixture
def whole_float32():
    """Convolutions of a GPU in float32 as its matrix products are, not in TF32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def moved(tensors, device):
    """The tensors of a dictionary on a device."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}
