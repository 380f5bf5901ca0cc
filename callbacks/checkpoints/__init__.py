"""How checkpoints are written and read."""
