"""ALBEF's encoders in the layouts of transformers' ViT and BERT, for contrastive features without this package."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...common.errors import UserError
from ...common.files import check_free, replacing, writing
from ...common.preprocessing import Preprocessing, has_pixels
from ..core.transformers_files import save_tokenizer, without_progress, write_model, write_preprocessing
from .network import ALBEFNetwork, bert_sizes

LAYOUT = (
    "a folder with image/ for transformers' ViTModel, text/ for BertModel (the text layers below the fusion) and "
    "projections.safetensors"
)
"""Description of the layout."""
_MAX_ERROR = 1e-4
_VIT = (
    (r"patch_embed\.proj\.", r"embeddings.patch_embeddings.projection."),
    (r"cls_token", r"embeddings.cls_token"),
    (r"pos_embed", r"embeddings.position_embeddings"),
    (r"blocks\.(\d+)\.norm1\.", r"encoder.layer.\1.layernorm_before."),
    (r"blocks\.(\d+)\.norm2\.", r"encoder.layer.\1.layernorm_after."),
    (r"blocks\.(\d+)\.attn\.proj\.", r"encoder.layer.\1.attention.output.dense."),
    (r"blocks\.(\d+)\.mlp\.fc1\.", r"encoder.layer.\1.intermediate.dense."),
    (r"blocks\.(\d+)\.mlp\.fc2\.", r"encoder.layer.\1.output.dense."),
    (r"norm\.", r"layernorm."),
)


def save_transformers(
    module: Any, record: Mapping[str, Any] | None, folder: str | Path, tokenizer_json: str | None = None
) -> None:
    """Write the encoders of a module's student, atomically; their states are compared with the student's.

    Args:
        module: an `ALBEFModule`.
        record: record of the image preprocessing; None if it is unknown.
        folder: a new or an empty folder.
        tokenizer_json: the tokenizer as JSON text of the `tokenizers` library.

    Raises:
        UserError: If the folder exists and is not empty, or the states differ.
        OSError: If it cannot be written.
    """
    from transformers import BertModel, ViTConfig, ViTModel

    network: ALBEFNetwork = module.student.float().eval()
    vision = module.vision
    trunk = network.text_encoder.bert
    vit = ViTConfig(
        hidden_size=vision.width,
        num_hidden_layers=vision.depth,
        num_attention_heads=vision.heads,
        intermediate_size=int(vision.width * vision.mlp_ratio),
        image_size=vision.image_size,
        patch_size=vision.patch_size,
        layer_norm_eps=1e-6,
    )
    layers = network.text_encoder.fusion_layer
    outside = tuple(f"encoder.layer.{index}." for index in range(layers, len(network.text_encoder.layers)))
    words = {name: tensor for name, tensor in trunk.state_dict().items() if not name.startswith(outside)}
    projections = {
        f"{name}.{parameter}": tensor
        for name, layer in (("image", network.vision_proj), ("text", network.text_proj))
        for parameter, tensor in layer.state_dict().items()
    }
    target = Path(folder).expanduser().absolute()
    check_free(target)
    with replacing(target) as staged, writing(target):
        for encoder in ("image", "text"):
            (staged / encoder).mkdir(parents=True)
        write_model(dict(_vit_state(network.visual_encoder.state_dict())), vit, "ViTModel", staged / "image")
        if has_pixels(record):
            write_preprocessing(Preprocessing.from_dict(record, "the checkpoint"), staged / "image")
        write_model(words, bert_sizes(module.text, layers), "BertModel", staged / "text")
        if tokenizer_json is not None:
            save_tokenizer(tokenizer_json, staged / "text", module.text.special_token_ids, module.text.max_tokens)
        save_file(projections, staged / "projections.safetensors")
        with without_progress():
            image = ViTModel.from_pretrained(staged / "image", add_pooling_layer=False)
            text = BertModel.from_pretrained(staged / "text", add_pooling_layer=False)
        _check(network, image.eval(), text.eval(), module)


def _vit_state(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of timm's ViT under the names of published checkpoints of transformers' ViT."""
    for name, tensor in state.items():
        if match := re.match(r"blocks\.(\d+)\.attn\.qkv\.(\w+)", name):
            for projection, rows in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                yield f"encoder.layer.{match[1]}.attention.attention.{projection}.{match[2]}", rows.clone()
            continue
        for pattern, name_there in _VIT:
            renamed, count = re.subn(rf"^{pattern}", name_there, name)
            if count:
                yield renamed, tensor
                break


@torch.no_grad()
def _check(network: ALBEFNetwork, image: Any, text: Any, module: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    size = module.vision.image_size
    pixels = torch.randn(2, 3, size, size, generator=generator)
    ids = torch.randint(1, module.text.vocab_size, (2, min(8, module.text.max_positions)), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    state_errors = text(input_ids=ids, attention_mask=mask).last_hidden_state - network.encode_text(ids, mask)
    token_errors = image(pixel_values=pixels).last_hidden_state - network.encode_image(pixels)
    error = max(float(token_errors.abs().max()), float(state_errors[mask.bool()].abs().max()))
    if not error < _MAX_ERROR:
        raise UserError(
            f"Expected encoders that transformers computes alike, got states that differ by {error:.1g} with this "
            "version of transformers: install another, or write the layout vlightning."
        )
