"""`heedful optimize`: the fastest backend of a model on this machine, tested and saved."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from heedful import pipelines
from heedful.cli.flags import Json, ModelFolder, SrcLang, TgtLang
from heedful.cli.help import IN_OUT
from heedful.cli.lines import bars_on_stderr, read_parallel
from heedful.cli.shared import print_json
from heedful.errors import UserError
from heedful.options import RUN_TIME

if TYPE_CHECKING:
    from heedful.backends.manifest import BackendChoice
    from heedful.deploy.optimize import Findings

_SHOWN = 6  # settings per use in the table


@dataclass(frozen=True)
class Candidates:
    """The settings to measure, and the loss of quality that is allowed."""

    backend: list[str] | None = typer.Option(
        None,
        metavar="NAME",
        help="Measure only this backend: eager, ctranslate2 or compiled; repeatable.",
        show_default="all",
        rich_help_panel=RUN_TIME,
    )
    precision: list[str] | None = typer.Option(
        None,
        metavar="NAME",
        help="Try only this precision: float32, bfloat16 or int8; repeatable.",
        show_default="all",
        rich_help_panel=RUN_TIME,
    )
    threads: list[int] | None = typer.Option(
        None,
        min=1,
        metavar="N",
        help="CPU cores per worker; repeatable.",
        show_default="one, and all",
        rich_help_panel=RUN_TIME,
    )
    use: Literal["latency", "throughput", "both"] = typer.Option(
        "both",
        "--for",
        metavar="latency|throughput|both",
        help="One text at a time, many together, or both.",
    )
    tolerance: float | None = typer.Option(
        None,
        min=0,
        metavar="X",
        help="Largest loss of quality by a lower precision or a shortlist.",
        show_default="0.3 BLEU, 0.3% of accuracy, 1% of perplexity",
    )
    shortlist: bool = typer.Option(
        False,
        "--shortlist",
        help="Translators: restrict the output vocabulary of a sentence to the tokens that are "
        "aligned with its source tokens in the training pairs of the run.",
    )


def optimize(
    *,
    model: ModelFolder,
    src: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="Held-out source lines, texts, or running text.",
        show_default="those of the run",
        rich_help_panel=IN_OUT,
    ),
    ref: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="References of a translator, labels of a classifier.",
        rich_help_panel=IN_OUT,
    ),
    src_language: SrcLang = None,
    tgt_language: TgtLang = None,
    json: Json = False,
    candidates: Candidates,
) -> None:
    """Find the fastest backend of a model on this machine's CPU, for other commands to use.

    Backends are built from the model's weights and tested on held-out text: CTranslate2, and graphs
    that torch compiles in some minutes if there is a C++ compiler. In float32 the greedy output
    must equal the net's, and scores agree within 1e-4; in bfloat16 and int8 the loss of quality is
    at most --tolerance. Each is timed with one text at a time and with many, for several numbers of
    threads, workers and batch sizes. The best are written to MODEL/backends, and translate,
    generate, classify, embed and fill use them from then on (--backend eager does not). They are
    valid for this kind of processor and these weights; elsewhere commands report it and run eager.
    So they do with graphs that another user or machine compiled, which are native code, unless
    --trust-compiled is given.

    Example: heedful optimize runs/translation --src valid.en --ref valid.de
    """
    if ref is not None and src is None:
        raise UserError("--ref goes with --src: give both files")
    from heedful.deploy.optimize import PRECISIONS, USES, check_names, optimize
    from heedful.pipelines.loading import check_own_format

    check_names(candidates.backend or (), candidates.precision or (), candidates.threads or ())
    check_own_format(model)
    opened = pipelines.load(model, device="cpu", backend="eager")
    held_out = _held_out(model, src, ref)
    languages = {"src_language": src_language, "tgt_language": tgt_language}
    if given := {name: code for name, code in languages.items() if code is not None}:
        pipelines.expect(opened, pipelines.Translator, "--src-lang or --tgt-lang")
        options = {**opened.metadata.options, **given}
        opened.metadata = replace(opened.metadata, options=options)
    with bars_on_stderr():
        findings = optimize(
            opened,
            model,
            *held_out,
            backends=candidates.backend or None,
            precisions=candidates.precision or PRECISIONS,
            uses=USES if candidates.use == "both" else (candidates.use,),
            tolerance=candidates.tolerance,
            threads=candidates.threads or (),
            pairs=_training_pairs(model) if candidates.shortlist else None,
        )
    if json:
        print_json(_content(findings))
        return
    _show(findings)
    typer.echo(f"kept in {model / 'backends'}; --backend eager runs the net itself")


def _held_out(
    model: Path, src: Path | None, ref: Path | None
) -> tuple[list[str], list[str] | None]:
    """Texts and answers of the given files, else the held-out text of the model's run."""
    import json

    from heedful.data.text_files import read_lines

    if src is not None:
        return read_parallel(src, ref) if ref is not None else ([*read_lines(src)], None)
    remedy = "held-out text: give --src FILE, and --ref FILE for a translator or a classifier"
    with _prepared_path(model, "valid.jsonl", remedy).open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    answers = {"src": "tgt", "text": "label"}
    side = "src" if rows and "src" in rows[0] else "text"
    if len({row.get("corpus") for row in rows}) > 1:
        raise UserError(
            f"the held-out rows of {model} are of several corpora; give --src and --ref of one "
            "language, and --tgt-lang"
        )
    other = [row[answers[side]] for row in rows] if rows and answers[side] in rows[0] else None
    return [row[side] for row in rows], other


