"""The methods, one folder each."""

from .albef import ALBEFModule
from .cocord import CoCoRDModule, LinearProbeModule
from .mmlg import CaptioningModule, ImageEmbeddingModule, MMLGModule, VisionClassifierModule
from .mobileclip import CoCaCaptioner, MobileCLIPModule, ReinforcementModule, TransformersCaptioner

__all__ = [
    "ALBEFModule",
    "CaptioningModule",
    "CoCaCaptioner",
    "CoCoRDModule",
    "ImageEmbeddingModule",
    "LinearProbeModule",
    "MMLGModule",
    "MobileCLIPModule",
    "ReinforcementModule",
    "TransformersCaptioner",
    "VisionClassifierModule",
]
