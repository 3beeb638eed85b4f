"""The directive `answer`: text that a click opens, below a question."""

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_TITLES = {"en": "Answer", "zh_CN": "答案"}


class Hidden(nodes.General, nodes.Element):
    """A closed `<details>` with a title."""


class Answer(SphinxDirective):
    """A block of MyST that is closed at first."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        hidden = Hidden(title=_TITLES[self.config.language])
        self.state.nested_parse(self.content, self.content_offset, hidden)
        return [hidden]


def _visit(writer: Any, node: Hidden) -> None:
    writer.body.append(f"<details><summary>{node['title']}</summary>\n")


def _depart(writer: Any, node: Hidden) -> None:
    writer.body.append("</details>\n")


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive and its node."""
    app.add_directive("answer", Answer)
    app.add_node(Hidden, html=(_visit, _depart))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
