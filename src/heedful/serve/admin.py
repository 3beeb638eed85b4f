"""Routes about the server itself: health, metrics, and the replacement of models."""

import logging
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from heedful.errors import UserError
from heedful.pipelines import SavedModel
from heedful.serve.bodies import ReloadBody
from heedful.serve.errors import HttpError, shutting_down
from heedful.serve.guard import info_of
from heedful.serve.requests import registry_of

_log = logging.getLogger("heedful.serve")
router = APIRouter(tags=["Server"])


@router.head("/health/live", include_in_schema=False)
@router.get("/health/live")
async def live() -> dict[str, str]:
    """The process answers."""
    return {"status": "live"}


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """The check of `/health/ready`, under the name that clients of LibreTranslate call."""
    await ready(request)
    return JSONResponse({"status": "ok"})


@router.head("/health/ready", include_in_schema=False)
@router.get("/health/ready")
async def ready(request: Request) -> Response:
    """Every model reads a token; 503 while models are loaded, after a failure, and while the
    server shuts down."""
    registry = registry_of(request)
    if request.app.state.guard.is_draining:
        raise shutting_down()
    registry.check_loaded()
    for name in list(registry.models):
        await registry.models[name].probe()  # a model may be replaced while others are asked
    return JSONResponse({"status": "ready", "models": list(registry.models)})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Counts in the text format of Prometheus."""
    registry = registry_of(request)
    num_texts = {name: served.num_texts for name, served in registry.models.items()}
    content = registry.metrics.exposition(num_texts)
    return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.post("/admin/reload")
async def reload(body: ReloadBody, request: Request) -> dict[str, Any]:
    """Open a model, or all, again from the directory; needs a key of the keys file's admins.

    Until the new one is open the former one is served, and requests in progress end with it. One
    that cannot be opened does not keep others from being replaced.
    """
    registry = registry_of(request)
    if info_of(request.scope).role != "admin":
        raise HttpError(403, "this needs a key that the keys file (--keys) lists as `admin KEY`")
    if body.model is not None:
        registry.get(body.model, [SavedModel], "")
    names = list(registry.directories) if body.model is None else [body.model]
    try:
        await registry.replace(names)
    except UserError as error:
        _log.error("not replaced: %s", error)
        raise HttpError(409, registry.without_paths(str(error))) from None
    return {"reloaded": names}
