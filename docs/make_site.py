"""Builds the site in English and Chinese into docs/_build, and checks it; `make docs` runs it.

It fails if a cell or Sphinx fails or warns, if a catalogue lacks a translation or has one of a
paragraph that was changed, if a page loads anything from another host, or if it lacks a picture.
"""

import re
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from babel.messages.pofile import read_po

DOCS = Path(__file__).resolve().parent
BUILD = DOCS / "_build"
sys.path.insert(0, str(DOCS / "_ext"))
LANGUAGES = {"en": "en", "zh": "zh_CN"}  # folder of the result: language of Sphinx
# What a browser loads from another host: not the targets of links that a reader may follow.
_LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\ssrc=["']?(?:https?:)?//[^>]*>"""
    r"""|<link\b[^>]*\srel=["'](?:stylesheet|preload|preconnect|icon)["'][^>]*href=["']?(?:https?:)?//[^>]*>"""
    r"""|@import\s+(?:url\()?["']?(?:https?:)?//[^;]*|url\(\s*["']?(?:https?:)?//[^)]*\)""",
    re.IGNORECASE,
)

_DRAWN = re.compile(r"(?:plt\.show\(\)|^\S.*\.plot\(.*\))\n```$", re.MULTILINE)


def main() -> None:
    """Build and check; exit with 1 and a line for each problem."""
    generate_pages()
    for folder in LANGUAGES:
        shutil.rmtree(BUILD / folder, ignore_errors=True)
    build("html", "en", BUILD / "en")
    build("gettext", "en", BUILD / "catalogues")
    english_only = runpy.run_path(str(DOCS / "conf.py"))["ENGLISH_ONLY"]
    catalogues = DOCS / "locale" / LANGUAGES["zh"] / "LC_MESSAGES"
    problems = translation_problems(BUILD / "catalogues", catalogues, english_only)
    if problems:
        problems.append("`make translations` adds new paragraphs to docs/locale; translate them")
    _exit_with(problems)
    build("html", "zh", BUILD / "zh")
    for folder in LANGUAGES:
        _exit_with(
            [*loads_from_other_hosts(BUILD / folder), *missing_pictures(DOCS, BUILD / folder)]
        )
        print(f"docs/_build/{folder}/index.html")


def generate_pages() -> None:
    """Write the pages that are made from the code and are not in the repository."""
    for script in ("make_reference.py", "make_api.py", "make_formulas.py"):
        _call(runpy.run_path, str(DOCS / script), None, "__main__")


def translation_problems(
    templates: Path, catalogues: Path, english_only: Sequence[str] = ()
) -> list[str]:
    """A line for each message that is not translated, is fuzzy, or does not exist any more.

    Args:
        templates: folder of the messages of the pages (.pot).
        catalogues: folder of their translations (.po), with the same names.
        english_only: patterns of names without a catalogue.
    """
    problems = []
    for template in sorted(templates.rglob("*.pot")):
        name = template.relative_to(templates).with_suffix("")
        if any(fnmatch(name.as_posix(), pattern) for pattern in english_only):
            continue
        path = catalogues / name.with_suffix(".po")
        if not path.exists():
            problems.append(f"{name}: has no catalogue {path.name}")
            continue
        with path.open("rb") as file:
            catalogue = read_po(file)
        with template.open("rb") as file:
            messages = {message.id for message in read_po(file) if message.id}
        for text in sorted(messages):
            entry = catalogue.get(text)
            if entry is None or not entry.string:
                problems.append(f"{name}: not translated: {_short(text)}")
            elif entry.fuzzy:
                problems.append(f"{name}: fuzzy: {_short(text)}")
        outdated = {entry.id for entry in catalogue if entry.id} - messages
        problems += [f"{name}: not on the page: {_short(text)}" for text in sorted(outdated)]
    return problems


def loads_from_other_hosts(folder: Path) -> Iterator[str]:
    """A line for each reference to another host that a browser would load."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".html", ".css"):
            for match in _LOADED.finditer(path.read_text(encoding="utf-8")):
                yield f"{path.relative_to(folder)} loads {_short(match.group())}"


def missing_pictures(sources: Path, folder: Path) -> Iterator[str]:
    """A line for each page with fewer pictures than cells that end by showing one."""
    for source in sorted(sources.glob("*/*.md")):
        page = (folder / source.relative_to(sources)).with_suffix(".html")
        cells = len(_DRAWN.findall(source.read_text(encoding="utf-8")))
        if cells and page.exists():
            count = len(re.findall(r"<img[^>]*_images/", page.read_text(encoding="utf-8")))
            if count < cells:
                yield f"{page.relative_to(folder)} has {count} pictures of {cells} cells"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 90 else f"{line[:87]}..."


def build(builder: str, folder: str, out: Path) -> None:
    """Run Sphinx in a language; all its builders share what one has read. Warnings are errors."""
    setting, doctrees = f"language={LANGUAGES[folder]}", str(BUILD / f"doctrees-{folder}")
    options = ["-q", "-W", "-n", "--keep-going", "-b", builder, "-D", setting, "-d", doctrees]
    _call(_run_sphinx, [*options, str(DOCS), str(out)])


def _run_sphinx(arguments: list[str]) -> None:
    from sphinx.cmd.build import main as run

    sys.exit(run(arguments))


def _call(function: Callable[..., object], *arguments: object) -> None:
    """Call a function in a new process; exit with 1 where that fails."""
    from forked import start

    child = start(function, *arguments)
    child.join()
    if child.exitcode:
        sys.exit(1)


def _exit_with(problems: list[str]) -> None:
    if problems:
        print(*problems, sep="\n", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
