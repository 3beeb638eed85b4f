"""Character-level tiny Shakespeare: nanoGPT's small settings, and better ones at the same size.

DATA is the folder of input.txt. The first tenth of its characters is the test text; the last tenth,
which is held out by convention, is the validation text, by which settings and checkpoints were
selected; the rest is for training.
"""

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import argument_parser, command_line, facts, installed, table, write_results
from heedful.data.columns import open_columns
from heedful.pipelines import parameter_count
from heedful.pipelines.scoring import window_sums
from nanogpt import ESTIMATE_BATCHES, WINDOWS, loss_estimates, losses_of_peer, split_text
from runs import RUNS, Run, finished_run

TRAINED_WITH = " ".join(f"--set data.{part}.text=FILE" for part in ("train", "valid", "test"))
RECIPES = {
    "shakespeare": "nanoGPT's settings for a CPU",
    "shakespeare-llama": "the same size and tokens, better settings",
}
QUICK = ["training.max_steps=4", "training.evaluate_every=2", "objective.sample_tokens=5"]


def main() -> None:
    """Train missing runs, evaluate all runs, write the page."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--data", type=Path, required=True, help="folder that holds input.txt")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each")
    arguments = parser.parse_args()
    text = (arguments.data / "input.txt").read_text(encoding="utf-8")
    # The loss bands of the recipe are for another split of the text.
    settings = [*write_parts(text, arguments.runs / "parts"), "expect=[]", *QUICK * arguments.quick]
    count = 1 if arguments.quick else 50  # estimates of each run
    rows, data, notes = [], {}, []
    for name, label in RECIPES.items():
        runs = [
            finished_run(
                name, folder(arguments.runs, name, seed), [*settings, f"training.seed={seed}"]
            )
            for seed in range(1, arguments.seeds + 1)
        ]
        data[name] = record = evaluate_runs(runs, count)
        parameters, tokens = f"{record['parameters']:,}", f"{record['training_tokens']:,}"
        rows.append([label, parameters, tokens, *loss_cells(record)])
        sample = (runs[0].directory / "samples.txt").read_text(encoding="utf-8").strip()[:300]
        notes.append(f"## {name}: a sample\n\n```text\n{sample}\n```")
    if installed("transformers"):
        data["peer"] = record = peer(text, arguments.runs, arguments.seeds, count, arguments.quick)
        rows.insert(
            1, ["the same in transformers' GPT-2, nanoGPT's loop", "–", "–", *loss_cells(record)]
        )
    header = ["runs", "parameters", "tokens trained on", "loss", "least", "most", "overlapping"]
    write_results(
        "shakespeare",
        "Tiny Shakespeare, characters",
        [
            f"Test loss in nats per character, mean over {arguments.seeds} seeds. The first tenth "
            "of the characters is the test text, by which nothing was selected; the last tenth is "
            "the validation text, by which the better settings and the checkpoints of all runs, "
            "those of the peer included, were selected. *Loss* is over the whole test text in "
            "windows of the context length that do not overlap; *overlapping* windows have a "
            "stride of half the context and score each character once. *Estimated* is nanoGPT's "
            f"evaluation, the mean of {ESTIMATE_BATCHES} batches of {WINDOWS} windows at random "
            "positions: the range contains nine of ten such estimates of these models. The losses "
            "are not comparable with those of nanoGPT's README, which holds out another part of "
            "the text.",
            table([*header, "estimated"], rows),
            *notes,
            "## The runs",
            facts({name: f"`heedful train {name} {TRAINED_WITH}`" for name in RECIPES}),
        ],
        {"seeds": arguments.seeds, "runs": data},
        directory=arguments.results,
        command=command_line({arguments.data: "DATA", arguments.runs: "RUNS"}),
        packages=("transformers",),
        made_on="Scored",
    )


def write_parts(text: str, folder: Path) -> list[str]:
    """Write the three parts of the text to files; returns the settings with their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = []
    for name, part in zip(("test", "train", "valid"), split_text(text), strict=True):
        path = folder / f"{name}.txt"
        path.write_text(part, encoding="utf-8")
        settings.append(f"data.{name}.text={path}")
    return settings


def folder(runs: Path, name: str, seed: int) -> Path:
    """The folder of a run: the recipe's name, with the seed from the second on."""
    return runs / (name if seed == 1 else f"{name}-{seed}")


def evaluate_runs(runs: list[Run], count: int) -> dict[str, Any]:
    """Losses, size and training time of the runs of a recipe."""
    separate, overlapping, estimated = [], [], []
    for run in runs:
        model = run.model()
        columns = open_columns(run.data / "test")
        store, counts = columns.sequences("text"), columns.report.counts["text"]
        context = model.config.max_length
        for stride, losses in ((context, separate), (context // 2, overlapping)):
            sums = window_sums(model, store, context=context, stride=stride)
            losses.append(float(sums.nll) / sums.tokens)
        torch.manual_seed(0)
        estimated += loss_estimates(model.net, torch.from_numpy(store.ids.astype(np.int64)), count)
    recipe = runs[0].recipe.training
    return {
        "losses": separate,
        "overlapping": overlapping,
        "estimates": estimated,
        "parameters": parameter_count(model.net),
        "training_tokens": runs[0].end.step * (recipe.batch_sentences or 0) * context,
        "minutes": statistics.mean(run.minutes for run in runs),
        "test_characters": counts.characters,
    }


def peer(text: str, runs: Path, seeds: int, count: int, quick: bool) -> dict[str, Any]:
    """The losses of transformers' GPT-2, trained by nanoGPT's loop."""
    steps = {"steps": 4} if quick else {}
    peer_runs = [
        losses_of_peer(text, seed, runs / f"shakespeare-peer-{seed}.json", count, **steps)
        for seed in range(1, seeds + 1)
    ]
    return {
        "losses": [one["loss"] for one in peer_runs],
        "estimates": [estimate for one in peer_runs for estimate in one["estimates"]],
    }


def loss_cells(record: dict[str, Any]) -> list[str]:
    """The cells with losses of a row of the table."""
    losses, overlapping = record["losses"], record.get("overlapping")
    low, high = np.quantile(record["estimates"], [0.05, 0.95])
    columns = [f"{value:.3f}" for value in (statistics.mean(losses), min(losses), max(losses))]
    columns.append(f"{statistics.mean(overlapping):.3f}" if overlapping else "–")
    return [*columns, f"{low:.3f} to {high:.3f}"]


if __name__ == "__main__":
    main()
