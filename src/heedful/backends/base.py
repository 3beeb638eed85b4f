"""The interface of backends: token ids in, token ids, scores or states out.

Backends do not handle texts, tokenizers or tasks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from heedful.data.decoding import TextDecoder
from heedful.generation.outputs import Counts, Hypothesis, LengthScore
from heedful.options import Options, StopRule

Capability = Literal["states", "logits", "target_scores"]
"""Methods of `EncoderBackend` and `ScoringBackend` that a backend supports for its net."""


@dataclass(frozen=True)
class Settings:
    """Run-time settings of a backend.

    Attributes:
        threads: cores of each worker; None: chosen by the backend.
        workers: batches run side by side.
        batch_tokens: padded tokens of a batch; None: the default of `Options`.
        records_steps: the net itself, on CUDA, records steps of a search and replays them
            (`heedful.backends.torch.captured`).
        may_reduce: fewer threads beside other programs. Not for a number that the user gives:
            another number of threads changes the last digits of scores.
    """

    threads: int | None = None
    workers: int = 1
    batch_tokens: int | None = None
    records_steps: bool = True
    may_reduce: bool = False


class GenerationRequest(NamedTuple):  # a frozen dataclass takes three times as long to make
    """One call of a generation backend. Five fields have an entry for each row (`select`).

    Attributes:
        options: with every default filled in (`Options.with_defaults`).
        decoder_start_ids: first ids of an encoder-decoder's target; empty for decoder-only nets.
        eos_ids: ids that end an output.
        suppressed_ids: ids that are excluded from outputs.
        forced_bos_id: the first id of each output; None: any.
        forced_eos_id: the id at the length limit; None: any.
        bad_words_ids: sequences of ids that are excluded from outputs.
        banned_texts: the `BannedTexts` of the outputs; None: none.
        required_ids: sequences of ids that each output must have.
        max_length: positions of the net.
        draft: of speculative decoding: "lookup", or another net's `Eager` and its start ids.
        decoder: of the tokenizer of outputs; None: the model has no tokenizer.
        max_new_tokens: most new tokens of each row, EOS included.
        prompt_numbers: the index of each row among all prompts, for a prefix function.
        output_prefixes: first ids of each output, after `forced_bos_id`; None: any.
        seeds: of sampling; None: no sampling.
        counts: of each output (`ExactCounts`), of a search that the caller of the model did not
            ask for; None: any.
        on_output: called with the index and the outputs of each row, as soon as they are complete,
            by backends that can tell before the end of the batch; the others do not call it.
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
    decoder: TextDecoder | None
    max_new_tokens: list[int]
    prompt_numbers: list[int]
    output_prefixes: list[list[int]] | None
    seeds: list[int] | None
    counts: list[Counts] | None = None
    banned_texts: Any = None
    on_output: Callable[[int, list[Hypothesis]], None] | None = None

    @property
    def score(self) -> LengthScore:
        """The score that outputs are ranked by."""
        options = self.options
        return LengthScore(options.normalization or "average", options.length_penalty or 0.0)

    def select(self, indices: list[int], **changes: Any) -> "GenerationRequest":
        """The request of some of the rows, with fields changed.

        `on_output` is left out unless the rows are all, in their order.
        """
        if not changes and indices == [*range(len(self.max_new_tokens))]:
            return self
        names = ("max_new_tokens", "prompt_numbers", "output_prefixes", "seeds", "counts")
        columns = {name: getattr(self, name) for name in names}
        selected = {
            name: column if column is None else [column[index] for index in indices]
            for name, column in columns.items()
        }
        return self._replace(on_output=None, **selected | changes)


@runtime_checkable
class Backend(Protocol):
    """A program or library that runs one net. All backends agree up to rounding."""

    name: str
    settings: Settings
    capabilities: frozenset[Capability]

    @property
    def precision(self) -> str:
        """The data type of the weights: float32, bfloat16, int8 and so on."""


@runtime_checkable
class GenerationBackend(Backend, Protocol):
    """A backend of an encoder-decoder or decoder-only net.

    Attributes:
        stop_rule: of every beam search, whatever the options say; None: that of the options.
    """

    stop_rule: StopRule | None

    def unsupported_reasons(self, rows: list[list[int]], request: GenerationRequest) -> list[str]:
        """Every reason why the backend cannot run a request; empty where it can.

        A reason names an option as `option NAME`. Without rows: the reasons of the options alone.
        """

    def outputs(self, rows: list[list[int]], request: GenerationRequest) -> list[list[Hypothesis]]:
        """The outputs of each row of one batch, best first.

        Empty for a row whose search the backend could not complete as the net does: the caller
        runs the net.
        """

    def submit(
        self, rows: list[list[int]], request: GenerationRequest
    ) -> Callable[[], list[list[Hypothesis]]]:
        """Start `outputs` where the backend has workers; the returned function waits for it."""

    def stream_tokens(
        self, row: list[int], request: GenerationRequest
    ) -> Iterator[tuple[list[int], bool]]:
        """New tokens of one output as they are decoded, and whether they are the last."""

    def log_probs(
        self, rows: list[list[int]], targets: list[list[int]] | None, request: GenerationRequest
    ) -> list[np.ndarray]:
        """Natural log-probabilities of given tokens, by teacher forcing.

        With targets: of each target's tokens and the EOS behind them, given its source. Without:
        of all tokens of each row but the first.
        """


def own_stop_rule(backend: GenerationBackend, options: Options) -> StopRule | None:
    """The stop rule of a backend's beam search if it is not that of the options."""
    has_other = options.by_beams and backend.stop_rule != options.stop_rule
    return backend.stop_rule if has_other else None


@runtime_checkable
class ScoringBackend(Backend, Protocol):
    """A backend with the capability `target_scores`."""

    def target_scores(self, batch: Any) -> Any:
        """`TargetScores` of the targets of a `Batch`."""


@runtime_checkable
class EncoderBackend(Backend, Protocol):
    """A backend with the capabilities `states` or `logits`."""

    def states(
        self, rows: list[list[int]], types: list[list[int]] | None = None
    ) -> list[np.ndarray]:
        """States (T, D) of the last layer of the encoder, or of a decoder-only net, for each row.

        Args:
            types: token type ids of each row; None: all 0.
        """

    def logits(
        self, rows: list[list[int]], types: list[list[int]] | None = None
    ) -> list[np.ndarray]:
        """Logits of an encoder's head: (C) for each row, or (T, V) for a head over tokens."""
