"""MM-LG: a learngene out of CLIP, which CLIPs of other depths start from."""

from .module import MMLGModule

__all__ = ["MMLGModule"]
