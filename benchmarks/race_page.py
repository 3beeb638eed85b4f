"""The page of the race, written from the results in a folder, with charts of scores over time."""

import argparse
import json
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import race_environments
from common import command_line, facts, folded, table, write_results
from heedful.extras import import_matplotlib
from race_tasks import TASKS, Task

Record = dict[str, Any]
Races = dict[str, list[Record]]
OURS = "heedful"
DASH = "–"
NAME = "race"


def write_page(
    runs: Path, environments: Path, arguments: argparse.Namespace, ran: Collection[str] = ()
) -> None:
    """Write race.md, race.json and race.svg: the results in `runs`, and others of the last page.

    Args:
        ran: races that are noted anew; another one in `runs` keeps a note that it has.
    """
    new = read_races(runs)
    if not new:
        raise SystemExit(f"{runs} holds no finished race: give --systems and --data")
    last = last_page(arguments.results)
    races = in_order(merged(last["races"], new))
    noted = {name for name in new if name in ran or not last["notes"].get(name)}
    notes = last["notes"] | (dict.fromkeys(noted, arguments.note) if arguments.note else {})
    notes = {name: notes[name] for name in races if notes.get(name)}
    peers = race_environments.installed(environments)
    failed = {name: error for name, error in last["not_installed"].items() if name not in peers}
    failed |= {name: record["error"] for name, record in peers.items() if "error" in record}
    failed = dict(sorted(failed.items()))
    draw_chart(races, arguments.results / f"{NAME}.svg")
    sections = [INTRODUCTION, "![The metric of each race over minutes](race.svg)"]
    said: set[str] = set()
    for name, records in races.items():
        intro = task_of(records[0]).intro  # that of translators is said once
        texts = ["" if intro in said else intro, notes.get(name, "")]
        sections += race_sections(records, [text for text in texts if text])
        said.add(intro)
    if failed:
        sections += ["## Not installed", facts(dict(failed))]
    hidden = {arguments.data: "DATA", arguments.runs: "RUNS", arguments.environments: "FOLDER"}
    hide_note = {Path(arguments.note): "NOTE"} if arguments.note else {}
    write_results(
        NAME,
        "After an evening: heedful and other tools with the same text and time",
        sections,
        {"races": races, "not_installed": failed, "notes": notes},
        directory=arguments.results,
        command=command_line({**hidden, **hide_note}),
        packages=("sacrebleu", "psutil"),
        made_on="Scored",
    )


INTRODUCTION = (
    "Each system trains alone on the same cores and is stopped by the same clock, which counts "
    "all that its user waits for: vocabularies, a dry run, training, its own validation. "
    "Afterwards the checkpoints that were there in time are evaluated. "
    "The table has the model that the tool itself selects."
)


def last_page(folder: Path) -> dict[str, Any]:
    """`races`, `notes` and `not_installed` of the page that is there."""
    empty: dict[str, Any] = {"races": {}, "notes": {}, "not_installed": {}}
    path = folder / f"{NAME}.json"
    if not path.is_file():
        return empty
    found = json.loads(path.read_text(encoding="utf-8"))
    return {key: found.get(key, value) for key, value in empty.items()}


