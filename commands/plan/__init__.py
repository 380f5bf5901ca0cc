"""`vlightning plan`: memory and time of a recipe, computed before GPUs are rented."""
