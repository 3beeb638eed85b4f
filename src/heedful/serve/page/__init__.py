"""The web page at `/`: translation, generation, chat, classes and masks, by the server's models.

A browser loads nothing for it but the files of this folder (Content-Security-Policy).
"""

from collections.abc import Mapping
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

router = APIRouter(include_in_schema=False)

_TYPES = {
    "index.html": "text/html",
    "page.css": "text/css",
    "icon.svg": "image/svg+xml",
    **dict.fromkeys(
        ("app.js", "api.js", "elements.js", "texts.js", "tokens.js"), "text/javascript"
    ),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
FILES: Mapping[str, str] = {  # the path of each file on the server, and its name
    "/": "index.html",
    **{f"/page/{name}": name for name in _TYPES if name != "index.html"},
}


def _add_route(path: str, name: str) -> None:
    content = (Path(__file__).parent / name).read_bytes()

    @router.get(path)
    async def file() -> Response:
        return Response(content, media_type=_TYPES[name], headers=_HEADERS)


for _path, _name in FILES.items():
    _add_route(_path, _name)
