"""Sphinx configuration of the site: MyST pages with executed cells, in English and Chinese.

`make docs` builds both languages. Pages in `ENGLISH_ONLY`, most of them written by programs from
the code or from measurements, are in English in both. Every other page needs its catalogue.
"""

import os
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

project = "heedful"
author = "The heedful authors"
copyright = "The heedful authors, Apache 2.0"
language = "en"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "answer",
    "chinese_search",
    "diagrams",
    "forked",
    "forked_commands",
    "mathml",
    "messages",
    "navigation",
    "plain_docstrings",
    "plots",
]
exclude_patterns = ["_build", "log.md", "formulas.txt"]
ENGLISH_ONLY = (
    "architecture",  # for contributors
    *("cli", "recipe", "formats", "results/*"),  # written by programs
    *("reference/api", "reference/api/*", "reference/architectures", "reference/registries"),
    "handbook/formulas",  # in both languages
)

# Translations: one catalogue for each page, and sphinx.po for the words of the theme.
locale_dirs = ["locale"]
gettext_compact = False
gettext_location = False
gettext_uuid = False

# Pages: MyST, cells executed once and cached for both languages.
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
PLOTS, LABELS = HERE / "_ext" / "plots.py", HERE / "locale" / "zh_CN" / "plots.po"
_drawn_by = sha256(PLOTS.read_bytes() + LABELS.read_bytes()).hexdigest()[:12]
nb_execution_cache_path = str(HERE / "_build" / "cells" / _drawn_by)
nb_execution_timeout = 1800  # seconds a cell; cells train, and the tests may run beside them
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_in_temp = True
nb_number_source_lines = False
nb_ipywidgets_js = {}

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
maximum_signature_line_length = 70  # a longer one has a line for each parameter
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"
nitpick_ignore_regex = [
    ("py:exc", "UserError|ValueError|TypeError|RuntimeError"),
    ("py:class", ".*"),  # of signatures: of other packages and of modules without a page
]
suppress_warnings = ["mystnb.unknown_mime_type", "myst-nb.lexer", "toc.not_included"]

highlight_language = "none"  # of blocks that name no language

html_theme = "furo"
html_title = "heedful"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "languages.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}


def _add_root(
    app: Any, pagename: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """The path from a page to the root of its language, for `languages.html`."""
    context["root"] = "../" * pagename.count("/")


# Runs in IPython before the cells. IPython asks commands for colors, with which progress bars would
# move; and its %%bash shows their lines in pieces, which end in the middle of words.
_STARTUP = """
import os
import subprocess

for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "CLICOLOR"):
    os.environ.pop(name, None)


def bash(line, cell):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(["bash", "-c", cell], **pipes, text=True, check=False)
    print(done.stdout, end="")
    done.check_returncode()


get_ipython().register_magic_function(bash, "cell")
"""


def _set_environment() -> None:
    """The environment of the cells: this installation, a cache of their own, and plain output."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("COLUMNS", "100")
    os.environ["HEEDFUL_CACHE"] = str(HERE / "_build" / "prepared")
    os.environ["IPYTHONDIR"] = str(HERE / "_build" / "ipython")
    startup = HERE / "_build" / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True, exist_ok=True)
    (startup / "plain.py").write_text(_STARTUP, encoding="utf-8")
    call = f"runpy.run_path({str(PLOTS)!r})['install'](pathlib.Path({str(LABELS)!r}))"
    (startup / "plots.py").write_text(f"import pathlib\nimport runpy\n\n{call}\n", "utf-8")


def setup(app: Any) -> None:
    """Set the environment, and connect the hooks of this file."""
    _set_environment()
    app.connect("html-page-context", _add_root)
