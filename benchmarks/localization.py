"""Translators of software: messages and help of LibreOffice, from its translation memory.

DATA holds a folder for each language (de, zh-cn) with train.tmx.gz, valid.tsv.gz, test.po
(messages) and test.help.tsv.gz (paragraphs). For each language the recipes `localization` and
`translation` are trained, unless their runs are there; beside them stands the translation of the
most similar source of the memory, found by RapidFuzz.
"""

import argparse
import gzip
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import polib

import heedful
from common import (
    argument_parser,
    command_line,
    facts,
    interleaved,
    paired_ratio,
    table,
    write_results,
)
from heedful.data.row_files import open_rows
from heedful.data.rows import collect
from heedful.deploy.optimize import optimize
from heedful.evaluation.metrics import corpus_scores
from runs import QUICK, RUNS, Run, finished_run, recipe_note

LANGUAGES = {"de": "de", "zh-cn": "zh"}
RECIPES = ("localization", "translation")
METRICS = ["bleu", "chrf"]
BACKENDS = ("eager", "ctranslate2", "compiled")
BEAMS = {"greedy": 1, "beam of 5": 5}
HUMAN, NEAREST = "human translation", "nearest source of the memory"
# What a translation must keep, by patterns that are not those of heedful.
PIECES = {
    "numbers": r"\d+(?:[.,]\d+)*",
    "placeholders": r"\$\(\w+\)|\$\{\w+\}|\$\w+\$?|%[A-Z]{2,}\w*|%\d?\$?[sdu]\b|\{\w*\}",
    "tags": r"</?[A-Za-z][^<>]*>",
}


class Text(NamedTuple):
    """A test set."""

    name: str
    sources: list[str]
    references: list[str]


def main() -> None:
    """Train what is missing, translate the test sets, write the page."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--data", type=Path, required=True, help="folder of the languages")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the runs")
    parser.add_argument("--languages", nargs="+", default=[*LANGUAGES], choices=[*LANGUAGES])
    parser.add_argument("--recipes", nargs="+", default=[*RECIPES], choices=RECIPES)
    parser.add_argument("--steps", type=int, help="of every training; default: of its recipe")
    parser.add_argument(
        "--longer", type=int, help="steps of one more training, in the first language"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of the times with and without keep")
    parser.add_argument(
        "--backends", nargs="*", default=[*BACKENDS], choices=BACKENDS, help="that are timed"
    )
    parser.add_argument("--note", default="", help="the machine of the trainings")
    arguments = parser.parse_args()
    sections, data = [], {}
    for language in arguments.languages:
        section, data[language] = measure(language, arguments)
        sections += section
    write_results(
        "localization",
        "Software: translators from a translation memory",
        [
            "BLEU and chrF are of whole test sets. A line keeps its numbers, "
            "placeholders or tags if its translation has each as often as its source; points and "
            "commas of numbers may be exchanged. Lines of the human translations are counted "
            "likewise: they are no upper limit.",
            *sections,
        ],
        {"languages": data},
        directory=arguments.results,
        command=command_line({arguments.data: "DATA", arguments.runs: "RUNS"}),
        packages=("sacrebleu", "tokenizers", "scikit-learn", "rapidfuzz"),
        made_on="Scored",
    )


class System(NamedTuple):
    """The translations of the test sets by a model, by people, or of a memory.

    Attributes:
        outputs: of each test set.
        flagged, seconds: lines marked for a review, and the time, by test set; empty: no model.
    """

    outputs: list[list[str]]
    flagged: Sequence[int] = ()
    seconds: Sequence[float] = ()


def measure(language: str, arguments: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """The sections of a language, and their figures."""
    folder = arguments.data / language
    tests = [messages(folder / "test.po"), help_texts(folder / "test.help.tsv.gz")]
    systems = {
        HUMAN: System([test.references for test in tests]),
        NEAREST: System(nearest(folder / "train.tmx.gz", language, tests)),
    }
    notes = {}
    trainings = [(recipe, recipe, arguments.steps) for recipe in arguments.recipes]
    if arguments.longer and language == arguments.languages[0]:
        trainings.append(
            (f"localization, {arguments.longer:,} steps", RECIPES[0], arguments.longer)
        )
    for name, recipe, steps in trainings:
        run = run_of(recipe, language, folder, arguments, steps)
        systems[name], beam = translated(run, tests)
        notes[f"Recipe `{recipe}`" if name == recipe else name] = (
            f"{recipe_note(run, recipe)}; {run.end.step:,} steps, {run.minutes:.1f} minutes; "
            f"beams of {beam}"
        )
    if arguments.note:
        notes["Trained on"] = arguments.note
    figures: dict[str, Any] = {"notes": notes, "tests": {}}
    sections = [f"## English to {LANGUAGES[language]}", facts(notes)]
    for index, test in enumerate(tests):
        rows, figures["tests"][test.name] = scored(test, index, systems, LANGUAGES[language])
        header = [test.name, "BLEU", "chrF", *PIECES, "all kept", "marked for review"]
        sections += [f"{len(test.sources):,} {test.name}:", table(header, rows)]
    if "localization" in arguments.recipes and arguments.backends:
        run = run_of("localization", language, folder, arguments, arguments.steps)
        rates = keeping_rates(run, [text for test in tests for text in test.sources], arguments)
        figures["sentences per second by round"] = rates
        sections += speed_section(rates)
    return sections, figures


def keeping_rates(
    run: Run, sources: Sequence[str], arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Sentences per second of each backend and search with `keep` and without, in alternating
    rounds."""
    sources = sources[:8] if arguments.quick else sources
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        names = ("config.json", "model.safetensors", "tokenizer.json")
        folder.mkdir()
        for name in names:
            shutil.copy(run.directory / name, folder)
        converted = [name for name in arguments.backends if name != "eager"]
        if converted:
            model = heedful.load(folder, backend="eager", device="cpu")
            settings: Any = {"backends": converted, "uses": ["throughput"]}
            optimize(model, folder, sources[:256], precisions=["float32"], **settings)
        models = {
            backend: heedful.load(folder, backend=backend, device="cpu")
            for backend in arguments.backends
        }
        cases = {
            f"{backend}, {search} {'with' if keep else 'without'}": translating(
                model, sources, keep, beam_size
            )
            for backend, model in models.items()
            for search, beam_size in BEAMS.items()
            for keep in (True, False)
        }
        return interleaved(cases, rounds=1 if arguments.quick else arguments.rounds)


