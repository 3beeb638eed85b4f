"""The events of a run: emitted by the trainer, and displayed, logged and reported by listeners.

An event is a frozen dataclass, and one line of JSON in the run's log.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field


@dataclass(frozen=True)
class RunStarted:
    """The start of a session of a run.

    Attributes:
        resumed_from: the step of the checkpoint that the session resumes from.
        changes: settings that later steps depend on and that differ from those of the session
            before, as "key (old -> new)".
        unit: the noun for what `num_train` and `num_valid` count.
        unigram_entropy: the entropy of the training targets in nats per target: the loss of a
            model that predicts each target by its frequency.
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
    """The optimizer steps since the last such event, the last of which is `step`.

    Attributes:
        loss: the training criterion, label smoothing included, in nats per target token.
        nll: the negative log-likelihood in nats per target token.
        grad_norm: the mean gradient norm before clipping, over the steps that were not skipped;
            NaN if all were skipped.
        num_tokens: the number of target tokens.
        seconds: training time since the start of the run, earlier sessions included.
        num_skipped: the number of steps that were skipped because a scaled gradient overflowed
            fp16.
        corpora: the share of each corpus in the tokens of these steps, if there are several.
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
    corpora: dict[str, float] = field(default_factory=dict)
    event: Literal["step_done"] = "step_done"


@dataclass(frozen=True)
class Sample:
    """A held-out example: its input, its reference, and the output of the model."""

    source: str
    reference: str
    output: str


@dataclass(frozen=True)
class EvaluationResult:
    """The results of an evaluation on the validation set.

    Attributes:
        loss: the negative log-likelihood in nats per target.
        perplexity: exp of the loss.
        token_accuracy: from 0 to 1.
        scores: further metrics, by name.
        value: the criterion of model selection; higher is better.
        corpora: the loss of each corpus, if there are several.
        smoothed_loss: the loss with the recipe's label smoothing; None without any.
    """

    loss: float
    perplexity: float
    token_accuracy: float
    scores: dict[str, float]
    samples: list[Sample]
    value: float
    corpora: dict[str, float] = field(default_factory=dict)
    smoothed_loss: float | None = None


@dataclass(frozen=True)
class Evaluated:
    """An evaluation on the validation set after `step`.

    Attributes:
        loss: the negative log-likelihood in nats per target, as `StepDone.nll`.
        perplexity: exp of the loss.
        token_accuracy: from 0 to 1.
        scores: of decoded text or of predicted labels, by metric name.
        corpora: the loss of each corpus, if there are several.
        smoothed_loss: the loss with the recipe's label smoothing, which the bands of `expect` are
            for; None without any.
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
    corpora: dict[str, float] = field(default_factory=dict)
    smoothed_loss: float | None = None
    event: Literal["evaluated"] = "evaluated"

    @property
    def is_of_labels(self) -> bool:
        """True for classification, where perplexity and token accuracy are not displayed."""
        return is_of_labels(self.scores)


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint of `step` is complete on disk.

    Attributes:
        kind: "regular", saved by an evaluation, or "interim".
    """

    step: int
    path: str
    kind: str
    event: Literal["checkpoint_saved"] = "checkpoint_saved"


StopReason = Literal["max_steps", "max_epochs", "early_stopping", "time_limit", "interrupted"]


@dataclass(frozen=True)
class RunFinished:
    """The end of a session.

    Attributes:
        best: the values of the best evaluation, by metric name.
        scores: the values of the final model, by metric name.
        scored: the split and the weights that `scores` are measured with, as text.
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

Listener: TypeAlias = Callable[[Event], None]  # called with the events in their order


SHARES = ("exact_match", "token_accuracy", "accuracy", "macro_f1", "micro_f1")
# Shown with three decimals.
_FINE = ("loss", "pearson", "spearman", "mean_squared_error", "mean_absolute_error")


def is_of_labels(scores: Mapping[str, float]) -> bool:
    """True for scores of classifications, and of regressions."""
    return not scores.keys().isdisjoint(("accuracy", "micro_f1", "pearson"))


def format_score(name: str, value: float) -> str:
    """A score as text: metrics from 0 to 1 (`SHARES`) in per cent, others with two decimals."""
    name = name.partition("/")[0]  # `loss/NAME` is of the corpus NAME
    if name == "step":
        return f"{value:,.0f}"
    if name in _FINE:
        return f"{value:.3f}"
    return f"{100 * value:.2f}%" if name in SHARES else f"{value:.2f}"


def score_label(name: str) -> str:
    """The display name of a metric: "BLEU" for "bleu", "exact match" for "exact_match"."""
    labels = {
        "bleu": "BLEU",
        "chrf": "chrF2",
        "chrf++": "chrF2++",
        "ter": "TER",
        "tokenized_lowercase_bleu": "tokenized lowercased BLEU",
        "macro_f1": "macro F1",
        "micro_f1": "micro F1",
    }
    metric, _, corpus = name.partition("/")
    return labels.get(metric, metric.replace("_", " ")) + (f", {corpus}" if corpus else "")


def describe_criterion(recipe: Mapping[str, Any]) -> str:
    """A description of the terms that a recipe's loss of training has besides the likelihood, or
    ""."""
    training, distillation = recipe.get("training", {}), recipe.get("distillation", {})
    has_teacher = distillation.get("teacher") and distillation.get("level") == "word"
    parts = {
        "smoothed": training.get("label_smoothing"),
        "with the teacher's part": has_teacher,
        "with R-Drop": training.get("r_drop"),
    }
    return ", ".join(name for name, is_used in parts.items() if is_used)
