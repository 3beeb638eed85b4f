"""Few pairs: the recipe `translation` on the first pairs of Multi30k alone, and changes of it.

DATA holds train, val and test_2016_flickr, each .en.gz and .de.gz. The rows that --rows names are
trained, each until it stops by itself, and the page is written of all that have been.
"""

import gzip
from itertools import islice
from pathlib import Path

from ablation import add_arguments, records, run_rows, write_records, write_table
from common import command_line, write_results
from multi30k import FILES
from runs import translation_parser

NAME = "translation"
PAIRS = 5_000
ROWS = {
    "shipped": [],
    "adam": [  # the recipe as it was before
        "training.optimizer.name=adam",
        "training.schedule.learning_rate=0.003",
        "training.schedule.warmup_steps=1000",
        "training.max_epochs=null",
        "evaluation.metric=loss",
    ],
    "bpe-dropout": ["training.subword_sampling=0.1"],
    "dropout-0.3": ["model.dropout=0.3"],
    "rotary": ["model.positions=rotary"],
}


def main() -> None:
    """Train the rows that are asked for, and write the page."""
    parser = translation_parser(NAME, __doc__ or "")
    add_arguments(parser)
    arguments = parser.parse_args()
    data = arguments.data or Path()
    common = [f"{key}={data / file}" for key, file in FILES.items()]
    common += ["data.src_language=en", "data.tgt_language=de"]
    if arguments.rows:
        common += first_pairs(data, arguments.runs / "first-pairs")
    run_rows(NAME, ROWS, common, arguments)
    kept = records(NAME, arguments.results)
    about = f"The recipe `translation` on the first {PAIRS:,} pairs of Multi30k; validation and "
    about += "test are those of all. A run ends by its recipe, or where it no longer gets better."
    title = "Translation from few pairs"
    command = command_line({arguments.data: "DATA", arguments.runs: "RUNS"})
    write_results(NAME, title, [about], {}, directory=arguments.results, command=command)
    write_records(NAME, kept, arguments.results)
    write_table(NAME, ROWS, arguments.results)


def first_pairs(data: Path, folder: Path) -> list[str]:
    """Write the first pairs of the training text into a folder; the settings that name them."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = []
    for side, language in (("src", "en"), ("tgt", "de")):
        path = folder / f"train.{language}"
        with gzip.open(data / f"train.{language}.gz", "rt", encoding="utf-8") as lines:
            path.write_text("".join(islice(lines, PAIRS)), encoding="utf-8")
        settings.append(f"data.train.{side}={path}")
    return settings


if __name__ == "__main__":
    main()
