"""Datamodules of vision-language tasks: one or two images, a text, and a label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from PIL import Image

from ..base.faults import BadSample
from ..base.images import ImageTransforms
from ..base.sampled import SampledDataModule
from ..base.samples import EvaluationRows
from ..base.stages import Split
from ..base.texts import TokenizedTexts
from ..labels.samples import labels_of
from ..pairs.source_arguments import SourceArguments
from ..reading.layout import Layout
from ..transforms.normalize import in_pixels
from .rows import Annotations, TaskTable
from .samples import TaskCollate, TaskReader, TaskRows


class TaskDataModule(TokenizedTexts, ImageTransforms, SampledDataModule):
    """Samples of one or two images, a text and a label, in batches of the project's contract (dicts of tensors).

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
    class_names: ClassVar[tuple[str, ...]]
    """Names of the classes by index."""

    def __init__(
        self, *, max_tokens: int = 512, append_sep: bool = False, clean_captions: bool = True, **options: Any
    ) -> None:
        super().__init__(
            max_tokens=max_tokens, append_sep=append_sep, clean_captions=clean_captions, predict_texts=None, **options
        )

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    def training_reader(self, rows: TaskRows) -> TaskReader:
        """Return a reader of augmented images with a text and a label."""
        return TaskReader(rows, self.worker_transform(training=True), self.encoder())

    def training_collate(self) -> TaskCollate:
        """Stack the images and encode the texts."""
        return TaskCollate(self.image_names, encoder=self.encoder())

    def evaluation_labels(self, rows: TaskRows) -> list[int]:
        """Return the class index of each row; -1 for a row without a readable label."""
        return labels_of(rows)

    def evaluation_set(self, rows: TaskRows, items: Sequence[int], split: Split) -> EvaluationRows:
        """Return a dataset of images with a text and, but for prediction, a label."""
        reader = TaskReader(rows, self.worker_transform(training=False), self.encoder())
        return EvaluationRows(len(rows), reader, self.run_seed)

    def evaluation_collate(self, split: Split) -> TaskCollate:
        """Stack the images and encode the texts."""
        return TaskCollate(self.image_names, in_pixels(self.eval_transform), encoder=self.encoder())

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


class AnnotationFiles(SourceArguments):
    """Samples of annotation files, as their authors publish them, or of tables; a base class before `TaskDataModule`.

    Files are `.json` (a list of objects), `.jsonl`, `.csv` or `.parquet`.

    Args:
        image_columns: column of each image of a row, encoded or a path; by default the names of the images in batches.
            A list in a column `images` replaces them.
        text_column: column of the text.
        label_column: column of the label, the name or the index of a class.
        image_suffix: suffix of image names that have none; by default that of the authors' files.
    """

    default_suffix: ClassVar[str] = ""
    default_image_size: ClassVar[int | None] = 384

    # Members of `TaskDataModule`
    image_names: ClassVar[tuple[str, ...]]
    class_names: ClassVar[tuple[str, ...]]
    clean_captions: bool
    max_words: int

    def __init__(
        self,
        *,
        image_columns: list[str] | None = None,
        text_column: str = "sentence",
        label_column: str = "label",
        image_suffix: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.form = Annotations(
            self.image_names,
            tuple(image_columns or self.image_names),
            text_column,
            {"label": label_column},
            self.image_root,
            self.default_suffix if image_suffix is None else image_suffix,
            self.cache_dir,
        )

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
        if split != "predict":
            rows.set_class_indices(self.class_names, len(self.class_names), split)
        return rows


class EntailmentDataModule(AnnotationFiles, TaskDataModule):
    """Images with a text, and whether the image contradicts it, leaves it open, or entails it.

    Rows are `{"image", "sentence", "label"}`, as in `ve_train.json`, `ve_dev.json` and `ve_test.json` of
    ALBEF's authors, whose images are those of Flickr30k without `.jpg`; or tables of one's own with these columns.
    Labels are contradiction (0), neutral (1) and entailment (2), by name or by number.
    """

    class_names = ("contradiction", "neutral", "entailment")
    default_suffix = ".jpg"


class NLVR2DataModule(AnnotationFiles, TaskDataModule):
    """Two images with a statement that is true or false about them.

    Rows are `{"images": [left, right], "sentence", "label"}`, as in `nlvr_train.json`, `nlvr_dev.json` and
    `nlvr_test.json` of ALBEF's authors; or tables of one's own with the columns `image_left`, `image_right`,
    `sentence` and `label`. Labels are False (0) and True (1), by name or by number. A batch holds `image_left`
    and `image_right`, augmented independently.
    """

    image_names = ("image_left", "image_right")
    class_names = ("False", "True")
