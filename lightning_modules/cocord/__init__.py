"""CoCoRD: Contrastive Consistent Representation Distillation."""

from .module import CoCoRDModule
from .probe import LinearProbeModule

__all__ = ["CoCoRDModule", "LinearProbeModule"]
