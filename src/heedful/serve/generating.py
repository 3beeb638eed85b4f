"""The outputs of a language model for one request, by a continuous batch or by batches of rows."""

import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, fields, replace
from typing import Any

from heedful.backends.torch.target_scoring import RowScores, row_scores
from heedful.errors import UserError
from heedful.generation.request import EndReason
from heedful.options import Options
from heedful.pipelines import LanguageModel
from heedful.pipelines.generations import TextPieces
from heedful.pipelines.inputs import LengthError
from heedful.pipelines.language_model import as_chats
from heedful.serve.batches import Job, OnOutput
from heedful.serve.bodies import ChatBody, CompletionBody, JsonFormat, Sampling, SchemaFormat
from heedful.serve.errors import HttpError, as_http_error, over_limit
from heedful.serve.log_probs import TokenLog
from heedful.serve.models import ServedModel
from heedful.serve.outputs import GenerationJob, OutputPiece

_DEFAULT_TOKENS = 16  # new tokens of a completion, as in OpenAI's API
_OPTIONS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "seed"),
)


@dataclass
class Choice:
    """One output, after the prompt that it echoes, if any.

    Attributes:
        text: of the generated part.
        log: its tokens, for their log-probabilities; None: these were not requested.
        echoed: text of the prompt that is echoed; else empty.
        ids, log_probs, top: echoed and new tokens that the log has not read, as in `OutputPiece`.
            None: of a first one.
        finish_reason: `stop` or `length`, of OpenAI's API; None: in progress.
    """

    text: TextPieces
    log: TokenLog | None
    echoed: str = ""
    ids: list[int] = field(default_factory=list)
    log_probs: list[float | None] = field(default_factory=list)
    top: list[list[tuple[int, float]] | None] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, piece: OutputPiece) -> str:
        """The new text of a piece; raises its error."""
        if piece.error is not None:
            raise piece.error
        if self.log is not None:
            self.ids += piece.ids
            self.log_probs += piece.log_probs
            self.top += piece.top
        if piece.reason is not None:
            is_cut = piece.reason in ("length", "dead_end")  # a grammar is not complete
            self.finish_reason = "length" if is_cut else "stop"
        return self.text.add(piece.ids, piece.reason is not None)

    def unread(self) -> tuple[list[int], list[float | None], list[Any]]:
        """The tokens that the log has not read, which it is now to read."""
        columns = self.ids, self.log_probs, self.top
        self.ids, self.log_probs, self.top = [], [], []
        return columns


async def new_choices(served: ServedModel, job: GenerationJob) -> list[Choice]:
    """Outputs without new tokens, in the order of the prompts; echoed prompts are read."""
    tokenizer, stop = served.model.tokenizer, job.request.options.stop
    scores: list[RowScores] = [([], [])] * len(job.rows)
    if job.echoes is not None and job.num_top is not None:
        scores = await served.run(_reading(served, job.rows, job.num_top))
    has_log, echoes = job.num_top is not None, job.echoes

    def make() -> list[Choice]:
        """Each output."""
        if echoes is None:
            return [
                Choice(
                    TextPieces(tokenizer.decoder, stop), TokenLog(tokenizer) if has_log else None
                )
                for _ in range(job.num_outputs)
            ]
        # Some decoders leave out a space at the beginning, but not after a prompt.
        return [
            Choice(
                TextPieces(tokenizer.decoder, stop, row),
                TokenLog(tokenizer, text, row) if has_log else None,
                text,
                [*row],
                [None, *log_probs],
                [None, *top],
            )
            for row, text, (log_probs, top) in zip(job.rows, echoes, scores, strict=True)
            for _ in range(job.samples)
        ]

    return await served.on_tokenizer_thread(make)


def _reading(served: ServedModel, rows: list[list[int]], num_top: int) -> Job:
    """The log-probabilities of the tokens of prompts."""
    eager = served.model.eager

    def run(rows: list[list[int]], report: OnOutput) -> list[RowScores]:
        """The scores of each row."""
        return row_scores(eager, rows, num_top)

    return Job(("prompt", num_top), rows, list(map(len, rows)), run)


