"""The arguments of a datamodule's constructor: which it takes, and their record in checkpoints."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import os
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import lightning.pytorch as pl

from ...common.errors import UserError
from ...common.ranges import CheckedArguments
from ...common.urls import keep
from .memory import in_memory

_NOT_PLAIN = object()


@functools.cache
def constructor_arguments(cls: type) -> Mapping[str, Any]:
    """Return the arguments of a datamodule's class with their defaults, those passed on as `**options` included.

    An argument of a base class that a subclass decides itself is not among them: the subclass names it in
    `decided_arguments`. An argument without a default has `inspect.Parameter.empty`.
    """
    arguments: dict[str, Any] = {}
    decided: set[str] = set()
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        named = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
        for parameter in named:
            if parameter.name not in decided:
                arguments.setdefault(parameter.name, parameter.default)
        if len(named) == len(parameters):
            break
        decided |= set(vars(base).get("decided_arguments", ()))
    return arguments


class RecordedArguments(CheckedArguments):
    """Base of the datamodules, which keeps the arguments of the constructor that a user calls.

    It has no constructor, since jsonargparse takes the options of a class with `__new__` from that.
    """

    decided_arguments: ClassVar[tuple[str, ...]] = ()
    """Arguments of the base classes that a class gives itself, so that a user of it cannot."""
    arguments: dict[str, Any]
    """Values of the constructor's arguments by name: the given ones, else the defaults."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Check and keep the arguments."""
        instance = super().__new__(cls, *args, **kwargs)
        positional = dict(zip(inspect.signature(cls).parameters, args, strict=False))
        arguments = constructor_arguments(cls)  # type: ignore[arg-type]
        defaults = {name: value for name, value in arguments.items() if value is not inspect.Parameter.empty}
        instance.arguments = {**defaults, **positional, **kwargs}
        return instance


def check_one_batch_size(cls: type, batch_size: int, global_batch_size: int | None) -> None:
    """Check that a batch size other than the class's default is not given beside a global one.

    Raises:
        UserError: If both are given.
    """
    if global_batch_size is not None and batch_size != constructor_arguments(cls)["batch_size"]:
        raise UserError(
            f"Expected data.batch_size, of each process, or data.global_batch_size, of all, got {batch_size} and "
            f"{global_batch_size}: set data.global_batch_size alone, or to null."
        )


def record_hyperparameters(module: pl.LightningDataModule, arguments: Mapping[str, Any]) -> None:
    """Record the constructor's arguments that are plain data, for checkpoints.

    A checkpoint that contains a module or a dataclass cannot be loaded with `weights_only=True`. With the command
    line Lightning records the configuration instead of the arguments, so transforms are recorded by name. URLs are
    recorded without their secrets, rows in memory not at all.
    """
    splits = ("train", "validation", "test", "predict")
    rows = [name for name in splits if _is_rows(arguments.get(name))]
    if rows:  # which Lightning would copy and compare with other arguments, and no command line can give
        plain = {name: _plain(value) for name, value in arguments.items() if name not in rows}
        module.hparams.update(keep({name: value for name, value in plain.items() if value is not _NOT_PLAIN}))
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is an instance of `nn.Module`")
        module.save_hyperparameters(logger=False)
    values = dict(module.hparams)
    if "_instantiator" not in values:  # not built by the command line
        values = dict(arguments)
    plain = {name: _plain(value) for name, value in values.items()}
    module.hparams.clear()
    module.save_hyperparameters(
        keep({name: value for name, value in plain.items() if value is not _NOT_PLAIN}), logger=False
    )


def _is_rows(value: Any) -> bool:
    """Return whether a value is no name of a source, or a list with such a value."""
    several = [value, *value] if isinstance(value, (list, tuple)) else [value]
    return any(in_memory(one) or _plain(one) is _NOT_PLAIN for one in several)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        entries = {key: _plain(entry) for key, entry in value.items()}
        return _NOT_PLAIN if any(entry is _NOT_PLAIN for entry in entries.values()) else entries
    if isinstance(value, (list, tuple)):
        elements = [_plain(element) for element in value]
        return _NOT_PLAIN if any(element is _NOT_PLAIN for element in elements) else elements
    return _NOT_PLAIN
