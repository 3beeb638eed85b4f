"""A teacher and its students on a file of real text: sentences per second, and BLEU.

DATA holds Multi30k's val and test_2016_flickr, each .en.gz and .de.gz. TEACHER, STUDENT, PLAIN and
DEEP are folders of runs on its training pairs: a translator; the result of `heedful distill TEACHER
--student`; a model of the student's size trained on the pairs; one of the teacher's size trained on
the teacher's outputs. Copies of them are optimized. Then all run in alternating rounds, together
with direct calls of CTranslate2, whose threads and batches `common.fastest` selects on the
validation text, as `heedful optimize` does for heedful's.
"""

import gzip
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ctranslate2
import tokenizers

import heedful
from common import (
    argument_parser,
    command_line,
    facts,
    fastest,
    interleaved,
    medians,
    ratio,
    table,
    whole,
    write_results,
)
from heedful.backends.manifest import conversion_path
from heedful.backends.registry import open_conversion
from heedful.cli.lines import input_chunks
from heedful.cli.optimize import Candidates, optimize
from heedful.deploy.convert import convert_model
from heedful.evaluation.metrics import corpus_scores
from heedful.files import read_json, write_json
from heedful.hardware import cores
from heedful.pipelines import Translator, parameter_count
from heedful.recipe_changes import changed_keys
from heedful.recipe_files import load_recipe
from heedful.training.events import score_label

METRICS = ("bleu", "tokenized_lowercase_bleu")
# Maximum loss of BLEU by int8 or a shortlist on the validation text; the actual one is on the page.
TOLERANCE = 1.0
BATCHES = [("examples", 16), ("examples", 32), ("examples", 64), ("examples", 128)]
BATCHES += [("tokens", 512), ("tokens", 1024), ("tokens", 2048), ("tokens", 4096)]
Translate = Callable[[], list[str]]


class System(NamedTuple):
    """A system: the run of its model, and its search."""

    run: str
    beam: int = 1
    shortlist: bool = False


TEACHER, FAST_TEACHER = "teacher, beam 5", "teacher, greedy"
DEEP, PLAIN = "deep student, greedy", "student's shape from the pairs, greedy"
STUDENT, LISTED = "student, greedy", "student, greedy, shortlist"
LISTED_BEAM = "student, beam 2, shortlist"
SYSTEMS = {
    TEACHER: System("teacher", beam=5),
    FAST_TEACHER: System("teacher"),
    DEEP: System("deep"),
    PLAIN: System("plain"),
    STUDENT: System("student"),
    LISTED: System("student", shortlist=True),
    LISTED_BEAM: System("student", beam=2, shortlist=True),
}
# Comparisons: the system with a change, and the one without.
STEPS = {
    "greedy search, no beam": (FAST_TEACHER, TEACHER),
    "depth: fewer layers of the decoder": (PLAIN, FAST_TEACHER),
    "distillation": (STUDENT, PLAIN),
    "distillation at the teacher's depth": (DEEP, FAST_TEACHER),
    "depth, both distilled": (STUDENT, DEEP),
    "shortlist": (LISTED, STUDENT),
    "all of it": (LISTED, TEACHER),
    "all of it, with a small beam": (LISTED_BEAM, TEACHER),
}


# The shipped recipe that each run's recipe is based on.
RECIPES = {
    "teacher": "multi30k",
    "deep": "multi30k",
    "plain": "translation",
    "student": "translation-student",
}


class Text(NamedTuple):
    """A text to translate: a file, its lines, and their references."""

    path: Path
    sources: list[str]
    references: list[str]


