"""URLs whose secrets are kept apart from them, so that no setting holds a secret.

Settings hold a URL with `removed` in place of its user info and of its query: `https://removed@host/pairs.tar?removed`.
The whole URLs are in the environment variable `VLIGHTNING_URLS`, which loader workers and launched processes inherit,
and which the user sets for a run that resumes. Only a read completes a URL, by `whole`.
"""

import argparse
import copy
import os
import re
from collections.abc import Mapping
from typing import Any

from .errors import UserError
from .shown import VARIABLE, WHOLE_URL, urls_with_secrets, without_secrets

REMOVED = "removed"
_START = re.compile(r"(?:[a-z0-9]+::)*[a-zA-Z][a-zA-Z0-9+.-]*://")


def hidden(value: Any) -> Any:
    """Return settings whose URLs have `removed` in place of their secrets.

    Args:
        value: a setting: a text, or nested lists and mappings, which are copied; other values are returned as they are.
    """
    if isinstance(value, str):
        return WHOLE_URL.sub(lambda url: without_secrets(url, REMOVED), value) if _is_url(value) else value
    if isinstance(value, argparse.Namespace):
        copied = copy.copy(value)
        vars(copied).update({name: hidden(item) for name, item in vars(value).items()})
        return copied
    if isinstance(value, Mapping):
        return {name: hidden(item) for name, item in value.items()}
    return type(value)(hidden(item) for item in value) if type(value) in (list, tuple) else value


def keep(value: Any) -> Any:
    """Return settings as `hidden` does, and keep the whole URLs for the reads of this process and of its children.

    Raises:
        UserError: If two URLs of the settings differ in their secrets only.
    """
    urls = dict[str, str]()
    for url in texts_in(value):
        if (name := hidden(url)) != url and urls.setdefault(name, url) != url:
            raise UserError(
                f"Expected one user and query of {name!r}, got two, which the files of a run could not tell apart: "
                "give copies with other names."
            )
    if urls:
        others = [url for url in urls_with_secrets() if hidden(url) not in urls]
        os.environ[VARIABLE] = "\n".join([*urls.values(), *others])
    return hidden(value)


def masked(text: str) -> str:
    """Return a text, such as a word of the command line, with `removed` in place of the secrets of known URLs."""
    for url in urls_with_secrets():
        text = text.replace(url, hidden(url))
    return text


def whole(url: str) -> str:
    """Return a URL with its secrets.

    The user info of a known URL is that of all files in its folder.

    Raises:
        UserError: If the secrets of the URL are not known.
    """
    if not any(_lacks_secrets(match) for match in WHOLE_URL.finditer(url)):
        return url
    urls = {hidden(one): one for one in reversed(urls_with_secrets())}
    if url in urls:
        return urls[url]
    beside = [one for one in urls if f"://{REMOVED}@" in one and url.startswith(_folder(one))]
    if not beside or f"?{REMOVED}" in url:
        raise UserError(
            f"Expected the user or the query of {url!r} in the environment variable {VARIABLE}, got none: set it to "
            "the whole URL, which no file of a run holds, or give the URL as an option again."
        )
    nearest = WHOLE_URL.fullmatch(urls[max(beside, key=lambda one: len(_folder(one)))])
    return url if nearest is None else url.replace(f"{REMOVED}@", nearest["user"], 1)


def _lacks_secrets(url: re.Match[str]) -> bool:
    return REMOVED in (url["query"], (url["user"] or "").removesuffix("@"))


def _is_url(text: str) -> bool:
    return _START.match(text) is not None


def texts_in(value: Any) -> list[str]:
    """Return the texts in nested settings."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [text for part in parts for text in texts_in(part)]


def _folder(url: str) -> str:
    return f"{url.partition('?')[0].rpartition('/')[0]}/"
