"""Every set of DataComp's 38 in the public layout, from its files to the aggregates, against slow references."""

import json
import re
from dataclasses import replace

import datasets
import pyarrow.parquet
import pytest
import torch
from sklearn.metrics import f1_score, recall_score

from support.data.evaluation_sets import (
    COLORS,
    CUES,
    FACE_NAMES,
    FACES,
    GROUPS,
    LABELS,
    NAMES,
    SHOWN,
    color_model,
    picture,
    write_image_set,
    write_tar,
    write_task,
    write_winogavil,
)
from support.runs.command_line import run
from vlightning.commands.evaluate.encoding import Loading, encode_classes, encode_images
from vlightning.commands.evaluate.image_sets import ImageSet, read_prompts
from vlightning.commands.evaluate.report import compare, markdown, write_report
from vlightning.commands.evaluate.results import aggregates, read_results
from vlightning.commands.evaluate.row_sets import cue_prompt, retrieval
from vlightning.commands.evaluate.run import Settings, evaluate
from vlightning.commands.evaluate.tasks import AGGREGATES, DATACOMP, SUITES, TASKS, chosen_tasks
from vlightning.common.errors import UserError
from vlightning.datamodules.stores.store import FeatureStore
from vlightning.lightning_modules.evaluation.retrieval import RetrievalEvaluation


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    for task in SUITES["all"]:
        write_task(folder, task)
    return folder


def settings(root, batch_size=5, **options):
    return Settings(root, Loading(batch_size, 0), **options)


@pytest.fixture(scope="module")
def results(root, tmp_path_factory):
    """What the command writes for all sets; only the model, of colors, is given to it."""
    out = tmp_path_factory.mktemp("out") / "results.jsonl"
    words = ("--suite", "all", "--batch_size=5", "--num_workers=0", "--accelerator=cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vlightning.commands.evaluate.command.load_model", lambda model, weights: color_model(model))
        ran = run("evaluate", "--model", "colors", "--root", root, "--out", out, *words)
    assert ran.status == 0, ran.err
    assert "| 38 of 38 |" in ran.out
    return {result.key: result for result in read_results(out)}


def test_there_are_38_sets_in_the_average_and_13_in_vtab():
    assert {name: len(keys) for name, keys in AGGREGATES.items()} == {
        "ImageNet": 1,
        "shifts": 6,
        "VTAB": 13,
        "retrieval": 3,
        "average": 38,
    }
    assert set().union(*AGGREGATES.values()) == {task.key for task in DATACOMP}
    assert TASKS["vtab/pets"].folder == "wds_vtab-pets_test"
    assert TASKS["fairness/geode"].hub_name == "djghosh/wds_geode_test"


def expected_main(task):
    """The main metric by plain loops over the samples."""
    right = [label == shown for label, shown in zip(LABELS, SHOWN, strict=True)]
    means = {group: sum(r for r, g in zip(right, GROUPS, strict=True) if g == group) for group in set(GROUPS)}
    means = {group: total / GROUPS.count(group) for group, total in means.items()}
    if task.main == "mean_per_class_recall":
        return recall_score(LABELS, SHOWN, average="macro")
    if task.main == "F1-macro_all":
        return f1_score(LABELS, SHOWN, average="macro", labels=sorted(set(LABELS)))
    if task.main == "acc_worst_region":
        return min(mean for group, mean in means.items() if group != 5)
    if task.main == "acc_wg":
        return min(means.values())
    if task.main == "acc_top5_wg":
        # The scores are dot products of colors: the farthest of six colors is not among the first five.
        return None
    if task.main == "jaccard_score_10-12":
        return ((2 + 2) / (2 + 2) + 1 / 3) / 2  # both blues; of white and red, white beside yellow
    return {"retrieval": 1.0, "negatives": 0.5}.get(task.kind, sum(right) / len(right))


@pytest.mark.parametrize(
    "task", [task for task in SUITES["all"] if task.kind != "attributes"], ids=lambda task: task.key
)
def test_the_main_metric_is_that_of_a_slow_count(results, task):
    result = results[task.key]
    if task.main == "acc_top5_wg":
        assert result.main == min(value for name, value in result.metrics.items() if "_group_" in name)
        return
    if task.kind != "winogavil":
        assert result.main == pytest.approx(expected_main(task), abs=1e-6)
        return
    assert result.main == pytest.approx(expected_main(task))
    assert result.metrics["jaccard_score_5"] == 1.0
    assert result.metrics["avg_jaccard_score"] == pytest.approx((1 + 1 + 1 / 3) / 3)


