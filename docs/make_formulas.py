"""Writes docs/handbook/formulas.md: for each formula, the line that computes it and its test.

Lines and tests are looked up, so that a row whose code or test does not exist is an error.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "handbook" / "formulas.md"
CHAPTERS = PAGE.parent
HEAD = """<!-- Written by `make docs`. Do not edit. -->

# Formulas, code and tests · 公式、代码与测试

Every formula of the handbook and every part of a Transformer that a textbook defines, with the line
of `src/heedful` that computes it and the test in `tests/` that proves that line.

手册中的每个公式、教科书定义的每个部件，各自对应 `src/heedful` 中的一行代码
和 `tests/` 中的一个测试。

| what · 内容 | chapter · 章 | code · 代码 | test · 测试 |
|---|---|---|---|
"""


class Row(NamedTuple):
    """A row: English and Chinese name, labels of formulas or a chapter, code, and test.

    `code` is `file: text`, the first line of the file that contains the text.
    """

    name: str
    name_zh: str
    where: str
    code: str
    test: str


def rows() -> list[Row]:
    """The rows of formulas.txt."""
    lines = (ROOT / "docs" / "formulas.txt").read_text("utf-8").splitlines()[1:]
    return [Row(*(cell.strip() for cell in line.split(" | "))) for line in lines]


def render() -> str:
    """The current page."""
    labels = {label: page for page, label in _labels()}
    assert (missing := labels.keys() - {row.where for row in rows()}) == set(), missing
    return HEAD + "".join(_line(row, labels) for row in rows())


def _labels() -> Iterator[tuple[str, str]]:
    """Page and label of every labeled formula of the handbook."""
    for page in sorted(CHAPTERS.glob("[0-9]*.md")):
        for label in re.findall(r"^:label: (\S+)$", page.read_text("utf-8"), re.MULTILINE):
            yield page.name, label


def _line(row: Row, labels: dict[str, str]) -> str:
    page = labels.get(row.where) or next(CHAPTERS.glob(f"{row.where}-*.md")).name
    chapter = f"[{int(page[:2])}]({page})"
    if row.where in labels:
        chapter += f" {{eq}}`{row.where}`"
    name, text = row.code.split(": ", 1)
    test, function = row.test.split("::")
    code = f"`{name}:{_number(ROOT / 'src' / 'heedful' / name, text)}`"
    number = _number(ROOT / "tests" / test, f"def {function}(")
    return f"| {row.name} · {row.name_zh} | {chapter} | {code} | `{test}:{number}` `{function}` |\n"


def _number(path: Path, text: str) -> int:
    """The number of the first line that contains the text."""
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if text in line:
            return number
    raise SystemExit(f"make_formulas.py: {path.relative_to(ROOT)} has no line with: {text}")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote docs/handbook/{PAGE.name}")
