"""Start of the command line: what needs no torch is answered before torch is imported, which takes seconds."""

import sys
from importlib.metadata import version

from ...common.errors import UserError
from .completion import run_completion
from .listing import run_configs, run_methods
from .pages import help_page, welcome

LISTS = {"methods": run_methods, "configs": run_configs, "completion": run_completion}


def answer(words: list[str]) -> str | None:
    """Answer a command line that needs no torch.

    Args:
        words: The arguments of the program.

    Returns:
        The text to print; None for other command lines.

    Raises:
        SystemExit: With status 2, if a name is unknown.
    """
    match [word for word in words if word != "--debug"]:
        case []:
            return welcome()
        case ["--version"]:
            return f"vlightning {version('vlightning')}\n"
        case ["--help" | "-h"]:
            return help_page()
        case [command, *rest] if command in LISTS:
            try:
                return LISTS[command](rest)
            except UserError as error:
                sys.stderr.write(f"vlightning: error: {error}\n")
                raise SystemExit(2) from None
    return None


def main() -> None:
    """Run the command line with the arguments in `sys.argv`."""
    if (text := answer(sys.argv[1:])) is not None:
        sys.stdout.write(text)
        return
    from ...cli import main as run  # imports torch and Lightning

    run()
