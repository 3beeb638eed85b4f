"""LibreTranslate's routes for files: a document is translated, and the result is downloaded."""

import asyncio
import base64
import binascii
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any, Literal, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from heedful.documents import (
    FORMATS,
    Counts,
    document_format,
    language_review,
    read_document,
    translate_document,
)
from heedful.documents.segments import Document, Segment
from heedful.documents.translating import fits_model
from heedful.documents.word_links import TokenAlignment
from heedful.errors import UserError
from heedful.fidelity.reasons import code_of
from heedful.pipelines.generations import Generation
from heedful.progress import Advance, use_display
from heedful.serve.batches import Job
from heedful.serve.bodies import TranslateBody, TranslateFileBody
from heedful.serve.directions import detected_languages, known_sources, translator_for
from heedful.serve.errors import HttpError, as_http_error
from heedful.serve.events import event, event_stream
from heedful.serve.guard import DOWNLOADS, info_of
from heedful.serve.models import ServedModel
from heedful.serve.requests import registry_of
from heedful.serve.tag_alignments import alignment_job
from heedful.serve.translating import translation_job

router = APIRouter(tags=["LibreTranslate"])
_KEPT_SECONDS = 1_800.0
_KEPT_BYTES = 1 << 28  # of all files; the oldest are removed first
_DETECTED = 10_000  # characters by which the language of a document is detected
_SHOWN = 200  # characters of a segment's text
_MOST_REVIEWS = 1_000  # in an answer; `counts` has their number
_RETRY_SECONDS = 0.2  # after which a later part of a document asks for room again
_Item = TypeVar("_Item")
_Out = TypeVar("_Out")
_UNSAFE = re.compile(r"[^\w.-]+")


@dataclass(frozen=True)
class _File:
    name: str
    content: bytes
    expires: float


