"""Writers of predictions."""
