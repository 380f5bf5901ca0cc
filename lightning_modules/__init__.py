"""The methods, one folder each."""

from .albef import ALBEFModule
from .cocord import CoCoRDModule, LinearProbeModule
from .mmlg import CaptioningModule, ImageEmbeddingModule, MMLGModule, VisionClassifierModule
from .mobileclip import CoCaCaptioner, MobileCLIPModule, ReinforcementModule, TransformersCaptioner
from .shre import ImageProbeModule, SHReModule

__all__ = [
    "ALBEFModule",
    "CaptioningModule",
    "CoCaCaptioner",
    "CoCoRDModule",
    "ImageEmbeddingModule",
    "ImageProbeModule",
    "LinearProbeModule",
    "MMLGModule",
    "MobileCLIPModule",
    "ReinforcementModule",
    "SHReModule",
    "TransformersCaptioner",
    "VisionClassifierModule",
]
