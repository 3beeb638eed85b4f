"""Rows of an ablation: runs of one recipe with changed settings, kept as records from day to day.

A record is of a finished run. The test text is decoded with a beam of 5 and a length penalty of 1,
as the run itself does, and with the penalty that is best on the validation text. Records stay in
the results' JSON, so that rows may be trained one at a time, on different days; the page is written
from all of them.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from common import machine, table, versions
from heedful.evaluation.metrics import Scores, corpus_scores
from heedful.inference import Translator, parameter_count
from heedful.training.events import CheckpointSaved, Evaluated, Event
from runs import QUICK, Run, finished_run

METRIC = "tokenized_lowercase_bleu"
GOALS = 39, 41.02  # BLEU; the second is that of Wu et al. 2021 for Transformer-Tiny on Multi30k
PLAIN = 5, 1.0  # beam size and length penalty, as a run scores its test text
SEARCHES = [(5, 0.6), PLAIN, (5, 1.4)]
HEADING = "\n## Ablation\n"
FOOT = "\n## How this was made\n"


class ProcessorTime:
    """A listener that writes down the processor's seconds of a run up to each evaluation or stop.

    Minutes on a clock say nothing where other work runs beside.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        kept = json.loads(path.read_text()) if path.is_file() else [[0, 0.0]]
        self.steps: list[list[float]] = kept
        self.before = kept[-1][1]
        self.began = time.process_time()

    def on(self, event: Event) -> None:
        if isinstance(event, Evaluated | CheckpointSaved):
            self.steps.append([event.step, self.before + time.process_time() - self.began])
            self.path.write_text(json.dumps(self.steps))

    def close(self) -> None:
        pass


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What a benchmark with an ablation takes."""
    parser.add_argument("--ablation", action="store_true", help="write the table of all records")
    parser.add_argument("--rows", nargs="*", default=[], help="train these rows first")
    parser.add_argument("--seed", type=int, default=1, help="of the rows that are trained")
    parser.add_argument("--runs", type=Path, default=Path("runs/ablation"), help="their folders")
    parser.add_argument("--conditions", default="otherwise idle machine", help="for the records")


def run_rows(
    name: str, rows: dict[str, list[str]], common: list[str], arguments: argparse.Namespace
) -> None:
    """Train the rows that are asked for, or go on with them, and keep a record of each.

    In a row's settings {data}, {runs} and {seed} stand for those of the arguments, so that a row
    can learn from the models of others, and {other} for the seed of a second model: the seed
    before, of three.
    """
    given = {name: vars(arguments)[name] for name in ("data", "runs")} | _seeds(arguments.seed)
    for row in arguments.rows:
        if row not in rows:
            raise SystemExit(f"unknown row {row}; choose from {', '.join(rows)}")
        directory = arguments.runs / f"{row.replace(' ', '-')}-{arguments.seed}"
        own = [each.format(**given) for each in rows[row]]
        settings = [*common, *own, f"training.seed={arguments.seed}"]
        settings += QUICK if arguments.quick else []
        directory.parent.mkdir(parents=True, exist_ok=True)
        clock = ProcessorTime(directory.with_name(f"{directory.name}.json"))
        run = finished_run(name, directory, settings, listeners=[clock])
        record = {"row": row, "seed": arguments.seed, "conditions": arguments.conditions}
        record |= _record(run, rows[row], clock)
        others = [
            each
            for each in records(name, arguments.results)
            if (each["row"], each["seed"]) != (row, arguments.seed)
        ]
        write_records(name, [*others, record], arguments.results)


def records(name: str, directory: Path) -> list[dict[str, Any]]:
    """The records in the results' JSON."""
    found: list[dict[str, Any]] = _content(name, directory).get("ablation", [])
    return found


def write_records(name: str, found: list[dict[str, Any]], directory: Path) -> None:
    """Put records into the results' JSON, in place of those that were there."""
    content = _content(name, directory) | ({"ablation": found} if found else {})
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    (directory / f"{name}.json").write_text(text, encoding="utf-8")


def _seeds(seed: int) -> dict[str, int]:
    return {"seed": seed, "other": seed - 1 or 3}


def _content(name: str, directory: Path) -> dict[str, Any]:
    path = directory / f"{name}.json"
    content: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return content


def _record(run: Run, settings: list[str], clock: ProcessorTime) -> dict[str, Any]:
    model = run.model()
    valid = {search: _scores(run, model, "valid", *search)[METRIC].value for search in SEARCHES}
    best = max(valid, key=lambda search: valid[search])
    test = {search: _scores(run, model, "test", *search) for search in {best, PLAIN}}
    seconds = {int(step): found for step, found in clock.steps}
    return {
        "settings": settings,
        "parameters": parameter_count(model.net),
        "steps": run.end.step,
        "processor_minutes": clock.steps[-1][1] / 60,
        "minutes": run.minutes,
        "valid": valid[best],
        "valid_by_search": {_named(search): value for search, value in valid.items()},
        "search": {"beam_size": best[0], "length_penalty": best[1]},
        **_of_test(test[best]),
        "plain": _of_test(test[PLAIN]),
        "validation": [
            {
                "step": event.step,
                "processor_minutes": seconds.get(event.step, float("nan")) / 60,
                "perplexity": event.perplexity,
                **event.scores,
            }
            for event in run.evaluations
        ],
        "versions": versions("sacrebleu", "sacremoses", "tokenizers"),
        "machine": machine(),
    }


