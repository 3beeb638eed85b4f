"""What a verification found: one result a check, as a table, as text and as JSON."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.markup import escape
from rich.table import Column, Table

Status = Literal["passed", "failed", "skipped"]
COLOURS: dict[Status, str] = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


@dataclass(frozen=True)
class CheckResult:
    """One check of one net.

    Attributes:
        name: the check.
        status: skipped where the check does not apply or could not be made, never passed then.
        detail: what was seen, or why the check was skipped.
        hint: what such a failure usually means and where to look; empty unless it failed.
        error: the number that was held against the tolerance, where there is one.
        holds: what the check asks for.
    """

    name: str
    status: Status
    detail: str
    hint: str = ""
    error: float | None = None
    holds: str = ""


@dataclass(frozen=True)
class Report:
    """The results of all checks, in the order in which they ran."""

    results: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        """Nothing failed. Skipped checks are no failures, but nothing is known of them."""
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
        """How many checks passed, failed and were skipped."""
        counts = Counter(result.status for result in self.results)
        return ", ".join(f"{counts[status]} {status}" for status in COLOURS)

    def table(self) -> Table:
        """For a terminal: a row a check, the hint below what was seen where it failed."""
        columns = (Column(name, no_wrap=True) for name in ("check", "status"))
        error_column = Column("error", justify="right", no_wrap=True)
        table = Table(*columns, error_column, "what was seen", title=self.summary())
        for result in self.results:
            seen = escape(result.detail)
            if result.hint:
                seen += f"\n[italic]{escape(result.hint)}[/italic]"
            colour = COLOURS[result.status]
            status = f"[{colour}]{result.status}[/{colour}]"
            error = "" if result.error is None else f"{result.error:.1e}"
            table.add_row(result.name, status, error, seen)
        return table

    def __str__(self) -> str:
        lines = []
        for result in self.results:
            lines.append(f"{result.status:<8} {result.name}: {result.detail}")
            if result.hint:
                lines.append(f"{'':<8} {result.hint}")
        return "\n".join([*lines, self.summary()])

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; an error that is not finite is None, as JSON has no such number."""
        checks = [asdict(result) for result in self.results]
        for row in checks:
            if row["error"] is not None and not math.isfinite(row["error"]):
                row["error"] = None
        return {"ok": self.ok, "checks": checks}
