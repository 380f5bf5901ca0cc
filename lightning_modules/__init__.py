"""The methods, one folder each."""

from .albef import ALBEFModule
from .cocord import CoCoRDModule, LinearProbeModule
from .mmlg import MMLGModule, VisionClassifierModule
from .mobileclip import CoCaCaptioner, MobileCLIPModule, ReinforcementModule, TransformersCaptioner

__all__ = [
    "ALBEFModule",
    "CoCaCaptioner",
    "CoCoRDModule",
    "LinearProbeModule",
    "MMLGModule",
    "MobileCLIPModule",
    "ReinforcementModule",
    "TransformersCaptioner",
    "VisionClassifierModule",
]
