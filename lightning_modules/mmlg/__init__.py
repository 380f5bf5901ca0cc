"""MM-LG: a learngene out of CLIP, which CLIPs of other depths start from."""

from .classification import VisionClassifierModule
from .module import MMLGModule

__all__ = ["MMLGModule", "VisionClassifierModule"]
