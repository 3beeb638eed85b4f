"""Tiny Shakespeare by characters: nanoGPT's small settings, and better ones at the same size.

DATA is the folder of input.txt. By convention the last tenth of its characters is held out.
"""

from pathlib import Path

from common import argument_parser, command_line, facts, table, write_results
from heedful.bundle import parameter_count
from heedful.text.documents import open_documents
from runs import RUNS, finished_run

RECIPES = {
    "shakespeare": "nanoGPT's settings for a CPU",
    "shakespeare-better": "the same size and tokens, better settings",
}
QUICK = ["training.max_steps=4", "training.evaluate_every=2", "objective.sample_tokens=5"]
NANOGPT = 1.886  # its own figure with these settings, on windows drawn at random


def main() -> None:
    """Train both where needed, evaluate them alike, write the page."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--data", type=Path, required=True, help="folder that holds input.txt")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the runs")
    arguments = parser.parse_args()
    rows, data, notes = [], {}, []
    for name, what in RECIPES.items():
        settings = [f"data.train.text={arguments.data / 'input.txt'}"]
        run = finished_run(name, arguments.runs / name, settings + QUICK * arguments.quick)
        model = run.model()
        store, counts = open_documents(run.directory / "data" / "valid")
        context = model.config.max_length
        losses = {}
        for stride in (context, context // 2):
            found = model.window_sums(store, context=context, stride=stride)
            losses[stride] = float(found.nll) / found.tokens
        recipe = run.recipe.training
        tokens = run.end.step * (recipe.batch_sentences or 0) * context
        size = parameter_count(model.net)
        data[name] = {
            "loss_apart": losses[context],
            "loss_overlapping": losses[context // 2],
            "parameters": size,
            "training_tokens": tokens,
            "minutes": run.minutes,
            "held_out_characters": counts.num_characters,
        }
        row = [what, f"{size:,}", f"{tokens:,}", f"{losses[context]:.3f}"]
        rows.append([*row, f"{losses[context // 2]:.3f}", f"{run.minutes:.1f}"])
        sample = (run.directory / "samples.txt").read_text(encoding="utf-8").strip()[:300]
        notes.append(f"## {name}: what it writes\n\n```text\n{sample}\n```")
    header = ["run", "parameters", "tokens trained on", "loss", "overlapping", "minutes"]
    write_results(
        "shakespeare",
        "Tiny Shakespeare, characters",
        [
            "Held-out loss in nats a character, over the whole held-out tenth. *Loss* cuts it into "
            "windows of the context that do not overlap, so that tokens early in a window have "
            "little to go by, as nanoGPT's own evaluation does; *overlapping* windows lie half a "
            f"context apart and score each character once. nanoGPT itself reports {NANOGPT} for "
            "the first row's settings, on windows drawn at random.",
            table(header, rows),
            *notes,
            "## The runs",
            facts({name: f"`heedful train {name} --set data.train.text=FILE`" for name in RECIPES}),
        ],
        {"runs": data},
        directory=arguments.results,
        command=command_line({arguments.data: "DATA", arguments.runs: "RUNS"}),
        made_on="Scored",
    )


if __name__ == "__main__":
    main()
