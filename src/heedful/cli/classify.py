"""`heedful classify`: a label for each text."""

import typer

from heedful import pipelines
from heedful.cli.flags import JsonLines, ModelFolder, spread
from heedful.cli.help import IN_OUT
from heedful.cli.lines import InputOutput, RunTime, json_line, line_writer, report_counts
from heedful.data.invisible import is_blank
from heedful.errors import UserError


@spread("truncate")
def classify(
    *,
    model: ModelFolder,
    in_out: InputOutput,
    scores: bool = typer.Option(
        False,
        "--scores",
        help="Before each label write its probability and a tab.",
        rich_help_panel=IN_OUT,
    ),
    json: JsonLines = False,
    run_time: RunTime,
) -> None:
    """Print the label of each text: one line out for each line in.

    If the first line has a tab, every line is a pair of texts separated by a tab. Texts that are
    too long for the model are truncated, and counted. A line that cannot be used is reported and
    left out: its label is blank.

    Example: heedful classify runs/reviews 'What a film!' --scores
    """
    chunks = in_out.chunks("type one text per line; Ctrl-D ends")
    many = in_out.input is not None
    classifier = run_time.open(model, pipelines.Classifier, "classify", many=many)
    first, paired = 1, False
    with line_writer(in_out.output) as write, in_out.progress("classifying") as progress:
        for chunk in chunks:
            if first == 1 and chunk:
                paired = "\t" in chunk[0]
            usable = []
            for number, line in enumerate(chunk, first):
                if reason := _wrong(line, paired):
                    if in_out.strict:
                        raise UserError(f"line {number} {reason}")
                    classifier.leave_out(f"line {number} {reason}")
                else:
                    usable.append(line.split("\t"))
            first += len(chunk)
            pairs = [columns[1] for columns in usable] if paired else None
            texts = [columns[0] for columns in usable]
            options = {"pairs": pairs, "progress": progress, **run_time.batching}
            labels = iter(classifier.classify(texts, **options))
            for line in chunk:
                label = None if _wrong(line, paired) else next(labels)
                if json:
                    name, values = (label.label, label.probabilities) if label else (None, None)
                    write(json_line(text=line, label=name, scores=values))
                elif label is None:
                    write("\t" if scores else "")
                else:
                    write(f"{label.probability:.6f}\t{label.label}" if scores else label.label)
        report_counts(classifier, "texts", first - 1)


def _wrong(line: str, paired: bool) -> str | None:
    """The reason why a line cannot be classified, or None."""
    if is_blank(line):
        return "is empty: there is no text to classify"
    if line.count("\t") != int(paired):
        expected = "two texts with one tab between, as line 1 is" if paired else "no tab in it"
        return f"has {line.count(chr(9))} tabs; it must be {expected}"
    return None
