"""Labeled images."""
