"""Files of exported folders, by layout."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...lightning_modules.core.checkpoints import CONFIG_FILE, WEIGHTS_FILE
from ...lightning_modules.networks.clip.files import CONFIG_NAME, WEIGHTS_NAME
from ...lightning_modules.networks.clip.lora import ADAPTER_CONFIG, ADAPTER_FILE

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
LANGUAGE_MODEL = tuple(f"language_model/*.{kind}" for kind in ("json", "safetensors", "txt"))
PRETRAINED = (CONFIG_FILE, WEIGHTS_FILE, *TOKENIZER, "tower.json", *LANGUAGE_MODEL)
"""Patterns of the files that `from_pretrained` reads."""
_CARD = "README.md"


class Layout(NamedTuple):
    """A layout of exported folders.

    Attributes:
        needed: files without which a folder is not of this layout.
        patterns: patterns of all files of the layout.
        holds: whether a configuration, the first of the needed files, is one that `export` wrote.
    """

    needed: tuple[str, ...]
    patterns: tuple[str, ...]
    holds: Callable[[Mapping[str, Any]], bool]


_PROGRAMS = (".pt2", ".onnx", ".onnx.data")
_TOWER = (CONFIG_FILE, WEIGHTS_FILE, "preprocessor_config.json", *TOKENIZER)
LAYOUTS = {
    "vlightning": Layout(
        (CONFIG_FILE, WEIGHTS_FILE), (*PRETRAINED, _CARD), lambda config: "vlightning_version" in config
    ),
    "open_clip": Layout(
        (CONFIG_NAME, WEIGHTS_NAME),
        (CONFIG_NAME, WEIGHTS_NAME, *TOKENIZER, _CARD),
        lambda config: "model_cfg" in config,
    ),
    "transformers": Layout(
        (CONFIG_FILE, WEIGHTS_FILE), (*_TOWER, _CARD), lambda config: config.get("architectures") == ["CLIPModel"]
    ),
    "transformers, two towers": Layout(
        ("image/config.json", "image/model.safetensors", "text/config.json", "projections.safetensors"),
        (*(f"{tower}/{name}" for tower in ("image", "text") for name in _TOWER), "projections.safetensors", _CARD),
        lambda config: config.get("architectures") == ["ViTModel"],
    ),
    "programs": Layout(
        (CONFIG_FILE,),
        (
            CONFIG_FILE,
            "tokenizer.json",
            *(f"{tower}{kind}" for tower in ("image", "text") for kind in _PROGRAMS),
            _CARD,
        ),
        lambda config: "towers" in config and "format" in config,
    ),
    "adapters": Layout(
        (ADAPTER_CONFIG, ADAPTER_FILE),
        (ADAPTER_CONFIG, ADAPTER_FILE, _CARD),
        lambda config: config.get("peft_type") == "LORA",
    ),
}
"""Layouts of `vlightning export` that are folders."""


def layout_of(folder: Path) -> Layout | None:
    """Return the layout of an exported folder; None for any other folder."""
    for layout in LAYOUTS.values():
        if all((folder / name).is_file() for name in layout.needed):
            try:
                config = json.loads((folder / layout.needed[0]).read_text(encoding="utf-8"))
            except ValueError:
                continue
            if isinstance(config, dict) and layout.holds(config):
                return layout
    return None


def files_of(folder: Path) -> list[str]:
    """Return the files of an exported folder that belong to its layout, relative to it; none for any other folder."""
    layout = layout_of(folder)
    found = [] if layout is None else [path for pattern in layout.patterns for path in folder.glob(pattern)]
    inside = folder.resolve()
    return [
        path.relative_to(folder).as_posix()
        for path in sorted(found)
        if path.is_file() and path.resolve().is_relative_to(inside)
    ]
