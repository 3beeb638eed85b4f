"""The race: the same text, cores and minutes, each tool with documented settings.

Translators, language models (shakespeare) and classifiers (sst2) have their own races. DATA holds
the folders of the other benchmarks: multi30k, libreoffice/de, tinyshakespeare, sst2. Every peer is
installed into a virtual environment of its own (race_environments.py), and every system runs alone,
stopped by the clock. The clock counts all that the user waits for: vocabularies, training, and the
tool's own validation. Checkpoints are kept as they appear and are evaluated afterwards.

A race is kept in a folder of --runs; a system that is finished is not repeated, and the page is
written from all results that are there, and from those of the last page that are not. Without
--systems only the page is written again.
"""

import argparse
import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import race_environments
import race_stub
from common import RESULTS, versions
from race_clock import Clock, start, stop, timed_lines
from race_data import Parts, corpus_files
from race_page import write_page
from race_peers import LOG, SNAPSHOTS, Corpus, Job, System, tokens_per_second
from race_tasks import TASKS, Task

RUNS = Path("runs/race")
TRANSLATIONS = ["multi30k", "libreoffice"]
ALL = "all"  # in place of the names of all systems
RESULT = "result.json"
DECODE_LIMIT = 1800.0  # seconds for an evaluation on the test set
POINTS = 10


def main() -> None:
    """Race the systems that are not finished, then write the page."""
    arguments = parse()
    runs = arguments.runs.absolute()
    environments = (arguments.environments or runs / "environments").absolute()
    for name in arguments.install:
        race_environments.install(environments, name, arguments.torch_build)
    ran: set[str] = set()
    for name in arguments.tasks if arguments.systems else ():
        task = TASKS[name]
        data = (arguments.data / task.folder).absolute()
        if not data.is_dir():
            raise SystemExit(f"{data} is not there: --data is the folder that holds it")
        files, parts = task.read(data)
        folder = runs / "data" / name
        corpus_files(files, folder)
        corpus = Corpus(name, folder, *task.sides, task.vocabulary)
        for minutes in arguments.minutes or task.minutes:
            for system in systems_of(task, arguments.systems):
                folder = runs / f"{name}-{minutes:g}min-{arguments.threads}threads" / system.name
                if (folder / RESULT).is_file():
                    print(f"{folder.parent.name}: {system.name} {state(folder)}", flush=True)
                    continue
                python = python_of(system, environments, arguments.torch_build)
                if python is None:
                    continue
                job = Job(python, folder, corpus, data, arguments.threads, arguments.quick)
                record = race(system, job, minutes)
                ran.add(folder.parent.name)
                score(task, system, job, parts, record, arguments.points)
    write_page(runs, environments, arguments, ran)


def systems_of(task: Task, wanted: Sequence[str]) -> list[System]:
    """The systems of a task with these names; `ALL`: all but the stub of the smoke test."""
    known = task.systems
    if ALL in wanted:
        return [system for name, system in known.items() if name != race_stub.SYSTEM.name]
    return [known[name] for name in wanted if name in known]


def state(folder: Path) -> str:
    """A message on a system that is not repeated: finished, or failed with its error."""
    error = json.loads((folder / RESULT).read_text(encoding="utf-8"))["error"]
    failed = f"failed ({error}); remove {folder} to race it again, or only its {RESULT} to score it"
    return failed if error else "is finished"


def parse() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, help="folder of the text")
    add("--runs", type=Path, default=RUNS, help="folder of the races")
    add("--environments", type=Path, help="folder of the peers' environments; default: in --runs")
    systems = list(dict.fromkeys(name for task in TASKS.values() for name in task.systems))
    add("--systems", type=names, default=[], help=f"{ALL}, or of {', '.join(systems)}")
    add("--tasks", type=names, default=TRANSLATIONS, help=f"of {', '.join(TASKS)}")
    add("--minutes", type=numbers, help="of each race; default: 30,120 of translators, else 5")
    add("--threads", type=int, default=1, help="of every system")
    add("--points", type=int, default=POINTS, help="checkpoints of a system that are scored")
    add("--install", type=names, default=[], help="peers to install, or to try again")
    add("--torch-build", default=race_environments.BUILD, help="of the peers; +cpu, or ''")
    add("--note", default="", help="the machine and its load, for races run now or without one")
    add("--results", type=Path, default=RESULTS, help="folder of the page")
    add("--quick", action="store_true", help="a smoke test: figures are meaningless")
    arguments = parser.parse_args()
    for given, known in (
        (arguments.systems, [*systems, ALL]),
        (arguments.tasks, TASKS),
        (arguments.install, race_environments.KNOWN),
    ):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"{', '.join(unknown)}: choose from {', '.join(known)}")
    raced = dict.fromkeys(name for task in arguments.tasks for name in TASKS[task].systems)
    strange = [name for name in arguments.systems if name not in {*raced, ALL}]
    if strange:
        tasks = ", ".join(arguments.tasks)
        parser.error(f"{', '.join(strange)}: not of {tasks}; choose from {', '.join(raced)}")
    if arguments.systems and arguments.data is None:
        parser.error("give the folder of the text with --data")
    return arguments


def names(text: str) -> list[str]:
    """Names between commas."""
    return [name for name in text.replace(" ", "").split(",") if name]


def numbers(text: str) -> list[float]:
    """Numbers between commas."""
    return [float(name) for name in names(text)]


def python_of(system: System, environments: Path, build: str) -> Path | None:
    """The interpreter for a system; installs it if need be. None: it does not install here."""
    if not system.environment:
        return Path()
    record = race_environments.install(environments, system.environment, build)
    if "error" in record:
        print(f"{system.name} is left out: {record['error']}", flush=True)
        return None
    return race_environments.python_of(environments, system.environment)


