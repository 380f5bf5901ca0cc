"""Datasets of generated shapes, for quickstarts and tests."""
