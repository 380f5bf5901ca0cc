"""Writing and reading of checkpoints."""
