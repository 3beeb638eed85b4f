"""Ablations: runs of one recipe with changed settings, kept as records from day to day.

EXPERIMENT.yaml beside this file names the recipe, its data files and the rows. Each of `--rows` is
trained, or resumed, until it ends. The JSON of the results keeps a record of each finished run, so
that rows can be trained on different days; the page is written from all records.

The test text is decoded with a beam of 5 and a length penalty of 1, as the run itself does, and
with the penalty that is best on the validation text.
"""

import argparse
import gzip
import json
import sys
import time
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "benchmarks")]

from common import argument_parser, command_line, folded, machine, table, versions, write_results
from heedful.evaluation.metrics import corpus_scores
from heedful.pipelines import Translator, parameter_count
from heedful.training.events import CheckpointSaved, Evaluated, Event
from runs import QUICK, Run, finished_run
from significance import NOTE, p_text, significance
from teacher_texts import reversed_words, translated

METRIC = "tokenized_lowercase_bleu"
THRESHOLDS = 39, 41  # validation BLEU, for the table of processor minutes
PLAIN = 5, 1.0  # beam size and length penalty with which a run scores its test text
SEARCHES = [(5, 0.6), PLAIN, (5, 1.4)]
FOLDED_ROWS = 12  # a longer table is shown once a reader opens it


class Experiment:
    """The rows of EXPERIMENT.yaml.

    Args:
        path: a YAML file with the keys `recipe`, `title`, `about`, `files` (recipe key to file
            name), `common` (settings of all rows), `groups` (settings that rows share), `sequence`
            (runs that are trained one after the other), `first_pairs` (training pairs that are
            used; default: all) and `rows` (each with `base`, names of rows and groups that it
            starts from, and `set`, its own settings, which win; `right_to_left`: its targets have
            their words in reverse order; `teacher_texts`: translations by models of other rows
            that are added to the training pairs, see `add_teacher_text`).
    """

    def __init__(self, path: Path) -> None:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        self.recipe: str = content["recipe"]
        self.title: str = content["title"]
        self.about: str = content["about"].strip()
        self.files: dict[str, str] = content["files"]
        self.common: list[str] = content["common"]
        self.groups: dict[str, list[str]] = content.get("groups", {})
        self.sequence: list[str] = content.get("sequence", [])
        self.first_pairs: int | None = content.get("first_pairs")
        self.rows: dict[str, dict[str, Any]] = content["rows"]

    def bases(self, row: str) -> list[str]:
        """Names of the rows and groups that a row starts from."""
        base = self.rows[row].get("base", [])
        return [base] if isinstance(base, str) else base

    def settings(self, row: str) -> dict[str, str]:
        """Recipe key to value, placeholders such as {seed} still in place."""
        if row in self.groups:
            return dict(setting.split("=", 1) for setting in self.groups[row])
        settings: dict[str, str] = {}
        for base in self.bases(row):
            settings |= self.settings(base)
        own = self.rows[row].get("set", [])
        return settings | dict(setting.split("=", 1) for setting in own)

    def is_right_to_left(self, row: str) -> bool:
        """True if the row learns targets with their words in reverse order."""
        return bool(self.rows[row].get("right_to_left"))


