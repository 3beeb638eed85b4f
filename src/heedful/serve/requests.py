"""What the routes share: the models of a request, room for its texts, and its input as a list."""

from collections.abc import Callable
from typing import TypeVar

from fastapi import Request

from heedful.errors import UserError
from heedful.serve.errors import as_http_error
from heedful.serve.guard import info_of
from heedful.serve.models import Registry, ServedModel

Result = TypeVar("Result")


def registry_of(request: Request) -> Registry:
    """The models of the server."""
    registry: Registry = request.app.state.registry
    return registry


def as_list(texts: str | list[str]) -> list[str]:
    """The texts of a field that has one text or a list of them."""
    return [texts] if isinstance(texts, str) else texts


def reserve(request: Request, served: ServedModel, count: int, parameter: str) -> None:
    """Reserve room for all texts of a request until its end; raises HttpError 429.

    Args:
        parameter: that gives their number.
    """
    info = info_of(request.scope)
    info.model = served.name
    info.resources.enter_context(served.slots(count, parameter))


async def encoded(served: ServedModel, function: Callable[[], Result], parameter: str) -> Result:
    """The result of a function on the tokenizer's thread; bad input of a parameter is 400."""
    try:
        return await served.on_tokenizer_thread(function)
    except UserError as error:
        raise as_http_error(error, parameter) from None
