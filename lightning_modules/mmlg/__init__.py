"""MM-LG: a multimodal learngene of CLIP, from which CLIPs of other depths are initialized."""

from ...callbacks.learngene.expansion import expand_learngene
from ...callbacks.learngene.file import load_learngene, save_learngene
from .captioning import CaptioningModule
from .image_classifier import MMLGImageClassifierModule
from .module import MMLGModule

__all__ = [
    "CaptioningModule",
    "MMLGImageClassifierModule",
    "MMLGModule",
    "expand_learngene",
    "load_learngene",
    "save_learngene",
]
