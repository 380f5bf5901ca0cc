"""ALBEF."""

from .downstream import EntailmentModule, NLVR2Module, TextAssignmentModule, VQAModule
from .module import ALBEFModule

__all__ = ["ALBEFModule", "EntailmentModule", "NLVR2Module", "TextAssignmentModule", "VQAModule"]
