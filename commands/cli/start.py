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


def main(args: list[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: The arguments of the program; None for those in `sys.argv`.

    Raises:
        SystemExit: If the user can fix an error; the status is 2 for the command line, and 1 for a run that stopped.
    """
    words = sys.argv[1:] if args is None else list(args)
    if (text := answer(words)) is not None:
        sys.stdout.write(text)
        return
    from .run import run  # imports torch and Lightning

    run(args, words)