class ProcessorTime:
    """An event function that records a run's processor seconds up to each evaluation or stop.

    Elapsed time is no measure while other work runs on the machine.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        kept = json.loads(path.read_text()) if path.is_file() else [[0, 0.0]]
        self.steps: list[list[float]] = kept
        self.before = kept[-1][1]
        self.began = time.process_time()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Evaluated | CheckpointSaved):
            self.steps.append([event.step, self.before + time.process_time() - self.began])
            self.path.write_text(json.dumps(self.steps))


def main() -> None:
    """Train the rows of `--rows`, and write the page."""
    parser = argument_parser(__doc__ or "")
    names = sorted(path.stem for path in HERE.glob("*.yaml"))
    parser.add_argument("experiment", choices=names, help="EXPERIMENT.yaml beside this script")
    parser.add_argument("--data", type=Path, default=Path(), help="folder of the text")
    parser.add_argument(
        "--rows", nargs="*", default=[], help="rows to train before the page is written"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="random seed of the rows that are trained"
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/ablation"), help="folder of the runs"
    )
    parser.add_argument(
        "--conditions",
        default="otherwise idle machine",
        help="load of the machine, as text for the records",
    )
    arguments = parser.parse_args()
    experiment = Experiment(HERE / f"{arguments.experiment}.yaml")
    name = f"{arguments.experiment}_ablation"
    records = read_records(name, arguments.results)
    for row in arguments.rows:
        if row not in experiment.rows:
            raise SystemExit(f"unknown row {row}; choose from {', '.join(experiment.rows)}")
        record = run_row(experiment, row, arguments)
        key = row, arguments.seed
        records = [one for one in records if (one["row"], one["seed"]) != key] + [record]
        write_page(name, experiment, records, arguments)
    if records:
        write_page(name, experiment, records, arguments)


def run_row(experiment: Experiment, row: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a row, or resume its run; returns its record."""
    settings = experiment.settings(row)
    values = {"data": arguments.data, "runs": arguments.runs, "seed": arguments.seed}
    arguments.runs.mkdir(parents=True, exist_ok=True)
    files = {key: arguments.data / file for key, file in experiment.files.items()}
    if experiment.first_pairs is not None:
        files |= first_pairs(files, arguments.runs / "first-pairs", experiment.first_pairs)
    if experiment.is_right_to_left(row):
        sides = {key: path for key, path in files.items() if key.endswith(".tgt")}
        files |= {key: reversed_words(path, arguments.runs) for key, path in sides.items()}
    texts = {key: [path] for key, path in files.items()}
    for made in experiment.rows[row].get("teacher_texts", ()):
        add_teacher_text(experiment, made, arguments.runs, texts)
    all_settings = [
        *(
            f"{key}={paths[0] if len(paths) == 1 else [*map(str, paths)]}"
            for key, paths in texts.items()
        ),
        *experiment.common,
        *(f"{key}={value.format(**values)}" for key, value in settings.items()),
        f"training.seed={arguments.seed}",
        *(QUICK if arguments.quick else []),
    ]
    directory = _directory(arguments, row)
    clock = ProcessorTime(directory.with_name(f"{directory.name}.json"))
    run = finished_run(experiment.recipe, directory, all_settings, on_event=clock)
    record = {"row": row, "seed": arguments.seed, "conditions": arguments.conditions}
    record["settings"] = [f"{key}={value}" for key, value in settings.items()]
    record |= _scores_of_run(run, clock)
    references = [tgt for _, tgt in run.pairs("test")]
    outputs = _test_outputs(directory)
    systems = {row: outputs.read_text(encoding="utf-8").splitlines()}
    baseline = next((base for base in experiment.bases(row) if base in experiment.rows), None)
    if baseline is not None and _same_test_text(experiment, baseline, row):
        path = _test_outputs(_directory(arguments, baseline))
        if path.is_file():
            systems = {baseline: path.read_text(encoding="utf-8").splitlines()} | systems
    found = significance(systems, references, run.recipe.data.tgt_language or "", lowercase=True)
    record["significance"] = {
        **found["bleu"][row],
        "baseline": baseline if len(systems) > 1 else None,
    }
    return record


def add_teacher_text(
    experiment: Experiment, made: dict[str, str], runs: Path, texts: dict[str, list[Path]]
) -> None:
    """Add the translations of a side of the training pairs, with that side, to the texts.

    Args:
        made: an entry of `teacher_texts`: `models`, runs separated by blanks, and the side `of`
            which they translate.
        runs: the folder of the runs, which gets the translations.
        texts: files by recipe key.
    """
    names = made["models"].split()
    sides = ["src", "tgt"] if made["of"] == "src" else ["tgt", "src"]
    of, into = (f"data.train.{side}" for side in sides)
    is_right_to_left = experiment.is_right_to_left(names[0].rpartition("-")[0])
    texts[into].append(
        translated(
            [runs / name for name in names],
            texts[of][0],
            runs / f"{'+'.join(names)}.txt",
            is_right_to_left=is_right_to_left,
        )
    )
    texts[of].append(texts[of][0])


def _same_test_text(experiment: Experiment, *rows: str) -> bool:
    """True if all rows translate the same test text in the same direction."""
    targets = {
        (experiment.settings(row).get("data.test.tgt"), experiment.is_right_to_left(row))
        for row in rows
    }
    return len(targets) == 1


