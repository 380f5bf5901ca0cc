"""`vlightning evaluate` as it is typed: a checkpoint on all sets, an export, two processes, a killed run, callbacks."""

import json
import signal
import time
from pathlib import Path

import pyarrow.parquet
import pytest
from lightning import seed_everything

from support.data.evaluation_sets import COLORS, LABELS, color_model, picture, write_image_set, write_task
from support.runs.command_line import run
from support.runs.distributed import run_distributed
from support.runs.forked import VLIGHTNING, Forked, run_script
from vlightning.commands.evaluate.encoding import Loading
from vlightning.commands.evaluate.results import read_results
from vlightning.commands.evaluate.run import Settings, evaluate
from vlightning.commands.evaluate.tasks import AGGREGATES, DATACOMP, SUITES, TASKS

CONFIG = Path(__file__).resolve().parents[3] / "configs/albef/quickstart.yaml"
KEYS = (
    "imagenet-r",
    "vtab/pets",
    "wilds/iwildcam",
    "wilds/fmow",
    "fairness/dollar_street",
    "misc/winogavil",
    "retrieval/flickr_1k_test_image_text_retrieval",
    "fairness/fairface",
    "sugarcrepe/add_att",
)
_EACH_KIND = "--tasks=" + ",".join(KEYS)  # and with each kind of main metric


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    for task in SUITES["all"]:
        write_task(folder, task)
    write_image_set(folder, TASKS["vtab/pets"], LABELS[::-1], split="train")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The checkpoint of two steps of ALBEF's quickstart."""
    folder = tmp_path_factory.mktemp("run")
    ran = run(
        *("fit", f"--config={CONFIG}", "--trainer.max_steps=2", "--trainer.limit_val_batches=0"),
        *("--trainer.accelerator=cpu", f"--trainer.logger.init_args.save_dir={folder}", "--data.length=64"),
        *("--data.eval_length=16", "--data.num_workers=0", "--trainer.enable_progress_bar=false"),
    )
    assert ran.status == 0, ran.err
    return next(folder.rglob("last.ckpt"))


def options(root, out, *words, sets=_EACH_KIND):
    return ("evaluate", "--root", root, "--out", out, sets, "--accelerator=cpu", "--num_workers=0", *words)


