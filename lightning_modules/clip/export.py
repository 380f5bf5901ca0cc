"""Export of a fine-tuned CLIP: the towers with merged adapters in several layouts, or the adapters alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ...common.errors import UserError
from ...common.files import check_free, replacing, writing
from ..core.settings import settings
from ..networks.clip.export import LAYOUTS as TOWER_LAYOUTS
from ..networks.clip.export import export_network
from ..networks.clip.lora import ADAPTER_CONFIG, ADAPTER_FILE, LoRASettings, adapter_state
from ..networks.clip.weights import STUDENT, below

LAYOUTS = {
    "open_clip": TOWER_LAYOUTS["open_clip"],
    **TOWER_LAYOUTS,
    "adapters": "a folder with the low-rank adapters alone, for model.tuning.lora.weights",
}
"""Description of each layout; the first is the default."""


def export(
    content: Mapping[str, Any], source: str, target: str, layout: str, dtype: torch.dtype = torch.float32
) -> str:
    """Write the towers of a checkpoint, with merged adapters, or the adapters alone.

    Args:
        content: the checkpoint.
        source: where the checkpoint is from, for messages.
        target: a new file or folder, or an empty folder.
        layout: one of `LAYOUTS`.
        dtype: precision of programs.

    Returns:
        A sentence about what was written.

    Raises:
        UserError: If the checkpoint has no adapters, or as `export_network` does.
        OSError: If the target cannot be written.
    """
    if layout != "adapters":
        return export_network(content, source, target, layout, dtype)
    given = content["hyper_parameters"].get("tuning", {}).get("lora")
    if not given:
        raise UserError(f"Expected a training with tuning.lora in {source}, got one without: choose another layout.")
    lora = settings(LoRASettings, given)
    state = adapter_state(below(STUDENT, content["state_dict"]))
    config = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
    folder = Path(target).expanduser().absolute()
    check_free(folder)
    with replacing(folder) as staged, writing(folder):
        staged.mkdir()
        save_file(state, staged / ADAPTER_FILE, {"format": "pt"})
        targets = sorted({".".join(name.split(".lora_")[0].split(".")[-2:]) for name in state})
        text = json.dumps(config | {"target_modules": targets}, indent=2)
        (staged / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")
    numbers = sum(tensor.numel() for tensor in state.values())
    return f"Wrote {target} with {len(state)} adapters of rank {lora.rank}, {numbers:,} numbers."
