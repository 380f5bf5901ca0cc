"""The driver of `benchmarks/proof/`, with runs of a few steps on drawn shapes."""

import copy
import json
import threading

import datasets
import pytest
import torch
from proof.claim import Run, load_claim
from proof.driver import Driver
from proof.hashes import code_hash, config_hash
from proof.materials import replaced, rows_of
from proof.plan import DONE, Folders
from proof.recording import LinearProbe
from proof.results import append_line, key_of, only_process, read_lines
from proof.tables import out_of_date
from proof.training import rounded

from support.data.images import draw_image, encoded
from support.project.sources import ROOT
from support.proof import drawn
from support.runs.fork_server import fork_context
from vlightning.commands.evaluate.classification import linear_probe
from vlightning.datamodules import ShapeClassesDataModule

CLAIMS = {name: str(ROOT / f"tests/support/proof/{name}.py") for name in ("drawn", "faulty")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("proof")
    return Folders(str(folder), folder / "work", folder / "results")


def work(name, folders):
    """Do the runs of a claim, and return how many failed."""
    return Driver([CLAIMS[name]], folders, jobs=2, context=fork_context()).work()


@pytest.fixture(scope="module")
def lines(folders):
    """The lines of the drawn claim."""
    outputs = folders.work.glob("drawn/*/output.txt")
    assert work("drawn", folders) == 0, [path.read_text()[-3000:] for path in outputs]
    return read_lines(folders.file("drawn"))


def by_key(lines):
    return {key_of(line): line for line in lines}


@pytest.mark.slow
def test_each_run_of_a_claim_has_one_line(lines):
    expected = {("teacher", "", None, 0)}
    expected |= {(name, "equal FLOPs", 0.05, seed) for name in ("labels", "KD") for seed in (0, 1)}
    assert {key_of(line) for line in lines} == expected
    assert len(lines) == 5


def test_trainings_of_a_budget_have_equal_counted_flops(lines):
    trained = [line for line in lines if line["budget"]]
    for line in trained:
        half_a_round = line["flops_of_step"]  # of two validations
        assert abs(line["flops"] - drawn.FLOPS) <= half_a_round
        assert line["flops"] == line["flops_of_step"] * line["steps"]
        assert [point["flops"] for point in line["curve"]] == [line["flops"] / 2, line["flops"]]
    steps = {line["variant"]: line["steps"] for line in trained}
    assert steps["KD"] < steps["labels"]


def test_the_count_of_a_step_includes_the_teacher(lines):
    of_step = {line["variant"]: line["flops_of_step"] for line in lines}
    # The teacher has the student's network. Forward and backward cost three times a forward pass, but for the first
    # layer, whose images need no gradient.
    first_layer = 2 * 8 * (3 * 3 * 3) * 16 * 8 * 8
    assert of_step["KD"] - of_step["labels"] == pytest.approx((of_step["labels"] + first_layer) / 3, rel=1e-9)


def test_a_line_names_the_teachers_metrics_and_what_was_spent_once(lines):
    (teacher,) = (line for line in lines if not line["budget"])
    for line in lines:
        taught = line["variant"] == "KD"
        assert line["teachers"] == ({"teacher": teacher["metrics"]} if taught else {})
        assert line["once"] == ({"teacher": teacher["flops"]} if taught else {})
        assert line["metrics"] == line["curve"][-1]["metrics"]
        assert line["cpu_seconds"] > 0
        assert line["machine"].keys() >= {"processor", "cores", "torch"}


def test_seeds_differ_in_their_results_and_in_nothing_of_the_config(lines):
    first, second = (by_key(lines)["labels", "equal FLOPs", 0.05, seed] for seed in (0, 1))
    assert first["metrics"]["val/loss"] != second["metrics"]["val/loss"]
    assert first["config_hash"] == second["config_hash"]
    assert first["step"] == second["step"]


def test_finished_runs_are_skipped(lines, folders):
    markers = {path: path.stat().st_mtime_ns for path in folders.work.rglob(DONE)}
    assert len(markers) == 5
    assert work("drawn", folders) == 0
    assert {path: path.stat().st_mtime_ns for path in folders.work.rglob(DONE)} == markers
    assert read_lines(folders.file("drawn")) == lines


def test_a_failing_run_is_logged_and_a_killed_one_ends_as_the_uninterrupted_one(lines, folders):
    assert work("faulty", folders) == 2
    log = [json.loads(line) for line in (folders.work / "failures.jsonl").read_text().splitlines()]
    status = {line["run"].split(": ")[1].split(",")[0]: line["status"] for line in log}
    assert status.pop("killed") == -9
    assert status.pop("failing") > 0
    assert status == {}
    assert "resnet9" in next(line["output"] for line in log if "failing" in line["run"])
    assert read_lines(folders.file("faulty")) == []

    assert work("faulty", folders) == 1
    (killed,) = read_lines(folders.file("faulty"))
    uninterrupted = by_key(lines)["labels", "equal FLOPs", 0.05, 0]
    assert killed["curve"] == uninterrupted["curve"]
    assert killed["steps"] == uninterrupted["steps"]
    output = (folders.of(Run("faulty", "killed", "equal FLOPs", 0.05, 0)) / "output.txt").read_text()
    assert output.count("--ckpt_path=") == 1  # of the second try


def test_the_linear_probe_is_that_of_the_command():
    generator = torch.Generator().manual_seed(0)
    features = torch.nn.functional.normalize(torch.randn(60, 5, generator=generator), dim=1)
    label = features[:, :3].argmax(1)
    weight, bias = linear_probe(features, label, 3)
    with torch.inference_mode():  # in which the Trainer tests
        scores = LinearProbe(ShapeClassesDataModule()).classifier(features.clone(), label.clone(), 3)(features[:7])
    torch.testing.assert_close(scores, features[:7].double() @ weight.T + bias)
    assert (scores.argmax(1) == label[:7]).float().mean() > 0.8


def test_what_was_measured_with_the_present_code_is_up_to_date(lines):
    assert out_of_date(lines) == []


def test_a_changed_default_of_the_loss_is_out_of_date(lines):
    for line in lines:
        then = copy.deepcopy(line)
        then["config"]["model"]["init_args"]["kd"]["temperature"] = 3.0  # no word gives it
        texts = [f"drawn, {line['variant']}: model.init_args.kd.temperature: 3.0 -> 4.0"]
        assert out_of_date([then]) == texts
        assert config_hash(then["config"]) != line["config_hash"] == config_hash(line["config"])


def test_a_changed_file_of_the_step_is_out_of_date_unless_accepted(lines):
    file = "lightning_modules/cocord/losses.py"
    (line,) = (line for line in lines if line["variant"] == "teacher")
    now = line["step"][file]
    old = line | {"step": line["step"] | {file: "before"}}
    assert out_of_date([old]) == [f"drawn, teacher: {file}: before -> {now}"]
    assert out_of_date([old], [{"file": file, "before": "before", "after": now, "why": "a name"}]) == []
    setting = "model.init_args.kd.temperature"
    config = json.loads(json.dumps(line["config"]))
    del config["model"]["init_args"]["kd"]["temperature"]  # as before the option was added
    assert out_of_date([line | {"config": config}]) == [f"drawn, teacher: {setting}: None -> 4.0"]
    assert out_of_date([line | {"config": config}], [{"setting": setting, "before": None, "after": 4.0}]) == []
    export = "lightning_modules/cocord/export.py"  # which no training reads
    assert export not in line["step"]
    assert out_of_date([line | {"step": line["step"] | {export: "before"}}]) == []


def test_comments_and_docstrings_are_not_of_the_step_but_numbers_are():
    source = '''def f(x):
    """Double."""
    return 2 * x  # twice
'''
    assert code_hash(source) == code_hash("def f(x):\n    return 2 * x\n")
    assert code_hash(source) != code_hash("def f(x):\n    return 3 * x\n")


def test_hashes_of_code_are_the_same_in_all_versions_of_python():
    source = 'class A(B):\n    def f(self, x: int = 0) -> str:\n        return f"{{{x:<{self.w}}}} {x!r:>8.4g}"\n'
    assert code_hash(source) == "7ae8a08ddfd4"


def test_two_processes_append_a_line_once_and_a_torn_line_is_replaced(tmp_path):
    file = tmp_path / "results" / "claim.jsonl"
    line = {"variant": "a", "budget": "b", "learning_rate": 0.1, "seed": 0, "text": "x" * 100_000}
    append_line(file, line)
    with file.open("a") as opened:
        opened.write('{"variant": "torn')
    assert read_lines(file) == [line]
    runs = [line | {"seed": seed} for seed in range(8)] * 4
    threads = [threading.Thread(target=append_line, args=(file, run)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found["seed"] for found in read_lines(file)) == list(range(8))


def test_a_folder_has_one_process(tmp_path):
    with only_process(tmp_path) as first, only_process(tmp_path) as second:
        assert (first, second) == (True, False)


@pytest.mark.parametrize(
    ("steps", "evaluations", "expected"),
    [(100, 10, (100, 10)), (104, 10, (100, 10)), (106, 10, (110, 11)), (3.4, 10, (3, 1)), (0.2, 5, (1, 1))],
)
def test_validations_divide_a_training(steps, evaluations, expected):
    assert rounded(steps, evaluations) == expected


def test_an_unknown_claim_is_named():
    with pytest.raises(SystemExit, match=r"one of .*cocord.* got 'nothing'"):
        load_claim("nothing")


@pytest.mark.parametrize(("share", "number"), [(0.0, 0), (0.4, 4), (1.0, 10)])
def test_a_share_of_captions_is_exchanged_and_images_stay(tmp_path, share, number):
    captions = [f"caption {row}" for row in range(10)]
    images = [encoded(draw_image(row)) for row in range(10)]
    pairs, file = str(tmp_path / "pairs.parquet"), tmp_path / "replaced.parquet"
    table = datasets.Dataset.from_dict(
        {"image": [{"bytes": image, "path": None} for image in images], "caption": captions}
    )
    table.cast_column("image", datasets.Image(decode=False)).to_parquet(pairs)
    replaced(file, pairs, share)
    written = rows_of(str(file)).cast_column("image", datasets.Image(decode=False))
    assert [row["bytes"] for row in written["image"]] == images
    assert sum(one != other for one, other in zip(written["caption"], captions, strict=True)) == number
    assert sorted(written["caption"]) == captions
