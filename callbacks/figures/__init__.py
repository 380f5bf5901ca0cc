"""Figures in TensorBoard."""
