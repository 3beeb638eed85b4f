"""Flags that several commands share, and commands whose flags are the fields of dataclasses."""

import inspect
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

import typer

from heedful import pipelines
from heedful.cli.help import IN_OUT
from heedful.errors import UserError
from heedful.options import RUN_TIME, Options, RunTimeOptions

Kind = TypeVar("Kind", bound="pipelines.SavedModel")
SrcLang = Annotated[
    str | None,
    typer.Option(
        "--src-lang",
        metavar="CODE",
        help="Language of the sources, such as en, for a translator that reads several.",
        show_default="the model's, if it has one",
    ),
]
TgtLang = Annotated[
    str | None,
    typer.Option(
        "--tgt-lang",
        metavar="CODE",
        help="Language of the targets, such as de, for a translator with several.",
        show_default="the model's, if it has one",
    ),
]


def complete_recipe(incomplete: str) -> list[str]:
    """Names of shipped recipes, for the completion of a shell."""
    from heedful.recipe_files import shipped_recipes

    return [name for name in shipped_recipes() if name.startswith(incomplete)]


ModelFolder = Annotated[Path, typer.Argument(metavar="MODEL", help="Model directory.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
NewFolder = Annotated[Path, typer.Argument(metavar="OUT", help="New model directory.")]
NewFile = Annotated[Path, typer.Argument(metavar="OUT", help="New file.")]
RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="Recipe file, folder of a run, or name of a shipped recipe.",
        autocompletion=complete_recipe,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        *("--output", "-o"), metavar="FILE", help="Write to this file.", show_default="stdout",
        rich_help_panel=IN_OUT,
    ),
]  # fmt: skip
Truncate = Annotated[
    bool,
    typer.Option("--truncate", help="Truncate texts that are too long.", rich_help_panel=IN_OUT),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=IN_OUT)]
JsonLines = Annotated[
    bool,
    typer.Option(
        "--json", help="Print a line of JSON per text, scores included.", rich_help_panel=IN_OUT
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="DEVICE",
        help=RunTimeOptions.__dataclass_fields__["device"].metadata["help"],
        rich_help_panel=RUN_TIME,
    ),
]


