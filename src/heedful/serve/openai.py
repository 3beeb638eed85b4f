"""OpenAI's routes: completions, chat completions and embeddings."""

import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from heedful import __version__
from heedful.pipelines import LanguageModel, SavedModel
from heedful.serve.batches import Job
from heedful.serve.bodies import ChatBody, CompletionBody, EmbeddingBody
from heedful.serve.errors import HttpError, as_http_error
from heedful.serve.events import event, event_stream
from heedful.serve.generating import Choice, chat_job, completion_job, new_choices, pieces
from heedful.serve.guard import RequestInfo, info_of
from heedful.serve.models import ServedModel
from heedful.serve.outputs import GenerationJob, OutputPiece
from heedful.serve.requests import encoded, registry_of, reserve

router = APIRouter(prefix="/v1", tags=["OpenAI"])


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
    reserve(request, served, count, "n" if (body.n or 1) > 1 else "prompt")
    job = await completion_job(served, body, info_of(request.scope).tenant)
    answer = _Answer(request, served, body.stream_options, "cmpl", "text_completion")
    if body.stream:
        return answer.stream(job, _completion_part)
    return await answer.whole(job, _completion_choice)


@router.post("/chat/completions")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answers to a conversation, by the chat template of the model.

    Defaults: `max_completion_tokens` 512, or what the context leaves; `temperature` the model's
    own, or 1. Parts of a message that are no text, tools and other formats are not supported.
    """
    served = _language_model(request, body.model, "/v1/chat/completions")
    reserve(request, served, body.n or 1, "n")
    job = await chat_job(served, body, info_of(request.scope).tenant)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    answer = _Answer(request, served, body.stream_options, "chatcmpl", kind)
    if body.stream:
        return answer.stream(job, _chat_part)
    return await answer.whole(job, _chat_choice)


@router.post("/embeddings")
async def embeddings(body: EmbeddingBody, request: Request) -> Response:
    """Vectors of texts, made of the last layer's states as in `heedful embed`: their mean, or as
    an imported model of sentence-transformers does.
    """
    served = registry_of(request).get(body.model, [SavedModel], "")
    info = info_of(request.scope)
    texts: Any = body.input
    texts = [texts] if isinstance(texts, str) or isinstance(texts[0], int) else texts
    width = served.model.config.d_model
    if body.dimensions not in (None, width):
        raise HttpError(400, f"dimensions must be {width}, the model's own", parameter="dimensions")

    reserve(request, served, len(texts), "input")
    rows = await encoded(
        served, lambda: served.model.encode(served.model.with_prompt(texts)), "input"
    )
    for number, row in enumerate(rows, 1):
        if not row:
            message = f"text {number} is empty"
            raise HttpError(400, message, code="empty_text", parameter="input")
    run = served.model.vectors
    job = Job("embed", rows, list(map(len, rows)), lambda rows, report: list(run(rows)))
    vectors = await served.run(job)
    info.num_prompt = sum(map(len, rows))
    as_base64 = body.encoding_format == "base64"
    usage = {"prompt_tokens": info.num_prompt, "total_tokens": info.num_prompt}

    def answer() -> Response:
        """The numbers of all vectors."""
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": _base64(vector) if as_base64 else vector.tolist(),
            }
            for index, vector in enumerate(vectors)
        ]
        content = {"object": "list", "data": data, "model": served.name, "usage": usage}
        return rendered(content, "data")

    return await served.on_tokenizer_thread(answer)


def rendered(content: dict[str, Any], name: str) -> Response:
    """A JSON answer. The items of the list `name` are written one by one: Python's lock is held
    while one is, and the event loop waits for it."""
    others = _json({key: value for key, value in content.items() if key != name})
    items = ",".join(map(_json, content[name]))
    return Response(f'{others[:-1]},"{name}":[{items}]}}', media_type="application/json")


def _json(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


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

    async def whole(self, job: GenerationJob, part: Any) -> Response:
        """All outputs, when they have ended."""
        choices = await new_choices(self.served, job)
        received: list[OutputPiece] = []
        async with aclosing(pieces(self.served, job)) as new:
            async for piece in new:
                if piece.error is not None:
                    raise as_http_error(piece.error) from piece.error
                received.append(piece)

        def answer() -> Response:
            """The texts of all outputs."""
            for piece in received:
                choices[piece.index].add(piece)
            entries = [part(choice, index) for index, choice in enumerate(choices)]
            content = {**self._head(), "choices": entries, "usage": self._usage(job, choices)}
            return rendered(content, "choices")

        return await self.served.on_tokenizer_thread(answer)

    def stream(self, job: GenerationJob, part: Any) -> Response:
        """Server-sent events: a part of an output each, at the end `[DONE]`."""
        seconds = self.served.settings.request_timeout
        return event_stream(self._parts(job, part), self.info, seconds)

    async def _parts(self, job: GenerationJob, part: Any) -> AsyncIterator[str]:
        choices = await new_choices(self.served, job)
        empty = {} if not self.with_usage else {"usage": None}
        is_chat = part is _chat_part
        if is_chat:
            for index in range(len(choices)):
                delta = {"role": "assistant", "content": ""}
                first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                yield event({**self._head(), "choices": [first], **empty})
        for index, choice in enumerate(choices if job.echoes else []):
            yield await self._event(part, choice, index, choice.echoed, empty)
        try:
            async with aclosing(pieces(self.served, job)) as new:
                async for piece in new:
                    choice = choices[piece.index]
                    text = choice.add(piece)
                    if text or piece.reason or choice.ids:
                        yield await self._event(part, choice, piece.index, text, empty)
        finally:
            usage = self._usage(job, choices)
        if self.with_usage:
            yield event({**self._head(), "choices": [], "usage": usage})

    async def _event(
        self, part: Any, choice: Choice, index: int, text: str, more: dict[str, Any]
    ) -> str:
        """The event of a part of an output."""

        def line() -> str:
            """The line of server-sent events."""
            return event({**self._head(), "choices": [part(choice, index, text)], **more})

        # The tokens of a long prompt, and those beside each new one, take longer.
        return line() if choice.log is None else await self.served.on_tokenizer_thread(line)

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.served.name,
            "system_fingerprint": f"heedful-{__version__}",
        }

    def _usage(self, job: GenerationJob, choices: list[Choice]) -> dict[str, int]:
        num_new = sum(len(choice.text.ids) for choice in choices)
        self.info.num_prompt, self.info.num_new = job.num_prompt, num_new
        return {
            "prompt_tokens": job.num_prompt,
            "completion_tokens": num_new,
            "total_tokens": job.num_prompt + num_new,
        }


def _completion_choice(choice: Choice, index: int) -> dict[str, Any]:
    return _completion_part(choice, index, choice.echoed + choice.text.text)


def _completion_part(choice: Choice, index: int, text: str) -> dict[str, Any]:
    log = choice.log
    return {
        "text": text,
        "index": index,
        "logprobs": None if log is None else log.completion(*choice.unread()),
        "finish_reason": choice.finish_reason,
    }


def _chat_choice(choice: Choice, index: int) -> dict[str, Any]:
    log = choice.log
    return {
        "index": index,
        "message": {"role": "assistant", "content": choice.text.text, "refusal": None},
        "logprobs": None if log is None else log.chat(*choice.unread()),
        "finish_reason": choice.finish_reason,
    }


def _chat_part(choice: Choice, index: int, text: str) -> dict[str, Any]:
    log = choice.log
    return {
        "index": index,
        "delta": {"content": text} if text else {},
        "logprobs": None if log is None else log.chat(*choice.unread()),
        "finish_reason": choice.finish_reason,
    }
