"""What happens in a run, as events: the trainer sends them, listeners show, log and report them.

An event is a frozen dataclass and one line of JSON; a run's log is the list of its events.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import to_json as dump

from heedful.errors import UserError


@dataclass(frozen=True)
class RunStarted:
    """A session of a run begins; `resumed_from` is the step that it goes on from.

    `changes` are settings on which steps depend that differ from those before `resumed_from`, as
    "key (old -> new)": the steps are then not those of one recipe.
    `unit` is what `num_train` and `num_valid` count. `unigram_entropy` is that of the training
    targets, in nats a target: the loss of a model that knows their frequencies alone.
    """

    recipe: dict[str, Any]
    num_parameters: int
    num_train: int
    num_valid: int
    device: str
    total_steps: int | None
    resumed_from: int | None = None
    changes: list[str] = field(default_factory=list)
    unit: str = "examples"
    unigram_entropy: float | None = None
    event: Literal["run_started"] = "run_started"


@dataclass(frozen=True)
class StepDone:
    """Optimizer steps up to and with `step` are done.

    `loss` is the training criterion (label smoothing included) and `nll` the negative
    log-likelihood, both in nats per target token. `num_tokens` are the target tokens since the
    last such event, `seconds` the training time since the run began, earlier sessions included.
    `num_skipped` are steps since the last such event that were not taken, because the scaled
    gradient overflowed fp16; `grad_norm` is the mean over the others, NaN where there is none.
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
    num_skipped: int = 0
    event: Literal["step_done"] = "step_done"


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
    event: Literal["evaluated"] = "evaluated"

    @property
    def nll(self) -> float:
        """The loss without label smoothing, in nats per target."""
        return math.log(self.perplexity)

    @property
    def is_of_labels(self) -> bool:
        """Whether the targets are labels of texts, of which a perplexity says nothing."""
        return "accuracy" in self.scores


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint of `step` is whole on disk: "regular", saved by an evaluation, or "interim"."""

    step: int
    path: str
    kind: str
    event: Literal["checkpoint_saved"] = "checkpoint_saved"


StopReason = Literal["max_steps", "max_epochs", "early_stopping", "time_limit", "interrupted"]


@dataclass(frozen=True)
class RunFinished:
    """The session ends for `reason`; `best` and `scores` are metric name to value.

    `scored` says of which text, and of which weights, the `scores` are.
    """

    step: int
    seconds: float
    reason: StopReason
    best: dict[str, float] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    scored: str = ""
    event: Literal["run_finished"] = "run_finished"


Event: TypeAlias = Annotated[
    RunStarted | StepDone | Evaluated | CheckpointSaved | RunFinished, Field(discriminator="event")
]
_READER: TypeAdapter[Event] = TypeAdapter(Event)  # made once: a log has many lines


class Listener(Protocol):
    """A receiver of a run's events: a progress bar, a log."""

    def on(self, event: Event) -> None:
        """Handle an event; called in the order of the events."""

    def close(self) -> None:
        """Called once at the end of the session, also after an error or an interruption."""


@dataclass(frozen=True)
class EventCallback:
    """A listener that calls a function with each event."""

    function: Callable[[Event], None]

    def on(self, event: Event) -> None:
        """Call the function."""
        self.function(event)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def to_json(event: Event) -> str:
    """The event as one line of strict JSON; "event" names its kind.

    JSON has no NaN or infinity: such numbers become the strings "NaN", "Infinity", "-Infinity".
    """
    return dump(event, inf_nan_mode="strings").decode()


def from_json(line: bytes | str) -> Event:
    """The event that `to_json` wrote.

    Raises `UserError` when the line is not JSON, names no known kind, or lacks a field.
    """
    try:
        return _READER.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("event", *first["loc"])))
        raise UserError(f"{where}: {first['msg']}") from error


SHARES = ("exact_match", "token_accuracy", "accuracy", "macro_f1")


def format_score(name: str, value: float) -> str:
    """A score as people read it: shares (exact match, token accuracy) in per cent, others as is."""
    if name == "step":
        return f"{value:,.0f}"
    if name == "loss":
        return f"{value:.3f}"
    return f"{100 * value:.2f}%" if name in SHARES else f"{value:.2f}"


def score_label(name: str) -> str:
    """A metric's name as people write it: "bleu" is "BLEU", "exact_match" is "exact match"."""
    labels = {
        "bleu": "BLEU",
        "chrf": "chrF2",
        "chrf++": "chrF2++",
        "ter": "TER",
        "tokenized_lowercase_bleu": "tokenised lowercased BLEU",
        "macro_f1": "macro F1",
    }
    return labels.get(name, name.replace("_", " "))


def criterion(recipe: Mapping[str, Any], *, held_out: bool = False) -> str:
    """What a recipe's loss has beside the likelihood of the targets, "" where nothing.

    The loss of a held-out text has no terms but the task's own.
    """
    training, distillation = recipe.get("training", {}), recipe.get("distillation", {})
    taught = distillation.get("teacher") and distillation.get("level") == "word"
    parts = {
        "smoothed": training.get("label_smoothing"),
        "with the teacher's part": taught and not held_out,
        "with R-Drop": training.get("r_drop") and not held_out,
    }
    return ", ".join(name for name, is_there in parts.items() if is_there)
