"""Most probable classes of images in a Parquet file."""

from .classes import ClassesWriter


class ClassPredictionWriter(ClassesWriter):
    """Write `predictions.parquet` after `predict`, a row for each image in the order of the data.

    Columns: sample_index; image, its path, or its source and row (of a task with texts also text; of pairs image_left,
    image_right and text); label, the most probable class; name of that class;
    probability; top_labels and top_probabilities, the `top_k` most probable, best first. Names come from the
    datamodule's `image_name` and `class_names`; unknown values are null. The file is
    written atomically.

    The module's `predict_step` returns `{"sample_index": long [B], "probabilities": [B, C]}`.

    Args:
        top_k: Number of classes in the lists.
        folder: Folder of the file, by default `predictions` in the Trainer's `default_root_dir`.
        class_names: Names of the classes 0, 1, ...; by default the datamodule's.

    Raises:
        UserError: If `top_k` is below 1, or `predict_step` returns something else.
    """

    file = "predictions.parquet"