async def pieces(served: ServedModel, job: GenerationJob) -> AsyncGenerator[OutputPiece, None]:
    """New tokens of all outputs, until each has ended."""
    if not job.generates:
        for index in range(job.num_outputs):
            yield OutputPiece(index, [], [], [], "length")
        return
    if served.is_continuous or (job.streams and job.num_outputs == 1):
        async with aclosing(served.pieces(job)) as new:
            async for piece in new:
                yield piece
        return
    for index, generations in enumerate(await served.run(_whole_rows(served, job))):
        for sample in range(job.samples):
            output = generations[min(sample, len(generations) - 1)]
            reason: EndReason = "stop" if output.finished else "length"
            ids = output.ids
            yield OutputPiece(index * job.samples + sample, ids, [math.nan] * len(ids), [], reason)


def _whole_rows(served: ServedModel, job: GenerationJob) -> Job:
    """The prompts as rows of batches, for backends without continuous batches."""
    model, options, seeds = served.model, job.request.options, job.request.seeds
    others = {field.name: getattr(options, field.name) for field in fields(options)}
    # The grammar's function follows from the schema.
    others |= {"seed": None, "prefix_function": None, "explicit": sorted(options.explicit)}
    if seeds is not None:
        options = replace(options, num_return=job.samples)

    def run(rows: list[tuple[list[int], Any]], report: OnOutput) -> list[Any]:
        """The outputs of each row, an id list and its seed."""
        own = replace(options, on_output=report)
        if seeds is not None:
            own = replace(own, seed=[seed for _, seed in rows])
        return list(model.generations([ids for ids, _ in rows], own))

    of_rows: list[Any] = [None] * len(job.rows) if seeds is None else seeds
    rows = list(zip(job.rows, of_rows, strict=True))
    sizes = [len(row) + (options.max_new_tokens or 0) for row in job.rows]
    key = ("generate", job.samples, repr(others))
    return Job(key, rows, sizes, run, rows_each=job.samples)


async def completion_job(served: ServedModel, body: CompletionBody, tenant: str) -> GenerationJob:
    """The work of a completion; raises HttpError."""
    if body.best_of not in (None, body.n or 1):
        raise HttpError(400, "best_of must be n: all outputs are returned", parameter="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise HttpError(400, "max_tokens 0 needs echo: true", parameter="max_tokens")
    options = _options(body, served, body.max_tokens)
    prompts: Any = body.prompt
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        prompts = [prompts]

    def encode() -> tuple[list[list[int]], Options, int]:
        """The ids of the prompts, the options, and the limit of new tokens."""
        rows, limit = served.model.prompt_ids(prompts), body.max_tokens
        if limit is None:
            left = min(served.model.config.max_length - len(row) for row in rows)
            limit = max(1, min(_DEFAULT_TOKENS, left))
        return rows, served.model.options(**options), limit

    job = await _job(served, body, encode, body.logprobs, tenant)
    if body.echo:

        def texts() -> list[str]:
            """The prompts as they are echoed."""
            decode = served.model.tokenizer.decode
            return [p if isinstance(p, str) else decode(p) for p in prompts]

        job.echoes = await served.on_tokenizer_thread(texts)
    return job


async def chat_job(served: ServedModel, body: ChatBody, tenant: str) -> GenerationJob:
    """The work of a chat completion; raises HttpError."""
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        message = "max_tokens is the old name of max_completion_tokens: give one"
        raise HttpError(400, message, parameter="max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs: true", parameter="top_logprobs")
    options = _options(body, served, body.max_completion_tokens or body.max_tokens)
    messages = _messages(body, served)
    num_top = (body.top_logprobs or 0) if body.logprobs else None

    def encode() -> tuple[list[list[int]], Options, int]:
        """The ids of the conversation, the options, and the limit of new tokens."""
        chats, _ = as_chats(messages)
        rows, completed = served.model.chat_rows(chats, served.model.options(**options))
        assert completed.max_new_tokens is not None
        return rows, completed, completed.max_new_tokens

    return await _job(served, body, encode, num_top, tenant)


def _messages(body: ChatBody, served: ServedModel) -> list[dict[str, Any]]:
    """The messages for the chat template; raises HttpError for fields that it, or the server, does
    not support."""
    if body.tools and body.tool_choice != "none":
        problem = "tools are not supported: leave them out, or set tool_choice to none"
        raise HttpError(400, problem, parameter="tools")
    messages = [message.plain() for message in body.messages]
    for number, message in enumerate(body.messages):
        if message.content is None and not message.tool_calls:
            problem = f"messages[{number}]: it has no content"
            raise HttpError(400, problem, parameter="messages")
    return messages


def _options(body: Sampling, served: ServedModel, max_tokens: int | None) -> dict[str, Any]:
    """The options of `generate`; raises HttpError for a number above the server's limits."""
    settings, model = served.settings, served.model
    _check_most("n", body.n, settings.max_outputs)
    _check_most(_limit_name(body), max_tokens, settings.max_new_tokens)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stop) > settings.max_stop:
        message = f"stop may have {settings.max_stop} texts, not {len(stop)}"
        raise over_limit(message, "stop", len(stop), settings.max_stop)
    if "" in stop:
        raise HttpError(400, "a stop text is empty: every output contains it", parameter="stop")
    if body.stream_options is not None and not body.stream:
        raise HttpError(400, "stream_options needs stream: true", parameter="stream_options")
    options = {name: getattr(body, name) for name in _OPTIONS if getattr(body, name) is not None}
    known = model.metadata.options
    if "temperature" not in options and "temperature" not in known:
        options["temperature"] = 1.0  # OpenAI's default
    if max_tokens:
        options["max_new_tokens"] = max_tokens
    if body.logit_bias:
        biases = [([int(token)], value) for token, value in body.logit_bias.items()]
        try:
            model.check_ids([ids for ids, _ in biases], "tgt_")
        except UserError as error:
            raise HttpError(400, f"logit_bias: {error}", parameter="logit_bias") from None
        options["sequence_bias"] = biases
    if isinstance(body.response_format, SchemaFormat):
        options["json_schema"] = body.response_format.json_schema.schema_
    elif isinstance(body.response_format, JsonFormat):
        options["json_schema"] = {"type": "object"}
    return {**options, "beam_size": 1, **({"stop": stop} if stop else {})}


