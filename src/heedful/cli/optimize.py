"""`heedful optimize`: the fastest way to run a model on this machine, found, proved and kept."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from heedful import pipelines
from heedful.cli.flags import ModelFolder
from heedful.cli.lines import bars_on_stderr, read_parallel
from heedful.errors import UserError

if TYPE_CHECKING:
    from heedful.deploy.optimize import Findings

_SHOWN = 6  # settings of each use in the table


def optimize(
    model: ModelFolder,
    src: Path | None = typer.Option(
        None, help="Held-out text: source lines, texts, or running text. Default: the run's own."
    ),
    ref: Path | None = typer.Option(
        None, help="References of a translator, labels of a classifier."
    ),
    backend: list[str] | None = typer.Option(
        None, help="Measure only this one: eager, ctranslate2 or compiled; repeatable."
    ),
    precision: list[str] | None = typer.Option(
        None, help="Try only this form: float32, bfloat16 or int8; repeatable."
    ),
    threads: list[int] | None = typer.Option(
        None, help="Of a worker; repeatable. Default: one, and all cores.", min=1
    ),
    use: Literal["latency", "throughput", "both"] = typer.Option(
        "both", "--for", help="One text at a time, many together, or both."
    ),
    tolerance: float | None = typer.Option(
        None,
        min=0,
        help="What less precision and a shortlist may lose. Default: 0.3 BLEU, 0.3% of accuracy, "
        "1% of perplexity.",
    ),
    shortlist: bool = typer.Option(
        False,
        "--shortlist",
        help="Of a translator: let each sentence have only what its words became in the run's "
        "training pairs, so that few outputs are worked out.",
    ),
) -> None:
    """Find what runs a model fastest here, and let the other verbs use it.

    What can run the model is built of its weights and proved on held-out text: forms for
    CTranslate2, and graphs that torch compiles in some minutes where there is a C++ compiler. In
    float32 the greedy output must be the net's own and the scores within 1e-4; in bfloat16 and int8
    they may lose no more than --tolerance. What is kept is timed with one text at a time and with
    many, with threads, workers and batches of several sizes. The best of each kind stands in
    MODEL/backends, and translate, generate, classify, embed and fill use it from then on; --backend
    eager goes back. It holds for this kind of processor and these weights; elsewhere, the verbs say
    so and run the net itself.

    Example: heedful optimize runs/translation --src valid.en --ref valid.de
    """
    if ref is not None and src is None:
        raise UserError("--ref goes with --src: give both files")
    from heedful.backends.ctranslate2.conversion import PRECISIONS
    from heedful.deploy.optimize import BACKENDS, USES, check_asked, optimize

    check_asked(backend or (), precision or (), threads or ())
    opened = pipelines.load(model, device="cpu", backend="eager")
    held_out = _held_out(model, src, ref)
    with bars_on_stderr():
        findings = optimize(
            opened,
            model,
            *held_out,
            backends=backend or BACKENDS,
            precisions=precision or PRECISIONS,
            uses=USES if use == "both" else (use,),
            tolerance=tolerance,
            threads=threads or (),
            pairs=_training_pairs(model) if shortlist else None,
        )
    _show(findings)
    typer.echo(f"kept in {model / 'backends'}; --backend eager runs the net itself")


def _held_out(
    model: Path, src: Path | None, ref: Path | None
) -> tuple[list[str], list[str] | None]:
    """Texts and answers: what was given, or else the held-out text of the model's run."""
    import json

    from heedful.data.rows import read_lines

    if src is not None:
        return read_parallel(src, ref) if ref is not None else ([*read_lines(src)], None)
    remedy = "held-out text: give --src FILE, and --ref FILE for a translator or a classifier"
    with _prepared(model, "valid.jsonl", remedy).open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    answers = {"src": "tgt", "text": "label"}
    side = "src" if rows and "src" in rows[0] else "text"
    other = [row[answers[side]] for row in rows] if rows and answers[side] in rows[0] else None
    return [row[side] for row in rows], other


def _training_pairs(model: Path) -> list[tuple[Any, Any]]:
    """Ids of the pairs that the model's run learnt from."""
    from heedful.data.columns import open_columns

    remedy = (
        "training pairs, which a shortlist is counted from; optimize the folder of its run, where "
        "it was trained"
    )
    columns = open_columns(_prepared(model, "train", remedy))
    if "tgt" not in columns:
        raise UserError("a shortlist is of a translator; leave out --shortlist")
    src, tgt = columns.sequences("src"), columns.sequences("tgt")
    return [(src[row], tgt[row]) for row in range(len(columns))]


def _prepared(model: Path, name: str, remedy: str) -> Path:
    """A part of the data that were prepared for a model's run; raises UserError if it is gone."""
    from heedful.data.prepared import cache_folder
    from heedful.files import plain_name
    from heedful.training.folder import MARKER, facts_of_run, is_run

    data = facts_of_run(model).data if is_run(model) else None
    if data is not None:
        path = cache_folder() / plain_name(data, model / MARKER) / name
        if path.exists():
            return path
    raise UserError(f"{model} remembers no {remedy}")


def _show(findings: "Findings") -> None:
    for form, proof in findings.proofs.items():
        pairs = {proof.metric: (proof.eager, proof.backend)} | proof.others
        figures = [
            f"{name} {after:.2f} (net {before:.2f})" for name, (before, after) in pairs.items()
        ]
        same = f"{100 * proof.same:.4g}% of {proof.num_texts} outputs the same"
        typer.echo(f"{form}: {same}, {', '.join(figures)}")
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
    shown: dict[str, int] = {}
    for use, choice, rate in findings.rates:
        shown[use] = shown.get(use, 0) + 1
        if shown[use] <= _SHOWN:
            cells = (choice.threads or "", choice.workers, choice.batch_tokens or "")
            typer.echo(row(use, choice.backend, choice.precision, *cells, f"{rate:,.0f}"))
