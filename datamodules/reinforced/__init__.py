"""Pairs with stored augmentations, captions and embeddings of teachers, and the runs that store them."""
