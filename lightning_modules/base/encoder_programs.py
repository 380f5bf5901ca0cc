"""Export of a module's encoders of images and texts as programs that run without this project."""

import copy
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ...common.preprocessing import described, recorded_preprocessing
from ...common.tokenizers import saved_tokenizer, with_prefix
from ..core.programs import Tower, example_images, example_texts, padding_tokenizer, write_programs
from .exported import rebuild
from .model_card import expected_tokenizer_of


class _Images(nn.Module):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, image: Tensor) -> Tensor:
        dtype = next(self.module.parameters()).dtype
        features: Tensor = self.module.encode_images(image.to(dtype))[0]
        return features.to(dtype)


class _Texts(nn.Module):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        features: Tensor = self.module.encode_texts(input_ids, attention_mask)
        return features.to(next(self.module.parameters()).dtype)


def export_encoders(
    cls: type[Any],
    content: Mapping[str, Any],
    source: str,
    target: str,
    layout: str,
    dtype: torch.dtype = torch.float32,
) -> str:
    """Write the image encoder and the text encoder of a checkpoint as programs for batches of any size.

    Texts have a fixed number of tokens, to which `tokenizer.json` pads and cuts them. It does not clean captions as
    `data.clean_captions` does.

    Args:
        cls: class of the module: `encode_images` returns features [B, E] first, `encode_texts` takes ids and mask.
        content: the checkpoint.
        source: description of the checkpoint for messages.
        target: name of a new folder.
        layout: the format of the programs.
        dtype: their precision, as in `write_programs`.

    Returns:
        A sentence for the log.

    Raises:
        UserError: As in `write_programs`.
    """
    module = rebuild(cls, content["hyper_parameters"], content["state_dict"], source).float().eval()
    module.requires_grad_(False)
    data = content.get("datamodule_hyper_parameters") or {}
    sizes = module.data_sizes()
    length = data.get("max_tokens") or sizes.max_tokens
    words = sizes.vocab_size
    pad = module.text.special_token_ids["pad"]
    ids, mask = example_texts(length, words, start=1, end=2)
    ids = torch.where(mask.bool(), ids.where(ids != pad, pad + 1), pad)
    towers = [
        Tower("image", _Images(copy.deepcopy(module)), {"image": example_images(module.expected_image_size())}),
        Tower("text", _Texts(module), {"input_ids": ids, "attention_mask": mask}),
    ]
    for tower in towers:
        _remove_unused(tower)
    record = recorded_preprocessing(content)
    tokenizer, note = saved_tokenizer(content, expected_tokenizer_of(module))
    config = {"class": cls.__name__, "context_length": length, "vocab_size": words, "preprocessing": record or {}}
    if prefix := getattr(module, "text_prefix", ""):
        config["prefix"] = prefix
        if tokenizer is not None and layout == "immich":  # which adds none
            tokenizer = with_prefix(tokenizer, prefix)
    padding = None if tokenizer is None else padding_tokenizer(tokenizer, length, pad)
    write_programs(towers, target, layout, config, padding, dtype)
    return f"Wrote {target} with the encoders of {cls.__name__} in the layout {layout!r}, {note}; {described(record)}."


def _remove_unused(tower: Tower) -> None:
    """Remove tensors that a tower does not read, which programs of torch.export keep: teacher, queues, other tower."""
    program = torch.export.export(tower.module, tuple(tower.inputs.values()), strict=False)
    read = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    tensors = {name: attrgetter(path)(tower.module) for name, path in names.items()}
    kept = {id(tensors[name]) for name in tensors.keys() & read}  # by identity: tied tensors have two names
    for name, path in names.items():
        if id(tensors[name]) not in kept:
            layer, _, attribute = path.rpartition(".")
            setattr(tower.module.get_submodule(layer), attribute, None)