def main() -> None:
    """Optimize every model, measure, and write the page and the records."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--data", type=Path, required=True, help="folder of Multi30k")
    for run in ("teacher", "student", "plain", "deep"):
        needed = run in ("teacher", "student")
        parser.add_argument(f"--{run}", type=Path, required=needed, help="folder of a run")
    parser.add_argument("--limit", type=int, help="translate only the first sentences")
    parser.add_argument(
        "--rounds", type=int, default=7, help="rounds, of which the median is taken"
    )
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    batches = BATCHES[-1:] if arguments.quick else BATCHES
    runs = {name: vars(arguments)[system.run] for name, system in SYSTEMS.items()}
    with tempfile.TemporaryDirectory() as scratch:
        text = read_text(
            arguments.data, "test_2016_flickr", arguments.limit, Path(scratch) / "lines"
        )
        valid = read_text(arguments.data, "val", arguments.limit, Path(scratch) / "valid")
        folders = {name: Path(scratch) / str(n) for n, name in enumerate(runs) if runs[name]}
        for name, folder in folders.items():
            print(f"--- {name}", flush=True)
            optimize_copy(SYSTEMS[name], runs[name], folder, arguments.data)
        models = {name: heedful.load(at, use="throughput") for name, at in folders.items()}
        cases = {
            name: partial(heedful_translate, model, text.path) for name, model in models.items()
        }
        hands, settings = {}, {}
        for name in (TEACHER, STUDENT):
            ways = by_hand(models[name], folders[name], SYSTEMS[name].beam, batches)
            tried = [count_sentences(partial(call, valid)) for call in ways.values()]
            settings[name] = [*ways][fastest(tried, rounds=1 if arguments.quick else None)]
            hands[name] = partial(ways[settings[name]], text)
        together = cases | {f"by hand: {name}": run for name, run in hands.items()}
        rates = interleaved(
            {name: count_sentences(run) for name, run in together.items()}, rounds=rounds
        )
        outputs = {name: run() for name, run in together.items()}
        precisions = float32(folders[TEACHER], models[TEACHER], text, Path(scratch) / "float32")
        records = {
            name: make_record(models[name], text, outputs[name], rates[name], folders[name])
            for name in models
        }
    files = {
        name: {
            "sentences/s": medians(rates)[name],
            "by hand": medians(rates)[f"by hand: {name}"],
            "ratio": ratio(rates[name], rates[f"by hand: {name}"]),
            "setting": settings[name],
            "same": share(outputs[name], outputs[f"by hand: {name}"]),
        }
        for name in hands
    }
    precisions = {"int8": records[TEACHER]["scores"]} | precisions
    data = {"sentences": len(text.sources), "rounds": rounds, "systems": records, "files": files}
    run_folders = {run: vars(arguments)[run] for run in RECIPES if vars(arguments)[run]}
    data["trained"] = {run: recipe_note(run, at) for run, at in run_folders.items()}
    path_names = {vars(arguments)[key]: key.upper() for key in ("data", "teacher", "student")}
    path_names |= {vars(arguments)[key]: key.upper() for key in ("plain", "deep")}
    write_results(
        "students",
        "A teacher and its students, on a file of real text",
        sections(data, precisions),
        data | {"precisions": precisions},
        directory=arguments.results,
        command=command_line(path_names),
        packages=("ctranslate2", "tokenizers", "sacrebleu", "sacremoses"),
    )


def recipe_note(run: str, folder: Path) -> str:
    """A run's recipe as text: the shipped one and the changes, except paths."""
    apart = ("data.", "distillation.teacher", 'training.precision ("auto"')
    changed = changed_keys(load_recipe(RECIPES[run]), load_recipe(folder))
    differences = [line for line in changed if not line.startswith(apart)]
    return f"`{RECIPES[run]}`" + (f" with {'; '.join(differences)}" if differences else "")


def read_text(data: Path, part: str, limit: int | None, path: Path) -> Text:
    """Read the pairs of a part of the data, and write their sources to `path`."""
    lines = []
    for language in ("en", "de"):
        with gzip.open(data / f"{part}.{language}.gz", "rt", encoding="utf-8") as file:
            lines.append(file.read().splitlines()[:limit])
    path.write_text("".join(f"{line}\n" for line in lines[0]), encoding="utf-8")
    return Text(path, *lines)


def optimize_copy(system: System, run: Path, folder: Path, data: Path) -> None:
    """Copy a run's model to `folder`, and optimize it for a search by `heedful optimize`."""
    folder.mkdir()
    for file in run.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", config | {"options": {"beam_size": system.beam}})
    optimize(
        model=folder,
        src=data / "val.en.gz",
        ref=data / "val.de.gz",
        candidates=Candidates(
            backend=["ctranslate2"],
            precision=["int8"],
            threads=None,
            use="throughput",
            tolerance=TOLERANCE,
            shortlist=system.shortlist,
        ),
    )


