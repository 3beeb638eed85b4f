"""A test may be skipped only for a listed reason; any other skip is a failure.

Otherwise a missing package would silently disable the tests that need it.
"""

from collections.abc import Generator

import pytest

LISTED = (
    "root may write anywhere",  # permissions do not bind the superuser, as in a container
    "no /dev/full here",  # only Linux has it
    "there is no C++ compiler",
    "this processor has no such vectors",
    "this torch compiles no nets ahead of time",  # one of `make test-lowest`
    "no CUDA device here",
    "this is not Linux",
    "there is no Chromium",
    "the package ray is not installed",  # of an extra that `make setup` may leave out
    "the extra serve is not installed",
    "there is no Chromium here",
    "llama-cpp-python is not installed",  # it is built from source
    *(
        f"{name} is not installed"
        for name in ("gguf", "onnx", "llguidance", "lm_eval", "umap", "captum")
    ),
    "sentence_transformers is not installed",
    "libretranslatepy is not installed",
)


def _refuse(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn the report of an unlisted skip into a failure."""
    if not report.skipped or hasattr(report, "wasxfail") or not isinstance(report.longrepr, tuple):
        return
    reason = report.longrepr[2].removeprefix("Skipped: ")
    if reason not in LISTED:
        report.outcome = "failed"
        report.longrepr = f"skipped for a reason not listed in {__name__}.py: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse(report)
    return report
