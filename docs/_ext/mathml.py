"""Formulas as MathML, written into the pages at build time: no script, no font, no other host."""

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError


def _markup(node: nodes.Element, display: str) -> str:
    source = node.astext()
    try:
        return str(convert(source, display=display))
    except Exception as error:
        raise ExtensionError(f"cannot convert the formula {source!r}: {error}") from error


def _visit_inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(_markup(node, "inline"))
    raise nodes.SkipNode


def _visit_block(writer: Any, node: nodes.math_block) -> None:
    number = node.get("number")
    writer.body.append(f'<div class="math-block"{_identifier(node)}>{_markup(node, "block")}')
    if number is not None:
        writer.body.append(f'<span class="eqno">({number})</span>')
    writer.body.append("</div>\n")
    raise nodes.SkipNode


def _identifier(node: nodes.Element) -> str:
    return f' id="{node["ids"][0]}"' if node.get("ids") else ""


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer `mathml`."""
    app.add_html_math_renderer(
        "mathml", inline_renderers=(_visit_inline, None), block_renderers=(_visit_block, None)
    )
    return {"parallel_read_safe": True, "parallel_write_safe": True}
