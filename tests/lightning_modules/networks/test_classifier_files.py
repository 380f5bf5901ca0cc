"""Trained classifiers from files, and errors for files that do not fit."""

import numpy as np
import pytest
import torch
from lightning import LightningModule, Trainer
from safetensors.torch import save_file
from torch import nn

from support.methods.cifar import fill
from vlightning.common.errors import UserError
from vlightning.lightning_modules.networks.cifar import CIFAR_NETWORKS
from vlightning.lightning_modules.networks.classifier_files import load_classifier, read_classifier


@pytest.fixture(scope="module")
def state():
    return fill(CIFAR_NETWORKS["resnet8"](100)).state_dict()


def _loads(path, state):
    """Whether a fresh network gets exactly this state from the file."""
    network = CIFAR_NETWORKS["resnet8"](100)
    load_classifier(network, read_classifier(path), f"the checkpoint {str(path)!r}")
    return all(torch.equal(value, state[key]) for key, value in network.state_dict().items())


def _untouched(network, *arguments):
    """The sentence that loading fails with, after checking that nothing was loaded."""
    before = {key: value.clone() for key, value in network.state_dict().items()}
    with pytest.raises(UserError, match=r"^Expected") as caught:
        load_classifier(network, *arguments)
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    return str(caught.value)


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("entry", [None, "model", "state_dict"])
@pytest.mark.parametrize("legacy", [False, True])
def test_public_checkpoints_load_as_they_are(tmp_path, state, prefix, entry, legacy):
    content = {prefix + key: value for key, value in state.items()}
    if entry:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9).state_dict()
        content = {"epoch": 240, entry: content, "accuracy": torch.tensor(69.1), "optimizer": optimizer, "opt": [1]}
    torch.save(content, tmp_path / "resnet8.pth", _use_new_zipfile_serialization=not legacy)
    assert _loads(tmp_path / "resnet8.pth", state)


@pytest.mark.parametrize("number", [np.float32(69.1), np.float64(69.1), np.int64(240)])
@pytest.mark.parametrize("module", [b"numpy._core.multiarray", b"numpy.core.multiarray"])
def test_accuracies_may_be_numbers_of_any_numpy(tmp_path, state, number, module):
    path = tmp_path / "student_best"
    torch.save({"model": state, "best_acc": number}, path, _use_new_zipfile_serialization=False)
    written = path.read_bytes()  # the legacy format holds the names as they are
    own = b"c" + number.__reduce__()[0].__module__.encode() + b"\n"
    assert own in written
    path.write_bytes(written.replace(own, b"c" + module + b"\n"))
    assert _loads(path, state)


def test_numpy_is_trusted_for_this_file_only(tmp_path, state):
    torch.save({"model": state, "best_acc": np.float32(69.1)}, tmp_path / "a.pth")
    before = torch.serialization.get_safe_globals()
    read_classifier(tmp_path / "a.pth")
    assert set(torch.serialization.get_safe_globals()) == set(before)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_safetensors_load(tmp_path, state, prefix):
    save_file({prefix + key: value for key, value in state.items()}, tmp_path / "resnet8.safetensors")
    assert _loads(tmp_path / "resnet8.safetensors", state)


