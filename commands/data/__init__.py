"""`vlightning data`: what is in the images and texts of a recipe, counted before training."""
