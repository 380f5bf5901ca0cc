"""`vlightning export`, from a checkpoint that a training wrote."""

import json

import pytest
import torch
from lightning import Trainer

from support.data.images import draw_image
from support.methods.albef import SIZES, merged, random_batch, tiny_albef
from support.runs.command_line import export as main
from support.runs.command_line import run
from support.runs.forked import run_script
from vlightning.common.tokenizers import open_tokenizer
from vlightning.datamodules import ShapesDataModule
from vlightning.lightning_modules import ALBEFModule
from vlightning.lightning_modules.albef.official import to_official

TEXT = {"text": {"vocab_size": 250, "max_positions": 32}}
CONFIG = f"""\
model:
  class_path: ALBEFModule
  init_args: {json.dumps(merged(SIZES, TEXT))}
data:
  class_path: ShapesDataModule
  init_args: {{image_size: 16, batch_size: 8, length: 16, eval_length: 8, vocab_size: 250, append_sep: false}}
trainer: {{max_epochs: 1, accelerator: cpu, enable_progress_bar: false, enable_model_summary: false}}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of the command line."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.yaml").write_text(CONFIG)
    logger = ("--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={folder}", "--trainer.logger.name=run")
    ran = run("fit", "--config", str(folder / "tiny.yaml"), *logger)
    assert ran.status == 0, ran.err
    return next(folder.rglob("last.ckpt"))


def _refused(capsys, *words):
    """The one line that a refused export prints."""
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    assert stopped.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_exported_folder_is_the_trained_model_with_its_tokenizer(trained, tmp_path, capsys):
    main([str(trained), str(tmp_path / "out")])
    assert "with its tokenizer" in capsys.readouterr().out
    module = ALBEFModule.from_pretrained(tmp_path / "out")
    state = torch.load(trained, weights_only=True)["state_dict"]
    own = {name: value for name, value in module.state_dict().items() if "queue" not in name}
    assert own.keys() == {name for name in state if "queue" not in name}
    assert all(torch.equal(value, state[name]) for name, value in own.items())
    assert not torch.equal(own["student.text_proj.weight"], own["teacher.text_proj.weight"])

    data = ShapesDataModule(length=16, eval_length=8, vocab_size=250, append_sep=False)
    data.setup("fit")  # trains the same tokenizer again
    sentence = "a small red circle above a large blue ring"
    ids = open_tokenizer(str(tmp_path / "out"))(sentence)["input_ids"]
    assert ids == data.tokenizer(sentence)["input_ids"]
    assert ids[0] == 101
    assert 102 not in ids  # append_sep: false


def test_exported_file_is_the_authors_layout_with_the_queues(trained, tmp_path, capsys):
    main([str(trained), str(tmp_path / "albef.pth"), "--layout", "albef"])
    assert "pre-training layout" in capsys.readouterr().out
    written = torch.load(tmp_path / "albef.pth", weights_only=True)
    assert written.keys() == {"model"}
    expected = to_official(ALBEFModule.load_from_checkpoint(trained, weights_only=True))
    assert written["model"].keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in written["model"].items())
    assert written["model"]["image_queue"].any()


def test_both_layouts_start_the_next_training(trained, tmp_path):
    main([str(trained), str(tmp_path / "out")])
    main([str(trained), str(tmp_path / "albef.pth"), "--layout", "albef"])
    batch = random_batch(4)
    features = []
    for source in ("out", "albef.pth"):
        module = tiny_albef(changes=TEXT, weights=str(tmp_path / source))
        module.load_initial_weights()
        with torch.no_grad():
            features.append(module.eval()(batch)[1])
    assert torch.equal(*features)


def test_bf16_checkpoint_without_data_stays_bf16(tmp_path, capsys):
    module = tiny_albef().bfloat16()
    trainer = Trainer(logger=False, accelerator="cpu", enable_checkpointing=False, default_root_dir=tmp_path)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    main([str(tmp_path / "x.ckpt"), str(tmp_path / "out")])
    assert "without a tokenizer" in capsys.readouterr().out
    assert ALBEFModule.from_pretrained(tmp_path / "out").temperature.dtype == torch.bfloat16


def test_an_unreadable_tokenizer_is_reported_and_omitted(trained, tmp_path, capsys):
    content = torch.load(trained, weights_only=True)
    content["ShapesDataModule"]["tokenizer"] = None
    content["datamodule_hyper_parameters"]["tokenizer"] = "/gone/vocab.txt"
    torch.save(content, tmp_path / "x.ckpt")
    main([str(tmp_path / "x.ckpt"), str(tmp_path / "out")])
    assert "without its tokenizer (Expected a tokenizer" in capsys.readouterr().out
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_refused_exports_are_one_sentence(trained, tmp_path, capsys):
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    assert "gone.ckpt', which does not exist" in _refused(capsys, tmp_path / "gone.ckpt", tmp_path / "out")
    assert "which exists" in _refused(capsys, trained, full)
    assert "which exists" in _refused(capsys, trained, full / "file", "--layout", "albef")
    assert "Expected a readable checkpoint" in _refused(capsys, full / "file", tmp_path / "out")

    content = torch.load(trained, weights_only=True)
    content["hyper_parameters"]["_class_path"] = "vlightning.lightning_modules.BLIPModule"
    torch.save(content, tmp_path / "x.ckpt")
    assert "got one of BLIPModule in" in _refused(capsys, tmp_path / "x.ckpt", tmp_path / "out")
    content["hyper_parameters"] = {"depth": 1}
    torch.save(content, tmp_path / "x.ckpt")
    assert "got 'depth'" in _refused(capsys, tmp_path / "x.ckpt", tmp_path / "out")
    torch.save({"model": {}}, tmp_path / "x.ckpt")
    assert "without hyper_parameters beside a state_dict" in _refused(capsys, tmp_path / "x.ckpt", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    assert "name of a new file" in _refused(capsys, trained, tmp_path / "empty", "--layout", "albef")
    line = _refused(capsys, trained, tmp_path / "student.pth", "--layout", "student")
    assert (
        "Expected vlightning or albef or transformers or torch_export or onnx or onnx_int8 or immich or coreml or "
        "executorch as the layout of ALBEFModule" in line
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full", "x.ckpt"]


def test_module_runs_as_a_command_and_describes_itself():
    done = run_script(["-m", "vlightning.cli", "export", "--help"])
    assert done.returncode == 0, done.stderr
    layouts = "vlightning,albef,transformers,torch_export,onnx,onnx_int8,immich,coreml,executorch,open_clip,vendor"
    layouts += ",adapters,student,torchvision,detectron2,learngene,tower"
    assert f"--layout {{{layouts}}}" in done.stdout


@pytest.mark.slow
def test_every_command_that_takes_a_checkpoint_takes_the_folder_of_its_run(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = trained.parent.parent
    best = next(folder.glob("checkpoints/best-*.ckpt"))
    said = f"Checkpoint: {best}, the best of its run."
    (tmp_path / "photos").mkdir()
    draw_image(0).save(tmp_path / "photos/0.png")
    fit = ("fit", "--config", f"{folder.parents[1]}/tiny.yaml", "--trainer.max_steps=1", "--trainer.logger=false")
    quiet = ("--trainer.logger=false", "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu")
    commands = {
        "export": ("export", folder, "out"),
        "programs": ("export", folder, "albef.pth", "--layout=albef"),
        "convert": ("convert", folder, "sharded"),
        "evaluate": ("evaluate", "--model", folder, "--images=photos", "--classes", "a", "b", "--num_workers=0"),
        "validate": ("validate", "--ckpt_path", folder, *quiet),
        "predict": ("predict", "--ckpt_path", folder, *quiet),
        "weights": (*fit, "--model.weights", folder, "--trainer.enable_checkpointing=false"),
    }
    for name, words in commands.items():
        ran = run(*words)
        assert ran.status == 0, f"{name}: {ran.err}"
        assert said in ran.out + ran.err, name
    assert run("export", trained, "last").status == 0
    (tmp_path / "empty/checkpoints").mkdir(parents=True)
    for words in (("export", "empty", "x"), ("convert", "empty", "x"), (*fit, "--model.weights", "empty")):
        assert run(*words).sentence.startswith("Expected a checkpoint in the run folder 'empty', got none")
    assert (
        "Expected a .ckpt file, the folder of a sharded checkpoint or of a run, got 'photos'"
        in run("export", "photos", "x").sentence
    )
