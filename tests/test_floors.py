"""The floors of docs/architecture.md: a room imports only from those below its own."""

import ast
from collections.abc import Iterator
from pathlib import Path

import heedful

HOUSE = Path(heedful.__file__).parent
# From the ground up. Rooms of one floor do not know each other.
FLOORS = [
    {"errors"},
    {"plugins", "files"},
    {"config"},
    {"recipe_files"},
    {"parts"},
    {"models"},
    {"zoo", "data"},
    {"tasks"},
    {"generation", "evaluation"},
    {"training", "insight", "inference"},
    {"jobs", "export"},
    {"run"},
    {"cli"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
ENTRANCES = {"__init__", "__main__"}  # what a user imports; they open every door


def imports() -> Iterator[tuple[str, str, str]]:
    """(room, room that it imports from, place), also of imports inside functions."""
    for path in sorted(HOUSE.rglob("*.py")):
        inside = path.relative_to(HOUSE)
        room = inside.parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{inside}:{node.lineno}: imports are by whole names"
                names = [str(node.module)]
            for package, *rest in (name.split(".") for name in names):
                if package == "heedful" and rest:
                    yield room, rest[0], f"{inside}:{node.lineno}"


def test_every_room_has_its_floor() -> None:
    rooms = {path.stem for path in HOUSE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert rooms - ENTRANCES - {"recipes", "__pycache__"} == set(FLOOR)


def test_no_room_imports_from_its_own_floor_or_above() -> None:
    found = list(imports())
    assert len(found) > 100
    upward = [
        f"{place}: {room} imports {other}"
        for room, other, place in found
        if room not in ENTRANCES and room != other and FLOOR[room] <= FLOOR[other]
    ]
    assert upward == []


def test_no_module_imports_a_private_name_of_another() -> None:
    private = []
    for path in sorted(HOUSE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("heedful"):
                private += [
                    f"{path.relative_to(HOUSE)}:{node.lineno}: {alias.name}"
                    for alias in node.names
                    if alias.name.startswith("_") and not alias.name.startswith("__")
                ]
    assert private == []
