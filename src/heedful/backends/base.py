"""What an engine is: it takes ids and gives ids, and knows neither text nor what a model is for."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from heedful.generation.hypotheses import Hypothesis, LengthScore
from heedful.options import Options


@dataclass(frozen=True)
class Settings:
    """How an engine is run: cores of each worker, workers side by side, padded tokens at once."""

    threads: int | None = None
    workers: int = 1
    batch_tokens: int | None = None


class Asked(NamedTuple):  # made anew for each call: a frozen dataclass takes thrice as long
    """What one call asks of an engine. The last four fields have one entry for each row.

    Attributes:
        options: with nothing left open (`Options.with_defaults`).
        start: what a decoder of two stacks reads first; none for one stack.
        end: any of these ends a text.
        never: may not be written.
        first, last: the token that must come first, and the one that must stand at the limit.
        banned: sequences of ids that may not be written.
        required: those that each output must hold.
        max_length: positions that the net has.
        draft: of speculative decoding: "lookup", or another net's engine with its start ids.
        decode: the text of new ids, for stop texts.
        limits: most new tokens.
        numbers: the rows' own numbers among all prompts, for a prefix function.
        prefixes: ids that each output must begin with, after `first`; None: any.
        seeds: of drawing; None: nothing is drawn.
    """

    options: Options
    start: tuple[int, ...]
    end: tuple[int, ...]
    never: tuple[int, ...]
    first: int | None
    last: int | None
    banned: list[list[int]]
    required: list[list[int]]
    max_length: int
    draft: Any
    decode: Callable[[list[int]], str]
    limits: list[int]
    numbers: list[int]
    prefixes: list[list[int]] | None
    seeds: list[int] | None

    @property
    def score(self) -> LengthScore:
        """How outputs are scored."""
        options = self.options
        return LengthScore(options.normalization or "average", options.length_penalty or 0.0)

    def of(self, places: list[int], **changes: Any) -> "Asked":
        """For these of the rows alone."""
        if not changes and places == [*range(len(self.limits))]:
            return self
        of_rows = {name: getattr(self, name) for name in ("limits", "numbers", "prefixes", "seeds")}
        chosen = {
            name: each if each is None else [each[place] for place in places]
            for name, each in of_rows.items()
        }
        return self._replace(**chosen | changes)


@runtime_checkable
class Backend(Protocol):
    """What runs a model. Of equal questions each gives equal answers, but for rounding."""

    name: str
    settings: Settings
    reads: frozenset[str]  # those of "states", "logits" and "scores" that it gives

    @property
    def precision(self) -> str:
        """Of the weights."""

    def lacks(self, rows: list[list[int]], asked: Asked) -> list[str]:
        """Every reason why this cannot be run here; none: it can."""

    def outputs(self, rows: list[list[int]], asked: Asked) -> list[list[Hypothesis]]:
        """Of one batch of prompts the outputs of each, best first."""

    def submit(self, rows: list[list[int]], asked: Asked) -> Callable[[], list[list[Hypothesis]]]:
        """`outputs`, begun at once where there are workers; what is returned waits for them."""

    def runs(self, row: list[int], asked: Asked) -> Iterator[tuple[list[int], bool]]:
        """New tokens of one output as they are written, and whether they were the last."""

    def log_probs(
        self, rows: list[list[int]], targets: list[list[int]] | None, asked: Asked
    ) -> list[np.ndarray]:
        """Log-probabilities of given tokens: of each target and of the end behind it, given its
        source; without targets of all tokens of each row but the first."""

    def states(
        self, rows: list[list[int]], types: list[list[int]] | None = None
    ) -> list[np.ndarray]:
        """The states (T, D) of the last layer of what reads, of each row."""

    def logits(
        self, rows: list[list[int]], types: list[list[int]] | None = None
    ) -> list[np.ndarray]:
        """What an encoder's head says: of each row (C), or of each of its tokens (T, V)."""
