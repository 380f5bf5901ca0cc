"""Most probable classes of texts in a Parquet file."""

from .classes import ClassesWriter


class TextClassPredictionWriter(ClassesWriter):
    """Write `text_predictions.parquet` after `predict`, a row for each text in the order of the data.

    Columns: text_index, the index in the list of texts; text; and label, name, probability, top_labels and
    top_probabilities as of `ClassPredictionWriter`.

    The module's `predict_step` returns `{"text_index": long [B], "probabilities": [B, C]}`.

    Args:
        top_k: Number of classes in the lists.
        folder: Folder of the file, by default `predictions` in the Trainer's `default_root_dir`.
        class_names: Names of the classes 0, 1, ...; by default the datamodule's.

    Raises:
        UserError: If `top_k` is below 1, or `predict_step` returns something else.
    """

    of_texts, file = True, "text_predictions.parquet"
