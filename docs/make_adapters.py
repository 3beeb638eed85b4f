"""Writes docs/results/adapters.md: adapters of every kind in heedful and in peft."""

import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results" / "adapters.md"
HEAD = """# Adapters in heedful and in peft

<!-- Written by docs/make_adapters.py from what tests/export/test_peft.py checks. Do not edit. -->

The largest absolute difference of a logit between heedful and peft {peft} with transformers
{transformers}, for tiny random nets in float32 with random adapters that change the logits by
more than {changed:g}. Numbers are upper bounds, rounded up to powers of ten; the tests fail from
{close:g} on.

* **import**: an adapter that peft made (`heedful import peft`); with a classifier, peft trains
  its head too.
* **export**: an adapter of heedful, opened by `PeftModel.from_pretrained`
  (`heedful export peft`).
* **back**: the same one, exported and imported again.
* `–`: not tried with this base.

{classifiers} are classifiers. {tied} have one matrix for
embeddings and output.

| adapter | direction | {bases} |
|---|---|{rules}|
"""
REFUSED = """
## Refused

What would not be equal is refused, with one line that says why. Settings are read before the
base, whose kind does not matter then.

| adapter of peft | tried with | the line has |
|---|---|---|
"""


def render(measure: Callable[[str, str], dict[str, float]] | None = None) -> str:
    """The page.

    Args:
        measure: the differences by direction of a case with a base; None: `measured`.
    """
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from adapter_cases import BASES, CASES, CHANGED, CLASSIFIERS, CLOSE, TIED
    from adapter_cases import REFUSED as REFUSALS

    if measure is None:
        with tempfile.TemporaryDirectory() as place:
            return render(measured(Path(place)))
    page = HEAD.format(
        **_versions("peft", "transformers"),
        changed=CHANGED,
        close=CLOSE,
        bases=" | ".join(BASES),
        classifiers=", ".join(CLASSIFIERS),
        tied=", ".join(TIED),
        rules="|".join(["---"] * len(BASES)),
    )
    for title, case in CASES.items():
        found = {name: measure(title, name) for name in BASES if name in case.bases}
        for direction in case.directions:
            cells = [_cell(found[name][direction]) if name in found else "–" for name in BASES]
            page += f"| {title} | {direction} | {' | '.join(cells)} |\n"
    page += REFUSED
    for title, refusal in REFUSALS.items():
        page += f"| {title} | {', '.join(refusal.bases)} | {refusal.words} |\n"
    return page


def measured(folder: Path) -> Callable[[str, str], dict[str, float]]:
    """A function that measures a case with a base, below a folder, as the tests do."""
    from adapter_cases import CASES, Base

    warnings.simplefilter("ignore")  # of peft, for kinds that are tried on purpose
    bases: dict[str, Any] = {}

    def measure(title: str, name: str) -> dict[str, float]:
        if name not in bases:
            bases[name] = Base(name, folder / name)
        place = folder / name / str([*CASES].index(title))
        found: dict[str, float] = CASES[title].measure(bases[name], place)
        return found

    return measure


def _cell(difference: float) -> str:
    """An upper bound of a difference, coarse enough to be the same on other machines."""
    return f"≤ 1e-{5 if difference <= 1e-5 else 4}"


def _versions(*names: str) -> dict[str, str]:
    """The tested versions of packages."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return {name: re.findall(rf"^{name}==(\S+)", pins, re.M)[0] for name in names}


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
