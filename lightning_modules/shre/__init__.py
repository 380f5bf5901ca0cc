"""SHRe: See, Hear, and Read with Transformers, from a supervised teacher."""

from .image_classifier import SHReImageClassifierModule
from .module import SHReModule

__all__ = ["SHReImageClassifierModule", "SHReModule"]
