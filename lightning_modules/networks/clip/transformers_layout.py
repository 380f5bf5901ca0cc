"""A pair of plain towers in the layout of `transformers.CLIPModel`."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from open_clip import CLIP, CustomTextCLIP
from torch import Tensor

from ....common.clip_vocabulary import CLIP_VOCABULARY, clip_tokenizer_json
from ....common.errors import UserError
from ....common.files import check_free, replacing, writing
from ....common.preprocessing import Preprocessing
from ...core.precision import unit
from ...core.transformers_files import save_tokenizer, without_progress, write_model, write_preprocessing

LAYOUT = (
    "a folder that transformers' CLIPModel (of plain ViTs) or VisionTextDualEncoderModel (of two towers of one's own), "
    "AutoImageProcessor and AutoTokenizer load"
)
"""Description of the layout."""
_MAX_ERROR = 1e-4  # of unit-length features

_NAMES = (
    (r"visual\.class_embedding", "vision_model.embeddings.class_embedding"),
    (r"visual\.conv1\.weight", "vision_model.embeddings.patch_embedding.weight"),
    (r"visual\.positional_embedding", "vision_model.embeddings.position_embedding.weight"),
    (r"visual\.ln_pre\.", "vision_model.pre_layrnorm."),
    (r"visual\.ln_post\.", "vision_model.post_layernorm."),
    (r"visual\.transformer\.resblocks\.", "vision_model.encoder.layers."),
    (r"(text\.)?token_embedding\.", "text_model.embeddings.token_embedding."),
    (r"(text\.)?positional_embedding", "text_model.embeddings.position_embedding.weight"),
    (r"(text\.)?transformer\.resblocks\.", "text_model.encoder.layers."),
    (r"(text\.)?ln_final\.", "text_model.final_layer_norm."),
)
_OF_LAYERS = {
    ".ln_1.": ".layer_norm1.",
    ".ln_2.": ".layer_norm2.",
    ".attn.out_proj.": ".self_attn.out_proj.",
    ".mlp.c_fc.": ".mlp.fc1.",
    ".mlp.c_proj.": ".mlp.fc2.",
}
_PROJECTIONS = {
    "visual.proj": "visual_projection.weight",
    "text_projection": "text_projection.weight",
    "text.text_projection": "text_projection.weight",
}


def save_transformers(model: CLIP | CustomTextCLIP, preprocessing: Preprocessing, folder: str | Path) -> None:
    """Write a folder for `transformers.CLIPModel`, atomically; its features are compared with the model's.

    The folder has CLIP's tokenizer if the model has its vocabulary. A logit bias is left out: `CLIPModel` has none.

    Args:
        model: the network, in eval mode.
        preprocessing: its image preprocessing.
        folder: a new or an empty folder.

    Raises:
        UserError: If the towers are not those of `CLIPModel`, or the folder exists and is not empty.
        OSError: If it cannot be written.
    """
    from transformers import CLIPModel

    state = dict(_renamed(model.state_dict()))
    config = _config(model, preprocessing.image_size)
    target = Path(folder).expanduser().absolute()
    check_free(target)
    with replacing(target) as staged, writing(target):
        staged.mkdir()
        write_model(state, config, "CLIPModel", staged)
        write_preprocessing(preprocessing, staged)
        if model.vocab_size == CLIP_VOCABULARY:
            save_tokenizer(clip_tokenizer_json(), staged, {}, model.context_length)
        try:
            with without_progress():
                written = CLIPModel.from_pretrained(staged)
            _check(model, written, preprocessing.image_size)
        except RuntimeError as error:  # of tensors of other shapes
            raise _not_plain(str(error).splitlines()[0]) from error


def _renamed(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in state.items():
        if name == "logit_bias":
            continue
        if name == "logit_scale":
            yield name, tensor.reshape(())
        elif name in _PROJECTIONS:
            yield _PROJECTIONS[name], tensor.T
        elif name.endswith((".attn.in_proj_weight", ".attn.in_proj_bias")):
            kind = name.rpartition("_")[2]
            start = _of(name).partition(".attn.in_proj_")[0]
            for letter, rows in zip("qkv", tensor.chunk(3), strict=True):
                yield f"{start}.self_attn.{letter}_proj.{kind}", rows.clone()
        else:
            yield _of(name), tensor


def _of(name: str) -> str:
    """Return the name of a tensor in transformers."""
    for pattern, name_there in _NAMES:
        if match := re.match(pattern, name):
            name = name_there + name[match.end() :]
            for name_here, name_in_layer in _OF_LAYERS.items():
                name = name.replace(name_here, name_in_layer)
            return name
    raise _not_plain(f"the tensor {name}")


def _config(model: Any, image_size: int) -> Any:
    from transformers import CLIPConfig

    text = getattr(model, "text", model)
    visual = model.visual
    vocabulary = model.vocab_size
    shared = {"projection_dim": visual.proj.shape[1]}
    return CLIPConfig(
        text_config=_tower(text.transformer)
        | shared
        | {
            "vocab_size": vocabulary,
            "max_position_embeddings": model.context_length,
            "bos_token_id": vocabulary - 2,
            "eos_token_id": vocabulary - 1,  # open_clip pools the token of the highest id
            "pad_token_id": vocabulary - 1,
        },
        vision_config=_tower(visual.transformer)
        | shared
        | {"image_size": image_size, "patch_size": visual.conv1.kernel_size[0]},
        **shared,
    )


def _tower(transformer: Any) -> dict[str, Any]:
    block = transformer.resblocks[0]
    return {
        "hidden_size": block.attn.embed_dim,
        "num_hidden_layers": len(transformer.resblocks),
        "num_attention_heads": block.attn.num_heads,
        "intermediate_size": block.mlp.c_fc.out_features,
        "hidden_act": "quick_gelu" if type(block.mlp.gelu).__name__ == "QuickGELU" else "gelu",
        "layer_norm_eps": block.ln_1.eps,
    }


@torch.no_grad()
def _check(model: Any, written: Any, size: int) -> None:
    """Compare features of random inputs.

    Raises:
        UserError: If they differ.
    """
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(2, 3, size, size, generator=generator)
    end = model.vocab_size - 1
    texts = torch.randint(1, end, (2, model.context_length), generator=generator)
    texts[:, -1] = texts[1, model.context_length // 2] = end
    texts[1, model.context_length // 2 + 1 :] = 0
    outputs = written.float().eval()(input_ids=texts, pixel_values=image)
    network = model.float().eval()
    pairs = (
        (outputs.image_embeds, network.encode_image(image)),
        (outputs.text_embeds, network.encode_text(texts)),
    )
    error = max(float((unit(features) - unit(expected)).abs().max()) for features, expected in pairs)
    if not error < _MAX_ERROR:
        raise _not_plain(f"features that differ by {error:.1g} from those of CLIPModel with the same weights")


def _not_plain(obstacle: str) -> UserError:
    return UserError(
        "Expected open_clip's ViT and causal text tower for transformers' CLIPModel, without layer scales, attention "
        f"pooling and biases of projections, got {obstacle}: write another layout."
    )
