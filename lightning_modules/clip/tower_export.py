"""Export of a new tower alone, for an application that takes only one: its weights, its space, its tokenizer."""

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

from ...common.errors import UserError
from ...common.files import check_free, replacing, writing
from ...common.preprocessing import described
from ...common.tokenizers import saved_tokenizer
from ..core.checkpoints import CONFIG_FILE, WEIGHTS_FILE, read_folder
from ..core.fitting import load_fitting
from ..core.settings import plain, settings
from ..core.towers import SPACE, Space
from ..core.transformers_files import save_tokenizer, special_token_ids
from ..networks.clip.models import build_model, build_new_tower, model_config
from ..networks.clip.new_tower import TOWERS, NewTower
from ..networks.clip.preprocessing import preprocessing_of_training
from ..networks.clip.shapes import resolved, text_prefix_of
from ..networks.clip.weights import below, network_of_training

LAYOUT = "tower"
"""Name of the layout."""
DESCRIPTION = "a folder with the new tower alone and its space, for queries in an index, or as weights of a tower"
CLASS = "NewTower"
"""`class` in the configuration of such a folder."""


class OneTower(NamedTuple):
    """A tower that was exported alone, in eval mode.

    Attributes:
        tower: images [B, 3, S, S] or token ids [B, L] to features [B, E].
        side: `image` or `text`.
        space: the space of its embeddings.
        preprocessing: record of the preprocessing of its images; None for a text tower.
        prefix: text before each text.
        padding: id of the padding token of a text tower.
    """

    tower: nn.Module
    side: Literal["image", "text"]
    space: Space
    preprocessing: dict[str, Any] | None
    prefix: str
    padding: int


def export_tower(content: Mapping[str, Any], source: str, target: str) -> str:
    """Write the new tower of a checkpoint to a new folder, and return a sentence about it.

    Args:
        content: the checkpoint.
        source: where it is from, for messages.
        target: the folder.

    Raises:
        UserError: If the checkpoint names no space, or the folder exists and is not empty.
        OSError: If it cannot be written.
    """
    network: Any
    network, _ = network_of_training(content, source)
    arguments = content["hyper_parameters"]
    model = resolved(arguments["model"])
    pair = arguments.get("pair")
    side: Literal["image", "text"]
    if isinstance(model, NewTower) and (pair is None or pair["side"] == model.side):
        side, name = model.side, str(model.tower)
        fields = plain({"model": NewTower(model.image, model.text)})
    else:  # the tower of another pair, whose description has the embedding dimension
        side, name = pair["side"], f"that of {resolved(pair['of'])}"
        fields = {"model": pair["of"], "side": side}
    config = model_config(model)
    fields["embed_dim"] = config["embed_dim"]
    expected = config["text_cfg"].get("hf_tokenizer_name") if side == "text" else None
    return write_tower(content, source, target, getattr(network, TOWERS[side]), side, name, fields, expected)


def write_tower(
    content: Mapping[str, Any],
    source: str,
    target: str,
    tower: Any,
    side: Literal["image", "text"],
    name: str,
    fields: Mapping[str, Any],
    expected: str | None = None,
) -> str:
    """Write a tower to a new folder, and return a sentence about it.

    Args:
        content: the checkpoint.
        source: as in `export_tower`.
        target: as in `export_tower`.
        tower: the tower.
        side: which one it is.
        name: its name, for the model card.
        fields: its description, as `load_tower` reads it.
        expected: folder or hub name of its tokenizer, for a checkpoint that names none.

    Raises:
        UserError: As `export_tower` does.
        OSError: If it cannot be written.
    """
    space = Space.of(content)
    if space is None:
        raise UserError(f"Expected the space of the tower in {source}, got none: it was not trained; train it first.")
    attribute = TOWERS[side]
    record = preprocessing_of_training(content) if side == "image" else None
    tokens = tower.context_length if side == "text" else None
    config = {
        "class": CLASS,
        "vlightning_version": version("vlightning"),
        "arguments": {
            **fields,
            "image_size": None if record is None else record["image_size"],
            "max_tokens": tokens,
        },
        "preprocessing": record,
        SPACE: space.as_dict(),
    }
    folder = Path(target).expanduser().absolute()
    check_free(folder)
    tokenizer = None
    if side == "text":
        tokenizer, note = saved_tokenizer(content, expected)
        if tokenizer is None:
            raise UserError(f"Expected the tokenizer of the tower in {source}, got one {note}: train it again.")
    numbers = sum(weight.numel() for weight in tower.parameters())
    images = "" if record is None else f"\n\nImages: {described(record)}."
    card = (
        f"# {folder.name}\n\nA new {side} tower ({name}) of vlightning, {numbers:,} parameters, without the "
        f"other tower of its pair.{images}\n\n## Space\n\n{space.described()}\n"
    )
    with replacing(folder) as staged, writing(folder):
        staged.mkdir()
        state = {f"{attribute}.{key}": tensor.contiguous() for key, tensor in tower.state_dict().items()}
        save_file(state, staged / WEIGHTS_FILE, {"format": "pt"})
        (staged / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (staged / "README.md").write_text(card, encoding="utf-8")
        if tokenizer is not None:
            save_tokenizer(tokenizer, staged, special_token_ids(tokenizer), tokens)
    return f"Wrote {target} with the new {side} tower of the space {space.fingerprint}, {numbers:,} parameters."


def load_tower(folder: Path) -> OneTower:
    """Build the tower of a folder of `export_tower`.

    Raises:
        UserError: If the folder is damaged.
    """
    config, state = read_folder(folder)
    arguments = config["arguments"]
    sizes = arguments["image_size"], arguments["max_tokens"]
    tower: Any
    if "side" in arguments:
        side, prefix = arguments["side"], ""
        tower = getattr(build_model(arguments["model"], *sizes), TOWERS[side])
    else:
        new = settings(NewTower, arguments["model"])
        side, prefix = new.side, text_prefix_of(new)
        tower = build_new_tower(new, arguments["embed_dim"], *sizes)
    load_fitting(tower, below(f"{TOWERS[side]}.", state), f"the tower of {str(folder)!r}")
    space = Space.of(config)
    assert space is not None
    padding = getattr(tower, "pad_token_id", 0)  # open_clip's own towers are padded with 0
    return OneTower(tower.to(torch.float32).eval(), side, space, config.get("preprocessing"), prefix, padding)
