"""`heedful translate`: lines in, translations out, in their order."""

import math
from typing import Annotated, Any

import typer

from heedful.cli.flags import takes_options
from heedful.cli.shared import Device, Input, ModelFolder, Output, Truncate


@takes_options("draft", "num_draft_tokens")
def translate(
    *,
    model: ModelFolder,
    input: Input = None,
    output: Output = None,
    options: dict[str, Any],
    scores: Annotated[
        bool, typer.Option("--scores", help="Put the score and a tab before each.")
    ] = False,
    truncate: Truncate = False,
    device: Device = "auto",
) -> None:
    """Translate lines from a file or a pipe.

    One line out for each line in (with --nbest N: N lines each, best first). Output streams: a
    line that is typed is answered at once.

    Example: echo 'Hello.' | heedful translate runs/translation
    """
    from heedful.cli.lines import input_chunks, line_writer, progress_bar
    from heedful.inference import Translator, expect, load

    chunks = input_chunks(input)  # a missing file is told before a model is loaded
    translator = load(model, device=device)
    expect(translator, Translator, "translate")
    options["too_long"] = "truncate" if truncate else "error"
    nbest = options.get("num_return", 1)
    cut, first = 0, 1
    bar = progress_bar("translating", shown=output is not None)
    with line_writer(output) as write, bar as progress:
        for chunk in chunks:
            options |= {"first_number": first, "progress": progress}
            first += len(chunk)
            for translations in translator.generations(chunk, **options):
                cut += not translations[0].finished
                missing = [None] * (nbest - len(translations))
                for entry in [*translations, *missing]:
                    text = "" if entry is None else entry.text
                    score = -math.inf if entry is None else entry.score
                    write(f"{score:.6f}\t{text}" if scores else text)
    if translator.num_truncated:
        typer.echo(f"{translator.num_truncated} lines were truncated", err=True)
    if cut:
        typer.echo(f"{cut} translations were cut off by the length limit", err=True)
