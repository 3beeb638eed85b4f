"""`heedful score`: log-probabilities of given translations, or of texts."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from heedful import pipelines
from heedful.cli.flags import JsonLines, ModelFolder, RunTime, SrcLang, TgtLang
from heedful.cli.help import IN_OUT
from heedful.cli.lines import (
    InputOutput,
    json_line,
    line_writer,
    read_parallel,
    report_counts,
)
from heedful.cli.shared import note
from heedful.errors import UserError
from heedful.options import RUN_TIME, TooLong, option

_COLUMNS = ("log_prob", "perplexity", "bits_per_character")


@dataclass(frozen=True)
class ScoreRunTime(RunTime):
    """Flags for device, backend and batches; eager is the only backend."""

    backend: str = option(
        "eager (the torch module); score supports no other.", "eager", RUN_TIME, metavar="NAME"
    )


def score(
    *,
    model: ModelFolder,
    in_out: InputOutput,
    src: Path | None = typer.Option(
        None, metavar="FILE", help="Source lines, for a translator.", rich_help_panel=IN_OUT
    ),
    tgt: Path | None = typer.Option(
        None, metavar="FILE", help="Target lines, one per source.", rich_help_panel=IN_OUT
    ),
    src_language: SrcLang = None,
    tgt_language: TgtLang = None,
    per_token: bool = typer.Option(
        False, "--per-token", help="Divide each log-probability by the number of tokens."
    ),
    json: JsonLines = False,
    run_time: ScoreRunTime,
) -> None:
    """Print log-probabilities: of targets given their sources, or of texts.

    For a translator: the natural log-probability of each target line. For a language model,
    separated by tabs: log-probability, perplexity and bits per character of each text; nan for a
    text of a single token. A pair with a side that is too long for the model is reported and left
    out: its line is blank, and null in JSON. A text that is longer than a language model is scored
    in windows, each token after at least half of the model's length; their number is reported.

    Example: heedful score runs/translation --src test.en --tgt candidates.de

    Example: heedful score runs/novel 'It was a dark and stormy night.'
    """
    run_time = run_time.only_eager("score")
    if (src is None) != (tgt is None) or (src is not None and (in_out.input or in_out.texts)):
        raise UserError("give --src and --tgt for a translator; TEXT or --input for other models")
    if src is None or tgt is None:
        for flag, language in (("--src-lang", src_language), ("--tgt-lang", tgt_language)):
            if language is not None:
                raise UserError(f"{flag} is for a translator: give --src and --tgt too")
        rows = _score_texts(model, in_out, run_time, per_token)
    else:
        pairs = read_parallel(src, tgt)
        languages = {"src_language": src_language, "tgt_language": tgt_language}
        rows = _score_pairs(model, pairs, in_out.too_long, run_time, per_token, languages)
    with line_writer(in_out.output) as write:
        for row in rows:
            columns = [row[name] for name in _COLUMNS if name in row]
            if json:
                write(json_line(**row))
            else:
                write("\t".join(f"{value:.6f}" for value in columns if value is not None))


def _score_texts(
    model: Path, in_out: InputOutput, run_time: RunTime, per_token: bool
) -> Iterator[dict[str, Any]]:
    """A row for each text of a language model."""
    chunks = in_out.chunks()
    opened: Any = run_time.open(model, pipelines.SavedModel, "score")
    if isinstance(opened, pipelines.Translator):
        raise UserError("a translator scores pairs: give --src FILE and --tgt FILE")
    pipelines.expect(opened, pipelines.LanguageModel, "score")
    for flag in ("truncate", "strict"):
        if getattr(in_out, flag):
            raise UserError(f"--{flag}: without effect for language models; leave it out")
    return _text_rows(opened, chunks, run_time, per_token)


def _text_rows(
    model: "pipelines.LanguageModel",
    chunks: Iterator[list[str]],
    run_time: RunTime,
    per_token: bool,
) -> Iterator[dict[str, Any]]:
    """A row for each text; at the end a note counts those that are longer than the model."""
    number, in_windows = 0, list[int]()
    for chunk in chunks:
        for line, score in zip(
            chunk, model.score(chunk, batch_tokens=run_time.batch_tokens), strict=True
        ):
            number += 1
            if score.num_tokens > model.config.max_length:
                in_windows.append(number)
            yield {"text": line, **_figures(line, score, per_token)}
    if in_windows:
        note(
            f"lines longer than the model's {model.config.max_length:,} tokens, scored in windows: "
            f"{len(in_windows):,} (the first: line {in_windows[0]:,})"
        )


def _score_pairs(
    model: Path,
    pairs: tuple[list[str], list[str]],
    too_long: TooLong,
    run_time: RunTime,
    per_token: bool,
    languages: dict[str, str | None],
) -> Iterator[dict[str, Any]]:
    """A row for each pair of a source and a target line; without a value for one left out."""
    sources, targets = pairs
    translator = run_time.open(model, pipelines.Translator, "score with --src and --tgt")
    scores = translator.score(
        sources,
        targets,
        too_long=too_long,
        **languages,
        batch_tokens=run_time.batch_tokens,
    )
    for source, target, score in zip(sources, targets, scores, strict=True):
        value = None
        if score.num_tokens:
            value = score.log_prob / (score.num_tokens if per_token else 1)
        yield {"src": source, "tgt": target, "log_prob": value, "num_tokens": score.num_tokens}
    report_counts(translator, "pairs", len(sources))


def _figures(line: str, score: "pipelines.TextScore", per_token: bool) -> dict[str, float]:
    if not score.num_tokens:
        return dict.fromkeys(_COLUMNS, math.nan)
    log_prob = score.log_prob / (score.num_tokens if per_token else 1)
    values = log_prob, score.perplexity, score.bits_per_character(line)
    return dict(zip(_COLUMNS, values, strict=True))
