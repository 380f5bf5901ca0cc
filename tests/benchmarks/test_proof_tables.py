"""Tables of the proof runs: golden lines, and the pages of the repository beside their files."""

import pytest
from proof.claim import CLAIMS, Budget, Preparation, Run, Variant, filled, load_claim
from proof.hashes import ROOT, resolved_config
from proof.plan import best_rate, planned
from proof.results import RESULTS, read_lines
from proof.tables import (
    accepted_changes,
    at_equal_flops,
    draw,
    draw_all,
    factor,
    interval,
    out_of_date,
    page,
    section,
    steps_to,
    sums,
    table,
)
from proof.training import without_prefix

from support.project.pages import PAGES
from support.proof import drawn

FILES = sorted(RESULTS.glob("*.jsonl"))


def line(variant, seed, value, rate=0.05, budget="equal FLOPs", chosen_by=None):
    metrics = {"val/top1": value if chosen_by is None else chosen_by}
    return {
        "claim": "drawn",
        "variant": variant,
        "budget": budget,
        "learning_rate": rate,
        "seed": seed,
        "commit": "abc",
        "machine": {"processor": "a CPU"},
        "flops": 2e12,
        "cpu_seconds": 10.0,
        "once": {"teacher": 3e12} if variant == "KD" else {},
        "metrics": {"val/top1": value},
        "curve": [{"step": 1, "flops": 2e12, "metrics": metrics}],
    }


LINES = [line("labels", seed, value) for seed, value in enumerate((10.0, 20.0, 30.0))]
LINES += [line("KD", seed, value) for seed, value in enumerate((11.0, 22.0, 33.0))]


def test_a_table_has_means_deviations_paired_intervals_and_costs():
    # Differences 1, 2, 3: the half width is 4.303 * 1 / sqrt(3).
    assert table(drawn.CLAIM, LINES, drawn.CLAIM.budgets[0])[2:] == [
        "| labels | 20.00 ± 10.00 |  | 2.0 | 0.0 | 10 | 0.05 | 0, 1, 2 |",
        "| KD | 22.00 ± 11.00 | +2.00 (-0.48 to +4.48) | 2.0 | 3.0 | 10 | 0.05 | 0, 1, 2 |",
    ]


def test_lines_without_cpu_seconds_have_an_empty_cell():
    lines = [{name: value for name, value in each.items() if name != "cpu_seconds"} for each in LINES]
    rows = table(drawn.CLAIM, [*lines[:3], LINES[3]], drawn.CLAIM.budgets[0])
    assert [row.split(" | ")[5] for row in rows[2:]] == ["", "10"]


def test_pairs_are_the_common_seeds_and_a_single_one_has_no_interval():
    rows = table(drawn.CLAIM, [*LINES[1:3], LINES[4]], drawn.CLAIM.budgets[0])
    assert rows == []  # the search of the first seed is not finished
    rows = table(drawn.CLAIM, [*LINES[:3], LINES[3]], drawn.CLAIM.budgets[0])
    assert "| +1.00 |" in rows[3]
    assert interval([1.0]) == float("inf")


def test_the_learning_rate_is_that_of_the_validation_split_and_not_of_the_test():
    import dataclasses

    claim = dataclasses.replace(drawn.CLAIM, learning_rates=(0.05, 0.1))
    lines = [line("labels", 0, 90.0, 0.05, chosen_by=1.0), line("labels", 0, 10.0, 0.1, chosen_by=2.0)]
    assert best_rate(claim, "labels", "equal FLOPs", lines[:1]) is None
    assert best_rate(claim, "labels", "equal FLOPs", lines) == 0.1
    failed = {Run("drawn", "labels", "equal FLOPs", 0.1, 0)}
    assert best_rate(claim, "labels", "equal FLOPs", lines[:1], failed) == 0.05
    seeds = [run for order, run in planned(claim, lines) if order == 2]
    assert seeds == [Run("drawn", "labels", "equal FLOPs", 0.1, 1)]


def test_a_variant_with_the_learning_rate_of_another_has_no_search():
    import dataclasses

    variants = (Variant("labels"), Variant("KD", learning_rate_of="labels"))
    claim = dataclasses.replace(drawn.CLAIM, learning_rates=(0.05, 0.1), variants=variants)
    searched = [line("labels", 0, 1.0, rate, chosen_by=rate) for rate in (0.05, 0.1)]
    assert {run.variant for _, run in planned(claim, searched[:1])} == {"labels"}
    runs = [run for _, run in planned(claim, searched) if run.variant == "KD"]
    assert runs == [Run("drawn", "KD", "equal FLOPs", 0.1, seed) for seed in (0, 1)]
    rows = table(claim, [*searched, line("KD", 0, 3.0, 0.1)], claim.budgets[0])
    assert rows[3].startswith("| KD | 3.00 | +2.00 |")