def heedful_translate(model: Translator, path: Path, **options: Any) -> list[str]:
    """Translate the lines of a file as `heedful translate` does."""
    options = {"scores": False, "too_long": "leave_out"} | options
    return [
        results[0].text
        for results in model.iterate_generations(input_chunks(path), ahead=1, **options)
    ]


def by_hand(
    model: Translator, folder: Path, beam: int, batches: list[tuple[str, int]]
) -> dict[str, Callable[[Text], list[str]]]:
    """Functions that translate a file by one call of `translate_batch`, by workers and batches.

    `translate_batch` sorts sentences by length. The length limit of all lines is the largest one.
    """
    content = json.dumps(read_json(folder / "tokenizer.json")["tokenizer"])
    tokenizer = tokenizers.Tokenizer.from_str(content)
    ids, end = tokenizer.get_vocab(), model.tgt_tokenizer.piece(model.end_ids()[0])
    limits: dict[Path, int] = {}

    def run(opened: Any, unit: str, size: int, text: Text) -> list[str]:
        if text.path not in limits:
            rows = model.prompt_ids(text.sources)
            limits[text.path] = max(model.length_limit(row, model.options()) for row in rows)
        options = {"beam_size": beam, "max_decoding_length": limits[text.path]}
        lines = text.path.read_text(encoding="utf-8").splitlines()
        encoded = tokenizer.encode_batch(lines, add_special_tokens=False)
        rows = [[*result.tokens, end] for result in encoded]
        results = opened.translate_batch(rows, max_batch_size=size, batch_type=unit, **options)
        best = [[ids[token] for token in result.hypotheses[0]] for result in results]
        return list(tokenizer.decode_batch(best))

    place = str(conversion_path(folder, "ctranslate2", "int8"))
    calls: dict[str, Callable[[Text], list[str]]] = {}
    for workers, threads in sorted({(cores(), 1), (1, cores())}):
        layout = {"inter_threads": workers, "intra_threads": threads}
        opened = ctranslate2.Translator(place, compute_type="int8", **layout)
        for unit, size in batches:
            calls[f"{workers}×{threads}, {size} {unit}"] = partial(run, opened, unit, size)
    return calls


def count_sentences(run: Translate) -> Callable[[], float]:
    """A function that runs `run` and returns the number of sentences."""
    return lambda: len(run())


def float32(folder: Path, model: Translator, text: Text, scratch: Path) -> dict[str, Any]:
    """Scores of the same search in float32, by the backend and by the net."""
    net = heedful.load(folder, device="cpu", backend="eager")
    outputs = {"float32, the net itself": heedful_translate(net, text.path, stop_rule="beam_full")}
    assert model.backend is not None
    facts = convert_model(net, scratch, "float32")
    net.backend = open_conversion(
        scratch, scratch, "ctranslate2", "float32", facts, model.backend.settings
    )
    outputs["float32"] = heedful_translate(net, text.path)
    return {name: scores(lines, text) for name, lines in outputs.items()}


def make_record(
    model: Translator, text: Text, lines: list[str], rates: list[float], folder: Path
) -> dict[str, Any]:
    """The record of a system: speed, scores, size and settings."""
    backend, sizes = model.backend, model.config
    assert backend is not None
    record = {
        "sentences/s": statistics.median(rates),
        "sentences/s by round": rates,
        "scores": scores(lines, text),
        "parameters": parameter_count(heedful.load(folder, device="cpu", backend="eager").net),
        "layers": [sizes.num_encoder_layers, sizes.num_decoder_layers],
        "workers": backend.settings.workers,
        "threads": backend.settings.threads,
        "batch_tokens": backend.settings.batch_tokens,
    }
    if model.shortlist is not None:
        rows = model.prompt_ids(text.sources)
        pairs = [*zip(rows, model.tgt_tokenizer.encode_batch(text.references), strict=True)]
        record["shortlist"] = {
            "size": model.shortlist.mean_size(pairs),
            "recall": model.shortlist.recall(pairs),
            "vocabulary": model.shortlist.target_size,
        }
    return record


