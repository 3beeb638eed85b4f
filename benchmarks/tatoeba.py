"""Tatoeba, English to Chinese: trains the shipped recipe, or uses its run, and writes the scores.

DATA holds train and val, each .en.gz and .zh.gz.
"""

from runs import (
    beam_scores,
    forced_note,
    scores_table,
    translation_parser,
    translation_run,
    write_translation_results,
)

NAME = "tatoeba"
FILES = {
    f"data.{split}.{side}": f"{file}.{language}.gz"
    for split, file in (("train", "train"), ("valid", "val"))
    for side, language in (("src", "en"), ("tgt", "zh"))
}
METRICS = ["chrf", "bleu"]


def main() -> None:
    """Train if the run is missing, decode the validation set, write its scores."""
    arguments = translation_parser(NAME, __doc__ or "").parse_args()
    run, run_information = translation_run(NAME, arguments, FILES)
    pairs = run.pairs("valid")
    scores = beam_scores(run, pairs, METRICS)
    sections = [
        f"## val, {len(pairs):,} sentences",
        scores_table(scores),
        "There is no test set: the checkpoint was selected on the same validation set.",
        forced_note(scores),
    ]
    title = "Tatoeba, English to Chinese"
    write_translation_results(NAME, title, run, run_information, sections, scores, arguments)


if __name__ == "__main__":
    main()
