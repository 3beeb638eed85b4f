"""Requests to a language model, their outputs, and the choice of the next tokens of outputs."""

import asyncio
import random
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.backends.base import GenerationRequest
from heedful.errors import UserError
from heedful.generation.hypotheses import first_largest
from heedful.generation.request import EndReason, SearchRequest, StopFunction, check_not_nan
from heedful.generation.rules import Temperature, TopH, Truncation
from heedful.generation.sampling import inverse_cdf
from heedful.generation.search_base import RequestRules
from heedful.generation.token_rules import Rule, single_bans

HEADROOM = 16  # steps for which there must be room when an output begins
_RESHAPING = (Temperature, TopH, Truncation)


@dataclass(frozen=True)
class OutputPiece:
    """New tokens of one output of a `GenerationJob`, from the worker's thread to the event loop.

    Attributes:
        index: of the output.
        log_probs: of the tokens; NaN where they were not requested.
        top: for each token the most probable tokens and their log-probabilities.
        reason: why the output ended; None: it is in progress.
        error: the error that ended it.
    """

    index: int
    ids: list[int]
    log_probs: list[float]
    top: list[list[tuple[int, float]]]
    reason: EndReason | None = None
    error: Exception | None = None

    @classmethod
    def failed(cls, index: int, error: Exception) -> "OutputPiece":
        """The end of an output by an error."""
        return cls(index, [], [], [], "dead_end", error)


@dataclass(eq=False)
class GenerationJob:
    """A checked request to a language model.

    Attributes:
        rows: ids of the prompts.
        request: of all prompts.
        samples: outputs of each prompt; output i is of prompt i // samples.
        num_top: most probable tokens to report with each token; None: no log-probabilities.
        streams: the client reads tokens as they come.
        tenant: who asks (`RequestInfo.tenant`); prefixes are shared among the prompts of one alone.
        echoes: texts of the prompts that the outputs begin with; None: they do not.
        generates: False: only the prompts are read, for their log-probabilities.
        turn: of the next output or slice that is queued (`ContinuousBatch`), in tokens.
        pieces: of the outputs as they are generated; filled in the event loop.
        cancelled: the remaining tokens are not needed.
    """

    rows: list[list[int]]
    request: GenerationRequest
    samples: int = 1
    num_top: int | None = None
    streams: bool = False
    tenant: str = ""
    echoes: list[str] | None = None
    generates: bool = True
    turn: int = 0
    pieces: "asyncio.Queue[OutputPiece]" = field(default_factory=asyncio.Queue)
    cancelled: bool = False

    @property
    def num_outputs(self) -> int:
        """Outputs of all prompts."""
        return len(self.rows) * self.samples

    @property
    def num_prompt(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.rows))

    def fail(self, error: Exception) -> None:
        """End all outputs with an error; called in the event loop."""
        for index in range(self.num_outputs):
            self.pieces.put_nowait(OutputPiece.failed(index, error))

    def cancel(self) -> None:
        """Take the outputs out of the batch before the next step."""
        self.cancelled = True


