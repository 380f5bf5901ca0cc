"""The methods, one folder each."""

from .albef import ALBEFModule
from .cocord import CoCoRDModule, LinearProbeModule
from .mobileclip import CoCaCaptioner, MobileCLIPModule, ReinforcementModule, TransformersCaptioner

__all__ = [
    "ALBEFModule",
    "CoCaCaptioner",
    "CoCoRDModule",
    "LinearProbeModule",
    "MobileCLIPModule",
    "ReinforcementModule",
    "TransformersCaptioner",
]
