"""CoCoRD: Contrastive Consistent Representation Distillation."""

from .linear_probe import CoCoRDLinearProbeModule
from .module import CoCoRDModule

__all__ = ["CoCoRDLinearProbeModule", "CoCoRDModule"]
