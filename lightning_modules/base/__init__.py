"""What stands above every method."""
