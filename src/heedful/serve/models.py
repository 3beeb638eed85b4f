"""Models in the server: by name, each with its worker, and replaced while others are served."""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from heedful.errors import UserError, format_names
from heedful.options import DEFAULTS
from heedful.pipelines import LanguageModel, SavedModel, Translator, load
from heedful.pipelines.base import CONFIG
from heedful.pipelines.text_generation import Generator
from heedful.serve.batches import BatchEngine, Job, in_loop
from heedful.serve.errors import HttpError
from heedful.serve.glossaries import Glossaries
from heedful.serve.metrics import Metrics
from heedful.serve.outputs import GenerationJob, OutputPiece
from heedful.serve.settings import Settings
from heedful.serve.streams import StreamEngine
from heedful.serve.worker import Engine, Worker, WorkerError

_PREFIXES = 8_192  # tokens of ended outputs that are kept by default
_PROBE_SECONDS = 1.0  # for which the result of a probe counts
_ABSOLUTE = re.compile(r"(?<![\w.~/])~?(?:/[^\s/:;,'\"()]+)*/([^\s/:;,'\"()]+)")
_log = logging.getLogger("heedful.serve")

Kind = TypeVar("Kind", bound=SavedModel)
Result = TypeVar("Result")


class ServedModel:
    """A model, the worker that runs it, and the number of texts that it has accepted.

    Its methods are called in the event loop that it was made in.

    Attributes:
        engine: of whole rows.
        created: when its weights were written, in seconds since 1970; 0: they are in no file.
        generator: of outputs token by token; only for language models, else None.
        glossaries: of a translator; a request may have another one.
        is_continuous: `generator` is a continuous batch, for jobs with any number of outputs.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        settings: Settings,
        metrics: Metrics,
        created: int,
        glossaries: Glossaries | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.settings = settings
        self.created = created
        self._num_texts = 0
        self._num_places = 0  # of the queue that are taken
        self._num_holders = 0
        self._is_retired = False
        self._reading: asyncio.Future[tuple[Exception | None, float]] | None = None
        self._metrics = metrics
        backend = getattr(model, "backend", None)
        model.backend_is_named = False  # not by those who send requests
        self.glossaries = glossaries
        if settings.batch_tokens is not None:  # the model would divide larger batches
            for part in (model, backend) if backend else (model,):
                part.settings = replace(part.settings, batch_tokens=settings.batch_tokens)
        measured = (backend or model).settings.batch_tokens
        self.batch_tokens = measured or DEFAULTS["batch_tokens"]
        deliver = in_loop(asyncio.get_running_loop())
        observe = metrics.batch_observer(name)
        workers = backend.settings.workers if backend else 1  # which share a batch
        self.engine = BatchEngine(self.batch_tokens * workers, deliver, observe)
        engines: list[Engine] = [self.engine]
        self.generator: Any = None
        self.is_continuous = isinstance(model, LanguageModel) and backend is None
        if self.is_continuous:
            from heedful.serve.continuous import ContinuousBatch

            model.eager.prepare()
            most = settings.prefix_tokens
            budget = self.batch_tokens
            if settings.batch_tokens is None:  # the longest output leaves as much to the others
                budget = max(budget, 2 * model.config.max_length)
            prefixes = _PREFIXES if most is None else most
            self.generator = ContinuousBatch(model.eager, budget, deliver, observe, prefixes)
        elif isinstance(model, LanguageModel):
            self.generator = StreamEngine(model.backend_for_row, deliver)
        if self.generator is not None:
            engines.append(self.generator)
        self._deliver = deliver
        self._jobs: set[Job | GenerationJob] = set()  # whose results are waited for
        self.worker = Worker(name, engines, lambda error: deliver([self._fail_all]))
        self._encoder = ThreadPoolExecutor(1, f"heedful-{name}-tokenizer")

    @property
    def keeps_prefixes(self) -> bool:
        """Keys and values of ended outputs can be used again (`Settings.prefix_tokens`)."""
        return self.is_continuous and bool(self.generator.shares_prefixes)

    @property
    def num_texts(self) -> int:
        """Texts that wait or run."""
        return self._num_texts

    @contextmanager
    def slots(self, count: int, parameter: str | None = None) -> Iterator[None]:
        """Reserve room for all texts of a request, or for none.

        A request takes half of the places at most, however many texts it has: else one could have
        all others refused until its last text ends.

        Args:
            parameter: that gives their number, for the error.

        Raises:
            HttpError: 429 if the queue is full.
        """
        most = self.settings.max_queue
        if count > most:
            message = f"a request may have {most} texts (lines, or outputs), not {count}"
            values = {"name": "texts", "value": count, "limit": most}
            raise HttpError(400, message, code="limit_exceeded", values=values, parameter=parameter)
        places = min(count, (most + 1) // 2)
        if self._num_places + places > most:
            self._metrics.refused(self.name)
            raise HttpError(
                429,
                f"{self._num_places} of {most} places of {self.name} are taken: try again",
                code="rate_limit_exceeded",
                retry_after=1,
            )
        self._num_texts += count
        self._num_places += places
        try:
            with self.held():
                yield
        finally:
            self._num_texts -= count
            self._num_places -= places

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the model open in the block, also if another one takes its place."""
        self._num_holders += 1
        try:
            yield
        finally:
            self._num_holders -= 1
            self._close_if_retired()

    async def on_tokenizer_thread(self, function: Callable[[], Result]) -> Result:
        """The result of a function that is called on the thread of the tokenizer."""
        return await asyncio.get_running_loop().run_in_executor(self._encoder, function)

    async def run(self, job: Job) -> list[Any]:
        """The results of all rows of a job; cancelling the call drops those that have not begun.

        Raises:
            HttpError: 503 if the worker's thread has ended.
        """
        if not job.rows:
            return []
        with self._begun(job, lambda: self.engine.add(job)):
            return await job.result

    async def pieces(self, job: GenerationJob) -> AsyncGenerator[OutputPiece, None]:
        """New tokens of a job's outputs until all have ended; closing it drops the rest.

        One of them has the error of a job that fails: an `HttpError` if the worker's thread has
        ended.
        """
        remaining = job.num_outputs
        with self._begun(job, lambda: self.generator.add(job)):
            while remaining:
                piece = await job.pieces.get()
                remaining -= piece.reason is not None
                yield piece

    @contextmanager
    def _begun(self, job: Job | GenerationJob, add: Callable[[], None]) -> Iterator[None]:
        """Queue a job, and drop what is left of it at the end."""
        self._jobs.add(job)
        self.worker.submit(add, lambda error: self._deliver([lambda: self._fail(job, error)]))
        try:
            yield
        finally:
            self._jobs.discard(job)
            job.cancel()

    def _fail(self, job: Job | GenerationJob, error: Exception) -> None:
        """End a job by an error of its own, or since the thread has ended."""
        job.cancel()
        job.fail(self._ended() if isinstance(error, WorkerError) else error)

    def _fail_all(self) -> None:
        """End all jobs, since the thread has ended."""
        for job in list(self._jobs):
            self._fail(job, WorkerError())

    async def probe(self, timeout: float = 10.0) -> None:
        """Let the model read one token between two turns.

        All calls share one reading, and its result for a second: it needs no key, and takes time
        from requests.

        Raises:
            HttpError: 503 if it fails, or does not answer in time.
        """
        loop = asyncio.get_running_loop()
        reading = self._reading
        if reading is None or (reading.done() and loop.time() >= reading.result()[1]):
            reading = self._reading = self._read()
        try:
            error, _ = await asyncio.wait_for(asyncio.shield(reading), timeout)
        except TimeoutError:
            raise self._failed("does not answer") from None
        if isinstance(error, WorkerError):
            raise self._ended()
        if error is not None:
            raise self._failed("fails; the server's log has the reason")

    def _read(self) -> "asyncio.Future[tuple[Exception | None, float]]":
        """The error of reading a token, and the time until which it counts."""
        loop = asyncio.get_running_loop()
        reading: asyncio.Future[tuple[Exception | None, float]] = loop.create_future()

        def report(error: Exception | None) -> None:
            """Deliver the error of reading a token, or None."""
            if error is not None:
                _log.error("%s fails", self.name, exc_info=error)
            result = error, loop.time() + _PROBE_SECONDS
            self._deliver([lambda: None if reading.done() else reading.set_result(result)])

        def run() -> None:
            """Read a token, on the worker's thread."""
            _read_one_token(self.model)
            report(None)

        self.worker.submit(run, report)
        return reading

    def _ended(self) -> HttpError:
        """The error of all requests after the end of the thread."""
        return self._failed(
            "has stopped by a defect, see the log: reload it, or restart the server"
        )

    def _failed(self, problem: str) -> HttpError:
        values = {"name": self.name}
        message = f"{self.name} {problem}"
        return HttpError(503, message, code="model_failed", values=values, retry_after=5)

    def retire(self) -> None:
        """End the worker after the requests in progress."""
        self._is_retired = True
        self._close_if_retired()

    def _close_if_retired(self) -> None:
        if self._is_retired and not self._num_holders:
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
                model, glossaries = await loop.run_in_executor(pool, self.load, name)
                self.add(name, model, glossaries)

    def load(self, name: str) -> tuple[Any, Glossaries | None]:
        """The model in its directory, after it has read a token, and of a translator its terms;
        raises UserError."""
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
            _log.warning(
                "%s does not name its languages: it answers for every direction, and /languages "
                'and /detect leave it out; set "src_language" and "tgt_language" (such as "de" and '
                '"en") in %s, or data.src_language and data.tgt_language of a recipe',
                name,
                directory / CONFIG,
            )
        if not isinstance(model, Translator):
            return model, None
        return model, Glossaries(name, model, settings.glossary)

    def add(self, name: str, model: Any, glossaries: Glossaries | None = None) -> None:
        """Serve a model, in place of the one of this name, which ends after its requests."""
        former = self.models.get(name)
        directory = self.directories.setdefault(name, Path(name))
        created = _written_at(directory)
        self.models[name] = ServedModel(
            name, model, self.settings, self.metrics, created, glossaries
        )
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

    def without_paths(self, message: str) -> str:
        """A message for clients: directories of models by name, and other files by name alone."""
        for name, directory in self.directories.items():
            for path in (str(directory.resolve()), str(directory)):
                if "/" in path:  # "." is in other words, too
                    message = message.replace(path, name)
        return _ABSOLUTE.sub(r"\1", message)

    def close(self) -> None:
        """End all workers after their present turn."""
        for served in self.models.values():
            served.worker.close()


def _names_languages(model: Translator) -> bool:
    metadata = model.metadata
    targets = metadata.tgt_language or metadata.language_tags
    return bool(metadata.language_codes or (metadata.src_language and targets))


def _written_at(directory: Path) -> int:
    try:
        times = [path.stat().st_mtime for path in directory.glob("*.safetensors")]
    except OSError:  # they are being replaced
        return 0
    return int(max(times, default=0))


def _read_one_token(model: Any) -> None:
    """A small pass through a model; raises what the model does."""
    if isinstance(model, Generator):
        row = model.prompt_ids([_any_row(model)])
        options: Any = {"max_new_tokens": 1, "beam_size": 1, "temperature": 0.0}
        if codes := model.metadata.language_codes:
            options["tgt_language"] = next(iter(codes))
        model.generate(row, **options)
    else:
        model.vectors([_any_row(model)])


def _any_row(model: Any) -> list[int]:
    tokenizer = model.tokenizer
    return list(tokenizer.add_special_tokens([])) or [tokenizer.vocab_size - 1]
