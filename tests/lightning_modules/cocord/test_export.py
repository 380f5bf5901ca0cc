"""`vlightning export` of CoCoRD checkpoints: the student alone, and its backbone for other libraries."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from lightning import Trainer
from safetensors import safe_open
from safetensors.torch import load_file

from support.methods.cifar import fill
from support.methods.cocord import HEADS
from support.runs.command_line import export as main
from support.runs.command_line import run
from vlightning.lightning_modules import CoCoRDModule
from vlightning.lightning_modules.networks.classifier_files import load_classifier, read_classifier
from vlightning.lightning_modules.networks.classifiers import build_classifier, public_network

CLASSES = 7


def _trained(student, folder, half=False):
    """A whole distillation's module and its checkpoint; there is no file of its teacher."""
    arguments = {"student": student, "num_classes": CLASSES, "teacher": {"name": "resnet8", "weights": "gone.pth"}}
    module = CoCoRDModule(**arguments, **HEADS, contrast={"queue_size": 16})
    fill(module.student)
    module.configure_model()
    assert next(module.student.parameters()).is_contiguous(memory_format=torch.channels_last)
    trainer = Trainer(logger=False, accelerator="cpu", enable_checkpointing=False, default_root_dir=folder)
    trainer.strategy.connect(module.bfloat16() if half else module)
    path = folder / f"{student.replace('/', '_')}.ckpt"
    trainer.save_checkpoint(path, weights_only=True)
    return module, path


@pytest.fixture(scope="module")
def resnet50(tmp_path_factory):
    return _trained("resnet50", tmp_path_factory.mktemp("resnet50"))


@pytest.fixture(scope="module")
def resnet8(tmp_path_factory):
    return _trained("resnet8", tmp_path_factory.mktemp("resnet8"))


def _public(module):
    return public_network(module.student).state_dict()


def _same(state, expected):
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert state[name].dtype == value.dtype
        assert torch.equal(state[name], value), name
        assert state[name].is_contiguous(), name


def _refused(capsys, *words):
    """The one line that a refused export prints."""
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    assert stopped.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(("student", "suffix"), [("resnet8", ".pt"), ("resnet50", ".pth")])
def test_student_file_is_the_public_form_with_the_student_and_nothing_else(student, suffix, request, tmp_path):
    module, checkpoint = request.getfixturevalue(student)
    main([str(checkpoint), str(tmp_path / f"student{suffix}")])
    written = torch.load(tmp_path / f"student{suffix}", weights_only=True)
    assert written.keys() == {"model"}
    _same(written["model"], _public(module))
    assert len(written["model"]) == len(_public(module)) == {"resnet8": 56, "resnet50": 320}[student]