def _training_pairs(model: Path) -> list[tuple[Any, Any]]:
    """Ids of the training pairs of the model's run."""
    from heedful.data.columns import open_columns

    remedy = (
        "training pairs, which a shortlist is counted from; optimize the folder of its run, where "
        "it was trained"
    )
    columns = open_columns(_prepared_path(model, "train", remedy))
    if "tgt" not in columns:
        raise UserError("a shortlist is for translators only; leave out --shortlist")
    src, tgt = columns.sequences("src"), columns.sequences("tgt")
    return [(src[row], tgt[row]) for row in range(len(columns))]


def _prepared_path(model: Path, name: str, remedy: str) -> Path:
    """A part of the data that were prepared for a model's run; raises UserError if it is gone."""
    from heedful.data.prepared import cache_folder
    from heedful.files import plain_name
    from heedful.training.folder import MARKER, facts_of_run, is_run

    data = facts_of_run(model).data if is_run(model) else None
    if data is not None:
        path = cache_folder() / plain_name(data, model / MARKER) / name
        if path.exists():
            return path
    raise UserError(f"{model} has no record of its {remedy}")


def _content(findings: "Findings") -> dict[str, Any]:
    """The findings as JSON; rates are in tokens per second, the best first."""
    rates = [
        {"use": use, **asdict(choice), "tokens_per_second": rate}
        for use, outcome in findings.outcomes.items()
        for choice, rate in outcome.rates.items()
    ]
    proofs = {form: asdict(proof) for form, proof in findings.proofs.items()}
    shortlist = asdict(findings.shortlist) if findings.shortlist else None
    return {
        "proofs": proofs,
        "refused": findings.refused,
        "rates": rates,
        "undecided": findings.undecided,
        "cores_of_others": findings.cores_of_others,
        "shortlist": shortlist,
    }


def _show(findings: "Findings") -> None:
    from heedful.hardware import cores

    for form, proof in findings.proofs.items():
        pairs = {proof.metric: (proof.eager, proof.backend)} | proof.others
        figures = [
            f"{name} {after:.2f} (net {before:.2f})" for name, (before, after) in pairs.items()
        ]
        same = f"{100 * proof.same:.4g}% of {proof.num_texts} outputs the same"
        if proof.same_beams is not None:
            same += f", {100 * proof.same_beams:.4g}% of those of beams"
        typer.echo(f"{form}: {same}, {', '.join(figures)}")
        if form == "ctranslate2 float32" and proof.same_beams not in (None, 1):
            typer.echo("beams of ctranslate2 rank other outputs first, so beam searches run eager")
    for reason in dict.fromkeys(findings.refused.values()):
        names = ", ".join(name for name, why in findings.refused.items() if why == reason)
        typer.echo(f"left out: {names}: {reason}")
    if (listing := findings.shortlist) is not None:
        proof = listing.proof
        typer.echo(
            f"shortlist: {listing.size:,.0f} tokens a sentence, {100 * listing.recall:.1f}% of the "
            f"held-out ones, {proof.metric} {proof.backend:.2f} (without it {proof.eager:.2f})"
        )
    row = "{:<12}{:<13}{:<11}{:>8}{:>9}{:>14}{:>12}".format
    typer.echo(row("for", "backend", "precision", "threads", "workers", "batch tokens", "tokens/s"))
    for use, outcome in findings.outcomes.items():
        for choice, rate in [*outcome.rates.items()][:_SHOWN]:
            cells = (choice.threads or "", choice.workers, choice.batch_tokens or "")
            typer.echo(row(use, choice.backend, choice.precision, *cells, f"{rate:,.0f}"))
    for use, outcome in findings.outcomes.items():
        if outcome.rival is not None:
            typer.echo(
                f"{use}: the machine is too busy to decide: {_named(outcome.fastest)} was not "
                f"faster than {_named(outcome.rival)} in most rounds; optimize again when nothing "
                "else runs"
            )
    if findings.is_busy:
        typer.echo(
            f"other programs used {findings.cores_of_others:.1f} of {cores()} cores meanwhile, so "
            "these are the fastest settings beside them; optimize again when nothing else runs"
        )


def _named(choice: "BackendChoice") -> str:
    """The backend, precision and settings in words."""
    settings = {"threads": choice.threads, "workers": choice.workers, "batch": choice.batch_tokens}
    words = [f"{value} {name}" for name, value in settings.items() if value]
    return f"{choice.backend} {choice.precision} ({', '.join(words)})"
