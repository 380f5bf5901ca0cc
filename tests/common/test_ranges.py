"""Every number that a user sets has a range, which is checked before a constructor runs."""

import copy
import dataclasses
import functools
import inspect
import math
import pickle
from collections.abc import Iterator
from typing import Annotated, Any

import pytest

from support.runs.command_line import run
from vlightning import callbacks, datamodules, lightning_modules
from vlightning.callbacks import EMAPair, StuckLossWarning
from vlightning.common.class_arguments import class_bases, subclasses
from vlightning.common.errors import UserError
from vlightning.common.private_api import constructor_parameters
from vlightning.common.ranges import (
    BELOW_ONE,
    COUNT,
    FINITE,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    SHARE,
    CheckedArguments,
    Range,
    SettingsGroup,
    checked_types,
    plain_types,
    range_of,
)
from vlightning.datamodules import ShapeClassesDataModule, ShapesDataModule
from vlightning.lightning_modules import ALBEFModule, CLIPModule, CoCoRDModule
from vlightning.lightning_modules.albef.settings import (
    ContrastSettings,
    OptimSettings,
    TextSettings,
    VisionSettings,
)
from vlightning.lightning_modules.clip.settings import TuningSettings
from vlightning.lightning_modules.mobileclip.ensemble import Teacher
from vlightning.lightning_modules.mobileclip.settings import OptimSettings as MobileOptimSettings

parameters_of = functools.cache(constructor_parameters)
# What a step, a writer or a reader returns, which nobody sets.
RESULTS = {"LeftOut", "Reinforced"}


def public_classes() -> list[type]:
    """Return the public modules, datamodules, transforms and callbacks, and the groups of settings that they take."""
    packages = (lightning_modules, datamodules, callbacks)
    todo = [getattr(package, name) for package in packages for name in package.__all__ if name not in RESULTS]
    classes: list[type] = []
    while todo:
        cls = todo.pop(0)
        if not isinstance(cls, type) or cls in classes:
            continue
        classes.append(cls)
        for parameter in parameters_of(cls):
            bases = class_bases(parameter.annotation)
            todo += [each for base in bases for each in subclasses((base,)).values() if is_group(each)]
    return classes


def is_group(cls: type) -> bool:
    """Whether a class is a dataclass of this package."""
    return dataclasses.is_dataclass(cls) and cls.__module__.startswith("vlightning.")


def numbers(cls: type) -> Iterator[str]:
    """Yield the constructor's arguments that hold numbers."""
    for parameter in parameters_of(cls):
        variable = parameter.kind in (parameter.kind.VAR_KEYWORD, parameter.kind.VAR_POSITIONAL)
        # An argument that is passed on to an object of another class is checked there.
        passed_on = isinstance(parameter.parent, type) and parameter.parent not in cls.__mro__
        if not variable and not passed_on and any(hint in (int, float) for hint in plain_types(parameter.annotation)):
            yield parameter.name


CLASSES = public_classes()


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: f"{cls.__module__.removeprefix('vlightning.')}.{cls.__name__}")
def test_every_number_has_a_range_and_a_default_inside_it(cls: type) -> None:
    names = list(numbers(cls))
    if not names:
        return
    assert issubclass(cls, (CheckedArguments, SettingsGroup))
    types = checked_types(cls)
    assert [name for name in names if range_of(types.get(name)) is None] == []
    for parameter in parameters_of(cls):
        assert "Annotated" not in str(parameter.annotation), "the help would show the range: postpone annotations"
    defaults = {p.name: p.default for p in parameters_of(cls) if p.name in names}
    for name, default in defaults.items():
        if default is not inspect.Parameter.empty:
            accepts(cls, name, default)


def test_groups_are_named_as_the_command_line_names_them() -> None:
    # A `Teacher` is an element of lists of two names.
    wrong = []
    for cls in CLASSES:
        if not issubclass(cls, lightning_modules.base.method.Method):
            continue
        for parameter in parameters_of(cls):
            for group in filter(is_group, class_bases(parameter.annotation)):
                shown = refusal(group, next(numbers(group), None))
                if shown is not None and group is not Teacher and f" {parameter.name}." not in shown:
                    wrong.append((cls.__name__, parameter.name, shown))
    assert wrong == []


def accepts(cls: type, name: str, value: Any) -> None:
    """Check one argument as the constructor does, without running it."""
    cls.__new__(cls, **{name: value})


