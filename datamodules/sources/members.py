"""What the members of a sample in a tar shard contain, by the kinds that the ends of their names tell."""

from __future__ import annotations

import json

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".avif", ".jp2")
TEXT_KEYS = ("txt", "text", "caption", "cap")
_LONGEST_UID = 1024  # indexes keep the uids in an array of fixed width


def caption_of(members: dict[str, bytes]) -> list[str]:
    """Return the real caption in a list, which is empty if there is none."""
    data = next((members[kind] for kind in TEXT_KEYS if kind in members), None)
    return [] if data is None else [data.decode("utf-8", errors="replace")]


def uid_of(members: dict[str, bytes]) -> str:
    """Return the entry ``uid`` of a sample's ``json``, empty if there is no usable one."""
    uid = json_of(members, "json").get("uid")
    return str(uid) if isinstance(uid, (str, int)) and len(str(uid)) <= _LONGEST_UID else ""


def json_of(members: dict[str, bytes], kind: str) -> dict[str, object]:
    """Return the JSON object in a member, empty if there is none."""
    try:
        value = json.loads(members.get(kind, b"{}"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