def first_pairs(files: dict[str, Path], folder: Path, count: int) -> dict[str, Path]:
    """The training files by recipe key, reduced to their first `count` lines."""
    folder.mkdir(parents=True, exist_ok=True)
    shortened = {}
    for key in ("data.train.src", "data.train.tgt"):
        path = folder / files[key].name.removesuffix(".gz")
        with gzip.open(files[key], "rt", encoding="utf-8") as lines:
            path.write_text("".join(islice(lines, count)), encoding="utf-8")
        shortened[key] = path
    return shortened


def _directory(arguments: argparse.Namespace, row: str) -> Path:
    folder: Path = arguments.runs / f"{row}-{arguments.seed}"
    return folder


def _test_outputs(directory: Path) -> Path:
    """The file of the translations of the test text by the search `PLAIN`."""
    return directory.with_name(f"{directory.name}.test.txt")


def read_records(name: str, directory: Path) -> list[dict[str, Any]]:
    """The records in the JSON of the results."""
    path = directory / f"{name}.json"
    if not path.is_file():
        return []
    records: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["records"]
    return records


def _scores_of_run(run: Run, clock: ProcessorTime) -> dict[str, Any]:
    model = run.model()
    valid = {}
    for search in SEARCHES:
        scores = _scores(run, _decode(run, model, "valid", *search), "valid")
        valid[search] = scores[METRIC].value
    best = max(valid, key=lambda search: valid[search])
    outputs = {search: _decode(run, model, "test", *search) for search in {best, PLAIN}}
    test_outputs = _test_outputs(run.directory)
    test_outputs.write_text("".join(f"{line}\n" for line in outputs[PLAIN]), encoding="utf-8")
    seconds = {int(step): spent for step, spent in clock.steps}
    return {
        "parameters": parameter_count(model.net),
        "steps": run.end.step,
        "processor_minutes": clock.steps[-1][1] / 60,
        "minutes": run.minutes,
        "valid": valid[best],
        "valid_by_search": {_search_name(search): value for search, value in valid.items()},
        "search": {"beam_size": best[0], "length_penalty": best[1]},
        **_test_scores(run, outputs[best]),
        "plain": _test_scores(run, outputs[PLAIN]),
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


def _search_name(search: tuple[int, float]) -> str:
    return f"beam {search[0]}, length penalty {search[1]:g}"


def _decode(run: Run, model: Translator, split: str, beam: int, penalty: float) -> list[str]:
    sources = [src for src, _ in run.pairs(split)]
    return model.translate(sources, beam_size=beam, length_penalty=penalty, too_long="truncate")


def _scores(run: Run, outputs: list[str], split: str) -> Any:
    references = [tgt for _, tgt in run.pairs(split)]
    language = run.recipe.data.tgt_language
    metrics = [METRIC, "bleu"]
    return corpus_scores(
        outputs, references, tgt_language=language, metrics=metrics, lowercase=True
    )


def _test_scores(run: Run, outputs: list[str]) -> dict[str, Any]:
    scores = _scores(run, outputs, "test")
    sacrebleu = {"score": scores["bleu"].value, "signature": scores["bleu"].signature}
    return {"test": scores[METRIC].value, "sacrebleu": sacrebleu}


def write_page(
    name: str,
    experiment: Experiment,
    records: list[dict[str, Any]],
    arguments: argparse.Namespace,
) -> None:
    """The page and the JSON of all records."""
    sections = [
        f"{experiment.about} The settings of each row are in "
        f"[experiments/{arguments.experiment}.yaml](../../experiments/{arguments.experiment}.yaml).",
        *_table(experiment, records),
    ]
    write_results(
        name,
        experiment.title,
        [*sections, *_times(experiment.sequence, records)],
        {"records": records},
        directory=arguments.results,
        command=command_line({arguments.data: "DATA", arguments.runs: "RUNS"}),
        made_on="Written",
    )


def _table(experiment: Experiment, records: list[dict[str, Any]]) -> list[str]:
    header = ["row", "starts from", "seeds", "steps", "parameters", "processor minutes"]
    scores = ["validation", "test", "sacreBLEU"]
    header += [*scores, *(f"{column}, penalty 1" for column in scores)]
    is_tested = any("significance" in record for record in records)
    if is_tested:
        header += ["±", "p"]
    lines = []
    for row in experiment.rows:
        group = [record for record in records if record["row"] == row]
        if not group:
            continue
        trained = dict(setting.split("=", 1) for setting in group[0]["settings"])
        is_current = trained == experiment.settings(row)
        plain = [record["plain"] for record in group if "plain" in record]
        lines.append(
            [
                row if is_current else f"{row} †",
                " + ".join(experiment.bases(row)) or "recipe",
                ", ".join(str(record["seed"]) for record in group),
                f"{group[0]['steps']:,}",
                f"{group[0]['parameters']:,}",
                f"{mean(record['processor_minutes'] for record in group):.0f}",
                f"{mean(record['valid'] for record in group):.2f}",
                _means([record["test"] for record in group]),
                _sacrebleu(group),
                f"{mean(record['valid_by_search'][_search_name(PLAIN)] for record in group):.2f}",
                _means([scores["test"] for scores in plain]),
                _sacrebleu(plain),
                *_tested(group),
            ][: len(header)]
        )
    conditions = sorted({record["conditions"] for record in records})
    signatures = {record["sacrebleu"]["signature"] for record in records if "sacrebleu" in record}
    signed = ", ".join(f"`{signature}`" for signature in sorted(signatures))
    text = (
        "Tokenized lowercased BLEU with beam 5, means over the seeds. The length penalty is that "
        "of 0.6, 1 and 1.4 which is best on the validation text; beside it the scores with 1, as "
        "a run scores itself. The test text is decoded once with each. Processor minutes were "
        f"measured on: {'; '.join(conditions)}."
    )
    if signed:
        text += f" sacreBLEU of the test text: {signed}."
    if is_tested:
        text += f" {NOTE} Both are for sacreBLEU with penalty 1; p is against the row named there."
    if any(line[0].endswith("†") for line in lines):
        text += " †: trained with settings that have changed since; the JSON has them."
    content = table(header, lines)
    return [text, content if len(lines) <= FOLDED_ROWS else folded(f"{len(lines)} rows", content)]


def _sacrebleu(scores: list[dict[str, Any]]) -> str:
    return _means([one["sacrebleu"]["score"] for one in scores if "sacrebleu" in one])


def _tested(group: list[dict[str, Any]]) -> list[str]:
    """Interval and p-values of a row's records."""
    tested = [record["significance"] for record in group if "significance" in record]
    if not tested:
        return ["–", "–"]
    p_values = ", ".join(p_text(one["p_value"]) for one in tested)
    baseline = tested[0]["baseline"]
    return [
        f"{mean(one['interval'] for one in tested):.2f}",
        p_values if baseline is None else f"{p_values} ({baseline})",
    ]


def _times(sequence: list[str], records: list[dict[str, Any]]) -> list[str]:
    """Processor minutes up to the first evaluation with a BLEU of each of THRESHOLDS, by seed."""
    by_run = {f"{record['row']}-{record['seed']}": record for record in records}
    lines = []
    for seed in sorted({record["seed"] for record in records}) if sequence else []:
        names = [run.format(seed=seed) for run in sequence]
        if not all(name in by_run for name in names):
            continue
        past, scores = 0.0, []
        for record in map(by_run.__getitem__, names):
            if not record["row"].startswith("backward"):  # its BLEU is of the other language
                scores += [
                    (past + evaluation["processor_minutes"], evaluation["bleu"])
                    for evaluation in record["validation"]
                ]
            past += record["processor_minutes"]
        reached = [
            next((f"{minutes:.0f}" for minutes, bleu in scores if bleu >= threshold), "–")
            for threshold in THRESHOLDS
        ]
        lines.append([str(seed), *reached, f"{past:.0f}"])
    if not lines:
        return []
    header = ["seed", *(f"{threshold} BLEU" for threshold in THRESHOLDS), "all"]
    return [
        "## Processor minutes up to a validation score",
        f"The runs {', '.join(sequence)}, trained one after the other. BLEU is that of the "
        "evaluations during training (validation text, greedy search): it chooses checkpoints and "
        "is not comparable with a test score.",
        table(header, lines),
    ]


def _means(scores: list[float]) -> str:
    if len(scores) < 2:
        return f"{scores[0]:.2f}" if scores else "–"
    return f"{mean(scores):.2f} ({', '.join(f'{score:.2f}' for score in scores)})"


if __name__ == "__main__":
    main()
