"""`heedful score`: how likely given translations, or given texts, are."""

import math
from pathlib import Path

import typer

from heedful import pipelines
from heedful.cli.flags import ModelFolder, spread
from heedful.cli.lines import Filter, input_chunks, line_writer, read_parallel
from heedful.errors import UserError


@spread("strict", "backend", "precision", "threads")
def score(
    *,
    model: ModelFolder,
    src: Path | None = typer.Option(None, help="Source lines, for a translator."),
    tgt: Path | None = typer.Option(None, help="Target lines, as many."),
    per_token: bool = typer.Option(
        False, "--per-token", help="Divide log-probabilities by the tokens' number."
    ),
    given: Filter,
) -> None:
    """Print how likely lines are: targets given their sources, or texts by themselves.

    For a translator: the natural log-probability of each target line. For a language model, with
    tabs between: each line's log-probability, perplexity, and bits a character; nan for a line of a
    single token.

    Example: heedful score runs/translation --src test.en --tgt candidates.de
    """
    if (src is None) != (tgt is None) or (src is not None and given.input is not None):
        raise UserError("give --src and --tgt for a translator, or --input for a language model")
    if src is None or tgt is None:
        chunks = input_chunks(given.input)
        opened = pipelines.load(model, device=given.device, backend="eager")
        if isinstance(opened, pipelines.Translator):
            raise UserError("a translator scores pairs: give --src FILE and --tgt FILE")
        pipelines.expect(opened, pipelines.LanguageModel, "score")
        with line_writer(given.output) as write:
            for chunk in chunks:
                for line, found in zip(chunk, opened.score(chunk), strict=True):
                    write(_row(line, found, per_token))
        return
    sources, targets = read_parallel(src, tgt)
    opened = pipelines.load(model, device=given.device, backend="eager")
    pipelines.expect(opened, pipelines.Translator, "score with --src and --tgt")
    pairs = opened.score(sources, targets, too_long="truncate" if given.truncate else "error")
    with line_writer(given.output) as write:
        for pair in pairs:
            value = pair.log_prob / (pair.num_tokens if per_token else 1)
            write(f"{value:.6f}")


def _row(line: str, found: "pipelines.TextScore", per_token: bool) -> str:
    if not found.num_tokens:
        return "nan\tnan\tnan"
    mean = found.log_prob / found.num_tokens
    bits = -found.log_prob / math.log(2) / len(line) if line else math.nan
    return f"{mean if per_token else found.log_prob:.6f}\t{math.exp(-mean):.6f}\t{bits:.6f}"
