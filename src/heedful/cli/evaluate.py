"""`heedful evaluate`: translate a source file and score it against a reference."""

from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    model: Annotated[Path, typer.Argument(help="A model directory.")],
    src: Annotated[Path, typer.Option(help="Source lines.")],
    ref: Annotated[Path, typer.Option(help="Reference lines, as many.")],
    beam: Annotated[int, typer.Option(min=1, help="Beam size; 1 is greedy.")] = 5,
    length_penalty: Annotated[float, typer.Option(help="Exponent of the length.")] = 1.0,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Of bleu, chrf, chrf++, ter, exact_match, tokenized_lowercase_bleu; by commas."
        ),
    ] = None,
    language: Annotated[
        str | None, typer.Option(help="Language of the target, e.g. de. Default: the model's.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write the translations here.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut lines that are too long.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
) -> None:
    """Translate a file and score it: sacreBLEU's BLEU, chrF and TER with signatures, exact match.

    Perplexity and token accuracy are those of the reference under the model.

    Example: heedful evaluate runs/translation --src test.en --ref test.de --json
    """
    import json as json_format

    from heedful.bundle import TooLong, load
    from heedful.cli.lines import progress_bar, read_parallel
    from heedful.evaluation.metrics import DEFAULT_METRICS, corpus_scores
    from heedful.files import write_text

    sources, references = read_parallel(src, ref)
    translator = load(model, device=device)
    too_long: TooLong = "truncate" if truncate else "error"
    with progress_bar("translating", len(sources)) as progress:
        outputs = translator.translate(
            sources,
            beam_size=beam,
            length_penalty=length_penalty,
            too_long=too_long,
            progress=progress,
        )
    scores = corpus_scores(
        outputs,
        references,
        trg_lang=language or translator.card.tgt_language,
        metrics=DEFAULT_METRICS if metrics is None else metrics.split(","),
    )
    forced = translator.teacher_forced(sources, references, too_long=too_long)
    if output is not None:
        write_text(output, "".join(f"{line}\n" for line in outputs))
    if json:
        search = {"beam_size": beam, "length_penalty": length_penalty}
        content = {"model": str(model), **search, **scores.to_dict(), **forced}
        typer.echo(json_format.dumps(content, ensure_ascii=False, indent=2))
        return
    for name, score in scores.by_metric.items():
        typer.echo(f"{name:<26}{score.value:9.4f}   {score.signature}")
    for name, value in forced.items():
        typer.echo(f"{name:<26}{value:9.4f}")
