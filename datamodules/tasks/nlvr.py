"""Datamodule of statements about two images."""

from __future__ import annotations

from .datamodule import AnnotationDataModule


class NLVR2DataModule(AnnotationDataModule):
    """Two images with a statement that is true or false about them.

    Rows are `{"images": [left, right], "sentence", "label"}`, as in `nlvr_train.json`, `nlvr_dev.json` and
    `nlvr_test.json` of ALBEF's authors; or tables of one's own with the columns `image_left`, `image_right`,
    `sentence` and `label`. Labels are False (0) and True (1), by name or by number. A batch holds `image_left`
    and `image_right`, augmented independently.
    """

    image_names = ("image_left", "image_right")
    label_names = ("False", "True")
