"""Evaluation components of the methods."""
