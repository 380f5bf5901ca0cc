"""Publishing of an exported folder on the Hugging Face hub: the files of its layout, and no others."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...common.errors import UserError
from ...common.hub import hub_is_reachable
from ...common.messages import say
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


_TOWERS = ("image", "text")
_PROGRAMS = (".pt2", ".onnx", ".onnx.data", ".pte", ".mlpackage/**/*")
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
        (*(f"{tower}/{name}" for tower in _TOWERS for name in _TOWER), "projections.safetensors", _CARD),
        lambda config: config.get("architectures") == ["ViTModel"],
    ),
    "programs": Layout(
        (CONFIG_FILE,),
        (CONFIG_FILE, "tokenizer.json", *(f"{tower}{kind}" for tower in _TOWERS for kind in _PROGRAMS), _CARD),
        lambda config: "towers" in config and "format" in config,
    ),
    "immich": Layout(
        (CONFIG_FILE, "visual/model.onnx", "textual/model.onnx", "visual/preprocess_cfg.json"),
        (
            CONFIG_FILE,
            *(f"{tower}/model.onnx{kind}" for tower in ("visual", "textual") for kind in ("", ".data")),
            "visual/preprocess_cfg.json",
            "textual/tokenizer.json",
            "textual/tokenizer_config.json",
            _CARD,
        ),
        lambda config: "text_cfg" in config and "vision_cfg" in config,
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
    paths = [] if layout is None else [path for pattern in layout.patterns for path in folder.glob(pattern)]
    return [
        path.relative_to(folder).as_posix()
        for path in sorted(paths)
        if path.is_file() and path.resolve().is_relative_to(folder.resolve())
    ]


def push_to_hub(
    folder: str | Path, name: str, *, public: bool = False, existing: bool = False, message: str | None = None
) -> str:
    """Upload the files of an exported folder to a repository of the hub, and return the repository's address.

    Other files in the folder are left out, and counted in a message.

    Args:
        folder: a folder that `vlightning export` or `save_pretrained` wrote, of any layout.
        name: name of the repository, `NAME` or `OWNER/NAME`; without an owner that of the token.
        public: whether anyone may read a new repository; it is private otherwise.
        existing: whether to add a commit to a repository that exists, instead of refusing it.
        message: message of the commit.

    Raises:
        UserError: If there is no such folder, or it is not an export, no token or no network, the name is malformed or
            taken, or the token may not write there.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError

    path = Path(folder).expanduser()
    if not path.is_dir() or not any(path.iterdir()):
        mistake = "an empty folder" if path.is_dir() else "a file" if path.exists() else "nothing there"
        raise UserError(
            f"Expected a folder that `vlightning export` wrote, got {str(folder)!r}, {mistake}: correct the path."
        )
    if not (files := files_of(path)):
        raise UserError(
            f"Expected a folder that `vlightning export` wrote, got {str(folder)!r} without the files of any layout: "
            "export the checkpoint first, or correct the path."
        )
    if get_token() is None:
        raise UserError(
            "Expected a token of the Hugging Face hub that may write, got none: log in with `hf auth login`, or set "
            "HF_TOKEN."
        )
    if not hub_is_reachable():
        raise UserError(
            f"Expected a connection to the Hugging Face hub to push {str(folder)!r}, got none: push it from a machine "
            "with a network, without HF_HUB_OFFLINE."
        )
    api = HfApi(library_name="vlightning")
    try:
        repository = str(api.create_repo(name, private=not public, exist_ok=existing).repo_id)
        api.upload_folder(
            repo_id=repository,
            folder_path=path,
            allow_patterns=files,
            commit_message=message or f"Upload {path.resolve().name}",
        )
    except HFValidationError as error:
        raise UserError(f"Expected a name of the hub, such as me/my-clip, got {name!r}: correct it.") from error
    except Exception as error:  # of the HTTP library, whose types depend on the version
        raise UserError(_refusal(error, name)) from error
    if others := sum(1 for file in path.rglob("*") if file.is_file()) - len(files):
        say(f"Left out {others} files in {path} that `vlightning export` does not write.")
    return f"{api.endpoint}/{repository}"


def _refusal(error: Exception, name: str) -> str:
    """Return a sentence about an answer of the hub."""
    status: Any = getattr(getattr(error, "response", None), "status_code", None)
    if status == 409:
        return (
            f"Expected a new name on the hub, got {name!r}, which exists: give another, or add a commit to it with "
            "--existing."
        )
    if status in (401, 403):
        return (
            f"Expected a token that may write to {name!r} on the hub, got one that may not ({status}): give the token "
            "the right to write, or correct the owner."
        )
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"Expected the hub to accept {name!r}, got an error ({reason}): push it again with --existing."
