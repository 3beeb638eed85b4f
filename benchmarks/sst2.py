"""SST-2 sentiment: from scratch, after masked-LM pre-training on the same text, and distilled.

DATA is the folder of train.tsv and dev.tsv. Every classifier is evaluated once, at its end, so that
nothing is selected by dev scores. The baseline is logistic regression on TF-IDF.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import heedful
from common import argument_parser, command_line, facts, machine, table, write_results
from heedful.files import read_json
from heedful.pipelines import Classifier, parameter_count
from heedful.recipe_files import load_recipe
from runs import RUNS, Run, finished_run

# Settings of the second stage of masked-LM training, which masks more tokens.
SECOND = [
    "objective.mlm_probability=0.4",
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
    """Train missing runs, measure accuracy and speed, write the page."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--data", type=Path, required=True, help="folder of train.tsv, dev.tsv")
    parser.add_argument("--runs", type=Path, default=RUNS / "sst2", help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind")
    parser.add_argument(
        "--baseline-only",
        action="store_true",
        help="measure TF-IDF again, and keep the models' figures of the last results",
    )
    arguments = parser.parse_args()
    train, dev = (arguments.data / f"{name}.tsv" for name in ("train", "dev"))
    if arguments.baseline_only:
        models = read_json(arguments.results / "sst2.json")["models"]
    else:
        models = measured_models(train, dev, arguments)
    write_page(models, tfidf(train, dev), arguments)


def measured_models(train: Path, dev: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Accuracy, speed, size and training time of all models."""
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
        common = [*files, f"training.seed={seed}", *once("classification-student"), *quick]
        taught = [f"distillation.teacher={tuned.directory}", f"model.num_layers={STUDENT_LAYERS}"]
        student = finished_run(
            "classification-student", folder / f"student-{seed}", common + taught
        )
        kinds["student"].append(student)
    teacher, student = kinds["pretrained"][0], kinds["student"][0]
    return {
        "accuracy": {kind: [score(run) for run in runs] for kind, runs in kinds.items()},
        "sentences_per_second": speeds(teacher.model(), student.model(), dev),
        "parameters": {
            "teacher": parameter_count(teacher.model().net),
            "student": parameter_count(student.model().net),
        },
        "minutes": {
            "masked LM": first.minutes + masked.minutes,
            "fine-tuning": teacher.minutes,
        },
        "heedful": heedful.__version__,
        "machine": machine(),
    }


def write_page(
    models: dict[str, Any], baseline: dict[str, Any], arguments: argparse.Namespace
) -> None:
    """The page and the JSON."""
    accuracy, speed = models["accuracy"], models["sentences_per_second"]
    retained = [s / t for s, t in zip(accuracy["student"], accuracy["pretrained"], strict=True)]
    rows = [
        [
            name,
            *(
                f"{100 * value:.2f}"
                for value in (statistics.mean(accuracies), min(accuracies), max(accuracies))
            ),
        ]
        for name, accuracies in (
            ("encoder from scratch", accuracy["scratch"]),
            ("the same, masked LM on the train text first", accuracy["pretrained"]),
            (f"student of that, {STUDENT_LAYERS} layers", accuracy["student"]),
        )
    ]
    rows.append(
        ["TF-IDF of n-grams, logistic regression", f"{100 * baseline['accuracy']:.2f}", "–", "–"]
    )
    settings = ", ".join(f"{key} {value}" for key, value in baseline["chosen"].items())
    seeds = len(accuracy["scratch"])
    write_results(
        "sst2",
        "SST-2",
        [
            f"Accuracy on dev in percent over {seeds} seeds of fine-tuning and distillation. The "
            "masked LM was trained once. The settings of TF-IDF "
            f"({settings}) were selected by cross-validation on the training text.",
            table(["model", "mean", "lowest", "highest"], rows),
            f"A student has {100 * statistics.mean(retained):.1f}% of its teacher's accuracy and "
            f"{speed['student'] / speed['teacher']:.2f} times its speed "
            f"({speed['student']:,.0f} against {speed['teacher']:,.0f} sentences/s in turn, "
            f"median of {ROUNDS} rounds, ids in, logits out).",
            "## Training",
            facts(
                {
                    "Encoder": f"{models['parameters']['teacher']:,} parameters, student "
                    f"{models['parameters']['student']:,}",
                    "Masked LM": f"{models['minutes']['masked LM']:.1f} minutes; the recipe, then "
                    f"a second stage with {', '.join(SECOND)}; the checkpoint was selected by the "
                    "loss on the text of dev (no labels)",
                    "Fine-tuning": f"{models['minutes']['fine-tuning']:.1f} minutes per seed",
                    "Recipes": "masked-lm, classification, classification-student",
                    "heedful": models["heedful"],
                }
            ),
        ],
        {"models": models, "tfidf": baseline},
        directory=arguments.results,
        command=command_line({arguments.data: "DATA", arguments.runs: "RUNS"}),
        packages=("scikit-learn",),
    )


def once(recipe: str) -> list[str]:
    """Settings to evaluate a run of a recipe only at its end."""
    return [f"training.evaluate_every={load_recipe(recipe).training.max_steps}", "expect=[]"]


def score(run: Run) -> float:
    """Accuracy of the run's one evaluation."""
    assert len(run.evaluations) == 1, "with more evaluations a checkpoint is selected by dev"
    return run.evaluations[0].token_accuracy


def read(path: Path) -> tuple[list[str], list[str]]:
    """Texts and labels."""
    pairs = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line]
    return [text for text, _ in pairs], [label for _, label in pairs]


def tfidf(train: Path, dev: Path) -> dict[str, Any]:
    """Accuracy of logistic regression on TF-IDF of word n-grams.

    N-gram range, sublinear counts and regularization are selected by five-fold cross-validation on
    the training text.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline

    (texts, labels), (held_out, expected) = read(train), read(dev)
    pipeline = make_pipeline(
        # The default pattern leaves out one-letter words and punctuation.
        TfidfVectorizer(token_pattern=r"\S+"),
        LogisticRegression(max_iter=1000),
    )
    grid = {
        "tfidfvectorizer__ngram_range": [(1, 1), (1, 2), (1, 3)],
        "tfidfvectorizer__sublinear_tf": [False, True],
        "logisticregression__C": [3, 10, 30],
    }
    search = GridSearchCV(pipeline, grid, cv=5).fit(texts, labels)
    accuracy = float(np.mean(np.array(search.predict(held_out)) == expected))
    return {
        "accuracy": accuracy,
        "chosen": {key.partition("__")[2]: value for key, value in search.best_params_.items()},
    }


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Ids (B, T), padded on the right, and lengths (B,)."""
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return ids, torch.tensor([len(row) for row in rows])


@torch.inference_mode()
def speeds(teacher: Classifier, student: Classifier, dev: Path) -> dict[str, float]:
    """Sentences per second of both models on the same batches, in alternating rounds."""
    models = {"teacher": teacher, "student": student}
    rows = sorted(teacher.encode(read(dev)[0], too_long="truncate"), key=len)
    batches = [padded(rows[start : start + 64]) for start in range(0, len(rows), 64)]
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(ROUNDS + 1):
        for name, model in models.items():
            began = time.perf_counter()
            for ids, lengths in batches:
                model.net(ids, lengths)
            if number:
                seconds[name].append(time.perf_counter() - began)
    return {name: len(rows) / statistics.median(times) for name, times in seconds.items()}


if __name__ == "__main__":
    main()
