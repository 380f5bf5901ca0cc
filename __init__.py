"""LightningModules, datamodules and callbacks for vision-language learning and distillation."""

from importlib.metadata import version

__version__ = version("vlightning")
