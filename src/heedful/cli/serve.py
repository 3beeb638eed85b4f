"""`heedful serve`: models over HTTP, for clients of OpenAI's and LibreTranslate's APIs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from heedful import extras
from heedful.cli.flags import Device
from heedful.cli.help import RUN_TIME
from heedful.errors import UserError

_ADDRESS, _LIMITS, _LOG = "Address and access", "Limits", "Log"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def _option(default: Any, *names: str, panel: str, help: str, **more: Any) -> Any:
    return typer.Option(default, *names, help=help, rich_help_panel=panel, **more)


def serve(
    *,
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Model directories. A model is called by its directory's name, or NAME=DIR.",
        ),
    ],
    host: str = _option(
        "127.0.0.1",
        panel=_ADDRESS,
        help="Address to listen to; the default is for clients on this machine alone. 0.0.0.0: "
        "every address, which needs --keys, or a proxy that checks who calls.",
    ),
    port: int = _option(8000, panel=_ADDRESS, help="Port; 0: any free one.", min=0, max=65_535),
    keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File of API keys, one a line; `admin KEY` may also replace models by "
            "/admin/reload. Every route but /health needs one.",
            show_default="none needed",
            rich_help_panel=_ADDRESS,
        ),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Origin whose pages may call the server from a browser, such as "
            "https://example.org; * for all; repeatable.",
            show_default="none",
            rich_help_panel=_ADDRESS,
        ),
    ] = None,
    max_queue: int = _option(
        256,
        panel=_LIMITS,
        help="Texts of a model that wait or run; further requests are answered 429.",
        min=1,
    ),
    max_body: int = _option(1_048_576, panel=_LIMITS, help="Bytes of a request's body.", min=1),
    max_new_tokens: int | None = _option(
        None,
        panel=_LIMITS,
        help="Largest max_tokens of a request.",
        show_default="the model's context",
        min=1,
    ),
    max_outputs: int = _option(
        8, panel=_LIMITS, help="Largest n, and outputs of a translation.", min=1
    ),
    request_timeout: float = _option(
        120.0,
        panel=_LIMITS,
        help="Seconds for a request, its wait in the queue included; then 504.",
        min=0.001,
    ),
    read_timeout: float = _option(
        20.0,
        panel=_LIMITS,
        help="Seconds for a request's headers, and again for its body.",
        min=0.001,
    ),
    drain_timeout: float = _option(
        30.0,
        panel=_LIMITS,
        help="Seconds that requests in progress have after SIGTERM.",
        min=1.0,
    ),
    batch_tokens: int | None = _option(
        None,
        panel=RUN_TIME,
        help="Padded tokens times beams of a batch; for a language model, of all outputs in "
        "progress.",
        show_default="as measured by heedful optimize, or 8192",
        min=1,
    ),
    prefix_tokens: int = _option(
        8_192,
        panel=RUN_TIME,
        help="Tokens of ended outputs whose keys and values a language model keeps, so that a "
        "prompt which begins like one of them is read from there on; 0: none.",
        min=0,
    ),
    backend: str = _option(
        "auto",
        panel=RUN_TIME,
        metavar="auto|eager|compiled|ctranslate2",
        help="auto: the fastest that heedful optimize found. A language model batches "
        "continuously on eager alone.",
    ),
    precision: str = _option(
        "auto",
        panel=RUN_TIME,
        metavar="auto|float32|bfloat16|int8",
        help="Data type of the weights.",
    ),
    threads: int | None = _option(
        None,
        panel=RUN_TIME,
        help="Threads of each model.",
        show_default="as measured, or by size",
        min=1,
    ),
    device: Device = "auto",
    check: bool = _option(
        False,
        "--check",
        panel=_ADDRESS,
        help="Open the models and the keys, let each model read a token, and end.",
    ),
    log_texts: bool = _option(
        False,
        "--log-texts",
        panel=_LOG,
        help="Write the bodies of requests to the log, which has no texts otherwise.",
    ),
) -> None:
    """Serve models over HTTP, to the clients of OpenAI's and LibreTranslate's APIs.

    Routes by the kind of model: /translate, /languages and /detect (translators);
    /v1/completions and /v1/chat/completions (language models); /v1/embeddings (all); /classify;
    /fill. Further: /v1/models, /health/live, /health/ready, /metrics (Prometheus), and /docs with
    all parameters.

    SIGTERM and Ctrl-C answer the requests in progress and end; SIGHUP opens the models and the keys
    again, without losing a request. The server has no TLS: put a reverse proxy before it, as
    docs/serving.md shows.

    Example: heedful serve runs/de-en runs/assistant --port 8000
    """
    extras.require("serve", "heedful serve")
    from heedful.serve.server import check_models
    from heedful.serve.server import serve as run
    from heedful.serve.settings import Settings

    directories = _named(models)
    if host not in _LOOPBACK and keys is None:
        typer.echo(f"note: anyone who can reach {host} may use this server (--keys)", err=True)
    settings = Settings(
        keys=keys,
        cors=tuple(cors or ()),
        max_queue=max_queue,
        max_body=max_body,
        max_new_tokens=max_new_tokens,
        max_outputs=max_outputs,
        request_timeout=request_timeout,
        read_timeout=read_timeout,
        drain_timeout=drain_timeout,
        batch_tokens=batch_tokens,
        prefix_tokens=prefix_tokens,
        backend=backend,
        precision=precision,
        threads=threads,
        device=device,
        log_texts=log_texts,
    )
    if check:
        for line in check_models(directories, settings):
            typer.echo(line)
        return
    _log_to_stderr()
    run(directories, host, port, settings, lambda url: typer.echo(f"ready at {url}", err=True))


def _named(models: list[str]) -> dict[str, Path]:
    """Model directories by name; raises UserError for two of one name, or a bad one."""
    directories: dict[str, Path] = {}
    for text in models:
        name, sign, path = text.partition("=")
        directory = Path(path if sign else text)
        name = name if sign else directory.resolve().name
        if not name or not name.isprintable():
            raise UserError(f"{text!r} gives a model no name; write NAME=DIR")
        if name in directories:
            raise UserError(f"two models are named {name}; write NAME=DIR for one of them")
        if not directory.is_dir():
            raise UserError(f"{directory} is not a directory; give the model that a run wrote")
        directories[name] = directory
    return directories


def _log_to_stderr() -> None:
    """Log lines of the server and of uvicorn, with the time in UTC."""
    import logging
    import time

    handler = logging.StreamHandler()
    formatter = logging.Formatter("%(asctime)sZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    for name, level in (("heedful.serve", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.addHandler(handler)
        logger.propagate = False