def test_student_in_safetensors_names_its_network(resnet50, tmp_path, capsys):
    module, checkpoint = resnet50
    main([str(checkpoint), str(tmp_path / "student.safetensors"), "--layout", "student"])
    assert "student resnet50, 320 tensors" in capsys.readouterr().out
    state = load_file(tmp_path / "student.safetensors")
    _same({name: state[name] for name in _public(module)}, _public(module))
    assert len(state) == 320
    with safe_open(tmp_path / "student.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "network": "resnet50", "num_classes": str(CLASSES)}


@pytest.mark.parametrize("student", ["resnet8", "torchvision/resnet18", "timm/resnet10t", "mobilenet_v2"])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_exported_student_in_a_fresh_network_gives_equal_logits(student, suffix, tmp_path):
    module, checkpoint = _trained(student, tmp_path)
    main([str(checkpoint), str(tmp_path / f"student{suffix}")])
    torch.manual_seed(5)
    fresh = build_classifier(student, CLASSES)
    load_classifier(public_network(fresh), read_classifier(tmp_path / f"student{suffix}"), "the export")
    image = torch.randn(2, 3, 64, 64)
    student = module.student.to(memory_format=torch.contiguous_format).eval()
    with torch.no_grad():
        assert torch.equal(fresh.eval()(image), student(image))


def test_a_student_in_safetensors_is_read_without_torch_and_this_package(resnet8, tmp_path):
    """A file of torch with nothing else than tensors, as above, needs no class of this package."""
    main([str(resnet8[1]), str(tmp_path / "student.safetensors")])
    read = "import sys, safetensors.numpy as n; s = n.load_file(sys.argv[1])"
    code = f"{read}; assert not {{'vlightning', 'torch'}} & set(sys.modules); print(len(s), *s)"
    words = [sys.executable, "-I", "-c", code, str(tmp_path / "student.safetensors")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "56"
    assert set(done.stdout.split()[1:]) == set(_public(resnet8[0]))


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_torchvision_layout_has_265_tensors_that_its_resnet50_loads(suffix, resnet50, tmp_path, capsys):
    module, checkpoint = resnet50
    target = tmp_path / f"backbone{suffix}"
    main([str(checkpoint), str(target), "--layout", "torchvision"])
    assert "265 tensors" in capsys.readouterr().out
    state = load_file(target) if suffix == ".safetensors" else torch.load(target, weights_only=True)
    assert len(state) == 265
    assert all(tensor.is_contiguous() for tensor in state.values())

    torch.manual_seed(5)
    theirs = torchvision.models.resnet50(weights=None)
    result = theirs.load_state_dict(state, strict=False)
    assert not result.unexpected_keys
    assert {name for name in result.missing_keys if not name.endswith(".num_batches_tracked")} == {
        "fc.weight",
        "fc.bias",
    }
    ours = public_network(module.student)
    image = torch.randn(1, 3, 64, 64)
    layout = torch.contiguous_format
    with torch.no_grad():
        maps = [
            torch.nn.Sequential(*list(network.to(memory_format=layout).eval().children())[:-2])(image)
            for network in (theirs, ours)
        ]
    ours.to(memory_format=torch.channels_last)
    assert maps[0].shape == (1, 2048, 2, 2)
    assert torch.equal(*maps)


def _detectron2_names(blocks, convolutions):
    """Return detectron2's names of the tensors of a ResNet, in its order, with torchvision's names."""
    names = {}

    def convolution(theirs, ours, norm):
        names[f"{theirs}.weight"] = f"{ours}.weight"
        for part in ("weight", "bias", "running_mean", "running_var"):
            names[f"{theirs}.norm.{part}"] = f"{norm}.{part}"

    convolution("stem.conv1", "conv1", "bn1")
    for stage, count in zip((2, 3, 4, 5), blocks, strict=True):
        for block in range(count):
            ours = f"layer{stage - 1}.{block}"
            # A stage begins with a block that changes width or size; basic blocks do neither in the first stage.
            if block == 0 and (convolutions == 3 or stage > 2):
                convolution(f"res{stage}.{block}.shortcut", f"{ours}.downsample.0", f"{ours}.downsample.1")
            for number in range(1, convolutions + 1):
                convolution(f"res{stage}.{block}.conv{number}", f"{ours}.conv{number}", f"{ours}.bn{number}")
    return names


def _check_detectron2(module, target, blocks, convolutions, count):
    written = pickle.loads(target.read_bytes())
    assert written.keys() == {"model", "__author__", "matching_heuristics"}
    assert written["matching_heuristics"] is True
    assert isinstance(written["__author__"], str)
    names, state = _detectron2_names(blocks, convolutions), _public(module)
    assert len(names) == len(written["model"]) == count
    assert written["model"].keys() == names.keys()
    for theirs, ours in names.items():
        value = written["model"][theirs]
        assert type(value) is np.ndarray
        assert value.dtype == np.float32
        assert value.flags["C_CONTIGUOUS"]
        assert np.array_equal(value, state[ours].float().numpy()), theirs


def test_detectron2_layout_has_its_names_and_the_same_values(resnet50, tmp_path, capsys):
    module, checkpoint = resnet50
    main([str(checkpoint), str(tmp_path / "backbone.pkl"), "--layout", "detectron2"])
    said = capsys.readouterr().out
    for needed in ('INPUT.FORMAT "RGB"', "[123.675, 116.280, 103.530]", "[58.395, 57.120, 57.375]"):
        assert needed in said
    assert "MODEL.RESNETS.STRIDE_IN_1X1 False" in said
    _check_detectron2(module, tmp_path / "backbone.pkl", (3, 4, 6, 3), 3, 265)


def test_detectron2_takes_basic_blocks_and_bfloat16_too(tmp_path):
    module, checkpoint = _trained("resnet18", tmp_path, half=True)
    main([str(checkpoint), str(tmp_path / "backbone.pkl"), "--layout", "detectron2"])
    _check_detectron2(module, tmp_path / "backbone.pkl", (2, 2, 2, 2), 2, 100)
    main([str(checkpoint), str(tmp_path / "student.pth")])
    _same(torch.load(tmp_path / "student.pth", weights_only=True)["model"], _public(module))


def test_checkpoint_of_the_command_line_is_exported_as_it_is(tmp_path):
    words = "--model CoCoRDModule --model.student resnet8 --model.num_classes 40"
    words += " --model.contrast.weight 0 --model.prediction.weight 0"
    words += " --data ShapeClassesDataModule --data.num_workers 0 --data.batch_size 8 --trainer.accelerator cpu"
    words += " --trainer.limit_train_batches 1 --trainer.limit_val_batches 1 --trainer.max_epochs 1"
    logger = f" --trainer.logger CSVLogger --trainer.logger.save_dir {tmp_path} --checkpoint.monitor val/top1"
    ran = run("fit", *words.split(), *logger.split())
    assert ran.status == 0, ran.err
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    main([str(checkpoint), str(tmp_path / "student.pth")])
    saved = torch.load(checkpoint, weights_only=True)
    assert saved["hyper_parameters"]["_class_path"].endswith(".CoCoRDModule")
    written = torch.load(tmp_path / "student.pth", weights_only=True)["model"]
    assert written
    assert all(torch.equal(value, saved["state_dict"][f"student.{name}"]) for name, value in written.items())


def test_invalid_exports_are_refused_and_leave_no_file(resnet8, resnet50, tmp_path, capsys):
    _, small = resnet8
    _, large = resnet50
    there = tmp_path / "there.pth"
    there.write_text("mine")
    assert "which exists" in _refused(capsys, small, there)
    assert there.read_text() == "mine"
    (tmp_path / "folder").mkdir()
    assert "name of a new file" in _refused(capsys, small, tmp_path / "folder")
    assert "got '.bin' in" in _refused(capsys, small, tmp_path / "x.bin")
    for name, layout in (("x.pth", "detectron2"), ("x.pkl", "torchvision"), ("x.pkl", "student")):
        assert "Expected the suffix" in _refused(capsys, large, tmp_path / name, "--layout", layout)
    for name, layout in (("x.pth", "torchvision"), ("x.pkl", "detectron2")):
        line = _refused(capsys, small, tmp_path / name, "--layout", layout)
        assert "got the student resnet8" in line
        assert "Expected a ResNet of torchvision" in line
    for layout in ("open_clip", "albef"):
        line = _refused(capsys, small, tmp_path / "x.pth", "--layout", layout)
        assert "Expected student or torchvision or detectron2 or vlightning as the layout" in line
        assert f"got {layout!r}" in line

    content = torch.load(small, weights_only=True)
    content["hyper_parameters"]["student"] = "resnet14"
    torch.save(content, tmp_path / "x.ckpt")
    assert "Expected weights of resnet14 in" in _refused(capsys, tmp_path / "x.ckpt", tmp_path / "x.pth")
    del content["hyper_parameters"]["student"]
    torch.save(content, tmp_path / "x.ckpt")
    assert "got no student: it is of another class" in _refused(capsys, tmp_path / "x.ckpt", tmp_path / "x.pth")
    assert sorted(Path(tmp_path).rglob("*")) == [tmp_path / "folder", there, tmp_path / "x.ckpt"]