class Files:
    """Translated files, which are kept in memory for some time."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, _File] = OrderedDict()

    def add(self, name: str, content: bytes) -> str:
        """Keep a file; returns the name by which it is downloaded, which cannot be guessed."""
        self._remove_old(len(content))
        key = f"{secrets.token_hex(16)}.{name}"
        self._files[key] = _File(name, content, time.monotonic() + _KEPT_SECONDS)
        return key

    def get(self, key: str) -> _File | None:
        """A file; None if it is not kept."""
        self._remove_old(0)
        return self._files.get(key)

    def _remove_old(self, num_bytes: int) -> None:
        now = time.monotonic()
        total = num_bytes + sum(len(file.content) for file in self._files.values())
        while self._files:
            first = next(iter(self._files.values()))
            if first.expires > now and total <= _KEPT_BYTES:
                return
            total -= len(first.content)
            self._files.popitem(last=False)


@router.post("/translate_file")
async def translate_file(body: TranslateFileBody, request: Request) -> Response:
    """Translate a document; a form with the file, or JSON with its content in Base64.

    The document is as by `heedful translate -i FILE`: all but its texts stays as it is. The result
    can be downloaded for half an hour, by all who know its address. Beside this the answer has
    `counts` of the segments, and `reviews`: for each segment that a person should review its line
    (of a .docx its paragraph), the beginning of its text, and the reasons.
    """
    name = _UNSAFE.sub("_", PurePath(body.filename).name)[-100:]
    if document_format(name) is None:
        listed = ", ".join(FORMATS)
        message = f"Invalid request: file format not supported; the formats are {listed}"
        raise HttpError(400, message, parameter="file")
    try:
        data = base64.b64decode(body.file, validate=True)
    except (binascii.Error, ValueError):
        raise HttpError(400, "file: not Base64", parameter="file") from None
    try:
        document = await asyncio.to_thread(read_document, data, name, (None, body.target))
        served, translation = await _translator(request, document, body)
        if not body.stream:
            return JSONResponse(await _answer(request, document, name, served, translation))
    except UserError as error:
        raise as_http_error(error, "file") from None
    events = _events(request, document, name, served, translation)
    seconds = registry_of(request).settings.request_timeout
    return event_stream(events, info_of(request.scope), seconds, request.url.path)


async def _events(request: Request, document: Document, *rest: Any) -> AsyncIterator[str]:
    """The numbers of finished segments as they grow, and the answer; see `_answer`."""
    total, done = 0, asyncio.Queue[int | None]()
    loop = asyncio.get_running_loop()

    @contextmanager
    def display(description: str, count: int | None) -> Iterator[Advance]:
        """Report the progress of the thread to this function."""
        nonlocal total
        total = count or 0

        def advance(number: int) -> None:
            """Wake the function that sends events."""
            loop.call_soon_threadsafe(done.put_nowait, number)

        advance(0)
        yield advance

    with use_display(display):
        work = asyncio.ensure_future(_answer(request, document, *rest))
    work.add_done_callback(lambda _: done.put_nowait(None))
    try:
        finished = 0
        while (number := await done.get()) is not None:
            finished += number
            yield event({"done": finished, "segments": total})
        yield event(await work)
    finally:
        work.cancel()


async def _answer(
    request: Request, document: Document, name: str, served: ServedModel, body: TranslateBody
) -> dict[str, Any]:
    """Translate a document and keep the file; returns its address and what became of it."""
    content, counts = await _translate_document(request, document, served, body)
    key = _files_of(request).add(name, content)
    reviews = [
        {
            "line": segment.line,
            "source": segment.text[:_SHOWN],
            "reasons": [*segment.reasons],
            "reasonCodes": [*map(code_of, segment.reasons)],
            **({"quality": _quality(segment)} if body.quality else {}),
        }
        for segment in document.segments
        if segment.reasons
    ]
    return {
        "translatedFileUrl": f"{request.base_url}{DOWNLOADS[1:]}{quote(key)}",
        "counts": asdict(counts),
        "reviews": reviews[:_MOST_REVIEWS],
        "notes": document.notes,
    }


@router.get(DOWNLOADS + "{name}")
async def download_file(name: str, request: Request) -> Response:
    """Download a file that `/translate_file` has translated; needs no key."""
    file = _files_of(request).get(name)
    if file is None:
        raise HttpError(404, "no such file; translated files are kept for half an hour")
    disposition = f"attachment; filename*=UTF-8''{quote(file.name)}"
    headers = {"Content-Disposition": disposition, "X-Content-Type-Options": "nosniff"}
    return Response(file.content, media_type="application/octet-stream", headers=headers)


def _quality(segment: Segment) -> float | None:
    """The quality of a segment's translation; None: a model did not translate it."""
    if segment.is_blank:
        return 0.0
    return None if segment.result is None else segment.result.quality


def _files_of(request: Request) -> Files:
    """The translated files of the server."""
    state = request.app.state
    if not hasattr(state, "files"):
        state.files = Files()
    files: Files = state.files
    return files


async def _translator(
    request: Request, document: Document, body: TranslateFileBody
) -> tuple[ServedModel, TranslateBody]:
    """The translator for a document, and the settings of its texts."""
    registry = registry_of(request)
    translation = TranslateBody.model_construct(
        q="",
        source=body.source,
        target=body.target,
        model=body.model,
        glossary=body.glossary,
        quality=body.quality,
    )
    source = None if body.source in (None, "auto") else body.source
    known = known_sources(registry, translation)
    if source is None and known:
        texts = " ".join(segment.text for segment in document.segments[:200])
        [entry] = await detected_languages([texts[:_DETECTED]], known)
        source = entry["language"]
    served = translator_for(registry, source, translation)
    info = info_of(request.scope)
    info.model = served.name
    info.resources.enter_context(served.held())
    with served.slots(1, "file"):  # a file that is refused is not split, by the tokenizer
        pass
    if body.quality and not document.keeps_targets:
        document.notes.append("quality: this format has no place for it; `reviews` has it")
    document.languages = (
        source or document.languages[0],
        body.target or served.model.metadata.tgt_language or document.languages[1],
    )
    return served, translation.model_copy(update={"source": source})


