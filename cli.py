"""The command line: `vlightning ...`, `python cli.py ...` or `python -m vlightning.cli ...`."""

from vlightning.commands.cli.start import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
