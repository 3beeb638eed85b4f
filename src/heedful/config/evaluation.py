"""The sections `evaluation` and `expect`: the scores of a run, and losses that it should have."""

from functools import partial
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from heedful import plugins
from heedful.config.base import BeamSize, Strict

# Metrics that need no decoded text, and whether higher is better; those after `accuracy` are for
# classification.
OWN_METRICS = {"loss": False, "token_accuracy": True, "accuracy": True, "macro_f1": True}
OWN_METRICS |= {"micro_f1": True, "pearson": True, "spearman": True}
OWN_METRICS |= {"mean_squared_error": False, "mean_absolute_error": False}
MetricName = Annotated[str, AfterValidator(partial(plugins.metric.check, more=OWN_METRICS))]


class Evaluation(Strict):
    """Scores of a run."""

    metric: MetricName = Field(
        "loss",
        description="Validation metric that selects the best model: loss, token_accuracy, "
        "accuracy, macro_f1 (classification), micro_f1, macro_f1, exact_match (multi_label), "
        "pearson, spearman, mean_squared_error, mean_absolute_error (regression), or of decoded "
        "text bleu, chrf, chrf++, ter, exact_match or a plugin's.",
    )
    decode_sentences: int = Field(
        200,
        ge=0,
        description="Number of validation sources decoded at each evaluation; 0: none.",
    )
    beam_size: BeamSize = Field(1, description="Beams at evaluations; 1: greedy search.")
    final_beam_size: BeamSize = Field(
        5, description="Beams for the test scores when the run ends; 1: greedy search."
    )
    length_penalty: float = Field(
        1.0,
        description="Exponent of the length that divides a hypothesis's log-probability in beam "
        "search; 0: no penalty.",
    )
    num_samples: int = Field(
        5, ge=0, description="Number of example outputs in the log and the report."
    )


class Expectation(Strict):
    """A band in which the validation loss of the unchanged recipe, with its label smoothing, lies
    at a step."""

    step: int = Field(ge=1, description="Step after which the validation loss is compared.")
    low: float = Field(description="Lowest expected loss, in nats per token.")
    high: float = Field(description="Highest expected loss, in nats per token.")

    @model_validator(mode="after")
    def _low_first(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"low {self.low:g} must be below high {self.high:g}")
        return self
