"""Makes the navigation of every page from titles alone.

Sphinx copies all headings and functions of all pages for it, and then drops them: this takes as
long as everything else that it writes.
"""

from typing import Any
from unittest.mock import patch

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment


def titles_of(env: BuildEnvironment) -> dict[str, nodes.bullet_list]:
    """Of each page its title and its lists of pages, as Sphinx keeps them."""
    titles = {}
    for name, toc in env.tocs.items():
        titles[name] = kept = toc.deepcopy()
        for entry in kept.children:
            assert isinstance(entry, nodes.Element)
            lists = [*entry.findall(addnodes.toctree)]
            if lists:
                entry[1][:] = lists
            else:
                del entry[1:]
    return titles


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to each page, before the theme."""
    titles: dict[str, nodes.bullet_list] = {}

    def connect(
        app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: Any
    ) -> None:
        if not titles:
            titles.update(titles_of(app.env))
        make = context["toctree"]

        def toctree(**options: Any) -> Any:
            assert options["titles_only"]
            with patch.object(app.env, "tocs", titles):
                return make(**options)

        context["toctree"] = toctree

    app.connect("html-page-context", connect, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
