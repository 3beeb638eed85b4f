"""SST-2 sentiment: from scratch, after masked-LM pre-training on the same text, and distilled.

DATA is the folder of train.tsv and dev.tsv. Every classifier is evaluated once, at its end, so that
no dev score chooses anything; TF-IDF with logistic regression is measured beside it.
"""

import statistics
import time
from pathlib import Path

import numpy as np
import torch

import heedful
from common import argument_parser, command_line, facts, table, write_results
from heedful.inference import Classifier, parameter_count
from heedful.recipe_files import load_recipe
from runs import RUNS, Run, finished_run

# A second round of masked LM hides more, once the first has learnt what is easy.
SECOND = [
    "objective.fraction=0.4",
    "training.max_steps=4360",
    "training.schedule.learning_rate=0.0012",
    "training.schedule.warmup_steps=300",
]
STUDENT_LAYERS = 2
QUICK = [
    "tokenizer.kind=word",
    "tokenizer.vocab_size=null",
    "training.max_steps=4",
    "training.evaluate_every=4",
    "model.d_model=16",
    "model.num_heads=2",
    "model.d_ff=16",
]
ROUNDS = 9


def main() -> None:
    """Train what is not there yet, score, time, write."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--data", type=Path, required=True, help="folder of train.tsv, dev.tsv")
    parser.add_argument("--runs", type=Path, default=RUNS / "sst2", help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind")
    arguments = parser.parse_args()
    train, dev = (arguments.data / f"{name}.tsv" for name in ("train", "dev"))
    files = [f"data.train.file={train}", f"data.valid.file={dev}"]
    quick = QUICK * arguments.quick
    folder = arguments.runs
    first = finished_run("masked-lm", folder / "masked-lm-first", [*files, *quick])
    again = [*files, f"init_from={first.directory}", *SECOND, *quick]
    masked = finished_run("masked-lm", folder / "masked-lm", again)
    kinds: dict[str, list[Run]] = {"scratch": [], "pretrained": [], "student": []}
    for seed in range(1, arguments.seeds + 1):
        common = [*files, f"training.seed={seed}", *once("classification"), *quick]
        scratch = finished_run("classification", folder / f"scratch-{seed}", common)
        kinds["scratch"].append(scratch)
        start = [f"init_from={masked.directory}"]
        tuned = finished_run("classification", folder / f"pretrained-{seed}", common + start)
        kinds["pretrained"].append(tuned)
        common = [*files, f"training.seed={seed}", *once("distil-classification"), *quick]
        taught = [f"distillation.teacher={tuned.directory}", f"model.num_layers={STUDENT_LAYERS}"]
        student = finished_run("distil-classification", folder / f"student-{seed}", common + taught)
        kinds["student"].append(student)
    accuracy = {kind: [score(run) for run in runs] for kind, runs in kinds.items()}
    baseline = tfidf(train, dev)
    teachers, students = accuracy["pretrained"], accuracy["student"]
    kept = [s / t for s, t in zip(students, teachers, strict=True)]
    speed = speeds(kinds["pretrained"][0].model(), kinds["student"][0].model(), dev)
    rows = [
        [
            name,
            *(f"{100 * value:.2f}" for value in (statistics.mean(found), min(found), max(found))),
        ]
        for name, found in (
            ("encoder from scratch", accuracy["scratch"]),
            ("the same, masked LM on the train text first", teachers),
            (f"student of that, {STUDENT_LAYERS} layers", students),
        )
    ]
    rows.append(["TF-IDF with logistic regression", f"{100 * baseline:.2f}", "–", "–"])
    model = kinds["pretrained"][0].model()
    small = kinds["student"][0].model()
    write_results(
        "sst2",
        "SST-2",
        [
            f"Accuracy on dev in percent over {arguments.seeds} seeds. Masked LM was trained once; "
            "the seeds are those of fine-tuning and of distillation.",
            table(["model", "mean", "least", "most"], rows),
            f"A student keeps {100 * statistics.mean(kept):.1f}% of its teacher's accuracy and is "
            f"{speed['student'] / speed['teacher']:.2f} times as fast "
            f"({speed['student']:,.0f} against {speed['teacher']:,.0f} sentences/s in turn, "
            f"median of {ROUNDS} rounds, ids in, logits out).",
            "## How it was trained",
            facts(
                {
                    "Encoder": f"{parameter_count(model.net):,} parameters, student "
                    f"{parameter_count(small.net):,}",
                    "Masked LM": f"{first.minutes + masked.minutes:.1f} minutes; the recipe, then "
                    f"again from there with {', '.join(SECOND)}; the best held-out loss on the "
                    "text of dev (no labels) chose among its evaluations",
                    "Fine-tuning": f"{kinds['pretrained'][0].minutes:.1f} minutes a seed",
                    "Recipes": "masked-lm, classification, distil-classification",
                    "heedful": heedful.__version__,
                }
            ),
        ],
        {
            "accuracy": accuracy,
            "tfidf": baseline,
            "kept": kept,
            "sentences_per_second": speed,
        },
        directory=arguments.results,
        command=command_line({arguments.data: "DATA", arguments.runs: "RUNS"}),
        packages=("scikit-learn",),
    )


def once(recipe: str) -> list[str]:
    """The settings with which a recipe's run is evaluated at its end alone."""
    return [f"training.evaluate_every={load_recipe(recipe).training.max_steps}", "expect=[]"]


def score(run: Run) -> float:
    """Accuracy of the run's one evaluation."""
    assert len(run.evaluations) == 1, "a run that is evaluated more than once chooses by dev"
    return run.evaluations[0].token_accuracy


def read(path: Path) -> tuple[list[str], list[str]]:
    """Texts and labels."""
    pairs = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line]
    return [text for text, _ in pairs], [label for _, label in pairs]


def tfidf(train: Path, dev: Path) -> float:
    """What counting words reaches: scikit-learn's defaults."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    (texts, labels), (held_out, expected) = read(train), read(dev)
    model = make_pipeline(TfidfVectorizer(), LogisticRegression(max_iter=1000))
    return float(np.mean(np.array(model.fit(texts, labels).predict(held_out)) == expected))


@torch.inference_mode()
def speeds(teacher: Classifier, student: Classifier, dev: Path) -> dict[str, float]:
    """Sentences a second of both over the same batches, in turn."""
    models = {"teacher": teacher, "student": student}
    rows = sorted(teacher.encode(read(dev)[0], too_long="truncate"), key=len)
    batches = [teacher.batch(rows[at : at + 64]) for at in range(0, len(rows), 64)]
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(ROUNDS + 1):
        for name, model in models.items():
            began = time.perf_counter()
            for ids, lengths in batches:
                model.net(ids, lengths)
            if number:
                seconds[name].append(time.perf_counter() - began)
    return {name: len(rows) / statistics.median(found) for name, found in seconds.items()}


if __name__ == "__main__":
    main()