async def _translate_document(
    request: Request, document: Document, served: ServedModel, body: TranslateBody
) -> tuple[bytes, Counts]:
    """The translated file; its texts are queued in parts, between those of other requests."""
    texts = _ServedTexts(request, served, body)
    fits = fits_model(served.model)

    def work() -> tuple[bytes, Counts]:
        """Translate the document on a thread, which waits for the batches of the event loop."""
        review = language_review(served.model.metadata.src_language or body.source)
        counts = translate_document(
            texts,
            document,
            review=review,
            fits=fits,
            together=texts.most,
            with_quality=body.quality,
        )
        return document.to_bytes(), counts

    try:
        return await asyncio.to_thread(work)
    finally:
        texts.stopped.set()


class _ServedTexts:
    """A translator of texts, called on a thread, whose work is queued in the event loop.

    Attributes:
        most: texts that are queued together, so that there is room for other requests.
        stopped: the request has ended; further calls fail.
    """

    def __init__(self, request: Request, served: ServedModel, body: TranslateBody) -> None:
        self._request, self._served, self._body = request, served, body
        self._loop = asyncio.get_running_loop()
        self._is_first = True
        self.metadata = served.model.metadata
        self.most = max(1, served.settings.max_queue // 4)
        self.stopped = threading.Event()

    def translate(
        self, texts: list[str], *, return_details: Literal[True], **options: Any
    ) -> list[list[Generation]]:
        """The translation of each text, in parts that leave room for other requests."""
        return self._in_parts(texts, self._translate_part)

    def token_alignments(
        self, texts: Sequence[str], outputs: Sequence[Generation], **options: Any
    ) -> list[TokenAlignment | None]:
        """The alignment of each text with its translation, by the net on the model's thread."""

        async def align(items: list[tuple[str, Generation]]) -> list[TokenAlignment | None]:
            """Queue a part."""

            async def job() -> Job:
                """The work of the part."""
                return alignment_job(self._served, items, self._body)

            return await self._queued(len(items), job)

        return self._in_parts([*zip(texts, outputs, strict=True)], align)

    def _in_parts(
        self, items: list[_Item], work: Callable[[list[_Item]], Coroutine[Any, Any, list[_Out]]]
    ) -> list[_Out]:
        """The results of work in the event loop, in parts that leave room for other requests."""
        results: list[_Out] = []
        for start in range(0, len(items), self.most):
            if self.stopped.is_set():
                raise UserError("the request has ended")
            part = work(items[start : start + self.most])
            results += asyncio.run_coroutine_threadsafe(part, self._loop).result()
        return results

    async def _translate_part(self, texts: list[str]) -> list[list[Generation]]:
        num_tokens = 0

        async def encode() -> Job:
            """The work of the texts."""
            nonlocal num_tokens
            job, num_tokens = await translation_job(self._served, texts, self._body)
            return job

        results = await self._queued(len(texts), encode)
        info = info_of(self._request.scope)
        info.num_prompt += num_tokens
        info.num_new += sum(len(output.ids) for outputs, _ in results for output in outputs)
        return [outputs for outputs, _ in results]

    async def _queued(self, count: int, job: Callable[[], Coroutine[Any, Any, Job]]) -> list[Any]:
        """The results of a job of some texts, which is made when there is room for them; only the
        first one is refused where there is none."""
        while True:
            try:
                with self._served.slots(count, "file"):
                    results = await self._served.run(await job())
                break
            except HttpError as error:
                if error.status != 429 or self._is_first or self.stopped.is_set():
                    raise
                await asyncio.sleep(_RETRY_SECONDS)
        self._is_first = False
        return results
