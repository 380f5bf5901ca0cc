"""Fine-tuning of a published CLIP on one's own pairs, and new towers in the space of a trained pair."""

from .module import CLIPModule
from .new_text import NewTextModule
from .new_tower import NewTowerModule

__all__ = ["CLIPModule", "NewTextModule", "NewTowerModule"]
