"""Classification of labeled images during validation and test."""
