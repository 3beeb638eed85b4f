"""Results of a verification: as a table, as text and as JSON."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.markup import escape
from rich.table import Column, Table

Status = Literal["passed", "failed", "skipped"]
COLORS: dict[Status, str] = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


@dataclass(frozen=True)
class CheckResult:
    """The result of a check.

    Attributes:
        name: the name of the check.
        status: passed, failed, or skipped (the check does not apply or is not possible).
        detail: the observation, or the reason for skipping.
        hint: usual causes of this failure; empty unless failed.
        error: the number that was compared with the tolerance; None for checks without one.
        requirement: the property that was checked.
    """

    name: str
    status: Status
    detail: str
    hint: str = ""
    error: float | None = None
    requirement: str = ""


@dataclass(frozen=True)
class Report:
    """The results of all checks, in the order in which they ran.

    Attributes:
        length: tokens of the longest texts of most checks.
        long_length: tokens of the texts with distant tokens; None: no check needed any.
    """

    results: tuple[CheckResult, ...]
    length: int
    long_length: int | None

    @property
    def ok(self) -> bool:
        """True if no check failed. Skipped checks are not failures."""
        return not self.failed

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        """The checks that failed."""
        return tuple(result for result in self.results if result.status == "failed")

    def __getitem__(self, name: str) -> CheckResult:
        return {result.name: result for result in self.results}[name]

    def __iter__(self) -> Iterator[CheckResult]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def summary(self) -> str:
        """The numbers of checks that passed, failed and were skipped, as text."""
        counts = Counter(result.status for result in self.results)
        return ", ".join(f"{counts[status]} {status}" for status in COLORS)

    def lengths(self) -> str:
        """The tested lengths, as text."""
        more = f"; distant tokens in texts of {self.long_length}" if self.long_length else ""
        return f"tested with texts of up to {self.length} tokens{more}"

    def table(self) -> Table:
        """A table for the terminal: one row per check, with the hint if it failed."""
        columns = (Column(name, no_wrap=True) for name in ("check", "status"))
        error_column = Column("error", justify="right", no_wrap=True)
        table = Table(
            *columns, error_column, "observation", title=self.summary(), caption=self.lengths()
        )
        for result in self.results:
            observation = escape(result.detail)
            if result.hint:
                observation += f"\n[italic]{escape(result.hint)}[/italic]"
            color = COLORS[result.status]
            status = f"[{color}]{result.status}[/{color}]"
            error = "" if result.error is None else f"{result.error:.1e}"
            table.add_row(result.name, status, error, observation)
        return table

    def __str__(self) -> str:
        lines = []
        for result in self.results:
            lines.append(f"{result.status:<8} {result.name}: {result.detail}")
            if result.hint:
                lines.append(f"{'':<8} {result.hint}")
        return "\n".join([*lines, self.lengths(), self.summary()])

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON, with None for errors that are NaN or infinite."""
        checks = [asdict(result) for result in self.results]
        for row in checks:
            if row["error"] is not None and not math.isfinite(row["error"]):
                row["error"] = None
        lengths = {"length": self.length, "long_length": self.long_length}
        return {"ok": self.ok, **lengths, "checks": checks}
