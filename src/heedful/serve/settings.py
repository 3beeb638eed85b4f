"""Settings of the server, each declared once, with the help text of its command-line flag."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from heedful.options import CONSTRAINTS, RUN_TIME, RunTimeOptions, option

_ACCESS, _LIMITS, _LOG = "Address and access", "Limits", "Log"


@dataclass(frozen=True)
class Settings(RunTimeOptions):
    """Limits and options of the server, for all its models."""

    keys: Path | None = option(
        "File of API keys, one a line; `admin KEY` may also replace models by /admin/reload. "
        "Every route needs one but /health, /languages, /frontend/settings, /download_file and the "
        "files of the web pages (/ and /docs).",
        None, _ACCESS, shown="none needed", metavar="FILE",
    )  # fmt: skip
    cors: Sequence[str] = option(
        "Origin whose pages may call the server from a browser, such as https://example.org; * "
        "for all; repeatable.",
        (), _ACCESS, shown="none", metavar="ORIGIN",
    )  # fmt: skip
    allowed_hosts: Sequence[str] = option(
        "Name by which clients and browsers call the server, such as models.example.org or "
        "*.example.org; * for any; repeatable.",
        (),
        _ACCESS,
        shown="addresses, localhost, this machine's name, --host and hosts of --cors",
        flag="--allowed-host",
        metavar="NAME",
    )
    max_queue: int = option(
        "Texts of a model that wait or run; further requests are answered 429.",
        256, _LIMITS, least=1, metavar="N",
    )  # fmt: skip
    max_body: int = option(
        "Bytes of a request's body.",
        1_048_576, _LIMITS, least=1, metavar="BYTES",
    )  # fmt: skip
    max_new_tokens: int | None = option(
        "Largest max_tokens of a request.",
        None, _LIMITS, least=1, shown="the model's context", metavar="N",
    )  # fmt: skip
    max_outputs: int = option(
        "Largest n, and outputs of a translation (1 + alternatives).",
        8, _LIMITS, least=1, metavar="N",
    )  # fmt: skip
    max_stop: int = option(
        "Most stop texts of a request.",
        4, _LIMITS, least=0, metavar="N",
    )  # fmt: skip
    request_timeout: float = option(
        "Seconds for a request, its wait in the queue included; then 504.",
        120.0, _LIMITS, least=0.001, metavar="SECONDS",
    )  # fmt: skip
    read_timeout: float = option(
        "Seconds for a request's headers, and again for its body.",
        20.0, _LIMITS, least=0.001, metavar="SECONDS",
    )  # fmt: skip
    drain_timeout: float = option(
        "Seconds that requests in progress have after SIGTERM.",
        30.0, _LIMITS, least=1.0, metavar="SECONDS",
    )  # fmt: skip
    glossary: Path | None = option(
        "Terms and their translations, for all translators: TERM<tab>TRANSLATION a line, or TBX, "
        "of which each request takes the terms of its languages.",
        None, CONSTRAINTS, shown="none", metavar="FILE",
    )  # fmt: skip
    batch_tokens: int | None = option(
        "Padded tokens times beams of a batch; for a language model on eager, tokens in the "
        "caches of all outputs in progress, of which a single one may have more.",
        None,
        RUN_TIME,
        least=1,
        shown="as measured by heedful optimize, or 8192; on eager at least twice the context",
        metavar="N",
    )
    prefix_tokens: int | None = option(
        "Tokens of ended outputs whose keys and values a language model keeps, so that a "
        "prompt with the same API key which begins like one of them is read from there on; 0: "
        "none.",
        panel=RUN_TIME, least=0, shown="8192", metavar="N",
    )  # fmt: skip
    backend: str = option(
        "auto: the fastest that heedful optimize found. A language model batches continuously "
        "on eager alone.",
        "auto",
        RUN_TIME, metavar="auto|eager|compiled|ctranslate2",
    )  # fmt: skip
    log_texts: bool = option(
        "Write the bodies of requests to the log, which has no texts otherwise.",
        False, _LOG,
    )  # fmt: skip
