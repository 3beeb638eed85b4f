"""Prometheus metrics; their labels are routes, models and statuses, never anything of a request."""

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """Prometheus metrics of one server, in a separate registry."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        labels = ("route", "model", "status")
        self._requests = Counter("heedful_requests", "Answers.", labels, registry=registry)
        self._seconds = Histogram(
            "heedful_request_seconds",
            "Seconds from a request's headers to the end of its answer.",
            labels,
            buckets=_SECONDS,
            registry=registry,
        )
        self._in_progress = Gauge(
            "heedful_requests_in_progress", "Requests in progress.", registry=registry
        )
        self._tokens = Counter(
            "heedful_tokens", "Tokens read and generated.", ("model", "kind"), registry=registry
        )
        self._rows = Histogram(
            "heedful_batch_rows",
            "Rows of the batches and steps of a model.",
            ("model",),
            buckets=_ROWS,
            registry=registry,
        )
        self._refused = Counter(
            "heedful_refused", "Requests refused by a full queue.", ("model",), registry=registry
        )
        self._waiting = Gauge(
            "heedful_texts", "Texts that wait or run.", ("model",), registry=registry
        )

    def begin(self) -> None:
        """Count a request that begins."""
        self._in_progress.inc()

    def end(self, route: str, model: str, status: int, seconds: float) -> None:
        """Count an answer.

        Args:
            route: the path as declared, or "other".
            model: its name; "" for routes without one.
        """
        self._in_progress.dec()
        self._requests.labels(route, model, str(status)).inc()
        self._seconds.labels(route, model, str(status)).observe(seconds)

    def tokens(self, model: str, num_prompt: int, num_new: int) -> None:
        """Count the tokens of an answer."""
        self._tokens.labels(model, "prompt").inc(num_prompt)
        self._tokens.labels(model, "generated").inc(num_new)

    def refused(self, model: str) -> None:
        """Count a request that a full queue refuses."""
        self._refused.labels(model).inc()

    def batch_observer(self, model: str) -> Callable[[int, int], None]:
        """A function that counts the rows of each batch of a model."""
        rows = self._rows.labels(model)
        return lambda count, tokens: rows.observe(count)

    def exposition(self, num_texts: dict[str, int]) -> bytes:
        """All metrics in the text format of Prometheus.

        Args:
            num_texts: of each model.
        """
        for model, count in num_texts.items():
            self._waiting.labels(model).set(count)
        return generate_latest(self.registry)