def _limit_name(body: Sampling) -> str:
    """The field of a body that limits the new tokens."""
    is_new = isinstance(body, ChatBody) and body.max_tokens is None
    return "max_completion_tokens" if is_new else "max_tokens"


def _check_most(name: str, value: int | None, most: int | None) -> None:
    if value is not None and most is not None and value > most:
        message = f"{name} may be at most {most} here, not {value}"
        raise over_limit(message, name, value, most)


async def _job(
    served: ServedModel,
    body: CompletionBody | ChatBody,
    encode: Callable[[], tuple[list[list[int]], Options, int]],
    num_top: int | None,
    tenant: str,
) -> GenerationJob:
    """Encode and check the prompts on the tokenizer's thread."""
    prompt = "messages" if isinstance(body, ChatBody) else "prompt"
    model: LanguageModel = served.model
    if num_top is not None and not served.is_continuous:
        raise HttpError(
            400,
            f"{served.name} runs on a converted backend, "
            "which gives no log-probabilities of tokens; serve it with --backend eager",
            parameter="logprobs",
        )

    def prepare() -> GenerationJob:
        """The job, or HttpError for prompts and limits that exceed the context."""
        try:
            rows, options, limit = encode()
        except UserError as error:
            raise as_http_error(error, prompt) from None
        most, longest = served.settings.max_new_tokens, model.config.max_length
        limit = min(limit, most or limit)  # only a default may be above it
        generates = limit > 0
        options = replace(
            options,
            scores=num_top is not None,
            max_new_tokens=max(1, limit),
            min_new_tokens=min(options.min_new_tokens or 0, max(1, limit)),
        )
        for number, row in enumerate(rows, 1):
            where = f"prompt {number}" if len(rows) > 1 else "the prompt"
            if len(row) >= longest + (not generates):
                problem = (
                    f"{where} has {len(row)} tokens, but the model's context is {longest}: "
                    "shorten it"
                )
                raise as_http_error(LengthError(problem, len(row), longest), prompt)
            if len(row) + limit > longest:
                raise HttpError(
                    400,
                    f"{where} has {len(row)} tokens, and {limit} new ones were asked for, but the "
                    f"model's context is {longest}: shorten it, or ask for fewer",
                    code="max_tokens_too_large",
                    values={"tokens": len(row), "new": limit, "limit": longest},
                    parameter=_limit_name(body),
                )
        request, streams = model.request_with(rows, options), bool(body.stream)
        numbers = body.n or 1, num_top, streams, tenant
        return GenerationJob(rows, request, *numbers, generates=generates)

    try:
        return await served.on_tokenizer_thread(prepare)
    except UserError as error:
        grammar = None if body.response_format is None else "response_format"
        raise as_http_error(error, grammar) from None
