"""Captions and tokenizers."""
