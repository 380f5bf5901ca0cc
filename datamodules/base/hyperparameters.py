"""Checking of a datamodule's constructor arguments, and recording of them for checkpoints."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import os
import warnings
from collections.abc import Mapping
from types import FrameType
from typing import Any

import lightning.pytorch as pl

from ...common.errors import UserError
from ...common.urls import keep
from .private_api import replace_hyperparameters

_NOT_PLAIN = object()


def check_one_batch_size(cls: type, batch_size: int, global_batch_size: int | None) -> None:
    """Check that a batch size other than the class's default is not given beside a global one.

    Raises:
        UserError: If both are given.
    """
    parameters = (inspect.signature(base).parameters.get("batch_size") for base in cls.__mro__)
    default = next(parameter.default for parameter in parameters if parameter is not None)
    if global_batch_size is not None and batch_size != default:
        raise UserError(
            f"Expected data.batch_size, of each process, or data.global_batch_size, of all, got {batch_size} and "
            f"{global_batch_size}: set data.global_batch_size alone, or to null."
        )


def record_hyperparameters(module: pl.LightningDataModule, frame: FrameType | None) -> None:
    """Record the constructor's arguments that are plain data, those of the base classes included.

    A checkpoint that contains a module or a dataclass cannot be loaded with `weights_only=True`. With the command
    line Lightning records the configuration instead of the arguments, so transforms are recorded by name. URLs are
    recorded without their secrets.

    Args:
        module: the datamodule.
        frame: frame of the constructor of the base class.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is an instance of `nn.Module`")
        module.save_hyperparameters(logger=False, frame=frame)
    values = dict(module.hparams)
    if "_instantiator" not in values:
        # Frames also hold values that a subclass passes to its base class and does not accept itself.
        names = argument_names(type(module))  # type: ignore[arg-type]
        values = {name: value for name, value in values.items() if name in names}
    plain = {name: _plain(value) for name, value in values.items()}
    replace_hyperparameters(module, keep({name: value for name, value in plain.items() if value is not _NOT_PLAIN}))


@functools.cache
def argument_names(cls: type) -> frozenset[str]:
    """Return the names of a class's constructor arguments, including those passed through `**options`.

    Those that a class sets itself (`SampledDataModule.fixed_options`) are left out.
    """
    names: set[str] = set()
    fixed: set[str] = set()
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        names |= {each.name for each in parameters if each.kind is not each.VAR_KEYWORD} - fixed
        if all(each.kind is not each.VAR_KEYWORD for each in parameters):
            break
        fixed |= vars(base).get("fixed_options", frozenset())
    return frozenset(names)


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
        items = [_plain(item) for item in value]
        return _NOT_PLAIN if any(item is _NOT_PLAIN for item in items) else items
    return _NOT_PLAIN
