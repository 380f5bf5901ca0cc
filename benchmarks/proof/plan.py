"""The planned runs of claims, in order of what decides most, and what each of them waits for."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from proof.claim import Budget, Claim, Run, Variant
from proof.results import Line, key_of, read_lines

DONE = "done.json"
"""File in the folder of a finished run, with its line."""


@dataclass(frozen=True)
class Folders:
    """Where a driver reads and writes.

    Args:
        data: folder of the data sets, which `${data}` names.
        work: folder of checkpoints and outputs.
        results: folder of the files of results.
        accelerator: the Trainer's.
    """

    data: str
    work: Path
    results: Path
    accelerator: str = "cpu"

    def of(self, run: Run) -> Path:
        """Return the folder of a run."""
        return self.work / run.claim / run.folder_name

    def lines(self, claim: Claim) -> list[Line]:
        """Return the finished runs of a claim."""
        return read_lines(self.file(claim.name))

    def file(self, claim: str) -> Path:
        """Return the file of results of a claim."""
        return self.results / f"{claim}.jsonl"


def is_finished(run: Run, lines: Sequence[Line], folders: Folders) -> bool:
    """Return whether nothing is left to do for a run; a preparation must be finished on this machine."""
    if not run.budget:
        return (folders.of(run) / DONE).is_file()
    return run.key in {key_of(line) for line in lines}


def next_run(
    claims: Sequence[Claim], folders: Folders, running: Collection[Run], failed: Collection[Run]
) -> Run | None:
    """Return the run to start next; None if all others are finished, running, or wait for runs.

    Args:
        claims: the claims, what decides most first.
        folders: where finished runs are found.
        running: runs that are not started again.
        failed: runs that are not started again, and whose learning rates the search leaves out.
    """
    candidates: list[tuple[tuple[int, int], Run]] = []
    for position, claim in enumerate(claims):
        lines = folders.lines(claim)
        for order, run in planned(claim, lines, failed):
            waits = run in running or run in failed or is_finished(run, lines, folders)
            if not waits and is_ready(claim, run, lines, folders):
                candidates.append(((order, position), run))
    return min(candidates, key=lambda candidate: candidate[0])[1] if candidates else None


def planned(claim: Claim, lines: Sequence[Line], failed: Collection[Run] = ()) -> Iterator[tuple[int, Run]]:
    """Yield the runs of a claim with their order: the search of all budgets, then seed by seed.

    Preparations stand before the first variant that needs them. Variants of which all runs with a seed are finished are
    left out.

    Args:
        claim: the claim.
        lines: its finished runs; while the search of a variant goes on, its other seeds are not planned.
        failed: runs that ended with an error.
    """
    prepared: set[Run] = set()
    finished = {key_of(line) for line in lines}
    for order, seed in enumerate(claim.seeds, 1):
        for budget in claim.budgets:
            for variant in claim.variants_of(budget):
                if seed not in claim.seeds_of(variant):
                    continue
                rates = _rates(claim, budget, variant, order == 1, lines, failed)
                runs = [Run(claim.name, variant.name, budget.name, rate, seed) for rate in rates]
                if runs and all(run.key in finished for run in runs):
                    continue  # perhaps on another machine: nothing needs their preparations here
                needed = claim.needed(variant.needs)
                for run in (claim.run_of(preparation, seed) for preparation in needed):
                    if run.claim == claim.name and run not in prepared:
                        prepared.add(run)
                        yield order, run
                for run in runs:
                    yield order, run


def _rates(
    claim: Claim, budget: Budget, variant: Variant, searches: bool, lines: Sequence[Line], failed: Collection[Run]
) -> Sequence[float]:
    """Return the learning rates of the runs with a seed; none while they are not known."""
    source = budget.learning_rates_of
    if source is None and searches and not variant.learning_rate_of:
        return claim.learning_rates
    best = best_rate(claim, variant.name, source or budget.name, lines, failed)
    return () if best is None else (best,)


def best_rate(
    claim: Claim, variant: str, budget: str, lines: Sequence[Line], failed: Collection[Run] = ()
) -> float | None:
    """Return the learning rate with the best metric of the validation split; None while the search goes on."""
    source = claim.budget(budget).learning_rates_of
    searched = claim.variant(variant).learning_rate_of
    if source is not None or searched:
        return best_rate(claim, searched or variant, source or budget, lines, failed)
    measured: dict[float, float] = {}
    finished = {key_of(line): line for line in lines}
    for rate in claim.learning_rates:
        run = Run(claim.name, variant, budget, rate, claim.seeds[0])
        if run.key in finished:
            value = finished[run.key]["curve"][-1]["metrics"][claim.metric]
            measured[rate] = -math.inf if math.isnan(value) else value
        elif run not in failed:
            return None
    return max(measured, key=measured.__getitem__) if measured else None


def is_ready(claim: Claim, run: Run, lines: Sequence[Line], folders: Folders) -> bool:
    """Return whether all that a run reads exists."""
    needs = (claim.variant(run.variant) if run.budget else claim.preparation(run.variant)).needs
    before = [claim.run_of(claim.preparation(name), run.seed) for name in needs]
    if not all((folders.of(needed) / DONE).is_file() for needed in before):
        return False
    like = claim.budget(run.budget).like if run.budget else None
    return like is None or reference_flops(like, lines) is not None


def reference_flops(like: tuple[str, str], lines: Sequence[Line]) -> float | None:
    """Return the counted FLOPs of the trainings of a variant and a budget; None if none is finished."""
    return next((line["flops"] for line in lines if (line["variant"], line["budget"]) == like), None)