class _Distillation(LightningModule):
    def __init__(self, temperature=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.student = CIFAR_NETWORKS["resnet8"](100)
        self.teacher = CIFAR_NETWORKS["resnet14"](100)


def test_the_student_is_read_from_a_lightning_checkpoint(tmp_path, state):
    module = _Distillation()
    fill(module.student)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert _loads(tmp_path / "last.ckpt", state)


def test_a_lightning_checkpoint_without_a_student_is_refused(tmp_path, state):
    content = {"state_dict": {f"network.{key}": value for key, value in state.items()}, "hyper_parameters": {}}
    torch.save(content, tmp_path / "other.ckpt")
    with pytest.raises(
        UserError, match=r"^Expected a Lightning checkpoint with a student in '.*other\.ckpt', got one without"
    ):
        read_classifier(tmp_path / "other.ckpt")


def test_old_checkpoints_lack_the_counters_of_batch_norm(state):
    network = CIFAR_NETWORKS["resnet8"](100)
    old = {key: value for key, value in state.items() if not key.endswith("num_batches_tracked")}
    assert len(old) < len(state)
    load_classifier(network, old, "a test")
    assert torch.equal(network.bn1.running_var, state["bn1.running_var"])
    assert "(2 missing keys: bn1.running_mean, bn1.running_var)" in _untouched(
        network, {key: value for key, value in old.items() if not key.startswith("bn1.running")}, "a test"
    )


@pytest.mark.parametrize("name", CIFAR_NETWORKS)
def test_the_network_of_a_checkpoint_is_named(name):
    with torch.device("meta"):
        found = CIFAR_NETWORKS[name](37).state_dict()
    wanted = "resnet8" if name != "resnet8" else "resnet14"
    sentence = _untouched(CIFAR_NETWORKS[wanted](100), found, "the checkpoint 'a.pth'")
    assert f"Expected weights of {wanted} in the checkpoint 'a.pth', got those of {name} (" in sentence
    assert sentence.endswith(f"): build {name}.")


def test_keys_that_do_not_fit_are_counted_and_the_first_ones_named(state):
    changed = {key: value for key, value in state.items() if not key.startswith("layer3.0.bn2")}
    changed |= {"extra": torch.ones(1), "conv1.weight": torch.ones(16, 1, 3, 3)}
    sentence = _untouched(CIFAR_NETWORKS["resnet8"](100), changed, "a test")
    assert "4 missing keys: layer3.0.bn2.weight, layer3.0.bn2.bias, layer3.0.bn2.running_mean, ...;" in sentence
    assert "1 unexpected key: extra;" in sentence
    assert "1 misshapen key: conv1.weight)" in sentence
    assert sentence.endswith("): build the network that they were saved from.")


@pytest.mark.parametrize("name", ["resnet8", "vgg8", "MobileNetV2", "ShuffleV2"])
def test_another_number_of_classes_is_reported(name):
    found = CIFAR_NETWORKS[name](10).state_dict()
    sentence = _untouched(CIFAR_NETWORKS[name](100), found, "the checkpoint 'a.pth'")
    assert "Expected weights for 100 classes in the checkpoint 'a.pth', got weights for 10" in sentence


def test_a_linear_layer_for_other_features_is_not_reported_as_other_classes(state):
    sentence = _untouched(CIFAR_NETWORKS["resnet8"](100), state | {"fc.weight": torch.ones(100, 32)}, "a test")
    assert "(1 misshapen key: fc.weight)" in sentence


@pytest.mark.parametrize("name", ["a.pth", "a.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "empty", "text"])
def test_a_damaged_file_is_reported(tmp_path, state, name, damage):
    path = tmp_path / name
    if name.endswith(".pth"):
        torch.save({"model": state}, path)
    else:
        save_file(state, path)
    written = path.read_bytes()
    path.write_bytes({"cut": written[: len(written) // 2], "empty": b"", "text": b"Not Found\n" * 9}[damage])
    with pytest.raises(UserError, match=r"(?s)a\.(pth|safetensors)', got a damaged file"):
        read_classifier(path)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.99])
def test_a_damaged_legacy_file_is_reported(tmp_path, state, share):
    torch.save({"model": state}, tmp_path / "a.pth", _use_new_zipfile_serialization=False)
    written = (tmp_path / "a.pth").read_bytes()
    (tmp_path / "a.pth").write_bytes(written[: int(share * len(written))])
    with pytest.raises(UserError, match=r"a\.pth', got a damaged file"):
        read_classifier(tmp_path / "a.pth")


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(UserError, match=r"^Expected a checkpoint of a classifier in '.*gone\.pth', got no file"):
        read_classifier(tmp_path / "gone.pth")
    with pytest.raises(UserError, match=r"^Expected a checkpoint of a classifier in '.*', got no file"):
        read_classifier(tmp_path)


def test_a_file_with_code_is_not_run(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "module.pth")
    with pytest.raises(
        UserError, match=r"^Expected tensors and plain data in '.*module\.pth', got torch\.nn\.modules\.linear\.Linear"
    ):
        read_classifier(tmp_path / "module.pth")


@pytest.mark.parametrize("content", [{}, [1], {"epoch": 3}, {"model": "resnet8"}, {"model": {}}])
def test_a_file_without_a_state_dict_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "a.pth")
    with pytest.raises(UserError, match=r"^Expected a state dict in '.*', or one in its entry 'model'"):
        read_classifier(tmp_path / "a.pth")
