"""Flags of the verbs that generate text, made of the fields of `heedful.options.Options`."""

import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from functools import wraps
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from heedful.errors import UserError
from heedful.options import Options


def takes_options(*left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb every option that has a flag, but those left out; it gets them as `options`.

    What is not on the command line is not among them.
    """
    offered = [
        option
        for option in fields(Options)
        if option.metadata["flag"] is not None and option.name not in left_out
    ]

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(verb).parameters.values())
        place = next(i for i, parameter in enumerate(own) if parameter.name == "options")
        own[place : place + 1] = map(_parameter, offered)

        @wraps(verb)
        def with_options(**given: Any) -> None:
            asked = {option.name: given.pop(option.name) for option in offered}
            asked = {name: value for name, value in asked.items() if value not in (None, [])}
            if set(asked.get("stop", ())) & {"optimal", "beam_full", "heuristic"}:
                raise UserError("--stop is a text that ends the output; the rule is --stop-rule")
            verb(**given, options=asked)

        vars(with_options)["__signature__"] = inspect.Signature(own)
        with_options.__annotations__ = {each.name: each.annotation for each in own}
        return with_options

    return decorate


def _parameter(option: "Field[Any]") -> inspect.Parameter:
    """The parameter that typer makes a flag of; None: not given."""
    kind = _plain(option.type)
    limits = {"min": option.metadata["limits"][0]} if option.metadata["limits"] else {}
    flag = typer.Option(option.metadata["flag"], help=option.metadata["help"], **limits)
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, flag],
    )


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
