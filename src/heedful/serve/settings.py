"""Settings of the server."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """Limits and options of the server, for all its models.

    Attributes:
        keys: file of API keys; None: the server needs none.
        cors: origins whose pages may call the server from a browser; ("*",): all.
        max_queue: texts of a model that wait or run; more are refused with 429.
        max_body: bytes of a request's body.
        max_new_tokens: largest `max_tokens` of a request; None: the model's positions.
        max_outputs: largest `n`, and number of outputs of a translation (1 + `alternatives`).
        max_stop: stop texts of a request.
        request_timeout: seconds for a request, its wait included.
        read_timeout: seconds for a request's headers, and again for its body.
        drain_timeout: seconds that requests in progress have after SIGTERM.
        batch_tokens: padded tokens of a batch; None: as measured by `heedful optimize`.
        prefix_tokens: see `ContinuousBatch`.
        backend, precision, threads, device: as of `heedful.load`.
        log_texts: write the bodies of requests to the log.
    """

    keys: Path | None = None
    cors: tuple[str, ...] = ()
    max_queue: int = 256
    max_body: int = 1_048_576
    max_new_tokens: int | None = None
    max_outputs: int = 8
    max_stop: int = 4
    request_timeout: float = 120.0
    read_timeout: float = 20.0
    drain_timeout: float = 30.0
    batch_tokens: int | None = None
    prefix_tokens: int = 8_192
    backend: str = "auto"
    precision: str = "auto"
    threads: int | None = None
    device: str = "auto"
    log_texts: bool = False
