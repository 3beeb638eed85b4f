"""Encoders in ONNX Runtime, as a backend."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from heedful.backends.base import Capability, Settings
from heedful.backends.onnxruntime.facts import OnnxFacts, check_runs
from heedful.backends.onnxruntime.session import open_session


class OnnxEncoder:
    """The ONNX graph of an encoder-only net; CPU only. Rows of a batch are padded on the right.

    Raises:
        UserError: ONNX Runtime is not installed, or cannot open the graph; another device.
    """

    name = "onnxruntime"
    capabilities: frozenset[Capability]

    def __init__(
        self,
        directory: Path,
        facts: OnnxFacts,
        precision: str,
        settings: Settings,
        device: str = "cpu",
    ) -> None:
        check_runs(device)
        self.facts = facts
        self.precision = precision
        self.settings = replace(settings, threads=settings.threads or 1, workers=1)
        self._session = open_session(directory / "encoder.onnx", self.settings.threads or 1)
        self.capabilities = frozenset({"states", "logits"} if facts.has_head else {"states"})

    def states(
        self, rows: list[list[int]], types: list[list[int]] | None = None
    ) -> list[np.ndarray]:
        """See `EncoderBackend.states`."""
        return self._of_tokens(self._run("states", rows, types), rows)

    def logits(
        self, rows: list[list[int]], types: list[list[int]] | None = None
    ) -> list[np.ndarray]:
        """See `EncoderBackend.logits`."""
        logits = self._run("logits", rows, types)
        return list(logits) if self.facts.first_token_only else self._of_tokens(logits, rows)

    def _run(self, output: str, rows: list[list[int]], types: list[list[int]] | None) -> Any:
        lengths = np.array([len(row) for row in rows])
        feed = {"ids": _padded(rows, lengths), "lengths": lengths}
        if self.facts.num_types > 1:
            padded = np.zeros_like(feed["ids"]) if types is None else _padded(types, lengths)
            feed["types"] = padded.clip(max=self.facts.num_types - 1)
        return self._session.run([output], feed)[0]

    @staticmethod
    def _of_tokens(values: np.ndarray, rows: list[list[int]]) -> list[np.ndarray]:
        """The values of each row's tokens, without padding."""
        return [of_row[: len(row)] for of_row, row in zip(values, rows, strict=True)]


def _padded(rows: list[list[int]], lengths: np.ndarray) -> np.ndarray:
    """Rows padded on the right with 0."""
    padded = np.zeros((len(rows), lengths.max()), np.int64)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = ids
    return padded
