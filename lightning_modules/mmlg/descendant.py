"""What a learngene is expanded into: open_clip's CLIP.

From scratch, or trained in full, it is what MM-LG is compared with, and its last layers are the learngene of He-LG.
"""

from typing import Any

import open_clip
from torch import Tensor

from ...callbacks.learngene.expansion import open_clip_layer
from ...callbacks.learngene.file import LearngeneSizes
from ...callbacks.learngene.layers import LAST, TOWERS, Method
from ..memory import in_slices
from ..networks.attention import set_clip_attention


def clip_config(sizes: LearngeneSizes) -> dict[str, Any]:
    """What open_clip makes a CLIP of these sizes of."""
    width, layers = sizes.width, sizes.layers
    vision = {"image_size": sizes.image_size, "layers": layers, "width": width, "head_width": width // sizes.heads}
    text = {"context_length": sizes.max_tokens, "vocab_size": sizes.vocab_size, "width": width, "heads": sizes.heads}
    return {
        "embed_dim": sizes.embed_dim,
        "vision_cfg": vision | {"patch_size": sizes.patch_size},
        "text_cfg": text | {"layers": layers},
    }


class PlainCLIP(open_clip.CLIP):
    """open_clip's CLIP of an auxiliary's sizes, with layers of its own.

    Args:
        sizes: of both towers; any number of layers.
    """

    method: Method = "He-LG"

    def __init__(self, sizes: LearngeneSizes) -> None:
        # FSDP2 shards along the first dimension, and a number has none.
        super().__init__(**clip_config(sizes), nonscalar_logit_scale=True)
        self.sizes = sizes
        set_clip_attention(self)

    def encode_pairs(self, image: Tensor, input_ids: Tensor, size: int | None = None) -> tuple[Tensor, Tensor]:
        """Features [B, E], not normalised, of images [B, 3, S, S] and of texts [B, L].

        Args:
            image: of all pairs.
            input_ids: long, of all pairs.
            size: pairs that go through the towers at a time, as in `in_slices`.
        """
        # Not its own two, which FSDP2 wraps: one wrapper in another leaves the scale of the logits sharded.
        encode_image, encode_text = super().encode_image, super().encode_text

        def encode(image: Tensor, input_ids: Tensor) -> tuple[Tensor, ...]:
            return encode_image(image), encode_text(input_ids)

        images, texts = in_slices(encode, size, image, input_ids)
        return images, texts

    def learngene_tensors(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What of the state dict belongs into a file of He-LG: the last layers.

        Raises:
            ValueError: if it has fewer.
        """
        depth = self.sizes.layers
        if depth < LAST:
            raise ValueError(
                f"Found towers of {depth} layers, expected at least the {LAST} of He-LG: train a deeper one."
            )
        return {
            f"layers.{tower}.{layer}.{name}": tensor
            for tower in TOWERS
            for layer in range(LAST)
            for name, tensor in open_clip_layer(state, tower, depth - LAST + layer).items()
        }
