"""ALBEF."""

from .module import ALBEFModule

__all__ = ["ALBEFModule"]
