"""Classification of labelled images during validation and test."""
