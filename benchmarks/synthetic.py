"""Copy, reverse and sort: trains the shipped recipes and writes their learning curves."""

from pathlib import Path
from typing import Any

from common import argument_parser, command_line, facts, table, write_results
from heedful.files import read_json
from heedful.training.events import format_score
from runs import QUICK, RUNS, Run, finished_run, recipe_note

NAMES = ("copy", "reverse", "sort", "copy-varied")
THRESHOLD = 0.995
FEW = [
    f"data.generated.num_{split}={count}"
    for split, count in (("train", 200), ("valid", 20), ("test", 20))
]


def main() -> None:
    """Train missing runs, and write the page."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--runs", type=Path, default=RUNS / "synthetic", help="folder of the runs")
    arguments = parser.parse_args()
    settings = [*QUICK, *FEW] if arguments.quick else []
    runs = {name: finished_run(name, arguments.runs / name, settings) for name in NAMES}
    data = {name: describe(name, run) for name, run in runs.items()}
    write_results(
        "synthetic",
        "Copy, reverse and sort",
        [
            "Each task is trained by its shipped recipe. Held-out sequences are unique and do not "
            "occur in training.",
            "## Results",
            summary_table(data),
            f"Token accuracy is teacher-forced, on the validation set; the first epoch is the "
            f"first with at least {format_score('token_accuracy', THRESHOLD)}. Exact match is the "
            "fraction of sequences of the test set that greedy decoding outputs without error.",
            "## Token accuracy after each epoch",
            epochs_table(data),
            "## The runs",
            facts(
                {
                    name: f"`heedful train {name}`, the recipe {recipe_note(run, name)}"
                    for name, run in runs.items()
                }
            ),
        ],
        {"threshold": THRESHOLD, "runs": data},
        directory=arguments.results,
        command=command_line({arguments.runs: "RUNS"}),
    )


def describe(name: str, run: Run) -> dict[str, Any]:
    """The record of a run."""
    scores = read_json(run.directory / "scores.json")
    assert scores["set"] == "test"
    curve = {event.epoch: event.token_accuracy for event in run.evaluations}
    reached = [epoch for epoch, accuracy in curve.items() if accuracy >= THRESHOLD]
    sizes = run.recipe.data.generated
    return {
        "lengths": [sizes.min_length, sizes.max_length],
        "num_train": sizes.num_train,
        "token_accuracy_by_epoch": curve,
        "first_epoch_at_threshold": min(reached, default=None),
        "exact_match": scores["scores"]["exact_match"]["score"],
        "num_equal": scores["scores"]["exact_match"]["num_equal"],
        "num_test": scores["num_segments"],
        "minutes": run.minutes,
        "steps": run.end.step,
        "changed_from_shipped": run.changes(name),
    }


def summary_table(data: dict[str, Any]) -> str:
    """A table of the results of all tasks."""
    rows = []
    for name, record in data.items():
        shortest, longest = record["lengths"]
        first = record["first_epoch_at_threshold"]
        rows.append(
            [
                name,
                str(shortest) if shortest == longest else f"{shortest} to {longest}",
                f"{record['num_train']:,}",
                "never" if first is None else first,
                f"{format_score('exact_match', record['exact_match'])} "
                f"({record['num_equal']:,} of {record['num_test']:,})",
                f"{record['minutes']:.1f}",
            ]
        )
    first_header = f"first epoch ≥ {format_score('token_accuracy', THRESHOLD)}"
    header = ["task", "length", "training sequences", first_header, "exact match", "minutes"]
    return table(header, rows)


def epochs_table(data: dict[str, Any]) -> str:
    """A table of token accuracy by epoch, with a column for each task."""
    curves = [record["token_accuracy_by_epoch"] for record in data.values()]
    rows = [
        [epoch, *(_share(curve.get(epoch)) for curve in curves)]
        for epoch in sorted(set().union(*curves))
    ]
    return table(["epoch", *data], rows)


def _share(value: float | None) -> str:
    return "–" if value is None else format_score("token_accuracy", value)


if __name__ == "__main__":
    main()
