"""What `vlightning` and `vlightning --help` print, with the list of commands."""

from .listing import methods

COMMANDS = {
    "fit": "train, with validation",
    "validate": "evaluate a checkpoint on the validation split",
    "test": "evaluate a checkpoint on the test split",
    "predict": "write predictions or embeddings",
    "evaluate": "evaluate a checkpoint, an export or a published model on published sets or own images",
    "demo": "open a local page that searches a folder of images",
    "export": "write the model of a checkpoint for use in other code",
    "push": "publish an export on the Hugging Face hub",
    "convert": "convert a sharded checkpoint to one file, or back",
    "plan": "compute memory, traffic, largest batch and hours of a recipe before a run",
    "data": "count and draw what is in a data set before a run",
    "methods": "list the methods",
    "configs": "list the configs, of all methods or of one",
    "completion": "print a script that completes commands and configs in bash and zsh",
}

START = """\
Vision-language pre-training and distillation in PyTorch Lightning.

Train on drawn shapes, without a download, in minutes on two CPU cores:
  vlightning fit --config configs/albef/quickstart.yaml
Look at the curves while it trains (in another terminal):
  tensorboard --logdir runs
Stop it with Ctrl-C; go on where it stopped:
  vlightning fit --config configs/albef/quickstart.yaml --ckpt_path last

Then:
  vlightning methods           which method for which data
  vlightning configs {method}     the configs of a method, each with its command
  vlightning --help            all commands
"""


def welcome() -> str:
    """Return what `vlightning` alone prints: what to type first."""
    return START.format(method=next(iter(methods())).name)


def help_page() -> str:
    """Return what `vlightning --help` prints: every command in a line."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: vlightning COMMAND [--config FILE.yaml ...] [--OPTION VALUE ...]",
            "",
            "Train and evaluate vision-language models, as in",
            "  vlightning fit --config configs/albef/quickstart.yaml",
            "",
            "commands (each has a --help):",
            *lines,
            "",
            "options:",
            f"  {'--help':<{width}}show this page",
            f"  {'--version':<{width}}print the version",
            f"  {'--debug':<{width}}keep the traceback of an error",
            "",
        ]
    )
