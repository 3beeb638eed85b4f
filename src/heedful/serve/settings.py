"""Settings of the server, each declared once, with the help text of its command-line flag."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

_ACCESS, _LIMITS, _RUN_TIME, _LOG = "Address and access", "Limits", "Run time", "Log"


def _flag(panel: str, help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


@dataclass(frozen=True)
class Settings:
    """Limits and options of the server, for all its models."""

    keys: Annotated[
        Path | None,
        _flag(
            _ACCESS,
            "File of API keys, one a line; `admin KEY` may also replace models by /admin/reload. "
            "Every route needs one but /health, /frontend/settings and the files of the web "
            "pages (/ and /docs).",
            metavar="FILE",
            show_default="none needed",
        ),
    ] = None
    cors: Annotated[
        Sequence[str],
        _flag(
            _ACCESS,
            "Origin whose pages may call the server from a browser, such as https://example.org; "
            "* for all; repeatable.",
            metavar="ORIGIN",
            show_default="none",
        ),
    ] = ()
    allowed_hosts: Annotated[
        Sequence[str],
        _flag(
            _ACCESS,
            "Name by which clients and browsers call the server, such as models.example.org or "
            "*.example.org; * for any; repeatable.",
            "--allowed-host",
            metavar="NAME",
            show_default="addresses, localhost, this machine's name, --host and hosts of --cors",
        ),
    ] = ()
    max_queue: Annotated[
        int,
        _flag(
            _LIMITS,
            "Texts of a model that wait or run; further requests are answered 429.",
            min=1,
            metavar="N",
        ),
    ] = 256
    max_body: Annotated[
        int, _flag(_LIMITS, "Bytes of a request's body.", min=1, metavar="BYTES")
    ] = 1_048_576
    max_new_tokens: Annotated[
        int | None,
        _flag(
            _LIMITS,
            "Largest max_tokens of a request.",
            min=1,
            metavar="N",
            show_default="the model's context",
        ),
    ] = None
    max_outputs: Annotated[
        int,
        _flag(
            _LIMITS,
            "Largest n, and outputs of a translation (1 + alternatives).",
            min=1,
            metavar="N",
        ),
    ] = 8
    max_stop: Annotated[
        int, _flag(_LIMITS, "Most stop texts of a request.", min=0, metavar="N")
    ] = 4
    request_timeout: Annotated[
        float,
        _flag(
            _LIMITS,
            "Seconds for a request, its wait in the queue included; then 504.",
            min=0.001,
            metavar="SECONDS",
        ),
    ] = 120.0
    read_timeout: Annotated[
        float,
        _flag(
            _LIMITS,
            "Seconds for a request's headers, and again for its body.",
            min=0.001,
            metavar="SECONDS",
        ),
    ] = 20.0
    drain_timeout: Annotated[
        float,
        _flag(
            _LIMITS,
            "Seconds that requests in progress have after SIGTERM.",
            min=1.0,
            metavar="SECONDS",
        ),
    ] = 30.0
    batch_tokens: Annotated[
        int | None,
        _flag(
            _RUN_TIME,
            "Padded tokens times beams of a batch; for a language model on eager, tokens in the "
            "caches of all outputs in progress, of which a single one may have more.",
            min=1,
            metavar="N",
            show_default="as measured by heedful optimize, or 8192; on eager at least twice the "
            "context",
        ),
    ] = None
    prefix_tokens: Annotated[
        int | None,
        _flag(
            _RUN_TIME,
            "Tokens of ended outputs whose keys and values a language model keeps, so that a "
            "prompt with the same API key which begins like one of them is read from there on; "
            "0: none.",
            min=0,
            metavar="N",
            show_default="8192",
        ),
    ] = None
    backend: Annotated[
        str,
        _flag(
            _RUN_TIME,
            "auto: the fastest that heedful optimize found. A language model batches continuously "
            "on eager alone.",
            metavar="auto|eager|compiled|ctranslate2",
        ),
    ] = "auto"
    precision: Annotated[
        str,
        _flag(_RUN_TIME, "Data type of the weights.", metavar="auto|float32|bfloat16|int8"),
    ] = "auto"
    trust_compiled: Annotated[
        bool,
        _flag(
            _RUN_TIME,
            "Run the native code in MODEL/backends/compiled even if it was not compiled by this "
            "user on this machine; it can do all that the server can.",
            "--trust-compiled",
        ),
    ] = False
    threads: Annotated[
        int | None,
        _flag(
            _RUN_TIME,
            "Threads of each model.",
            min=1,
            metavar="N",
            show_default="as measured, or by size",
        ),
    ] = None
    device: Annotated[
        str, _flag(_RUN_TIME, "auto, cpu, cuda, cuda:N or mps.", metavar="DEVICE")
    ] = "auto"
    log_texts: Annotated[
        bool,
        _flag(
            _LOG,
            "Write the bodies of requests to the log, which has no texts otherwise.",
            "--log-texts",
        ),
    ] = False
