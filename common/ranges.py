"""Ranges of numeric settings: declared in the types of arguments, and checked before a constructor runs.

`learning_rate: Annotated[float, POSITIVE] = 1e-4` declares one; in a tuple, a list or a dictionary it holds for each
number. A subclass that only changes a default inherits the range. Modules with such types begin with `from __future__
import annotations`: jsonargparse then shows the types without their ranges.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from .errors import UserError


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers between bounds, finite unless `infinity` is set; NaN is in no range.

    Args:
        least: lower bound, which is in the range.
        most: upper bound, which is in the range.
        above: lower bound, which is not in the range.
        below: upper bound, which is not in the range.
        infinity: whether infinity is in the range, as a limit that has a meaning.
    """

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    infinity: bool = False

    def __contains__(self, number: Any) -> bool:
        if number == math.inf:
            return self.infinity
        return bool(self.least <= number <= self.most and self.above < number < self.below)

    def __str__(self) -> str:
        if math.isfinite(self.least) and math.isfinite(self.most):
            return f"from {self.least} to {self.most}"
        bounds = {
            "at least": self.least,
            "more than": self.above,
            "at most": self.most,
            "less than": self.below,
        }
        clauses = [f"{words} {bound}" for words, bound in bounds.items() if math.isfinite(bound)]
        return f"of {' and '.join(clauses)}" if clauses else "of a finite number"

    def remedy(self, number: Any) -> str:
        """Return what to do about a number outside the range."""
        if number <= max(self.least, self.above) and math.isfinite(number):
            return "increase it."
        if number >= min(self.most, self.below) and math.isfinite(number):
            return "decrease it."
        return "give a finite number."


FINITE = Range()
POSITIVE = Range(above=0)
NOT_NEGATIVE = Range(least=0)
COUNT = Range(least=1)
SHARE = Range(least=0, most=1)
BELOW_ONE = Range(least=0, below=1)
"""Such as a dropout or a beta of Adam, which are meaningless at 1."""
POSITIVE_SHARE = Range(above=0, most=1)
"""Such as a crop's share of the area."""
RATE = Range(above=0, most=100)
"""Learning rates: the largest in use, of linear probes by SGD, are some tens."""
SEED = Range(least=0, below=2**32)
"""Seeds of numpy."""


class _ConstructorSignature:
    """The signature of a class, which is that of its constructor."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")
        signature = inspect.signature(owner.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class CheckedArguments:
    """Mixin, before all other bases, that checks the arguments of a constructor before it runs.

    A keyword of the class statement says where the command line has the arguments: with `option="data"` messages name
    them `data.batch_size`, with `option=""` without a prefix, and without it "steps of StuckLossWarning".

    Raises:
        UserError: If a number is outside the range in its argument's type, or another value is given for a number, or
            for true or false.
    """

    _option: ClassVar[str | None] = None

    def __init_subclass__(cls, option: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if option is not None:
            cls._option = option

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Check the arguments."""
        _check_arguments(cls, cls._option, args, kwargs)
        return super().__new__(cls)

    __signature__ = _ConstructorSignature()  # `inspect` would take that of `__new__`


