"""Export of a MobileCLIP checkpoint: the evaluated network, in several layouts."""

from ..networks.clip.export import LAYOUTS
from ..networks.clip.export import export_network as export

__all__ = ["LAYOUTS", "export"]
