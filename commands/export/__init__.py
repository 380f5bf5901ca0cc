"""Exported models: read from a folder or from the Hugging Face hub, and published there."""

from .publishing import push_to_hub
from .reading import Pretrained, from_pretrained

__all__ = ["Pretrained", "from_pretrained", "push_to_hub"]
