"""Registries of tasks, architectures, metrics and schedules by name, and plugins that add some.

A plugin is a Python file that registers new names when it is executed. It is named in a recipe
(`plugins: [file.py]`) or in the environment variable HEEDFUL_PLUGINS (paths separated as in PATH),
or is a module that an installed package declares as an entry point of the group `heedful`.
"""

import difflib
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple, TypeVar

from heedful.errors import UserError

Entry = TypeVar("Entry")
VARIABLE = "HEEDFUL_PLUGINS"
SHIPPED = "shipped:"  # prefix of the name of a file that is shipped with heedful

_loaded: dict[str, str] = {}  # plugin name -> its file or module, from the start of its execution
_loading: list[str] = []  # names of executing plugins, innermost last
_only_read: list[str] = []  # folders whose recipes are read and not run


class Registry:
    """Entries of one kind by name; `package` declares the built-in ones."""

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self.package = package
        self._entries: dict[str, Any] = {}
        self._plugins: dict[str, str] = {}  # entry name -> plugin that registered it

    def declare(self, entries: dict[str, Any]) -> None:
        """Add the built-in entries; a str "module:name" is imported on first access."""
        self._entries = entries | self._entries

    def __call__(self, name: str) -> Callable[[Entry], Entry]:
        """A decorator that registers a class or function as `name`.

        Raises:
            UserError: the name is registered already.
        """

        def register(entry: Entry) -> Entry:
            import_module(self.package)
            if name in self._entries:
                home = self._plugins.get(name, "heedful itself")
                raise UserError(
                    f"the {self.kind} {name} is registered already (by {home}); rename yours"
                )
            self._entries[name] = entry
            if _loading:
                self._plugins[name] = _loading[-1]
            return entry

        return register

    def names(self) -> list[str]:
        """All registered names, including those of plugins."""
        import_module(self.package)
        _load_external_plugins()
        return [*self._entries]

    def get(self, name: str) -> Any:
        """The entry of a name; raises UserError with the nearest name."""
        import_module(self.package)
        if name not in self._entries and name not in self.names():
            raise UserError(f"no {self.kind} {name}; {nearest(str(name), self.names())}")
        entry = self._entries[name]
        if isinstance(entry, str):
            entry = self._entries[name] = resolve_name(entry)
        return entry

    def check(self, name: str, *, more: Collection[str] = ()) -> str:
        """A name in the registry, later plugins included, or in `more`; UserError for another."""
        if name not in more and name not in self.names():
            raise UserError(f"unknown value {name}; {nearest(name, [*more, *self.names()])}")
        return name

    def unresolved(self, name: str) -> Any:
        """The entry of a known name, or "module:name" of a built-in one that is not imported."""
        return self._entries[name]

    def plugin_of(self, name: str) -> str | None:
        """Name of the plugin that registered an entry; None for a built-in one."""
        return self._plugins.get(name)

    def forget(self, plugin: str) -> None:
        """Remove the entries of a plugin that failed."""
        for name in [name for name, home in self._plugins.items() if home == plugin]:
            del self._entries[name], self._plugins[name]


class Metric(NamedTuple):
    """A score of a corpus: `function(outputs, references, language=...)`, and its direction.

    Attributes:
        extra: the extra of heedful whose packages the function imports (`heedful.extras`).
    """

    function: Callable[..., Any]
    higher_is_better: bool
    extra: str | None = None


class Metrics(Registry):
    """Metrics by name, each with its direction."""

    def __call__(  # type: ignore[override]
        self, name: str, *, higher_is_better: bool
    ) -> Callable[[Entry], Entry]:
        """A decorator that registers a function as the metric `name`.

        Raises:
            UserError: the name is registered already.
        """
        register = super().__call__(name)

        def register_function(function: Entry) -> Entry:
            register(Metric(function, higher_is_better))  # type: ignore[arg-type]
            return function

        return register_function


