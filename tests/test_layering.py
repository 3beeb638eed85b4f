"""The house of docs/architecture.md: a room imports only from floors below, and stays small."""

import ast
from collections.abc import Iterator
from pathlib import Path

import heedful
from heedful.zoo import ARCHITECTURES

HOUSE = Path(heedful.__file__).parent
# From the ground up. Rooms of one floor do not know each other.
FLOORS = [
    {"errors", "lazy", "nested_keys", "progress", "task_keys"},
    {"plugins", "files"},
    {"config", "options"},
    {"recipe_changes"},
    {"recipe_files"},
    {"parts"},
    {"models"},
    {"zoo", "data"},
    {"generation", "evaluation"},
    {"backends"},
    {"training", "insight", "pipelines"},
    {"tasks", "deploy"},
    {"export"},
    {"examples", "run"},
    {"cli"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# Lines of a file, of a function without its docstring, of a file that describes one architecture.
MOST_OF_A_FILE, MOST_OF_A_FUNCTION, MOST_OF_A_PAPER = 450, 60, 150
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


def sizes() -> Iterator[tuple[str, int, int]]:
    """What there is in the house: its name, its lines, and how many it may have."""
    papers = {f"zoo/{name}.py" for name in ARCHITECTURES}
    for path in sorted(HOUSE.rglob("*.py")):
        name, text = str(path.relative_to(HOUSE)), path.read_text(encoding="utf-8")
        yield name, text.count("\n"), MOST_OF_A_PAPER if name in papers else MOST_OF_A_FILE
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                end, first = node.end_lineno, node.body[0]
                assert end is not None
                assert first.end_lineno is not None
                told = ast.get_docstring(node) is not None
                lines = end - node.lineno + 1 - told * (first.end_lineno - first.lineno + 1)
                yield f"{name}: {node.name}", lines, MOST_OF_A_FUNCTION


def test_files_and_functions_are_small() -> None:
    found = list(sizes())
    assert len(found) > 500
    large = [f"{name}: {lines} lines of {most}" for name, lines, most in found if lines > most]
    assert large == []
