"""The teacher of an extraction: a trained CLIP, frozen."""

from collections.abc import Mapping
from typing import Any

import torch
from open_clip.hf_model import HFTextEncoder
from torch import Tensor, nn

from ...callbacks.distributed.collectives import gather
from ...common.errors import UserError
from ..core.frozen import reads_weights
from ..core.memory import in_slices
from ..core.precision import unit
from ..losses.contrast import PairFeatures
from ..networks.clip.text_encoder import EncoderTower
from ..networks.published_clip import PublishedCLIP, load_published
from .settings import TeacherSettings, TextSettings, VisionSettings

TEACHER_IDS = "teacher_input_ids"
"""Token ids of a teacher that does not take the student's, in a batch."""


def load_teacher(
    teacher: TeacherSettings, vision: VisionSettings, text: TextSettings, prepared: Mapping[str, Any]
) -> PublishedCLIP:
    """Load the teacher, whose logit scale gets a dimension that FSDP2 can shard.

    Args:
        teacher: which CLIP.
        vision: images of the student.
        text: texts of the student.
        prepared: how the data prepares images, in the form of `base.preprocessing`; empty if unknown.

    Raises:
        UserError: If the teacher expects other images or texts than the student's.
    """
    loaded = load_published(teacher.model, teacher.weights)
    if reads_weights():
        check_teacher(loaded, vision, text, prepared)
    loaded.network.logit_scale = nn.Parameter(loaded.network.logit_scale.detach().reshape(1))
    loaded.network.logit_bias = None
    loaded.network.requires_grad_(False)
    return loaded


def check_teacher(
    loaded: PublishedCLIP, vision: VisionSettings, text: TextSettings, prepared: Mapping[str, Any]
) -> None:
    """Check that a teacher takes the student's images, and its tokens unless it has another tokenizer.

    Arguments as of `load_teacher`.
    """
    expected = loaded.preprocessing
    compared: dict[str, tuple[Any, Any]] = {
        "image_size": (vision.image_size, expected.image_size),
        "image_mean": (prepared.get("mean", vision.image_mean), expected.mean),
        "image_std": (prepared.get("std", vision.image_std), expected.std),
    }
    if not has_other_tokens(loaded.network):
        text_tower = getattr(loaded.network, "text", loaded.network)
        compared["max_tokens"] = (text.max_tokens, text_tower.context_length)
        compared["vocab_size"] = (text.vocab_size, text_tower.vocab_size)
    for name, (value, teacher_value) in compared.items():
        if not torch.allclose(torch.tensor(value).double(), torch.tensor(teacher_value).double()):
            raise UserError(
                f"Expected {name} {teacher_value} for the teacher {loaded.model} of {loaded.weights!r}, got {value}: "
                f"set data.{name} to the former, or choose another teacher."
            )


def has_other_tokens(network: Any) -> bool:
    """Return whether a teacher's text tower is an encoder of transformers, which takes other token ids than CLIP's."""
    return isinstance(getattr(network, "text", None), EncoderTower | HFTextEncoder)


def teacher_ids(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the token ids [B, L] of a teacher with another tokenizer than the student's in a training batch.

    Raises:
        UserError: If the batch has none.
    """
    if TEACHER_IDS not in batch:
        raise UserError(
            f"Expected {TEACHER_IDS} in the training batch, the captions by the tokenizer of the teacher, got only "
            f"{', '.join(batch)}: train on a datamodule of pairs, or choose a teacher with CLIP's tokenizer."
        )
    return batch[TEACHER_IDS]


@torch.no_grad()
def teacher_features(
    network: Any, image: Tensor, input_ids: Tensor, micro_batch_size: int | None
) -> tuple[Tensor, ...]:
    """Encode images and texts with the teacher: unnormalized features [B, E] of both."""

    def encode(image: Tensor, input_ids: Tensor) -> tuple[Tensor, ...]:
        return network.encode_image(image), network.encode_text(input_ids)

    return in_slices(encode, micro_batch_size, image, input_ids)


def gathered_features(image: Tensor, text: Tensor, scale: Tensor | float, gradient: bool = False) -> PairFeatures:
    """Return features [B, E] with unit length, of this rank and of all ranks.

    Args:
        image: features of the images.
        text: features of the texts.
        scale: logit scale, 1 / temperature.
        gradient: whether the gradient flows back to the other ranks.
    """
    image = unit(image)
    text = unit(text)
    all_image, all_text = gather(torch.cat([image, text], 1), gradient).chunk(2, 1)
    return PairFeatures(image, text, all_image, all_text, scale)
