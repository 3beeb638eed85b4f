"""Formulas as MathML, written into the pages at build time: no script, no other host.

`site.css` sets them in the font of `_static/fonts`: its table MATH has the sizes of roots, sums and
parentheses, which text fonts lack.
"""

import re
from typing import Any
from xml.etree import ElementTree

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

# Of MathML; latex2mathml writes other numbers of children for, say, an index of a matrix.
_CHILDREN = dict.fromkeys(("mfrac", "mroot", "msub", "msup", "munder", "mover"), 2)
_CHILDREN |= dict.fromkeys(("msubsup", "munderover"), 3)


def _markup(node: nodes.Element, display: str) -> str:
    source = node.astext()
    try:
        markup = str(convert(source, display=display))
    except Exception as error:
        raise ExtensionError(f"cannot convert the formula {source!r}: {error}") from error
    for element in ElementTree.fromstring(markup).iter():
        name = element.tag.rpartition("}")[2]
        if len(element) != _CHILDREN.get(name, len(element)):
            raise ExtensionError(f"{source!r} becomes {len(element)} children of one {name}")
    return _space_names(markup)


# A name such as `softmax`, an operator in latex2mathml's output or (`cos`) an identifier.
_NAME = re.compile(
    r"(?P<after></m(?:i|n|sub|sup|subsup|row|frac)>)?<m[io]>(?P<name>[A-Za-z]{2,})</m[io]>"
    r"(?P<before><mo stretchy=\"false\">&#x00028;|<mrow><mo stretchy=\"true\"|</mrow>)?"
)


def _space_names(markup: str) -> str:
    """Space names of functions as TeX does: none before a parenthesis, else a thin one."""

    def spaced(match: re.Match[str]) -> str:
        after, before = match["after"] or "", match["before"] or ""
        left, right = "0.17em" if after else "0", "0" if before else "0.17em"
        return f'{after}<mo lspace="{left}" rspace="{right}">{match["name"]}</mo>{before}'

    return _NAME.sub(spaced, markup)


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
