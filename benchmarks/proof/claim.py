"""The form of a claim: trainings that are compared, how long they last, and what is measured."""

import hashlib
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CLAIMS = Path(__file__).resolve().parent / "claims"
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
_PLACEHOLDER = re.compile(r"\$\{(\w+)(?::([\d.]+))?\}")


@dataclass(frozen=True)
class Preparation:
    """A training, or another command, that is done once, before the runs that read its results.

    Args:
        name: name, by which the words of other runs refer to its folder: `${name}`.
        words: arguments of `vlightning fit`; empty if only commands are run.
        epochs: length of the training.
        callbacks: callbacks of the training, each a class path with arguments.
        needs: names of the preparations whose folders the words name.
        after: commands of `vlightning`, which run after the training; `${folder}` is the folder of this preparation.
        test: arguments of `vlightning test`, which give the final metrics; empty for those of the last validation.
    """

    name: str
    words: Sequence[str] = ()
    epochs: float = 1.0
    callbacks: Sequence[Mapping[str, Any]] = ()
    needs: Sequence[str] = ()
    after: Sequence[Sequence[str]] = ()
    test: Sequence[str] = ()


@dataclass(frozen=True)
class Probe:
    """A short training on the last checkpoint of a run, such as a linear probe, which measures its features.

    Args:
        name: name of its metrics in place of `val`: `<name>/top1`.
        words: arguments of `vlightning fit`; `${checkpoint}` is the checkpoint. The last validation gives the metrics.
        epochs: length of the training.
    """

    name: str
    words: Sequence[str]
    epochs: int


@dataclass(frozen=True)
class Variant:
    """A method or an opponent.

    Args:
        name: name in the tables.
        words: arguments of `vlightning fit`, beside the claim's.
        callbacks: callbacks of the training, each a class path with arguments.
        needs: names of the preparations whose folders the words name.
        prefix: text that is removed from the names of its metrics, such as `h2/`, so that variants have equal names.
        probes: what is measured after the training, beside the test; its FLOPs are not those of the method.
    """

    name: str
    words: Sequence[str] = ()
    callbacks: Sequence[Mapping[str, Any]] = ()
    needs: Sequence[str] = ()
    prefix: str = ""
    probes: Sequence[Probe] = ()


@dataclass(frozen=True)
class Budget:
    """The length of the trainings of one table: one of `epochs`, `flops` and `like`.

    Args:
        name: name in the tables.
        epochs: epochs of each training.
        flops: counted FLOPs of each training, forward and backward, with those of all teachers.
        like: variant and budget whose counted FLOPs each training has; their own runs stand in this table too.
        variants: names of the variants; by default all.
        learning_rates_of: name of the budget whose best learning rates are used, without a search.
    """

    name: str
    epochs: float | None = None
    flops: float | None = None
    like: tuple[str, str] | None = None
    variants: Sequence[str] | None = None
    learning_rates_of: str | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.epochs, self.flops, self.like) if value is not None]
        if len(given) != 1:
            raise ValueError(f"Expected one of epochs, flops and like for the budget {self.name!r}, got {len(given)}.")


