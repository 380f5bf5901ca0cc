"""Parser of the commands beside those of LightningCLI; it needs no torch."""

import argparse
import itertools
import re
import sys
from typing import Any, NoReturn

from ...common.errors import UsageError
from ...common.names import did_you_mean
from ...common.private_api import parser_actions


class CommandParser(argparse.ArgumentParser):
    """Refuses arguments in one sentence, with the nearest option or value.

    Args:
        command: its name.
        description: what it does, for its help.
        usage: its usage; by default that of argparse.
    """

    def __init__(self, command: str, description: str, usage: str | None = None) -> None:
        # Abbreviated options would change their meaning with the next option of a similar name.
        super().__init__(f"vlightning {command}", usage=usage, description=description, allow_abbrev=False)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the values of the arguments.

        Raises:
            UsageError: If an argument is unknown, missing or of another type.
        """
        words = sys.argv[1:] if args is None else list(args)
        known = [name for action in parser_actions(self) for name in action.option_strings]
        for word in itertools.takewhile(lambda word: word != "--", words):
            option = word.partition("=")[0]
            if option.startswith("--") and option not in known:
                raise UsageError(f"Expected an option of {self.prog}, got {word!r}: {did_you_mean(option, known)}")
        typed, unknown = self.parse_known_args(words, namespace)
        if unknown:
            raise UsageError(
                f"Expected no further argument of {self.prog}, got {unknown[0]!r}: remove it, or quote words that "
                "belong together."
            )
        return typed

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found as a sentence.

        Raises:
            UsageError: Always.
        """
        lists = f"{self.prog} --help lists the arguments."
        if missing := re.fullmatch(r"the following arguments are required: (.*)", message):
            raise UsageError(f"Expected {missing[1]} after {self.prog}, got none: {lists}")
        of_argument = re.fullmatch(r"argument (\S+): (.*)", message, re.DOTALL)
        if of_argument is None:
            raise UsageError(f"{message}: {lists}")
        name, problem = of_argument.groups()
        if choice := re.match(r"invalid choice: (?:'(.*?)'|(\S+)) \(", problem):
            (action,) = (action for action in parser_actions(self) if name in _names(action))
            value = choice[1] or choice[2]
            raise UsageError(f"Expected a value for {name}, got {value!r}: {did_you_mean(value, action.choices)}")
        if kind := re.fullmatch(r"invalid (\w+) value: (.*)", problem):
            expected = {"int": "a whole number", "float": "a number"}.get(kind[1], kind[1])
            raise UsageError(f"Expected {expected} for {name}, got {kind[2]}: correct it.")
        if count := re.fullmatch(r"expected (.*) arguments?", problem):
            raise UsageError(f"Expected {count[1]} value after {name}: add it.")
        raise UsageError(f"{problem[0].upper()}{problem[1:]} for {name}: correct it.")


def _names(action: argparse.Action) -> set[str]:
    """Return the names of an argument in messages of argparse."""
    return {"/".join(action.option_strings), str(action.metavar), action.dest}
