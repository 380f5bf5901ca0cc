"""The search for the values of options with which a variant is best, on the first seed."""

from collections.abc import Callable, Sequence
from typing import Any

from ...common.errors import UserError
from .settings import Range, Run, Sweep, Variant, grid
from .training import Outcome

Train = Callable[[Run], Outcome]


def searched(
    variant: Variant, sweeps: Sequence[Sweep], trials: int | None, seed: int, train: Train
) -> tuple[list[Outcome], Outcome]:
    """Train a variant with the values that are tried; return all outcomes, and that with the best last validation.

    Args:
        variant: the variant.
        sweeps: options and what is tried of them.
        trials: number of trials that Optuna chooses; None for every combination of the values.
        seed: seed of all trials, and of Optuna.
        train: trains a run, or reads what a finished one reached.

    Raises:
        UserError: If there is a range without trials, or Optuna is missing.
    """
    if trials is None:
        outcomes = [train(Run(variant, tuple(values.items()), seed)) for values in grid(sweeps)]
    else:
        outcomes = _by_optuna(variant, sweeps, trials, seed, train)
    return outcomes, max(outcomes, key=lambda outcome: outcome.metric.score(outcome.last))


def _by_optuna(variant: Variant, sweeps: Sequence[Sweep], trials: int, seed: int, train: Train) -> list[Outcome]:
    """Train what Optuna's TPE suggests.

    Its suggestions follow from its seed and from what the trials before reached, so that the same command suggests the
    same again and reads what is finished: the folder of the runs is all the state that a search has.
    """
    try:
        import optuna
    except ModuleNotFoundError:
        raise UserError(
            "Expected the package optuna for --trials, got none: pip install 'vlightning[compare]'."
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    outcomes: dict[Run, Outcome] = {}
    for _ in range(trials):
        trial = study.ask()
        values = tuple((sweep.option, _suggested(trial, sweep)) for sweep in sweeps)
        outcome = train(Run(variant, values, seed))
        study.tell(trial, outcome.metric.score(outcome.last))
        outcomes[outcome.run] = outcome
    return list(outcomes.values())


def _suggested(trial: Any, sweep: Sweep) -> str:
    if isinstance(sweep.values, Range):
        return f"{trial.suggest_float(sweep.option, sweep.values.low, sweep.values.high, log=True):.3g}"
    return str(trial.suggest_categorical(sweep.option, sweep.values))
