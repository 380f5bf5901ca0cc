"""Referring expressions and their boxes."""
