"""The teachers, and the targets that a student learns from: stored by a reinforcement, or computed in the step.

Shapes: b pairs of this rank, L tokens, D embedding dimension of all teachers together.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from open_clip import SimpleTokenizer
from torch import Tensor, nn

from ...callbacks import gather
from ...common.clip_vocabulary import CLIP_VOCABULARY
from ...common.errors import UserError
from ...common.preprocessing import Normalization
from ..core.frozen import Frozen
from ..core.memory import in_slices
from ..core.precision import unit
from ..losses.contrast import PairFeatures
from ..networks.published_clip import PublishedCLIP, Tokenizer
from ..networks.user_teacher import TeacherImages
from .ensemble import Teacher, published, scale_of, width_of
from .settings import TeacherSettings

TEACHER_IMAGE = "teacher_image"
"""The teachers' image embeddings in a batch."""
TEACHER_TEXTS = {"real": "teacher_text", "synthetic": "teacher_synthetic"}
"""The teachers' text embeddings in a batch, by kind of caption."""
_DATACOMP_DIMS = [768, 768]
_DATACOMP_SCALE = 100.0
_TEXT = "A photo of two dogs."

Targets = dict[str, list[PairFeatures]]
"""Features of the pairs of each kind of caption by each teacher, without gradient."""


class StoredTeachers:
    """Teachers whose embeddings, one teacher after another, are in the batches; all or some of them are distilled.

    Their dimensions and scales are those of the settings, else of the data, else of DataCompDR.

    Args:
        settings: dimensions and scales, and the numbers of those that are distilled.

    Raises:
        UserError: If the numbers of dimensions and scales differ.
    """

    networks: Sequence[nn.Module] = ()
    tokenizers: Mapping[str, Tokenizer] = {}

    def __init__(self, settings: TeacherSettings) -> None:
        self.settings = settings
        self.dims: Sequence[int] = _DATACOMP_DIMS if settings.dims is None else settings.dims
        self.scales: Sequence[float] = [_DATACOMP_SCALE] * len(self.dims)
        if settings.scales is not None:
            self.scales = settings.scales
        if len(self.dims) != len(self.scales):
            raise UserError(
                f"Expected one dimension and one scale for each teacher, got {len(self.dims)} teacher.dims and "
                f"{len(self.scales)} teacher.scales: correct one of them."
            )

    def load(self, max_tokens: int | None, images: Normalization, datamodule: Any) -> None:
        """Adopt the teachers of the data.

        Args:
            max_tokens: not used.
            images: not used.
            datamodule: the datamodule of the run, which may know its `teachers` (`dims`, `scales` and `source`) and its
                `teacher_width`; or None.

        Raises:
            UserError: If the settings or the width of the embeddings differ from those of the data.
        """
        stored: Mapping[str, Any] | None = getattr(datamodule, "teachers", None)
        if stored is not None:
            for name, value in (("dims", self.settings.dims), ("scales", self.settings.scales)):
                if value is not None and not _are_close(value, stored[name]):
                    raise UserError(
                        f"Expected a teacher.{name} of {stored[name]}, with which the data was reinforced by "
                        f"{stored['source']}, got {value}: leave model.teacher.{name} out, or set it to null."
                    )
            self.dims = stored["dims"]
            self.scales = stored["scales"]
        width = getattr(datamodule, "teacher_width", None)
        if width is not None:
            self._check_width(width)
        self.distilled()

    def distilled(self) -> list[int]:
        """Return the numbers of the teachers that are distilled, in the order of the settings.

        Raises:
            UserError: If one of them is not stored.
        """
        stored = range(len(self.dims))
        numbers = list(stored) if self.settings.distilled is None else self.settings.distilled
        if not set(numbers) <= set(stored):
            raise UserError(
                f"Expected numbers of the {len(self.dims)} stored teachers, from 0 to {len(self.dims) - 1}, as "
                f"teacher.distilled, got {numbers}: correct model.teacher.distilled."
            )
        return numbers

    def targets(self, batch: Mapping[str, Tensor], captions: Mapping[str, Tensor]) -> Targets:
        """Return the features of the pairs by each distilled teacher, gathered in the data's precision.

        Args:
            batch: the training batch with the stored embeddings [b, D] of all teachers.
            captions: token ids [b, L] by kind.

        Raises:
            UserError: If the batch has no embeddings, or these are not as wide as all teachers together.
        """
        names = [TEACHER_IMAGE, *(TEACHER_TEXTS[kind] for kind in captions)]
        missing = [name for name in names if name not in batch]
        if missing:
            raise UserError(
                f"Expected {', '.join(missing)} in the training batch, got only {', '.join(batch)}: train on "
                "reinforced data, name model.teacher.models, or set model.teacher.distillation_weight to 0."
            )
        self._check_width(batch[TEACHER_IMAGE].shape[1])
        numbers = self.distilled()

        def distilled(embeddings: Tensor) -> Tensor:
            of_teachers = embeddings.split(list(self.dims), 1)
            return torch.cat([of_teachers[number] for number in numbers], 1)

        texts = {kind: distilled(batch[TEACHER_TEXTS[kind]]) for kind in captions}
        dims = [self.dims[number] for number in numbers]
        scales = [self.scales[number] for number in numbers]
        return _gathered(distilled(batch[TEACHER_IMAGE]), texts, dims, scales)

    def _check_width(self, width: int) -> None:
        if width != sum(self.dims):
            raise UserError(
                f"Expected teacher embeddings of width {sum(self.dims)}, the sum of teacher.dims {list(self.dims)}, "
                f"got {width} in the data: set model.teacher.dims to the teachers that the data was reinforced with."
            )


