"""Export of a training of a pair of towers, in several layouts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ....common.errors import UserError
from ....common.preprocessing import Preprocessing, described, recorded_preprocessing
from ....common.tokenizers import saved_tokenizer, with_prefix
from ...core.programs import LAYOUTS as PROGRAMS
from .dual_encoder_layout import save_dual_encoder
from .files import save_open_clip, save_vendor
from .models import model_config
from .preprocessing import preprocessing_of_training
from .programs import export_towers
from .shapes import resolved, text_prefix_of
from .text_encoder import EncoderTower
from .transformers_layout import LAYOUT as TRANSFORMERS
from .transformers_layout import save_transformers
from .weights import network_of_training

LAYOUTS = {
    **PROGRAMS,
    "open_clip": "a folder that open_clip.create_model_and_transforms('local-dir:<folder>') loads",
    "transformers": TRANSFORMERS,
    "vendor": "a .pt file as the vendor's code and model.weights load it, of MobileCLIP-S0, -S1, -S2 and -B",
}
"""Description of each layout."""


def export_network(
    content: Mapping[str, Any], source: str, target: str, layout: str, dtype: torch.dtype = torch.float32
) -> str:
    """Write the network of a checkpoint: the moving average if there is one, else the student.

    Args:
        content: the checkpoint.
        source: where the checkpoint is from, for messages.
        target: a new file or folder, or an empty folder.
        layout: one of `LAYOUTS`.
        dtype: precision of programs.

    Returns:
        A sentence about what was written.

    Raises:
        UserError: If the checkpoint does not fit its own arguments, the model has no such layout, the target is a
            folder instead of a file, or the exported features differ from the network's.
        OSError: If the target cannot be written.
    """
    network, kind = network_of_training(content, source)
    arguments = content["hyper_parameters"]
    name, size = resolved(arguments["model"]), arguments["vision"]["image_size"]
    record = preprocessing_of_training(content)
    tokenizer = None
    note = ""
    if isinstance(network.text, EncoderTower):
        tokenizer, note = saved_tokenizer(content, model_config(name)["text_cfg"].get("hf_tokenizer_name"))
        prefix = text_prefix_of(name)
        if tokenizer is not None:
            tokenizer = with_prefix(tokenizer, prefix)
        elif prefix:
            note += f", which would put {prefix!r} before each text"
    if layout == "vendor":
        if Path(target).is_dir():
            raise UserError(f"Expected the name of a new file, such as student.pt, got the folder {target!r}.")
        save_vendor(network, target)
    elif layout == "open_clip":
        save_open_clip(network, name, Preprocessing.from_dict(record, source), target, tokenizer)
    elif layout == "transformers":
        prepared = Preprocessing.from_dict(record, source)
        if isinstance(network.text, EncoderTower):
            timm_name = str(model_config(name)["vision_cfg"].get("timm_model_name"))
            save_dual_encoder(network, timm_name, prepared, target, tokenizer)
        else:
            save_transformers(network, prepared, target)
    else:
        size = size or model_config(name)["vision_cfg"]["image_size"]
        options: Any = {"preprocessing": record, "tokenizer": tokenizer, "dtype": dtype}
        export_towers(network, target, layout, size, **options)
    assumed = recorded_preprocessing(content) is None
    unsure = " (by the arguments of its module, since no datamodule of this package has evaluated it)" * assumed
    without = f" {note}" if note and tokenizer is None else ""
    return f"Wrote {target} with the {kind} of {name} in the layout {layout!r}{without}; {described(record)}{unsure}."
