"""Datamodule of visual entailment."""

from __future__ import annotations

from .datamodule import AnnotationDataModule


class EntailmentDataModule(AnnotationDataModule):
    """Images with a text, and whether the image contradicts it, leaves it open, or entails it.

    Rows are `{"image", "sentence", "label"}`, as in `ve_train.json`, `ve_dev.json` and `ve_test.json` of
    ALBEF's authors, whose images are those of Flickr30k without `.jpg`; or tables of one's own with these columns.
    Labels are contradiction (0), neutral (1) and entailment (2), by name or by number.
    """

    label_names = ("contradiction", "neutral", "entailment")
    own_suffix = ".jpg"
