"""LightningCLI with this package's errors, run folders, resume and help."""

import contextlib
import copy
import sys
import warnings
from functools import partialmethod
from typing import Any, Literal

from jsonargparse import ArgumentError
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from ... import datamodules, lightning_modules  # noqa: F401, so that the classes of `datamodules` have short names
from ...callbacks.compile import COMPILE_HELP, CompileMode, compiling
from ...callbacks.distributed.strategy import check_strategy
from ...common.errors import UserError
from ...common.messages import say
from ...common.shown import VARIABLE
from ...common.urls import keep, masked, texts_in
from . import defaults, mistakes, run_folder
from .checkpoints import BestCheckpoint, LastCheckpoint, TypedOptimizerOptions
from .command_line import as_config, read_command_line
from .errors import usage_errors
from .help import HelpfulParser, subcommand_parsers
from .links import apply_links
from .lost_processes import lost_processes_reported
from .run_config import SaveRunConfig
from .run_report import report_results
from .saved_run import merge, read_saved_run, report_overrides
from .typed_values import Typed


class VLightningCLI(LightningCLI):
    """LightningCLI with readable errors, a folder for each run, and precedence of given values on resume."""

    trains: bool | None = None
    """Whether teachers run; None: in a `fit`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.words = sys.argv[1:] if kwargs.get("args") is None else list(kwargs["args"])
        with contextlib.ExitStack() as self.on_exit:
            super().__init__(*args, **kwargs)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # of a static method
        """Return only the given subcommand, since creating the parser of a subcommand takes 0.25 s."""
        subcommands = super().subcommands()
        return {word: subcommands[word] for word in self.words[:1] if word in subcommands} or subcommands

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Create the parser, which raises errors instead of printing the usage."""
        return super().init_parser(**{"exit_on_error": False, **kwargs})

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the argument `compile`, and the two default checkpoints as sections."""
        parser.add_argument("--compile", type=CompileMode | Literal[False], default=False, help=COMPILE_HELP)
        parser.add_lightning_class_args(BestCheckpoint, "checkpoint")
        parser.add_lightning_class_args(LastCheckpoint, "last_checkpoint")

    @usage_errors()
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the command line, with the hyper-parameters of the checkpoint, if any, as the first config file."""
        self.typed = typed = read_command_line(self.words)
        _load_methods(typed)
        subparser = subcommand_parsers(parser).get(str(typed.subcommand), parser)
        mistakes.check_help(typed, subparser)
        path = run_folder.find_checkpoint(typed)
        self.saved = read_saved_run(path) if path else None
        if self.saved is not None and (saved_values := merge(self.saved, typed, self.trains)):
            typed.args.insert(1, as_config(saved_values))
        try:
            self.config = parser.parse_args(typed.args)
            mistakes.check_sections(self.config[self.config.subcommand])
        except ArgumentError as error:
            lightning_modules.load_all()  # messages name the nearest class
            raise UserError(mistakes.explain(error, typed, subparser)) from error

    @usage_errors()
    def _parse_ckpt_path(self) -> None:
        """Complete the parsed configuration: values of the checkpoint, name of the run, values taken from the data."""
        config = self.config[self.config.subcommand]
        self._keep_secrets(config)
        self.overrides_hyperparameters = False
        if self.saved is not None:
            self.overrides_hyperparameters = report_overrides(self.saved, config, self.typed)
            config["ckpt_path"] = str(self.saved.path)
        run_folder.resolve_weights(config.model, must_exist=self.saved is None)
        self.name = run_folder.name_run(config, self.typed, self.saved)
        check_strategy(config.trainer.strategy)
        linked = apply_links(config, self.typed, self.saved)
        # Without the checkpoint and the folder of this run, and without values that are taken from the data.
        self.reproducible = copy.deepcopy(config)
        self.reproducible.pop("ckpt_path", None)
        for argument in linked:
            self.reproducible.pop(f"model.init_args.{argument}", None)
        for logger in run_folder.loggers(self.reproducible.trainer):
            for argument in {"version", "id"} & vars(logger.init_args).keys():
                logger.init_args[argument] = None

    def _keep_secrets(self, config: Any) -> None:
        """Replace URLs with secrets in the configuration of the data, and in the command line that loggers read."""
        data = config.data
        config["data"] = keep(data)
        if config.data != data:
            sys.argv = [masked(word) for word in sys.argv]
            say(
                "The user and the query of the data's URLs are in no file of the run: to resume or evaluate it, give "
                f"the URLs as options again, or in the environment variable {VARIABLE}."
            )

    @usage_errors()
    def before_instantiate_classes(self) -> None:
        """Create the run folder; Lightning has set the seed before."""
        config = self.config[self.config.subcommand]
        self.reproducible.seed_everything = config.seed_everything
        begin = self.on_exit.enter_context(run_folder.claimed(config, self.name, self.typed, self.saved))
        self.save_config_kwargs = {"reproducible": self.reproducible, "name": self.name, "on_begin": begin}

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        callbacks = [*callbacks, *compiling(self.config[self.config.subcommand].compile, config["callbacks"])]
        if self.overrides_hyperparameters:
            callbacks = [*callbacks, TypedOptimizerOptions()]
        return super()._instantiate_trainer(*defaults.with_defaults(config, callbacks))

    def _run_subcommand(self, subcommand: str) -> None:
        if self.saved is not None and hasattr(self.model, "expect_checkpoint"):
            self.model.expect_checkpoint()
        with lost_processes_reported(self.trainer), warnings.catch_warnings():
            if subcommand != "fit":  # an evaluation needs no callback of the training
                warnings.filterwarnings("ignore", message=".*callbacks used to create the checkpoint need")
            super()._run_subcommand(subcommand)

    def _evaluate(self, subcommand: str, verbose: bool = True, **kwargs: Any) -> None:
        results = getattr(self.trainer, subcommand)(verbose=False, **kwargs)
        report_results(self.trainer, self.model, subcommand, results, verbose)

    validate = partialmethod(_evaluate, "validate")
    test = partialmethod(_evaluate, "test")


def _load_methods(typed: Typed) -> None:
    """Import the methods that the command line names, or all of them for a help and where it names no known one.

    A checkpoint names its class with the module path, which is imported when it is read.
    """
    lightning_modules.load_named({value for source in typed.sources for value in texts_in(source.tree)})
    name = typed.lookup("model.class_path")
    is_known = typed.is_given("ckpt_path") if name is None else "." in str(name) or name in lightning_modules.__all__
    if not is_known or any(word.partition("=")[0].endswith(("help", "-h")) for word in typed.words):
        lightning_modules.load_all()


def open_cli(args: list[str] | None, kind: type[VLightningCLI] | None = None) -> VLightningCLI:
    """Parse a command line and run it; `kind` replaces the class."""
    return (kind or VLightningCLI)(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_callback=SaveRunConfig,
        trainer_defaults=copy.deepcopy(defaults.TRAINER_DEFAULTS),
        seed_everything_default=0,
        parser_class=HelpfulParser,
        parser_kwargs={"prog": "vlightning"},
        auto_configure_optimizers=False,
        args=args,
    )
