"""Base of the datamodules of reinforced pairs: image-caption pairs with the stored embeddings of teachers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import nn

from ...common.clip_vocabulary import CLIP_VOCABULARY
from ...common.ranges import COUNT, FINITE, POSITIVE, SHARE
from ..base.faults import Collated, Outcome
from ..base.samples import TrainingSet, stacked, usable_samples
from ..base.sampling import sample_numbers
from ..pairs.base import PairDataModule
from ..text.clip import CLIP, CLIP_TOKENS
from ..text.tokenizers import Encoder
from ..transforms.clip import ReplayTransform, pair_eval_transform
from ..transforms.normalize import ChannelValues
from ..transforms.replay import Interpolation
from .draws import ReinforcedDraws
from .reader import ReinforcedReader, ReinforcedSample

TeacherDtype = Literal["float32", "bfloat16"]
_IMAGE_ARGUMENTS = ("mean", "std", "interpolation")
"""Keys of the preprocessing that are arguments with the prefix `image_`."""


@dataclass
class ReinforcedCollate:
    """Build training batches with a second caption and the teachers' embeddings.

    In addition to `image`, `input_ids`, `attention_mask`, `image_id` and `sample_index`, a batch holds the
    synthetic caption as `synthetic_input_ids` and `synthetic_attention_mask`, and the concatenated embeddings of
    all teachers as `teacher_image`, `teacher_text` and `teacher_synthetic` [B, D]. With a `synthetic_ratio` it
    has one caption of each sample, without a synthetic one beside it.

    Args:
        encoder: encoder of the captions.
        dtype: data type of the embeddings.
    """

    encoder: Encoder
    dtype: torch.dtype

    def __call__(self, outcomes: Sequence[Outcome]) -> Collated:
        """Stack the images and the embeddings, and encode the captions."""
        found, seen, faults = usable_samples(outcomes)
        samples: list[ReinforcedSample] = found
        if len(samples) < len(outcomes):  # no usable substitute was found: the loader ends the run
            return Collated(None, seen, faults)
        second = [sample.synthetic for sample in samples if sample.synthetic is not None]
        texts = self.encoder([*(sample.caption for sample in samples), *second])
        index = torch.tensor([sample.sample_index for sample in samples])
        batch: dict[str, Any] = {
            "image": stacked([sample.image for sample in samples]),
            **{key: ids[: len(samples)] for key, ids in texts.items()},
            **({f"synthetic_{key}": ids[len(samples) :] for key, ids in texts.items()} if second else {}),
            **{
                key: stacked([getattr(sample, key).to(self.dtype) for sample in samples])
                for key in ("teacher_image", "teacher_text", *(("teacher_synthetic",) if second else ()))
            },
            "image_id": index,
            "sample_index": index.clone(),
        }
        return Collated(batch, seen, faults, [note for sample in samples for note in sample.notes])


class ReinforcedSet(TrainingSet):
    """Training samples whose reader also takes the epoch."""

    read: ReinforcedReader

    def sample(self, epoch: int, item: int) -> ReinforcedSample:
        """As in `TrainingSet`."""
        return self.read(item, sample_numbers(self.seed, epoch, item), epoch)


class ReinforcedDataModule(PairDataModule):
    """Reinforced pairs for training, plain pairs for evaluation, with the preprocessing that the student expects.

    A subclass opens the rows: those of reinforced shards for training, pairs for all other splits. Captions are encoded
    by CLIP's tokenizer.

    Args:
        image_size: side of the square images, pixels (MobileCLIP: 256; its ViTs: 224).
        image_mean: mean of each channel, on the 0-1 scale; by default the mean that the module's weights expect, else 0
            (MobileCLIP's S and B models).
        image_std: standard deviation of each channel, on the 0-1 scale; by default the value that those weights expect,
            else 1 (MobileCLIP's S and B models).
        image_interpolation: interpolation of the crops in training and of the resize in evaluation; by default the
            interpolation that those weights expect, else bilinear (MobileCLIP).
        max_tokens: length of the token sequences, which is the model's context length (CLIP: 77).
        teacher_dtype: data type of the teachers' embeddings in a batch; "bfloat16" halves the traffic between
            processes, and is exact if the data is stored in bfloat16.
        batch_size: training pairs per process and batch (released scripts: 65,536 in all).
        first_augmentations: only the first this many stored augmentations of an image are used (the paper's ablation of
            their number); by default all.
        first_synthetic: only the first this many synthetic captions, of each kind, are used (as before).
        sequential: whether epoch e uses augmentation and synthetic caption number e, modulo their counts, instead of
            random ones.
        synthetic_ratio: probability that a sample trains on its synthetic caption instead of the real one (the paper's
            ablation of random choice; `mix-synthetic-ratio` of the released code); by default it trains on both. The
            text tower then encodes one caption for each image. The module treats and logs these captions as real ones.
        **options: see `PairDataModule`.
    """

    decided_arguments: ClassVar[tuple[str, ...]] = (
        "tokenizer",
        "vocab_size",
        "append_sep",
        "clean_captions",
        "max_words",
        "train_transform",
        "eval_transform",
    )
    text_options: ClassVar[dict[str, Any]] = {
        "tokenizer": CLIP,
        "vocab_size": CLIP_VOCABULARY,
        "append_sep": True,
        "clean_captions": False,
        "max_words": CLIP_TOKENS,
    }
    """Arguments of other datamodules that are fixed here; the command line encodes new texts by them."""

    def __init__(
        self,
        *,
        image_size: Annotated[int, COUNT] = 256,
        image_mean: Annotated[ChannelValues | None, FINITE] = None,
        image_std: Annotated[ChannelValues | None, POSITIVE] = None,
        image_interpolation: Interpolation | None = None,
        max_tokens: int = CLIP_TOKENS,
        teacher_dtype: TeacherDtype = "float32",
        batch_size: int = 256,
        first_augmentations: Annotated[int | None, COUNT] = None,
        first_synthetic: Annotated[int | None, COUNT] = None,
        sequential: bool = False,
        synthetic_ratio: Annotated[float | None, SHARE] = None,
        **options: Any,
    ) -> None:
        super().__init__(
            # By name, or the command line would take them for arguments of this class.
            tokenizer=self.text_options["tokenizer"],
            vocab_size=self.text_options["vocab_size"],
            max_tokens=max_tokens,
            append_sep=self.text_options["append_sep"],
            clean_captions=self.text_options["clean_captions"],
            max_words=self.text_options["max_words"],
            train_transform=None,
            eval_transform=None,
            batch_size=batch_size,
            **options,
        )
        self.image_size = image_size
        self.image_mean = image_mean
        self.image_std = image_std
        self.image_interpolation = image_interpolation
        self.teacher_dtype = teacher_dtype
        self.draws = ReinforcedDraws(first_augmentations, first_synthetic, sequential, synthetic_ratio)

    @property
    def teacher_width(self) -> int | None:
        """Dimension of the teachers' concatenated embeddings; None before training rows are opened."""
        return self._rows["train"].teacher_width if "train" in self._rows else None

    @property
    def teachers(self) -> dict[str, Any] | None:
        """Dimension (`dims`) and logit scale (`scales`) of each teacher, and their file (`source`); or None."""
        return None

    def default_train_transform(self) -> ReplayTransform:
        """Return the transform that replays recorded augmentations, with the normalization of evaluation."""
        settings = self._image_settings(self.expected_preprocessing())
        return ReplayTransform(self.image_size, **{name: settings[name] for name in _IMAGE_ARGUMENTS})

    def default_eval_transform(self) -> nn.Module:
        """Return the transform with the given values, else those that trained weights expect, else MobileCLIP's."""
        return pair_eval_transform(self.image_size, self._image_settings(self.expected_preprocessing()))

    def _image_settings(self, expected: Mapping[str, Any]) -> dict[str, Any]:
        """Return interpolation and normalization of the images."""
        own = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0), "interpolation": "bilinear"}
        given = {name: getattr(self, f"image_{name}") for name in _IMAGE_ARGUMENTS}
        return {**own, **expected, **{name: value for name, value in given.items() if value is not None}}

    def training_reader(self, rows: Any) -> ReinforcedReader:
        """Return a reader of one recorded augmentation with its captions and embeddings."""
        return ReinforcedReader(rows, self.worker_transform(training=True), self.draws)

    def training_set(self, rows: Any) -> ReinforcedSet:
        """Return the dataset of training samples."""
        return ReinforcedSet(len(rows), self.training_reader(rows), self.run_seed)

    def training_collate(self) -> ReinforcedCollate:
        """Stack the images and embeddings, and encode both captions."""
        return ReinforcedCollate(self.encoder(), getattr(torch, self.teacher_dtype))