@dataclass(eq=False)
class Output:
    """One output of a job in a `ContinuousBatch`, from its prompt to its end.

    Attributes:
        index: of the output in its job.
        prompt: its ids; at least one.
        request: limits, EOS ids and rules, of this output alone.
        stop: see `sample_steps`.
        generator: of sampling; None: greedy decoding.
        ids, log_probs, top: of the new tokens; see `OutputPiece`.
        num_sent: new tokens that have been delivered.
        reason: why it has ended; None: it is in progress.
        error: the error that ended it.
        turn: outputs run in this order; see `ContinuousBatch`.
        slice_end: number of new tokens at which its slice ends.
        runs: it is in the batch, or its prompt is being read.
        is_read: its prompt is being read in parts.
    """

    job: GenerationJob
    index: int
    prompt: list[int]
    request: SearchRequest
    stop: StopFunction | None
    generator: random.Random | None
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    num_sent: int = 0
    reason: EndReason | None = None
    error: Exception | None = None
    turn: int = 0
    slice_end: int = 0
    runs: bool = False
    is_read: bool = False
    rules: RequestRules = field(init=False)
    banned_ids: list[int] | None = field(init=False)  # of all rules but `_RESHAPING`; None: others
    reshaping: tuple[Rule, ...] = field(init=False)
    has_scores: bool = field(init=False)
    needs_log_probs: bool = field(init=False)  # not only the largest logit that is not banned

    def __post_init__(self) -> None:
        self.rules = RequestRules(self.request, "the model", can_overwrite=True)
        rules = self.request.rules
        self.reshaping = tuple(rule for rule in rules if isinstance(rule, _RESHAPING))
        self.banned_ids = single_bans([rule for rule in rules if rule not in self.reshaping])
        self.has_scores = self.job.request.options.scores
        is_plain = self.banned_ids is not None and not self.reshaping and self.generator is None
        self.needs_log_probs = self.has_scores or bool(self.job.num_top) or not is_plain

    @property
    def tokens(self) -> list[int]:
        """Prompt and new tokens."""
        return [*self.prompt, *self.ids]

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and new ones."""
        return len(self.prompt) + len(self.ids)

    @property
    def headroom(self) -> int:
        """Tokens that the next steps add, up to `HEADROOM`."""
        return min(HEADROOM, self.request.max_new_tokens[0] - len(self.ids))

    def end(self, error: Exception) -> None:
        """End by an error, without a further token."""
        self.error, self.reason = error, "dead_end"

    def take_piece(self) -> OutputPiece:
        """The new tokens that have not been delivered, which they now are."""
        first, self.num_sent = self.num_sent, len(self.ids)
        columns = self.ids[first:], self.log_probs[first:], self.top[first:]
        return OutputPiece(self.index, *columns, self.reason, self.error)


def append_next_tokens(outputs: list[Output], logits: Float[Tensor, "N V"]) -> None:
    """Append the next token to each output, by greedy choice or sampling; some outputs end."""
    log_probs = logits.float()
    top: list[list[tuple[int, float]]] = [[] for _ in outputs]
    if any(output.needs_log_probs for output in outputs):
        log_probs = log_probs.log_softmax(-1)
        top = _top_tokens(outputs, log_probs)
    largest = log_probs.amax(1).tolist()
    scores = _under_rules(outputs, log_probs)
    best, token = first_largest(scores)
    sampled = [i for i, output in enumerate(outputs) if output.generator is not None]
    if sampled:
        rows = torch.tensor(sampled, device=token.device)
        numbers = [[outputs[i].generator.random()] for i in sampled]  # type: ignore[union-attr]
        uniform = torch.tensor(numbers, dtype=torch.float64)[:, 0]
        token[rows, 0] = inverse_cdf(scores[rows], uniform.to(scores.device))
    values = log_probs.gather(1, token)
    columns = token[:, 0].tolist(), values[:, 0].tolist(), largest, best[:, 0].tolist()
    for output, row, top_tokens in zip(outputs, zip(*columns, strict=True), top, strict=True):
        _append(output, *row, top_tokens)


def _append(
    output: Output,
    token: int,
    log_prob: float,
    of_model: float,
    best: float,
    top: list[tuple[int, float]],
) -> None:
    """Append a token to its output, and check whether it ends.

    Args:
        of_model, best: the largest value before the rules, and under them.
        top: the most probable tokens and their log-probabilities.
    """
    if output.error is None:
        try:
            check_not_nan(of_model, len(output.ids) + 1, "the model")
            check_not_nan(best, len(output.ids) + 1, "a rule")
        except UserError as error:  # for the server a defect, not a bad request
            output.error = FloatingPointError(str(error))
    if output.error is not None or best == -torch.inf:
        output.reason = "dead_end"
        return
    output.ids.append(token)
    output.log_probs.append(log_prob if output.has_scores else torch.nan)
    output.top.append(top)
    try:
        output.reason = output.request.end_reason(0, output.ids, output.stop)
    except Exception as error:  # of the tokenizer's decoder
        output.end(error)


def _under_rules(outputs: list[Output], log_probs: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    """The log-probabilities after the rules of each output, whose error is set if one fails.

    Outputs with the same bans and numbers, whatever their lengths, share the operations; bans are
    written in place.
    """
    groups: dict[object, list[int]] = {}
    for index, output in enumerate(outputs):
        shared = output.banned_ids is not None
        key = (tuple(output.banned_ids or ()), output.reshaping) if shared else index
        groups.setdefault(key, []).append(index)
    if len(groups) == 1 and outputs[0].banned_ids is not None:
        return _under_shared_rules(outputs[0], log_probs)
    result = torch.empty_like(log_probs)
    for indices in groups.values():
        rows, output = torch.tensor(indices, device=log_probs.device), outputs[indices[0]]
        own = log_probs[rows]
        try:
            if output.banned_ids is not None:
                result[rows] = _under_shared_rules(output, own)
            else:
                new = torch.tensor([output.ids], dtype=torch.long, device=log_probs.device)
                result[rows] = output.rules(own, new, [0])
        except UserError as error:
            for index in indices:
                outputs[index].error = error
    return result


def _under_shared_rules(output: Output, log_probs: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    new = torch.empty(len(log_probs), 0, dtype=torch.long, device=log_probs.device)
    return output.rules(log_probs, new, [0])


def _top_tokens(
    outputs: list[Output], log_probs: Float[Tensor, "N V"]
) -> list[list[tuple[int, float]]]:
    """The `num_top` most probable tokens of each output, with their log-probabilities."""
    numbers = [output.job.num_top or 0 for output in outputs]
    count = min(max(numbers), log_probs.size(1))
    if not count:
        return [[] for _ in outputs]
    best = log_probs.topk(count, dim=1)
    return [
        list(zip(ids, values, strict=True))[:number]
        for number, ids, values in zip(
            numbers, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]
