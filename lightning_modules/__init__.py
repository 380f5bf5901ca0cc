"""The methods, one folder each."""

from .albef import ALBEFModule
from .cocord import CoCoRDModule, LinearProbeModule
from .mobileclip import MobileCLIPModule

__all__ = ["ALBEFModule", "CoCoRDModule", "LinearProbeModule", "MobileCLIPModule"]
