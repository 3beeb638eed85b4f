"""The ASGI application: routes over models, behind the guard."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from heedful import __version__
from heedful.errors import UserError
from heedful.serve import admin, documents, encoders, openai, page, translating
from heedful.serve.errors import LIBRETRANSLATE, HttpError, as_http_error
from heedful.serve.guard import Guard, info_of, log_failure
from heedful.serve.keys import Keys
from heedful.serve.models import Registry

_DESCRIPTION = (
    "Models of heedful over HTTP, for clients of OpenAI's and LibreTranslate's APIs. Parameters "
    "that are unknown or not supported are refused with 400; none is ignored."
)
_REFUSED = "`error` has one line for people, and a `code` and its `values` for programs."


def create_app(registry: Registry, keys: Keys) -> Any:
    """The ASGI application of a registry's models.

    `app.state.guard` of the FastAPI application inside has the switch of draining.
    """
    routes = FastAPI(
        title="heedful",
        version=__version__,
        description=_DESCRIPTION,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's own pages load scripts from another host
        redoc_url=None,
        responses={"4XX": {"description": _REFUSED}},
    )
    for module in (openai, translating, documents, encoders, admin, page):
        routes.include_router(module.router)
    routes.add_exception_handler(HttpError, _answer_http_error)
    routes.add_exception_handler(RequestValidationError, _answer_invalid)
    routes.add_exception_handler(HTTPException, _answer_unknown)
    routes.add_exception_handler(UserError, _answer_failure)
    routes.add_exception_handler(Exception, _answer_failure)
    guard = Guard(routes, registry.settings, keys, registry.metrics)
    routes.state.registry, routes.state.guard = registry, guard
    if not registry.settings.cors:
        return guard
    return CORSMiddleware(
        guard,
        allow_origins=list(registry.settings.cors),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],  # OpenAI's client for JavaScript adds several of its own
        expose_headers=["Retry-After", "X-Request-ID"],
    )


async def _answer_http_error(request: Request, error: Any) -> Response:
    log_failure(info_of(request.scope), error)
    return JSONResponse(error.body(request.url.path), error.status, dict(error.headers))


async def _answer_invalid(request: Request, error: Any) -> Response:
    """One line for a body that has not the declared form."""
    first = _most_specific(error.errors())
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        message, name = f"the body is not JSON: {first['ctx']['error']}", None
    else:
        message = first["msg"][:1].lower() + first["msg"][1:]
        name = where[0] if where else None
        if first["type"] == "missing" and name and request.url.path in LIBRETRANSLATE:
            message = f"Invalid request: missing {name} parameter"
        elif first["type"] == "extra_forbidden":
            message = f"{where[-1][:100]!r} is unknown, or not supported"
        elif name:
            if first["type"] == "missing" and len(where) > 1:
                message = f"the field {where[-1]!r} is required in it"
            numbers = [part for part in first["loc"] if isinstance(part, int)]
            item = "".join(f"[{number}]" for number in numbers)
            message = f"{name[:100]}{item}: {message}"
        else:
            message = f"the body: {message}; send JSON, as application/json"
    parameter = name and name[:100]
    answer = HttpError(
        400,
        message,
        code="invalid_parameter" if parameter else None,
        values={"name": parameter} if parameter else None,
        parameter=parameter,
    )
    return JSONResponse(answer.body(request.url.path), 400)


def _most_specific(errors: Any) -> Any:
    """The most specific error of the first bad field of a body.

    A field of several types has one error for each type. The deepest one is taken, and among these
    preferably one that is not about the type itself.
    """
    own = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    types = ("string_type", "list_type", "int_type")
    return max(own, key=lambda error: (len(error["loc"]), error["type"] not in types))


async def _answer_unknown(request: Request, error: Any) -> Response:
    """Unknown routes and methods."""
    message = {
        400: "the body is not JSON in UTF-8",  # or has numbers of thousands of digits
        404: "no such route; /docs lists them",
        405: f"this route has no method {request.method}; /docs lists them",
    }.get(error.status_code, str(error.detail))
    answer = HttpError(error.status_code, message)
    return JSONResponse(answer.body(request.url.path), error.status_code, error.headers)


async def _answer_failure(request: Request, error: Any) -> Response:
    answer = as_http_error(error)
    return JSONResponse(answer.body(request.url.path), answer.status)
