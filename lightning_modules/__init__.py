"""The methods, one folder each."""

from .albef import ALBEFModule

__all__ = ["ALBEFModule"]
