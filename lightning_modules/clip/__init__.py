"""Fine-tuning of a published CLIP on one's own pairs."""

from .module import CLIPModule

__all__ = ["CLIPModule"]
