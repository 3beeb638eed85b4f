"""Writes docs/results/backend_options.md: the options of search that each backend runs."""

import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results" / "backend_options.md"
HEAD = """# Which backend runs which option

<!-- Written by docs/make_backend_options.py from what tests/backends checks. Do not edit. -->

Each option of search in three kinds of search: greedy, beams of 5, and sampling with
temperature 1. A backend that runs a request has the outputs of the net (CTranslate2's beams: of
the net with its stop rule, see below), with log-probabilities and scores that differ by at
most {close:g} a token (in float32). What it cannot run like this
it refuses: with `--backend auto` the net runs in its place, with a note; with a backend by name
one line names the option.

* `all`: every backend, the net included.
* `not CTranslate2`: the net and its compiled form.
* `net`: the net alone.
* `no effect`: the option changes nothing; the command line has a note.
* `error`: options that exclude each other.

Where translators and language models differ, the first entry is of translators.

| option | greedy | beams | sampling |
|---|---|---|---|
"""
FOOT = """
What CTranslate2 has instead:

* **Stop rule.** Its beams end as by `beam_full`, also where no rule is given: then its outputs
  are those of `--stop-rule beam_full`, and not of the default `optimal`. With a length penalty
  of 1 the two rules agree for most texts; with others they do not, so that these need
  `--stop-rule beam_full`. Of more outputs than the beam has, it keeps the best ones, the net
  the first ones: with `--num-return` the net runs.
* **Excluded tokens.** It excludes tokens before the softmax, so that the others share their
  probability. In a beam search that changes the ranking: options that exclude tokens need
  `renormalize_logits`, with which the net does the same. Padding and the like, which a model
  never outputs, are excluded like this, too; `heedful optimize` compares beam searches, and if
  one differs, beam searches run on the net.
* **Length limit.** It cuts beams at the limit, where the net forces an end token: such texts
  run on the net.
* **Samples** do not depend on a seed: with a `--seed` the net runs. Without one only their
  log-probabilities are compared.
* **Shortlist.** The allowed tokens of a batch are those of all of its texts.

Compiled forms have the searches of the net over another program for each step.
"""


def render() -> str:
    """The page, from the reasons that the backends give; the tests compare their outputs."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from option_cases import CASES, CLOSE, KINDS, model_that_ends

    with tempfile.TemporaryDirectory() as place:
        models = [model_that_ends(name) for name in ("vaswani2017", "gpt2")]
        opened = [
            (model, _ctranslate2(model, Path(place, str(n)))) for n, model in enumerate(models)
        ]
        lines = []
        for case in CASES:
            if case == "none":
                continue
            cells = []
            for kind in KINDS:
                of_models = [_cell(model, backend, kind, case) for model, backend in opened]
                cells.append(" / ".join(dict.fromkeys(of_models)))
            lines.append(f"| {_written(case)} | {' | '.join(cells)} |\n")
    return HEAD.format(close=CLOSE) + "".join(lines) + FOOT


def _ctranslate2(model: Any, folder: Path) -> Any:
    from heedful.backends.base import Settings
    from heedful.backends.registry import open_conversion
    from heedful.deploy.convert import convert_model

    facts = convert_model(model, folder, "float32")
    return open_conversion(folder, folder, "ctranslate2", "float32", facts, Settings(1))


def _cell(model: Any, backend: Any, kind: Any, case: str) -> str:
    from heedful.backends.aot.decoder import unsupported_options
    from option_cases import IDLE, refusal, request_of, unsupported

    if refusal(model, kind, case) is not None:
        return "error"
    if case in IDLE[kind] and "draft" not in case:  # which is faster
        return "no effect"
    if unsupported_options(request_of(model, kind, case)):
        return "net"
    return "not CTranslate2" if unsupported(backend, model, kind, case) else "all"


def _written(case: str) -> str:
    """The options of a case, the first alone or with the others that it needs."""
    option, *others = (f"`{part.strip()}`" for part in case.split(","))
    return option + (f" with {' and '.join(others)}" if others else "")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
