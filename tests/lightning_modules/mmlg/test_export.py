"""`vlightning export` of MM-LG's checkpoints: open_clip's folder, and the learngene's file."""

import open_clip
import pytest
import torch

from support.methods.clip import LENGTH, reinforced_batch
from support.methods.mmlg import trained_checkpoint
from support.runs.command_line import export as main
from vlightning.callbacks.learngene.file import load_learngene
from vlightning.lightning_modules.networks.published_clip import load_published

PROGRAMS = "torch_export or onnx or onnx_int8 or immich or coreml or executorch"


@pytest.mark.parametrize(
    "options", [{}, {"student": "TLEG"}, {"student": "plain", "depth": 3}], ids=["MM-LG", "TLEG", "plain"]
)
def test_open_clip_loads_the_clip_that_was_trained_and_it_is_a_teacher(tmp_path, options, capsys):
    module, checkpoint = trained_checkpoint(tmp_path, image_mean=[0.1, 0.2, 0.3], **options)
    main([checkpoint, str(tmp_path / "out")])
    assert f"the CLIP of {options.get('depth', 4)} layers a tower" in capsys.readouterr().out
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'out'}")
    columns = reinforced_batch(3, dtype=torch.float32)
    with torch.no_grad():
        found = model.eval()(columns["image"], columns["input_ids"])
        expected = module({**columns, "attention_mask": None})
    for one, other in zip(found, expected, strict=False):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[2], module.student.logit_scale.exp().squeeze().detach())
    assert tuple(transform.transforms[-1].mean) == (0.1, 0.2, 0.3)
    teacher = load_published(None, str(tmp_path / "out"))
    assert teacher.preprocessing.mean == (0.1, 0.2, 0.3)
    assert teacher.network.context_length == LENGTH


@pytest.mark.parametrize(("student", "method"), [("MM-LG", "MM-LG"), ("plain", "He-LG")])
def test_a_learngene_is_exported_from_a_checkpoint(tmp_path, student, method, capsys):
    module, checkpoint = trained_checkpoint(tmp_path, student=student)
    main([checkpoint, str(tmp_path / "file"), "--layout", "learngene"])
    assert f"the learngene of {method}" in capsys.readouterr().out
    found = load_learngene(tmp_path / "file")
    assert (found.method, found.step, found.sizes) == (method, 0, module.student.sizes)
    expected = module.learngene().tensors
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.tensors.items())


def test_refused_exports_are_one_line(tmp_path, capsys):
    _, checkpoint = trained_checkpoint(tmp_path, student="plain")
    (tmp_path / "empty").mkdir()
    content = torch.load(checkpoint, weights_only=True)
    arguments = content["hyper_parameters"]
    deeper = arguments | {"towers": arguments["towers"] | {"depth": 5}}
    torch.save(content | {"hyper_parameters": deeper}, tmp_path / "other.ckpt")
    for words, message in (
        ((checkpoint, str(tmp_path / "empty"), "--layout", "learngene"), "got the folder"),
        (
            (checkpoint, str(tmp_path / "out"), "--layout", "vendor"),
            f"Expected open_clip or transformers or {PROGRAMS} or learngene or vlightning as",
        ),
        ((str(tmp_path / "other.ckpt"), str(tmp_path / "out")), "the tensors of MMLGModule from the checkpoint"),
    ):
        with pytest.raises(SystemExit):
            main(list(words))
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert not (tmp_path / "out").exists()
