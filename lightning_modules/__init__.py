"""The methods, one folder each.

A method is imported when one of its names is first used, so that ALBEF does not import the libraries of MobileCLIP.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..common.lazy import LazyNames
from .core.tokenizer_reader import register_tokenizer_reader

if TYPE_CHECKING:
    from .albef import ALBEFModule, EntailmentModule, NLVR2Module, TextAssignmentModule, VQAModule
    from .clip import CLIPModule
    from .cocord import CoCoRDLinearProbeModule, CoCoRDModule
    from .mmlg import CaptioningModule, ImageEmbeddingModule, MMLGImageClassifierModule, MMLGModule
    from .mobileclip import CoCaCaptioner, MobileCLIPModule, ReinforcementModule, TransformersCaptioner
    from .shre import SHReImageClassifierModule, SHReModule

_NAMES = {
    "albef": (
        "ALBEFModule",
        "EntailmentModule",
        "NLVR2Module",
        "TextAssignmentModule",
        "VQAModule",
    ),
    "clip": ("CLIPModule",),
    "cocord": (
        "CoCoRDLinearProbeModule",
        "CoCoRDModule",
    ),
    "mmlg": (
        "CaptioningModule",
        "ImageEmbeddingModule",
        "MMLGImageClassifierModule",
        "MMLGModule",
    ),
    "mobileclip": (
        "CoCaCaptioner",
        "MobileCLIPModule",
        "ReinforcementModule",
        "TransformersCaptioner",
    ),
    "shre": (
        "SHReImageClassifierModule",
        "SHReModule",
    ),
}
_LAZY = LazyNames(__name__, _NAMES)

__all__ = [
    "ALBEFModule",
    "CLIPModule",
    "CaptioningModule",
    "CoCaCaptioner",
    "CoCoRDLinearProbeModule",
    "CoCoRDModule",
    "EntailmentModule",
    "ImageEmbeddingModule",
    "MMLGImageClassifierModule",
    "MMLGModule",
    "MobileCLIPModule",
    "NLVR2Module",
    "ReinforcementModule",
    "SHReImageClassifierModule",
    "SHReModule",
    "TextAssignmentModule",
    "TransformersCaptioner",
    "VQAModule",
    "load_all",
]


def load_all() -> None:
    """Import every public name, so that a command line finds the classes by their short names."""
    _LAZY.load_all()


def __getattr__(name: str) -> Any:
    return _LAZY.get(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


@register_tokenizer_reader
def _read_tokenizer(checkpoint: Mapping[str, Any]) -> tuple[str | None, str]:
    from ..datamodules.text.saved_tokenizer import saved_tokenizer

    return saved_tokenizer(checkpoint)
