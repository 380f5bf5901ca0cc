"""Distillation online: teachers that embed each batch in the training step.

Shapes: b pairs of this process, L tokens, D embedding dimension of all teachers together.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from open_clip import SimpleTokenizer
from torch import Tensor, nn

from ...common.clip_vocabulary import CLIP_VOCABULARY
from ...common.errors import UserError
from ...common.preprocessing import Normalization
from ..core.frozen import Frozen
from ..core.memory import in_slices
from ..core.precision import unit
from ..networks.own_teacher import TeacherImages
from ..networks.published_clip import PublishedCLIP
from .ensemble import Teacher, published
from .pairs import CAPTIONS, TEACHER_TEXTS
from .teachers import TEACHER_IMAGE, Teachers

_TEXT = "A photo of two dogs."


class OnlineTeachers(Frozen[nn.ModuleList]):
    """An ensemble of published models that embeds batches of pairs, as a reinforcement does in advance.

    Args:
        teachers: the teachers in the order of their embeddings; none for stored embeddings.
    """

    def __init__(self, teachers: Sequence[Teacher]) -> None:
        super().__init__(nn.ModuleList(), "teacher", "model.teacher.models")
        self.given = list(teachers)
        self.teachers: Teachers | None = None
        self._images: list[TeacherImages] = []
        self._lengths: list[int] = []

    def load(self, max_tokens: int, images: Normalization, datamodule: Any = None) -> None:
        """Load the teachers on the first call.

        Args:
            max_tokens: tokens of the student's texts.
            images: normalization of the student's images.
            datamodule: the datamodule of the run.

        Raises:
            UserError: If weights cannot be loaded, the data has another tokenizer than CLIP's, or a teacher takes other
                token ids or fewer tokens.
        """
        if self.loaded or not self.given:
            return
        special = getattr(datamodule, "special_token_ids", None)
        if special is not None and special["cls"] != SimpleTokenizer().sot_token_id:
            raise UserError(
                "Expected CLIP's token ids, which the teachers take, got those of another tokenizer: set "
                f"data.tokenizer clip, data.vocab_size {CLIP_VOCABULARY} and data.max_tokens {max_tokens}."
            )
        loaded = [published(teacher, "model.teacher.models") for teacher in self.given]
        self._lengths = [_text_length(one, max_tokens) for one in loaded]
        scales = []
        for teacher, one in zip(self.given, loaded, strict=True):
            prepared = one.preprocessing
            expected = prepared.normalization
            self._images.append(TeacherImages(prepared.image_size, images, expected, prepared.interpolation))
            scales.append(float(one.network.logit_scale.exp()) if teacher.scale is None else teacher.scale)
            one.network.logit_scale = nn.Parameter(one.network.logit_scale.detach().reshape(1))  # FSDP2 needs [1]
            one.network.logit_bias = None
        self.network.extend(one.network for one in loaded)
        self.network.requires_grad_(False).eval()
        self.teachers = Teachers([_width(one) for one in loaded], scales)
        self.record(*(", ".join(parts) for parts in zip(*((one.model, one.weights) for one in loaded), strict=True)))

    @torch.no_grad()
    def add(self, batch: Mapping[str, Tensor], kinds: Sequence[str], micro_batch_size: int | None) -> dict[str, Tensor]:
        """Return a batch with the embeddings [b, D] of its images and captions, each teacher's of unit length.

        Args:
            batch: images [b, 3, S, S] and token ids [b, L] of the student.
            kinds: kinds of captions, as of `caption_kinds`.
            micro_batch_size: pairs that go through the towers at a time; None means all.
        """

        def encode(image: Tensor, *texts: Tensor) -> tuple[Tensor, ...]:
            parts = [self._encoded(number, image, texts) for number in range(len(self.network))]
            return tuple(torch.cat(of_all, 1) for of_all in zip(*parts, strict=True))

        inputs = [batch["image"], *(batch[CAPTIONS[kind]] for kind in kinds)]
        names = [TEACHER_IMAGE, *(TEACHER_TEXTS[kind] for kind in kinds)]
        return {**batch, **dict(zip(names, in_slices(encode, micro_batch_size, *inputs), strict=True))}

    def _encoded(self, number: int, image: Tensor, texts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        network: Any = self.network[number]
        padded = F.pad(torch.cat(list(texts)), (0, self._lengths[number] - texts[0].shape[1]))  # CLIP pads with 0
        features = network.encode_text(padded).chunk(len(texts))
        return tuple(unit(part) for part in (network.encode_image(self._images[number](image)), *features))


def _text_length(published: PublishedCLIP, max_tokens: int) -> int:
    """Return the number of tokens of a teacher's texts.

    Raises:
        UserError: If it is below the student's, or the token ids are not CLIP's.
    """
    ids = published.tokenizer([_TEXT])
    length = int(ids.shape[1])
    if length < max_tokens or not torch.equal(ids, SimpleTokenizer(context_length=length)([_TEXT])):
        raise UserError(
            f"Expected teachers that take CLIP's token ids and texts of {max_tokens} tokens, got {published.model} of "
            f"{published.weights!r}: reinforce the data with it instead, or choose another teacher."
        )
    return length


def _width(published: PublishedCLIP) -> int:
    with torch.no_grad():
        return int(published.network.encode_text(published.tokenizer([_TEXT])).shape[1])
