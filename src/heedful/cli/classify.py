"""`heedful classify`: a label for each text."""

from pathlib import Path
from typing import Annotated

import typer

from heedful.cli.shared import (
    Device,
    Engine,
    Input,
    JsonLines,
    Output,
    Precision,
    Threads,
    open_model,
)


def classify(
    model: Annotated[Path, typer.Argument(help="A classifier's directory.")],
    input: Input = None,
    output: Output = None,
    scores: Annotated[
        bool, typer.Option("--scores", help="Put the probability and a tab before each label.")
    ] = False,
    json: JsonLines = False,
    device: Device = "auto",
    engine: Engine = "auto",
    precision: Precision = "auto",
    threads: Threads = None,
) -> None:
    """Name the class of each text: a line out for each line in.

    Where the first line has a tab, every line is a pair of texts with a tab between. Texts that are
    longer than the model reads are cut, and counted.

    Example: echo 'What a film!' | heedful classify runs/reviews --scores
    """
    from heedful.cli.lines import input_chunks, json_line, line_writer, progress_bar
    from heedful.inference import Classifier, expect

    chunks = input_chunks(input)
    classifier = open_model(model, input, device, engine, precision, threads)
    expect(classifier, Classifier, "classify")
    first, paired = 1, False
    bar = progress_bar("classifying", shown=output is not None)
    with line_writer(output) as write, bar as progress:
        for chunk in chunks:
            if first == 1 and chunk:
                paired = "\t" in chunk[0]
            texts, others = _columns(chunk, first, paired)
            first += len(chunk)
            found = classifier.classify(texts, pairs=others, progress=progress)
            for line, each in zip(chunk, found, strict=True):
                if json:
                    write(json_line(text=line, label=each.label, scores=each.probabilities))
                else:
                    write(f"{each.probability:.6f}\t{each.label}" if scores else each.label)
    if classifier.num_truncated:
        typer.echo(f"{classifier.num_truncated} texts were truncated", err=True)


def _columns(
    lines: list[str], first_number: int, paired: bool
) -> tuple[list[str], list[str] | None]:
    """The texts of some lines, and those that go with them."""
    from heedful.errors import UserError

    for number, line in enumerate(lines, first_number):
        if not line.strip():
            raise UserError(f"line {number} is empty: there is no text to classify")
        if line.count("\t") != int(paired):
            wanted = "two texts with one tab between, as line 1 is" if paired else "no tab in it"
            raise UserError(f"line {number} has {line.count(chr(9))} tabs; it must be {wanted}")
    if not paired:
        return lines, None
    columns = [line.split("\t") for line in lines]
    return [text for text, _ in columns], [other for _, other in columns]
