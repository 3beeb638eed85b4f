"""Text generation with a saved model: continuations of prompts, translations of sources."""

import collections.abc
import logging
import secrets
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Unpack, overload

from heedful.backends.base import GenerationBackend, GenerationRequest, Settings, own_stop_rule
from heedful.errors import UserError, describe
from heedful.generation.outputs import Counts, Failure
from heedful.options import Options
from heedful.pipelines.base import NUM_WARNINGS, SavedModel, Texts
from heedful.pipelines.batching import by_length
from heedful.pipelines.generations import FAILURES, Generation, TextPieces, best_of
from heedful.pipelines.inputs import as_batch, check_counts
from heedful.pipelines.keywords import GenerationKeywords
from heedful.pipelines.metadata import GenerationIds, ModelMetadata
from heedful.pipelines.requests import check_limits, prefixes_of, without_rows
from heedful.pipelines.windows import Window

_SEEDS = 2**31
Counted = Sequence[Counts] | None
_PLAIN = {int, float, str, bool, type(None)}  # immutable: options of these can be cached


class Generator(SavedModel):
    """A model that generates text: an encoder-decoder or a decoder-only net with tokenizers.

    All calls accept the fields of `heedful.options.Options` as keywords, whose defaults are those
    of the model's metadata. A result does not depend on the other prompts of a batch.
    """

    kind = "language model"
    default_options: ClassVar[dict[str, Any]] = {}  # defaults where the metadata has none
    backend: GenerationBackend | None
    _notes: frozenset[str] | set[str] = frozenset()  # of requests that the backend cannot run
    # The last call's keywords with their types, metadata and settings, and the resulting options.
    # Checking them takes as long as a small model takes to generate.
    _last: tuple[dict[str, Any], ModelMetadata, Settings | None, Options] | None = None
    _last_request: GenerationRequest | None = None

    @property
    def ids(self) -> GenerationIds:
        """Token ids with a role in generation."""
        return self.metadata.generation

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence, too
        self,
        prompts: str,
        *,
        return_details: Literal[False] = False,
        **options: Unpack[GenerationKeywords],
    ) -> str: ...

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence, too
        self, prompts: str, *, return_details: Literal[True], **options: Unpack[GenerationKeywords]
    ) -> list[Generation]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str],
        *,
        return_details: Literal[False] = False,
        **options: Unpack[GenerationKeywords],
    ) -> list[str]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[int],
        *,
        return_details: Literal[False] = False,
        **options: Unpack[GenerationKeywords],
    ) -> list[int]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[int],
        *,
        return_details: Literal[True],
        **options: Unpack[GenerationKeywords],
    ) -> list[Generation]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        return_details: Literal[False] = False,
        **options: Unpack[GenerationKeywords],
    ) -> list[list[int]]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        return_details: Literal[True],
        **options: Unpack[GenerationKeywords],
    ) -> list[list[Generation]]: ...

    def generate(self, prompts: Any, *, return_details: bool = False, **options: Any) -> Any:
        """The output for a prompt, or one for each prompt of a list.

        Args:
            prompts: a text or a list of texts; or the ids of one or of several prompts, whose
                outputs are then ids too.
            return_details: return a list of `Generation`s for each prompt, up to `num_return`: the
                best first, samples in their order. Without, `num_return` above 1 gives a list of
                texts (or of ids) for each prompt, in the same order.
            options: fields of `heedful.options.Options`.

        Raises:
            UserError: an option out of range; a prompt that is too long.

        Example: `model.generate("A dog", beam_size=4, num_return=2, return_details=True)[0].score`
        """
        batch, is_single = as_batch(prompts)
        check_counts(batch, options)
        if not return_details:
            options = {"scores": False} | options
        resolved = self.completed(self.options(**options))
        in_ids = len(batch) > 0 and not isinstance(batch[0], str) and not return_details
        results: list[Any] = Window(
            self, batch, 0, resolved, waits=True, with_texts=not in_ids
        ).generations()
        if not return_details:
            results = best_of(results, resolved.num_return, "ids" if in_ids else "text")
        return results[0] if is_single else results

    def generations(
        self, prompts: Texts, options: Options, *, counts: Counted = None
    ) -> list[list[Generation]]:
        """`generate` with details of a list of prompts, by options of `completed`.

        Args:
            counts: for a further search, how often each output has some tokens. It logs nothing,
                and runs eager where a backend given by name does not support it.
        """
        return Window(self, prompts, 0, options, waits=True, counts=counts).generations()

    def iterate_generations(
        self, windows: Iterable[Texts], *, ahead: int = 0, **options: Unpack[GenerationKeywords]
    ) -> Iterator[list[Generation]]:
        """`generate` with details for a stream of prompts, which may be endless, in their order.

        Args:
            windows: lists of prompts; batches of similar length are formed within each. Only the
                windows that are in progress are in memory.
            ahead: windows that are started before the first one is complete, so that the workers
                of a backend stay busy; 0 for prompts that arrive one after another's answer.
        """
        if isinstance(windows, str) or not isinstance(windows, Iterable):
            raise UserError(f"windows must be lists of prompts, not {describe(windows)}")
        resolved = self.completed(self.options(**options))
        started: deque[Window] = deque()
        number = 0

        def complete(remaining: int) -> Iterator[list[Generation]]:
            while len(started) > remaining:
                yield from started.popleft().generations()

        try:
            for prompts in windows:
                started.append(Window(self, prompts, number, resolved, waits=not ahead))
                number += len(prompts)
                yield from complete(ahead)
        except UserError:  # of a later window: outputs of the former ones are not lost
            yield from complete(0)
            raise
        yield from complete(0)

    def stream(
        self, prompt: str | Sequence[int], **options: Unpack[GenerationKeywords]
    ) -> collections.abc.Generator[str, None, str]:
        """The text of `generate` in pieces (`TextPieces`) while it is decoded; not by beam search.

        The final text is the generator's return value.
        """
        return (yield from self.stream_with(prompt, self.options(**{"beam_size": 1} | options)))

    def stream_with(
        self, prompt: str | Sequence[int], options: Options
    ) -> collections.abc.Generator[str, None, str]:
        """`stream` by options with the model's defaults."""
        resolved = self.completed(options)
        if resolved.by_beams or resolved.num_return > 1:
            raise UserError("only greedy decoding and single samples can be streamed")
        prompts: Any = [prompt]
        [row] = self.prompt_ids(prompts, resolved)
        if not row:
            return ""
        pieces = TextPieces(self.tgt_tokenizer.decoder, resolved.stop)
        request = self.request_of_batch([row], [0], resolved)
        backend = self.backend_for([row], request)
        for tokens, ended in backend.stream_tokens(row, request):
            if ended and not tokens:
                self.report_failure("dead_end", resolved.number(0))
            if piece := pieces.add(tokens, ended):
                yield piece
        return pieces.text

    def options(self, **keywords: Any) -> Options:
        """Options with the model's defaults; raises UserError for an unknown one."""
        last, metadata = self._last, self.metadata
        settings = self.backend.settings if self.backend else self.settings
        given = {name: (type(value), value) for name, value in keywords.items()}  # True equals 1
        is_plain = all(kind in _PLAIN for kind, _ in given.values())
        if is_plain and last and last[0] == given and last[1] is metadata and last[2] is settings:
            return last[3]
        measured = settings.batch_tokens
        more = {"batch_tokens": measured} if measured else {}
        resolved = Options.from_keywords(keywords).with_defaults(
            {**self.default_options, **metadata.options, **more}
        )
        if is_plain:
            self._last = given, metadata, settings, resolved
        return resolved

    def completed(self, options: Options) -> Options:
        """The options of one call: with its grammar, and a random seed for samples without one."""
        if options.json_schema is not None or options.regex is not None:
            from heedful.pipelines.grammar import with_grammar

            options = with_grammar(self, options)
        if not options.samples or options.seed is not None:
            return options
        torch = sys.modules.get("torch")  # so that torch.manual_seed repeats a sample
        seed = int(torch.randint(_SEEDS, ())) if torch else secrets.randbelow(_SEEDS)
        return replace(options, seed=seed)

    def prompt_ids(self, prompts: Texts, options: Options | None = None) -> list[list[int]]:
        """Ids of each prompt with the model's special tokens; empty: the output is blank."""
        raise NotImplementedError

    def length_limit(self, row: list[int], options: Options) -> int:
        """Most new tokens for a prompt."""
        raise NotImplementedError

    def first_id(self, options: Options) -> int | None:
        """The id that each output begins with; None: any."""
        return self.ids.forced_bos_id

    def batches(
        self, rows: Sequence[Sequence[int]], options: Options, workers: int = 1
    ) -> Iterator[list[int]]:
        """Indices of the prompts of each batch, shared by all workers; the longest first."""
        return by_length(rows, options.row_tokens, workers)

    def end_ids(self) -> list[int]:
        """The EOS ids; raises UserError for a model without any."""
        if self.ids.eos_ids:
            return list(self.ids.eos_ids)
        raise UserError("this model has no EOS id; import it with its generation_config.json")

    # --- batches --------------------------------------------------------------------------------

    def backend_for(self, rows: list[list[int]], request: GenerationRequest) -> GenerationBackend:
        """The model's backend, or the net itself for a request that the backend does not support.

        The first such request of a model is reported by a warning.

        Raises:
            UserError: options that a backend given by name does not support.
        """
        eager: GenerationBackend
        if (backend := self.backend) is not None:
            reasons = backend.unsupported_reasons(rows, request)
            if not reasons:
                if rule := own_stop_rule(backend, request.options):
                    self.note_once(f"{backend.name} ends beams as by stop_rule={rule}")
                return backend
            if not self.has_net:
                raise UserError(f"{'; '.join(reasons)}: leave it out, or take one of the models")
            if request.counts is None:
                self._check_may_run_eager(backend, reasons, request)
        eager = self.eager
        return eager

    def _check_may_run_eager(
        self, backend: GenerationBackend, reasons: list[str], request: GenerationRequest
    ) -> None:
        """Note that a request runs eager; an error for options, if the backend is given by name."""
        if self.backend_is_named:
            of_options = backend.unsupported_reasons([], request.select([]))
            if of_options:
                raise UserError(
                    f"{backend.name} cannot run this: {'; '.join(of_options)}; leave it out, or "
                    "run the net: backend=eager"
                )
        self.note_once(f"{backend.name} cannot run this ({'; '.join(reasons)}), so it runs eager")

    def note_once(self, text: str) -> None:
        """Log a note, the first time."""
        if text not in self._notes:
            self._notes = {*self._notes, text}
            logging.getLogger("heedful").warning(f"note: {text}")

    def request_of_batch(
        self, rows: list[list[int]], numbers: list[int], options: Options, counts: Counted = None
    ) -> GenerationRequest:
        """The request of a batch; `numbers`: the index of each row among all prompts."""
        request = self._last_request
        if request is None or request.options is not options:
            request = without_rows(self, options)
            self._last_request = request if options.draft is None else None  # a draft may be large
        limits = [self.length_limit(row, options) for row in rows]
        check_limits(limits, numbers, options)
        return request._replace(
            max_new_tokens=limits,
            prompt_numbers=numbers,
            output_prefixes=prefixes_of(self, numbers, options),
            seeds=options.seeds(numbers),
            counts=None if counts is None else [counts[number] for number in numbers],
        )

    def request(
        self, rows: list[list[int]], **options: Unpack[GenerationKeywords]
    ) -> GenerationRequest:
        """The request of one batch of prompts as ids."""
        return self.request_with(rows, self.options(**options))

    def request_with(self, rows: list[list[int]], options: Options) -> GenerationRequest:
        """`request` by options with the model's defaults."""
        return self.request_of_batch(rows, list(range(len(rows))), self.completed(options))

    def sources(self, prompts: Texts, options: Options) -> Sequence[Any]:
        """The prompts, as `prompt_ids` and `kept` take them too; see `Translator.sources`."""
        return prompts

    def kept(
        self,
        sources: Sequence[Any],
        outputs: list[list[Generation]],
        options: Options,
        *,
        at_once: bool = False,
    ) -> list[Any]:
        """Outputs for each prompt with what they must keep of it; see `Translator.kept`."""
        return outputs

    def report_failure(self, failure: Failure, number: int) -> None:
        """Count an output that the constraints ended, and log a warning for the first ones.

        Args:
            number: of the prompt.
        """
        self.failures[failure] = self.failures.get(failure, 0) + 1
        if sum(self.failures.values()) <= NUM_WARNINGS:
            noun = "line" if self.kind == "translator" else "prompt"
            logging.getLogger("heedful").warning(f"{noun} {number}: {FAILURES[failure]}")
        elif sum(self.failures.values()) == NUM_WARNINGS + 1:
            logging.getLogger("heedful").warning("more outputs of this kind are counted, not named")
