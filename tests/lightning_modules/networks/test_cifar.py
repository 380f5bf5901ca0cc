"""The CIFAR networks: keys of the public checkpoints, sizes of the benchmark, and the reference's outputs."""

import copy
import functools
import json
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors import safe_open
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from support.devices.devices import DEVICES, TOLERANCE, whole_float32  # noqa: F401, a fixture
from support.methods.cifar import fill
from vlightning.lightning_modules.networks.cifar import CIFAR_NETWORKS

GOLDEN = Path(__file__).parents[2] / "golden" / "cifar_zoo.safetensors"
REFERENCES = ("resnet20", "resnet8x4", "wrn_16_2", "vgg8", "MobileNetV2", "ShuffleV1", "ResNet50")

# Parameters and feature width with 100 classes, and millions of multiply-adds of one image of 32 pixels.
SIZES = {
    "resnet8": (83_892, 64, 12.5),
    "resnet14": (181_108, 64, 26.7),
    "resnet20": (278_324, 64, 40.8),
    "resnet32": (472_756, 64, 69.1),
    "resnet44": (667_188, 64, 97.4),
    "resnet56": (861_620, 64, 125.8),
    "resnet110": (1_736_564, 64, 253.2),
    "resnet8x4": (1_233_540, 256, 177.1),
    "resnet32x4": (7_433_860, 256, 1083.0),
    "wrn_16_1": (180_916, 64, 26.7),
    "wrn_16_2": (703_284, 128, 101.1),
    "wrn_40_1": (569_780, 64, 83.3),
    "wrn_40_2": (2_255_156, 128, 327.6),
    "vgg8": (3_965_028, 512, 96.2),
    "vgg11": (9_277_284, 512, 209.4),
    "vgg13": (9_462_180, 512, 284.9),
    "vgg16": (14_774_436, 512, 398.2),
    "vgg19": (20_086_692, 512, 511.4),
    "MobileNetV2": (812_836, 1280, 6.5),
    "ShuffleV1": (949_258, 960, 38.7),
    "ShuffleV2": (1_355_528, 1024, 44.5),
    "ResNet50": (23_705_252, 2048, 1298.0),
}


@pytest.fixture(scope="module")
def golden():
    with safe_open(GOLDEN, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["keys"])  # noqa: SIM118


def _build(name, classes=100, device="cpu"):
    torch.manual_seed(0)
    with torch.device(device):
        return CIFAR_NETWORKS[name](classes)


@functools.cache
def initial(name):
    """A network with its initial weights, for tests that change nothing."""
    return _build(name)


@functools.cache
def on_meta(name):
    return _build(name, device="meta")


@functools.cache
def filled(name):
    return fill(_build(name, device="meta").to_empty(device="cpu")).eval()


def test_the_zoo_is_that_of_the_benchmark(golden):
    assert CIFAR_NETWORKS.keys() == golden[1].keys() == SIZES.keys()


@pytest.mark.parametrize("name", SIZES)
def test_keys_shapes_and_order_are_those_of_the_public_checkpoints(golden, name):
    own = on_meta(name).state_dict()
    assert [(key, list(value.shape)) for key, value in own.items()] == list(golden[1][name].items())


@pytest.mark.parametrize("name", SIZES)
def test_parameters_features_and_operations_are_those_of_the_benchmark(name):
    parameters, width, operations = SIZES[name]
    network = on_meta(name).train()
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters
    assert network.feature_dim == width
    with FlopCounterMode(display=False) as counter:
        features = network.forward_features(torch.empty(1, 3, 32, 32, device="meta"))
        network.classify(features)
    assert features.shape == (1, width)
    assert counter.get_total_flops() / 2e6 == pytest.approx(operations, abs=0.0501)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.usefixtures("whole_float32")
def test_outputs_equal_the_reference(golden, name, device):
    image = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(5)).to(device)
    network = copy.deepcopy(filled(name)).to(device)
    with torch.no_grad():
        outputs = {"feature": network.forward_features(image), "logits": network(image)}
    for output, value in outputs.items():
        expected = golden[0][f"{name}.{output}"].to(device)
        assert (value - expected).abs().max() < TOLERANCE[device] * expected.abs().max(), output


