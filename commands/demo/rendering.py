"""Answers as HTML, which holds its images itself, so that no file of the folder is served."""

import base64
import html
import io
from collections.abc import Mapping, Sequence

from .search import Hit

CSS = """
.ranked {list-style: none; margin: 0; padding: 0}
.ranked li {position: relative; display: flex; justify-content: space-between; gap: 1rem; margin: .3rem 0;
  padding: .35rem .6rem; border-radius: 4px; overflow: hidden; overflow-wrap: anywhere}
.ranked i {position: absolute; inset: 0 auto 0 0; background: var(--primary-500); opacity: .22}
.ranked b {flex: none; font-variant-numeric: tabular-nums; font-weight: 600}
.quiet {opacity: .7; overflow-wrap: anywhere}
.hits {display: grid; gap: .75rem; grid-template-columns: repeat(auto-fill, minmax(max(7.5rem, 14%), 1fr))}
.hits figure {margin: 0}
.hits img {width: 100%; aspect-ratio: 1; object-fit: contain; background: #8882; border-radius: 4px}
.hits figcaption {display: flex; flex-wrap: wrap; justify-content: space-between; column-gap: .5rem; font-size: .85rem;
  overflow-wrap: anywhere}
.hits .quiet, .hits .title:not(:empty) {flex-basis: 100%}
.hits b {font-variant-numeric: tabular-nums; font-weight: 600}
"""


def grid(hits: Sequence[Hit]) -> str:
    """Return images with their titles, cosines and shares, and with the strengths of a word."""
    return f"<div class=hits>{''.join(map(_figure, hits))}</div>"


def _figure(hit: Hit) -> str:
    content = io.BytesIO()
    hit.image.save(content, "JPEG", quality=85)
    source = f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"
    strength = "" if hit.strength is None else f"<i>word {hit.strength:.0%}</i>"
    ranked = hit.ranked
    name = html.escape(ranked.name, quote=True)
    title = html.escape(ranked.title, quote=True)
    share = "" if ranked.share is None else f"<b>{ranked.share:.1%}</b>"
    numbers = f"{share}<span>cosine {ranked.cosine:.3f}</span>{strength}"
    caption = f"<span class=title>{title}</span>{numbers}<span class=quiet>{name}</span>"
    return f'<figure><img alt="{title or name}" src="{source}"><figcaption>{caption}</figcaption></figure>'


def page_of_hits(answers: Mapping[str, Sequence[Hit]], note: str) -> str:
    """Return a page of its own with the hits of each query, below a line about them."""
    sections = "".join(f"<h2>{html.escape(query)}</h2>{grid(hits)}" for query, hits in answers.items())
    return (
        "<!doctype html><meta charset=utf-8><meta name=viewport content='width=device-width'><title>vlightning search"
        f"</title><style>body {{font-family: system-ui, sans-serif; margin: 1.5rem}}{CSS}</style>"
        f"<p class=quiet>{html.escape(note)}</p>{sections}\n"
    )


def ranked(rows: Sequence[tuple[str, str, float]], otherwise: str) -> str:
    """Return a list of names with their numbers, and bars from 0 to 1 behind them."""
    if not rows:
        return f"<p class=quiet>{otherwise}</p>"
    items = [
        f"<li><i style='width:{min(max(share, 0), 1):.1%}'></i><span>{html.escape(name)}</span><b>{number}</b></li>"
        for name, number, share in rows
    ]
    return f"<ol class=ranked>{''.join(items)}</ol>"
