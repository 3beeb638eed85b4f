"""Flags: those that several verbs have, and verbs whose flags are the fields of dataclasses."""

import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import Field, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from heedful.errors import UserError
from heedful.options import Options

ModelFolder = Annotated[Path, typer.Argument(help="A model directory.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Where to write. Default: stdout.")
]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
NewFolder = Annotated[Path, typer.Argument(help="The new model directory.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace a model that is there already.")
]
RecipeName = Annotated[
    str, typer.Argument(help="A recipe file, a run's folder, or a shipped recipe's name.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override one key, e.g. training.max_steps=500."
    ),
]
RunFolder = Annotated[
    Path | None, typer.Option(help="Folder of the run. Default: in runs/, named by the recipe.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonLines = Annotated[
    bool, typer.Option("--json", help="A line of JSON for each text, with scores.")
]


def spread(*left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb a flag for each field of its parameters that are dataclasses.

    Its parameter `options` has those of `Options`; the verb gets a dict of what is given of them.

    Args:
        left_out: fields that are no flags of this verb.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        own: list[inspect.Parameter] = []
        groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
        for parameter in inspect.signature(verb).parameters.values():
            kind: Any = Options if parameter.name == "options" else parameter.annotation
            if not (isinstance(kind, type) and is_dataclass(kind)):
                own.append(parameter)
                continue
            offered = [field for field in fields(kind) if field.name not in left_out]
            flags = [flag for flag in map(_parameter, offered) if flag is not None]
            fixed = {  # what is not asked for is as where it would not be given
                field.name: getattr(field.default, "default", field.default)
                for field in fields(kind)
                if field.name in left_out
            }
            make = _asked if kind is Options else partial(kind, **fixed)
            groups[parameter.name] = make, [flag.name for flag in flags]
            own += flags

        @wraps(verb)
        def run(**given: Any) -> None:
            for name, (make, flags) in groups.items():
                given[name] = make(**{flag: given.pop(flag) for flag in flags})
            verb(**given)

        vars(run)["__signature__"] = inspect.Signature(own)
        run.__annotations__ = {each.name: each.annotation for each in own}
        return run

    return decorate


def _asked(**values: Any) -> dict[str, Any]:
    """The options that are on the command line."""
    asked = {name: value for name, value in values.items() if value not in (None, [])}
    if set(asked.get("stop", ())) & {"optimal", "beam_full", "heuristic"}:
        raise UserError("--stop is a text that ends the output; the rule is --stop-rule")
    return asked


def _parameter(field: "Field[Any]") -> inspect.Parameter | None:
    """What typer makes a flag of; None: the field has none. Options that are not given are None."""
    kind, default, told = field.type, field.default, field.metadata
    if told:
        if told["flag"] is None:
            return None
        limits = {"min": told["limits"][0]} if told["limits"] else {}
        flag, default = typer.Option(told["flag"], help=told["help"], **limits), None
        kind = Annotated[_plain(kind) | None, flag]
    only = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(field.name, only, default=default, annotation=kind)


def _plain(kind: Any) -> type:
    """What the command line gives for a field: a number, a text, or several texts."""
    parts = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    first = next(part for part in parts if part is not type(None))
    if get_origin(first) is Literal or first is Any:
        return str
    if get_origin(first) is Sequence:
        return list[str]
    assert isinstance(first, type)
    return first
