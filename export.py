"""Weights out of a training checkpoint: `python -m vlightning.export <checkpoint> <target>`."""

import argparse
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vlightning.callbacks import AtomicCheckpointIO
from vlightning.callbacks.checkpoints.checkpoint_io import check_free
from vlightning.cli_support import export_albef
from vlightning.cli_support.report import readable_errors
from vlightning.lightning_modules import ALBEFModule, CoCoRDModule, MMLGModule, MobileCLIPModule
from vlightning.lightning_modules.cocord import export as export_cocord
from vlightning.lightning_modules.mmlg import export as export_mmlg
from vlightning.lightning_modules.mobileclip import export as export_mobileclip

DESCRIPTION = (
    "Take the model out of a training's checkpoint: to use it without a Trainer, to start another training from it, or "
    "to use it in other code."
)


class Exporter(NamedTuple):
    """What can be written of the checkpoints of one class."""

    module: type
    layouts: Mapping[str, str]
    """What each layout is; the first is the default."""
    export: Callable[[Mapping[str, Any], str, str, str], str]
    """Takes the checkpoint, where it is from, the target and the layout; says what it wrote."""


EXPORTERS = {
    exporter.module.__name__: exporter
    for exporter in (
        Exporter(ALBEFModule, export_albef.LAYOUTS, export_albef.export),
        Exporter(CoCoRDModule, export_cocord.LAYOUTS, export_cocord.export),
        Exporter(MMLGModule, export_mmlg.LAYOUTS, export_mmlg.export),
        Exporter(MobileCLIPModule, export_mobileclip.LAYOUTS, export_mobileclip.export),
    )
}


def main(args: list[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: The words after the program's name; None takes them from `sys.argv`.

    Raises:
        SystemExit: With status 2 for what cannot be understood, 1 for a checkpoint that cannot be exported.
    """
    parser = argparse.ArgumentParser("python -m vlightning.export", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("checkpoint", help="a .ckpt file that a training wrote, or the folder of a sharded one")
    parser.add_argument("target", help="the folder or the file to write; must not exist")
    parser.add_argument(
        "--layout",
        choices=list(dict.fromkeys(layout for exporter in EXPORTERS.values() for layout in exporter.layouts)),
        help=" ".join(
            f"Of {name}, by default {next(iter(exporter.layouts))}: "
            + "; ".join(f"{layout}: {what}" for layout, what in exporter.layouts.items())
            + "."
            for name, exporter in EXPORTERS.items()
        ),
    )
    words = parser.parse_args(args)
    with readable_errors(program="vlightning.export"):
        sys.stdout.write(f"{export(words.checkpoint, words.target, words.layout)}\n")


def export(checkpoint: str, target: str, layout: str | None = None) -> str:
    """Write the model of a training checkpoint.

    Args:
        checkpoint: What the training wrote.
        target: What to write.
        layout: One of those of the checkpoint's class; None takes its first.

    Returns:
        What was written.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        FileExistsError: If the target is there already.
        ValueError: If the checkpoint is not of a module that can be exported, or not in this layout.
        RuntimeError: If it cannot be read.
    """
    if not Path(checkpoint).exists():
        raise FileNotFoundError(f"Found no checkpoint {checkpoint!r}, expected a .ckpt file of a training.")
    check_free(Path(target))
    content = AtomicCheckpointIO().load_checkpoint(checkpoint)
    name = _class_name(content, checkpoint)
    exporter = EXPORTERS[name]
    if layout is None:
        layout = next(iter(exporter.layouts))
    if layout not in exporter.layouts:
        raise ValueError(
            f"Found a checkpoint of {name} in {checkpoint!r}, which is not written in the layout {layout!r}: give "
            f"{' or '.join(exporter.layouts)}."
        )
    return exporter.export(content, f"the checkpoint {checkpoint!r}", target, layout)


def _class_name(content: Mapping[str, Any], checkpoint: str) -> str:
    """The class that a checkpoint is of."""
    arguments, state = content.get("hyper_parameters"), content.get("state_dict")
    if not isinstance(arguments, Mapping) or not isinstance(state, Mapping):
        raise ValueError(
            f"Found no hyper_parameters beside a state_dict in {checkpoint!r}, expected a checkpoint that "
            "`vlightning fit` or a Trainer wrote."
        )
    if "_class_path" not in arguments:  # made without the command line, which alone notes the class
        return max(EXPORTERS, key=lambda name: len(_parameters(name) & arguments.keys()))
    name = str(arguments["_class_path"]).rsplit(".", 1)[-1]
    if name not in EXPORTERS:
        raise ValueError(f"Found a checkpoint of {name} in {checkpoint!r}, expected one of {' or '.join(EXPORTERS)}.")
    return name


def _parameters(name: str) -> set[str]:
    return set(inspect.signature(EXPORTERS[name].module).parameters)


if __name__ == "__main__":
    main()
