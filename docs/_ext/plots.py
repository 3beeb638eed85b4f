"""Plots of the pages in both languages, from one run of their cells.

Each figure is an image for the English site (PNG) and one with translated labels (SVG, whose text
the reader's fonts draw: those of the building machine need no Chinese). `install` is called in the
kernel of a page, `setup` by Sphinx, which then chooses an image by the language of the site.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# The kinds of images in the order of preference in myst_nb: SVG is before PNG by default.
_PNG_FIRST = [("*", "image/svg+xml", 55)]


def read_labels(path: Path) -> dict[str, str]:
    """Translations by label; `{}` in both stands for any text."""
    from babel.messages.pofile import read_po

    with path.open("rb") as file:
        return {str(entry.id): str(entry.string) for entry in read_po(file) if entry.id}


def translated(text: str, labels: dict[str, str]) -> str:
    """A label in the other language, with its parts; itself where no entry matches."""
    for label, translation in labels.items():
        pattern = re.escape(label).replace(r"\{\}", "(.+)")
        if found := re.fullmatch(pattern, text):
            return translation.format(*(translated(part, labels) for part in found.groups()))
    return text


def install(path: Path) -> None:
    """Have IPython make both images of each figure."""
    from IPython.core import pylabtools
    from IPython.core.getipython import get_ipython

    labels, draw = read_labels(path), pylabtools.print_figure
    get_ipython().config.InlineBackend.figure_formats = {"png", "svg"}

    def print_figure(figure: Any, fmt: str = "png", **keywords: Any) -> Any:
        if fmt != "svg":
            return draw(figure, fmt, **keywords)
        import matplotlib

        with (
            _in_the_other_language(figure, labels),
            warnings.catch_warnings(),
            matplotlib.rc_context({"svg.fonttype": "none"}),
        ):
            warnings.filterwarnings("ignore", "Glyph .* missing")
            return draw(figure, fmt, **keywords)

    pylabtools.print_figure = print_figure


@contextmanager
def _in_the_other_language(figure: Any, labels: dict[str, str]) -> Iterator[None]:
    """Texts of a figure and names at its axes, translated inside the context."""
    from matplotlib.category import StrCategoryFormatter
    from matplotlib.text import Text
    from matplotlib.ticker import FixedFormatter, FuncFormatter

    texts = [(text, text.get_text()) for text in figure.findobj(Text) if text.get_text()]
    sides = [side for axes in figure.axes for side in (axes.xaxis, axes.yaxis)]
    named = [(side, side.get_major_formatter()) for side in sides]
    named = [pair for pair in named if isinstance(pair[1], FixedFormatter | StrCategoryFormatter)]
    try:
        for text, label in texts:
            text.set_text(translated(label, labels))
        for side, names in named:
            side.set_major_formatter(
                FuncFormatter(lambda x, at, names=names: translated(names(x, at), labels))
            )
        yield
    finally:
        for side, names in named:
            side.set_major_formatter(names)
        for text, label in texts:
            text.set_text(label)


def _choose(app: Any, config: Any) -> None:
    if config.language == "en":
        config.nb_mime_priority_overrides = _PNG_FIRST


def setup(app: Any) -> dict[str, bool]:
    """Connect the choice of images."""
    app.connect("config-inited", _choose)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