def test_a_budget_like_another_shows_the_runs_of_that_one():
    import dataclasses

    like = Budget("as KD", like=("KD", "equal FLOPs"))
    claim = dataclasses.replace(drawn.CLAIM, budgets=(*drawn.CLAIM.budgets, like))
    lines = [*LINES, line("labels", 0, 50.0, budget="as KD")]
    rows = table(claim, lines, like)
    assert rows[2].startswith("| labels | 50.00 |")
    assert rows[3].startswith("| KD | 22.00 ± 11.00 | -39.00 |")
    assert {run.variant for _, run in planned(claim, lines) if run.budget == "as KD"} == {"labels"}


def test_the_figure_of_all_claims_has_what_was_measured_at_equal_flops(tmp_path):
    claim, lines = load_claim("shre"), read_lines(RESULTS / "shre.jsonl")
    panel = at_equal_flops(claim, lines)
    assert list(panel.values) == ["SHRe, MLP", "SHRe, MLP, without KL", "two towers"]
    wanted = [
        run["metrics"]["test/recall_mean"] for run in lines if run["variant"] == "two towers" and run["seed"] == 2
    ]
    assert panel.values["two towers"][2] == wanted[1]  # after that at equal epochs
    assert at_equal_flops(claim, [run for run in lines if run["variant"] != "two towers"]) is None
    assert at_equal_flops(load_claim("towers"), read_lines(RESULTS / "towers.jsonl")) is None
    draw_all([(claim, lines)], tmp_path / "proof.png")
    assert (tmp_path / "proof.png").read_bytes().startswith(b"\x89PNG")


def test_a_budget_is_one_of_three():
    with pytest.raises(ValueError, match="got 2"):
        Budget("twice", epochs=1, flops=1e9)


def curve_of(variant, seed, values):
    points = [{"step": 10 * n, "flops": n, "metrics": {"val/top1": value}} for n, value in enumerate(values, 1)]
    return line(variant, seed, values[-1]) | {"curve": points}


def test_fewer_steps_are_counted_along_the_curve_to_the_last_value_of_the_reference():
    plain = [curve_of("labels", seed, (10.0, 20.0)) for seed in (0, 1, 2)]
    # 20 is reached after 10 steps, after 15, halfway between 10 and 30, and never.
    quick = [curve_of("KD", seed, values) for seed, values in enumerate(((20.0, 30.0), (10.0, 30.0), (5.0, 10.0)))]
    assert [steps_to("val/top1", 20.0, run) for run in quick] == [10.0, 15.0, None]
    assert factor("val/top1", quick[:1], plain) == "2.00"
    text = factor("val/top1", quick, plain)
    assert text.startswith("1.63 (")  # the square root of 20 / 10 times 20 / 15
    assert text.endswith("; 1 of 3 never")


def test_what_several_variants_need_is_counted_once_in_a_sum():
    import dataclasses

    variants = (Variant("KD", needs=("teacher",)), Variant("CRD", needs=("teacher",)))
    claim = dataclasses.replace(drawn.CLAIM, variants=variants, opponent="KD", sums={"both": ("KD", "CRD")})
    teacher = line("teacher", 0, 1.0, rate=None, budget="") | {"flops": 5e12}
    lines = [teacher, line("KD", 0, 1.0)]
    assert sums(claim, lines) == ""  # a run is missing
    assert sums(claim, [*lines, line("CRD", 0, 1.0)]).splitlines()[2:] == ["| both | KD, CRD | 5.0 | 9.0 |"]


def test_sums_are_drawn_by_their_runs_once_these_are_complete(tmp_path, monkeypatch):
    import dataclasses

    from matplotlib import pyplot

    variants = tuple(Variant(f"{name}, {size} layers") for name in ("KD", "CRD") for size in (6, 8))
    both = {name: tuple(f"{name}, {size} layers" for size in (6, 8)) for name in ("KD", "CRD")}
    claim = dataclasses.replace(drawn.CLAIM, variants=variants, opponent="KD, 6 layers", sums=both)
    lines = [line("KD, 6 layers", 0, 1.0), line("KD, 8 layers", 0, 3.0), line("CRD, 6 layers", 0, 2.0)]
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    draw(claim, lines, tmp_path / "sums.png")
    (axis,) = pyplot.gcf().axes
    (drawn_line,) = (each for each in axis.lines if each.get_marker() == ".")
    assert list(drawn_line.get_ydata()) == [1.0, 3.0]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["6 layers", "8 layers"]
    assert axis.get_legend_handles_labels()[1] == ["KD"]
    monkeypatch.undo()
    pyplot.close()


