"""SHRe: See, Hear, and Read with Transformers, from a supervised teacher."""

from .module import SHReModule
from .probe import ImageProbeModule

__all__ = ["ImageProbeModule", "SHReModule"]