def scores(lines: list[str], text: Text) -> dict[str, float]:
    """The scores of `METRICS`."""
    return corpus_scores(lines, text.references, tgt_language="de", metrics=METRICS).values()


def share(one: list[str], other: list[str]) -> float:
    """The fraction of equal lines."""
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def sections(data: dict[str, Any], precisions: dict[str, dict[str, float]]) -> list[str]:
    """The sections of the page."""
    systems, files = data["systems"], data["files"]
    rates = {name: record["sentences/s by round"] for name, record in systems.items()}
    teacher = systems[TEACHER]["scores"]
    labels = [score_label(metric) for metric in METRICS]
    rows, calls = [], []
    for name, record in systems.items():
        shape = f"{record['layers'][0]} + {record['layers'][1]}"
        cells = [name, shape, f"{record['parameters']:,}", whole(record["sentences/s"])]
        cells.append(ratio(rates[name], rates[TEACHER]))
        rows.append([*cells, *bleus(record["scores"], teacher)])
    for name, record in files.items():
        setting = f"{systems[name]['workers']}×{systems[name]['threads']}, "
        setting += f"{systems[name]['batch_tokens']} tokens"
        cells = [name, whole(record["sentences/s"]), whole(record["by hand"])]
        cells += [record["ratio"], f"{100 * record['same']:.1f}%"]
        calls.append([*cells, setting, record["setting"]])
    steps = [
        [change, ratio(rates[new], rates[old]), *differences(systems[new], systems[old])]
        for change, (new, old) in STEPS.items()
        if new in systems and old in systems
    ]
    return [
        f"The first {data['sentences']:,} sentences of Multi30k's test_2016_flickr, English to "
        "German, from a file to lines of text: reading and tokenization included. Every model is "
        "optimized for its search by `heedful optimize` (CTranslate2 in int8) and translates the "
        "file as `heedful translate` does. All run in one process in alternating rounds; rates are "
        f"medians of {data['rounds']} rounds, ratios medians of the ratios within a round.",
        "## Sentences per second, and BLEU",
        table(
            ["", "layers", "parameters", "sentences/s", "× the teacher's", *labels],
            rows,
        ),
        shortlist_sentence(systems.get(LISTED, {})),
        "## Effect of each step",
        table(["", "× sentences/s", *(f"{label}, difference" for label in labels)], steps),
        "## The same file by `translate_batch`, by hand",
        table(
            ["", "heedful", "by hand", "ratio", "same outputs", "heedful's setting", "by hand's"],
            calls,
        ),
        "Sentences per second. By hand: the tokenizer's `encode_batch`, one call with all lines, "
        "`decode_batch`; the same int8 model, beam and length penalty, and the largest length "
        "limit for all lines, whereas heedful has one for each line. Settings are workers × "
        "threads and the size of a batch; both were selected on the validation text, in the same "
        "number of warm rounds.",
        "## The teacher in int8 and float32, beam 5",
        table(
            ["", *labels],
            [[name, *bleus(values, precisions["int8"])] for name, values in precisions.items()],
        ),
        "## Recipes of the runs",
        facts(data["trained"]),
    ]


def bleus(values: dict[str, float], base: dict[str, float]) -> list[str]:
    """Scores, and their differences from those of a base."""
    return [f"{values[metric]:.2f} ({values[metric] - base[metric]:+.2f})" for metric in METRICS]


def differences(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """The differences between the scores of two systems, by metric."""
    return [f"{new['scores'][metric] - old['scores'][metric]:+.2f}" for metric in METRICS]


def shortlist_sentence(record: dict[str, Any]) -> str:
    """A sentence on the size and recall of the shortlist of a system."""
    shortlist = record.get("shortlist")
    if shortlist is None:
        return "The shortlist was not used: it lost too much BLEU on the validation text."
    return (
        f"The shortlist allows {shortlist['size']:,.0f} of {shortlist['vocabulary']:,} target "
        f"tokens per sentence on average, which include {100 * shortlist['recall']:.1f}% of the "
        "tokens of the references."
    )


if __name__ == "__main__":
    main()