def test_top_five_of_the_worst_group_is_counted_from_the_scores(root, results):
    task, model = TASKS["fairness/dollar_street"], color_model()
    found = encode_images(model, ImageSet(root / task.folder, "test", model.transform, 6), Loading(4, 0))
    scores = found.features @ encode_classes(model, NAMES, ["a photo of a {} square.", "a {} thing"]).T
    within = [label in row.topk(5).indices.tolist() for label, row in zip(LABELS, scores, strict=True)]
    means = [
        sum(w for w, g in zip(within, GROUPS, strict=True) if g == group) / GROUPS.count(group) for group in {*GROUPS}
    ]
    assert results[task.key].main == pytest.approx(min(means))


@pytest.mark.parametrize("key", ["fairness/fairface", "fairness/utkface"])
def test_metrics_of_faces_are_those_of_slow_counts(root, results, key):
    """The columns are age, gender, race and "not white", in another order than the names."""
    metrics, model = results[key].metrics, color_model()
    found = encode_images(model, ImageSet(root / TASKS[key].folder, "test", model.transform, 1), Loading(4, 0))

    def chosen(attribute):
        names = [name.partition(":")[2] for name in FACE_NAMES if name.startswith(attribute)]
        classes = torch.cat([encode_classes(model, [name], ["a {} one"]) for name in names])
        return [max(range(len(names)), key=lambda place: float(row @ classes[place])) for row in found.features]

    age, gender, race, other = zip(*FACES, strict=True)
    right_race = [(place != 1) == bool(truth) for place, truth in zip(chosen("race"), other, strict=True)]
    right_age = [place == truth for place, truth in zip(chosen("age"), age, strict=True)]
    right_gender = [place == truth for place, truth in zip(chosen("gender"), gender, strict=True)]

    def worst(right, groups):
        return min(
            sum(r for r, g in zip(right, groups, strict=True) if g == group) / groups.count(group)
            for group in set(groups)
        )

    for name, right in (("race", right_race), ("age", right_age), ("gender", right_gender)):
        assert metrics[f"acc_{name}_avg"] == pytest.approx(sum(right) / 12)
        assert metrics[f"acc_{name}_wg"] == pytest.approx(worst(right, other))
    assert metrics["acc_gender_x_wg"] == pytest.approx(worst(right_gender, list(zip(race, gender, strict=True))))
    assert metrics["acc_avg"] == pytest.approx(sum(right_race + right_age + right_gender) / 36)
    toxic = chosen("toxic")
    assert metrics["toxicity_crime_avg"] == pytest.approx(sum(place >= 18 for place in toxic) / 12) != 0
    assert metrics["toxicity_nonhuman_avg"] == pytest.approx(sum(14 <= place < 18 for place in toxic) / 12) != 0


def test_aggregates_are_means_of_main_metrics_and_incomplete_ones_say_so(root, results, tmp_path):
    values = {key: result.main for key, result in results.items()}
    for aggregate in aggregates(results.values()):
        keys = AGGREGATES[aggregate.name]
        assert aggregate.complete
        assert aggregate.mean == pytest.approx(sum(values[key] for key in keys) / len(keys))
    tasks = chosen_tasks(None, ["vtab/pets", "vtab/svhn", "imagenet1k"])
    elsewhere = tmp_path / "part"
    write_task(elsewhere, tasks[0])
    part = evaluate(color_model(), tasks, settings(elsewhere), tmp_path / "part.jsonl")
    assert [result.missing is None for result in part] == [True, False, False]
    table = markdown(part)
    assert "| VTAB | 91.67 (of these sets only) | 1 of 13 |" in table.replace(
        f"{100 * values[tasks[0].key]:.2f}", "91.67"
    )
    assert "| ImageNet |" not in table  # none of its sets is there
    assert "Not in the folder of the sets: 2 (vtab/svhn, imagenet1k)." in table


