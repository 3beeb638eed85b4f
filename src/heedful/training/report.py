"""The report of a run: one HTML file without scripts or external resources.

Its content is the events of the run, its recipe, facts and final scores; its layout is
`report.html.j2`, its style `report.css`.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from heedful import extras
from heedful.data.reports import FilterReport
from heedful.evaluation.labels import per_label
from heedful.files import write_text
from heedful.plugins import metric
from heedful.progress import clock
from heedful.training.charts import CURVES, Chart, Series, draw, number
from heedful.training.events import (
    SHARES,
    Evaluated,
    Event,
    RunFinished,
    RunStarted,
    StepDone,
    describe_criterion,
    format_score,
    score_label,
)
from heedful.training.listeners import REASONS
from heedful.training.verdict import verdicts

if TYPE_CHECKING:
    from jinja2 import Environment

MAX_SAMPLES = 20
MAX_LABELS = 12  # of a confusion matrix that is shown
# The headings of the three texts of a sample, by task.
SAMPLE_HEADINGS = {
    "language_modeling": ("prompt", "", "continuation"),
    "sft": ("prompt", "answer", "output"),
    "masked_lm": ("masked", "original", "filled in"),
    "denoising": ("corrupted", "target", "output"),
    "classification": ("text", "label", "prediction"),
}
Kind = TypeVar("Kind")
Part = tuple[str, bool]  # a part of a text, and True if the other text lacks it


def write_report(
    out: Path,
    *,
    title: str,
    events: list[Event],
    recipe_yaml: str,
    facts: Mapping[str, str],
    final_scores: Mapping[str, Any],
    labels: Sequence[str] = (),
    confusion: Sequence[Sequence[int]] = (),
    filters: FilterReport | None = None,
    folder: Path | None = None,
) -> None:
    """Write the report of a run to `out`, atomically.

    Args:
        events: the log, which may be incomplete.
        recipe_yaml: the recipe's differences from the defaults.
        facts: texts by name, such as versions, machine and command.
        final_scores: by metric a number, or a mapping with "score" and optionally "name",
            "signature" and BLEU's "precisions" and "brevity_penalty".
        folder: the run's folder; default: that of `out`.
        confusion: the number of texts of label i (row) that were classified as label j (column).
        filters: the training rows that filters dropped.

    Raises:
        UserError: the file cannot be written.
    """
    run = _RunEvents(events)
    samples = run.sampled.samples[:MAX_SAMPLES] if run.sampled else []
    recipe = run.start.recipe if run.start else {}
    table = np.array(confusion, dtype=np.int64)
    page = (
        pages()
        .get_template("report.html.j2")
        .render(
            title=title,
            run=run,
            verdicts=verdicts(events, folder or out.parent),
            criterion=describe_criterion(recipe),
            decoded=[score_label(name) for name in run.metrics if name in metric.names()],
            evaluation=recipe.get("evaluation", {}),
            is_averaged=recipe.get("training", {}).get("ema_decay") is not None,
            labels=labels,
            per_label=per_label(table, labels) if labels else {},
            confusion=table.tolist() if 0 < len(labels) <= MAX_LABELS else None,
            sample_names=SAMPLE_HEADINGS.get(
                recipe.get("task", ""), ("source", "reference", "output")
            ),
            reasons=REASONS,
            scores={
                name: entry if isinstance(entry, Mapping) else {"score": entry}
                for name, entry in final_scores.items()
            },
            charts=[chart for chart in map(Chart.drawable, _charts(run)) if chart.series],
            filters=filters.filters if filters else [],
            samples=samples,
            num_same=sum(sample.output == sample.reference for sample in samples),
            has_references=any(sample.reference for sample in samples),
            recipe=recipe_yaml,
            facts=facts,
        )
    )
    write_text(out, page)


@cache
def pages() -> "Environment":
    """The Jinja environment with the page's template and filters."""
    extras.require("report", "a page with charts")
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "clock": clock,
        "compact": _compact,
        "differences": differences,
        "draw": draw,
        "highlight": _highlight,
        "label": score_label,
        "number": number,
        "search": lambda size: (
            "decoded greedily" if size == 1 else f"decoded with beam size {size}"
        ),
        "score": _score,
        "title": _title,
    }
    return environment