def _named(search: tuple[int, float]) -> str:
    return f"beam {search[0]}, length penalty {search[1]:g}"


def _of_test(scores: Scores) -> dict[str, Any]:
    sacrebleu = {"score": scores["bleu"].value, "signature": scores["bleu"].signature}
    return {"test": scores[METRIC].value, "sacrebleu": sacrebleu}


def _scores(run: Run, model: Translator, split: str, beam: int, penalty: float) -> Scores:
    pairs = run.pairs(split)
    outputs = model.translate(
        [src for src, _ in pairs], beam_size=beam, length_penalty=penalty, too_long="truncate"
    )
    references = [tgt for _, tgt in pairs]
    language = run.recipe.data.tgt_language
    metrics = [METRIC, "bleu"]
    return corpus_scores(outputs, references, trg_lang=language, metrics=metrics, lowercase=True)


def write_table(
    name: str, rows: dict[str, list[str]], directory: Path, way: Sequence[str] = ()
) -> None:
    """Put the table of all records into the page, in place of the one that was there.

    `way`: runs, as "ROW-{seed}", one after the other, to say how soon they came to which score.
    """
    path = directory / f"{name}.md"
    found = records(name, directory)
    if not found:
        return
    page = path.read_text(encoding="utf-8") if path.is_file() else FOOT
    before, foot, after = page.partition(FOOT)
    section = f"{HEADING}\n{_table(rows, found)}\n{_times(way, found)}"
    path.write_text(f"{before.split(HEADING)[0]}{section}{foot}{after}", encoding="utf-8")
    print(f"wrote the ablation of {name}.md")


def _table(rows: dict[str, list[str]], records: list[dict[str, Any]]) -> str:
    order = [row for row in rows if any(each["row"] == row for each in records)]
    lines = []
    for row in order:
        group = [each for each in records if each["row"] == row]
        last = dict(each.split("=", 1) for each in group[0]["settings"])  # a later one holds
        settings = ", ".join(f"`{key}={value}`" for key, value in last.items()) or "–"
        plain = [each["plain"] for each in group if "plain" in each]
        lines.append(
            [
                row,
                settings,
                ", ".join(str(each["seed"]) for each in group),
                f"{group[0]['steps']:,}",
                f"{group[0]['parameters']:,}",
                f"{mean(each['processor_minutes'] for each in group):.0f}",
                f"{mean(each['valid'] for each in group):.2f}",
                _mean_of([each["test"] for each in group]),
                _mean_of([each["sacrebleu"]["score"] for each in group if "sacrebleu" in each]),
                f"{mean(each['valid_by_search'][_named(PLAIN)] for each in group):.2f}",
                _mean_of([each["test"] for each in plain]),
                _mean_of([each["sacrebleu"]["score"] for each in plain if "sacrebleu" in each]),
            ]
        )
    header = ["row", "changed", "seeds", "steps", "parameters", "processor minutes"]
    scores = ["validation", "test", "sacreBLEU"]
    header += [*scores, *(f"{name}, penalty 1" for name in scores)]
    conditions = sorted({each["conditions"] for each in records})
    signatures = sorted({each["sacrebleu"]["signature"] for each in records if "sacrebleu" in each})
    signed = f" sacreBLEU of the test text: {', '.join(f'`{each}`' for each in signatures)}."
    return (
        "Tokenised lowercased BLEU with beam 5, means over the seeds. The length penalty is that "
        "of 0.6, 1 and 1.4 which is best on the validation text; beside it the scores with 1, as "
        "a run scores itself. The test text is decoded once with each. Minutes: the processor's, "
        f"on: {'; '.join(conditions)}.{signed if signatures else ''}\n\n" + table(header, lines)
    )


def _times(way: Sequence[str], records: list[dict[str, Any]]) -> str:
    """Processor minutes up to the first evaluation with a BLEU of each of GOALS, by seed."""
    by_run = {f"{each['row']}-{each['seed']}": each for each in records}
    lines = []
    for seed in sorted({each["seed"] for each in records}):
        names = [run.format(**_seeds(seed)) for run in way]
        if not all(name in by_run for name in names):
            continue
        past, looks = 0.0, []
        for each in map(by_run.__getitem__, names):
            if not each["row"].startswith("backward"):  # whose BLEU is of the other language
                looks += [(past + at["processor_minutes"], at["bleu"]) for at in each["validation"]]
            past += each["processor_minutes"]
        when = [next((f"{at:.0f}" for at, bleu in looks if bleu >= goal), "–") for goal in GOALS]
        lines.append([str(seed), *when, f"{past:.0f}"])
    if not lines:
        return ""
    header = ["seed", *(f"{goal:g} BLEU" for goal in GOALS), "all"]
    return (
        f"\nProcessor minutes of the runs {', '.join(way)}, one after the other, up to a score on "
        "validation, as training shows it:\n\n" + table(header, lines) + "\n"
    )


def _mean_of(scores: list[float]) -> str:
    if len(scores) < 2:
        return f"{scores[0]:.2f}" if scores else "–"
    return f"{mean(scores):.2f} ({', '.join(f'{score:.2f}' for score in scores)})"
