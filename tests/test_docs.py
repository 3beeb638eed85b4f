"""The pages that scripts write are up to date."""

import json
import re
import runpy
import tomllib
from itertools import chain
from pathlib import Path

import polib
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lowest_versions import lowest_versions

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "README.zh.md", "CONTRIBUTING.md", "docs/architecture.md"]
LINK = re.compile(r"\[[^\]]*\]\((?!https?://|#)([^)#\s]+)")


def test_cli_page_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_cli.py"))["render"]()
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == page, "run `make pages`"


def test_formats_page_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_formats.py"))["render"]()
    assert (ROOT / "docs" / "formats.md").read_text(encoding="utf-8") == page, "run `make docs`"


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
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, groups = content["project"], content["dependency-groups"]
    extras = chain(*project["optional-dependencies"].values())
    grouped = [text for text in chain(*groups.values()) if isinstance(text, str)]
    for text in [*project["dependencies"], *extras, *grouped]:
        requirement = Requirement(text)
        if requirement.name != "heedful":
            pin = pins[requirement.name.lower()]
            assert requirement.specifier.contains(pin), f"{requirement} but {pin}"


def test_constraints_allow_todays_tables_of_lm_eval() -> None:
    """typepy[datetime], of pytablewriter, is for dateutil 2: beside another one pip tries versions
    of ten years, with a warning for each of their invalid metadata."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))
    assert SpecifierSet(">=2.8,<3").contains(pins["python-dateutil"])
    for name in ("pytablewriter", "dataproperty", "tabledata", "typepy"):
        assert SpecifierSet(">=1").contains(pins[name]), name


def test_make_test_lowest_installs_one_version_of_each_requirement() -> None:
    requirements = lowest_versions(ROOT / "pyproject.toml")
    versions = {Requirement(text).name: Requirement(text).specifier for text in requirements}
    assert versions["torch"] == SpecifierSet("==2.9")
    assert {"transformers", "sacrebleu"} <= versions.keys()
    assert all(len(found) == 1 and str(found)[:2] == "==" for found in versions.values())


def test_the_version_is_in_one_place() -> None:
    assert "version:" not in (ROOT / "CITATION.cff").read_text("utf-8").replace("cff-version:", "")


def test_results_name_recipes_that_exist() -> None:
    """A renamed recipe is renamed in the records too, which the benchmarks read again."""
    from heedful.recipe_files import shipped_recipes

    folder = ROOT / "docs" / "results"
    bands = json.loads((folder / "bands.json").read_text(encoding="utf-8"))["bands"]
    assert {band["recipe"] for band in bands} <= set(shipped_recipes())


def keys_of_recipes() -> set[str]:
    """Those on their page; keys of models and tasks are not there."""
    known, section = set(), ""
    for line in (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8").splitlines():
        section = line[3:] if line.startswith("## ") else section
        if key := re.match(r"\| `(\w+)` \|", line):
            known.add(f"{section}.{key[1]}".strip("."))
    return known


def test_keys_on_guides_are_keys_of_recipes() -> None:
    """Such as `training.clip_norm`."""
    known = keys_of_recipes()
    for page in sorted((ROOT / "docs" / "guides").glob("*.md")):
        text = re.sub(r"\bdata\.(valid|test)\b", "data.train", page.read_text(encoding="utf-8"))
        names = re.findall(
            r"`(?:data|tokenizer|adapter|training|evaluation)(?:\.[a-z_]+)+\b(?!\.)", text
        )
        assert {name[1:] for name in names} - known == set(), page.name


def written_pages() -> list[Path]:
    """The pages with commands that people write."""
    folders = [ROOT, *(ROOT / "docs" / name for name in ("", "guides", "tutorials", "handbook"))]
    pages = [page for folder in folders for page in sorted(folder.glob("*.md"))]
    return [page for page in pages if page.name not in ("CHANGELOG.md", "cli.md", "log.md")]


def test_commands_on_pages_set_keys_of_recipes() -> None:
    known, found = keys_of_recipes(), 0
    for page in written_pages():
        for key in re.findall(r"--set '?(\w+\.[\w.]+)=", page.read_text(encoding="utf-8")):
            name = re.sub(r"^data\.(valid|test)\.", "data.train.", key)
            name = re.sub(r"^data\.corpora\.\w+\.", "data.corpora.NAME.", name)
            assert name in known or key.startswith(("model.", "objective.")), f"{page.name}: {key}"
            found += 1
    assert found > 50


def test_commands_on_pages_translate_files_to_the_same_format() -> None:
    """As the command refuses another one by the name of the output."""
    found = 0
    for page in written_pages():
        text = page.read_text(encoding="utf-8")
        for source, output in re.findall(r"translate [^\n`]*-i (\S+) -o ([^\s`]+)", text):
            assert Path(source).suffix in ("", Path(output).suffix), f"{page.name}: {output}"
            found += 1
    assert found > 5


def test_translated_paragraphs_are_on_their_pages() -> None:
    """`make docs` finds paragraphs without a translation, too, by building the site."""
    folder, found = ROOT / "docs" / "locale" / "zh_CN" / "LC_MESSAGES", 0
    for path in sorted(folder.rglob("*.po")):
        page = ROOT / "docs" / path.relative_to(folder).with_suffix(".md")
        if not page.exists():  # written by a script, or of no page
            continue
        lines = re.sub(r"^\s*> ?", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        text = " ".join(lines.split())
        for entry in polib.pofile(str(path)):
            if not entry.obsolete:
                own = " ".join(entry.msgid.split())
                in_a_table = own.replace("|", "\\|")
                assert own in text or in_a_table in text, f"{path.name}: {own}"
                links = sorted(LINK.findall(entry.msgid)), sorted(LINK.findall(entry.msgstr))
                assert links[0] == links[1], f"{path.name}: {entry.msgid}"
                found += 1
    assert found > 1000


@pytest.mark.parametrize(
    ("word", "better"),
    [("您", "你"), ("翻译记忆(?!库)", "翻译记忆库"), ("保留的批次", "留出的批次")],
)
def test_chinese_pages_have_one_word_for_a_thing(word: str, better: str) -> None:
    folder = ROOT / "docs" / "locale" / "zh_CN" / "LC_MESSAGES"
    texts = {"README.zh.md": (ROOT / "README.zh.md").read_text(encoding="utf-8")}
    for path in sorted(folder.rglob("*.po")):
        entries = polib.pofile(str(path))
        texts[path.name] = "\n".join(entry.msgstr for entry in entries if not entry.obsolete)
    for name, text in texts.items():
        assert not re.search(word, text), f"{name}: {better}"


def test_all_imported_architectures_are_in_the_guide_to_other_toolkits() -> None:
    """As in the table of README.md."""
    guide = (ROOT / "docs" / "guides" / "coming-from.md").read_text(encoding="utf-8")
    own = guide.partition("## Bring your models")[2].replace("XLM-RoBERTa", "XLM-R")
    (row,) = re.findall(r"^\| import, export \| (.*) \|$", (ROOT / PAGES[0]).read_text(), re.M)
    names = {name.strip() for cell in row.split("|") for name in cell.split(",")}
    listed = {name.strip() for name in re.split(r",|\band\b", own.partition(" are read")[0])}
    assert names == listed


def test_recipes_that_name_files_say_where_they_are_from() -> None:
    """In their first comment, or in that of the recipe which it refers to."""
    from heedful.recipe_files import shipped_recipes

    folder = ROOT / "src" / "heedful" / "recipes"
    texts = {name: (folder / f"{name}.yaml").read_text("utf-8") for name in shipped_recipes()}
    heads = {name: text.partition("\n\n")[0] for name, text in texts.items()}
    heads = {name: "".join(re.findall(r"^#.*\n", head, re.M)) for name, head in heads.items()}
    of_files = [
        name
        for name, text in texts.items()
        if re.search(r"^ +(src|tgt|text|file): (?!shipped:)\S+/", text, re.M)
    ]
    assert len(of_files) > 3
    for name in of_files:
        sources = [head for other, head in heads.items() if other in heads[name] or other == name]
        assert any("https://" in head for head in sources), name
