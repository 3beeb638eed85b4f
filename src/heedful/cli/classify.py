"""`heedful classify`: a label for each text."""

import typer

from heedful import pipelines
from heedful.cli.flags import JsonLines, ModelFolder, RunTime, leave_out
from heedful.cli.help import IN_OUT
from heedful.cli.lines import InputOutput, json_line, line_writer, report_counts
from heedful.errors import UserError, format_names


@leave_out("truncate")
def classify(
    *,
    model: ModelFolder,
    in_out: InputOutput,
    scores: bool = typer.Option(
        False,
        "--scores",
        help="Before each label write its probability (of a regression the value) and a tab.",
        rich_help_panel=IN_OUT,
    ),
    json: JsonLines = False,
    run_time: RunTime,
) -> None:
    """Print the label of each text: one line out for each line in.

    Of a multi-label classifier all labels with a probability of 0.5 or more are printed, separated
    by commas, and of a regression the values, separated by tabs.

    If the first line has a tab, every line is a pair of texts separated by a tab. Texts that are
    too long for the model are truncated, and counted. A line that cannot be used is reported and
    left out: its label is blank.

    Example: heedful classify runs/reviews 'What a film!' --scores
    """
    chunks = in_out.chunks("type one text per line; Ctrl-D ends")
    many = in_out.input is not None
    classifier = run_time.open(model, pipelines.Classifier, "classify", many=many)
    first, paired, problem = 1, False, classifier.metadata.problem
    with line_writer(in_out.output) as write, in_out.progress("classifying") as progress:
        for chunk in chunks:
            if first == 1 and chunk:
                paired = "\t" in chunk[0]
                _check_no_labels(chunk, classifier)
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
            size = run_time.batch_tokens
            found = classifier.classify(texts, pairs=pairs, progress=progress, batch_tokens=size)
            results = iter(found)
            for line in chunk:
                result = None if _wrong(line, paired) else next(results)
                write(_as_json(line, result, problem) if json else _as_text(result, scores))
        report_counts(classifier, "texts", first - 1)


def _as_json(line: str, result: "pipelines.Classification | None", problem: str) -> str:
    """A line of JSON; null in place of what a line that was left out lacks."""
    content: dict[str, object] = {"text": line}
    if problem != "regression":
        content["label"] = result and result.label
    if problem == "multi_label":
        content["labels"] = result and result.labels
    return json_line(**content, scores=result and result.scores)


def _as_text(result: "pipelines.Classification | None", scores: bool) -> str:
    """The labels or values of a text, with `scores` each after its score; blank if left out."""
    if result is None:
        return "\t" if scores else ""
    if not scores:
        return result.text
    names = result.labels or tuple(result.values)
    return "\t".join(f"{result.scores[name]:.6f}\t{name}" for name in names)


def _check_no_labels(lines: list[str], classifier: "pipelines.Classifier") -> None:
    """Raise UserError for labeled texts: the labels would be read as second texts of pairs.

    The first line may be a header.
    """
    cells = [line.split("\t")[1].split(",") for line in lines if line.count("\t") == 1]
    found = {cell.strip() for row in cells[1:] or cells for cell in row}
    if found and found <= set(classifier.labels):
        raise UserError(
            f"the second column holds labels of the model ({format_names(sorted(found), most=3)}), "
            "not texts; give the texts alone, or score them with heedful evaluate"
        )


def _wrong(line: str, paired: bool) -> str | None:
    """The reason why a line cannot be classified, or None."""
    from heedful.data.rows import is_blank

    if is_blank(line):
        return "is empty: there is no text to classify"
    if line.count("\t") != int(paired):
        expected = "two texts with one tab between, as line 1 is" if paired else "no tab in it"
        return f"has {line.count(chr(9))} tabs; it must be {expected}"
    return None
