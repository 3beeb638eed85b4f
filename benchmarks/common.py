"""Functions of all benchmarks: machine and versions, alternating timing, and pages of results."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from heedful import __version__
from heedful.deploy.rounds import MAX_ROUNDS, find_fastest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"


def argument_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the arguments of every benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the pages")
    parser.add_argument(
        "--quick", action="store_true", help="a smoke test: figures are meaningless"
    )
    return parser


def gpu_parser(description: str) -> argparse.ArgumentParser:
    """A parser of a benchmark of GPUs; without one it ends in a line that says so."""
    parser = argument_parser(description)
    parser.add_argument("--device", type=_present_device, default="cuda", help="cuda, or cpu")
    return parser


def _present_device(name: str) -> str:
    if torch.device(name).type == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("there is no CUDA device here; try --device cpu --quick")
    return name


def machine() -> dict[str, str]:
    """The processor, its cores, and the threads and instructions that torch uses."""
    return {
        "processor": _processor(),
        "logical cores": str(os.cpu_count()),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "torch threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python, heedful, torch and of those packages that are installed."""
    installed_versions = {"python": platform.python_version(), "heedful": __version__}
    for package in ("torch", *packages):
        try:
            installed_versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed_versions


def installed(package: str) -> bool:
    """True if a package is installed."""
    return package in versions(package)


def command_line(hide: dict[Path | None, str] | None = None) -> str:
    """The command line of this script, with local paths replaced by names such as DATA."""
    names = {str(path): name for path, name in (hide or {}).items() if path is not None}
    words = [names.get(word, word) for word in sys.argv[1:]]
    if "--results" in words:
        at = words.index("--results")
        words[at : at + 2] = []
    script = Path(sys.argv[0]).name
    folder = "experiments" if (ROOT / "experiments" / script).is_file() else "benchmarks"
    return " ".join(["python", f"{folder}/{script}", *words])


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; all columns but the first are aligned to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def folded(summary: str, content: str) -> str:
    """Markdown that is shown once a reader opens it."""
    return f"<details>\n<summary>{summary}</summary>\n\n{content}\n\n</details>"


def facts(content: dict[str, object]) -> str:
    """A Markdown list of names and values."""
    return "\n".join(f"* {name}: {value}" for name, value in content.items())


def write_results(
    name: str,
    title: str,
    sections: Sequence[str],
    data: dict[str, Any],
    *,
    directory: Path,
    command: str,
    packages: Sequence[str] = (),
    made_on: str = "Measured",
) -> None:
    """Write the page `name`.md and the data `name`.json, with command, versions and machine."""
    package_versions, machine_facts = versions(*packages), machine()
    foot = facts(
        {
            "Written by": f"`{command}`",
            "Versions": ", ".join(f"{key} {value}" for key, value in package_versions.items()),
            f"{made_on} on": ", ".join(f"{key} {value}" for key, value in machine_facts.items()),
        }
    )
    page = "\n\n".join([f"# {title}", *sections, "## Command, versions and machine", foot]) + "\n"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.md").write_text(page, encoding="utf-8")
    origin = {"command": command, "versions": package_versions, "machine": machine_facts}
    content = json.dumps(origin | data, indent=2, ensure_ascii=False) + "\n"
    (directory / f"{name}.json").write_text(content, encoding="utf-8")
    print(f"wrote {name}.md and {name}.json")


def interleaved(
    cases: dict[str, Callable[[], float]],
    *,
    rounds: int,
    least: float = 0.0,
    lasting: float = 0.0,
) -> dict[str, list[float]]:
    """Rates of cases in alternating rounds: A B, B A, A B, ...

    A case returns its units of work; its rate is units per second. In alternating rounds a
    temporary slowdown of the machine affects all cases. The first round is not counted.

    Args:
        rounds: minimum number of rounds.
        least: minimum seconds of a case in a round. Shorter cases are repeated; then the first call
            is not counted, since threads of the previous case may still be spinning.
        lasting: minimum seconds of all rounds together.
    """
    rates: dict[str, list[float]] = {name: [] for name in cases}
    order, number, began = list(cases), 0, time.perf_counter()
    while number <= rounds or time.perf_counter() - began < lasting:
        for name in order:
            units, seconds = _timed(cases[name])
            rate = _rate(cases[name], least) if seconds < least else units / seconds
            if number:
                rates[name].append(rate)
        order.reverse()
        number += 1
    return rates


def fastest(
    cases: Sequence[Callable[[], float]], *, rounds: int | None = None, least: float = 0.1
) -> int:
    """The index of the case with the highest rate in the paired rounds of `heedful optimize`.

    It selects the settings of a system. The first call of a case is not counted.

    Args:
        rounds: maximum number of rounds; default: that of `heedful optimize`.
        least: minimum seconds of a case in a round.
    """
    if len(cases) == 1:
        return 0
    for case in cases:
        case()

    def rate(index: int) -> float:
        return _rate(cases[index], least)

    return find_fastest(range(len(cases)), rate, max_rounds=rounds or MAX_ROUNDS).fastest


def _rate(case: Callable[[], float], least: float = 0.0) -> float:
    """Units of work per second, over calls of at least `least` seconds in all."""
    units, seconds = _timed(case)
    while seconds < least:
        more = _timed(case)
        units, seconds = units + more[0], seconds + more[1]
    return units / seconds


def _timed(case: Callable[[], float]) -> tuple[float, float]:
    began = time.perf_counter()
    units = case()
    return units, time.perf_counter() - began


def medians(rates: dict[str, list[float]]) -> dict[str, float]:
    """The median of each case's rates."""
    return {name: statistics.median(case_rates) for name, case_rates in rates.items()}


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios within rounds."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def ratio(ours: Sequence[float] | None, theirs: Sequence[float] | None) -> str:
    """`paired_ratio` as text; a dash if one was not measured."""
    return f"{paired_ratio(ours, theirs):.2f}" if ours and theirs else "–"


def whole(value: float | None) -> str:
    """A rate as a whole number; a dash if it was not measured."""
    return "–" if value is None else f"{value:,.0f}"


def _processor() -> str:
    if platform.system() == "Darwin":
        shown = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"],
            capture_output=True,
            text=True,
            check=False,
        )
        return shown.stdout.strip() or platform.processor()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
