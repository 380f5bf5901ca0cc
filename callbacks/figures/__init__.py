"""What draws figures."""