@dataclass(frozen=True)
class Claim:
    """What is claimed, its opponents and their budgets; an attribute `CLAIM` of a file.

    Every variant is trained with the first seed and each learning rate. The rate with the best `metric` of the
    validation split is that of the other seeds. The test split is read after the training, and selects nothing.

    Args:
        name: name of the file of results, `<name>.jsonl`.
        statement: what is claimed, in one sentence.
        words: arguments of every `vlightning fit` of a variant.
        variants: the trainings, what decides most first.
        budgets: lengths of the trainings, what decides most first.
        metric: metric of the validation split that is measured along the way; larger values are better.
        learning_rates: the grid; with one value there is no search.
        learning_rate_option: option of the learning rate.
        seeds: seeds; the first is that of the search.
        preparations: trainings before all others, each after those that it needs.
        test: arguments of `vlightning test`; empty without a test split.
        shown: metrics of the tables: those of the test, or without it of the last validation.
        opponent: variant that the others are compared with, seed by seed.
        evaluations: number of validations in a training, at equal distances; the last is at its end.
        variables: texts that replace `${NAME}` in all words.
    """

    name: str
    statement: str
    words: Sequence[str]
    variants: Sequence[Variant]
    budgets: Sequence[Budget]
    metric: str
    learning_rates: Sequence[float]
    shown: Sequence[str]
    opponent: str
    learning_rate_option: str = "--model.optim.learning_rate"
    seeds: Sequence[int] = (0, 1, 2)
    preparations: Sequence[Preparation] = ()
    test: Sequence[str] = ()
    evaluations: int = 10
    variables: Mapping[str, str] = field(default_factory=dict)

    def variant(self, name: str) -> Variant:
        """Return the variant of a name."""
        return next(variant for variant in self.variants if variant.name == name)

    def preparation(self, name: str) -> Preparation:
        """Return the preparation of a name."""
        return next(preparation for preparation in self.preparations if preparation.name == name)

    def budget(self, name: str) -> Budget:
        """Return the budget of a name."""
        return next(budget for budget in self.budgets if budget.name == name)

    def variants_of(self, budget: Budget) -> list[Variant]:
        """Return the variants that are trained for a budget."""
        names = [variant.name for variant in self.variants] if budget.variants is None else budget.variants
        reference = budget.like if budget.like is not None else (None, None)
        return [variant for variant in self.variants if variant.name in names and variant.name != reference[0]]

    def needed(self, names: Sequence[str]) -> list[Preparation]:
        """Return preparations with all that they need, in the order in which they are done."""
        wanted = set(names)
        for preparation in reversed(self.preparations):
            if preparation.name in wanted:
                wanted |= set(preparation.needs)
        return [preparation for preparation in self.preparations if preparation.name in wanted]


@dataclass(frozen=True)
class Run:
    """A planned run: a preparation, or a variant of a budget with a learning rate and a seed.

    Args:
        claim: name of the claim.
        variant: name of the variant or the preparation.
        budget: name of the budget; empty for a preparation.
        learning_rate: the rate; None for a preparation.
        seed: the seed.
    """

    claim: str
    variant: str
    budget: str = ""
    learning_rate: float | None = None
    seed: int = 0

    @property
    def key(self) -> tuple[str, str, float | None, int]:
        """What names a run in the results of its claim."""
        return self.variant, self.budget, self.learning_rate, self.seed

    @property
    def folder_name(self) -> str:
        """Name of the folder of checkpoints, which no other run of the claim has."""
        if not self.budget:
            return f"preparation_{_in_a_path(self.variant)}"
        text = f"{self.variant} {self.budget} {self.learning_rate:g} seed{self.seed}"
        digest = hashlib.sha256(json.dumps(self.key).encode()).hexdigest()[:6]
        return f"{_in_a_path(text)}_{digest}"


def _in_a_path(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text)


def load_claim(name: str) -> Claim:
    """Return the claim of a file: its name in `claims/`, or its path.

    Raises:
        SystemExit: If there is no such file.
    """
    file = Path(name) if name.endswith(".py") else CLAIMS / f"{name}.py"
    if not file.is_file():
        names = ", ".join(sorted(path.stem for path in CLAIMS.glob("[a-z]*.py")))
        raise SystemExit(f"Expected a claim, one of {names} or a Python file, got {name!r}.")
    spec = importlib.util.spec_from_file_location(f"claim_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    claim: Claim = module.CLAIM
    return claim


def filled(words: Sequence[str], texts: Mapping[str, str], lengths: Mapping[str, float] | None = None) -> list[str]:
    """Return words with `${name}` replaced by a text, and `${epoch:0.75}` by three quarters of the run's epochs.

    Args:
        words: the words.
        texts: texts by name; `configs` is the folder of the package's configs.
        lengths: numbers by name, of which a share is asked; rounded, at least 1.

    Raises:
        KeyError: For an unknown name.
    """
    known = {"configs": str(CONFIGS), **texts}

    def replacement(match: re.Match[str]) -> str:
        name, share = match.groups()
        if share is None:
            return known[name]
        return str(max(1, round((lengths or {})[name] * float(share))))

    return [_PLACEHOLDER.sub(replacement, word) for word in words]