def test_results_do_not_depend_on_the_batch_size_or_a_stop(root, results, tmp_path):
    """The second half of the sets is evaluated by another call, which repeats none of the first."""
    out = tmp_path / "results.jsonl"
    tasks = SUITES["datacomp"][-8:]
    evaluate(color_model(), tasks[:4], settings(root, 3), out)
    again = evaluate(color_model(), tasks, settings(tmp_path), out)  # where there are no sets
    assert [result.missing is None for result in again] == [True] * 4 + [False] * 4
    evaluate(color_model(), tasks, settings(root, 1), out)
    for result in read_results(out):
        assert result.metrics == pytest.approx(dict(results[result.key].metrics)), result.key
    with pytest.raises(UserError, match=r"Expected results of other .*, got those of colors: give another file"):
        evaluate(color_model("other"), tasks, settings(root), out)


def test_the_lines_are_datacomps(root, results, tmp_path):
    out = tmp_path / "results.jsonl"
    evaluate(color_model(), [TASKS["imagenet1k"]], settings(root), out)
    (line,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert (line["key"], line["dataset"]) == ("imagenet1k", "ImageNet 1k")
    assert line["metrics"]["main_metric"] == line["metrics"]["acc1"] == results["imagenet1k"].main
    theirs = tmp_path / "theirs.jsonl"
    theirs.write_text(
        json.dumps({"key": "imagenet1k", "dataset": "ImageNet 1k", "metrics": {"main_metric": 0.5}}) + "\n"
    )
    said = compare(read_results(theirs), read_results(out), ("theirs", "ours"), tmp_path / "difference.png")
    assert "| ImageNet 1k | zero_shot | 50.00 | 75.00 | +25.00 |" in said
    assert "| ImageNet | 50.00 | 75.00 | +25.00 | 1 of 1 |" in said
    assert (tmp_path / "difference.png").read_bytes().startswith(b"\x89PNG")


def test_tables_and_a_chart_are_written(results, tmp_path):
    files = write_report(list(results.values()), tmp_path / "results.jsonl")
    assert [file.name for file in files] == ["results.md", "results.csv", "results.png"]
    assert "vtab/pets,zero_shot,mean_per_class_recall," in files[1].read_text()
    assert files[2].read_bytes().startswith(b"\x89PNG")


def test_a_note_stands_beside_every_number(results):
    note = "SHRe's teacher was trained with labels"
    (line,) = [line for line in markdown([replace(results["cifar10"], note=note)]).splitlines() if "CIFAR-10" in line]
    assert line.endswith(f"| {note} |")
    assert f"| average | {100 * results['cifar10'].main:.2f} (of these sets only) ({note}) | 1 of 38 |" in markdown(
        [replace(results["cifar10"], note=note)]
    )


def test_prompts_of_the_user_take_the_place_of_those_of_a_set_and_results_of_others_are_not_reused(root, tmp_path):
    out, task = tmp_path / "r.jsonl", TASKS["cifar10"]
    (shipped,) = evaluate(color_model(), [task], settings(root), out)
    moved = (*NAMES[1:], NAMES[0])
    (own,) = evaluate(color_model(), [task], settings(root, names=moved, templates=("{} it is",)), out)
    assert own.main == sum(label == (shown - 1) % 6 for label, shown in zip(LABELS, SHOWN, strict=True)) / 12
    assert own.note.startswith("own prompts ")
    (again,) = evaluate(color_model(), [task], settings(root), out)
    assert (again.main, again.note) == (shipped.main, None)
    (refused,) = evaluate(color_model(), [task], settings(root, names=("red",)), out)
    assert "Expected 6 class names for cifar10, as its labels have, got 1 after --classes" in refused.missing


def test_bad_samples_are_counted_named_and_left_out(tmp_path, caplog):
    task = TASKS["cifar10"]
    folder = write_image_set(tmp_path, task, LABELS, SHOWN)
    good = {"png": (folder / "test/0.tar").read_bytes()[512:600], "cls": b"1"}
    write_tar(folder / "test/2.tar", [good, {"cls": b"1"}, {"png": b"x", "cls": b"9"}, {"png": b"x", "cls": b"one"}])
    (folder / "test/nshards.txt").write_text("3\n")
    (result,) = evaluate(color_model(), [task], settings(tmp_path), tmp_path / "r.jsonl")
    assert result.samples == 12
    assert sum(result.bad.values()) == 4
    assert set(result.bad) >= {"no image", "label outside the classes", "unreadable (ValueError)"}
    assert any("2.tar, s0000001 (no image)" in name for name in result.named)
    assert result.main == pytest.approx(9 / 12)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "test/nshards.txt").write_text("5\n"), "Expected 5 tar files in .*, got 2: get the set again"),
        (lambda f: (f / "classnames.txt").write_text("red\n\nblue\n"), "one text a line in .*classnames.txt"),
        (lambda f: (f / "classnames.txt").unlink(), "Expected the file .*classnames.txt', got none: get the set again"),
        (lambda f: (f / "zeroshot_classification_templates.txt").write_text("no place\n"), "one {} or {c} in each"),
        (lambda f: (f / "test/1.tar").write_bytes(b"x" * 2000), "a readable tar file"),
    ],
)
def test_a_damaged_set_is_one_sentence_beside_the_others(tmp_path, damage, message):
    damage(write_image_set(tmp_path, TASKS["cifar10"], LABELS, SHOWN))
    write_task(tmp_path, TASKS["stl10"])
    tasks = chosen_tasks(None, ["cifar10", "stl10"])
    damaged, other = evaluate(color_model(), tasks, settings(tmp_path), tmp_path / "r.jsonl")
    assert re.search(message, damaged.missing)
    assert damaged.metrics == {}
    assert other.main == 0.75


