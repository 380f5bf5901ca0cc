"""The command `vlightning compare`."""

import argparse
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...common.errors import UserError
from ..cli.command_parser import CommandParser
from .report import draw, table, write_rows
from .search import searched
from .settings import Run, Sweep, Variant, grid
from .training import Outcome, Trainer


def run_compare(words: list[str]) -> str:
    """Run `vlightning compare CONFIG... [options] [-- arguments of fit]`.

    Args:
        words: The arguments after `compare`.

    Returns:
        The table, and the files that were written.

    Raises:
        UserError: If an argument is wrong, or a run fails.
        SystemExit: If it is stopped by Ctrl-C or SIGTERM.
    """
    split = words.index("--") if "--" in words else len(words)
    typed = parser_of_compare().parse_args(words[:split])
    variants = [Variant.parse(text) for text in typed.configs]
    names = [variant.name for variant in variants]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"Expected variants of different names, got {repeated!r} twice: write NAME=FILE.")
    baseline = typed.baseline or names[0]
    if baseline not in names:
        raise UserError(f"Expected one of {', '.join(names)} as --baseline, got {baseline!r}.")
    sweeps = [Sweep.parse(text) for text in typed.sweep]
    if typed.trials is None:
        grid(sweeps)  # a range is an error before the first run
    elif not sweeps:
        raise UserError("Expected --sweep with --trials, got none: name the options that are searched.")
    seeds = range(typed.first_seed, typed.first_seed + typed.seeds)
    trainer = Trainer(typed.output, words[split + 1 :], typed.test, typed.threads, typed.metric, typed.mode)

    stopped = threading.Event()
    warned: set[str] = set()

    def train(run: Run) -> Outcome:
        if stopped.is_set():  # variants that no thread had taken up are cancelled, perhaps too late for one
            raise KeyboardInterrupt
        try:
            outcome = trainer.train(run)
        except KeyboardInterrupt:
            stopped.set()
            raise
        for text in outcome.warnings:
            if text not in warned:  # most are those of every run
                warned.add(text)
                print(f"vlightning: warning: {run.folder_name}: {text}", file=sys.stderr, flush=True)
        print(f"{run.folder_name}: {outcome.metric.name} {outcome.last:.2f}", flush=True)
        return outcome

    def compared(variant: Variant) -> tuple[list[Outcome], list[Outcome]]:
        """Return the outcomes of a variant's search, and those of its seeds."""
        tried, best = searched(variant, sweeps, typed.trials, seeds[0], train)
        others = [Run(variant, best.run.values, seed) for seed in seeds[1:]]
        return tried, [best, *map(train, others)]

    def terminate(*_: object) -> None:  # unlike Ctrl-C in a terminal, SIGTERM reaches this process alone
        trainer.stop()
        raise KeyboardInterrupt

    pool = ThreadPoolExecutor(typed.jobs)
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        results = list(pool.map(compared, variants))
    except KeyboardInterrupt:  # the runs have a signal too: each ends with a checkpoint
        stopped.set()
        print("\nStopping: runs in progress write their checkpoints first.", flush=True)
        pool.shutdown(cancel_futures=True)
        print("Stopped: the same command goes on.", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        pool.shutdown(cancel_futures=True)
        signal.signal(signal.SIGTERM, before)
    outcomes = {variant.name: runs for variant, (_, runs) in zip(variants, results, strict=True)}
    text = table(outcomes, baseline)
    every = {outcome.run: outcome for tried, runs in results for outcome in (*tried, *runs)}
    write_rows(typed.output / "runs.csv", list(every.values()), outcomes[baseline])
    (typed.output / "table.md").write_text(text, encoding="utf-8")
    draw(typed.output / "curves.png", outcomes)
    return f"{text}\nWrote table.md, runs.csv and curves.png to {typed.output}\n"


def parser_of_compare() -> CommandParser:
    """Return the parser of the arguments."""
    parser = CommandParser(
        "compare",
        usage="vlightning compare [NAME=]CONFIG[+CONFIG...] ... [options] [-- arguments of vlightning fit]",
        description="Train configs over seeds, and print mean, deviation, and differences from a baseline seed by "
        "seed. The same command goes on with runs that were stopped, and only reads finished ones.",
    )
    parser.add_argument("configs", nargs="+", help="what is compared: files of a run, joined by +")
    parser.add_argument("--output", type=Path, default=Path("comparison"), help="folder of the runs (comparison)")
    parser.add_argument("--seeds", type=_count, default=3, help="number of seeds (3)")
    parser.add_argument("--first_seed", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--baseline", help="name of the variant that the others are compared with (the first)")
    parser.add_argument("--metric", help="metric of the validation (that of the best checkpoint)")
    parser.add_argument("--mode", choices=("max", "min"), help="which values are better (as the best checkpoint's)")
    parser.add_argument("--test", action="store_true", help="evaluate each last checkpoint on the test split too")
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="OPTION=VALUE,VALUE",
        help="values of an option that are tried with the first seed, in each variant; the best is trained with all "
        "seeds. Repeat it for several options; OPTION=LOW..HIGH is a range, for --trials",
    )
    parser.add_argument("--trials", type=_count, help="number of trials that Optuna chooses (every combination)")
    parser.add_argument("--jobs", type=_count, default=1, help="variants at a time (1)")
    parser.add_argument("--threads", type=_count, help="threads of each run (those of the environment)")
    return parser


def _count(text: str) -> int:
    """Read a positive integer."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return number
