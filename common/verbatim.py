"""Parsers that do not replace the name of a file by its content."""

from typing import Any

from jsonargparse import ArgumentParser
from typing_extensions import override

from .class_arguments import members
from .private_api import option_type, parser_actions, take_text_verbatim


class VerbatimText(ArgumentParser):
    """Mixin that reads text as text in every argument whose type includes `str`.

    If a type includes a class, jsonargparse treats text as the name of a config file: `train: str | Source | ...` would
    get the content of `pairs.csv` in place of its name. Nested classes have parsers of the same class. Arguments whose
    type is only a class are still read from a file, as in `--model model.yaml`.
    """

    @override
    def add_class_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        return self._with_verbatim_text(super().add_class_arguments(*args, **kwargs))

    @override
    def add_function_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        return self._with_verbatim_text(super().add_function_arguments(*args, **kwargs))

    def _with_verbatim_text(self, added: list[str]) -> list[str]:
        for action in parser_actions(self):
            if str in members(option_type(action)):
                take_text_verbatim(action)
        return added