class OnlineTeachers(Frozen[nn.ModuleList]):
    """An ensemble of published models that embeds batches of pairs, as a reinforcement does in advance.

    Args:
        teachers: the teachers in the order of their embeddings.
        micro_batch_size: number of pairs that go through the towers at a time; None means all.
    """

    def __init__(self, teachers: Sequence[Teacher], micro_batch_size: int | None) -> None:
        super().__init__(nn.ModuleList(), "teacher", "model.teacher.models")
        self.teachers = list(teachers)
        self.micro_batch_size = micro_batch_size
        self.dims: list[int] = []
        self.scales: list[float] = []
        self.tokenizers: dict[str, Tokenizer] = {}
        """Tokenizers of the teachers that take other ids than the student, by the name of the ids in a batch."""
        self._images: list[TeacherImages] = []
        self._text_lengths: list[int | None] = []

    @property
    def networks(self) -> Sequence[nn.Module]:
        """The networks, to be sharded."""
        return list(self.network)

    def load(self, max_tokens: int | None, images: Normalization, datamodule: Any) -> None:
        """Load the teachers on the first call.

        A teacher that takes the student's token ids gets these; any other gets its own, for which the data adds the
        captions by each of `tokenizers` to the batch.

        Args:
            max_tokens: number of tokens of the student's texts, which have CLIP's ids; None for a student with a
                tokenizer of its own.
            images: normalization of the student's images.
            datamodule: the datamodule of the run, or None.

        Raises:
            UserError: If weights cannot be loaded, or the data has another tokenizer than the student's.
        """
        if self.loaded:
            return
        special = None if max_tokens is None else getattr(datamodule, "special_token_ids", None)
        if special is not None and special["cls"] != SimpleTokenizer().sot_token_id:
            raise UserError(
                "Expected CLIP's token ids, which the student takes, got those of another tokenizer: set "
                f"data.tokenizer clip, data.vocab_size {CLIP_VOCABULARY} and data.max_tokens {max_tokens}."
            )
        models = [published(teacher, "model.teacher.models") for teacher in self.teachers]
        self._text_lengths = [_text_length(model, max_tokens) for model in models]
        for number, (length, model) in enumerate(zip(self._text_lengths, models, strict=True)):
            if length is None:
                self.tokenizers[_ids_of(number)] = model.tokenizer
        for teacher, model in zip(self.teachers, models, strict=True):
            expected = model.preprocessing
            self._images.append(
                TeacherImages(expected.image_size, images, expected.normalization, expected.interpolation)
            )
            self.scales.append(scale_of(teacher, model))
            model.network.logit_scale = nn.Parameter(model.network.logit_scale.detach().reshape(1))  # FSDP2 needs [1]
            model.network.logit_bias = None
        self.network.extend(model.network for model in models)
        self.network.requires_grad_(False).eval()
        self.dims = [width_of(model) for model in models]
        self.record(", ".join(model.model for model in models), ", ".join(model.weights for model in models))

    def targets(self, batch: Mapping[str, Tensor], captions: Mapping[str, Tensor]) -> Targets:
        """Return each teacher's features of the pairs, gathered.

        Args:
            batch: the training batch, with the images [b, 3, S, S] of the student.
            captions: token ids [b, L] by kind.

        Raises:
            UserError: If the batch has no token ids for a teacher with another tokenizer than the student's.
        """
        image, texts = self.embed(batch, captions)
        return _gathered(image, texts, self.dims, self.scales)

    @torch.no_grad()
    def embed(self, batch: Mapping[str, Tensor], captions: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the embeddings [b, D] of images and of captions by kind, each teacher's of unit length.

        Arguments and errors as of `targets`.
        """
        kinds = len(captions)

        def encode(image: Tensor, *texts: Tensor) -> tuple[Tensor, ...]:
            by_teacher = [
                self._encode(number, image, texts[number * kinds : (number + 1) * kinds])
                for number in range(len(self.network))
            ]
            return tuple(torch.cat(embeddings, 1) for embeddings in zip(*by_teacher, strict=True))

        texts = [ids for number in range(len(self.network)) for ids in self._texts(number, batch, captions)]
        embedding, *embeddings = in_slices(encode, self.micro_batch_size, batch["image"], *texts)
        return embedding, dict(zip(captions, embeddings, strict=True))

    def _texts(self, number: int, batch: Mapping[str, Tensor], captions: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the token ids of each kind of caption for a teacher."""
        if self._text_lengths[number] is not None:
            return list(captions.values())
        name = _ids_of(number)
        if list(captions) != ["real"] or name not in batch:
            raise UserError(
                "Expected real captions of a datamodule of pairs for a teacher with another tokenizer than the "
                f"student's, got {' and '.join(captions)} captions in a batch of {', '.join(batch)}: set "
                "model.captions to real with ImageTextDataModule, or reinforce the data with the teacher."
            )
        return [batch[name]]

    def _encode(self, number: int, image: Tensor, texts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        network: Any = self.network[number]
        length = self._text_lengths[number] or texts[0].shape[1]
        padded = F.pad(torch.cat(list(texts)), (0, length - texts[0].shape[1]))  # CLIP pads with 0
        features = network.encode_text(padded).chunk(len(texts))
        return tuple(unit(feature) for feature in (network.encode_image(self._images[number](image)), *features))


@torch.no_grad()
def _gathered(image: Tensor, texts: Mapping[str, Tensor], dims: Sequence[int], scales: Sequence[float]) -> Targets:
    """Return each teacher's features of the pairs of this rank and of all ranks, by kind of caption.

    Args:
        image: embeddings of the images [b, D].
        texts: embeddings of the captions [b, D] by kind.
        dims: embedding dimension of each teacher.
        scales: factor of each teacher's cosines.
    """
    embeddings = [image, *texts.values()]
    all_embeddings = gather(torch.cat(embeddings, 1)).chunk(len(embeddings), 1)
    image_by_teacher, *texts_by_teacher = (embedding.split(list(dims), 1) for embedding in embeddings)
    all_image_by_teacher, *all_texts_by_teacher = (embedding.split(list(dims), 1) for embedding in all_embeddings)
    return {
        kind: [
            PairFeatures(*features)
            for features in zip(image_by_teacher, text, all_image_by_teacher, all_text, scales, strict=True)
        ]
        for kind, text, all_text in zip(texts, texts_by_teacher, all_texts_by_teacher, strict=True)
    }


def _are_close(typed: Sequence[float], stored: Sequence[float]) -> bool:
    """Return whether typed numbers equal stored ones to one percent."""
    return len(typed) == len(stored) and all(
        math.isclose(value, other, rel_tol=0.01) for value, other in zip(typed, stored, strict=True)
    )


def _ids_of(number: int) -> str:
    """Return the name in a batch of the token ids of a teacher with another tokenizer than the student's."""
    return f"teacher{number}_input_ids"


def _text_length(published: PublishedCLIP, max_tokens: int | None) -> int | None:
    """Return the number of tokens of a teacher's texts; None if it does not take the student's token ids.

    Args:
        published: the teacher.
        max_tokens: number of tokens of the student's texts, which have CLIP's ids; None for another tokenizer.
    """
    if max_tokens is None:
        return None
    ids = published.tokenizer([_TEXT])
    length = int(ids.shape[1])
    fits = length >= max_tokens and torch.equal(ids, SimpleTokenizer(context_length=length)([_TEXT]))
    return length if fits else None
