"""Prints pip requirements for the lowest versions that pyproject.toml allows the tests to run with.

The dependencies of heedful, its extras and the group `test`; `make test-lowest` installs them.
"""

import re
import tomllib
from itertools import chain
from pathlib import Path


def lowest_versions(pyproject: Path) -> list[str]:
    """`name==X` for each `name>=X`; any version of a requirement without a lower bound."""
    content = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    project = content["project"]
    extras = chain(*project["optional-dependencies"].values())
    requirements = [*project["dependencies"], *extras, *content["dependency-groups"]["test"]]
    others = [text for text in requirements if not text.startswith(f"{project['name']}[")]
    return [re.sub(r">=([^,]+).*", r"==\1", text) for text in others]


if __name__ == "__main__":
    print(*lowest_versions(Path(__file__).resolve().parents[2] / "pyproject.toml"), sep="\n")
