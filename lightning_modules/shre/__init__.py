"""SHRe: one shared space from a supervised teacher."""

from .classification import ImageProbeModule
from .module import SHReModule

__all__ = ["ImageProbeModule", "SHReModule"]
