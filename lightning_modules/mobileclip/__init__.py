"""MobileCLIP and MobileCLIP2: small image-text models trained on reinforced data, and dataset reinforcement."""

from ..networks.clip.shapes import ModelShape
from .captioner import Captioner
from .coca_captioner import CoCaCaptioner
from .ensemble import Teacher
from .module import MobileCLIPModule
from .reinforcement import ReinforcementModule
from .transformers_captioner import TransformersCaptioner

__all__ = [
    "Captioner",
    "CoCaCaptioner",
    "MobileCLIPModule",
    "ModelShape",
    "ReinforcementModule",
    "Teacher",
    "TransformersCaptioner",
]
