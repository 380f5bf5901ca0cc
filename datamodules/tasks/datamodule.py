"""Bases of the datamodules of vision-language tasks: one or two images, a text, and a label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from PIL import Image
from torch import nn

from ...common.ranges import COUNT
from ..base.decode import MAX_PIXELS
from ..base.faults import BadSample
from ..base.samples import EvaluationRows
from ..base.stages import Split
from ..base.texts import TextDataModule
from ..reading.layout import Layout
from ..reading.resolve import Sources, by_split
from ..transforms.clip import pair_train_transform
from ..transforms.normalize import in_pixels
from .rows import Annotations, TaskTable
from .samples import TaskCollate, TaskReader, TaskRows


class TaskDataModule(TextDataModule):
    """Samples of one or two images, a text and a target, in batches of the project's contract (dicts of tensors).

    A batch holds the images, float [B, 3, H, W], under the names of `image_names`; `input_ids` and
    `attention_mask` [B, L]; `label` [B]; `sample_index` [B]. Evaluation reads each row once. A subclass defines
    the rows in `open_split`.

    Args:
        max_tokens: longest token sequence, special tokens included. By default no text is truncated, as in the authors'
            fine-tuning.
        append_sep: whether sequences end with [SEP]; the ALBEF authors omit it.
        clean_captions: whether to apply ALBEF's caption cleaning, which keeps `max_words` words.
    """

    decided_arguments: ClassVar[tuple[str, ...]] = ("predict_texts",)
    image_names: ClassVar[tuple[str, ...]] = ("image",)
    class_names: tuple[str, ...] | None = None
    """Names of the classes by index."""

    def __init__(
        self, *, max_tokens: int = 512, append_sep: bool = False, clean_captions: bool = True, **options: Any
    ) -> None:
        super().__init__(
            max_tokens=max_tokens, append_sep=append_sep, clean_captions=clean_captions, predict_texts=None, **options
        )

    @property
    def num_classes(self) -> int | None:
        """Number of classes; None without classes."""
        return None if self.class_names is None else len(self.class_names)

    def training_reader(self, rows: TaskRows) -> TaskReader:
        """Return a reader of augmented images with a text and a target."""
        return TaskReader(rows, self.worker_transform(training=True), self.encoder())

    def training_collate(self) -> TaskCollate:
        """Stack the images and encode the texts."""
        return TaskCollate(self.image_names, self.encoder())

    def evaluation_labels(self, rows: TaskRows) -> list[int] | None:
        """Return the class index of each row, -1 for a row without a readable one; None without classes."""
        return None if self.class_names is None else [_class_of(rows, row) for row in range(len(rows))]

    def evaluation_set(self, rows: TaskRows, items: Sequence[int], split: Split) -> EvaluationRows:
        """Return a dataset of images with a text and, but for prediction, a target."""
        reader = TaskReader(rows, self.worker_transform(training=False), self.encoder())
        return EvaluationRows(len(rows), reader, self.run_seed)

    def evaluation_collate(self) -> TaskCollate:
        """Stack the images and encode the texts."""
        return TaskCollate(self.image_names, self.encoder(), in_pixels(self.eval_transform))

    # For callbacks

    def images(self, split: Split, sample_index: int) -> list[Image.Image]:
        """Return the images of a `sample_index` before the evaluation transform: decoded, RGB, upright.

        Raises:
            ValueError: If the split is not set up, or an image cannot be used.
        """
        try:
            images: list[Image.Image] = self._opened(split).all_images(sample_index)
        except BadSample as bad:
            raise ValueError(f"{bad.fault.name} ({bad.fault.cause})") from None
        return images

    def text(self, split: Split, sample_index: int) -> str:
        """Return the text of a `sample_index`."""
        return str(self._opened(split).text(sample_index))

    def described(self, split: Split, sample_index: int) -> dict[str, str]:
        """Return the columns by which files of predictions name a `sample_index`: each image, and the text."""
        names = self._opened(split).all_image_names(sample_index)
        return dict(zip(self.image_names, names, strict=True)) | {"text": self.text(split, sample_index)}


def _class_of(rows: TaskRows, row: int) -> int:
    try:
        target = rows.target(row)
    except BadSample:
        return -1
    return -1 if target is None else int(target)


class AnnotationDataModule(TaskDataModule):
    """Samples of annotation files, as their authors publish them, or of tables of one's own.

    Args:
        train: training rows: a `.json` (a list of objects), `.jsonl`, `.csv` or `.parquet` file, a glob
            pattern, a folder, a `Source`, or a list of these, read one after another.
        validation: rows for validation, in the same forms.
        test: rows for testing, in the same forms.
        predict: rows for prediction, in the same forms; labels are optional.
        image_root: folder that relative image paths start from; by default the folder of the file that names them.
        image_columns: column of each image of a row, encoded or a path; by default the names of the images in batches.
            A list in a column `images` replaces them.
        text_column: column of the text.
        label_column: column of the label, the name or the index of a class.
        image_suffix: suffix of image names that have none; by default that of the authors' files.
        image_size: side of the square images, pixels; by default that of the module, or else 384.
        horizontal_flip: whether to flip half of the training images, as the authors do; set it to false if texts
            distinguish left and right. Has no effect with `train_transform`.
        max_pixels: images with more pixels are refused before they are decoded.
        cache_dir: folder for the memory-mapped copies of the `datasets` library.
    """

    label_names: ClassVar[tuple[str, ...]] = ()
    default_suffix: ClassVar[str] = ""
    default_image_size: ClassVar[int | None] = 384

    def __init__(
        self,
        train: Sources = None,
        validation: Sources = None,
        test: Sources = None,
        predict: Sources = None,
        image_root: str | None = None,
        image_columns: list[str] | None = None,
        text_column: str = "sentence",
        label_column: str = "label",
        image_suffix: str | None = None,
        image_size: Annotated[int | None, COUNT] = None,
        horizontal_flip: bool = True,
        max_pixels: Annotated[int, COUNT] = MAX_PIXELS,
        cache_dir: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.sources = by_split(train, validation, test, predict)
        self.class_names = self.label_names or None
        self.form = Annotations(
            self.image_names,
            tuple(image_columns or self.image_names),
            text_column,
            {"label": label_column},
            image_root,
            self.default_suffix if image_suffix is None else image_suffix,
            cache_dir,
        )
        self.image_size = image_size
        self.horizontal_flip = horizontal_flip
        self.max_pixels = max_pixels

    def default_train_transform(self) -> nn.Module:
        """Return the authors' transform of fine-tuning, with the normalization that trained weights expect.

        It crops at least half of the area, flips, and applies RandAugment.
        """
        flip = 0.5 if self.horizontal_flip else 0.0
        expected = self.expected_preprocessing()
        return pair_train_transform(self.image_size, expected, scale=(0.5, 1.0), horizontal_flip=flip)

    def open_sources(self, split: Split) -> list[tuple[Any, Layout]]:
        """Open the sources of a split; return each with its layout."""
        return [self.form.open(source, split) for source in self.sources[split]]

    def open_split(self, split: Split) -> TaskTable | None:
        """Open and check the rows of a split."""
        sources = self.open_sources(split)
        if not sources:
            return None
        rows = TaskTable(sources, self.max_pixels, self.image_names)
        rows.check_texts(split, self.clean_captions, self.max_words)
        if split != "predict" and self.class_names is not None:
            rows.set_class_indices(self.class_names, len(self.class_names), split)
        return rows


class EntailmentDataModule(AnnotationDataModule):
    """Images with a text, and whether the image contradicts it, leaves it open, or entails it.

    Rows are `{"image", "sentence", "label"}`, as in `ve_train.json`, `ve_dev.json` and `ve_test.json` of
    ALBEF's authors, whose images are those of Flickr30k without `.jpg`; or tables of one's own with these columns.
    Labels are contradiction (0), neutral (1) and entailment (2), by name or by number.
    """

    label_names = ("contradiction", "neutral", "entailment")
    default_suffix = ".jpg"


class NLVR2DataModule(AnnotationDataModule):
    """Two images with a statement that is true or false about them.

    Rows are `{"images": [left, right], "sentence", "label"}`, as in `nlvr_train.json`, `nlvr_dev.json` and
    `nlvr_test.json` of ALBEF's authors; or tables of one's own with the columns `image_left`, `image_right`,
    `sentence` and `label`. Labels are False (0) and True (1), by name or by number. A batch holds `image_left`
    and `image_right`, augmented independently.
    """

    image_names = ("image_left", "image_right")
    label_names = ("False", "True")
