"""Most probable classes of images in a Parquet file."""

from .classes import ClassesWriter


class ClassPredictionWriter(ClassesWriter):
    """Writes `predictions.parquet` after `predict`, a row for each image in the order of the data.

    Columns: sample_index; image, its path, or its source and row; label, the most probable class; name of that class;
    probability; top_labels and top_probabilities, the `top_k` most probable, best first. Names come from the
    datamodule's `picture_name` and `class_names`; what is not known is null. The file is written beside its place and
    then renamed.

    The module's `predict_step` returns `{"sample_index": long [B], "probabilities": [B, C]}`.

    Args:
        top_k: number of classes in the lists.
        folder: where the file goes, by default `predictions` in the Trainer's `default_root_dir`.
        class_names: names of the classes 0, 1, ...; by default the datamodule's.

    Raises:
        ValueError: if `top_k` is below 1, or `predict_step` returns something else.
    """

    file = "predictions.parquet"
