"""Fine-tuning as a user types it: a folder of a model, images and a CSV of captions."""

import csv
import json
import random
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from support.data.evaluation_sets import LABELS, write_image_set
from support.methods.published import LENGTH, write_published
from support.runs.command_line import run
from vlightning.callbacks import AtomicCheckpointIO
from vlightning.commands.evaluate.results import read_results
from vlightning.commands.evaluate.tasks import TASKS
from vlightning.lightning_modules import CLIPModule

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs/clip/finetune.yaml", ROOT / "configs/clip/lora.yaml"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model and pairs: plain images, whose captions say which color they have."""
    folder = tmp_path_factory.mktemp("finetune")
    write_published(folder / "model")
    (folder / "images").mkdir()
    draw, rows = random.Random(0), []
    for number in range(40):
        color = tuple(draw.choice((0, 120, 255)) for _ in range(3))
        Image.new("RGB", (40, 36), color).save(folder / f"images/{number}.png")
        rows.append((f"images/{number}.png", " ".join(("dark", "half", "full")[part // 100] for part in color)))
    for name, part in (("pairs", rows[:32]), ("held_out", rows[32:])):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("image", "caption"), *part])
    return folder


def fit(files, *words):
    given = [f"--config={config}" for config in CONFIGS[: 2 if "lora" in words else 1]]
    words = [word for word in words if word != "lora"]
    data = [f"--data.train={files}/pairs.csv", f"--data.validation={files}/held_out.csv", "--data.num_workers=0"]
    small = [f"--data.max_tokens={LENGTH}", "--data.batch_size=8", "--trainer.accelerator=cpu"]
    return run("fit", *given, f"--model.weights={files}/model", *data, *small, *words)


@pytest.mark.slow
def test_one_command_beats_the_starting_point_and_the_result_is_exported_and_evaluated(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rate = "--model.optim.learning_rate=1e-2"
    done = fit(files, "lora", "--trainer.max_epochs=12", rate)
    assert done.status == 0, done.err
    checkpoint = tmp_path / "runs/clip/lora/version_0/checkpoints/last.ckpt"
    content = AtomicCheckpointIO().load_checkpoint(checkpoint)
    before = content["callbacks"]["StartingPoint"]["before"]
    table = {line.split()[0]: line.split()[1:] for line in done.out.splitlines() if line.startswith("val/")}
    assert table.keys() == before.keys()
    first, last, change = map(float, table["val/recall_mean"])
    assert first == pytest.approx(before["val/recall_mean"], rel=1e-3)
    assert change == pytest.approx(last - first, abs=0.1)
    assert change > 0  # of eight pairs
    assert content["hyper_parameters"]["model"]["config"]["embed_dim"] == 16
    trained = {name for name in content["state_dict"] if ".lora_B." in name}
    assert all(content["state_dict"][name].any() for name in trained)

    exported = run("export", str(checkpoint), "merged")
    assert exported.status == 0, exported.err
    alone = run("export", "--layout", "adapters", str(checkpoint), "adapters")
    assert alone.status == 0, alone.err
    assert json.loads((tmp_path / "adapters/adapter_config.json").read_text())["r"] == 16
    folder = "--model.weights=" + str(tmp_path / "merged")
    again = run(
        *("validate", f"--config={CONFIGS[0]}", folder, f"--data.validation={files}/held_out.csv"),
        *(f"--data.max_tokens={LENGTH}", "--trainer.accelerator=cpu", "--data.num_workers=0"),
    )
    assert again.status == 0, again.err
    assert f"{last:.4g}" in again.out  # recall_mean of the merged model

    write_image_set(tmp_path / "sets", TASKS["cifar10"], LABELS)
    options = ("--root=sets", "--tasks=cifar10", "--accelerator=cpu", "--num_workers=0")
    line = run("evaluate", f"--model={checkpoint}", "--interpolate", "0", "0.5", "1", "--out=line.jsonl", *options)
    assert line.status == 0, line.err
    shown = [row.split("|")[1].strip() for row in line.out.splitlines() if row.startswith("| ")]
    assert shown == ["ratio", "0", "0.5", "1"]
    first, half, last = (read_results(tmp_path / f"line-{ratio}.jsonl")[0].sha256 for ratio in ("0", "0.5", "1"))
    assert len({first, half, last}) == 3
    half = CLIPModule.interpolated(content, "it", 0.5)
    AtomicCheckpointIO().save_checkpoint(half, tmp_path / "half.ckpt")
    again = run("validate", "--ckpt_path=half.ckpt", "--trainer.accelerator=cpu")
    assert again.status == 0, again.err
    content = half["state_dict"]
    ends = [load_file(folder / "open_clip_model.safetensors") for folder in (files / "model", tmp_path / "merged")]
    for name, found in content.items():
        before, after = (end[name.removeprefix("student.")].reshape(found.shape) for end in ends)
        torch.testing.assert_close(found, (before + after) / 2)


def test_a_mistake_is_one_sentence(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = fit(files, "--data.image_size=64", "--model.vision.image_size=32")
    assert done.sentence.startswith("Expected the same image_size for module and data")


def test_the_guard_of_the_page_is_in_the_table_of_what_was_gained_and_forgotten(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/methods/clip.md").read_text()
    Path("guard.yaml").write_text(page.partition("```yaml\n# guard.yaml\n")[2].partition("```")[0])
    for name, color in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        folder = tmp_path / "guard/val" / name
        folder.mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (40, 36), color).save(folder / f"{number}.png")
    done = fit(files, "--config=guard.yaml", "--trainer.max_epochs=2", "--model.optim.learning_rate=1e-2")
    assert done.status == 0, done.err
    table = {line.split()[0]: line.split()[1:] for line in done.out.splitlines() if line.startswith("val/")}
    assert {"val/recall_mean", "val/guard_top1"} <= table.keys()
    content = AtomicCheckpointIO().load_checkpoint(
        tmp_path / "runs/clip/finetune_guard/version_0/checkpoints/last.ckpt"
    )
    before, after, change = map(float, table["val/guard_top1"])
    assert before == pytest.approx(content["callbacks"]["StartingPoint"]["before"]["val/guard_top1"], abs=0.01)
    assert {before, after} <= {0.0, 16.67, 33.33, 50.0, 66.67, 83.33, 100.0}  # of six images
    assert change == pytest.approx(after - before, abs=0.02)