def test_shufflenet_v2_equals_torchvision():
    own = filled("ShuffleV2")
    other = torchvision.models.shufflenet_v2_x1_0(num_classes=100).eval()
    other.conv1[0] = nn.Conv2d(3, 24, 1, bias=False)
    other.maxpool = nn.Identity()
    # Same layers in the same order, under other names.
    other.load_state_dict(dict(zip(other.state_dict(), own.state_dict().values(), strict=True)))
    image = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(own(image), other(image), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SIZES)
def test_a_step_gives_every_parameter_a_gradient(name):
    network = _build(name, classes=10)
    logits = network(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 10)
    nn.functional.cross_entropy(logits, torch.tensor([3, 7])).backward()
    for key, parameter in network.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key


@pytest.mark.parametrize("size", [48, 64, 224])
@pytest.mark.parametrize("name", SIZES)
def test_other_sizes_have_the_same_features(name, size):
    network = on_meta(name).eval()
    features = network.forward_features(torch.empty(2, 3, size, size, device="meta"))
    assert features.shape == (2, network.feature_dim)
    assert network.classify(features).shape == (2, 100)


@pytest.mark.parametrize("name", ["resnet20", "wrn_16_2", "vgg8", "MobileNetV2", "ShuffleV1", "ShuffleV2"])
@pytest.mark.parametrize("size", [32, 48, 64])
def test_forward_classifies_the_features(name, size):
    network = filled(name)
    image = torch.randn(2, 3, size, size)
    with torch.no_grad():
        features = network.forward_features(image)
        assert torch.equal(network(image), network.classify(features))
    assert features.isfinite().all()
    assert not torch.allclose(features[0], features[1])


@pytest.mark.parametrize(("size", "positions"), [(32, 4), (48, 6), (64, 4), (224, 14)])
def test_vgg_pools_a_fourth_time_from_64_pixels_on(size, positions):
    network = _build("vgg8", device="meta")
    shapes = []
    network.block4.register_forward_hook(lambda _, inputs, __: shapes.append(inputs[0].shape[-2:]))
    network(torch.empty(1, 3, size, size, device="meta"))
    assert shapes == [(positions, positions)]


@pytest.mark.parametrize("name", ["resnet8x4", "wrn_16_2", "vgg8", "MobileNetV2", "ResNet50"])
def test_convolutions_start_with_the_fan_out_rule(name):
    network = initial(name)
    wide = {key: value for key, value in network.state_dict().items() if value.dim() == 4 and value.numel() > 5000}
    for key, weight in wide.items():
        outputs, _, height, width = weight.shape
        assert weight.std().item() == pytest.approx((2 / (outputs * height * width)) ** 0.5, rel=0.05), key


@pytest.mark.parametrize("name", ["resnet8x4", "wrn_16_2", "vgg8", "MobileNetV2", "ResNet50", "ShuffleV1"])
def test_every_residual_branch_starts_open(name):
    norms = [module for module in initial(name).modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    assert all((norm.weight == 1).all() and (norm.bias == 0).all() for norm in norms)


@pytest.mark.parametrize("name", ["vgg8", "MobileNetV2"])
def test_linear_layers_of_vgg_and_mobilenet_start_small(name):
    *_, weight, bias = initial(name).parameters()
    assert weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert not bias.any()


def test_the_linear_layer_of_a_wide_resnet_starts_without_bias():
    assert not initial("wrn_16_2").fc.bias.any()
    assert initial("resnet8").fc.bias.any()


@pytest.mark.parametrize(("name", "depth"), [("resnet20", 21), ("resnet20", 2), ("wrn_16_2", 20), ("wrn_16_2", 4)])
def test_a_depth_between_two_networks_is_refused(name, depth):
    builder = CIFAR_NETWORKS[name]
    with pytest.raises(ValueError, match=rf"Expected a depth of 6n \+ \d for n blocks in each \w+, got {depth}: use "):
        builder.func(depth, *builder.args[1:], 100)
