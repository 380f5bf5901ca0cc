"""Networks that several methods share."""