@dataclass(frozen=True)
class RunTime(RunTimeOptions):
    """Flags of every command that runs a model: where and how it runs."""

    def only_eager(self, command: str) -> Self:
        """The same flags with the backend eager; raises UserError if another is given by name."""
        if self.backend not in ("auto", "eager"):
            raise UserError(f"{command} runs eager; leave out --backend {self.backend}")
        return replace(self, backend="eager")

    def open(self, model: Path, kind: type[Kind], command: str, *, many: bool = True) -> Kind:
        """The model, of the kind that the command needs; `many`: for many texts at once."""
        opened = pipelines.load(
            model,
            device=self.device,
            backend=self.backend,
            precision=self.precision,
            threads=self.threads,
            use="throughput" if many else "latency",
            trust_compiled=self.trust_compiled,
        )
        return pipelines.expect(opened, kind, command)


Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing model.")]
PoolingOption = Annotated[
    Literal["mean", "first", "last", "max"] | None,
    typer.Option(
        metavar="mean|first|last|max",
        help="State of a text: of all its tokens, or of one.",
        show_default="that of an imported model of sentence-transformers, else mean",
    ),
]
PromptOption = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="Put this before each text.",
        show_default="that of an imported model of sentence-transformers, else nothing",
    ),
]
PromptNameOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Put the model's prompt of this name there, as query."),
]
NormalizeOption = Annotated[
    bool | None,
    typer.Option(
        "--normalize/--no-normalize",
        help="Divide each vector by its length.",
        show_default="as such a model, else not",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder of the run.",
        show_default="runs/ and the recipe's name",
        rich_help_panel=IN_OUT,
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", help="Print nothing but errors.", rich_help_panel=IN_OUT)
]


_OF_RECIPE = "Settings of the recipe"
RECIPE_KEYS = {  # by the field of `TrainingFlags` that sets it
    "steps": "training.max_steps",
    "epochs": "training.max_epochs",
    "minutes": "training.max_minutes",
    "lr": "training.schedule.learning_rate",
    "batch_tokens": "training.batch_tokens",
    "seed": "training.seed",
    "device": "training.device",
    "precision": "training.precision",
    "init_from": "init_from",
}


def _recipe_flag(name: str, metavar: str, help: str, least: int | None = None) -> Any:
    return typer.Option(
        None,
        f"--{name.replace('_', '-')}",
        metavar=metavar,
        min=least,
        help=f"{help} ({RECIPE_KEYS[name]}).",
        rich_help_panel=_OF_RECIPE,
    )


@dataclass(frozen=True)
class TrainingFlags:
    """Keys of the recipe with a flag of their own, and `--set` for all others."""

    steps: int | None = _recipe_flag("steps", "N", "Optimizer steps at which the run ends", 1)
    epochs: int | None = _recipe_flag("epochs", "N", "Epochs at which the run ends", 1)
    minutes: float | None = _recipe_flag("minutes", "X", "Minutes at which the run ends")
    lr: float | None = _recipe_flag("lr", "X", "Peak learning rate")
    batch_tokens: int | None = _recipe_flag(
        "batch_tokens", "N", "Tokens per batch, padding included", 1
    )
    seed: int | None = _recipe_flag(
        "seed", "N", "Seed of weights, dropout and the order of data", 0
    )
    device: str | None = _recipe_flag("device", "DEVICE", "auto, cpu, cuda, cuda:N or mps")
    precision: str | None = _recipe_flag("precision", "NAME", "auto, fp32, bf16 or fp16")
    init_from: str | None = _recipe_flag("init_from", "MODEL", "Model directory to start from")
    settings: list[str] | None = typer.Option(
        None,
        "--set",
        metavar="KEY=VALUE",
        help="Set any other key, e.g. model.d_model=128; repeatable. heedful recipes show RECIPE "
        "prints all keys.",
        rich_help_panel=_OF_RECIPE,
    )

    @property
    def overrides(self) -> dict[str, Any]:
        """The values of the keys that are set; `--set` wins over the flag of a key.

        Those of flags come last, since a whole section may be set (`--set 'training={seed: 2}'`).
        """
        from heedful.config.keys import flatten
        from heedful.recipe_files import read_settings

        values = {key: getattr(self, name) for name, key in RECIPE_KEYS.items()}
        settings = read_settings(self.settings or ())
        given = flatten(settings)
        flags = {k: v for k, v in values.items() if v is not None and k not in given}
        return settings | flags


assert {field.name for field in fields(TrainingFlags)} == {*RECIPE_KEYS, "settings"}


# Arguments of Python functions that messages name, and their flags.
_FLAGS = {
    **{name: f"--{name}" for name in ("overwrite", "resume", "out", "architecture", "mono")},
    **{name: f"--{name}" for name in ("gpu", "gpus", "memory", "tokens", "utilization")},
    **{name: f"--{name}" for name in ("parallel", "address", "pairs", "tokenizer")},
    **{name: f"--{name}" for name in ("backend", "glossary", "shortlist")},
    "backward_model": "--backward",
    "trust_compiled": "--trust-compiled",
}
# Options of generation that no other word is like; `top_k` is also a key of models.
_OPTION_FLAGS = {
    field.name: field.metadata["flag"] or f"--{field.name.replace('_', '-')}"
    for field in fields(Options)
    if field.metadata["panel"]
}
_NAMES = [name for name in _OPTION_FLAGS if "_" in name and name != "top_k"]
_FLAGS |= {name: _OPTION_FLAGS[name] for name in _NAMES}
_ARGUMENT = re.compile(rf"(?<![\w.=-])({'|'.join(_FLAGS)})=([^\s;,:()]+)")
_KEY = re.compile(
    r"(?<![\w.=-])(?<!--set )((?:data|tokenizer|model|training|evaluation|distillation)\.[\w.]+=)"
)
_WORDS = {
    'too_long="truncate"': "--truncate",
    "first=FIRST and last=LAST": "--tokens FIRST:LAST",
    "backward_model": "--backward",
    "backward_changes": "--backward-set",
    "overrides": "--set",
}
_OPTION = re.compile(  # fields of `Options`: of any name, of such a one, and at the beginning
    rf"\boption ({'|'.join(_OPTION_FLAGS)})\b"
    rf"|(?<![\w.=\"-])({'|'.join(_NAMES)})(?![\w.=\"-])"
    rf"|^({'|'.join(_OPTION_FLAGS)})(?= must be | needs )"
)
_OF_FILE = re.compile(r"\.json\b[^:]*: ")  # a message that names keys of a file of JSON
_WORD = re.compile(rf"(?<![\w.=-])({'|'.join(map(re.escape, _WORDS))})(?![\w.=-])")


def with_flags(message: str) -> str:
    """A message of the library with flags in place of arguments of Python (see `UserError`)."""

    def flag(match: re.Match[str]) -> str:
        name, value = _FLAGS[match[1]], match[2]
        if value in ("True", "False"):
            return name if value == "True" else f"--no-{name[2:]}"
        return f"{name} {value}"

    message = _ARGUMENT.sub(flag, message)
    if not _OF_FILE.search(message):
        message = _OPTION.sub(lambda match: _OPTION_FLAGS[match[match.lastindex or 0]], message)
    message = _WORD.sub(lambda match: _WORDS[match[1]], message)
    return _KEY.sub(r"--set \1", message).replace("--set: --set ", "--set ")


def leave_out(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark fields of a command's options that have no flag in it, and keep their defaults."""

    def mark(command: Callable[..., None]) -> Callable[..., None]:
        vars(command)["left_out"] = names
        return command

    return mark


def flags_of(
    command: Callable[..., None],
) -> tuple[list[inspect.Parameter], dict[str, tuple[Callable[..., Any], list[str]]]]:
    """The parameters of a command, with a flag for each field of those that are dataclasses.

    A parameter `options` is replaced by the flags of `Options`; the command receives a dict of
    those that are on the command line.

    Returns:
        The parameters; and for each that is replaced the function that makes its value, and the
        names of the flags that are passed to it.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind: Any = Options if parameter.name == "options" else parameter.annotation
        if not (isinstance(kind, type) and is_dataclass(kind)):
            parameters.append(parameter)
            continue
        left_out = vars(command).get("left_out", ())
        offered = [field for field in fields(kind) if field.name not in left_out]
        flags = [flag for flag in map(_parameter, offered) if flag is not None]
        make = _given_options if kind is Options else partial(_group, kind)
        groups[parameter.name] = make, [flag.name for flag in flags]
        parameters += flags
    return parameters, groups


def flag_of(option: str) -> str:
    """The flag of a field of `Options`."""
    return _OPTION_FLAGS[option]


def _group(kind: Callable[..., Any], **values: Any) -> Any:
    """A dataclass of options from its flags; those that are not given have their defaults."""
    declared = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    given = {
        name: value
        for name, value in values.items()
        if not declared[name].metadata or value not in (None, [])
    }
    for name in declared.keys() - given.keys():  # those of typer
        if not declared[name].metadata:
            default = declared[name].default
            given[name] = getattr(default, "default", default)
    return kind(**given)


def _given_options(**values: Any) -> dict[str, Any]:
    """The options that are on the command line."""
    options = {name: value for name, value in values.items() if value not in (None, [])}
    if set(options.get("stop", ())) & {"optimal", "beam_full", "heuristic"}:
        raise UserError("--stop is a text that ends the output; the rule is --stop-rule")
    return options


@cache  # several commands offer the same field
def _parameter(field: "Field[Any]") -> inspect.Parameter | None:
    """The parameter that typer turns into a flag; None for a field without a flag.

    The default of a flag of `heedful.options.option` is None.
    """
    kind, default, metadata = field.type, field.default, field.metadata
    if metadata:
        if metadata["panel"] is None:
            return None
        name = metadata["flag"] or f"--{field.name.replace('_', '-')}"
        plain = _plain(kind)
        flag = typer.Option(
            f"{name}/--no-{name[2:]}" if default is True else name,
            help=metadata["help"],
            metavar=metadata["metavar"] or _metavar(kind, plain),
            min=metadata["limits"][0] if metadata["limits"] else None,
            show_default=metadata["shown"] or _default_text(default),
            rich_help_panel=metadata["panel"],
        )
        default, kind = None, Annotated[plain | None, flag]
    only = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(field.name, only, default=default, annotation=kind)


def _default_text(default: Any) -> str | bool:
    """A default in `--help`; False for none."""
    if default is True:
        return "on"
    return False if default is None or default is False or default == () else str(default)


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _plain(kind: Any) -> type:
    """Type of a field's value on the command line: a number, a text, or several texts."""
    first = next(part for part in _members(kind) if part is not type(None))
    if get_origin(first) is Literal or first is Any:
        return str
    if get_origin(first) is Sequence:
        return list[str]
    assert isinstance(first, type)
    return first


def _metavar(kind: Any, plain: Any) -> str | None:
    for part in _members(kind):
        if get_origin(part) is Literal:
            return "|".join(get_args(part))
    if kind is Any:
        return "MODEL|lookup"
    return {int: "N", float: "X", bool: None}.get(plain, "TEXT")
