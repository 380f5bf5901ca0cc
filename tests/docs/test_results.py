"""The page of the one comparison shows the results that are in the repository."""

import json
import runpy
from pathlib import Path

from compare import Comparison

from support.project.pages import PAGES, ROOT

DRAWN = runpy.run_path(str(ROOT / "docs/figures/comparison.py"))


def test_the_tables_are_those_of_the_results():
    shown = PAGES["docs/results.md"]
    assert DRAWN["page"](shown, DRAWN["read"]()) == shown


def test_every_method_has_three_seeds_on_equally_many_pairs():
    found = DRAWN["read"]()
    for method, prefix in DRAWN["ROWS"].values():
        trained = DRAWN["runs"](found, "equal samples", method)
        assert [run["seed"] for run in trained] == [0, 1, 2]
        assert {run["steps"] for run in trained} == {540}
        assert all(0 < DRAWN["retrieval"](run, prefix)["r1"] < 100 for run in trained)


def test_a_run_more_changes_the_tables():
    found = DRAWN["read"]()
    more = [{**run, "seed": 3} for run in found if run["kind"] == "equal samples" and run["seed"] == 0]
    assert DRAWN["quality"](found + more) != DRAWN["quality"](found)


def test_a_finished_run_is_skipped_and_an_interrupted_one_is_repeated(tmp_path: Path):
    results = tmp_path / "results.jsonl"
    comparison = Comparison(tmp_path, results, 1, 1.0, 1, 1)
    tries = []

    def work() -> dict[str, int]:
        tries.append(len(tries))
        if len(tries) == 1:
            raise KeyboardInterrupt
        return {"steps": 1}

    for _ in range(3):
        try:
            comparison.once("equal time", "CLIP", 0, work)
        except KeyboardInterrupt:
            assert not results.exists()
    (line,) = results.read_text().splitlines()
    assert (json.loads(line)["steps"], tries) == (1, [0, 1])
