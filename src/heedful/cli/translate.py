"""`heedful translate`: lines or a document in, translations out, in the same order.

Flags of decoding and run time are fields in `heedful/options.py`.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from heedful import pipelines
from heedful.cli.alignments import AlignmentFlags, AlignmentWriter
from heedful.cli.documents import DocumentFlags, is_document, translate_documents
from heedful.cli.flags import JsonLines, ModelFolder, RunTime, leave_out
from heedful.cli.help import IN_OUT
from heedful.cli.lines import (
    InputOutput,
    json_line,
    line_writer,
    report_counts,
    settle,
)
from heedful.cli.long_lines import LongLines
from heedful.cli.review import ReviewTable
from heedful.cli.shared import note
from heedful.errors import UserError

_INVITATION = "ready: type a line, and its translation follows; Ctrl-D ends"


@leave_out("draft", "num_draft_tokens")
def translate(
    *,
    model: ModelFolder,
    in_out: InputOutput,
    scores: bool = typer.Option(
        False,
        "--scores",
        help="Before each translation write its score and a tab.",
        rich_help_panel=IN_OUT,
    ),
    json: JsonLines = False,
    aligned: AlignmentFlags,
    documents: DocumentFlags,
    options: dict[str, Any],
    ensemble: list[Path] | None = typer.Option(
        None,
        metavar="MODEL",
        help="Search the mean of the probabilities of MODEL and this one; repeatable.",
        rich_help_panel="Ensemble",
    ),
    weight: list[float] | None = typer.Option(
        None,
        metavar="X",
        help="Weight of a model in the mean, in the order of the models; repeatable.",
        show_default="equal weights",
        rich_help_panel="Ensemble",
    ),
    run_time: RunTime,
) -> None:
    """Translate texts: arguments, lines of a file or of stdin; or a document.

    One line out for each line in (with --num-return N: N lines, best first); a line break inside a
    translation is written as a space, and counted. A line that is typed is answered at once. A line
    that is too long for the model is translated sentence by sentence, long sentences in clauses;
    with --no-split-sentences, --scores, --json, --num-return or --alignments it is reported and
    left out: its translation is blank.

    The models of an ensemble share a vocabulary, but not sizes or architecture; they run eager.

    A file whose name ends in .po, .pot, .xliff, .xlf, .sdlxliff, .mqxliff, .mxliff, .tmx, .srt,
    .vtt, .html, .htm, .xhtml, .md, .markdown, .docx, .docm, .dotx or .dotm is a document: its texts
    are translated sentence by sentence, and all else stays as it is, byte for byte. Translations
    that it has are kept; new ones are marked for a review, where the format can. A folder as
    --input is all documents below it, .txt too, whose translations have the same names below
    --output; those that are there already are kept, so that the same command continues, and a file
    that cannot be translated is named and left out.

    Example: heedful translate runs/translation 'Hello.'

    Example: heedful translate runs/translation -i test.en --beam-size 4

    Example: heedful translate runs/en-de -i test.en --alignments test.align

    Example: heedful translate runs/en-de -i app.po -o app.de.po --memory old.tmx

    Example: heedful translate runs/en-de -i docs -o docs.de
    """
    if weight and not ensemble:
        raise UserError("--weight is the weight of a model of an --ensemble; give both, or neither")
    aligned.check()
    documents.check(in_out)
    of_document = is_document(in_out)
    table = documents.table(in_out)
    chunks = iter([]) if of_document else in_out.chunks(_INVITATION)
    translator = _open([model, *(ensemble or [])], weight, in_out, run_time)
    options |= {"too_long": in_out.too_long, "batch_tokens": run_time.batch_tokens}
    settled = settle(translator, options)
    if of_document:
        refused = {"--scores": scores, "--json": json, "--alignments": aligned.alignments}
        translate_documents(translator, in_out, documents, options, refused=refused, review=table)
        return
    chunks = chunks if table is None else table.remember(chunks)
    with aligned.writer(translator, settled) as aligner:
        chunks = chunks if aligner is None else aligner.remember(chunks)
        whole = in_out.truncate or in_out.strict or not documents.split_sentences
        if whole or scores or json or aligner or settled.num_return > 1:
            _write_outputs(
                translator, in_out, chunks, aligner, table, options, scores=scores, json=json
            )
        else:
            _write_translations(translator, in_out, chunks, table, options)
    if table is not None:
        table.write()


def _write_translations(
    translator: "pipelines.Translator",
    in_out: InputOutput,
    chunks: Iterator[list[str]],
    table: ReviewTable | None,
    options: dict[str, Any],
) -> None:
    """Write the translation of each line of chunks; one that is too long is translated in parts."""
    languages = options.get("src_language"), options.get("tgt_language")
    long_lines = LongLines(translator, *languages, keep=options.get("keep", True))
    cut = number = to_review = 0
    with line_writer(in_out.output) as write, in_out.progress("translating") as progress:
        options |= {"scores": table is not None, "progress": progress}
        options["numbers"] = long_lines.numbers
        rows = long_lines.split(chunks)
        for [output] in translator.iterate_generations(rows, ahead=in_out.ahead, **options):
            if (line := long_lines.joined(output)) is not None:
                number += 1
                cut += line.is_cut
                to_review += line.is_to_review
                write(line.text)
                if table is not None:
                    table.add(line.text, line.parts)
        report_counts(translator, "lines", number)
    if long_lines.num_split:
        blank = long_lines.num_blank
        parts = f" (parts without a translation: {blank:,})" if blank else ""
        note(f"lines too long for the model, translated in parts: {long_lines.num_split:,}{parts}")
    _report_doubtful(cut, to_review)


def _write_outputs(
    translator: "pipelines.Translator",
    in_out: InputOutput,
    chunks: Iterator[list[str]],
    aligner: AlignmentWriter | None,
    table: ReviewTable | None,
    options: dict[str, Any],
    *,
    scores: bool,
    json: bool,
) -> None:
    """Write the outputs of each line of chunks with what is wanted of them."""
    num_return = options.get("num_return", 1)
    cut = number = to_review = 0
    with line_writer(in_out.output) as write, in_out.progress("translating") as progress:
        options |= {"scores": scores or json or table is not None, "progress": progress}
        for outputs in translator.iterate_generations(chunks, ahead=in_out.ahead, **options):
            number += 1
            cut += outputs[0].is_cut
            to_review += bool(outputs[0].reasons)
            if aligner is not None:
                aligner.add(outputs, num_return)
            if table is not None:
                table.add(outputs[0].text, outputs[:1])
            if json:
                entries = [{**one.as_dict(), "quality": one.quality} for one in outputs]
                write(json_line(outputs=entries))
                continue
            for output in [*outputs, *[None] * (num_return - len(outputs))]:
                text = "" if output is None else output.text
                score = -math.inf if output is None else output.score
                write(f"{score:.6f}\t{text}" if scores else text)
        report_counts(translator, "lines", number)
    _report_doubtful(cut, to_review)


def _report_doubtful(cut: int, to_review: int) -> None:
    """Report translations that are not complete, or have reasons for a review."""
    if cut:
        typer.echo(f"translations cut off by the length limit: {cut:,}", err=True)
    if to_review:
        typer.echo(
            "translations to review, with numbers, placeholders, tags or terms that the model did "
            f"not keep: {to_review:,} (--review and --json have the reasons)",
            err=True,
        )


def _open(
    models: list[Path], weights: list[float] | None, in_out: InputOutput, run_time: RunTime
) -> "pipelines.Translator":
    """The model, or the ensemble of several."""
    if len(models) > 1:
        run_time = run_time.only_eager("an ensemble")
    many = in_out.input is not None
    opened = [run_time.open(path, pipelines.Translator, "translate", many=many) for path in models]
    return opened[0] if len(opened) == 1 else pipelines.ensemble(opened, weights)
