"""Losses that several methods use."""