def refusal(cls: type, name: str | None) -> str | None:
    """Return the sentence that refuses NaN for an argument; None for no argument."""
    if name is None:
        return None
    with pytest.raises(UserError) as caught:
        accepts(cls, name, inside_container(checked_types(cls)[name], math.nan))
    return str(caught.value)


def inside_container(hint: Any, number: float) -> Any:
    """Return a value of a type that holds a number."""
    text = str(hint)
    if "dict[" in text:
        return {"a": number}
    return (number, number, number) if "tuple[" in text or "list[" in text or "Sequence[" in text else number


def outside(numbers: Range) -> list[float]:
    """Return numbers below and above a range, at its open ends, and non-finite ones."""
    below = [numbers.least - 1] if math.isfinite(numbers.least) else []
    above = [numbers.most + 1] if math.isfinite(numbers.most) else []
    ends = [bound for bound in (numbers.above, numbers.below) if math.isfinite(bound)]
    infinite = [-math.inf] if numbers.infinity else [math.inf, -math.inf]
    return [*below, *above, *ends, math.nan, *infinite]


DECLARED = [
    (cls, name)
    for cls in CLASSES
    if issubclass(cls, (CheckedArguments, SettingsGroup))
    for name in checked_types(cls)
    if name in set(numbers(cls))
]


@pytest.mark.parametrize(("cls", "name"), DECLARED, ids=lambda value: getattr(value, "__name__", value))
def test_values_outside_every_range_are_refused_in_one_sentence_that_names_the_setting(cls: type, name: str) -> None:
    hint = checked_types(cls)[name]
    numbers = range_of(hint)
    assert numbers is not None
    for number in outside(numbers):
        with pytest.raises(UserError) as caught:
            accepts(cls, name, inside_container(hint, number))
        sentence = str(caught.value)
        assert sentence.startswith("Expected ")
        assert name in sentence
        assert "\n" not in sentence
        assert sentence.count(": ") == 1
        assert sentence.endswith(".")
    with pytest.raises(UserError, match=rf"Expected a number as .*{name}.*, got"):
        accepts(cls, name, [object()])


