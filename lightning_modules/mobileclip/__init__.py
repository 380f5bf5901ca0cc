"""MobileCLIP and MobileCLIP2: small image-text models trained on reinforced data, and dataset reinforcement."""

from ..networks.published_clip import register_file_reader
from .captioner import Captioner
from .coca_captioner import CoCaCaptioner
from .ensemble import Teacher
from .module import MobileCLIPModule
from .reinforcement import ReinforcementModule
from .shapes import ModelShape
from .trained import read_published
from .transformers_captioner import TransformersCaptioner

register_file_reader(read_published)

__all__ = [
    "Captioner",
    "CoCaCaptioner",
    "MobileCLIPModule",
    "ModelShape",
    "ReinforcementModule",
    "Teacher",
    "TransformersCaptioner",
]
