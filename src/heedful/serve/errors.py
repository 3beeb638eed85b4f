"""Errors of requests, with their HTTP status, in the forms of OpenAI's and LibreTranslate's API."""

from collections.abc import Mapping
from typing import Any, Literal

from heedful.errors import DamagedError, UserError
from heedful.pipelines.inputs import EmptyTextError, LengthError, NoMaskError

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
Code = Literal[
    "invalid_request",  # any other problem of a request
    "invalid_parameter",  # name
    "limit_exceeded",  # name, value, limit
    "context_length_exceeded",  # tokens, limit
    "max_tokens_too_large",  # tokens, new, limit
    "empty_text",
    "no_mask",  # mask
    "no_translator",  # pairs
    "invalid_api_key",
    "not_allowed",
    "not_found",
    "model_not_found",  # name
    "body_too_slow",
    "body_too_large",  # limit
    "rate_limit_exceeded",
    "loading",
    "draining",
    "model_failed",  # name
    "timeout",  # seconds
    "server_error",
]
"""Codes of errors, for programs: OpenAI's own where its API has one. The comments name the values
of each."""
_CODES: Mapping[int, Code] = {
    401: "invalid_api_key",
    403: "not_allowed",
    404: "not_found",
    405: "not_found",
    408: "body_too_slow",
    500: "server_error",
}
LIBRETRANSLATE = (
    "/translate",
    "/translate_file",
    "/detect",
    "/languages",
    "/frontend/settings",
    "/spec",
)  # routes whose errors are a text


class HttpError(Exception):
    """A request that gets no answer.

    Args:
        message: one line: the problem, and what to do.
        code: None: that of the status, or `invalid_request`.
        values: that the code has.
        parameter: the name of the parameter that is wrong.
        retry_after: seconds after which the same request may succeed.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: Code | None = None,
        values: Mapping[str, Any] | None = None,
        parameter: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code: Code = code or _CODES.get(status, "invalid_request")
        self.values = dict(values or {})
        self.parameter = parameter
        self.retry_after = retry_after

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the answer."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})

    def body(self, path: str) -> dict[str, Any]:
        """The answer of a route."""
        details = {"code": self.code, "values": self.values}
        if path in LIBRETRANSLATE:
            return {"error": self.message, **details}
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else _TYPES[400])
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.parameter,
                **details,
            }
        }


def shutting_down() -> HttpError:
    """The error of a request to a server that ends."""
    return HttpError(503, "the server is shutting down", code="draining", retry_after=5)


def timed_out(message: str, seconds: float) -> HttpError:
    """The error of a request that took longer than it may."""
    values = {"seconds": seconds}
    return HttpError(504, message, code="timeout", values=values, retry_after=5)


def over_limit(message: str, name: str, value: int, limit: int) -> HttpError:
    """The error of a number, or of a list's length, above a limit of the server."""
    values = {"name": name, "value": value, "limit": limit}
    return HttpError(400, message, code="limit_exceeded", values=values, parameter=name)


def as_http_error(error: Exception, parameter: str | None = None) -> HttpError:
    """The answer to an error of the work: bad input is 400, everything else 500.

    Args:
        parameter: that the input was given by, if it is known.
    """
    if isinstance(error, HttpError):
        return error
    if isinstance(error, LengthError):
        values = {"tokens": error.num_tokens, "limit": error.longest}
        return HttpError(
            400, error.problem, code="context_length_exceeded", values=values, parameter=parameter
        )
    if isinstance(error, NoMaskError):
        return HttpError(
            400, str(error), code="no_mask", values={"mask": error.mask}, parameter=parameter
        )
    if isinstance(error, UserError) and not isinstance(error, DamagedError):
        code: Code | None = "empty_text" if isinstance(error, EmptyTextError) else None
        return HttpError(400, str(error), code=code, parameter=parameter)
    return HttpError(500, "the server failed; its log has the reason under this request's id")
