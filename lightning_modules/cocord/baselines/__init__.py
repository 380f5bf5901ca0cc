"""Baselines that learn from the teacher's features, with the constants of the CRD benchmark."""

from .losses import FeatureLosses

__all__ = ["FeatureLosses"]