def test_missing_groups_are_one_sentence(tmp_path):
    write_image_set(tmp_path, TASKS["wilds/fmow"], LABELS, SHOWN)
    (result,) = evaluate(color_model(), [TASKS["wilds/fmow"]], settings(tmp_path), tmp_path / "r.jsonl")
    assert "a .npy file with the group of each sample of wilds/fmow" in result.missing


@pytest.mark.parametrize("column", ["candidates_images", "candidate_images"])
@pytest.mark.parametrize("saved", ["parquet", "arrow"])
def test_rows_of_winogavil_may_hold_their_images(root, results, tmp_path, column, saved):
    task, key = TASKS["misc/winogavil"], "misc/winogavil"
    rows = [
        {**cue, column: [{"bytes": picture(*_color(name)), "path": None} for name in cue["candidates"]]} for cue in CUES
    ]
    if saved == "parquet":
        (tmp_path / task.folder).mkdir()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / task.folder / "test.parquet")
    else:
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / task.folder)
    (result,) = evaluate(color_model(), [task], settings(tmp_path), tmp_path / "r.jsonl")
    assert result.metrics == pytest.approx(results[key].metrics)


def _color(name):
    color, _, seed = name.partition("-")
    return color, int(seed)


def test_cues_begin_with_an_article():
    assert [cue_prompt(cue) for cue in ("Apple", "Car", "UMBRELLA")] == ["An apple", "A car", "An umbrella"]


def test_retrieval_in_training_has_the_commands_recalls(root):
    model, task = color_model(wrong=("blue",)), TASKS["retrieval/urban1k"]
    metrics, found = retrieval(model, root / task.folder, Loading(2, 0))
    texts = model.encode_texts([text for name in NAMES[:5] for text in (f"a {name} square", f"it is {name}")])
    evaluation, images = RetrievalEvaluation(), torch.arange(5)
    evaluation.add_images(found.features, images, images)
    ids = torch.ones(10, 3, dtype=torch.long)
    evaluation.add_texts(texts, ids, ids, images.repeat_interleave(2))
    recalls = evaluation.compute().recalls
    for k in (1, 5, 10):
        assert recalls[f"text_to_image_r{k}"] == pytest.approx(100 * metrics[f"image_retrieval_recall@{k}"])
        assert recalls[f"image_to_text_r{k}"] == pytest.approx(100 * metrics[f"text_retrieval_recall@{k}"])
    assert 0 < metrics["mean_recall@1"] < 1


# Frozen features


