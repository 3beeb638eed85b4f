"""The pages that scripts write are up to date."""

import re
import runpy
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "docs/architecture.md"]
LINK = re.compile(r"\[[^\]]*\]\((?!https?://|#)([^)#\s]+)")


def test_cli_page_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_cli.py"))["render"]()
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == page, "run `make docs`"


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md", "SECURITY.md"])
def test_links_between_pages_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    missing = [link for link in LINK.findall(text) if not ((ROOT / page).parent / link).exists()]
    assert not missing


def test_pages_name_files_that_exist() -> None:
    """Paths such as `src/...` on pages and in pictures exist."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        pictures = "".join(re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
        names = re.findall(r"`([a-z_]+(?:/[a-z_0-9]+)*\.py)`", text)
        for name in names + re.findall(r"[a-z_]+(?:/[a-z_0-9]+)*\.py", pictures):
            places = [ROOT / name, ROOT / "src" / "heedful" / name]
            assert any(place.is_file() for place in places), f"{page}: {name}"


def test_make_quick_names_files_that_exist() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    (names,) = re.findall(r"^QUICK := (.*)$", text, flags=re.MULTILINE)
    assert all((ROOT / "tests" / name).is_file() for name in names.split())


def test_constraints_pin_every_dependency() -> None:
    """At a version that its bounds allow."""
    import tomllib

    from packaging.requirements import Requirement

    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    expected = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    for text in expected:
        requirement = Requirement(text)
        if requirement.name != "heedful":
            pin = pins[requirement.name.lower()]
            assert requirement.specifier.contains(pin), f"{requirement} but {pin}"
