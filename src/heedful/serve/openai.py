"""OpenAI's routes: completions, chat completions and embeddings."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from heedful import __version__
from heedful.errors import UserError
from heedful.pipelines import LanguageModel, SavedModel
from heedful.serve.bodies import ChatBody, CompletionBody, EmbeddingBody
from heedful.serve.errors import HttpError, as_http_error, timed_out
from heedful.serve.generating import Choice, Task, chat_task, completion_task
from heedful.serve.guard import RequestInfo, info_of
from heedful.serve.jobs import Job
from heedful.serve.models import Registry, ServedModel

router = APIRouter(prefix="/v1", tags=["OpenAI"])
_LEAST = -9999.0  # in place of -inf, which JSON lacks
_WINDOW = 16  # tokens before one that its text can depend on


def registry_of(request: Request) -> Registry:
    """The models of the server."""
    registry: Registry = request.app.state.registry
    return registry


@router.get("/models")
async def models(request: Request) -> dict[str, Any]:
    """The models of the server."""
    served = registry_of(request).models.values()
    return {"object": "list", "data": [_model_entry(served_model) for served_model in served]}


@router.get("/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """One model of the server."""
    return _model_entry(registry_of(request).get(name, [SavedModel], ""))


@router.post("/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continuations of prompts.

    Defaults: `max_tokens` 16; `temperature` the model's own, or 1. `temperature` 0 is greedy.
    Results with a `seed` are those of `heedful generate` with it.
    """
    served = _language_model(request, body.model, "/v1/completions")
    prompts = body.prompt
    is_list = not isinstance(prompts, str) and not isinstance(prompts[0], int)
    count = (len(prompts) if is_list else 1) * (body.n or 1)
    reserve(request, served, count)
    task = await completion_task(served, body)
    answer = _Answer(request, served, body.stream_options, "cmpl", "text_completion")
    if body.stream:
        return answer.stream(task, _completion_part)
    return await answer.whole(task, _completion_choice)


@router.post("/chat/completions")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answers to a conversation, by the chat template of the model.

    Defaults: `max_completion_tokens` 512, or what the context leaves; `temperature` the model's
    own, or 1. Parts of a message that are no text, tools and other formats are not supported.
    """
    served = _language_model(request, body.model, "/v1/chat/completions")
    reserve(request, served, body.n or 1)
    task = await chat_task(served, body)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    answer = _Answer(request, served, body.stream_options, "chatcmpl", kind)
    if body.stream:
        return answer.stream(task, _chat_part)
    return await answer.whole(task, _chat_choice)


@router.post("/embeddings")
async def embeddings(body: EmbeddingBody, request: Request) -> Response:
    """Vectors of texts: the mean of the last layer's states, as in `heedful embed`."""
    served = registry_of(request).get(body.model, [SavedModel], "")
    info = info_of(request.scope)
    texts: Any = body.input
    texts = [texts] if isinstance(texts, str) or isinstance(texts[0], int) else texts
    width = served.model.config.d_model
    if body.dimensions not in (None, width):
        raise HttpError(400, f"dimensions must be {width}, the model's own", parameter="dimensions")

    reserve(request, served, len(texts))
    rows = await encoded(served, lambda: served.model.encode(texts))
    for number, row in enumerate(rows, 1):
        if not row:
            message = f"text {number} is empty"
            raise HttpError(400, message, code="empty_text", parameter="input")
    run = served.model.vectors
    job = Job("embed", rows, list(map(len, rows)), lambda rows, report: list(run(rows)))
    vectors = await served.run(job)
    info.num_prompt = sum(map(len, rows))
    as_base64 = body.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _base64(vector) if as_base64 else vector.tolist(),
        }
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": info.num_prompt, "total_tokens": info.num_prompt}
    content = {"object": "list", "data": data, "model": served.name, "usage": usage}
    return JSONResponse(content)


def reserve(request: Request, served: ServedModel, count: int) -> None:
    """Reserve room for all texts of a request until its end; raises HttpError 429."""
    info = info_of(request.scope)
    info.model = served.name
    info.resources.enter_context(served.slots(count))


