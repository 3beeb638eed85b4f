"""`heedful cache`: the prepared data that runs share."""

from datetime import datetime
from typing import TYPE_CHECKING

import typer

from heedful.cli.flags import Json
from heedful.cli.guard import add_command
from heedful.cli.help import new_group
from heedful.cli.shared import note, print_json
from heedful.errors import UserError

if TYPE_CHECKING:
    from heedful.data.prepared import CacheEntry

app = new_group(
    "List and remove prepared data, which runs share (HEEDFUL_CACHE, or ~/.cache/heedful)."
)
_DAY = 24 * 60 * 60  # seconds


def list_entries(json: Json = False) -> None:
    """List prepared data, the last used first: name, size, last use, task and files.

    Example: heedful cache ls
    """
    from rich.filesize import decimal

    from heedful.data.prepared import cache_folder, is_in_use, list_entries

    directory = cache_folder()
    entries = list_entries(directory)
    used = [datetime.fromtimestamp(entry.last_used).astimezone() for entry in entries]
    if json:
        print_json(
            [
                {
                    "name": entry.path.name,
                    "bytes": entry.size,
                    "last_used": when.isoformat(timespec="seconds"),
                    "in_use": is_in_use(entry),
                    **entry.about,
                }
                for entry, when in zip(entries, used, strict=True)
            ]
        )
        return
    for entry, when in zip(entries, used, strict=True):
        last = "in use" if is_in_use(entry) else f"{when:%Y-%m-%d}"
        task, files = entry.about.get("task", "?"), entry.about.get("files", [])
        source = ", ".join(map(str, files)) or "generated"
        typer.echo(f"{entry.path.name}  {decimal(entry.size):>9}  {last:<10}  {task}: {source}")
    total = decimal(sum(entry.size for entry in entries))
    typer.echo(f"{len(entries):,} in {directory}, {total}")


def remove_entries(
    names: list[str] | None = typer.Argument(
        None, metavar="NAME", help="Names in `heedful cache ls`, or their beginnings."
    ),
    everything: bool = typer.Option(False, "--all", help="Remove all prepared data."),
    older_than: float | None = typer.Option(
        None, min=0, metavar="DAYS", help="Remove data that no run has opened for DAYS."
    ),
) -> None:
    """Remove prepared data. Data that a run is using are kept.

    A resumed run prepares removed data again, from the text that they were made of.

    Example: heedful cache rm --older-than 30
    """
    from rich.filesize import decimal

    from heedful.data.prepared import (
        cache_folder,
        list_entries,
        remove_entry,
        remove_temporary_folders,
    )

    if sum((bool(names), everything, older_than is not None)) != 1:
        raise UserError("give names (heedful cache ls), or --older-than DAYS, or --all")
    directory = cache_folder()
    entries = list_entries(directory)
    if names:
        named = [_find_entry(entries, name) for name in names]
        entries = [entry for entry in entries if entry in named]
    elif older_than is not None:
        oldest = datetime.now().timestamp() - older_than * _DAY
        entries = [entry for entry in entries if entry.last_used <= oldest]
    in_use = []
    for entry in entries:
        if remove_entry(entry):
            typer.echo(f"removed {entry.path.name}, {decimal(entry.size)}")
        else:
            in_use.append(entry.path.name)
    remove_temporary_folders(directory)
    if in_use and names:
        raise UserError(f"{', '.join(in_use)}: in use by a run; remove it when the run has ended")
    for name in in_use:
        note(f"{name} is in use by a run, and kept")


def _find_entry(entries: "list[CacheEntry]", name: str) -> "CacheEntry":
    """The only entry whose name begins with `name`."""
    matches = [entry for entry in entries if entry.path.name.startswith(name)]
    if len(matches) != 1:
        problem = "several prepared data have names" if matches else "no prepared data have a name"
        raise UserError(f"{problem} that begins with {name!r}; heedful cache ls shows all names")
    return matches[0]


add_command(app, "ls", list_entries)
add_command(app, "list", list_entries, hidden=True)
add_command(app, "rm", remove_entries)
