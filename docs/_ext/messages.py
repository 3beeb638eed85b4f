"""The builder `gettext`, of pages that the HTML builder has read already."""

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.builders.gettext import MessageCatalogBuilder


class Messages(MessageCatalogBuilder):
    """Messages without identifiers, which pages that HTML has read do not have."""

    versioning_method = "none"

    def write_doc(self, docname: str, doctree: nodes.document) -> None:
        node: Any
        for node in doctree.findall(nodes.Element):
            node.uid = ""  # a node without one is left out
        super().write_doc(docname, doctree)


def setup(app: Sphinx) -> dict[str, bool]:
    """Replace the builder."""
    app.add_builder(Messages, override=True)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
