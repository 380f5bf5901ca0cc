"""Public names of a package whose modules are imported when one of their names is first used."""

import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any


class LazyNames:
    """Public names of a package.

    Args:
        package: name of the package.
        names: names of each module, which is relative to the package.
    """

    def __init__(self, package: str, names: Mapping[str, Iterable[str]]) -> None:
        self.package = package
        self.modules = {name: module for module, names_of in names.items() for name in names_of}

    def get(self, name: str) -> Any:
        """Return a name, and import its module, for the package's `__getattr__`.

        Raises:
            AttributeError: If the package has no such name.
            ImportError: If a library that the name needs is not installed.
        """
        if name not in self.modules:
            raise AttributeError(f"module {self.package!r} has no attribute {name!r}")
        try:
            module = import_module(f".{self.modules[name]}", self.package)
        except ModuleNotFoundError as error:
            library = str(error.name).partition(".")[0]
            if library == __package__.partition(".")[0]:
                raise
            raise ImportError(
                f"{self.package}.{name} needs {library}, which is not installed.", name=library
            ) from error
        value = getattr(module, name)
        setattr(sys.modules[self.package], name, value)
        return value

    def load_all(self) -> None:
        """Import every name, so that a command line finds the classes by their short names."""
        for name in self.modules:
            self.get(name)
