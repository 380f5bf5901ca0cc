"""LightningModules, datamodules and callbacks for vision-language learning and distillation.

`import vlightning as vl` gives the names of `api.py`, which is imported when one of them is first used.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from .common.lazy import LazyNames

if TYPE_CHECKING:
    from .api import Model, distill, fit, load

__version__ = version("vlightning")
__all__ = ["Model", "distill", "fit", "load"]
_LAZY = LazyNames(__name__, {"api": __all__})


def __getattr__(name: str) -> Any:
    return _LAZY.get(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
