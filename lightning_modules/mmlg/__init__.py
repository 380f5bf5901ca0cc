"""MM-LG: a learngene out of CLIP, which CLIPs of other depths start from."""

from .captioning import CaptioningModule
from .classification import VisionClassifierModule
from .embedding import ImageEmbeddingModule
from .module import MMLGModule

__all__ = ["CaptioningModule", "ImageEmbeddingModule", "MMLGModule", "VisionClassifierModule"]
