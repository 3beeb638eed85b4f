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


class GenerationRequest(NamedTuple):  # a frozen dataclass takes three times as long to make
    """One call of a backend: options, and ids of tokens. The last four have an entry for each row.

    Attributes:
        options: with no default left open (`Options.with_defaults`).
        decoder_start_ids: ids that the decoder of two stacks reads first; none for one stack.
        eos_ids: any of these ends a text.
        suppressed_ids: ids that may not be written.
        forced_bos_id: the id that must be written first; None: any.
        forced_eos_id: the id that must stand at the length limit; None: any.
        bad_words_ids: sequences of ids that may not be written.
        required_ids: sequences of ids that each output must hold.
        max_length: positions that the net has.
        draft: of speculative decoding: "lookup", or another net's backend with its start ids.
        decode: the text of new ids, for stop texts.
        max_new_tokens: the most new tokens of each row, the end included.
        prompt_numbers: the number of each row among all prompts, for a prefix function.
        output_prefixes: ids that each output must begin with, after `forced_bos_id`; None: any.
        seeds: of drawing; None: nothing is drawn.
    """

    options: Options
    decoder_start_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    suppressed_ids: tuple[int, ...]
    forced_bos_id: int | None
    forced_eos_id: int | None
    bad_words_ids: list[list[int]]
    required_ids: list[list[int]]
    max_length: int
    draft: Any
    decode: Callable[[list[int]], str]
    max_new_tokens: list[int]
    prompt_numbers: list[int]
    output_prefixes: list[list[int]] | None
    seeds: list[int] | None

    @property
    def score(self) -> LengthScore:
        """How outputs are scored."""
        options = self.options
        return LengthScore(options.normalization or "average", options.length_penalty or 0.0)

    def of(self, places: list[int], **changes: Any) -> "GenerationRequest":
        """The request of these rows alone."""
        if not changes and places == [*range(len(self.max_new_tokens))]:
            return self
        names = ("max_new_tokens", "prompt_numbers", "output_prefixes", "seeds")
        columns = {name: getattr(self, name) for name in names}
        chosen = {
            name: column if column is None else [column[place] for place in places]
            for name, column in columns.items()
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

    def unsupported_reasons(self, rows: list[list[int]], request: GenerationRequest) -> list[str]:
        """Every reason why this cannot be run here; none: it can."""

    def outputs(self, rows: list[list[int]], request: GenerationRequest) -> list[list[Hypothesis]]:
        """Of one batch of prompts the outputs of each, best first."""

    def submit(
        self, rows: list[list[int]], request: GenerationRequest
    ) -> Callable[[], list[list[Hypothesis]]]:
        """`outputs`, begun at once where there are workers; what is returned waits for them."""

    def runs(self, row: list[int], request: GenerationRequest) -> Iterator[tuple[list[int], bool]]:
        """New tokens of one output as they are written, and whether they were the last."""

    def log_probs(
        self, rows: list[list[int]], targets: list[list[int]] | None, request: GenerationRequest
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
