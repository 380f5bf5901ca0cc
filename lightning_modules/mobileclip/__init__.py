"""MobileCLIP and MobileCLIP2: small image-text models, trained on a reinforced data set; and how to reinforce one."""

from .captioner import Captioner, CoCaCaptioner
from .module import MobileCLIPModule
from .reinforcement import ReinforcementModule, Teacher
from .transformers_captioner import TransformersCaptioner

__all__ = [
    "Captioner",
    "CoCaCaptioner",
    "MobileCLIPModule",
    "ReinforcementModule",
    "Teacher",
    "TransformersCaptioner",
]
