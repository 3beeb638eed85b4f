"""`heedful classify`: a label for each text."""

from pathlib import Path

import typer

from heedful import pipelines
from heedful.cli.flags import JsonLines, spread
from heedful.cli.lines import Filter, input_chunks, json_line, line_writer, tell_counts
from heedful.errors import UserError


@spread("truncate")
def classify(
    *,
    model: Path = typer.Argument(..., help="A classifier's directory."),
    scores: bool = typer.Option(
        False, "--scores", help="Put the probability and a tab before each label."
    ),
    json: JsonLines = False,
    given: Filter,
) -> None:
    """Name the class of each text: a line out for each line in.

    Where the first line has a tab, every line is a pair of texts with a tab between. Texts that are
    longer than the model reads are cut, and counted. A line that cannot be used is reported and
    left out: its label is blank.

    Example: echo 'What a film!' | heedful classify runs/reviews --scores
    """
    chunks = input_chunks(given.input)
    classifier = given.open(model, pipelines.Classifier, "classify")
    first, paired = 1, False
    with line_writer(given.output) as write, given.progress("classifying") as progress:
        for chunk in chunks:
            if first == 1 and chunk:
                paired = "\t" in chunk[0]
            usable = []
            for number, line in enumerate(chunk, first):
                if reason := _wrong(line, paired):
                    if given.strict:
                        raise UserError(f"line {number} {reason}")
                    classifier.leave_out(f"line {number} {reason}")
                else:
                    usable.append(line.split("\t"))
            first += len(chunk)
            pairs = [columns[1] for columns in usable] if paired else None
            texts = [columns[0] for columns in usable]
            found = iter(classifier.classify(texts, pairs=pairs, progress=progress))
            for line in chunk:
                each = None if _wrong(line, paired) else next(found)
                if json:
                    label, chances = (each.label, each.probabilities) if each else (None, None)
                    write(json_line(text=line, label=label, scores=chances))
                elif each is None:
                    write("\t" if scores else "")
                else:
                    write(f"{each.probability:.6f}\t{each.label}" if scores else each.label)
    tell_counts(classifier, "texts")


def _wrong(line: str, paired: bool) -> str | None:
    """Why a line cannot be classified, if it cannot."""
    if not line.strip():
        return "is empty: there is no text to classify"
    if line.count("\t") != int(paired):
        wanted = "two texts with one tab between, as line 1 is" if paired else "no tab in it"
        return f"has {line.count(chr(9))} tabs; it must be {wanted}"
    return None
