"""Figures in the loggers of a run."""
