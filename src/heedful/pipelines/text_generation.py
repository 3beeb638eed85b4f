"""Models that write text: one call for what goes on with a prompt and what answers a source."""

import collections.abc
import logging
import secrets
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from heedful.backends.base import GenerationBackend, GenerationRequest, Settings
from heedful.errors import UserError
from heedful.generation.hypotheses import Hypothesis
from heedful.generation.stopping import cut
from heedful.options import Options
from heedful.pipelines.base import SavedModel, Texts, by_length, split_among
from heedful.pipelines.metadata import GenerationIds, ModelMetadata

_SEEDS = 2**31
_PLAIN = {int, float, str, bool, type(None)}  # whose values are the same where they are equal


@dataclass(frozen=True)
class Generation:
    """One output. `finished` is False where the length limit cut it off.

    `ids` are the new tokens, the end included where it was reached; `log_prob` is the sum of the
    tokens' natural log-probabilities under the model, `score` what outputs are ranked by; both may
    be NaN where they were not asked for (`Options.scores`).
    """

    text: str
    ids: list[int]
    score: float
    log_prob: float
    finished: bool


@dataclass(frozen=True)
class TextScore:
    """How likely a text is: the sum of its tokens' natural log-probabilities, and their number."""

    log_prob: float
    num_tokens: int