def race(system: System, job: Job, minutes: float) -> dict[str, Any]:
    """Run a system under the clock; what an unfinished race has left is removed before.

    A race that has ended and was not scored yet is not repeated.
    """
    path = job.folder / "race.json"
    if path.is_file():
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True)
    print(f"{job.folder.parent.name}: {system.name} runs for {minutes:g} minutes", flush=True)
    clock = Clock(60 * minutes, job.threads, job.folder / LOG)
    error = ""
    try:
        system.race(clock, job)
    except RuntimeError as failure:
        error = hide(str(failure), job)
    lines = system.progress(job)
    config_lines, commands = system.configuration(job)
    record = {
        "system": system.name,
        "task": job.corpus.name,
        "minutes": minutes,
        "threads": job.threads,
        "versions": versions_of(system, job),
        "settings": system.settings,
        "configuration_lines": config_lines,
        "commands": commands,
        "command_lines": command_lines(job),
        "seconds": round(clock.used, 1),
        "peak_bytes": clock.peak_bytes,
        "steps": lines[-1].step if lines else 0,
        "tokens_per_second": tokens_per_second(lines),
        "losses": [[line.seconds, line.step, line.loss] for line in thinned(lines, 40)],
        "snapshots": {name: round(at, 1) for name, at in clock.snapshots.items()},
        "error": error,
    }
    write_json(path, record)
    return record


def versions_of(system: System, job: Job) -> str:
    """The versions of a system and of its torch."""
    if system.environment:
        folder = job.python.parents[2]
        return race_environments.installed(folder)[system.environment]["versions"]
    found = versions()
    return ", ".join(f"{name} {found[name]}" for name in ("python", "heedful", "torch"))


def command_lines(job: Job) -> list[str]:
    """The commands of a race, with local folders replaced by names."""
    lines = timed_lines(job.folder / LOG)
    found = [hide(text[2:], job) for _, text in lines if text.startswith("$ ")]
    # The programs by their names: `python`, `eole`.
    return [" ".join([Path(text.split(" ", 1)[0]).name, *text.split(" ", 1)[1:]]) for text in found]


def hide(text: str, job: Job) -> str:
    """A text with names in place of local folders."""
    hidden = {job.folder: ".", job.corpus.folder: "TEXT", job.data: "DATA"}
    for folder, name in hidden.items():
        text = text.replace(str(folder), name)
    return text


def score(
    task: Task,
    system: System,
    job: Job,
    parts: Parts,
    record: dict[str, Any],
    points: int,
) -> None:
    """Evaluate checkpoints of a race on the test set, and write the result of the system."""
    found = [name for name in record["snapshots"] if (job.folder / SNAPSHOTS / name).is_dir()]
    if not found:
        record["error"] = record["error"] or "no checkpoint within the time"
        print(f"{system.name}: {record['error']}", flush=True)
        write_json(job.folder / RESULT, record)
        return
    record["model"] = best = system.best(job, sorted(found))
    references = read_lines(job.corpus.file("test", False))
    record["scores"] = {}
    early = [name for name in found if record["snapshots"][name] <= 15 * record["minutes"]]
    quarter = sorted(early)[-1:]  # the last one of the first quarter, which the page shows
    for name in dict.fromkeys([*thinned(sorted(found), points), *quarter, best]):
        outputs, seconds = evaluate(system, job, name)
        if len(outputs) != len(references):
            record["error"] = f"{len(outputs)} outputs of {len(references)} lines"
            continue
        record["scores"][name] = task.score(outputs, references, job.corpus)
        if name == best:
            record["decode_seconds"] = round(seconds, 1)
            record["sentences_per_second"] = len(references) / seconds
            record["parts"] = {
                part: task.score(outputs[first:end], references[first:end], job.corpus)
                for part, (first, end) in parts.items()
            }
        shown = ", ".join(f"{key} {value:.3f}" for key, value in record["scores"][name].items())
        print(f"{system.name} {name}: {shown}", flush=True)
    write_json(job.folder / RESULT, record)


def evaluate(system: System, job: Job, name: str) -> tuple[list[str], float]:
    """The outputs of a snapshot for the test set, and the seconds of the whole command."""
    out = job.folder / "outputs" / f"{name}.txt"
    source = job.corpus.file("test", True)
    timing = out.with_suffix(".seconds")
    if timing.is_file():
        return read_lines(out), float(timing.read_text())
    out.parent.mkdir(exist_ok=True)
    command = system.decode(job, job.folder / SNAPSHOTS / name, source, out)
    began = time.monotonic()
    through = (source, out) if system.is_filter else None
    process = start(command, job.folder, job.threads, through)
    try:
        text = "".join(process.communicate(timeout=DECODE_LIMIT)[1 if through else 0])
    except subprocess.TimeoutExpired:
        text = f"stopped after {DECODE_LIMIT:.0f} seconds"
    finally:
        stop(process)
    seconds = time.monotonic() - began
    if process.returncode or not out.is_file():
        print(race_environments.last_line(text), flush=True)
        return [], seconds
    timing.write_text(f"{seconds:.2f}\n")
    return read_lines(out), seconds


def read_lines(path: Path) -> list[str]:
    """The lines of a file; other line breaks than \\n are part of a line."""
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def thinned(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the items, evenly chosen, with the last one."""
    if len(items) <= most or most == 1:
        return list(items[-most:])
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a record as a whole."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    main()
