"""The layers of docs/architecture.md: a package imports only from layers below, without cycles."""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import heedful
from heedful.zoo import ARCHITECTURES

SOURCE = Path(heedful.__file__).parent
# From the lowest up. Packages (and single files) of one layer do not import each other.
LAYERS = [
    {"errors", "progress", "task_keys"},
    {"extras", "files", "hardware", "openmp", "option_ranges", "plugins", "processes"},
    {"config", "options"},
    {"recipe_changes"},
    {"recipe_files"},
    {"kernels"},
    {"parts"},
    {"models"},
    {"zoo", "data"},
    {"fidelity", "generation", "evaluation"},
    {"documents"},
    {"backends"},
    {"training", "pipelines"},
    {"bulk", "cost", "tasks", "deploy", "insight"},
    {"export", "harness", "serve"},
    {"dry_run", "examples", "plan", "run", "run_scales"},
    {"adaptation", "back_translation"},
    {"cli"},
]
LAYER = {package: number for number, packages in enumerate(LAYERS) for package in packages}
# Modules that may import each other, with the reason. (importing module, imported module).
CYCLES_ALLOWED: dict[tuple[str, str], str] = {}
# Lines of a file, of a function without its docstring, of a file that describes one architecture.
MAX_FILE, MAX_FUNCTION, MAX_PAPER = 450, 60, 200
ENTRY_POINTS = {"__init__", "__main__"}  # the public names, of any layer


def module_name(path: Path) -> str:
    """`pipelines/base.py` is `pipelines.base`; the file of a package has the package's name."""
    *folders, last = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(folders if last == "__init__" and folders else [*folders, last])


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below, without the bodies of `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        test = child.test if isinstance(child, ast.If) else None
        if not (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"):
            yield child
            yield from run_time_nodes(child)


def imports(path: Path, nodes: Iterator[ast.AST]) -> Iterator[tuple[str, int]]:
    """Modules and names of heedful (`data.rows`, `data.rows.Rows`) that some nodes import."""
    for node in nodes:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are by whole names"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith("heedful."):
                yield name.removeprefix("heedful."), node.lineno


def imported_modules(path: Path) -> set[str]:
    """Modules that a file imports when it runs, inside functions too.

    A name re-exported by a package (`from heedful.pipelines import load`) counts as the package.
    """
    actual = {name for name, _ in imports(path, run_time_nodes(tree_of(path)))}
    modules = {name if name in MODULES else name.rpartition(".")[0] for name in actual}
    return (modules & set(MODULES)) - {module_name(path)}


def cycle_of(graph: Mapping[str, set[str]]) -> list[str]:
    """The modules of one cycle of imports; empty without a cycle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return []


def test_every_package_has_a_layer() -> None:
    packages = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert packages - ENTRY_POINTS - {"recipes", "__pycache__"} == set(LAYER)


def test_the_documentation_has_these_layers() -> None:
    page = Path(__file__).parents[1] / "docs" / "architecture.md"
    _, table = page.read_text(encoding="utf-8").split("| layer | packages |\n|---|---|\n")
    rows = table.partition("\n\n")[0].splitlines()
    assert [set(re.findall(r"`(\w+)`:", row)) for row in reversed(rows)] == LAYERS


def test_no_package_imports_from_its_own_layer_or_above() -> None:
    upward, count = [], 0
    for module, path in MODULES.items():
        package = module.split(".")[0]
        for name, line in imports(path, ast.walk(tree_of(path))):
            other = name.split(".")[0]
            count += other in LAYER
            if package in ENTRY_POINTS or package == other or other not in LAYER:
                continue
            if LAYER[package] <= LAYER[other]:
                upward.append(f"{module}:{line}: {package} imports {other}")
    assert count > 100
    assert upward == []


def test_no_module_is_in_a_cycle_of_imports() -> None:
    graph = {module: imported_modules(path) for module, path in MODULES.items()}
    assert sum(map(len, graph.values())) > 500
    for importer, imported in CYCLES_ALLOWED:
        assert imported in graph[importer], f"{importer} no longer imports {imported}"
        graph[importer].remove(imported)
    assert cycle_of(graph) == []
    for importer, imported in CYCLES_ALLOWED:  # each exception is needed
        assert cycle_of({**graph, importer: graph[importer] | {imported}})


def test_imports_inside_functions_count_and_imports_for_types_do_not() -> None:
    path = SOURCE / "data" / "rows.py"
    text = (
        "from typing import TYPE_CHECKING\n"
        "from heedful import zoo\n"
        "if TYPE_CHECKING:\n    from heedful.data.plans import plan_batches\n"
        "def late():\n    from heedful.data.columns import Columns\n    import heedful.files\n"
    )
    nodes = run_time_nodes(ast.parse(text))
    assert [name for name, _ in imports(path, nodes)] == ["zoo", "data.columns.Columns", "files"]
    assert cycle_of({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})


def test_no_module_imports_a_private_name_of_another() -> None:
    private = [
        f"{module}:{line}: {name}"
        for module, path in MODULES.items()
        for name, line in imports(path, ast.walk(tree_of(path)))
        if name.rpartition(".")[2].startswith("_") and not name.endswith("__")
    ]
    assert private == []


def sizes() -> Iterator[tuple[str, int, int]]:
    """Each file and function: its name, its number of lines, and its limit."""
    papers = {f"zoo.{name}" for name in ARCHITECTURES}
    for module, path in MODULES.items():
        text = path.read_text(encoding="utf-8")
        yield module, text.count("\n"), MAX_PAPER if module in papers else MAX_FILE
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                end, first = node.end_lineno, node.body[0]
                assert end is not None
                assert first.end_lineno is not None
                has_docstring = ast.get_docstring(node) is not None
                docstring = has_docstring * (first.end_lineno - first.lineno + 1)
                yield f"{module}: {node.name}", end - node.lineno + 1 - docstring, MAX_FUNCTION


def test_files_and_functions_are_small() -> None:
    actual = list(sizes())
    assert len(actual) > 500
    large = [f"{name}: {lines} lines of {most}" for name, lines, most in actual if lines > most]
    assert large == []