class Generator(SavedModel):
    """A model that writes text. Its kinds say how a prompt is read, and how long an output may be.

    Every call takes the fields of `heedful.options.Options` by keyword; what is not given is as the
    model's metadata says. A result does not depend on what else is in a batch.
    """

    kind = "language model"
    usual: ClassVar[dict[str, Any]] = {}  # options where neither call nor metadata says any
    backend: GenerationBackend | None
    _has_warned = False  # that the backend cannot run everything
    # Of the last call: what was given, metadata and settings, and what came of them. A small model
    # answers in the time that it takes to check and to gather them.
    _last: tuple[dict[str, Any], ModelMetadata, Settings | None, Options] | None = None
    _last_request: dict[str, Any] | None = None

    @property
    def ids(self) -> GenerationIds:
        """Tokens that a generation begins and ends with."""
        return self.metadata.generation

    def generate(self, prompts: Texts, **options: Any) -> list[str] | list[list[int]]:
        """The best output for each prompt, in order: text for text, new ids for lists of ids."""
        given = {"scores": False} | options
        if len(prompts) and not isinstance(prompts[0], str):
            self._check_each(prompts, given)
            found = self._begin(prompts, 0, self._settled_options(given), waits=True)()
            return [outputs[0].ids for outputs in found]
        return [outputs[0].text for outputs in self.generations(prompts, **given)]

    def generations(self, prompts: Texts, **options: Any) -> list[list[Generation]]:
        """Up to `num_return` outputs for each prompt, best first; samples in their order.

        Raises UserError for an option out of range, and for a prompt that is too long.
        """
        self._check_each(prompts, options)
        return [*self.in_turn([prompts], **options)]

    def in_turn(
        self, windows: Iterable[Texts], *, ahead: int = 0, **options: Any
    ) -> Iterator[list[Generation]]:
        """`generations` of prompts that come in windows, one prompt's after the other's.

        Inside a window prompts of similar length are worked on together. What is held is the
        windows that are begun, so that what comes may have no end.

        Args:
            ahead: windows that are begun before the outputs of the first are complete, so that an
                backend with workers always has work; 0 for prompts that wait for their answers.
        """
        chosen = self._settled_options(options)
        begun: deque[Callable[[], list[list[Hypothesis]]]] = deque()
        number = 0

        def finished(left: int) -> Iterator[list[Generation]]:
            while len(begun) > left:
                for outputs in begun.popleft()():
                    yield self._read(outputs, chosen.stop)

        try:
            for prompts in windows:
                begun.append(self._begin(prompts, number, chosen, waits=not ahead))
                number += len(prompts)
                yield from finished(ahead)
        except UserError:  # of a later window: what came before it is not lost
            yield from finished(0)
            raise
        yield from finished(0)

    def stream(
        self, prompt: str | Sequence[int], **options: Any
    ) -> collections.abc.Generator[str, None, str]:
        """The text that `generate` gives, in pieces as it is written; no beam search.

        A piece is text that further tokens leave as it is: characters that are not complete, and
        what may begin a stop text, come later. The pieces join to the final text wherever the
        tokenizer's decoder only appends, as those of heedful and of known models do. Where it
        changes text that was given all the same, the next piece begins with the first changed
        character. The final text is the generator's return value too.
        """
        chosen = self._settled_options({"beam_size": 1} | options)
        if (chosen.beam_size or 1) > 1 or chosen.num_return > 1:
            raise UserError("only greedy decoding and single samples can be streamed")
        prompts: Any = [prompt]
        [row] = self.prompt_ids(prompts, chosen)
        if not row:
            return ""
        written: list[int] = []
        text = shown = ""
        request = self._request([row], [0], chosen)
        backend = self._backend_for([row], request)
        for tokens, ended in backend.stream_tokens(row, request):
            written += tokens
            text = cut(self._decode(written), chosen.stop) if chosen.stop else self._decode(written)
            safe = text if ended else _settled(text, chosen.stop)
            if not shown.startswith(safe):
                pairs = enumerate(zip(shown, safe, strict=False))
                changed = next((n for n, (old, new) in pairs if old != new), len(shown))
                yield safe[changed:]
                shown = safe
        return text

    def options(self, **given: Any) -> Options:
        """The options given, with the metadata's defaults; raises UserError for an unknown one."""
        last, metadata = self._last, self.metadata
        settings = self.backend.settings if self.backend else self.settings
        is_plain = _PLAIN.issuperset(map(type, given.values()))
        if is_plain and last and last[0] == given and last[1] is metadata and last[2] is settings:
            return last[3]
        measured = settings.batch_tokens
        more = {"batch_tokens": measured} if measured else {}
        chosen = Options.from_keywords(given).with_defaults(
            {**self.usual, **metadata.options, **more}
        )
        if is_plain:
            self._last = given, metadata, settings, chosen
        return chosen

    def prompt_ids(self, prompts: Texts, options: Options | None = None) -> list[list[int]]:
        """Ids of each prompt with what the model expects around it; none: the output is blank."""
        raise NotImplementedError

    def length_limit(self, row: list[int], options: Options) -> int:
        """Most new tokens for a prompt."""
        raise NotImplementedError

    def batches(
        self, rows: Sequence[Sequence[int]], options: Options, workers: int = 1
    ) -> Iterator[list[int]]:
        """Numbers of the prompts that all workers have at a time, the longest first."""
        return by_length(rows, options.row_tokens, workers)

    def end_ids(self) -> list[int]:
        """What ends a text; raises UserError for a net without an end mark."""
        if self.ids.eos_ids:
            return list(self.ids.eos_ids)
        raise UserError("this model has no end mark; import it with its generation_config.json")

    # --- batches --------------------------------------------------------------------------------

    @staticmethod
    def _check_each(prompts: Texts, options: Mapping[str, Any]) -> None:
        """Raises UserError for options of each prompt that are not as many as the prompts."""
        for name, what in (("prefixes", "texts"), ("seed", "prompts")):
            given = options.get(name)
            if given is not None and isinstance(given, Sequence) and len(given) != len(prompts):
                noun = "seeds" if name == "seed" else name
                raise UserError(f"{len(given)} {noun} for {len(prompts)} {what}")

    def _settled_options(self, given: dict[str, Any]) -> Options:
        """What is asked for, with a seed where something is drawn."""
        chosen = self.options(**given)
        if not chosen.samples or chosen.seed is not None:
            return chosen
        torch = sys.modules.get("torch")  # so that torch.manual_seed repeats a sample
        seed = int(torch.randint(_SEEDS, ())) if torch else secrets.randbelow(_SEEDS)
        return replace(chosen, seed=seed)

    def _begin(
        self, prompts: Texts, first: int, options: Options, *, waits: bool
    ) -> Callable[[], list[list[Hypothesis]]]:
        """Give the batches of a window to the backend; outputs in the prompts' order.

        Where the window `waits` for its outputs and is one batch, nothing runs beside it.
        """
        named = replace(options, first_number=options.first_number + first) if first else options
        rows = self.prompt_ids(prompts, named)
        workers = self.backend.settings.workers if self.backend else 1
        if len(rows) == 1 and rows[0]:
            batches = [[0]]
        else:
            batches = split_among(workers, self.batches(rows, options, workers))
        begun: list[tuple[list[int], Callable[[], list[list[Hypothesis]]]]] = []
        for places in batches:
            chosen = [rows[place] for place in places]
            request = self._request(chosen, [first + place for place in places], options)
            backend = self._backend_for(chosen, request)
            if waits and len(batches) == 1:
                begun.append((places, partial(backend.outputs, chosen, request)))
            else:
                begun.append((places, backend.submit(chosen, request)))

        def finish() -> list[list[Hypothesis]]:
            found = [[] if row else [Hypothesis([], 0.0, True, 0.0, [])] for row in rows]
            if options.progress:
                options.progress(sum(not row for row in rows))
            for places, wait in begun:
                for place, outputs in zip(places, wait(), strict=True):
                    found[place] = outputs
                if options.progress:
                    options.progress(len(places))
            return found

        return finish

    def _backend_for(self, rows: list[list[int]], request: GenerationRequest) -> GenerationBackend:
        """The backend of a call: the net where the model's backend does not support the request,
        with one note a model."""
        backend: GenerationBackend = self.backend or self.eager
        reasons = backend.unsupported_reasons(rows, request)
        if not reasons:
            return backend
        if not self.has_net:
            raise UserError(f"{'; '.join(reasons)}: leave it out, or take one of the models")
        if not self._has_warned:
            self._has_warned = True
            logging.getLogger("heedful").warning(
                f"note: {backend.name} cannot run this ({'; '.join(reasons)}), so it runs eager"
            )
        eager: GenerationBackend = self.eager
        return eager

    def _request(
        self, rows: list[list[int]], numbers: list[int], options: Options
    ) -> GenerationRequest:
        """The request of some prompts, by their numbers."""
        of_all, given = self._last_request, options.prefixes
        if of_all is None or of_all["options"] is not options:
            of_all = self._shared_fields(options)
            self._last_request = of_all if options.draft is None else None  # a draft may be large
        prefixes = None if given is None else [self.tgt_tokenizer.encode(given[n]) for n in numbers]
        limits = [self.length_limit(row, options) for row in rows]
        if options.min_new_tokens > (shortest := min(limits, default=options.min_new_tokens)):
            place = limits.index(shortest)
            raise UserError(
                f"prompt {numbers[place] + options.first_number} may have {shortest} new "
                f"tokens, but min_new_tokens is {options.min_new_tokens}: ask for fewer, or set "
                "max_new_tokens"
            )
        return GenerationRequest(
            **of_all,
            decode=self._decode,
            max_new_tokens=limits,
            prompt_numbers=numbers,
            output_prefixes=prefixes,
            seeds=options.seeds(numbers),
        )

    def _shared_fields(self, options: Options) -> dict[str, Any]:
        """The fields of a request that all prompts of a call share."""
        ids, draft = self.ids, options.draft

        def encode(text: str) -> list[int]:
            return self.tgt_tokenizer.encode(text)

        def forms(banned: Any) -> list[list[int]]:
            """A text at the beginning of an output, and behind a space."""
            if not isinstance(banned, str):
                return [_as_list(banned)]
            first, behind = encode(banned), encode(f" {banned}")
            return [first, behind] if behind and behind != first else [first]

        required = [encode(p) if isinstance(p, str) else _as_list(p) for p in options.require]
        if required:
            self.check_ids(required, "tgt_")
        never = ids.suppressed_ids
        if options.no_unknown and self.has_tokenizer and self.tgt_tokenizer.unk_id >= 0:
            never = (*never, self.tgt_tokenizer.unk_id)
        if isinstance(draft, Generator):
            draft = (draft.eager, draft.ids.decoder_start_ids)
        return {
            "options": options,
            "decoder_start_ids": ids.decoder_start_ids,
            "eos_ids": tuple(self.end_ids()),
            "suppressed_ids": never,
            "forced_bos_id": ids.forced_bos_id,
            "forced_eos_id": ids.forced_eos_id,
            "bad_words_ids": [ids for each in options.banned for ids in forms(each)],
            "required_ids": required,
            "max_length": self.config.max_length,
            "draft": draft,
        }

    def request(self, rows: list[list[int]], **options: Any) -> GenerationRequest:
        """The request of prompts that are given as ids."""
        return self._request(rows, list(range(len(rows))), self._settled_options(options))

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tgt_tokenizer.decode(list(ids))

    def _read(self, outputs: list[Hypothesis], stop: Sequence[str]) -> list[Generation]:
        read = []
        for found in outputs:
            text = self._decode(found.ids) if self.has_tokenizer else ""
            text = cut(text, stop) if stop else text
            read.append(Generation(text, found.ids, found.score, found.log_prob, found.finished))
        return read


def _settled(text: str, stop: Sequence[str]) -> str:
    """What of a text cannot change any more: not a broken character, nor what may begin a stop."""
    text = text.rstrip("\N{REPLACEMENT CHARACTER}")
    longest = max((len(string) for string in stop), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-size:]) for string in stop):
            return text[:-size]
    return text


def _as_list(ids: int | Sequence[int]) -> list[int]:
    return [ids] if isinstance(ids, int) else list(ids)
