"""Fine-tuning of ALBEF for the tasks of section 5 of the paper: visual entailment, NLVR2, VQA."""

from .assignment import TextAssignmentModule
from .entailment import EntailmentModule
from .nlvr import NLVR2Module
from .vqa import VQAModule

__all__ = ["EntailmentModule", "NLVR2Module", "TextAssignmentModule", "VQAModule"]
