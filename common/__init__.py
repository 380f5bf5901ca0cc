"""Helpers that every folder may use; imports nothing else of the package."""