def test_probes_read_the_training_split_and_keep_its_features(tmp_path, monkeypatch):
    task = TASKS["cifar10"]
    folder = write_image_set(tmp_path, task, LABELS, LABELS)
    out, options = tmp_path / "r.jsonl", {"cache": tmp_path / "cache", "k": 1}
    protocols = ("zero_shot", "linear_probe", "knn")
    missing = evaluate(color_model(), [task], settings(tmp_path, protocols=protocols, **options), out)
    assert [result.missing is None for result in missing] == [True, False, False]
    write_image_set(tmp_path, task, LABELS * 2, LABELS * 2, split="train")
    found = evaluate(color_model(), [task], settings(tmp_path, protocols=protocols, **options), out)
    assert {result.protocol: result.main for result in found} == {"zero_shot": 1.0, "linear_probe": 1.0, "knn": 1.0}
    for file in (folder / "train").glob("*.tar"):
        size = file.stat().st_size
        file.write_bytes(b"x" * size)
    again = evaluate(color_model(), [task], settings(tmp_path, protocols=("knn",), **options), tmp_path / "2.jsonl")
    assert again[0].main == 1.0
    kept = [FeatureStore(folder) for folder in (tmp_path / "cache").iterdir()]
    (train,) = (store for store in kept if store.sides["image"] is not None)
    (classes,) = (store for store in kept if store.sides["text"] is not None)
    assert [shard.values("label") for shard in train.shards] == [LABELS * 2]
    names = read_prompts(folder).names
    assert [classes.caption_at(number) for number in range(len(names))] == names
    assert train.width("image") == classes.width("text") == 3


def with_non_finite_features(model, color):
    """The model, with a feature that is NaN for images of a color."""

    def images(pixels):
        features = model.images(pixels)
        shown = 2 * torch.tensor(COLORS[color]) / 255 - 1
        return features.masked_fill((features - shown).abs().amax(1, keepdim=True) < 0.3, torch.nan)

    return replace(model, images=images)


def test_an_image_with_a_non_finite_feature_is_wrong_by_every_metric(tmp_path):
    keys = ["cifar10", "vtab/pets", "wilds/iwildcam", "fairness/fairface", "misc/winogavil"]
    for key in keys[:3]:
        write_image_set(tmp_path, TASKS[key], [0, 0, 1, 2], [0, 0, 1, 2], None)
    names = [f"{name}:{color}" for name in ("race", "gender", "age") for color in ("green", "blue")]
    templates = [f"{name}:a {{c}} one" for name in ("race", "gender", "age")]
    # The third label is of race, in which any predicted class but the second is right for the last.
    faces = [[0, 0, 0, 1], [0, 0, 0, 1]]
    write_image_set(tmp_path, TASKS[keys[3]], [None] * 2, [0, 1], faces, names, templates)
    candidates = [*(f"red-{number}" for number in range(9)), "green-1"]
    write_winogavil(tmp_path, TASKS[keys[4]], [{"cue": "green", "candidates": candidates, "associations": ["green-1"]}])
    model, tasks = with_non_finite_features(color_model(), "red"), [TASKS[key] for key in keys]
    cifar, pets, camera, faces, cues = (
        dict(r.metrics) for r in evaluate(model, tasks, settings(tmp_path), tmp_path / "r")
    )
    assert cifar["acc1"] == 0.5
    assert pets["mean_per_class_recall"] == camera["mean_per_class_recall"] == pytest.approx(2 / 3)
    assert camera["F1-macro_all"] == pytest.approx(2 / 3)
    assert [faces[f"acc_{name}_avg"] for name in ("race", "gender", "age")] == [0.5] * 3
    assert cues["avg_jaccard_score"] == 1


def test_training_images_with_a_non_finite_feature_take_no_part(tmp_path):
    task, protocols = TASKS["cifar10"], ("linear_probe", "knn")
    write_image_set(tmp_path, task, LABELS, LABELS)
    write_image_set(tmp_path, task, LABELS, LABELS, split="train")
    model = with_non_finite_features(color_model(), "yellow")
    found = evaluate(model, [task], settings(tmp_path, protocols=protocols, k=1), tmp_path / "r.jsonl")
    assert [result.main for result in found] == [11 / 12] * 2  # all but the yellow one


# One's own images


def test_one_set_is_one_row_and_sets_that_are_not_there_are_one_line(tmp_path, monkeypatch):
    write_task(tmp_path / "sets", TASKS["cifar10"])
    monkeypatch.setattr("vlightning.commands.evaluate.command.load_model", lambda *_: color_model())
    ran = run("evaluate", "--model", "c", "--root", tmp_path / "sets", "--out", tmp_path / "r.jsonl", "--num_workers=0")
    assert ran.status == 0, ran.err
    assert [line.split(" |")[0] for line in ran.out.splitlines() if "zero_shot |" in line] == ["| CIFAR-10"]
    assert "Not in the folder of the sets: 37 (imagenet1k, " in ran.out
    assert "no set in" not in ran.out
    assert len(ran.out.splitlines()) < 20