def test_a_preparation_of_each_seed_stands_before_the_runs_of_its_seed():
    import dataclasses

    teacher, other = Preparation("teacher", each_seed=True), Preparation("once")
    variants = (Variant("KD", needs=("once", "teacher")), Variant("labels", seeds=1))
    claim = dataclasses.replace(drawn.CLAIM, variants=variants, preparations=(other, teacher))
    lines = [line("KD", 0, 1.0), line("labels", 0, 1.0)]

    def runs(lines):
        return [(order, run.variant, run.seed) for order, run in planned(claim, lines)]

    assert runs([]) == [(1, "once", 0), (1, "teacher", 0), (1, "KD", 0), (1, "labels", 0), (2, "teacher", 1)]
    # What finished runs were prepared with is not prepared again, perhaps on another machine.
    assert runs(lines) == [(2, "once", 0), (2, "teacher", 1), (2, "KD", 1)]
    assert claim.run_of(teacher, 1).folder_name == "preparation_teacher_seed1"
    sharing = dataclasses.replace(drawn.CLAIM, name="second", variants=variants, preparations=(), shares=claim)
    assert sharing.run_of(teacher, 1) == Run("drawn", "teacher", seed=1)
    assert {run.variant for _, run in planned(sharing, [])} == {"KD", "labels"}


def test_a_section_replaces_what_is_between_its_marks_and_nothing_else():
    text = (
        "before\n<!-- proof: drawn -->\nold\n<!-- end of proof -->\nafter\n<!-- proof: other -->\n<!-- end of proof -->"
    )
    written = page(text, {"drawn": section(drawn.CLAIM, LINES)})
    assert written.startswith("before\n<!-- proof: drawn -->\nA student of a teacher")
    assert written.endswith("<!-- end of proof -->\nafter\n<!-- proof: other -->\n<!-- end of proof -->")
    assert "old" not in written
    assert page(written, {"drawn": section(drawn.CLAIM, LINES)}) == written


@pytest.mark.parametrize("file", sorted(path.stem for path in CLAIMS.glob("[a-z]*.py")))
def test_a_claim_of_the_repository_is_complete(file):
    claim = load_claim(file)
    assert claim.name == file
    assert claim.opponent in {variant.name for variant in claim.variants}
    for budget in claim.budgets:
        if budget.like is not None:
            claim.variant(budget.like[0])
            claim.budget(budget.like[1])
    for trained in (*claim.variants, *claim.preparations):
        assert set(trained.needs) <= {preparation.name for preparation in claim.all_preparations}
    names = ("data", "work", "folder", *(preparation.name for preparation in claim.all_preparations))
    folders = {name: name for name in ("checkpoint", *names, *(f"{name}_checkpoint" for name in names))}
    for trained in (*claim.variants, *claim.preparations):
        words = [*(claim.words if trained in claim.variants else ()), *trained.words]
        if words:
            resolved_config(filled(words, folders, {"epoch": 8.0, "steps": 80.0}))
    for preparation in claim.preparations:
        for words in (*preparation.before, *preparation.after):
            assert "$" not in "".join(filled(words, folders | claim.variables | {"accelerator": "cpu"}))
    for probe in (probe for variant in claim.variants for probe in variant.probes):
        resolved_config(filled(probe.words, folders, {"epoch": 8.0}))
    runs = [run for _, run in planned(claim, [])]
    assert len({run.folder_name for run in runs}) == len(runs)


def test_variants_are_compared_by_metrics_of_equal_names():
    metrics = {"test/h2/recall_mean": 1.0, "test/recall_mean": 2.0, "test/h3/recall_mean": 3.0}
    assert without_prefix(metrics, "h2/") == {"test/recall_mean": 1.0, "test/h3/recall_mean": 3.0}
    assert without_prefix(metrics, "") == metrics


def test_the_pages_have_the_tables_of_the_files():
    sections = {file.stem: section(load_claim(file.stem), read_lines(file)) for file in FILES}
    for name, text in PAGES.items():
        assert page(text, sections) == text, f"{name}: run benchmarks/proof/tables.py"


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_is_published_was_measured_with_the_present_step(file):
    assert ROOT in file.parents
    assert out_of_date(read_lines(file), accepted_changes()) == []
