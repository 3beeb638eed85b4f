"""The inspection page: one HTML file without requests, under a strict Content-Security-Policy."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

import heedful
from heedful.files import write_text
from heedful.insight.notes import Note, page_texts

_FOLDER = Path(str(files("heedful.insight")))


def write_page(
    out: Path,
    *,
    title: str,
    facts: Mapping[str, str],
    views: Mapping[str, Any],
    notes: Sequence[Note] = (),
) -> None:
    """Write an inspection page, atomically.

    Args:
        facts: lines below the title by a key of the page's texts.
        views: the content by view (`page_data`, `run_views`), as JSON.
        notes: on tokens, layers and views that the page omits.

    Raises:
        UserError: the file cannot be written.
    """
    script, style = _asset("page.js"), _asset("page.css")
    data = {
        "title": title,
        "facts": dict(facts),
        "notes": [[note.key, *note.values] for note in notes],
        "views": views,
        "texts": page_texts(),
        "version": heedful.__version__,
    }
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    page = _template().render(
        title=title, policy=policy, script=script, style=style, data=embeddable_json(data)
    )
    write_text(out, page)


def embeddable_json(data: Any) -> str:
    """JSON that may be written inside a script element: nothing in it ends the element."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(content: str) -> str:
    """The source expression of an inline script or style."""
    digest = hashlib.sha256(content.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _asset(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


@cache
def _template() -> Any:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html.j2")
