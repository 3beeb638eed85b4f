"""Models in the server: by name, each with its worker, and replaced while others are served."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from heedful.errors import UserError, format_names
from heedful.options import DEFAULTS
from heedful.pipelines import LanguageModel, SavedModel, Translator, load
from heedful.pipelines.base import CONFIG
from heedful.pipelines.text_generation import Generator
from heedful.serve.batches import BatchEngine, in_loop
from heedful.serve.errors import HttpError
from heedful.serve.jobs import GenerationJob, Job, Piece
from heedful.serve.metrics import Metrics
from heedful.serve.settings import Settings
from heedful.serve.streams import StreamEngine
from heedful.serve.worker import Engine, Worker

Kind = TypeVar("Kind", bound=SavedModel)
Result = TypeVar("Result")


class ServedModel:
    """A model, the worker that runs it, and the number of texts that it has accepted.

    Its methods are called in the event loop that it was made in.

    Attributes:
        engine: of whole rows.
        generator: of outputs token by token; only for language models, else None.
        is_continuous: `generator` is a continuous batch, for jobs with any number of outputs.
    """

    def __init__(self, name: str, model: Any, settings: Settings, metrics: Metrics) -> None:
        self.name = name
        self.model = model
        self.settings = settings
        self.created = 0
        self._num_texts = 0
        self._is_retired = False
        self._metrics = metrics
        backend = getattr(model, "backend", None)
        measured = (backend.settings if backend else model.settings).batch_tokens
        self.batch_tokens = settings.batch_tokens or measured or DEFAULTS["batch_tokens"]
        deliver = in_loop(asyncio.get_running_loop())
        observe = metrics.batch_observer(name)
        workers = backend.settings.workers if backend else 1  # which share a batch
        self.engine = BatchEngine(self.batch_tokens * workers, deliver, observe)
        engines: list[Engine] = [self.engine]
        self.generator: Any = None
        self.is_continuous = isinstance(model, LanguageModel) and backend is None
        if self.is_continuous:
            from heedful.backends.torch.continuous import ContinuousBatch
            from heedful.serve.continuous import ContinuousEngine

            model.eager.prepare()
            batch = ContinuousBatch(model.eager.searcher, settings.prefix_tokens)
            self.generator = ContinuousEngine(batch, self.batch_tokens, deliver, observe)
        elif isinstance(model, LanguageModel):
            self.generator = StreamEngine(model.backend_for_row, deliver)
        if self.generator is not None:
            engines.append(self.generator)
        self.worker = Worker(name, engines)
        self._encoder = ThreadPoolExecutor(1, f"heedful-{name}-tokenizer")

    @property
    def num_texts(self) -> int:
        """Texts that wait or run."""
        return self._num_texts

    @contextmanager
    def slots(self, count: int) -> Iterator[None]:
        """Reserve room for all texts of a request, or for none.

        Raises:
            HttpError: 429 if the queue is full.
        """
        most = self.settings.max_queue
        if count > most:
            message = f"a request may have {most} texts (lines, or outputs), not {count}"
            values = {"name": "texts", "value": count, "limit": most}
            raise HttpError(400, message, code="limit_exceeded", values=values)
        if self._num_texts + count > most:
            self._metrics.refused(self.name)
            raise HttpError(
                429,
                f"{self._num_texts} texts wait for {self.name}, which takes {most}: try again",
                code="rate_limit_exceeded",
                retry_after=1,
            )
        self._num_texts += count
        try:
            yield
        finally:
            self._num_texts -= count
            self._close_if_retired()

    async def encode(self, function: Callable[[], Result]) -> Result:
        """Call a function on the thread of the tokenizer."""
        return await asyncio.get_running_loop().run_in_executor(self._encoder, function)

    async def run(self, job: Job) -> list[Any]:
        """The results of all rows of a job; cancelling the call drops those that have not begun."""
        if not job.rows:
            return []
        self.worker.submit(lambda: self.engine.add(job))
        try:
            return await job.result
        finally:
            job.cancel()

    async def pieces(self, job: GenerationJob) -> AsyncGenerator[Piece, None]:
        """New tokens of a job's outputs until all have ended; closing it drops the rest."""
        self.worker.submit(lambda: self.generator.add(job))
        remaining = len(job.rows) * job.samples
        try:
            while remaining:
                piece = await job.pieces.get()
                remaining -= piece.reason is not None
                yield piece
        finally:
            job.cancel()

    async def probe(self, timeout: float = 10.0) -> None:
        """Let the model read one token between two turns.

        Raises:
            HttpError: 503 if it fails, or does not answer in time.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Exception | None] = loop.create_future()
        deliver = in_loop(loop)

        def run() -> None:
            """Deliver the error of reading a token, or None."""
            error = None
            try:
                _read_one_token(self.model)
            except Exception as raised:
                error = raised
            deliver([lambda: None if answer.done() else answer.set_result(error)])

        self.worker.submit(run)
        try:
            error = await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            raise self._failed("does not answer") from None
        if error is not None:
            raise self._failed(f"fails: {error}")

    def _failed(self, problem: str) -> HttpError:
        values = {"name": self.name}
        message = f"{self.name} {problem}"
        return HttpError(503, message, code="model_failed", values=values, retry_after=5)

    def retire(self) -> None:
        """End the worker after the requests in progress."""
        self._is_retired = True
        self._close_if_retired()

    def _close_if_retired(self) -> None:
        if self._is_retired and not self._num_texts:
            self.worker.close()
            self._encoder.shutdown(wait=False)


class Registry:
    """The models of the server by name. A model is opened from its directory on a thread."""

    def __init__(
        self, directories: Mapping[str, Path], settings: Settings, metrics: Metrics
    ) -> None:
        self.directories = dict(directories)
        self.settings = settings
        self.metrics = metrics
        self.models: dict[str, ServedModel] = {}
        self._opening = asyncio.Lock()

    @property
    def is_loaded(self) -> bool:
        """Every model has been opened."""
        return set(self.models) == set(self.directories)

    async def open_all(self) -> None:
        """Open every model that is not open; raises UserError for one that cannot be opened."""
        for name in list(self.directories):
            if name not in self.models:
                await self._open(name)

    async def replace(self, names: Sequence[str]) -> None:
        """Open models again, each in place of the one that is served until then.

        Raises:
            UserError: models that cannot be opened, which stay; all others are replaced.
        """
        problems = []
        for name in names:
            try:
                await self._open(name)
            except UserError as error:
                problems.append(f"{name} stays as it was: {error}")
        if problems:
            raise UserError("; ".join(problems))

    async def _open(self, name: str) -> None:
        async with self._opening:
            # On a thread that ends: OpenMP's helpers of a thread end with it. If there are more of
            # them than cores, none waits actively at the end of an operation, which is slower.
            with ThreadPoolExecutor(1, f"heedful-{name}-opening") as pool:
                loop = asyncio.get_running_loop()
                self.add(name, await loop.run_in_executor(pool, self.load, name))

    def load(self, name: str) -> Any:
        """The model in its directory, after it has read a token; raises UserError."""
        settings, directory = self.settings, self.directories[name]
        model = load(
            directory,
            device=settings.device,
            backend=settings.backend,
            precision=settings.precision,
            threads=settings.threads,
            use="throughput",
            trust_compiled=settings.trust_compiled,
        )
        if not model.has_tokenizer:
            raise UserError(
                f"{directory} has no tokenizer, so it cannot read the texts of requests; import it "
                "with its tokenizer's files"
            )
        _read_one_token(model)
        if isinstance(model, Translator) and not _names_languages(model):
            logging.getLogger("heedful.serve").warning(
                "%s does not name its languages: it answers for every direction, and /languages "
                'and /detect leave it out; set "src_language" and "tgt_language" (such as "de" and '
                '"en") in %s, or data.src_language and data.tgt_language of a recipe',
                name,
                directory / CONFIG,
            )
        return model

    def add(self, name: str, model: Any) -> None:
        """Serve a model, in place of the one of this name, which ends after its requests."""
        former = self.models.get(name)
        self.models[name] = ServedModel(name, model, self.settings, self.metrics)
        self.directories.setdefault(name, Path(name))
        if former is not None:
            former.retire()

    def get(self, name: str | None, kinds: Sequence[type[SavedModel]], use: str) -> ServedModel:
        """The model of a name, or the only one of some kinds.

        Args:
            use: of the route, in the error, such as "completions need a language model".

        Raises:
            HttpError: 404 for an unknown name, or a model of another kind; 400 for no name where
                several could be meant; 503 while models are opened.
        """
        if name is not None and name in self.models:
            served = self.models[name]
            if not isinstance(served.model, tuple(kinds)):
                raise HttpError(
                    404,
                    f"{use}, but {name} is a {served.model.kind}",
                    code="model_not_found",
                    values={"name": name},
                    parameter="model",
                )
            return served
        self.check_loaded()
        fitting = [s for s in self.models.values() if isinstance(s.model, tuple(kinds))]
        if name is None and len(fitting) == 1:
            return fitting[0]
        known = format_names([s.name for s in fitting], str) or "none"
        if name is None and fitting:
            raise HttpError(400, f"give a model: {known}", parameter="model")
        problem = f"no model {name!r} here" if name is not None else use
        raise HttpError(
            404,
            f"{problem}; models for this route: {known}",
            code="model_not_found",
            values={"name": name or ""},
            parameter="model",
        )

    def check_loaded(self) -> None:
        """Raises HttpError 503 while models are opened."""
        if not self.is_loaded:
            message = "the server is loading its models: try again"
            raise HttpError(503, message, code="loading", retry_after=2)

    def close(self) -> None:
        """End all workers after their present turn."""
        for served in self.models.values():
            served.worker.close()


def _names_languages(model: Translator) -> bool:
    metadata = model.metadata
    targets = metadata.tgt_language or metadata.language_tags
    return bool(metadata.src_language and targets)


def _read_one_token(model: Any) -> None:
    """A small pass through a model; raises what the model does."""
    if isinstance(model, Generator):
        row = model.prompt_ids([_any_row(model)])
        model.generate(row, max_new_tokens=1, beam_size=1, temperature=0.0)
    else:
        model.vectors([_any_row(model)])


def _any_row(model: Any) -> list[int]:
    tokenizer = model.tokenizer
    return list(tokenizer.add_special_tokens([])) or [min(1, tokenizer.vocab_size - 1)]
