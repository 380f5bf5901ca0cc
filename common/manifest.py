"""Manifests beside shards: what decided their content, compared before a run adds to them."""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any

from .errors import UserError
from .files import replacing

MANIFEST = "manifest.json"
SOFTWARE = ("vlightning", "torch", "torchvision", "pillow", "open_clip_torch", "transformers", "lightning")
"""Distributions that decide features, captions and images."""


def plain_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as they are read from a JSON file."""
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain


def differences(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the names of differing settings, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() | new.keys():
            yield from differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{name}[{number}]")
    elif old != new:
        yield name, old, new


def check_settings(kept: Mapping[str, Any], settings: Mapping[str, Any], what: str, advice: str) -> None:
    """Check that shards were written with the settings of this run.

    Args:
        kept: the manifest, as it was read.
        settings: those of this run.
        what: that the shards of a folder were written, for the message.
        advice: what may be given instead.

    Raises:
        UserError: If a setting differs.
    """
    current = plain_json(settings)
    differing = sorted(differences({name: kept.get(name) for name in current}, current), key=itemgetter(0))
    if not differing:
        return
    name, old, new = differing[0]
    more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    raise UserError(f"Expected {name} {old}, with which {what}, got {new}{more}: give {advice}.")


def check_space(folder: Path, needed: float, advice: str, what: str = "") -> int:
    """Check that a folder has room for shards; return the free bytes.

    Args:
        folder: the folder, which exists.
        needed: about how many bytes are going to be written.
        advice: what takes less room.
        what: what is going to be written, for the message.

    Raises:
        UserError: If there is less.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"Expected room for {what}about {byte_size(needed)} in {str(folder)!r}, got {byte_size(free)} of free "
            f"space: make room, or {advice}."
        )
    return free


def software_versions(distributions: Sequence[str] = SOFTWARE) -> dict[str, str]:
    """Return the version of Python and of the distributions that decide the content of shards."""
    return {"python": sys.version.split()[0]} | {name: version(name) for name in distributions}


def changed_software(manifest: Mapping[str, Any]) -> list[str]:
    """Return what has another version than in the run that wrote a manifest, as in `torch 2.0 (now 2.1)`."""
    saved = manifest.get("software", {})
    now = software_versions()
    return [f"{name} {saved.get(name)} (now {now[name]})" for name in now if saved.get(name) != now[name]]


def write_manifest(path: Path, settings: Mapping[str, Any], complete: bool, **counts: Any) -> None:
    """Write a manifest atomically.

    Args:
        path: the file.
        settings: what decides the content of the shards, plain data.
        complete: whether all shards are written.
        **counts: what they hold, plain data.
    """
    content = {"format": 1, "complete": complete, **settings, **counts, "software": software_versions()}
    with replacing(path) as staged:
        staged.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def byte_size(count: float) -> str:
    """Return a number of bytes with its unit, as in `1.2 GB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
