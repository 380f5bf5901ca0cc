"""The page, in Gradio."""

import html
from collections.abc import Sequence
from typing import Any

import gradio

from ...common.errors import UserError
from ...datamodules.base.faults import BadSample
from .rendering import grid, ranked
from .search import Ranked, Search

_LONGEST = 500  # characters of a text
_MOST_LINES = 1000  # typed captions or classes


def theme() -> gradio.Theme:
    """Return the theme, with the fonts of the system: none is downloaded."""
    fonts = ["system-ui", "sans-serif"]
    return gradio.themes.Default(primary_hue="orange", font=fonts, font_mono=["ui-monospace", "monospace"])


def build(search: Search, source: str | None, classes: Sequence[str]) -> gradio.Blocks:
    """Return the page; `source` is the name of the file of the captions, `classes` those that the page begins with."""
    with gradio.Blocks(title="vlightning demo", analytics_enabled=False) as page:
        gradio.HTML(_head(search))
        with gradio.Tab("Find images"):
            _finding(search)
        with gradio.Tab("Describe an image"):
            _describing(search, source, classes)
    return page


def _finding(search: Search) -> None:
    text = gradio.Textbox(
        label="Text", placeholder="a red circle above a blue square", submit_btn="Search", max_length=_LONGEST
    )
    searched = gradio.State("")
    label = "Click a word to see where the model looks (paler where the word matters less)"
    words = gradio.Radio([], label=label, visible=False)
    images = gradio.HTML(padding=False)

    def find(typed: str) -> tuple[str, Any, str]:
        typed = typed.strip()
        hits = search.find(typed) if typed else []
        choices = [("no map", -1), *((word, index) for index, word in enumerate(search.words(typed)))] if typed else []
        visible = len(choices) > 1
        return typed, gradio.Radio(choices, value=-1 if visible else None, visible=visible), grid(hits)

    def look(typed: str, word: int) -> str:
        return grid(search.find(typed) if word < 0 else search.look(typed, word))

    text.submit(find, text, [searched, words, images], show_progress_on=images)
    words.input(look, [searched, words], images)


def _describing(search: Search, source: str | None, classes: Sequence[str]) -> None:
    placeholder = f"{len(search.captions.names):,} of {source}" if source else "none: type some"
    with gradio.Row():
        with gradio.Column():
            image = gradio.Image(label="Image", type="filepath", sources=["upload", "clipboard"], height=320)
            names = gradio.Textbox(label="Classes, one a line", value="\n".join(classes), lines=3, max_lines=8)
            typed = gradio.Textbox(label="Captions, one a line", placeholder=placeholder, lines=3, max_lines=8)
            again = gradio.Button("Describe", variant="primary")
        with gradio.Column():
            captions = gradio.HTML(label="Captions", show_label=True, container=True, padding=True)
            best = gradio.HTML(label="Classes", show_label=True, container=True, padding=True)

    def describe(file: str | None, class_lines: str, caption_lines: str) -> tuple[str, str]:
        if file is None:
            return "", ""
        try:
            scored = search.describe(file, _lines(caption_lines))
            likely = search.classify(file, _lines(class_lines))
        except BadSample as bad:
            raise gradio.Error(f"This image cannot be used: {bad.fault.cause}.") from None
        except UserError as error:
            raise gradio.Error(str(error)) from None
        return (
            ranked([_captioned(best) for best in scored], "No captions."),
            ranked([(name, f"{share:.1%}", share) for name, share in likely], "No classes: type some."),
        )

    for event in (image.change, again.click):
        event(describe, [image, names, typed], [captions, best])


def _captioned(best: Ranked) -> tuple[str, str, float]:
    """Return a caption, its share, or its cosine if the model has no temperature, and the length of its bar."""
    if best.share is None:
        return best.name, f"{best.cosine:.3f}", best.cosine
    return best.name, f"{best.share:.1%}", best.share


def _lines(text: str) -> list[str]:
    return list(dict.fromkeys(line.strip()[:_LONGEST] for line in text.splitlines() if line.strip()))[:_MOST_LINES]


def _head(search: Search) -> str:
    notes = [f"{len(search.images.names):,} images of {search.folder.root.name}", search.model.name]
    if unreadable := len(search.folder.names) - len(search.images.names):
        notes.append(f"{unreadable:,} cannot be read")
    if search.folder.outside:
        notes.append(f"{search.folder.outside:,} links lead out of the folder and are left out")
    notes += [search.model.note] if search.model.note else []
    notes += [search.order.removesuffix(".")] if search.order else []
    notes += [f"no maps of words: {search.why_no_maps}"] if search.why_no_maps else []
    return f"<h1>Search in images</h1><p class=quiet>{html.escape(' · '.join(notes))}</p>"
