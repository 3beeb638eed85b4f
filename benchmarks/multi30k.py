"""Multi30k, English to German: trains the shipped recipe, or uses its run, and writes the scores.

DATA holds train, val and test_2016_flickr, each .en.gz and .de.gz. Changes of the recipe are in
experiments/multi30k.yaml.
"""

from runs import (
    beam_scores,
    forced_note,
    precisions,
    scores_table,
    translation_parser,
    translation_run,
    write_translation_results,
)

NAME = "multi30k"
FILES = {
    f"data.{split}.{side}": f"{file}.{language}.gz"
    for split, file in (("train", "train"), ("valid", "val"), ("test", "test_2016_flickr"))
    for side, language in (("src", "en"), ("tgt", "de"))
}
METRICS = ["tokenized_lowercase_bleu", "bleu", "chrf", "ter"]


def main() -> None:
    """Train if the run is missing, decode the test set, write its scores."""
    arguments = translation_parser(NAME, __doc__ or "").parse_args()
    run, run_information = translation_run(NAME, arguments, FILES)
    pairs = run.pairs("test")
    scores = beam_scores(run, pairs, METRICS)
    sections = [
        f"## test_2016_flickr, {len(pairs):,} sentences",
        scores_table(scores),
        "Tokenized lowercased BLEU is the BLEU of many papers' tables; it is not comparable with "
        "sacreBLEU's. Its n-gram precisions with beam 5: "
        f"{precisions(scores['beam 5']['tokenized_lowercase_bleu'])}.",
        forced_note(scores),
    ]
    title = "Multi30k, English to German"
    write_translation_results(NAME, title, run, run_information, sections, scores, arguments)


if __name__ == "__main__":
    main()
