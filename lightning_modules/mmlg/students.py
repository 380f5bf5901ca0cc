"""Networks that `MMLGModule` trains, by the name of the student.

The ordinary CLIP, into which a learngene is expanded, is open_clip's. Trained from scratch or in full, it is a baseline
of MM-LG, and its last layers are the learngene of He-LG.
"""

from collections.abc import Mapping
from typing import Any, Literal

import open_clip
from torch import Tensor

from ...callbacks.learngene.expansion import expand_learngene, open_clip_layer
from ...callbacks.learngene.file import Learngene
from ...callbacks.learngene.layers import TOWERS
from ...callbacks.learngene.sizes import LearngeneSizes
from ...common.errors import UserError
from ...common.preprocessing import Preprocessing, training_record
from ..core.memory import in_slices
from ..core.settings import settings
from ..networks.attention import set_clip_attention
from .network import LearngeneCLIP, LinearCLIP, SummedCLIP
from .rules import LAST_LAYERS, MethodName
from .settings import VisionSettings

Student = Literal["MM-LG", "TLEG", "plain"]


def clip_config(sizes: LearngeneSizes) -> dict[str, Any]:
    """Return open_clip's configuration of a CLIP of these sizes."""
    width = sizes.width
    layers = sizes.layers
    vision = {"image_size": sizes.image_size, "layers": layers, "width": width, "head_width": width // sizes.heads}
    text = {"context_length": sizes.max_tokens, "vocab_size": sizes.vocab_size, "width": width, "heads": sizes.heads}
    return {
        "embed_dim": sizes.embed_dim,
        "vision_cfg": vision | {"patch_size": sizes.patch_size},
        "text_cfg": text | {"layers": layers},
    }


class PlainCLIP(open_clip.CLIP):
    """open_clip's CLIP with the interface of `SummedCLIP`, and any number of layers."""

    method: MethodName = "He-LG"

    def __init__(self, sizes: LearngeneSizes) -> None:
        # FSDP2 shards along the first dimension, which a scalar does not have.
        super().__init__(**clip_config(sizes), nonscalar_logit_scale=True)
        self.sizes = sizes
        set_clip_attention(self)

    def encode_pairs(self, image: Tensor, input_ids: Tensor, size: int | None = None) -> tuple[Tensor, Tensor]:
        """Encode images and texts; arguments and result as of `SummedCLIP.encode_pairs`."""
        # The class's own methods, since FSDP2 wraps those of the instance: nested wrappers leave the logit scale
        # sharded.
        encode_image = super().encode_image
        encode_text = super().encode_text

        def encode(image: Tensor, input_ids: Tensor) -> tuple[Tensor, ...]:
            return encode_image(image), encode_text(input_ids)

        images, texts = in_slices(encode, size, image, input_ids)
        return images, texts

    def learngene_tensors(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a state dict that make up the learngene of He-LG: the last layers.

        Raises:
            UserError: If there are fewer layers.
        """
        depth = self.sizes.layers
        if depth < LAST_LAYERS:
            raise UserError(
                f"Expected towers of at least the {LAST_LAYERS} layers of He-LG, got {depth}: train a deeper student."
            )
        return {
            f"layers.{tower}.{layer}.{name}": tensor
            for tower in TOWERS
            for layer in range(LAST_LAYERS)
            for name, tensor in open_clip_layer(state, tower, depth - LAST_LAYERS + layer).items()
        }


def as_clip(student: SummedCLIP | PlainCLIP) -> PlainCLIP:
    """Return an auxiliary as the ordinary CLIP of full depth that it computes; return an ordinary CLIP unchanged."""
    if isinstance(student, PlainCLIP):
        return student
    clip = PlainCLIP(student.sizes)
    state = {name: tensor.detach() for name, tensor in student.state_dict().items()}
    expand_learngene(Learngene(state, student.sizes, student.method), clip)
    return clip.eval()


NETWORKS: dict[str, type[SummedCLIP] | type[PlainCLIP]] = {
    "MM-LG": LearngeneCLIP,
    "TLEG": LinearCLIP,
    "plain": PlainCLIP,
}
"""Network of each student."""


def student_preprocessing(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return how evaluation prepared images in a training, as a record.

    Without a datamodule of this package, the module's settings are used.

    Args:
        content: the checkpoint.
    """
    vision = settings(VisionSettings, content["hyper_parameters"]["vision"])
    default = Preprocessing(vision.image_size, vision.image_mean, vision.image_std, "bicubic")
    return training_record(content, vision.image_size, lambda: default)
