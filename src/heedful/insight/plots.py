"""Drawing with matplotlib, for the results of inspection."""

import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from heedful import extras

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_INCHES = 24.0  # of a side of a figure: more is not readable, and takes much memory


def new_figure(columns: int, rows: int, cell: float = 0.4) -> "tuple[Figure, Axes]":
    """A figure for a table of cells, of at most `MAX_INCHES` a side.

    Args:
        cell: inches of a cell.

    Raises:
        UserError: matplotlib is not installed.
    """
    extras.require("report", "a plot")
    extras.import_matplotlib()
    from matplotlib.figure import Figure

    size = [min(MAX_INCHES, 2.5 + cell * count) for count in (columns, rows)]
    figure = Figure(figsize=(size[0], size[1]), layout="constrained")
    return figure, figure.subplots()


def heat_map(
    axes: "Axes",
    values: Any,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    *,
    low: float | None = None,
    high: float | None = None,
    diverging: bool = False,
) -> None:
    """Draw a matrix with the names of its rows and columns.

    Args:
        low, high: values of the ends of the color scale; None: those of the matrix.
        diverging: a scale of two colors around 0.
    """
    if diverging:
        high = float(np.nanmax(np.abs(values), initial=1e-12))
        low = -high
    color = "RdBu_r" if diverging else "Blues"
    image = axes.imshow(values, cmap=color, vmin=low, vmax=high, aspect="auto")
    axes.set_xticks(range(len(columns)), [plain(name) for name in columns], rotation=90)
    axes.set_yticks(range(len(rows)), [plain(name) for name in rows])
    axes.set_title(plain(title))
    axes.figure.colorbar(image, ax=axes)


def plain(name: str) -> str:
    """A token as text that matplotlib draws: no mathematics, no control characters."""
    shown = (" " if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in name)
    return "".join(shown).replace("$", r"\$")