def translating(
    model: Any, sources: Sequence[str], keep: bool, beam_size: int
) -> Callable[[], float]:
    """A function that translates the sources, and returns their number."""

    def run() -> float:
        model.generate([*sources], keep=keep, beam_size=beam_size, too_long="truncate")
        return len(sources)

    return run


def speed_section(rates: dict[str, list[float]]) -> list[str]:
    """Sentences per second with and without `keep`."""
    names = dict.fromkeys(name.rsplit(" ", 1)[0] for name in rates)
    rows = [
        [
            *name.split(", "),
            *(f"{median(rates[f'{name} {how}']):,.0f}" for how in ("with", "without")),
            f"{paired_ratio(rates[f'{name} with'], rates[f'{name} without']):.2f}",
        ]
        for name in names
    ]
    return [
        "Sentences per second of the model of `localization`, all test sets at once, in float32, "
        "with `keep` and without it, in alternating rounds; the ratio is the median of those "
        "within rounds:",
        table(["backend", "search", "with keep", "without", "ratio"], rows),
    ]


def translated(run: Run, tests: Sequence[Text]) -> tuple[System, int]:
    """The translations of a run's model by its default search, and the size of its beam."""
    model, outputs, flagged, seconds = run.model(), [], [], []
    for test in tests:
        start = time.perf_counter()
        results = model.generate(test.sources, too_long="truncate", return_details=True)
        seconds.append(time.perf_counter() - start)
        outputs.append([found[0].text for found in results])
        flagged.append(sum(bool(found[0].reasons) for found in results))
    return System(outputs, flagged, seconds), model.options().beam_size


