"""What every room may use; imports no other room of the package."""
