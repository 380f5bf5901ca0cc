"""MM-LG: a multimodal learngene of CLIP, from which CLIPs of other depths are initialized."""

from ...callbacks.learngene.expansion import expand_learngene
from ...callbacks.learngene.file import load_learngene, save_learngene
from .captioning import CaptioningModule
from .classification import VisionClassifierModule
from .embedding import ImageEmbeddingModule
from .module import MMLGModule

__all__ = [
    "CaptioningModule",
    "ImageEmbeddingModule",
    "MMLGModule",
    "VisionClassifierModule",
    "expand_learngene",
    "load_learngene",
    "save_learngene",
]
