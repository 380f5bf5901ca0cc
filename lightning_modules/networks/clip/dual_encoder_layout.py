"""A pair of an image network of timm and a text encoder in the layout of `transformers.VisionTextDualEncoderModel`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from open_clip import CustomTextCLIP
from open_clip.hf_model import ClsPooler
from open_clip.timm_model import TimmModel
from torch import Tensor, nn

from ....common.errors import UserError
from ....common.files import check_free, replacing, writing
from ....common.preprocessing import Preprocessing
from ...core.precision import unit
from ...core.transformers_files import (
    save_tokenizer,
    special_token_ids,
    without_progress,
    write_model,
    write_preprocessing,
)
from .text_encoder import EncoderTower

_MAX_ERROR = 1e-4  # of unit-length features
_BEGINS = {
    "visual.trunk.": "vision_model.timm_model.",
    "visual.head.proj.": "visual_projection.",
    "text.transformer.": "text_model.",
    "text.proj.": "text_projection.",
}


def save_dual_encoder(
    model: CustomTextCLIP, image_tower: str, preprocessing: Preprocessing, folder: str | Path, tokenizer: str | None
) -> None:
    """Write a folder for `transformers.VisionTextDualEncoderModel`, atomically; its features are compared.

    Args:
        model: the pair, in eval mode.
        image_tower: timm's name of the image tower.
        preprocessing: the image preprocessing.
        folder: a new or an empty folder.
        tokenizer: the tokenizer as JSON text; None writes none.

    Raises:
        UserError: If that class cannot express the towers, or the folder exists and is not empty.
        OSError: If it cannot be written.
    """
    from transformers import VisionTextDualEncoderModel

    _check_towers(model)
    config = _config(model, image_tower, preprocessing.image_size)
    target = Path(folder).expanduser().absolute()
    check_free(target)
    with replacing(target) as staged, writing(target):
        staged.mkdir()
        write_model(dict(_renamed(model)), config, "VisionTextDualEncoderModel", staged)
        write_preprocessing(preprocessing, staged)
        if tokenizer is not None:
            save_tokenizer(tokenizer, staged, special_token_ids(tokenizer), model.context_length)
        with without_progress():
            written, report = VisionTextDualEncoderModel.from_pretrained(staged, output_loading_info=True)
        if report["missing_keys"]:
            raise _refused(f"a tower without {sorted(report['missing_keys'])[0]}")
        _check_features(model, written, preprocessing.image_size)


def _check_towers(model: CustomTextCLIP) -> None:
    text: Any = model.text
    if not isinstance(model.visual, TimmModel) or not isinstance(text, EncoderTower):
        raise _refused("other towers")
    if not isinstance(text.pooler, ClsPooler) or getattr(text.transformer, "pooler", None) is None:
        raise _refused("a pooling without the encoder's own pooling layer")
    if not isinstance(getattr(model.visual.head, "proj", None), nn.Linear) or not isinstance(text.proj, nn.Linear):
        raise _refused("a projection by an MLP")


def _refused(obstacle: str) -> UserError:
    return UserError(
        "Expected an image network of timm and a text encoder with the pooling pooler, both with a linear projection, "
        f"for transformers' VisionTextDualEncoderModel, got {obstacle}: write another layout."
    )


def _config(model: CustomTextCLIP, image_tower: str, image_size: int) -> Any:
    from transformers import TimmWrapperConfig, VisionTextDualEncoderConfig

    visual: Any = model.visual
    text: Any = model.text
    options = {"img_size": image_size} if hasattr(visual.trunk, "patch_embed") else None
    vision = TimmWrapperConfig(architecture=image_tower, model_args=options, num_labels=0)
    sizes = {"hidden_size": visual.head.proj.in_features}
    return VisionTextDualEncoderConfig(
        vision_config=vision.to_dict() | sizes,
        text_config=text.transformer.config.to_dict(),
        projection_dim=text.proj.out_features,
    )


def _renamed(model: CustomTextCLIP) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in model.state_dict().items():
        if name == "logit_scale":
            yield name, tensor.reshape(())
        for begin, there in _BEGINS.items():
            if name.startswith(begin):
                yield there + name.removeprefix(begin), tensor


@torch.no_grad()
def _check_features(model: Any, written: Any, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(2, 3, size, size, generator=generator)
    pad = model.text.pad_token_id
    ids = torch.randint(pad + 1, model.vocab_size, (2, model.context_length), generator=generator)
    ids[1, model.context_length // 2 :] = pad
    outputs = written.float().eval()(input_ids=ids, attention_mask=(ids != pad).long(), pixel_values=image)
    network = model.float().eval()
    pairs = (
        (outputs.image_embeds, network.encode_image(image)),
        (outputs.text_embeds, network.encode_text(ids)),
    )
    error = max(float((unit(features) - unit(expected)).abs().max()) for features, expected in pairs)
    if not error < _MAX_ERROR:
        raise _refused(f"features that differ by {error:.1g} from those of that class with the same weights")
