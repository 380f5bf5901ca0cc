"""`vlightning export` of a SHRe checkpoint, and a training that starts from the folder."""

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from transformers import AutoTokenizer

from support.methods.methods import METHODS
from support.runs.command_line import export as main
from vlightning.lightning_modules import SHReModule

SHRE = METHODS["shre"]


def trainer(**options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", max_steps=1, limit_val_batches=0, enable_model_summary=False, **quiet, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint that Python wrote, which names no class path, and its module."""
    folder = tmp_path_factory.mktemp("shre")
    module, data = SHRE.build(SHRE.prepare(folder), seed=0, batch_size=8, num_workers=0)
    fitted = trainer()
    fitted.fit(module, data)
    fitted.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt", module


def test_the_exported_folder_is_the_trained_model_with_its_tokenizer(trained, tmp_path, capsys):
    checkpoint, module = trained
    main([str(checkpoint), str(tmp_path / "out")])
    assert f"with its tokenizer; SHReModule.from_pretrained('{tmp_path / 'out'}') reads it" in capsys.readouterr().out
    loaded = SHReModule.from_pretrained(tmp_path / "out")
    image = torch.rand(3, 3, 16, 16)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = tokenizer(
        ["a red circle", "a blue square above a green one"],
        padding=True,
        max_length=8,
        truncation=True,
        return_tensors="pt",
    )
    texts = texts["input_ids"], texts["attention_mask"]
    assert texts[1][0].min() == 0
    module.eval()
    with torch.no_grad():
        for found, expected in (
            (loaded.classify_images(image), module.classify_images(image)),
            (loaded.classify_texts(*texts), module.classify_texts(*texts)),
        ):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert list(loaded.expected_preprocessing()["mean"]) == list(module.preprocessing()["mean"])


class Start(Callback):
    """Copies the student before the first step."""

    def on_train_start(self, trainer, pl_module):
        self.student = {name: value.clone() for name, value in pl_module.student.state_dict().items()}


def test_a_training_starts_from_the_folder(trained, tmp_path):
    checkpoint, module = trained
    main([str(checkpoint), str(tmp_path / "out")])
    other, data = SHRE.build(SHRE.prepare(tmp_path), seed=1, batch_size=8, num_workers=0)
    other.weights = str(tmp_path / "out")
    assert other.initial_preprocessing() == module.preprocessing()
    start = Start()
    trainer(callbacks=[start]).fit(other, data)
    for name, value in module.student.state_dict().items():
        assert torch.equal(start.student[name], value), name


def test_another_layout_is_refused(trained, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(trained[0]), str(tmp_path / "out"), "--layout", "student"])
    assert (
        "Expected vlightning or torch_export or onnx or onnx_int8 or immich or coreml or executorch as the layout of "
        "SHReModule" in capsys.readouterr().err
    )
