"""Errors of requests, with their HTTP status, in the forms of OpenAI's and LibreTranslate's API."""

from collections.abc import Mapping
from typing import Any

from heedful.errors import UserError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}
LIBRETRANSLATE = ("/translate", "/detect", "/languages")  # routes whose errors are a text


class HttpError(Exception):
    """A request that gets no answer.

    Args:
        message: one line: the problem, and what to do.
        parameter: the name of the parameter that is wrong.
        retry_after: seconds after which the same request may succeed.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        parameter: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.parameter = parameter
        self.retry_after = retry_after

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the answer."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})

    def body(self, path: str) -> dict[str, Any]:
        """The answer of a route."""
        if path in LIBRETRANSLATE:
            return {"error": self.message}
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else _TYPES[400])
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.parameter,
                "code": self.status,
            }
        }


def as_http_error(error: Exception) -> HttpError:
    """The answer to an error of the work: bad input is 400, everything else 500."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, UserError):
        return HttpError(400, str(error))
    return HttpError(500, "the server failed; its log has the reason under this request's id")