@dataclasses.dataclass(frozen=True)
class SettingsGroup:
    """Base of the groups of settings, which checks their fields as `CheckedArguments` does.

    It is a class of its own, since jsonargparse takes a dataclass for a group only if all its bases are dataclasses.
    """

    _option: ClassVar[str | None] = None

    def __init_subclass__(cls, option: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if option is not None:
            cls._option = option

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Check the fields."""
        _check_arguments(cls, cls._option, args, kwargs)
        return super().__new__(cls)

    def check_order(self, lower: str, upper: str) -> None:
        """Check that one field is at most another.

        Raises:
            UserError: If it is larger.
        """
        least, most = getattr(self, lower), getattr(self, upper)
        if least > most:
            raise UserError(
                f"Expected {_shown(type(self), self._option, lower)} of at most "
                f"{_shown(type(self), self._option, upper)}, {most}, got {least}: change one of them."
            )


@functools.cache
def checked_types(cls: type) -> dict[str, Any]:
    """Return the types of a constructor's arguments that are checked, by name: with a range, or `bool`.

    Args:
        cls: a subclass of `CheckedArguments` or `SettingsGroup`. The first class in its order of bases that declares a
            range decides.
    """
    types: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if not issubclass(base, (CheckedArguments, SettingsGroup)):
            continue
        declares = base if dataclasses.is_dataclass(base) else vars(base).get("__init__")
        if declares is None:
            continue
        try:
            hints = get_type_hints(declares, include_extras=True)
        except NameError:  # a user's class with types that are imported for type checkers only
            continue
        types |= {name: hint for name, hint in hints.items() if hint is bool or range_of(hint) is not None}
    return types


def range_of(hint: Any) -> Range | None:
    """Return the range in a type; None if there is none."""
    if get_origin(hint) is not Annotated:
        return None
    return next((extra for extra in hint.__metadata__ if isinstance(extra, Range)), None)


def plain_types(hint: Any) -> list[Any]:
    """Return the types inside a type: those of its unions, tuples, lists and dictionaries."""
    if get_origin(hint) is Annotated:
        return plain_types(hint.__origin__)
    if get_origin(hint) is Literal or not get_args(hint):
        return [hint]
    return [inner for argument in get_args(hint) for inner in plain_types(argument)]


def _check_arguments(cls: type, option: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    types = checked_types(cls)
    names = list(inspect.signature(cls.__init__).parameters)[1:]  # type: ignore[misc]
    for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
        if name in types:
            _check(_shown(cls, option, name), types[name], value)


def _shown(cls: type, option: str | None, name: str) -> str:
    """Return an argument's name as users write it."""
    return f"{name} of {cls.__name__}" if option is None else f"{option}.{name}".removeprefix(".")


def _check(name: str, hint: Any, value: Any) -> None:
    if hint is bool:
        if not isinstance(value, bool):
            raise UserError(f"Expected true or false as {name}, got {value!r}: correct it.")
        return
    numbers = range_of(hint)
    assert numbers is not None
    accepted = plain_types(hint)
    if isinstance(value, Mapping):
        value = tuple(value.values())
    for number in value if isinstance(value, (list, tuple)) else (value,):
        if number is None and type(None) in accepted:
            continue
        if isinstance(number, str) and any(get_origin(member) is Literal for member in accepted):
            _check_choice(name, number, accepted)
        elif not isinstance(number, Real):
            raise UserError(f"Expected a number as {name}, got {number!r}: correct it.")
        elif float not in accepted and not isinstance(number, Integral):
            raise UserError(f"Expected a whole number as {name}, got {number}: correct it.")
        elif number not in numbers:
            raise UserError(f"Expected {name} {numbers}, got {value}: {numbers.remedy(number)}")


def _check_choice(name: str, value: str, accepted: list[Any]) -> None:
    words = [str(word) for member in accepted if get_origin(member) is Literal for word in get_args(member)]
    if value not in words:
        raise UserError(f"Expected a number or {' or '.join(words)} as {name}, got {value!r}: correct it.")


def check_heads(width: int, heads: int) -> None:
    """Check that the number of attention heads divides a width.

    Raises:
        UserError: If the heads do not divide the width.
    """
    if width % heads:
        raise UserError(f"Expected a width that {heads} heads divide, got {width}: change one of them.")


def check_patches(image_size: int, patch_size: int) -> None:
    """Check that a patch size divides an image size.

    Raises:
        UserError: If the patch size does not divide the image size.
    """
    if image_size % patch_size:
        raise UserError(
            f"Expected an image size that patches of {patch_size} pixels divide, got {image_size}: change one of them."
        )
