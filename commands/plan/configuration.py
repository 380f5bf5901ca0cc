"""The configuration of a `vlightning fit` and its module, without data, weights and a run folder."""

import warnings
from typing import Any, NamedTuple

import torch
from jsonargparse import Namespace

from ...common.absent_network import absent_networks
from ..cli.lightning_cli import VLightningCLI, open_cli
from ..cli.links import apply_links
from ..cli.typed_values import Schedule


class Planned(NamedTuple):
    """What a command line says about a fit.

    Attributes:
        module: the module on the meta device, without weights.
        data: arguments of the datamodule.
        trainer: arguments of the Trainer.
        schedule: the length of the run that the config files state; None if they state none.
        absent: names of the teachers of the user's own that a checkpoint names, which are not imported.
    """

    module: Any
    data: dict[str, Any]
    trainer: dict[str, Any]
    schedule: Schedule | None
    absent: list[str]


def read(words: list[str]) -> Planned:
    """Parse the arguments of a fit and build its module.

    Raises:
        UserError: As `vlightning fit` for a wrong argument.
    """
    cli = parse_fit(words)
    config = cli.config["fit"]
    absent = absent_networks(config.model.init_args)
    if "weights" in config.model.init_args:
        config.model.init_args["weights"] = None
    module = build_without_weights(cli)
    data = (config.get("data") or {}).get("init_args") or {}
    return Planned(module, dict(vars(data)) if data else {}, dict(vars(config.trainer)), cli.typed.schedule, absent)


def parse_fit(words: list[str]) -> Any:
    """Parse the arguments of a fit without building or creating anything; return the command line.

    Raises:
        UserError: As `vlightning fit` for a wrong argument.
    """

    class ParsedCLI(VLightningCLI):
        trains = False

        def _parse_ckpt_path(self) -> None:
            apply_links(self.config[self.config.subcommand], self.typed, None)

        def _set_seed(self) -> None:
            pass

        def before_instantiate_classes(self) -> None:
            pass

        def instantiate_classes(self) -> None:
            pass

        def _run_subcommand(self, subcommand: str) -> None:
            pass

    return open_cli(["fit", *words], ParsedCLI)


def build(cli: Any, section: str) -> Any:
    """Build the module (`model`) or the datamodule (`data`) of a command line from `parse_fit`."""
    only = Namespace(subcommand="fit", fit=Namespace(**{section: cli.config["fit"][section]}))
    return cli.parser.instantiate(only)["fit"][section]


def build_without_weights(cli: Any) -> Any:
    """Build the module of a parsed command line on the meta device."""
    with torch.device("meta"), warnings.catch_warnings():
        # A network of the user's own may load weights in its constructor, with a warning for each of its tensors.
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")
        return build(cli, "model")


def steps_of(planned: Planned, batch: int) -> int | None:
    """Return the optimizer steps of a fit with a batch of all processes; None if they depend on the data.

    They are those of the Trainer, or epochs of `samples_per_epoch`, or those of the `schedule` of a shipped config.
    """
    trainer = planned.trainer
    rows = planned.data.get("samples_per_epoch")
    if (trainer.get("max_steps") or -1) > 0:
        return int(trainer["max_steps"])
    if rows and (trainer.get("max_epochs") or -1) > 0:
        return int(trainer["max_epochs"] * (rows // batch))
    if planned.schedule is None:
        return None
    return planned.schedule.steps * planned.schedule.batch // batch
