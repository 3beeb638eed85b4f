"""`heedful inspect`: one offline HTML page that shows what a model does with a text."""

from pathlib import Path
from typing import Any

import typer

from heedful.cli.flags import Device, spread
from heedful.cli.help import IN_OUT
from heedful.cli.shared import note
from heedful.errors import UserError

PAGE = "The page"


@spread(
    "draft", "num_draft_tokens", "require", "coverage_penalty", "num_groups", "diversity_penalty",
    "num_return", "shortlist",
)  # fmt: skip
def inspect_(
    *,
    model: Path = typer.Argument(metavar="MODEL", help="Model directory, or folder of a run."),
    text: str | None = typer.Option(
        None,
        metavar="TEXT",
        help="Source, prompt or text; without it the training of a run is shown.",
        show_default="none",
    ),
    target: str | None = typer.Option(
        None,
        metavar="TEXT",
        help="Target of an encoder-decoder.",
        show_default="the model's own output",
    ),
    out: Path = typer.Option(
        Path("inspect.html"),
        "--out",
        "-o",
        metavar="FILE",
        help="Write this HTML file.",
        rich_help_panel=IN_OUT,
    ),
    overwrite: bool = typer.Option(
        False, "--overwrite", help="Replace an existing file.", rich_help_panel=IN_OUT
    ),
    layers: str | None = typer.Option(
        None,
        metavar="LIST",
        help="Layers whose attention is shown, such as 0,3 or 0,-1.",
        show_default="all",
        rich_help_panel=PAGE,
    ),
    heads: str | None = typer.Option(
        None,
        metavar="LIST",
        help="Heads whose attention is shown, such as 0,1.",
        show_default="all",
        rich_help_panel=PAGE,
    ),
    tokens: str | None = typer.Option(
        None,
        metavar="FIRST:LAST",
        help="Tokens of each side that are shown, the last one excluded; the model reads all.",
        show_default="the first 96",
        rich_help_panel=PAGE,
    ),
    sentences: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="Texts of a map of sentences: one on each line, or a label, a tab and a text.",
        show_default="no map",
        rich_help_panel=PAGE,
    ),
    projection: str = typer.Option(
        "pca", metavar="pca|tsne", help="Projection of embeddings.", rich_help_panel=PAGE
    ),
    options: dict[str, Any],
    device: Device = "auto",
) -> None:
    """Write one HTML page that shows what a model does with a text.

    Tokens, attention, alignment, logit lens, attributions, search and embeddings, of every kind of
    model, trained or imported. For the folder of a run also its training. The page needs no
    network. The same is available as functions: heedful.insight.attention(model, text) and others.

    Example: heedful inspect runs/dates --text '14 March 2007'

    Example: heedful inspect runs/dates --out training.html
    """
    from heedful import pipelines
    from heedful.cli.lines import bars_on_stderr
    from heedful.insight.page import write_page
    from heedful.insight.page_data import PageOptions, views_of_text
    from heedful.insight.run_views import views_of_run
    from heedful.training.folder import is_run

    _check_out(out, overwrite=overwrite)
    if text is None:
        _check_unused(target=target, layers=layers, heads=heads, tokens=tokens, sentences=sentences)
        if options:
            raise UserError(f"{next(iter(options))} is for a text; give --text")
        if not is_run(model):
            raise UserError(f"{model} is not the folder of a run; give a text to inspect (--text)")
        views, notes = views_of_run(model)
        write_page(out, title=f"{model.resolve().name}", facts={}, views=views, notes=notes)
        typer.echo(out)
        return
    first, last = _range(tokens)
    texts, labels = _labeled(sentences)
    opened = pipelines.load(model, device=device, backend="eager")
    chosen = PageOptions(
        _indices("--layers", layers), _indices("--heads", heads), first, last, texts, labels,
        projection, options.get("seed", 0), options,  # type: ignore[arg-type]
    )  # fmt: skip
    with bars_on_stderr():
        views, notes = views_of_text(opened, text, target, chosen)
        if is_run(model) and (model / "log.jsonl").is_file():
            training, more = views_of_run(model)
            views, notes = views | training, [*notes, *more]
    facts = {
        "architecture": opened.metadata.architecture,
        "task": opened.metadata.task,
        "parameters": f"{sum(p.numel() for p in opened.net.parameters()):,}",
    }
    shown = text if len(text) <= 80 else f"{text[:79]}…"
    write_page(out, title=f"{model.resolve().name}: {shown}", facts=facts, views=views, notes=notes)
    for line in notes:
        note(line)
    typer.echo(out)


def _check_out(out: Path, *, overwrite: bool) -> None:
    from heedful.files import check_writable

    if out.is_file() and not overwrite:
        raise UserError(f"{out} exists; give another --out, or --overwrite to replace it")
    check_writable(out)


def _check_unused(**values: Any) -> None:
    for name, value in values.items():
        if value is not None:
            raise UserError(f"--{name} is for a text; give --text too, or leave it out")


def _indices(flag: str, text: str | None) -> list[int] | None:
    """The numbers of a list such as 0,3."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{flag} must be numbers such as 0,3, not {text!r}") from None


def _range(text: str | None) -> tuple[int, int | None]:
    """First and last of a range such as 0:64."""
    if text is None:
        return 0, None
    first, separator, last = text.partition(":")
    try:
        if separator:
            return int(first or 0), int(last) if last else None
    except ValueError:
        pass
    raise UserError(f"--tokens must be a range such as 0:64, not {text!r}")


def _labeled(path: Path | None) -> tuple[list[str], list[str]]:
    """The texts of a file and their labels, if all lines have a label and a tab."""
    if path is None:
        return [], []
    from heedful.data.text_files import read_lines

    lines = [line for line in read_lines(path) if line.strip()]
    if not lines:
        raise UserError(f"{path} has no texts; write one on each line")
    if all("\t" in line for line in lines):
        pairs = [line.split("\t", 1) for line in lines]
        return [text for _, text in pairs], [label for label, _ in pairs]
    return lines, []
