"""Translators that have been trained on with noise in their pairs, and without it.

DATA is that of `localization.py`, RUN a finished run of its recipe `localization`. The model is
trained for some further steps with `training.noise` and, beside it, without. Both translate the
test sets as they are, in capitals, in title case, without their last stops, and with typing errors,
which are made by this program and not by heedful.
"""

import argparse
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import argument_parser, command_line, facts, table, write_results
from heedful.evaluation.metrics import corpus_scores
from localization import PIECES, data_settings, help_texts, messages
from runs import QUICK, Run, finished_run

LANGUAGE = "de"
RATE = 0.002
SHARES = {"upper": 0.05, "title": 0.05, "no_stop": 0.1, "typos": 0.1}
METRICS = ["bleu", "chrf"]
STOPS = ".!?:"
Pairs = list[tuple[str, str]]


def capitals(pairs: Pairs, rng: random.Random) -> Pairs:
    """Both sides in capitals."""
    return [(src.upper(), tgt.upper()) for src, tgt in pairs]


def title_case(pairs: Pairs, rng: random.Random) -> Pairs:
    """Both sides with a capital at the start of each word."""

    def titled(text: str) -> str:
        return " ".join(word[:1].upper() + word[1:] for word in text.split(" "))

    return [(titled(src), titled(tgt)) for src, tgt in pairs]


def without_stops(pairs: Pairs, rng: random.Random) -> Pairs:
    """Pairs that both end in a stop, without it."""
    both = [(src, tgt) for src, tgt in pairs if src[-1:] in STOPS and tgt[-1:] in STOPS]
    return [(src.rstrip(STOPS), tgt.rstrip(STOPS)) for src, tgt in both]


def with_typos(pairs: Pairs, rng: random.Random) -> Pairs:
    """Sources in which two adjacent letters of one word in ten, at least of one, are exchanged."""
    found = []
    for src, tgt in pairs:
        words = src.split(" ")
        places = [i for i, word in enumerate(words) if len(word) > 3 and word.isalpha()]
        for place in rng.sample(places, min(len(places), max(1, len(words) // 10))):
            word, at = words[place], rng.randrange(1, len(words[place]) - 2)
            words[place] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        found.append((" ".join(words), tgt))
    return found


CHANGES: dict[str, Callable[[Pairs, random.Random], Pairs]] = {
    "as they are": lambda pairs, rng: pairs,
    "in capitals": capitals,
    "in title case": title_case,
    "without the last stop": without_stops,
    "with typing errors": with_typos,
}


def main() -> None:
    """Train on, score, write the page."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--data", type=Path, required=True, help="folder of the languages")
    parser.add_argument("--run", type=Path, required=True, help="finished run of localization")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the further trainings")
    parser.add_argument("--steps", type=int, default=400, help="of the further trainings")
    arguments = parser.parse_args()
    folder = arguments.data / LANGUAGE
    pairs = [
        pair
        for test in (messages(folder / "test.po"), help_texts(folder / "test.help.tsv.gz"))
        for pair in zip(test.sources, test.references, strict=True)
        if not any(re.search(pattern, text) for pattern in PIECES.values() for text in pair)
    ]
    models = {
        name: further(arguments, name, noise)
        for name, noise in (("without noise", {}), ("with noise", SHARES))
    }
    rows: list[list[str]] = []
    data: dict[str, Any] = {}
    for name, change in CHANGES.items():
        changed = change(pairs, random.Random(1))
        data[name] = {model: scores(run, changed) for model, run in models.items()}
        cells = [f"{found[metric]:.1f}" for found in data[name].values() for metric in METRICS]
        rows.append([name, f"{len(changed):,}", *cells])
        print(rows[-1], flush=True)
    names = [f"{metric}, {model}" for model in models for metric in ("BLEU", "chrF")]
    shares = ", ".join(f"`{key}` {share}" for key, share in SHARES.items())
    steps = models["with noise"].end.step
    write_results(
        "noise",
        "Noise in the training pairs of a translator",
        [
            f"A translator of the recipe `localization` was trained on for {steps:,} steps "
            f"with noise ({shares}) and, beside it, without. Both translated those test texts of "
            "[localization](localization.md) that have no numbers, placeholders or tags; "
            "references are changed as their sources are, but have no typing errors.",
            table(["texts", "number", *names], rows),
            facts({name: changes(run) for name, run in models.items()}),
        ],
        {"shares": SHARES, "scores": data, "steps": steps},
        directory=arguments.results,
        command=command_line(
            {arguments.data: "DATA", arguments.run: "RUN", arguments.runs: "RUNS"}
        ),
        packages=("sacrebleu",),
    )


def further(arguments: argparse.Namespace, name: str, noise: dict[str, float]) -> Run:
    """The run that continues from the model with noise in its pairs."""
    settings = [
        *data_settings(LANGUAGE, arguments.data / LANGUAGE, arguments.runs),
        f"init_from={arguments.run.absolute()}",
        f"training.schedule.learning_rate={RATE}",
        "training.schedule.warmup_steps=50",
        *(f"training.noise.{key}={share}" for key, share in noise.items()),
    ]
    if arguments.quick:  # the sizes are those of the model
        settings += [item for item in QUICK if item.startswith(("training.", "evaluation."))]
    else:
        settings.append(f"training.max_steps={arguments.steps}")
    return finished_run("localization", arguments.runs / name.replace(" ", "-"), settings)


def changes(run: Run) -> str:
    """The changes of the recipe, except the folder of the model."""
    changed = [text for text in run.changes("localization") if not text.startswith("init_from")]
    return f"the recipe `localization` except {', '.join(changed)}"


def scores(run: Run, pairs: Pairs) -> dict[str, float]:
    """BLEU and chrF of the run's model, by its default search."""
    outputs = run.model().generate([src for src, _ in pairs], too_long="truncate")
    references = [tgt for _, tgt in pairs]
    return corpus_scores(outputs, references, tgt_language=LANGUAGE, metrics=METRICS).values()


if __name__ == "__main__":
    main()
