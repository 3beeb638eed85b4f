"""Adds new and changed paragraphs of the pages to docs/locale; `make translations` runs it.

A changed paragraph keeps its old translation, marked fuzzy, until someone corrects it.
"""

import runpy
import shutil
import subprocess
import sys
from fnmatch import fnmatch

from make_site import BUILD, DOCS, LANGUAGES, build, generate_pages


def main() -> None:
    """Extract the messages and merge them into the catalogues."""
    templates, chosen = BUILD / "catalogues", BUILD / "chosen"
    generate_pages()
    build("gettext", "en", templates)
    shutil.rmtree(chosen, ignore_errors=True)
    english_only = runpy.run_path(str(DOCS / "conf.py"))["ENGLISH_ONLY"]
    for template in templates.rglob("*.pot"):
        name = template.relative_to(templates)
        if not any(fnmatch(name.with_suffix("").as_posix(), pattern) for pattern in english_only):
            (chosen / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(template, chosen / name)
    options = ["-p", str(chosen), "-l", LANGUAGES["zh"], "-d", str(DOCS / "locale"), "-w", "0"]
    command = [sys.executable, "-m", "sphinx_intl", "update", *options]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
