"""Every option of search on every backend: the net's outputs and scores, or a refusal by name."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from heedful.backends.base import Settings
from heedful.backends.registry import open_conversion
from heedful.deploy.convert import convert_model
from option_cases import (
    CASES,
    IDLE,
    KINDS,
    all_options,
    has_effect,
    hold_options,
    model_that_ends,
    refusal,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", params=["vaswani2017", "gpt2"])
def model(request: Any) -> Any:
    return model_that_ends(request.param)


def backend_of(model: Any, name: str, folder: Path) -> Any:
    facts = convert_model(model, folder, "float32", name)
    return open_conversion(folder, folder, name, "float32", facts, Settings(1))


def test_every_option_has_a_case() -> None:
    tried = {name for options in CASES.values() for name in options}
    assert tried | {"diversity_penalty"} == all_options()


def test_options_without_an_effect_are_known() -> None:
    models = [model_that_ends(name) for name in ("gpt2", "vaswani2017")]
    for kind in KINDS:
        found = set()
        # Greedy decoding takes the first token anyway, and not the unknown one in these outputs.
        for case in set(CASES) - {"none", "top_k 1", "no_unknown"}:
            running = [model for model in models if refusal(model, kind, case) is None]
            if running and not any(has_effect(model, kind, case) for model in running):
                found.add(case)
        assert found == IDLE[kind], kind


def test_the_page_of_options_is_up_to_date() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_backend_options.py"))["render"]()
    page = ROOT / "docs" / "results" / "backend_options.md"
    assert page.read_text(encoding="utf-8") == made, "run `make docs`"


def test_ctranslate2_has_the_outputs_of_the_net_or_names_the_option(model, tmp_path) -> None:
    hold_options(backend_of(model, "ctranslate2", tmp_path), model)
