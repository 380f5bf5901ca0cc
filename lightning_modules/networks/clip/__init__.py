"""Pairs of an image and a text tower, MobileCLIP's and open_clip's: building, weights, preprocessing, export."""