async def encoded(served: ServedModel, function: Any) -> Any:
    """The result of a function on the tokenizer's thread; bad input is 400."""
    try:
        return await served.encode(function)
    except UserError as error:
        raise as_http_error(error) from None


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _model_entry(served: ServedModel) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "heedful",
        "kind": served.model.kind,
        "chat": served.model.tokenizer.chat_template is not None,
    }


def _language_model(request: Request, name: str, route: str) -> ServedModel:
    return registry_of(request).get(name, [LanguageModel], f"{route} needs a language model")


class _Answer:
    """The answer to a completion or chat completion, whole or as a stream of events."""

    def __init__(
        self, request: Request, served: ServedModel, options: Any, prefix: str, kind: str
    ) -> None:
        self.info: RequestInfo = info_of(request.scope)
        self.served = served
        self.with_usage = options is not None and options.include_usage
        self.id = f"{prefix}-{self.info.id}"
        self.object = kind
        self.created = int(time.time())

    async def whole(self, task: Task, part: Any) -> Response:
        """All outputs, when they have ended."""
        choices = await task.new_choices()
        async with aclosing(task.pieces(streams=False)) as pieces:
            async for piece in pieces:
                try:
                    choices[piece.index].add(piece)
                except Exception as error:
                    raise as_http_error(error) from error

        def parts() -> list[dict[str, Any]]:
            """The entry of each output."""
            return [part(task, index, choice) for index, choice in enumerate(choices)]

        # Texts of single tokens can be many, which would keep the event loop.
        entries = parts() if task.num_top is None else await self.served.encode(parts)
        content = {**self._head(), "choices": entries, "usage": self._usage(task, choices)}
        return JSONResponse(content)

    def stream(self, task: Task, part: Any) -> Response:
        """Server-sent events: a part of an output each, at the end `[DONE]`."""
        return StreamingResponse(
            self._events(task, part),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def _events(self, task: Task, part: Any) -> AsyncIterator[str]:
        try:
            async with asyncio.timeout_at(self.info.deadline):
                async for event in self._parts(task, part):
                    yield event
        except TimeoutError:
            limit = self.served.settings.request_timeout
            error = timed_out(f"no more within {limit:g} seconds", limit)
            yield _event(error.body(""))
        except Exception as error:
            yield _event(as_http_error(error).body(""))
        yield "data: [DONE]\n\n"

    async def _parts(self, task: Task, part: Any) -> AsyncIterator[str]:
        choices = await task.new_choices()
        empty = {} if not self.with_usage else {"usage": None}
        is_chat = part is _chat_part
        if is_chat:
            for index in range(len(choices)):
                delta = {"role": "assistant", "content": ""}
                first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                yield _event({**self._head(), "choices": [first], **empty})
        for index, choice in enumerate(choices if task.echoes else []):
            echo = partial(part, task, index, choice, choice.echoed, 0)
            entry = await self.served.encode(echo)
            yield _event({**self._head(), "choices": [entry], **empty})
        try:
            async with aclosing(task.pieces(streams=True)) as pieces:
                async for piece in pieces:
                    choice = choices[piece.index]
                    start = len(choice.ids)
                    text = choice.add(piece)
                    if text or piece.reason or (task.num_top is not None and piece.ids):
                        entry = part(task, piece.index, choice, text, start)
                        yield _event({**self._head(), "choices": [entry], **empty})
        finally:
            usage = self._usage(task, choices)
        if self.with_usage:
            yield _event({**self._head(), "choices": [], "usage": usage})

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.served.name,
            "system_fingerprint": f"heedful-{__version__}",
        }

    def _usage(self, task: Task, choices: list[Choice]) -> dict[str, int]:
        num_new = sum(len(choice.text.ids) for choice in choices)
        self.info.num_prompt, self.info.num_new = task.num_prompt, num_new
        return {
            "prompt_tokens": task.num_prompt,
            "completion_tokens": num_new,
            "total_tokens": task.num_prompt + num_new,
        }


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _completion_choice(task: Task, index: int, choice: Choice) -> dict[str, Any]:
    return _completion_part(task, index, choice, choice.echoed + choice.text.text, 0)