class Architectures(Registry):
    """Architectures by their attribute `name`."""

    def __call__(self, entry: Entry) -> Entry:  # type: ignore[override]
        """Register a `heedful.zoo.architectures.Architecture`.

        Raises:
            UserError: another kind of object, or a name that is registered already.
        """
        kind = resolve_name("heedful.zoo.architectures:Architecture")
        if not isinstance(entry, kind):
            raise UserError(
                f"plugins.architecture takes a {kind.__module__}.{kind.__name__}, "
                f"not {_described(entry)}"
            )
        return super().__call__(entry.name)(entry)


task = Registry("task", "heedful.tasks")
architecture = Architectures("architecture", "heedful.zoo")
metric = Metrics("metric", "heedful.evaluation.metrics")
schedule = Registry("schedule", "heedful.training.schedules")
_REGISTRIES = (task, architecture, metric, schedule)


def load_plugin(path: str | Path) -> None:
    """Execute a plugin's file once per process; `shipped:NAME` is a file of `heedful.examples`.

    A plugin may load other plugins and read registries; loading itself has no effect.

    Raises:
        UserError: no such file; an error in the file (with its line), or a name that is registered
            already; another plugin with the same file name, which models refer to.
    """
    if str(path).startswith(SHIPPED):
        name = str(path)
        module_name = f"heedful.examples.{name.removeprefix(SHIPPED).removesuffix('.py')}"
        _execute(name, name, lambda: import_module(module_name))
        return
    file = Path(path).resolve()
    if _loaded.get(file.name) == str(file):
        return
    if file.name in _loaded:
        raise UserError(f"plugin {path}: {_loaded[file.name]} has the same name; rename one")
    if not file.is_file():
        raise UserError(f"plugin {path}: no such file; plugins are Python files")
    spec = spec_from_file_location(f"heedful_plugin_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UserError(f"plugin {path} is not a Python file; its name must end in .py")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    loader = spec.loader
    _execute(file.name, str(file), lambda: loader.exec_module(module))


def load_listed(paths: Iterable[str]) -> None:
    """Load the plugins that a recipe lists; in `not_executed` they must be loaded already.

    Raises UserError as `load_plugin` and `require`.
    """
    for path in paths:
        if _only_read and not path.startswith(SHIPPED):
            require([Path(path).name], _only_read[-1])
        else:
            load_plugin(path)


@contextmanager
def not_executed(folder: Path) -> Iterator[None]:
    """In the block recipes execute no plugins: the run in a folder is only looked at.

    The folder may come from anybody, and its recipe name a file beside it.
    """
    _only_read.append(str(folder))
    try:
        yield
    finally:
        _only_read.pop()


def require(names: Iterable[str], where: str) -> None:
    """Check that the plugins that a model needs are loaded; executes none of them.

    Raises:
        UserError: a plugin that is not loaded, with the way to load it.
    """
    for name in names:
        if name not in _loaded:
            _load_external_plugins()
        if name not in _loaded:
            raise UserError(
                f"{where} needs the plugin {name}, which is not loaded: set {VARIABLE} to its "
                "file, or call heedful.plugins.load_plugin"
            )


def nearest(key: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the nearest known one, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"


@cache
def _load_external_plugins() -> None:
    for path in os.environ.get(VARIABLE, "").split(os.pathsep):
        if path:
            load_plugin(path)
    for point in entry_points(group="heedful"):
        _execute(point.name, point.value, point.load)


def _execute(name: str, home: str, run: Callable[[], object]) -> None:
    """Run a plugin unless it has run or is running; plugins may read registries recursively."""
    if name in _loaded:
        return
    _loaded[name] = home
    _loading.append(name)
    try:
        run()
    except BaseException as error:
        del _loaded[name]
        for registry in _REGISTRIES:
            registry.forget(name)
        if not isinstance(error, Exception):
            raise
        raise UserError(f"plugin {home}{_line_of(error, home)}: {_reason(error)}") from error
    finally:
        _loading.pop()


def _described(entry: object) -> str:
    """A value in an error message: a class by its name, an object by its type."""
    return f"the class {entry.__name__}" if isinstance(entry, type) else f"a {type(entry).__name__}"


def _line_of(error: Exception, file: str) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    if isinstance(error, SyntaxError):
        lines.append(error.lineno)
    return f", line {lines[-1]}" if lines else ""


def _reason(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
