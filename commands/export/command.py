"""The commands `vlightning export`, `vlightning push` and `vlightning convert`."""

from pathlib import Path

from ...callbacks import consolidate_checkpoint, divide_checkpoint_file
from ...common.errors import UserError
from ...common.files import check_free
from ..cli.command_parser import CommandParser
from ..cli.saved_run import resolved
from .layouts import described_layouts, export, exported_classes
from .publishing import push_to_hub


def run_export(words: list[str]) -> str:
    """Run `vlightning export`, and return a message that names the written files."""
    parser = CommandParser(
        "export",
        description="Export the model from a checkpoint, for use without a Trainer, as initial weights of another "
        "training, or for use in other code.",
    )
    parser.add_argument("checkpoint", help="a .ckpt file, the folder of a sharded checkpoint, or that of a run")
    parser.add_argument("target", help="the new file or folder, which must not exist")
    parser.add_argument(
        "--layout",
        choices=list(dict.fromkeys(layout for cls in exported_classes().values() for layout in cls.layouts())),
        help=described_layouts(),
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "float16", "bfloat16"],
        help="precision of the weights, whose error is printed: float16 in the layouts vlightning, torch_export, onnx "
        "and coreml, bfloat16 in the first two",
    )
    typed = parser.parse_args(words)
    return export(typed.checkpoint, typed.target, typed.layout, typed.dtype)


def run_push(words: list[str]) -> str:
    """Run `vlightning push`, and return a message with the address of the repository."""
    parser = CommandParser(
        "push",
        description="Upload an exported folder to the Hugging Face hub, with the token of `hf auth login` or HF_TOKEN.",
    )
    parser.add_argument("folder", help="a folder that `vlightning export` wrote")
    parser.add_argument("name", help="name of the repository, NAME or OWNER/NAME")
    parser.add_argument(
        "--public", action="store_true", help="let anyone read the new repository, which is private otherwise"
    )
    parser.add_argument("--existing", action="store_true", help="add a commit to a repository that exists")
    parser.add_argument("--message", help="message of the commit")
    typed = parser.parse_args(words)
    address = push_to_hub(typed.folder, typed.name, public=typed.public, existing=typed.existing, message=typed.message)
    return f"Pushed {typed.folder} to {address}."


def run_convert(words: list[str]) -> str:
    """Run `vlightning convert`, and return a message that names the written file or folder.

    Raises:
        UserError: If the checkpoint does not exist, or the target exists.
    """
    parser = CommandParser(
        "convert",
        description="Convert a sharded checkpoint to one file, or a file to a sharded checkpoint. A run resumes from "
        "both with any strategy; the conversion is for programs that read only one of the two, and for copying.",
    )
    parser.add_argument("checkpoint", help="a .ckpt file, the folder of a sharded checkpoint, or that of a run")
    parser.add_argument("target", help="the new file or folder, which must not exist")
    parser.add_argument(
        "--processes", type=int, help="number of files with weights in the new folder; only if the checkpoint is a file"
    )
    typed = parser.parse_args(words)
    checkpoint = resolved(typed.checkpoint)
    if typed.processes is not None and checkpoint.is_dir():
        parser.error("Expected --processes with a checkpoint in one file, got a folder: leave the option out.")
    if not checkpoint.exists():
        raise UserError(
            f"Expected a checkpoint, a file or a folder, got {typed.checkpoint!r}, which does not exist: correct it."
        )
    check_free(Path(typed.target))
    if checkpoint.is_dir():
        consolidate_checkpoint(checkpoint, typed.target)
    else:
        divide_checkpoint_file(checkpoint, typed.target, 1 if typed.processes is None else typed.processes)
    return f"Wrote {typed.target}."