def read_races(runs: Path) -> Races:
    """The finished systems of each race, the best first."""
    races: Races = {}
    for path in sorted(runs.glob("*/*/result.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        races.setdefault(path.parents[1].name, []).append(record)
    for records in races.values():
        records.sort(key=rank)
    return races


def merged(last: Races, new: Races) -> Races:
    """The systems of both for each race, the best first; a new result replaces the last one."""
    races: Races = {}
    for name in {**last, **new}:
        records = {one["system"]: one for one in (*last.get(name, ()), *new.get(name, ()))}
        races[name] = sorted(records.values(), key=rank)
    return races


def in_order(races: Races) -> Races:
    """The races by task, in the order of the tasks, and by minutes; those of peers alone last."""
    tasks = list(TASKS)

    def key(name: str) -> tuple[int, bool, float, int]:
        first = races[name][0]
        task = tasks.index(first["task"])
        return task, is_of_peers(races[name]), first["minutes"], first["threads"]

    return {name: races[name] for name in sorted(races, key=key)}


def is_of_peers(records: Sequence[Record]) -> bool:
    """True if heedful is not in a race."""
    return all(record["system"] != OURS for record in records)


def task_of(record: Record) -> Task:
    """The task of a record."""
    return TASKS[record["task"]]


def rank(record: Record) -> float:
    """A number that is the lower the better the selected model is."""
    value = final(record).get(task_of(record).metric)
    if value is None:
        return math.inf
    return value if task_of(record).is_loss else -value


def final(record: Record) -> dict[str, float]:
    """The scores of the model that the tool has selected; empty without one."""
    scores: dict[str, float] = record.get("scores", {}).get(record.get("model"), {})
    return scores


def curve(record: Record) -> list[tuple[float, float]]:
    """Minutes and the task's metric of the checkpoints, by time."""
    scored, metric = record.get("scores", {}), task_of(record).metric
    points = [(record["snapshots"][name] / 60, scored[name][metric]) for name in scored]
    return sorted(points)


def minutes_to(record: Record, score: float) -> float | None:
    """Minutes until a checkpoint is as good as this score; None: none is."""
    task = task_of(record)
    found = (minutes for minutes, value in curve(record) if task.is_reached(value, score))
    return next(found, None)


def race_sections(records: Sequence[Record], texts: Sequence[str] = ()) -> list[str]:
    """The sections of one race; `texts`: paragraphs before its table."""
    first, task = records[0], task_of(records[0])
    ours = next((record for record in records if record["system"] == OURS), None)
    labels = [*task.metrics.values()]
    labels += [f"{task.metrics[task.metric]} after {first['minutes'] / 4:g} min"] * is_long(first)
    labels += ["best after, min", "heedful has that after, min", "steps"]
    labels += [task.rate, "peak memory, MiB", *[task.speed] * bool(task.speed)]
    labels += ["lines of configuration", "commands"]
    rows = zip(labels, *(summary(record, ours) for record in records), strict=True)
    systems = ["", *(record["system"] for record in records)]
    sections = [f"## {heading(first)}", *texts, table(systems, rows)]
    if any(len(record.get("parts", {})) > 1 for record in records):
        sections.append(table(*parts_table(records)))
    errors = {r["system"]: r["error"] for r in records if r["error"]}
    if errors:
        sections.append(facts(dict(errors)))
    details = {
        record["system"]: f"{record['versions']}; {record['settings']}; "
        + "; ".join(f"`{line}`" for line in record["command_lines"])
        for record in records
    }
    return [*sections, folded("Versions, settings and commands", facts(dict(details)))]


def heading(record: Record) -> str:
    """The task, the minutes and the threads of a race."""
    threads = record["threads"]
    cores = "one thread" if threads == 1 else f"{threads} threads"
    return f"{task_of(record).title}: {record['minutes']:g} minutes, {cores}"


def is_long(record: Record) -> bool:
    """True for a race of an hour or more: its page has a score of the first quarter too."""
    return bool(record["minutes"] >= 60)


def summary(record: Record, ours: Record | None) -> list[object]:
    """The column of a system."""
    task, scores, points = task_of(record), final(record), curve(record)
    best = task.best([score for _, score in points])
    reached = None if best is None else minutes_to(record, best)
    overtaken = None if ours is None or best is None else minutes_to(ours, best)
    rate, speed = record["tokens_per_second"], record.get("sentences_per_second")
    speeds = [DASH if speed is None else f"{speed:.1f}"] if task.speed else []
    early = [score for minutes, score in points if minutes <= record["minutes"] / 4][-1:]
    quarter = f"{early[0]:.{task.digits}f}" if early else DASH
    return [
        *(f"{scores[metric]:.{task.digits}f}" if scores else DASH for metric in task.metrics),
        *[quarter] * is_long(record),
        DASH if reached is None else f"{reached:.1f}",
        DASH if record["system"] == OURS or overtaken is None else f"{overtaken:.1f}",
        f"{record['steps']:,}",
        DASH if rate is None else f"{rate:,.0f}",
        f"{record['peak_bytes'] / 2**20:,.0f}",
        *speeds,
        record["configuration_lines"],
        record["commands"],
    ]


def parts_table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """The scores of the parts of a test set."""
    task = task_of(records[0])
    with_parts = [record for record in records if record.get("parts")]
    rows = [
        [f"{part}, {label}"]
        + [f"{record['parts'][part][key]:.{task.digits}f}" for record in with_parts]
        for part in with_parts[0]["parts"]
        for key, label in task.metrics.items()
    ]
    return ["", *(record["system"] for record in with_parts)], rows


def charts(races: Races) -> list[list[Record]]:
    """The records of each chart: those of a race, and of shorter ones of its peers alone."""
    found: list[list[Record]] = []
    for records in sorted(races.values(), key=is_of_peers):
        key = records[0]["task"], records[0]["threads"]
        same = [one for one in found if (one[0]["task"], one[0]["threads"]) == key]
        longest = max(same, key=lambda one: one[0]["minutes"], default=None)
        if is_of_peers(records) and longest and longest[0]["minutes"] > records[0]["minutes"]:
            longest += records
        else:
            found.append([*records])
    return found


def draw_chart(races: Races, path: Path) -> None:
    """A chart for each race: its metric over minutes, and one color for each system."""
    import_matplotlib()
    from matplotlib.figure import Figure

    shown_races = charts(races)
    systems = sorted({record["system"] for records in shown_races for record in records})
    systems.sort(key=lambda name: not name.startswith(OURS))
    columns = min(2, len(shown_races))
    rows = -(-len(shown_races) // columns)
    figure = Figure(figsize=(5.5 * columns, 3.6 * rows), layout="constrained", facecolor="white")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, records in zip(grid.flat, shown_races, strict=False):
        task = task_of(records[0])
        axes.set_title(heading(records[0]), fontsize=10)
        shown = [record for record in records if curve(record)]
        # In a chart of their own systems have the first colors.
        raced = [name for name in systems if name in {record["system"] for record in shown}]
        for record in shown:
            style = {"color": f"C{raced.index(record['system'])}", "marker": "o"}
            width = 2.2 if record["system"] == OURS else 1.4
            points = zip(*curve(record), strict=True)
            axes.plot(*points, label=record["system"], lw=width, ms=3, **style)
        axes.set_xlim(0, records[0]["minutes"])
        if not task.is_loss and task.metric != "accuracy":
            axes.set_ylim(bottom=0)
        axes.set_xlabel("minutes")
        axes.set_ylabel(f"{task.metrics[task.metric]} of the test set")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    for axes in list(grid.flat)[len(shown_races) :]:
        axes.remove()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