def scored(
    test: Text, index: int, systems: dict[str, System], language: str
) -> tuple[list[list[str]], dict[str, Any]]:
    """A row of the table for each system, and the figures."""
    rows, figures = [], {}
    for name, system in systems.items():
        texts = system.outputs[index]
        kept = {kind: kept_lines(kind, test.sources, texts) for kind in (*PIECES, "all")}
        scores = corpus_scores(
            texts, test.references, tgt_language=language, metrics=METRICS
        ).values()
        figures[name] = {**scores, "kept": kept}
        shown = ["–" if name == HUMAN else f"{scores[metric]:.1f}" for metric in METRICS]
        shown += [f"{count} of {total}" for count, total in kept.values()]
        flagged = "–"
        if system.flagged:
            flagged = f"{system.flagged[index]:,}"
            figures[name] |= {"flagged": system.flagged[index], "seconds": system.seconds[index]}
        rows.append([name, *shown, flagged])
    return rows, figures


def run_of(
    recipe: str, language: str, folder: Path, arguments: argparse.Namespace, steps: int | None
) -> Run:
    """The finished run of a recipe, which is trained if it is missing.

    Args:
        steps: of the training; None: those of the recipe.
    """
    settings = data_settings(language, folder, arguments.runs)
    name = f"{recipe}-{language}"
    if arguments.quick:
        settings += QUICK
    if steps:
        settings.append(f"training.max_steps={steps}")
    if steps != arguments.steps:
        name += f"-{steps}"
    return finished_run(recipe, arguments.runs / name, settings)


def data_settings(language: str, folder: Path, runs: Path) -> list[str]:
    """The settings of a training for the data of a language; writes its validation file."""
    valid = runs / f"localization-{language}.valid.tsv"
    if not valid.is_file():
        valid.parent.mkdir(parents=True, exist_ok=True)
        valid.write_bytes(gzip.decompress((folder / "valid.tsv.gz").read_bytes()))
    return [
        f"data.train.file={folder / 'train.tmx.gz'}",
        f"data.valid.file={valid}",
        "data.valid.src_field=1",
        "data.valid.tgt_field=2",
        "data.src_language=en",
        f"data.tgt_language={LANGUAGES[language]}",
        "training.parallel=none",
    ]


def messages(path: Path) -> Text:
    """The translated messages of a catalogue, each in one line."""
    entries = [entry for entry in polib.pofile(str(path)) if entry.msgstr]
    return Text("messages", [line(e.msgid) for e in entries], [line(e.msgstr) for e in entries])


def help_texts(path: Path) -> Text:
    """The pairs of a file of tab-separated lines."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        pairs = [text.rstrip("\n").split("\t")[:2] for text in file]
    return Text("paragraphs of help", [src for src, _ in pairs], [tgt for _, tgt in pairs])


def line(text: str) -> str:
    """A text with line breaks as in the file of validation."""
    return text.replace("\n", "\\n").replace("\t", " ")


def nearest(path: Path, language: str, tests: Sequence[Text]) -> list[list[str]]:
    """For each source the translation of the most similar source of the memory."""
    from rapidfuzz import fuzz, process  # of the group `bench`; the race needs the rest of this

    languages = {"src": "en", "tgt": LANGUAGES[language]}
    rows = collect(open_rows([path], {"src": None, "tgt": None}, languages=languages))
    sources, targets = list(rows["src"]), list(rows["tgt"])
    results = []
    for test in tests:
        found = process.cdist(test.sources, sources, scorer=fuzz.ratio, score_cutoff=40, workers=-1)
        results.append([line(targets[index]) for index in found.argmax(1).tolist()])
    return results


def pieces(name: str, text: str) -> Counter[str]:
    """The pieces of a kind, or of all kinds."""
    patterns = PIECES.values() if name == "all" else [PIECES[name]]
    found = (match for pattern in patterns for match in re.findall(pattern, text))
    return Counter(re.sub(r"(?<=\d)[.,](?=\d)", "", match) for match in found)


def kept_lines(name: str, sources: list[str], outputs: list[str]) -> tuple[int, int]:
    """The lines that keep their pieces, and those that have any."""
    with_pieces = [
        (pieces(name, source), output)
        for source, output in zip(sources, outputs, strict=True)
        if pieces(name, source)
    ]
    return sum(pieces(name, output) == own for own, output in with_pieces), len(with_pieces)


if __name__ == "__main__":
    main()
