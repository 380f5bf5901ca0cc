"""The commands `vlightning export` and `vlightning push`."""

import argparse

from .layouts import described_layouts, export, exported_classes


def run_export(words: list[str]) -> str:
    """Run `vlightning export`.

    Args:
        words: The arguments after `export`.

    Returns:
        A message that names the written files.
    """
    parser = argparse.ArgumentParser(
        "vlightning export",
        description="Export the model from a checkpoint, for use without a Trainer, as initial weights of another "
        "training, or for use in other code.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", help="a .ckpt file, the folder of a sharded checkpoint, or that of a run")
    parser.add_argument("target", help="the new file or folder, which must not exist")
    parser.add_argument(
        "--layout",
        choices=list(dict.fromkeys(layout for cls in exported_classes().values() for layout in cls.layouts())),
        help=described_layouts(),
    )
    typed = parser.parse_args(words)
    return export(typed.checkpoint, typed.target, typed.layout)


def run_push(words: list[str]) -> str:
    """Run `vlightning push`.

    Args:
        words: The arguments after `push`.

    Returns:
        A message with the address of the repository.
    """
    parser = argparse.ArgumentParser(
        "vlightning push",
        description="Upload an exported folder to the Hugging Face hub, with the token of `hf auth login` or HF_TOKEN.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", help="a folder that `vlightning export` wrote")
    parser.add_argument("name", help="name of the repository, NAME or OWNER/NAME")
    parser.add_argument(
        "--public", action="store_true", help="let anyone read the new repository, which is private otherwise"
    )
    parser.add_argument("--existing", action="store_true", help="add a commit to a repository that exists")
    parser.add_argument("--message", help="message of the commit")
    typed = parser.parse_args(words)
    from .publishing import push_to_hub  # the other commands need none of its imports

    address = push_to_hub(typed.folder, typed.name, public=typed.public, existing=typed.existing, message=typed.message)
    return f"Pushed {typed.folder} to {address}."
