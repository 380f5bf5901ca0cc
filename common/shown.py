"""Texts as people may see them: without secrets of URLs, and without characters that a terminal acts on.

User info, query and fragment of a URL may hold secrets: a password, a token, a signature. They are in no file, log and
message. Names from data may hold line breaks and escape codes, which would forge lines of a log.
"""

import os
import re

VARIABLE = "VLIGHTNING_URLS"
"""Environment variable with the URLs whose secrets a run knows, separated by white space; see `common/urls.py`."""

_SCHEME = r"[a-zA-Z][a-zA-Z0-9+.-]*://"


def _url_pattern(character: str) -> re.Pattern[str]:
    """Return the pattern of a URL, one of a chain as `simplecache::https://...`; `character` may be in its parts."""
    inside = rf"(?:(?!::{_SCHEME}){character})"
    name = rf"(?:(?![/@?#]){inside})*@"
    # Keys of storages contain slashes: a colon that no port follows begins a password, which ends at the last "@".
    password = rf"(?:(?![/@?#:\[]){inside})*(?!::{_SCHEME}):(?!\d*(?:[/?#]|(?!{inside}))){inside}*@"
    location = rf"(?:(?![?#]){inside})*"
    # The end of a sentence does not belong to a query.
    end = rf"(?=[.,:;)\]}}]*(?:#|(?!{inside})))"
    query = rf"\?(?P<query>(?:(?!#){inside})+?){end}"
    fragment = rf"#(?P<fragment>{inside}*?){end}"
    return re.compile(
        rf"(?P<scheme>{_SCHEME})(?P<user>{name}|{password})?(?P<location>{location})(?:{query})?(?:{fragment})?",
        re.DOTALL,
    )


WHOLE_URL = _url_pattern(".")
"""Pattern of a URL that is the whole text, or a part of a chain."""
_URL_IN_TEXT = _url_pattern(r"[^\s\"'<>`]")
_RANGE = re.compile(r"bytes=\d+-\d+")


def without_secrets(url: re.Match[str], mark: str = "") -> str:
    """Return a URL without its secrets.

    Outside of web servers, a user name without a password is kept, since Azure names a container so, and so is a query
    without "=", since "?" is a wildcard.

    Args:
        url: match of the URL.
        mark: what stands for the user info and for the query; nothing if it is empty.
    """
    scheme = url["scheme"].lower()
    web = scheme.startswith("http")
    user = url["user"] or ""
    query = "" if url["query"] is None else f"?{url['query']}"
    fragment = "" if url["fragment"] is None else f"#{url['fragment']}"
    if web or (":" in user and scheme != "github://"):
        user = f"{mark}@" if user and mark else ""
    if web or "=" in query:
        query = f"?{mark}" if query and mark else ""
    if (web or "=" in fragment) and not _RANGE.fullmatch(fragment.removeprefix("#")):
        fragment = ""
    return f"{url['scheme']}{user}{url['location']}{query}{fragment}"


def urls_with_secrets() -> list[str]:
    """Return the URLs whose secrets this process knows, the newest first."""
    return [url for url in re.split(rf"\s+(?={_SCHEME})", os.environ.get(VARIABLE, "").strip()) if url]


def public(text: str) -> str:
    """Return a text whose URLs are without their secrets."""
    if "://" not in text:
        return text
    for url in urls_with_secrets():
        if url in text:
            text = text.replace(url, WHOLE_URL.sub(without_secrets, url))
    return _URL_IN_TEXT.sub(without_secrets, text)


def shown(text: str) -> str:
    r"""Return `public` as one line for a log or a terminal, with escapes such as `\n` for control characters."""
    text = public(text)
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )
