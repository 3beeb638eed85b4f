"""What happens in a run, as events: the trainer sends them, listeners show, log and report them.

An event is a frozen dataclass and one line of JSON; a run's log is the list of its events.
"""

import json
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Protocol

from heedful.errors import UserError


@dataclass(frozen=True)
class RunStarted:
    """A session of a run begins; `resumed_from` is the step that it goes on from."""

    recipe: dict[str, Any]
    num_parameters: int
    num_train: int
    num_valid: int
    device: str
    total_steps: int | None
    resumed_from: int | None = None


@dataclass(frozen=True)
class StepDone:
    """Optimizer steps up to and with `step` are done.

    `loss` is the training criterion (label smoothing included) and `nll` the negative
    log-likelihood, both in nats per target token. `num_tokens` are the target tokens since the
    last such event, `seconds` the training time since the run began, earlier sessions included.
    """

    step: int
    epoch: int
    loss: float
    nll: float
    learning_rate: float
    grad_norm: float
    tokens_per_second: float
    num_tokens: int
    seconds: float


@dataclass(frozen=True)
class Sample:
    """One held-out example: what went in, what should come out, what came out."""

    source: str
    reference: str
    output: str


@dataclass(frozen=True)
class Evaluated:
    """The held-out set was evaluated after `step`.

    `loss` is the same criterion as `StepDone.loss`; `perplexity` is made without label smoothing;
    `token_accuracy` is a share from 0 to 1; `scores` are of decoded text, by metric name.
    """

    step: int
    epoch: int
    seconds: float
    loss: float
    perplexity: float
    token_accuracy: float
    scores: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    is_best: bool = False


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint of `step` is whole on disk; `kind` says why it is kept ("last", "best", ...)."""

    step: int
    path: str
    kind: str


StopReason = Literal["max_steps", "max_epochs", "early_stopping", "time_limit", "interrupted"]


@dataclass(frozen=True)
class RunFinished:
    """The session ends for `reason`; `best` and `scores` are metric name to value."""

    step: int
    seconds: float
    reason: StopReason
    best: dict[str, float] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)


Event = RunStarted | StepDone | Evaluated | CheckpointSaved | RunFinished

_KINDS: dict[str, type[Event]] = {
    "run_started": RunStarted,
    "step_done": StepDone,
    "evaluated": Evaluated,
    "checkpoint_saved": CheckpointSaved,
    "run_finished": RunFinished,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


class Listener(Protocol):
    """Whatever wants to know: a progress bar, a log."""

    def on(self, event: Event) -> None:
        """Takes one event, in the order in which they happen."""

    def close(self) -> None:
        """Called once at the end, after an error or an interruption too."""


def to_json(event: Event) -> str:
    """The event as one line of strict JSON; "event" names its kind.

    JSON has no NaN or infinity: such numbers become the strings "NaN", "Infinity", "-Infinity".
    """
    from pydantic_core import to_json as dump

    return dump({"event": _NAMES[type(event)], **vars(event)}, inf_nan_mode="strings").decode()


def from_json(line: str) -> Event:
    """The event that `to_json` wrote.

    Raises `UserError` when the line is not JSON, names no known kind, or lacks a field.
    """
    from pydantic import ValidationError

    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"event: not a line of JSON: {line[:60]!r}") from error
    name = record.pop("event", None) if isinstance(record, dict) else None
    if name not in _KINDS:
        raise UserError(f"event: no event of a run: {line[:60]!r}")
    try:
        event: Event = _reader(name).validate_python(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"event: {name}: {where}: {first['msg']}") from error
    return event


SHARES = ("exact_match", "token_accuracy", "accuracy", "macro_f1")


def format_score(name: str, value: float) -> str:
    """A score as people read it: shares (exact match, token accuracy) in per cent, others as is."""
    return f"{100 * value:.2f}%" if name in SHARES else f"{value:.2f}"


def score_label(name: str) -> str:
    """A metric's name as people write it: "bleu" is "BLEU", "exact_match" is "exact match"."""
    labels = {
        "bleu": "BLEU",
        "chrf": "chrF2",
        "chrf++": "chrF2++",
        "ter": "TER",
        "tokenized_lowercase_bleu": "tokenised lowercased BLEU",
    }
    return labels.get(name, name.replace("_", " "))


@cache
def _reader(name: str) -> Any:
    """The validator of one kind of event, made once: a log has many lines."""
    from pydantic import TypeAdapter

    return TypeAdapter(_KINDS[name])
