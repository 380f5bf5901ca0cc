"""CoCoRD: contrastive, cooperative and relational distillation of image classifiers."""

from .module import CoCoRDModule
from .probe import LinearProbeModule

__all__ = ["CoCoRDModule", "LinearProbeModule"]
