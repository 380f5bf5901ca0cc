"""Tables of the proof runs: golden lines, and the pages of the repository beside their files."""

import pytest
from proof.claim import CLAIMS, Budget, Run, filled, load_claim
from proof.hashes import ROOT, resolved_config
from proof.plan import best_rate, planned
from proof.results import RESULTS, read_lines
from proof.tables import accepted_changes, interval, out_of_date, page, section, table
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


def test_a_budget_like_another_shows_the_runs_of_that_one():
    import dataclasses

    like = Budget("as KD", like=("KD", "equal FLOPs"))
    claim = dataclasses.replace(drawn.CLAIM, budgets=(*drawn.CLAIM.budgets, like))
    lines = [*LINES, line("labels", 0, 50.0, budget="as KD")]
    rows = table(claim, lines, like)
    assert rows[2].startswith("| labels | 50.00 |")
    assert rows[3].startswith("| KD | 22.00 ± 11.00 | -39.00 |")
    assert {run.variant for _, run in planned(claim, lines) if run.budget == "as KD"} == {"labels"}


def test_a_budget_is_one_of_three():
    with pytest.raises(ValueError, match="got 2"):
        Budget("twice", epochs=1, flops=1e9)


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
        assert set(trained.needs) <= {preparation.name for preparation in claim.preparations}
    names = ("data", "work", "folder", "checkpoint", *(preparation.name for preparation in claim.preparations))
    folders = {name: name for name in names}
    for trained in (*claim.variants, *claim.preparations):
        words = [*(claim.words if trained in claim.variants else ()), *trained.words]
        if words:
            resolved_config(filled(words, folders, {"epoch": 8.0, "steps": 80.0}))
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


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_is_published_was_measured_with_the_present_step(file):
    assert ROOT in file.parents
    assert out_of_date(read_lines(file), accepted_changes()) == []
