"""The methods, one folder each."""

from .albef import ALBEFModule
from .cocord import CoCoRDModule, LinearProbeModule

__all__ = ["ALBEFModule", "CoCoRDModule", "LinearProbeModule"]
