"""VQA by the command line: a run, its answers to questions, and its export, which answers alike."""

import json

import pyarrow.parquet as pq
import pytest
import torch

from support.methods.albef import IMAGE_SIZE, SIZES
from support.runs.command_line import run
from vlightning.lightning_modules import VQAModule

MODEL = {"vision": SIZES["vision"], "text": SIZES["text"] | {"vocab_size": 200, "max_positions": 48}}
DATA = {"image_size": IMAGE_SIZE, "batch_size": 4, "length": 8, "eval_length": 3, "vocab_size": 200, "num_workers": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vqa")
    config = {
        "model": {"class_path": "VQAModule", "init_args": MODEL},
        "data": {"class_path": "ShapesVQADataModule", "init_args": DATA | {"questions_per_image": 2}},
        "trainer": {"max_steps": 2, "limit_val_batches": 0, "accelerator": "cpu", "enable_progress_bar": False},
    }
    (folder / "vqa.yaml").write_text(json.dumps(config))
    logger = "--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={folder}"
    ran = run("fit", "--config", folder / "vqa.yaml", *logger)
    assert ran.status == 0, ran.err
    return next(folder.rglob("last.ckpt"))


def test_predict_answers_each_question_once(trained, tmp_path):
    quiet = "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"
    ran = run("predict", "--ckpt_path", trained, *quiet, f"--trainer.default_root_dir={tmp_path}")
    assert ran.status == 0, ran.err
    rows = pq.read_table(next(tmp_path.rglob("answers.parquet"))).to_pylist()
    assert [row["sample_index"] for row in rows] == list(range(12))
    assert all(row["question"].endswith("?") and row["image"].startswith("shape image") for row in rows)
    assert all(row["top_answers"][0] == row["answer"] and len(row["top_answers"]) == 5 for row in rows)
    server = json.loads(next(tmp_path.rglob("answers.json")).read_text())
    assert server == [{"question_id": row["sample_index"], "answer": row["answer"]} for row in rows]


def test_the_export_is_the_trained_model(trained, tmp_path):
    for words in (["vqa"], ["vqa.pth", "--layout", "albef"]):
        ran = run("export", trained, tmp_path / words[0], *words[1:])
        assert ran.status == 0, ran.err
    expected = torch.load(trained, weights_only=True)["state_dict"]
    read = [VQAModule.from_pretrained(tmp_path / "vqa")]
    for name in ("vqa", "vqa.pth"):
        read.append(VQAModule(**dict(read[0].hparams) | {"weights": str(tmp_path / name)}))
        read[-1].load_initial_weights()
    for module in read:
        state = module.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())
