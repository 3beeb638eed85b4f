"""The report of a run: one HTML file without scripts or anything loaded, readable offline.

What the page says comes from the events of the run, its recipe, its facts and its final scores.
"""

import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from html import escape
from pathlib import Path
from typing import Any

from heedful.errors import UserError
from heedful.training.charts import Chart, Series, line_chart, number
from heedful.training.events import (
    SHARES,
    Evaluated,
    Event,
    RunFinished,
    RunStarted,
    Sample,
    StepDone,
    format_score,
    score_label,
)
from heedful.training.progress import REASONS, clock
from heedful.training.report_style import STYLE

MAX_SAMPLES = 20


def write_report(
    out: Path,
    *,
    title: str,
    events: list[Event],
    recipe_yaml: str,
    facts: Mapping[str, str],
    final_scores: Mapping[str, Any],
) -> None:
    """Writes the report of a run to `out`, whole or not at all.

    `events` may stop anywhere. `facts` are names and texts (versions, machine, command).
    `final_scores` are by metric, each a number or a mapping with "score" and, where known, "name",
    "signature" and BLEU's "precisions" and "brevity_penalty".

    Raises `UserError` when the file cannot be written.
    """
    run = _Run(events)
    body = [
        _header(title, run, final_scores),
        _section("scores", "Final scores", _score_table(final_scores)),
        _section("curves", "Curves", _curves(run) + _evaluation_table(run)),
        _section("samples", "Sample outputs", _samples(run)),
        _section("recipe", "Recipe", _recipe(recipe_yaml)),
        _section("facts", "How it was made", _facts(facts)),
    ]
    page = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )
    scratch = out.with_name(out.name + ".tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(page, encoding="utf-8")
        scratch.replace(out)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise UserError(f"cannot write {out}: {error.strerror or error}") from error


@dataclass(frozen=True)
class _Run:
    """The events by kind."""

    events: list[Event]

    @property
    def start(self) -> RunStarted | None:
        return next((e for e in reversed(self.events) if isinstance(e, RunStarted)), None)

    @property
    def steps(self) -> list[StepDone]:
        return [e for e in self.events if isinstance(e, StepDone)]

    @property
    def evaluations(self) -> list[Evaluated]:
        return [e for e in self.events if isinstance(e, Evaluated)]

    @property
    def end(self) -> RunFinished | None:
        return next((e for e in reversed(self.events) if isinstance(e, RunFinished)), None)

    @property
    def best(self) -> Evaluated | None:
        """The last evaluation marked best, or the last one."""
        evaluations = self.evaluations
        marked = [e for e in evaluations if e.is_best] or evaluations
        return marked[-1] if marked else None

    @property
    def reached(self) -> tuple[int, float]:
        """The last step known and its seconds of training."""
        timed = [e for e in self.events if isinstance(e, StepDone | Evaluated | RunFinished)]
        return (timed[-1].step, timed[-1].seconds) if timed else (0, 0.0)


def _header(title: str, run: _Run, final_scores: Mapping[str, Any]) -> str:
    step, seconds = run.reached
    if run.end is None:
        state = '<span class="state open">not finished</span>'
    else:
        kind = "open" if run.end.reason == "interrupted" else "done"
        state = f'<span class="state {kind}">{escape(REASONS[run.end.reason])}</span>'
    lead = []
    if run.start is not None:
        lead.append(
            f"{run.start.num_train:,} training and {run.start.num_valid:,} held-out examples"
        )
        lead.append(run.start.device)
    rows = (_score_tiles(run, final_scores), _run_tiles(run, step, seconds))
    tiles = "".join(f'<div class="tiles">{"".join(row)}</div>' for row in rows if row)
    return (
        f'<header id="summary"><div class="top"><h1>{escape(title)}</h1>{state}</div>'
        f'<p class="lead">{escape(" · ".join(lead))}</p>'
        f"{tiles}</header>"
    )


def _score_tiles(run: _Run, final_scores: Mapping[str, Any]) -> list[str]:
    tiles = [
        _tile(_name(metric, entry), format_score(metric, _value(entry)), "final", main=True)
        for metric, entry in list(final_scores.items())[:3]
    ]
    best = run.best
    if best is None:
        return tiles
    note = f"held out, step {best.step:,}"
    if not tiles:
        tiles += [
            _tile(score_label(name), format_score(name, value), note, main=True)
            for name, value in best.scores.items()
        ]
    return [
        *tiles,
        _tile("perplexity", number(best.perplexity), note),
        _tile("token accuracy", format_score("token_accuracy", best.token_accuracy), note),
        _tile("loss", f"{best.loss:.3f}", note),
    ]


def _run_tiles(run: _Run, step: int, seconds: float) -> list[str]:
    tiles = []
    if run.start is not None:
        count = run.start.num_parameters
        tiles.append(_tile("parameters", _compact(count), f"{count:,}"))
    total = run.start.total_steps if run.start is not None else None
    tiles.append(_tile("steps", f"{step:,}", f"of {total:,}" if total else ""))
    epochs = [event.epoch for event in run.events if isinstance(event, StepDone | Evaluated)]
    tiles.append(_tile("training time", clock(seconds), f"epoch {epochs[-1]}" if epochs else ""))
    if run.steps:
        speeds = sorted(event.tokens_per_second for event in run.steps)
        tiles.append(_tile("tokens/s", f"{speeds[len(speeds) // 2]:,.0f}", "median"))
    return tiles


def _tile(name: str, value: str, note: str = "", *, main: bool = False) -> str:
    kind = "tile main" if main else "tile"
    return (
        f'<div class="{kind}"><span>{escape(name)}</span><b>{escape(value)}</b>'
        f"<small>{escape(note)}</small></div>"
    )


def _section(name: str, heading: str, content: str) -> str:
    return f'<section id="{name}"><h2>{escape(heading)}</h2>{content}</section>'


def _nothing(text: str) -> str:
    return f'<p class="nothing">{escape(text)}</p>'


def _score_table(final_scores: Mapping[str, Any]) -> str:
    if not final_scores:
        return _nothing("No final scores: the run ended before its model was scored.")
    rows = []
    for metric, entry in final_scores.items():
        known = entry if isinstance(entry, Mapping) else {}
        detail = ""
        if "precisions" in known:
            precisions = " / ".join(f"{precision:.1f}" for precision in known["precisions"])
            detail = f"precisions {precisions}, brevity penalty {known['brevity_penalty']:.3f}"
        elif "num_equal" in known:
            detail = f"{known['num_equal']:,} of {known['num_segments']:,}"
        # A signature may break where its parts meet.
        signature = escape(str(known.get("signature", ""))).replace("|", "|<wbr>")
        rows.append(
            f"<tr><th scope=row>{escape(_name(metric, entry))}</th>"
            f'<td class="n">{escape(format_score(metric, _value(entry)))}</td>'
            f"<td>{escape(detail)}</td><td><code>{signature}</code></td></tr>"
        )
    head = '<tr><th>score</th><th class="n">value</th><th>made of</th><th>signature</th></tr>'
    return _table(head, rows)


def _curves(run: _Run) -> str:
    steps, evaluations = run.steps, run.evaluations
    best_step = run.best.step if run.best is not None and run.best.is_best else None

    def train(label: str, field: str) -> Series:
        return Series(label, [(event.step, getattr(event, field)) for event in steps])

    def held_out(label: str, field: str) -> Series:
        points = [(event.step, getattr(event, field)) for event in evaluations]
        return Series(label, points, 1, best_step)

    charts = [Chart("Loss", [train("training", "loss"), held_out("held out", "loss")])]
    names = list(dict.fromkeys(name for event in evaluations for name in event.scores))
    for name in names:
        points = [(e.step, e.scores[name]) for e in evaluations if name in e.scores]
        series = Series("held out", points, 1, best_step)
        charts.append(Chart(_title(score_label(name)), [series], _axis_of(name)))
    perplexities = [e.perplexity for e in evaluations if 0 < e.perplexity < math.inf]
    wide = bool(perplexities) and max(perplexities) > 20 * min(perplexities)
    charts += [
        Chart("Perplexity", [held_out("held out", "perplexity")], log=wide),
        Chart(
            "Token accuracy", [held_out("held out", "token_accuracy")], _axis_of("token_accuracy")
        ),
        Chart("Learning rate", [train("learning rate", "learning_rate")]),
        Chart("Speed", [train("tokens/s", "tokens_per_second")], from_zero=True),
        Chart("Gradient norm", [train("before clipping", "grad_norm")], log=_is_wide(steps)),
    ]
    drawn = "".join(line_chart(chart) for chart in charts)
    return f'<div class="charts">{drawn}</div>' if drawn else _nothing("No step was logged.")


def _evaluation_table(run: _Run) -> str:
    if not run.evaluations:
        return ""
    names = list(dict.fromkeys(name for event in run.evaluations for name in event.scores))
    titles = ["step", "epoch", "time", "loss", "perplexity", "token accuracy"]
    heads = [*titles, *map(score_label, names), "best"]
    head = "<tr>" + "".join(f'<th class="n">{escape(text)}</th>' for text in heads) + "</tr>"
    rows = []
    for event in run.evaluations:
        cells = [
            f"{event.step:,}",
            f"{event.epoch}",
            clock(event.seconds),
            f"{event.loss:.4f}",
            number(event.perplexity),
            format_score("token_accuracy", event.token_accuracy),
            *(format_score(n, event.scores[n]) if n in event.scores else "" for n in names),
            "*" if event.is_best else "",
        ]
        rows.append("<tr>" + "".join(f'<td class="n">{escape(c)}</td>' for c in cells) + "</tr>")
    return (
        f"<details><summary>All {len(rows)} evaluations as a table</summary>"
        f"{_table(head, rows)}</details>"
    )


def _samples(run: _Run) -> str:
    with_samples = [event for event in run.evaluations if event.samples]
    if not with_samples:
        return _nothing("No evaluation decoded any sample.")
    event = run.best if run.best in with_samples else with_samples[-1]
    assert event is not None
    shown = event.samples[:MAX_SAMPLES]
    exact = sum(sample.output == sample.reference for sample in shown)
    equal = f"{exact} of {len(shown)} equal their reference"
    note = f"From held-out data, after step {event.step:,}: {equal}."
    return f'<p class="lead">{note}</p><div class="samples">{"".join(map(_sample, shown))}</div>'


def _sample(sample: Sample) -> str:
    same = sample.output == sample.reference
    reference, output = mark_difference(sample.reference, sample.output)
    mark = '<span class="mark ok">same</span>' if same else '<span class="mark off">differs</span>'
    rows = [("source", escape(sample.source)), ("reference", reference), ("output", output)]
    lines = "".join(f'<dt>{name}</dt><dd dir="auto">{text}</dd>' for name, text in rows)
    return f'<article class="sample{"" if same else " wrong"}">{mark}<dl>{lines}</dl></article>'


def mark_difference(reference: str, output: str) -> tuple[str, str]:
    """Both texts as HTML, with what only the one or only the other has inside `<mark>`.

    Texts are compared by word, or by character where neither has a space (dates, Chinese).
    """
    by_word = " " in reference or " " in output
    pattern = r"\w+|\s+|." if by_word else r"."
    ours, theirs = (re.findall(pattern, text, re.DOTALL) for text in (output, reference))
    marked: tuple[list[str], list[str]] = ([], [])
    matcher = SequenceMatcher(None, theirs, ours, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        for texts, part in ((marked[0], theirs[a:b]), (marked[1], ours[c:d])):
            text = escape("".join(part))
            texts.append(text if kind == "equal" or not text else f"<mark>{text}</mark>")
    return "".join(marked[0]), "".join(marked[1])


def _recipe(recipe_yaml: str) -> str:
    if not recipe_yaml.strip():
        return _nothing("No recipe was given.")
    lines = []
    for line in escape(recipe_yaml, quote=False).rstrip().splitlines():
        code, hash_sign, comment = line, "", ""
        if line.lstrip().startswith("#") or " #" in line:
            code, hash_sign, comment = line.partition("#")
        code = re.sub(r"^(\s*(?:- )?)([\w.-]+)(?=:)", r'\1<span class="yk">\2</span>', code)
        lines.append(code + (f'<span class="yc">#{comment}</span>' if hash_sign else ""))
    return f"<pre><code>{chr(10).join(lines)}</code></pre>"


def _facts(facts: Mapping[str, str]) -> str:
    if not facts:
        return _nothing("No facts were given.")
    rows = [
        f"<tr><th scope=row>{escape(name)}</th><td>{escape(text)}</td></tr>"
        for name, text in facts.items()
    ]
    return _table("", rows)


def _table(head: str, rows: list[str]) -> str:
    top = f"<thead>{head}</thead>" if head else ""
    return f'<div class="scroll"><table>{top}<tbody>{"".join(rows)}</tbody></table></div>'


def _name(metric: str, entry: Any) -> str:
    return (
        str(entry["name"])
        if isinstance(entry, Mapping) and "name" in entry
        else score_label(metric)
    )


def _value(entry: Any) -> float:
    return float(entry["score"] if isinstance(entry, Mapping) else entry)


def _axis_of(name: str) -> Any:
    return (lambda value: f"{100 * value:.3g}%") if name in SHARES else number


def _title(name: str) -> str:
    return name[0].upper() + name[1:] if name.islower() else name


def _is_wide(steps: list[StepDone]) -> bool:
    norms = [event.grad_norm for event in steps if 0 < event.grad_norm < math.inf]
    return bool(norms) and max(norms) > 30 * min(norms)


def _compact(count: int) -> str:
    """A count in three digits: 2.10M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if count >= size:
            unit = 1e3 if letter == "k" else size
            return f"{count / unit:.3g}{letter}"
    return f"{count:,}"
