"""The web page at `/`: translation, generation, chat, classes and masks, by the server's models;
and the page at `/docs`: its routes, with their fields and examples.

A browser loads nothing for it but the files of this folder (Content-Security-Policy).
"""

from collections.abc import Mapping
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

router = APIRouter(include_in_schema=False)

_TYPES = {
    "index.html": "text/html",
    "docs.html": "text/html",
    "page.css": "text/css",
    "icon.svg": "image/svg+xml",
    **dict.fromkeys(
        (
            *("app.js", "api.js", "docs.js", "elements.js", "errors.js", "files.js", "switches.js"),
            *("texts.js", "tips.js", "tokens.js", "words.js"),
        ),
        "text/javascript",
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
    "/docs": "docs.html",
    **{f"/page/{name}": name for name in _TYPES if not name.endswith(".html")},
}


def _add_route(path: str, name: str) -> None:
    content = (Path(__file__).parent / name).read_bytes()

    @router.get(path)
    async def file() -> Response:
        """The content of the file."""
        return Response(content, media_type=_TYPES[name], headers=_HEADERS)


for _path, _name in FILES.items():
    _add_route(_path, _name)
