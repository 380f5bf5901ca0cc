"""MobileCLIP and MobileCLIP2: small image-text models, trained on a reinforced data set."""

from .module import MobileCLIPModule

__all__ = ["MobileCLIPModule"]
