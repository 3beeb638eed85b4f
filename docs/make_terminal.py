"""Draws docs/terminal.svg for the READMEs: three commands and what they write.

    python docs/make_terminal.py RUN

RUN is a finished run of the recipe `localization`; the lines of its training are those of its log.
"""

import io
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from heedful.training.events import Evaluated, RunFinished
from heedful.training.listeners import RunDisplay, read_log

PICTURE = Path(__file__).resolve().parent / "terminal.svg"
WIDTH = 106
NAME = "runs/de"  # of the run, in the commands that are shown
TRAIN = "heedful train localization --set data.train.file=memory.tmx"
TRAIN += f" \\\n    --set data.src_language=en --set data.tgt_language=de --out {NAME}"
CATALOGUE = """msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\\n"
"Language: de\\n"

msgid "Do you want to replace the file %s?"
msgstr ""

msgid "Insert $(ARG1) rows"
msgstr ""
"""
# Rich's frame of a window without its font, which is on another host, and without a title.
FORMAT = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
 font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g></g></svg>
"""
THEME = TerminalTheme(
    (24, 26, 32),
    (222, 224, 230),
    [
        *((24, 26, 32), (224, 108, 117), (152, 195, 121), (229, 192, 123)),
        *((97, 175, 239), (198, 120, 221), (86, 182, 194), (222, 224, 230)),
    ],
)


def training_lines(run: Path) -> list[str]:
    """The last evaluation of a run and its end, as they were displayed."""
    shown = io.StringIO()
    display = RunDisplay(Console(file=shown, width=200))
    events = read_log(run / "log.jsonl")
    for kind in (Evaluated, RunFinished):
        display.on([event for event in events if isinstance(event, kind)][-1])
    return shown.getvalue().splitlines()


def output(*words: str, folder: Path) -> list[str]:
    """The lines that a command writes."""
    command = [sys.executable, "-m", "heedful", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return (done.stdout + done.stderr).splitlines()


def draw(run: Path) -> str:
    """The picture."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)

    def show(command: str, lines: list[str]) -> None:
        console.print(Text("$ ", "bold green").append(Text(command, "bold")))
        for line in lines:
            console.print(Text(line[:WIDTH]), overflow="crop", no_wrap=True)
        console.print()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "app.po").write_text(CATALOGUE, encoding="utf-8")
        show(TRAIN, training_lines(run))
        words = ["translate", str(run), "-i", "app.po", "-o", "app.de.po"]
        counts = output(*words, folder=folder)
        translated = (folder / "app.de.po").read_text(encoding="utf-8").strip().splitlines()
        show(f"heedful translate {NAME} -i app.po -o app.de.po", counts)
        show("tail -n 7 app.de.po", translated[-7:])
        checks = output("verify", str(run), folder=folder)
        show(f"heedful verify {NAME} | head -n 5", checks[:5])
    return console.export_svg(theme=THEME, code_format=FORMAT, title="")


if __name__ == "__main__":
    PICTURE.write_text(draw(Path(sys.argv[1]).resolve()), encoding="utf-8")
    print(f"wrote {PICTURE.name}")
