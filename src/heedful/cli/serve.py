"""`heedful serve`: models over HTTP, for clients of OpenAI's and LibreTranslate's APIs."""

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from heedful import extras
from heedful.cli.guard import printable
from heedful.errors import UserError
from heedful.serve.settings import Settings

if TYPE_CHECKING:
    from heedful.serve.models import Registry

_ACCESS = "Address and access"


def serve(
    *,
    models: list[str] = typer.Argument(
        metavar="MODEL",
        help="Model directories. A model is called by its directory's name, or NAME=DIR.",
    ),
    host: str = typer.Option(
        "127.0.0.1",
        metavar="ADDRESS",
        help="Address to listen to; the default is for clients on this machine alone. 0.0.0.0: "
        "every address, which needs --keys, or a proxy that checks who calls.",
        rich_help_panel=_ACCESS,
    ),
    port: int = typer.Option(
        8000,
        metavar="PORT",
        help="Port; 0: any free one.",
        min=0,
        max=65_535,
        rich_help_panel=_ACCESS,
    ),
    check: bool = typer.Option(
        False,
        "--check",
        help="Open the models and the keys, let each model read a token, and end.",
        rich_help_panel=_ACCESS,
    ),
    settings: Settings,
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
    from heedful.serve.hosts import is_loopback
    from heedful.serve.server import check_models
    from heedful.serve.server import serve as run

    directories = _directories_by_name(models)
    if check:
        for line in check_models(directories, settings):
            typer.echo(line)
        return

    def report(url: str, registry: "Registry") -> None:
        """Print the address, and notes: on a server without keys, and a flag without effect."""
        if not is_loopback(host) and settings.keys is None:
            typer.echo(f"note: anyone who can reach {host} may use this server (--keys)", err=True)
        if settings.prefix_tokens is not None and not any(
            served.keeps_prefixes for served in registry.models.values()
        ):
            typer.echo(
                "note: --prefix-tokens has no effect: it is for language models on the net itself "
                "(--backend eager) without windowed layers",
                err=True,
            )
        typer.echo(f"ready at {url}", err=True)

    _log_to_stderr()
    run(directories, host, port, settings, report)


def _directories_by_name(models: list[str]) -> dict[str, Path]:
    """Model directories by name; raises UserError for two of one name, or a bad one."""
    directories: dict[str, Path] = {}
    for text in models:
        name, sign, path = text.partition("=")
        if not sign or Path(text).is_dir():  # of a name with "="
            name, path = Path(text).resolve().name, text
        directory = Path(path)
        if not name or not name.isprintable():
            raise UserError(f"{text!r} gives a model no name; write NAME=DIR")
        if name in directories:
            raise UserError(f"two models are named {name}; write NAME=DIR for one of them")
        if not directory.is_dir():
            raise UserError(f"{directory} is not a directory; give the model that a run wrote")
        directories[name] = directory
    return directories


class LogLines(logging.Formatter):
    """One line for each record, with the time in UTC; lines of tracebacks are indented below it.

    What a request contains can neither begin a line nor control a terminal.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)sZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """The traceback of an error, whose message may have line breaks."""
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"    {printable(line)}" for line in lines)


def _log_to_stderr() -> None:
    """Log lines of the server and of uvicorn."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogLines())
    for name, level in (("heedful.serve", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.addHandler(handler)
        logger.propagate = False
