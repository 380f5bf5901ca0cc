"""Content of the members of a sample in a tar shard.

The kind of a member is what follows the first dot of its name, such as `jpg` or `syn.json`.
"""

from __future__ import annotations

import json

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".avif", ".jp2")
TEXT_KEYS = ("txt", "text", "caption", "cap")
_MAX_UID_LENGTH = 1024  # indexes hold the uids in an array of fixed width


def caption_of(members: dict[str, bytes]) -> list[str]:
    """Return a list with the real caption, or an empty list if there is none."""
    data = next((members[kind] for kind in TEXT_KEYS if kind in members), None)
    return [] if data is None else [data.decode("utf-8", errors="replace")]


def uid_of(members: dict[str, bytes]) -> str:
    """Return the entry `uid` of the member `json`, or an empty string if there is no usable one."""
    uid = json_of(members, "json").get("uid")
    return str(uid) if isinstance(uid, (str, int)) and len(str(uid)) <= _MAX_UID_LENGTH else ""


def json_of(members: dict[str, bytes], kind: str) -> dict[str, object]:
    """Return the JSON object in a member, or an empty one if there is none."""
    try:
        value = json.loads(members.get(kind, b"{}"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
