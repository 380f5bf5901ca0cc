"""The methods, one folder each."""

from .albef import ALBEFModule, EntailmentModule, NLVR2Module, TextAssignmentModule, VQAModule
from .cocord import CoCoRDModule, LinearProbeModule
from .mmlg import CaptioningModule, ImageEmbeddingModule, MMLGModule, VisionClassifierModule
from .mobileclip import CoCaCaptioner, MobileCLIPModule, ReinforcementModule, TransformersCaptioner
from .shre import ImageProbeModule, SHReModule

__all__ = [
    "ALBEFModule",
    "CaptioningModule",
    "CoCaCaptioner",
    "CoCoRDModule",
    "EntailmentModule",
    "ImageEmbeddingModule",
    "ImageProbeModule",
    "LinearProbeModule",
    "MMLGModule",
    "MobileCLIPModule",
    "NLVR2Module",
    "ReinforcementModule",
    "SHReModule",
    "TextAssignmentModule",
    "TransformersCaptioner",
    "VQAModule",
    "VisionClassifierModule",
]