class _RunEvents:
    """The events of a run by kind."""

    def __init__(self, events: list[Event]) -> None:
        self.timed = [e for e in events if isinstance(e, StepDone | Evaluated | RunFinished)]
        self.steps = [e for e in self.timed if isinstance(e, StepDone)]
        self.evaluations = evaluations = [e for e in self.timed if isinstance(e, Evaluated)]
        self.starts = [e for e in events if isinstance(e, RunStarted)]
        self.start = _last(self.starts)
        self.end = _last([e for e in self.timed if isinstance(e, RunFinished)])
        self.best = _last([e for e in evaluations if e.is_best] or evaluations)
        # The evaluation with the samples that are shown: the best, or the last with samples.
        has_any = self.best is not None and bool(self.best.samples)
        self.sampled = self.best if has_any else _last([e for e in evaluations if e.samples])
        self.metrics = list(dict.fromkeys(name for e in evaluations for name in e.scores))
        self.held_out_corpora = list(dict.fromkeys(name for e in evaluations for name in e.corpora))
        self.of_labels = any(e.is_of_labels for e in evaluations)

    @property
    def corpora(self) -> list[dict[str, Any]]:
        """For each corpus its name, share of the training tokens, and held-out loss at the best."""
        tokens: dict[str, float] = {}
        for event in self.steps:
            for name, share in event.corpora.items():
                tokens[name] = tokens.get(name, 0.0) + share * event.num_tokens
        sections = self.start.recipe.get("data", {}).get("corpora", {}) if self.start else {}
        losses = self.best.corpora if self.best else {}
        return [
            {
                "name": name,
                "weight": sections.get(name, {}).get("weight", 1.0),
                "tags": [sections.get(name, {}).get(key) for key in ("tgt_tag", "src_tag")],
                "share": count / sum(tokens.values()),
                "loss": losses.get(name),
            }
            for name, count in tokens.items()
        ]

    @property
    def own_scores(self) -> dict[str, float]:
        """The scores of the best evaluation by name, without those of tokens for classification."""
        if self.best is None:
            return {}
        of_tokens: dict[str, float] = {}
        if not self.of_labels:
            of_tokens["perplexity"] = self.best.perplexity
            of_tokens["token_accuracy"] = self.best.token_accuracy
        return self.best.scores | of_tokens | {"loss": self.best.loss}


def _charts(run: _RunEvents) -> list[Chart]:
    best_step = run.best.step if run.best is not None and run.best.is_best else None

    def train(label: str, field: str) -> Series:
        return Series(label, [(event.step, getattr(event, field)) for event in run.steps])

    def held_out(value_of: Callable[[Evaluated], float]) -> Series:
        points = [(event.step, value_of(event)) for event in run.evaluations]
        return Series("held out", points, 1, best_step)

    perplexity, norm = held_out(lambda e: e.perplexity), train("before clipping", "grad_norm")
    accuracy = held_out(lambda e: e.token_accuracy)
    of_tokens = [
        Chart("Perplexity", [perplexity], log=_is_wide(perplexity, 20)),
        Chart("Token accuracy", [accuracy], _axis_of("token_accuracy")),
    ]
    return [
        Chart("Loss", [train("training", "nll"), held_out(lambda e: e.loss)]),
        *(
            Chart(
                _title(score_label(name)),
                [held_out(lambda e, name=name: e.scores.get(name, math.nan))],  # type: ignore[misc]
                _axis_of(name),
            )
            for name in run.metrics
        ),
        Chart(
            "Held-out loss by corpus",
            [
                Series(
                    name, [(e.step, e.corpora.get(name, math.nan)) for e in run.evaluations], color
                )
                for color, name in enumerate(run.held_out_corpora[: len(CURVES)])
            ],
        ),
        *(() if run.of_labels else of_tokens),
        Chart("Learning rate", [train("learning rate", "learning_rate")]),
        Chart("Speed", [train("tokens/s", "tokens_per_second")], from_zero=True),
        Chart("Gradient norm", [norm], log=_is_wide(norm, 30)),
    ]


def differences(reference: str, output: str) -> tuple[list[Part], list[Part]]:
    """Both texts in parts, each with a flag for parts that the other text lacks.

    Texts are compared by word, or by character if neither has a space (dates, Chinese).
    """
    by_word = " " in reference or " " in output
    pattern = r"\w+|\s+|." if by_word else r"."
    first, second = (re.findall(pattern, text, re.DOTALL) for text in (reference, output))
    pieces: tuple[list[Part], list[Part]] = ([], [])
    for kind, a, b, c, d in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        for parts, part in zip(pieces, (first[a:b], second[c:d]), strict=True):
            if part:
                parts.append(("".join(part), kind != "equal"))
    return pieces


def _highlight(recipe_yaml: str) -> str:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import YamlLexer

    return highlight(recipe_yaml, YamlLexer(), HtmlFormatter(nowrap=True)).rstrip()


def _last(items: Sequence[Kind]) -> Kind | None:
    return items[-1] if items else None


def _axis_of(name: str) -> Callable[[float], str]:
    return (lambda value: f"{100 * value:.3g}%") if name in SHARES else number


def _score(value: float, name: str) -> str:
    return number(value) if name == "perplexity" else format_score(name, float(value))


def _title(name: str) -> str:
    """A heading; a first word with a capital in it, as chrF2, is left as it is."""
    first = name.partition(" ")[0]
    return name if first != first.lower() else name[0].upper() + name[1:]


def _is_wide(series: Series, factor: float) -> bool:
    """True if the values span more than `factor`, so that a log axis is used."""
    values = [value for _, value in series.points if 0 < value < math.inf]
    return bool(values) and max(values) > factor * min(values)


def _compact(count: int) -> str:
    """A count with three significant digits: 2.10M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if count >= size:
            unit = 1e3 if letter == "k" else size
            return f"{count / unit:.3g}{letter}"
    return f"{count:,}"