def _completion_part(
    task: Task, index: int, choice: Choice, text: str, first: int
) -> dict[str, Any]:
    return {
        "text": text,
        "index": index,
        "logprobs": _completion_log_probs(task, choice, first),
        "finish_reason": choice.finish_reason,
    }


def _chat_choice(task: Task, index: int, choice: Choice) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": choice.text.text, "refusal": None},
        "logprobs": _chat_log_probs(task, choice, 0),
        "finish_reason": choice.finish_reason,
    }


def _chat_part(task: Task, index: int, choice: Choice, text: str, first: int) -> dict[str, Any]:
    return {
        "index": index,
        "delta": {"content": text} if text else {},
        "logprobs": _chat_log_probs(task, choice, first),
        "finish_reason": choice.finish_reason,
    }


def _completion_log_probs(task: Task, choice: Choice, first: int) -> dict[str, Any] | None:
    """The log-probabilities of the tokens from `first`; offsets are in the text of all tokens.

    The most probable tokens are with the token itself, which may be a further one.
    """
    if task.num_top is None:
        return None
    ids, values, tops = choice.ids, choice.log_probs, choice.top
    columns = ids[first:], values[first:], tops[first:]
    return {
        "tokens": [_completion_token(task, token) for token in ids[first:]],
        "token_logprobs": [value if value is None else _finite(value) for value in columns[1]],
        "top_logprobs": [
            None if value is None or top is None else _by_text(task, [*top, (token, value)])
            for token, value, top in zip(*columns, strict=True)
        ],
        "text_offset": _offsets(task, choice, first),
    }


def _by_text(task: Task, tokens: list[tuple[int, float]]) -> dict[str, float]:
    """The log-probabilities of tokens by their text; of equal texts that of the first token."""
    values: dict[str, float] = {}
    for token, value in tokens:
        values.setdefault(_completion_token(task, token), _finite(value))
    return values


def _completion_token(task: Task, token: int) -> str:
    """The text of a token; of one that ends within a character its bytes, as OpenAI has them."""
    data = _bytes_of(task, token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _bytes_of(task: Task, token: int) -> bytes:
    """The bytes of a token, with a space before it; those that it has alone if they vary."""
    tokenizer = task.served.model.tokenizer
    data: bytes | None = tokenizer.bytes_of(token) if token < tokenizer.vocab_size else b""
    return str(tokenizer.decode([token])).encode() if data is None else data


def _offsets(task: Task, choice: Choice, first: int) -> list[int]:
    """The offset of each token from `first` in the text of an output."""
    decode, ids = task.served.model.tokenizer.decode, choice.ids

    def length(start: int, end: int) -> int:
        """Characters of some tokens."""
        return len(decode(ids[start:end]))

    offsets = [length(0, first)] if first < len(ids) else []
    for end in range(first + 1, len(ids)):
        start = max(0, end - _WINDOW)
        offsets.append(offsets[-1] + length(start, end) - length(start, end - 1))
    return offsets


def _finite(value: float) -> float:
    return max(value, _LEAST)


def _chat_log_probs(task: Task, choice: Choice, first: int) -> dict[str, Any] | None:
    if task.num_top is None:
        return None

    def entry(token: int, value: float) -> dict[str, Any]:
        """One token."""
        data = _bytes_of(task, token)
        text = data.decode(errors="replace")
        return {"token": text, "logprob": _finite(value), "bytes": list(data)}

    columns = choice.ids[first:], choice.log_probs[first:], choice.top[first:]
    content = [
        {**entry(token, value), "top_logprobs": [entry(*candidate) for candidate in top]}
        for token, value, top in zip(*columns, strict=True)
        if value is not None and top is not None  # always, without an echoed prompt
    ]
    return {"content": content, "refusal": None}
