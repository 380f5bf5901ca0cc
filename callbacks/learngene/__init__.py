"""The learngene: its file, its layers, and the expansion of a model from it."""
