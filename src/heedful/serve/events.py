"""Answers in parts: server-sent events (WHATWG HTML, section 9.2), as OpenAI's API streams them."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import StreamingResponse

from heedful.serve.errors import as_http_error, timed_out
from heedful.serve.guard import RequestInfo, log_failure

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(content: dict[str, Any]) -> str:
    """The line of an event."""
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def event_stream(
    events: AsyncIterator[str], info: RequestInfo, seconds: float, path: str = ""
) -> StreamingResponse:
    """An answer of events, at the end `[DONE]`; an error is an event, too.

    Args:
        events: as of `event`.
        seconds: limit of the request's time, for the error.
        path: the route, on which the form of errors depends.
    """

    async def all_events() -> AsyncIterator[str]:
        """The events until the end, an error, or the time limit."""
        try:
            async with asyncio.timeout_at(info.deadline):
                async for one in events:
                    yield one
        except TimeoutError:
            error = timed_out(f"no more within {seconds:g} seconds", seconds)
            yield event(error.body(path))
        except Exception as error:
            log_failure(info, error)
            yield event(as_http_error(error).body(path))
        yield "data: [DONE]\n\n"

    return StreamingResponse(all_events(), media_type="text/event-stream", headers=_HEADERS)