def test_ranges_say_what_they_hold() -> None:
    assert str(COUNT) == "of at least 1"
    assert str(POSITIVE) == "of more than 0"
    assert str(SHARE) == "from 0 to 1"
    assert str(BELOW_ONE) == "of at least 0 and less than 1"
    assert str(POSITIVE_SHARE) == "of more than 0 and at most 1"
    assert str(FINITE) == "of a finite number"
    assert 10**400 in NOT_NEGATIVE


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (
            lambda: ALBEFModule(optim=OptimSettings(learning_rate=-0.001)),
            "Expected optim.learning_rate of more than 0 and at most 100, got -0.001: increase it.",
        ),
        (
            lambda: ALBEFModule(optim={"warmup_learning_rate": -1.0}),
            "Expected optim.warmup_learning_rate of at least 0, got -1.0: increase it.",
        ),
        (
            lambda: OptimSettings(1e9),
            "Expected optim.learning_rate of more than 0 and at most 100, got 1000000000.0: decrease it.",
        ),
        (lambda: TextSettings(heads=0), "Expected text.heads of at least 1, got 0: increase it."),
        (lambda: TextSettings(heads=None), "Expected a number as text.heads, got None: correct it."),
        (lambda: TextSettings(heads=2.5), "Expected a whole number as text.heads, got 2.5: correct it."),
        (
            lambda: OptimSettings(betas=(0.9, 1.0)),
            "Expected optim.betas of at least 0 and less than 1, got (0.9, 1.0): decrease it.",
        ),
        (
            lambda: TuningSettings(lock_image="some"),
            "Expected a number or all as tuning.lock_image, got 'some': correct it.",
        ),
        (
            lambda: ALBEFModule(mlm={"probability": 2.0}),
            "Expected true or false as mlm, got {'probability': 2.0}: correct it.",
        ),
        (lambda: CLIPModule(max_tokens=0), "Expected max_tokens of at least 1, got 0: increase it."),
        (
            lambda: CoCoRDModule(class_weight=math.nan),
            "Expected class_weight of at least 0, got nan: give a finite number.",
        ),
        (lambda: ShapesDataModule(image_size=0), "Expected data.image_size of at least 1, got 0: increase it."),
        (
            lambda: ShapesDataModule(seed=2**70),
            f"Expected data.seed of at least 0 and less than 4294967296, got {2**70}: decrease it.",
        ),
        (lambda: ShapeClassesDataModule(batch_size=0), "Expected data.batch_size of at least 1, got 0: increase it."),
        (lambda: StuckLossWarning(steps=0), "Expected steps of StuckLossWarning of at least 1, got 0: increase it."),
        (
            lambda: EMAPair("a", "b", math.nan),
            "Expected momentum of EMAPair from 0 to 1, got nan: give a finite number.",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_python_refuses_a_number_as_users_name_it(build: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        build()
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (
            lambda: OptimSettings(min_learning_rate=0.01),
            "Expected optim.min_learning_rate of at most optim.learning_rate, 0.0001, got 0.01: change one of them.",
        ),
        (
            lambda: OptimSettings(warmup_learning_rate=0.01),
            "Expected optim.warmup_learning_rate of at most optim.learning_rate, 0.0001, got 0.01: change one of them.",
        ),
        (
            lambda: MobileOptimSettings(min_learning_rate=0.01),
            "Expected optim.min_learning_rate of at most optim.learning_rate, 0.001, got 0.01: change one of them.",
        ),
        (
            lambda: ContrastSettings(temperature_min=0.1),
            "Expected contrast.temperature_min of at most contrast.temperature, 0.07, got 0.1: change one of them.",
        ),
        (
            lambda: ContrastSettings(temperature=0.6),
            "Expected contrast.temperature of at most contrast.temperature_max, 0.5, got 0.6: change one of them.",
        ),
        (
            lambda: VisionSettings(heads=5),
            "Expected a width that 5 heads divide, got 768: change one of them.",
        ),
        (
            lambda: VisionSettings(patch_size=7),
            "Expected an image size that patches of 7 pixels divide, got 256: change one of them.",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_do_not_fit_together_are_refused_in_one_sentence(build: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        build()
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--model.optim.learning_rate", "-0.001"], "optim.learning_rate"),
        (["--model.momentum.alpha", ".nan"], "momentum.alpha"),
        (["--model.text.dropout", "1.5"], "text.dropout"),
        (["--data.batch_size", "0"], "data.batch_size"),
        (["--data.max_bad_share", ".inf"], "data.max_bad_share"),
        (
            ["--trainer.callbacks+=StuckLossWarning", "--trainer.callbacks.steps=0"],
            "steps of StuckLossWarning",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_command_line_refuses_numbers_outside_their_range(options: list[str], named: str) -> None:
    ran = run("fit", "--model", "ALBEFModule", "--data", "ShapesDataModule", *options)
    assert ran.status
    assert f"Expected {named} " in ran.sentence


def test_a_subclass_that_changes_a_default_inherits_the_range() -> None:
    class Small(ShapesDataModule):
        def __init__(self, batch_size: int = 4, **options: Any) -> None:
            super().__init__(batch_size=batch_size, **options)

    with pytest.raises(UserError, match=r"Expected data\.batch_size of at least 1, got -4"):
        Small(batch_size=-4)
    assert list(inspect.signature(Small).parameters) == ["batch_size", "options"]


def test_a_class_without_a_constructor_has_the_signature_of_its_base() -> None:
    class Renamed(StuckLossWarning):
        pass

    assert list(inspect.signature(Renamed).parameters) == ["name", "steps", "share"]
    assert Renamed(steps=3).steps == 3


def test_groups_are_copied_and_pickled() -> None:
    settings = OptimSettings(learning_rate=0.5)
    assert copy.deepcopy(settings) == settings
    assert pickle.loads(pickle.dumps(settings)) == settings
    with pytest.raises(UserError, match=r"optim\.learning_rate"):
        dataclasses.replace(settings, learning_rate=200.0)


def test_dictionaries_are_checked_by_value() -> None:
    class Weighted(CheckedArguments, option="data"):
        def __init__(self, weights: Annotated[dict[str, float] | None, POSITIVE] = None) -> None:
            self.weights = weights

    assert Weighted({"a": 0.5}).weights == {"a": 0.5}
    with pytest.raises(UserError, match=r"Expected data\.weights of more than 0, got"):
        Weighted({"a": 0.5, "b": 0.0})
