"""Progress of long work: reported by the code that does it, displayed only in a display."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from commands import write_recipe
from heedful.cli.shared import make_console
from heedful.progress import Advance, ProgressBars, has_display, track, use_display
from heedful.recipe_files import load_recipe
from heedful.run import train
from heedful.training.events import RunStarted
from heedful.training.listeners import RunDisplay


def test_a_run_reports_all_of_its_work(tmp_path, monkeypatch):
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))  # nothing is prepared yet
    reports: list[tuple[str, int, int]] = []

    @contextmanager
    def show(what: str, total: int) -> Iterator[Advance]:
        parts: list[int] = []
        yield parts.append
        reports.append((what, total, sum(parts)))

    recipe = load_recipe(str(write_recipe(tmp_path / "recipe.json", training__max_steps=2)))
    with use_display(show):
        train(recipe, tmp_path / "run")
    assert {what for what, _, _ in reports} == {"reading, MB", "tokenizing", "translating"}
    assert all(total == done > 0 for _, total, done in reports)
    assert not has_display()


def test_nothing_is_displayed_without_a_display():
    with track("anything", 3) as advance:
        advance(3)


def test_a_bar_is_displayed_below_the_steps_until_its_work_ends():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    bar = RunDisplay(console)
    with bar.track("tokenizing", 10) as advance:
        advance(4)
    bar.on(RunStarted({}, 1, 2, 3, "cpu", 100))
    with bar.track("translating", 7) as advance:
        advance(5)
        assert bar._progress is not None
        steps, other = bar._progress.tasks
        assert (steps.total, other.total, other.completed) == (100, 7, 5)
    assert len(bar._progress.tasks) == 1
    bar.close()
    output = console.file.getvalue()
    assert "tokenizing" in output
    assert "translating" in output


def test_without_a_terminal_long_work_prints_lines():
    for seconds, expected in ((60.0, ""), (0.0, r"tokenizing 4/10  [\d,]+/s, 0:00 left")):
        console = Console(file=io.StringIO())
        with RunDisplay(console, line_seconds=seconds).track("tokenizing", 10) as advance:
            advance(4)
        assert re.fullmatch(expected, console.file.getvalue().strip())


def test_nested_work_has_nested_bars():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    bars = ProgressBars(console)
    with bars.track("building", 2), bars.track("compiling", None) as advance:
        advance(3)
        assert bars._progress is not None
        outer, inner = bars._progress.tasks
        assert (outer.total, inner.total, inner.completed) == (2, None, 3)
    assert bars._progress is None


def test_the_name_of_work_keeps_its_brackets():
    """As the name of a file, which is no markup."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with ProgressBars(console).track("translating a[final].docx, b[/c].md", 2) as advance:
        advance(1)
    assert "translating a[final].docx, b[/c].md" in console.file.getvalue()


def test_lines_are_printed_as_they_are(capsys):
    """Names of emoji and markup in texts of data are no codes."""
    line = "set :key: to [bold]:smile:[/bold]"
    make_console().print(line)
    ProgressBars(Console()).print_line(line)
    assert capsys.readouterr().out == 2 * f"{line}\n"
