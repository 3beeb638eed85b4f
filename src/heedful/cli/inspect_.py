"""`heedful inspect`: one offline HTML page that shows what a model does with a text."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from heedful.cli.flags import Device, flag_of, leave_out
from heedful.cli.help import IN_OUT
from heedful.cli.shared import note
from heedful.errors import UserError

if TYPE_CHECKING:
    from heedful.insight.page_data import PageOptions

PAGE = "The page"
WITHOUT = ("draft", "num_draft_tokens", "require", "coverage_penalty", "num_groups", "glossary")


@dataclass(frozen=True)
class PageFlags:
    """Flags that choose what a page shows; each is for a text."""

    target: str | None = typer.Option(
        None,
        metavar="TEXT",
        help="Target of an encoder-decoder.",
        show_default="the model's own output",
    )
    patch_from: str | None = typer.Option(
        None,
        metavar="TEXT",
        help="Another text with the same number of tokens: show the effect of each of its states "
        "on the output.",
        show_default="no such view",
        rich_help_panel=PAGE,
    )
    layers: str | None = typer.Option(
        None,
        metavar="LIST",
        help="Layers whose attention is shown, such as 0,3 or 0,-1.",
        show_default="all",
        rich_help_panel=PAGE,
    )
    heads: str | None = typer.Option(
        None,
        metavar="LIST",
        help="Heads whose attention is shown, such as 0,1.",
        show_default="all",
        rich_help_panel=PAGE,
    )
    tokens: str | None = typer.Option(
        None,
        metavar="FIRST:LAST",
        help="Tokens of each side that are shown, the last one excluded; the model reads all.",
        show_default="the first 96",
        rich_help_panel=PAGE,
    )
    sentences: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="Texts of a map of sentences: one on each line, or a label, a tab and a text.",
        show_default="no map",
        rich_help_panel=PAGE,
    )
    projection: str | None = typer.Option(
        None,
        metavar="pca|tsne|umap",
        help="Projection of embeddings; t-SNE and UMAP take the --seed.",
        show_default="pca",
        rich_help_panel=PAGE,
    )

    def page_options(self, options: dict[str, Any]) -> "PageOptions":
        """The choices of a page, with the options of the output."""
        from heedful.insight.page_data import PageOptions

        first, last = _range(self.tokens)
        texts, labels = _labeled(self.sentences)
        return PageOptions(
            patch_from=self.patch_from,
            layers=_indices("--layers", self.layers),
            heads=_indices("--heads", self.heads),
            first=first,
            last=last,
            sentences=texts,
            labels=labels,
            projection=self.projection or "pca",  # type: ignore[arg-type]
            seed=options.get("seed", 0),
            generation=options,
        )


@leave_out(*WITHOUT, "diversity_penalty", "num_return", "shortlist")
def inspect_(
    *,
    model: Path = typer.Argument(metavar="MODEL", help="Model directory, or folder of a run."),
    text: str | None = typer.Option(
        None,
        metavar="TEXT",
        help="Source, prompt or text; without it the training of a run is shown.",
        show_default="none",
    ),
    page: PageFlags,
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
    options: dict[str, Any],
    device: Device = "auto",
) -> None:
    """Write one HTML page that shows what a model does with a text.

    Tokens, attention, alignment, logit lens, attributions, patching, search and embeddings, of
    every kind of model, trained or imported. For the folder of a run also the curves of its
    training; without a text, gradients, weights and states by layer at its checkpoints too. The
    page needs no network. The same is available as functions:
    heedful.insight.attention(model, text) and others.

    Example: heedful inspect runs/dates --text 14/03/2007 --patch-from 15/03/2007

    Example: heedful inspect runs/dates --out training.html
    """
    from heedful.files import check_writable

    if out.is_file() and not overwrite:
        raise UserError(f"{out} exists; give another --out, or --overwrite to replace it")
    check_writable(out)
    if text is None:
        flags = [f"--{name.replace('_', '-')}" for name, v in vars(page).items() if v is not None]
        if flags := [*flags, *map(flag_of, options)]:
            raise UserError(f"{flags[0]} is for a text; give --text too, or leave it out")
        _write_run(model, out, device)
    else:
        _write_text(model, text, page, options, out, device)
    typer.echo(out)


def _write_run(folder: Path, out: Path, device: str) -> None:
    """Write the page of a run's training."""
    from heedful.cli.lines import bars_on_stderr
    from heedful.insight.page import write_page
    from heedful.insight.run_views import views_of_run
    from heedful.run_scales import scales_of_run
    from heedful.training.folder import is_run

    if not is_run(folder):
        raise UserError(f"{folder} is not the folder of a run; give a text to inspect (--text)")
    with bars_on_stderr():
        scales = scales_of_run(folder, device)
    views, notes = views_of_run(folder, scales)
    write_page(out, title=folder.resolve().name, facts={}, views=views, notes=notes)
    for line in notes:
        note(str(line))


def _write_text(
    folder: Path, text: str, page: PageFlags, options: dict[str, Any], out: Path, device: str
) -> None:
    """Write the page of a text, with the training of a run."""
    from heedful import pipelines
    from heedful.cli.lines import bars_on_stderr
    from heedful.insight.page import write_page
    from heedful.insight.page_data import views_of_text
    from heedful.insight.run_views import views_of_run
    from heedful.pipelines.inputs import LengthError
    from heedful.training.folder import is_run

    settings = page.page_options(options)
    model = pipelines.load(folder, device=device, backend="eager")
    with bars_on_stderr():
        try:
            views, notes = views_of_text(model, text, page.target, settings)
        except LengthError as error:
            raise UserError(f"{error.problem}; give a shorter text or target") from None
        if is_run(folder) and (folder / "log.jsonl").is_file():
            training, more = views_of_run(folder)
            views, notes = views | training, [*notes, *more]
    facts = {
        "architecture": model.metadata.architecture,
        "task": model.metadata.task,
        "parameters": f"{sum(parameter.numel() for parameter in model.net.parameters()):,}",
    }
    shown = text if len(text) <= 80 else f"{text[:79]}…"
    title = f"{folder.resolve().name}: {shown}"
    write_page(out, title=title, facts=facts, views=views, notes=notes)
    for line in notes:
        note(str(line))


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
    from heedful.data.rows import is_blank
    from heedful.data.text_files import read_lines

    lines = [line for line in read_lines(path) if not is_blank(line)]
    if not lines:
        raise UserError(f"{path} has no texts; write one on each line")
    if all("\t" in line for line in lines):
        pairs = [line.split("\t", 1) for line in lines]
        return [text for _, text in pairs], [label for label, _ in pairs]
    return lines, []
