"""The methods, one folder each, and those that other installed packages name.

A method is imported when one of its names is first used, so that ALBEF does not import the libraries of MobileCLIP.

Another package names its methods as entry points of the group `vlightning.methods`, `name = "module:Class"`; the
command line then finds them as it finds the methods of this package.
"""

from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from ..common.errors import UserError
from ..common.lazy import LazyNames

if TYPE_CHECKING:
    from .albef import ALBEFModule, EntailmentModule, NLVR2Module, TextAssignmentModule, VQAModule
    from .clip import CLIPModule, NewTextModule, NewTowerModule
    from .cocord import CoCoRDLinearProbeModule, CoCoRDModule
    from .mmlg import CaptioningModule, MMLGImageClassifierModule, MMLGModule
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
    "clip": (
        "CLIPModule",
        "NewTextModule",
        "NewTowerModule",
    ),
    "cocord": (
        "CoCoRDLinearProbeModule",
        "CoCoRDModule",
    ),
    "mmlg": (
        "CaptioningModule",
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
    "MMLGImageClassifierModule",
    "MMLGModule",
    "MobileCLIPModule",
    "NLVR2Module",
    "NewTextModule",
    "NewTowerModule",
    "ReinforcementModule",
    "SHReImageClassifierModule",
    "SHReModule",
    "TextAssignmentModule",
    "TransformersCaptioner",
    "VQAModule",
    "load_all",
]


def load_all() -> None:
    """Import every public name, so that a command line finds the classes by their short names.

    Raises:
        UserError: If the method of another package cannot be imported.
    """
    _LAZY.load_all()
    for entry in installed():
        _load(entry)


def load_named(names: Collection[Any]) -> None:
    """Import the classes among `names`, so that a command line finds them without the libraries of other methods.

    Raises:
        UserError: If a named method of another package cannot be imported.
    """
    for name in _LAZY.modules:
        if name in names:
            _LAZY.get(name)
    for entry in installed():
        if entry.attr in names:
            _load(entry)


def installed() -> list[EntryPoint]:
    """Return the entry points of the methods of other packages, which are not imported; by name."""
    return sorted(set(entry_points(group="vlightning.methods")))


def method_classes() -> dict[str, type[Any]]:
    """Return the classes of this folder and of other packages, by the name of the class.

    Raises:
        UserError: If the method of another package cannot be imported.
    """
    values = {name: _LAZY.get(name) for name in __all__ if name in _LAZY.modules}
    return {entry.attr: _load(entry) for entry in installed()} | values


def _load(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:  # of another package's code
        package = entry.dist.name if entry.dist is not None else entry.module
        raise UserError(
            f"Expected the method {entry.value} of the installed package {package} to be importable, got an error "
            f"({type(error).__name__}: {error}): repair or uninstall that package."
        ) from error


def __getattr__(name: str) -> Any:
    return _LAZY.get(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