@pytest.fixture(scope="module")
def whole(root, trained, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "results.jsonl"
    ran = run(*options(root, out, "--model", trained, sets="--suite=all"))
    assert ran.status == 0, ran.err
    return out, ran.out


def numbers(file):
    """The metrics of the sets of each kind."""
    results = [result for result in read_results(file) if result.key in KEYS]
    assert len(results) == len(KEYS)
    return {f"{result.key} {name}": value for result in results for name, value in result.metrics.items()}


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_on_all_sets_to_tables_and_a_chart(whole):
    out, printed = whole
    results = read_results(out)
    assert [result.key for result in results] == [task.key for task in SUITES["all"]]
    assert all(0 <= result.main <= 1 and result.samples for result in results)
    assert "1 of 50: imagenet1k, zero_shot: " in printed
    assert "Missing" not in printed
    tables = out.with_suffix(".md").read_text()
    for name, keys in AGGREGATES.items():
        mean = sum(result.main for result in results if result.key in keys) / len(keys)
        assert f"| {name} | {100 * mean:.2f} | {len(keys)} of {len(keys)} |" in tables
    assert len(AGGREGATES["average"]) == len(DATACOMP) == 38
    assert {file.suffix for file in out.parent.iterdir()} == {".jsonl", ".md", ".csv", ".png", ".cache"}


def test_an_export_gives_the_numbers_of_its_checkpoint(root, trained, whole, tmp_path):
    assert run("export", trained, tmp_path / "export").status == 0
    assert run(*options(root, tmp_path / "r.jsonl", "--model", tmp_path / "export")).status == 0
    assert numbers(tmp_path / "r.jsonl") == pytest.approx(numbers(whole[0]), abs=1e-9)


def test_the_callbacks_give_the_numbers_of_the_command(root, trained, whole, tmp_path):
    data = root / TASKS["vtab/pets"].folder
    words = ("--protocol=knn", "--k=3", "--model", trained)
    assert run(*options(root, tmp_path / "r.jsonl", *words, sets="--tasks=vtab/pets")).status == 0
    (neighbours,) = read_results(tmp_path / "r.jsonl")
    ran = run(
        *("test", f"--ckpt_path={trained}", f"--config={CONFIG}", "--data.eval_length=16", "--data.num_workers=0"),
        *("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"),
        "--trainer.callbacks+=ZeroShotClassification",
        "--trainer.callbacks.data=ImageClassificationDataModule",
        f"--trainer.callbacks.data.test={data}/test/*.tar",
        *("--trainer.callbacks.data.label_column=cls", "--trainer.callbacks.data.num_workers=0"),
        f"--trainer.callbacks.class_names={data}/classnames.txt",
        "--trainer.callbacks.templates=['a photo of a {} square.', 'a {} thing']",
        "--trainer.callbacks+=NearestNeighbourClassification",
        "--trainer.callbacks.k=3",
        "--trainer.callbacks.data=ImageClassificationDataModule",
        f"--trainer.callbacks.data.train={data}/train/*.tar",
        f"--trainer.callbacks.data.test={data}/test/*.tar",
        *("--trainer.callbacks.data.label_column=cls", "--trainer.callbacks.data.num_workers=0"),
    )
    assert ran.status == 0, ran.err
    shown = {line.split()[0]: float(line.split()[1]) for line in ran.out.splitlines() if line.startswith("test/")}
    zero_shot = {result.key: result.metrics for result in read_results(whole[0])}["vtab/pets"]
    for name, metrics in (("zero_shot", zero_shot), ("neighbours", neighbours.metrics)):
        assert shown[f"test/{name}_top1"] == pytest.approx(100 * metrics["acc1"], abs=0.01)
        assert shown[f"test/{name}_top5"] == pytest.approx(100 * metrics["acc5"], abs=0.01)
        assert shown[f"test/{name}_class_recall"] == pytest.approx(100 * metrics["mean_per_class_recall"], abs=0.01)


@pytest.mark.slow
def test_two_processes_that_the_command_starts_give_the_numbers_of_one(root, trained, whole, tmp_path):
    words = options(root, tmp_path / "r.jsonl", "--model", trained, "--devices=2")
    done = run_script([VLIGHTNING, *map(str, words)], cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 of 9: imagenet-r") == done.stdout.count("| average |") == 1
    assert numbers(tmp_path / "r.jsonl") == pytest.approx(numbers(whole[0]), abs=1e-9)


def on_rank(root, out):
    tasks = [TASKS[key] for key in KEYS]
    found = evaluate(color_model(), tasks, Settings(Path(root), Loading(3, 0)), Path(out))
    return [dict(result.metrics) | {"samples": result.samples} for result in found]


def test_each_process_encodes_its_share_and_has_the_whole_result(root, tmp_path):
    one = on_rank(root, tmp_path / "one.jsonl")
    # Of three processes, one has no image of the smallest set.
    for ranks in run_distributed(on_rank, str(root), str(tmp_path / "several.jsonl"), processes=3):
        assert ranks == [pytest.approx(metrics, abs=1e-9) for metrics in one]


def test_a_killed_evaluation_goes_on_with_the_set_that_it_was_in(root, trained, whole, tmp_path):
    out = tmp_path / "results.jsonl"
    words = [VLIGHTNING, *map(str, options(root, out, "--model", trained))]
    running = Forked(words, cwd=tmp_path)
    while not out.exists() or len(out.read_text().splitlines()) < 2:
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.communicate()
    before = [json.loads(line) for line in out.read_text().splitlines()]
    assert 2 <= len(before) <= len(KEYS)
    ran = run(*map(str, options(root, out, "--model", trained)))
    assert ran.status == 0
    assert f"1 of {len(KEYS)}: " not in ran.out
    assert [json.loads(line) for line in out.read_text().splitlines()][: len(before)] == before
    assert numbers(out) == pytest.approx(numbers(whole[0]), abs=1e-9)


def test_own_images_are_classified(trained, tmp_path):
    (tmp_path / "photos").mkdir()
    for number, color in enumerate(COLORS):
        (tmp_path / f"photos/{color}.png").write_bytes(picture(color, number))
    words = ("--images", tmp_path / "photos", "--out", tmp_path / "c.parquet", "--html", tmp_path / "c.html")
    ran = run("evaluate", "--model", trained, "--classes", "red", "a blue thing", "--num_workers=0", *words)
    assert ran.status == 0, ran.err
    assert "Classified 6 images by" in ran.out
    rows = pyarrow.parquet.read_table(tmp_path / "c.parquet").to_pylist()
    assert all(set(row["classes"]) == {"red", "a blue thing"} for row in rows)
    assert (tmp_path / "c.html").read_text().count("<img ") == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--root", "."), "Expected --model, got none"),
        (
            ("--model", "none.ckpt", "--root", "."),
            "Expected an existing checkpoint or export as the model, got 'none.ckpt'",
        ),
        (("--model", "ViT-B-32", "--weights", "none", "--root", "."), "Expected one of open_clip's tags of ViT-B-32"),
        (("--model", "none.ckpt"), "Expected --root with sets, or --images"),
        (("--model", "none.ckpt", "--suite", "all", "--images", "."), "Expected --root with sets, or --images"),
        (("--model", "none.ckpt", "--suite", "all"), "Expected an existing checkpoint or export as the model"),
        (("--compare", "a.jsonl", "b.jsonl"), "Expected results as JSON lines, got no file 'a.jsonl'"),
    ],
)
def test_wrong_use_is_one_sentence(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    ran = run("evaluate", *words)
    assert ran.status == 1
    assert message in ran.err
    assert ran.err.count("\n") == 1


def test_a_wrong_key_or_a_wrong_folder_is_one_sentence(trained, tmp_path):
    ran = run("evaluate", "--model", trained, "--root", tmp_path, "--tasks", "vtab/pet")
    assert "got 'vtab/pet': did you mean 'vtab/pets'?" in ran.err
    ran = run("evaluate", "--model", trained, "--root", tmp_path / "none")
    assert "Expected the folder of the sets after --root" in ran.err
    ran = run("evaluate", "--model", trained, "--root", tmp_path, "--out", tmp_path / "r.jsonl")
    assert "Expected one of 38 sets in " in ran.sentence
    assert "wds_imagenet1k_test', got none: correct --root, or add --download." in ran.sentence


def test_a_model_without_texts_is_refused(tmp_path):
    import torch

    seed_everything(0, verbose=False)
    torch.save({"hyper_parameters": {"_class_path": "vlightning.CoCoRDModule"}, "state_dict": {}}, tmp_path / "c.ckpt")
    ran = run("evaluate", "--model", tmp_path / "c.ckpt", "--root", tmp_path)
    assert "Expected a model of images and texts" in ran.err
    assert "got CoCoRDModule" in ran.err
