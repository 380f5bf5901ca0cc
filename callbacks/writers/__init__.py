"""What writes predictions."""
