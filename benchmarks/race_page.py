"""The page of the race, written from the results in a folder, with a chart of scores over time."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import race_environments
from common import command_line, facts, folded, table, write_results
from heedful.extras import import_matplotlib

Record = dict[str, Any]
TITLES = {
    "multi30k": "Multi30k, English to German",
    "libreoffice": "LibreOffice, English to German",
}
OURS = "heedful"
METRIC = "bleu"
DASH = "–"


def write_page(runs: Path, environments: Path, arguments: argparse.Namespace) -> None:
    """Write race.md, race.json and race.svg from all races in `runs`."""
    races = read_races(runs)
    if not races:
        raise SystemExit(f"{runs} holds no finished race: give --systems and --data")
    draw_chart(races, arguments.results / "race.svg")
    failed = {
        name: record["error"]
        for name, record in race_environments.installed(environments).items()
        if "error" in record
    }
    sections = [INTRODUCTION, *[arguments.note] * bool(arguments.note)]
    sections += ["![BLEU of the test set over minutes](race.svg)"]
    for name, records in races.items():
        sections += race_sections(name, records)
    if failed:
        sections += ["## Not installed", facts(dict(failed))]
    data = {"races": races, "not_installed": failed, "note": arguments.note}
    hidden = {arguments.data: "DATA", arguments.runs: "RUNS", arguments.environments: "FOLDER"}
    write_results(
        "race",
        "After an evening: heedful and other tools with the same text and time",
        sections,
        data,
        directory=arguments.results,
        command=command_line(hidden),
        packages=("sacrebleu", "psutil"),
        made_on="Scored",
    )


INTRODUCTION = (
    "Each system trains alone on the same cores and is stopped by the same clock, which counts "
    "all that its user waits for: vocabularies, a dry run, training, its own validation. "
    "Afterwards the checkpoints that were there in time translate the test set, by the tool's own "
    "command with beams of 5; BLEU and chrF are those of sacreBLEU by the same call. "
    "The table has the model that the tool itself selects. For each peer there are two "
    "configurations: the documented one for small data, and `-tiny`, in the size of heedful's "
    "recipe; a table has those that were raced. Tokens are those of each tool's own vocabulary. "
    "Sentences a second include the start of the command."
)


def read_races(runs: Path) -> dict[str, list[Record]]:
    """The finished systems of each race, the best first."""
    races: dict[str, list[Record]] = {}
    for path in sorted(runs.glob("*/*/result.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        races.setdefault(path.parents[1].name, []).append(record)
    for records in races.values():
        records.sort(key=lambda record: -final(record).get(METRIC, -1.0))
    return races


def final(record: Record) -> dict[str, float]:
    """The scores of the model that the tool has selected; empty without one."""
    scores: dict[str, float] = record.get("scores", {}).get(record.get("model"), {})
    return scores


def curve(record: Record) -> list[tuple[float, float]]:
    """Minutes and score of the checkpoints, by time."""
    scored = record.get("scores", {})
    points = [(record["snapshots"][name] / 60, scored[name][METRIC]) for name in scored]
    return sorted(points)


def minutes_to(record: Record, score: float) -> float | None:
    """Minutes until a checkpoint has at least this score; None: none has."""
    return next((minutes for minutes, value in curve(record) if value >= score), None)


def race_sections(name: str, records: Sequence[Record]) -> list[str]:
    """The sections of one race."""
    first = records[0]
    ours = next((record for record in records if record["system"] == OURS), None)
    cores = "one thread" if first["threads"] == 1 else f"{first['threads']} threads"
    title = TITLES.get(first["task"], first["task"])
    rows = [summary(record, ours) for record in records]
    header = ["", "BLEU", "chrF", "best after", "heedful has that after", "steps"]
    header += [
        "target tokens/s",
        "peak memory",
        "sentences/s",
        "lines of configuration",
        "commands",
    ]
    sections = [f"## {title}: {first['minutes']:g} minutes, {cores}", table(header, rows)]
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


def summary(record: Record, ours: Record | None) -> list[object]:
    """The row of a system."""
    scores, points = final(record), curve(record)
    best = max((score for _, score in points), default=None)
    reached = None if best is None else minutes_to(record, best)
    overtaken = None if ours is None or best is None else minutes_to(ours, best)
    rate, speed = record["tokens_per_second"], record.get("sentences_per_second")
    return [
        record["system"],
        *(f"{scores[metric]:.1f}" if scores else DASH for metric in ("bleu", "chrf")),
        DASH if reached is None else f"{reached:.1f} min",
        DASH if record["system"] == OURS or overtaken is None else f"{overtaken:.1f} min",
        f"{record['steps']:,}",
        DASH if rate is None else f"{rate:,.0f}",
        f"{record['peak_bytes'] / 2**20:,.0f} MiB",
        DASH if speed is None else f"{speed:.1f}",
        record["configuration_lines"],
        record["commands"],
    ]


def parts_table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """The scores of the parts of a test set."""
    with_parts = [record for record in records if record.get("parts")]
    names = list(with_parts[0]["parts"])
    header = ["", *(f"{part}, {metric}" for part in names for metric in ("BLEU", "chrF"))]
    rows = [
        [
            record["system"],
            *(f"{record['parts'][part][key]:.1f}" for part in names for key in ("bleu", "chrf")),
        ]
        for record in with_parts
    ]
    return header, rows


def draw_chart(races: dict[str, list[Record]], path: Path) -> None:
    """A chart for each race: BLEU over minutes, with a line of the same color for each system."""
    import_matplotlib()
    from matplotlib.figure import Figure

    systems = sorted({record["system"] for records in races.values() for record in records})
    columns = min(2, len(races))
    rows = -(-len(races) // columns)
    figure = Figure(figsize=(5.5 * columns, 3.6 * rows), layout="constrained", facecolor="white")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, records in zip(grid.flat, races.values(), strict=False):
        first = records[0]
        cores = "one thread" if first["threads"] == 1 else f"{first['threads']} threads"
        title = TITLES.get(first["task"], first["task"])
        axes.set_title(f"{title}: {first['minutes']:g} minutes, {cores}", fontsize=10)
        for record in records:
            points = curve(record)
            if points:
                style = {"color": f"C{systems.index(record['system'])}", "marker": "o"}
                width = 2.2 if record["system"] == OURS else 1.4
                axes.plot(
                    *zip(*points, strict=True), label=record["system"], lw=width, ms=3, **style
                )
        axes.set_xlim(0, first["minutes"])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("minutes")
        axes.set_ylabel("BLEU of the test set")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    for axes in list(grid.flat)[len(races) :]:
        axes.remove()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
