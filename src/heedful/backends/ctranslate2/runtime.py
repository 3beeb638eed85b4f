"""CTranslate2 as a backend: supported requests, and its calls."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple
from zipfile import BadZipFile

import numpy as np

from heedful import extras
from heedful.backends.base import Capability, GenerationRequest, Settings
from heedful.backends.ctranslate2.instructions import select_instructions
from heedful.backends.ctranslate2.vocabulary import read_vocabulary
from heedful.backends.manifest import NetFacts
from heedful.backends.shortlist import Shortlist
from heedful.errors import DamagedError, UserError
from heedful.files import write_text
from heedful.generation.hypotheses import Hypothesis
from heedful.options import Options

Family = Literal["encoder_decoder", "decoder_only", "encoder_only"]
VOCABULARY_MAP = "vmap.txt"  # of a shortlist
HEAD = "head.npz"  # the class matrix of a classifier, which the format lacks
# Options that CTranslate2 lacks, with the values that have no effect.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_groups": (1,),
    "coverage_penalty": (0,),
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff"), (None, 0)),
    "typical_p": (None, 1),
    "top_h": (None,),
    "encoder_no_repeat_ngram_size": (None, 0),
    "min_tokens_to_keep": (1,),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), (None, 1)),
    **dict.fromkeys(("sequence_bias", "begin_suppress_tokens"), (None, (), [])),
    "exponential_decay_length_penalty": (None,),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (None, 0)),
    **dict.fromkeys(("stop", "require"), ((), [])),
    **dict.fromkeys(("draft", "prefix_function", "prefixes"), (None,)),
    "forced": (None, {}),
}
_unsupported_values = attrgetter(*_UNSUPPORTED)


@dataclass(frozen=True, kw_only=True)
class CTranslate2Facts(NetFacts):
    """Facts of a converted net that its files do not hold.

    Attributes:
        longest_prompt: most tokens of a prompt (`longest_prompt` of the conversion); None: any.
    """

    longest_prompt: int | None = None


class _Call(NamedTuple):
    """Arguments of calls with the same options and ids, and the reasons against such calls."""

    options: Options
    ids: tuple[Any, ...]
    reasons: list[str]
    keywords: dict[str, Any]


@contextmanager
def _undamaged(directory: Path) -> Iterator[None]:
    """Turn errors of damaged or exchanged files, some only found at use, into DamagedError."""
    try:
        yield
    except UserError:
        raise
    except (RuntimeError, ValueError, LookupError, OSError, BadZipFile) as error:
        raise DamagedError(
            f"{directory} is damaged, or of another model ({error}): make it again by "
            "`heedful optimize`"
        ) from None


class CTranslate2:
    """A directory that `heedful.backends.ctranslate2.conversion.write` wrote.

    A beam search ends after `beam_size` finished hypotheses, as by the stop rule `beam_full`, but
    an output at the length limit gets no EOS. Suppressed tokens are excluded before the softmax, so
    that the other tokens share their probability, as by `renormalize_logits`. With a shortlist, the
    allowed tokens are those of all sources of a batch.

    Args:
        settings: `threads` of each worker; `workers` run batches side by side.
        device: cpu or cuda.

    Raises:
        UserError: ctranslate2 is not installed, or refuses the directory, type or device.
    """

    name = "ctranslate2"

    def __init__(
        self,
        directory: Path,
        facts: CTranslate2Facts,
        precision: str,
        settings: Settings,
        device: str = "cpu",
    ) -> None:
        self.facts, self.precision, self.settings = facts, precision, settings
        self._directory = directory
        with _undamaged(directory):
            self._open(device)

    def _open(self, device: str) -> None:
        facts, directory = self.facts, self._directory
        capabilities: set[Capability] = {"states"} if facts.family == "encoder_only" else set()
        if facts.family == "encoder_only" and (directory / HEAD).is_file():
            capabilities.add("logits")
            with np.load(directory / HEAD) as head:
                self._labels = head["weight"], head["bias"]
        self.capabilities = frozenset(capabilities)
        self._model = _open(directory, facts.family, self.precision, self.settings, device)
        stem = {"encoder_decoder": "target_vocabulary"}.get(facts.family, "vocabulary")
        self._target = read_vocabulary(directory, stem)
        self._source = read_vocabulary(directory, "source_vocabulary")
        self._has_shortlist = (directory / VOCABULARY_MAP).is_file()
        self._ids = {token: index for index, token in enumerate(self._target)}
        self._last: _Call | None = None

    # --- generation -----------------------------------------------------------------------------

    def unsupported_reasons(self, rows: list[list[int]], request: GenerationRequest) -> list[str]:
        """See `GenerationBackend.unsupported_reasons`."""
        reasons = self._call(request).reasons
        if self.facts.family == "encoder_decoder":
            return reasons
        reasons, longest = [*reasons], self.facts.longest_prompt
        if longest is not None and max(map(len, rows)) > longest:
            reasons.append(f"a prompt is longer than the window of {longest} tokens")
        if any(
            len(r) + n > request.max_length
            for r, n in zip(rows, request.max_new_tokens, strict=True)
        ):
            longest = request.max_length
            reasons.append(f"prompt and output may exceed the {longest} tokens of the net")
        return reasons

    def outputs(self, rows: list[list[int]], request: GenerationRequest) -> list[list[Hypothesis]]:
        """See `GenerationBackend.outputs`."""
        # A synchronous call is a little faster than `submit`.
        with _undamaged(self._directory):
            return self._read(self._start(rows, request, asynchronous=False), rows, request)

    def submit(
        self, rows: list[list[int]], request: GenerationRequest
    ) -> Callable[[], list[list[Hypothesis]]]:
        """See `GenerationBackend.submit`."""
        with _undamaged(self._directory):
            futures = self._start(rows, request, asynchronous=True)

        def wait() -> list[list[Hypothesis]]:
            with _undamaged(self._directory):
                return self._read([future.result() for future in futures], rows, request)

        return wait

    def _start(
        self, rows: list[list[int]], request: GenerationRequest, *, asynchronous: bool
    ) -> list[Any]:
        """The result of each row, or its future, by calls in which no row depends on another.

        In one call CTranslate2 treats the part of a prompt beyond the shortest prompt as output:
        rules and beams see it, and beside a prompt of one token it is returned. So prompts of
        different lengths are in different calls where that matters.
        """
        options = request.options
        has_prompts = self.facts.family == "decoder_only"
        is_plain = (options.beam_size or 1) == 1
        groups: dict[tuple[int, int], list[int]] = {}
        for index, (row, limit) in enumerate(zip(rows, request.max_new_tokens, strict=True)):
            length = (min(len(row), 2) if is_plain else len(row)) if has_prompts else 0
            # A sample beyond its limit can be cut, but its score is that of the whole.
            own_limit = limit if options.samples and options.scores else 0
            groups.setdefault((length, own_limit), []).append(index)
        if len(groups) == 1:
            return self._results(rows, request, asynchronous)
        results: dict[int, Any] = {}
        for indices in groups.values():
            batch = [rows[index] for index in indices]
            batch_results = self._results(batch, request.select(indices), asynchronous)
            results.update(zip(indices, batch_results, strict=True))
        return [results[index] for index in range(len(rows))]

    def _read(
        self, results: list[Any], rows: list[list[int]], request: GenerationRequest
    ) -> list[list[Hypothesis]]:
        """The outputs of each row, searched again where one exceeds the row's own limit.

        Samples are not repeated, which would favor early ends: `_outputs` cuts them, or their call
        has a single limit.
        """
        limits = request.max_new_tokens
        outputs = list(map(self._outputs, results, limits, repeat(request)))
        if len({*limits}) == 1:
            return outputs
        long: dict[int, list[int]] = {}
        for index, (limit, hypotheses) in enumerate(zip(limits, outputs, strict=True)):
            if max(len(hypothesis.ids) for hypothesis in hypotheses) > limit:
                long.setdefault(limit, []).append(index)
        futures = {
            limit: self._start(
                [rows[i] for i in indices], request.select(indices), asynchronous=True
            )
            for limit, indices in long.items()
        }
        for limit, indices in long.items():
            for index, future in zip(indices, futures[limit], strict=True):
                outputs[index] = self._outputs(future.result(), limit, request)
        return outputs

    def stream_tokens(
        self, row: list[int], request: GenerationRequest
    ) -> Iterator[tuple[list[int], bool]]:
        """See `GenerationBackend.stream_tokens`."""
        keys, limit = {**self._call(request).keywords}, request.max_new_tokens[0]
        for name in ("beam_size", "num_hypotheses", "length_penalty", "return_scores"):
            del keys[name]
        del keys["return_end_token"]
        [source] = self._words([row], self._source)
        if keys.pop("include_prompt_in_result", None) is not None:
            steps = self._model.generate_tokens(source, max_length=limit, **keys)
        elif keys.pop("min_decoding_length") > 0 or "use_vmap" in keys:
            # The call has no least length, and returns ids within the shortlist.
            [[best]] = self.outputs([row], request)
            yield best.ids, True
            return
        else:
            prefix = keys.pop("target_prefix", [None])[0]
            steps = self._model.generate_tokens(
                source, target_prefix=prefix, max_decoding_length=limit, **keys
            )
        count = 0
        while True:
            with _undamaged(self._directory):
                step = next(steps, None)
            if step is None:
                return
            count += 1
            at_limit = count == limit and step.token_id not in request.eos_ids
            forced = request.forced_eos_id
            token = forced if at_limit and forced is not None else step.token_id
            yield [token], bool(step.is_last)

    def log_probs(
        self, rows: list[list[int]], targets: list[list[int]] | None, request: GenerationRequest
    ) -> list[np.ndarray]:
        """See `GenerationBackend.log_probs`."""
        if targets is None:
            sides = [self._words(rows)]
        else:
            sides = [self._words(rows, self._source), self._words(targets)]
        with _undamaged(self._directory):
            results = self._model.score_batch(*sides, max_input_length=0)
        return [np.array(result.log_probs, np.float32) for result in results]

    def _results(
        self, rows: list[list[int]], request: GenerationRequest, asynchronous: bool
    ) -> list[Any]:
        keys, words = self._call(request).keywords, self._words(rows, self._source)
        limit = max(request.max_new_tokens)
        if self.facts.family == "decoder_only":
            run, keys = self._model.generate_batch, keys | {"max_length": limit}
        else:
            run, keys = self._model.translate_batch, keys | {"max_decoding_length": limit}
        if "target_prefix" in keys:
            keys["target_prefix"] = keys["target_prefix"] * len(rows)
        return list(run(words, asynchronous=asynchronous, **keys))

    def _call(self, request: GenerationRequest) -> "_Call":
        """The arguments of a request; those of the last call where options and ids are the same."""
        last = self._last
        if last is None or last.options is not request.options or last.ids != _ids(request):
            with _undamaged(self._directory):
                keywords = self._keywords(request)
            last = _Call(request.options, _ids(request), self._unsupported(request), keywords)
            self._last = None if last.reasons else last
        return last

    def _unsupported(self, request: GenerationRequest) -> list[str]:
        """The reasons against a request for any prompt."""
        options = request.options
        values = _unsupported_values(options)
        reasons = [
            f"it has no {name}"
            for (name, idle), value in zip(_UNSUPPORTED.items(), values, strict=True)
            if value not in idle
        ]
        if request.banned_texts is not None:
            reasons.append("it bans tokens, but no texts")
        if (options.beam_size or 1) > 1:
            if "stop_rule" in options.explicit and options.stop_rule != "beam_full":
                reasons.append(f"it has no stop rule {options.stop_rule}")
            if len(request.eos_ids) > 1:  # it continues after EOS where several rank high
                reasons.append("its beam search has a single EOS")
            if options.normalization == "gnmt":
                reasons.append("it has no normalization gnmt")
            if (options.length_penalty or 0) < 0:
                reasons.append("it has no length penalty below 0")
        if options.samples and "seed" in options.explicit:
            reasons.append("its samples do not depend on the seed")
        if self.facts.family == "encoder_decoder" and len(request.decoder_start_ids) != 1:
            reasons.append("its decoder starts with one token")
        if self.facts.family == "decoder_only" and any(
            len(ids) > 1 for ids in request.bad_words_ids
        ):
            reasons.append("its banned sequences do not see the prompt")
        if self.facts.family == "decoder_only" and options.no_repeat_ngram_size:
            reasons.append("its no_repeat_ngram_size does not see the prompt")
        return reasons

    def _keywords(self, request: GenerationRequest) -> dict[str, Any]:
        """The keywords of a call without the length limit."""
        options = request.options
        keys: dict[str, Any] = {
            "beam_size": options.rows if (options.beam_size or 1) > 1 else 1,
            "num_hypotheses": options.num_return,
            "length_penalty": _power(options),
            "no_repeat_ngram_size": options.no_repeat_ngram_size or 0,
            "return_scores": options.scores,
            "return_end_token": True,
            "end_token": [self._target[token] for token in request.eos_ids],
        }
        banned = [*([token] for token in request.suppressed_ids), *request.bad_words_ids]
        if banned:
            keys["suppress_sequences"] = [[self._target[token] for token in ids] for ids in banned]
        if options.samples:
            top_k = options.top_k or 0
            keys["sampling_topk"] = top_k if top_k < len(self._target) else 0  # 0: all
            keys["sampling_topp"] = options.top_p or 1.0
            keys["sampling_temperature"] = (
                1.0 if options.temperature is None else options.temperature
            )
        shortest = max((options.min_new_tokens or 0) - 1, 0)  # it does not count EOS
        if self.facts.family == "decoder_only":
            return keys | {"min_length": shortest, "include_prompt_in_result": False}
        if request.forced_bos_id is not None:
            keys["target_prefix"] = [[self._target[request.forced_bos_id]]]
        if self._has_shortlist and options.shortlist:
            keys["use_vmap"] = True
        return keys | {"min_decoding_length": shortest, "max_input_length": 0}

    def _outputs(self, result: Any, limit: int, request: GenerationRequest) -> list[Hypothesis]:
        """The hypotheses of one row's result."""
        options, forced_eos_id = request.options, request.forced_eos_id
        if self.facts.family == "decoder_only":
            sequences = result.sequences_ids
        else:
            sequences = [[self._ids[token] for token in words] for words in result.hypotheses]
        # The limit of a call can be above the row's own; the score is that of the whole output.
        if (options.samples or options.rows == 1) and not options.scores:
            sequences = [ids[:limit] for ids in sequences]
        scores = result.scores if options.scores else repeat(math.nan, len(sequences))
        outputs = []
        for ids, mean in zip(sequences, scores, strict=True):
            finished = bool(ids) and ids[-1] in request.eos_ids
            if not finished and forced_eos_id is not None and len(ids) == limit:
                ids[-1] = forced_eos_id
                finished = forced_eos_id in request.eos_ids
            outputs.append(Hypothesis(ids, mean, finished, mean, []))
        if options.scores:
            score = request.score
            for output in outputs:
                output.log_prob *= len(output.ids) ** _power(options)
                output.score = score(output.log_prob, len(output.ids))
        return outputs

    def _words(self, rows: list[list[int]], tokens: list[str] | None = None) -> list[list[str]]:
        tokens = self._target if tokens is None else tokens
        return [[tokens[token] for token in row] for row in rows]

    # --- encoders -------------------------------------------------------------------------------

    def states(
        self, rows: list[list[int]], types: list[list[int]] | None = None
    ) -> list[np.ndarray]:
        """See `EncoderBackend.states`, for encoders only."""
        states = np.array(self._forward(rows, types).last_hidden_state)
        return [of_row[: len(row)] for of_row, row in zip(states, rows, strict=True)]

    def logits(
        self, rows: list[list[int]], types: list[list[int]] | None = None
    ) -> list[np.ndarray]:
        """See `EncoderBackend.logits`, for classifiers only."""
        weight, bias = self._labels
        return list(np.array(self._forward(rows, types).pooler_output) @ weight.T + bias)

    def _forward(self, rows: list[list[int]], types: list[list[int]] | None) -> Any:
        last = self.facts.num_types - 1  # RoBERTa has a single type
        kinds = None
        if types is not None and last >= 0:
            kinds = [[min(type_id, last) for type_id in row] for row in types]
        with _undamaged(self._directory):
            return self._model.forward_batch(rows, token_type_ids=kinds)


def write_vocabulary_map(shortlist: Shortlist, directory: Path) -> None:
    """Write a shortlist into a conversion; raises UserError for tokens with blanks."""
    sides = (read_vocabulary(directory, f"{side}_vocabulary") for side in ("source", "target"))
    write_text(directory / VOCABULARY_MAP, "".join(shortlist.vocabulary_map(*sides)))


def _ids(request: GenerationRequest) -> tuple[Any, ...]:
    """The ids that the arguments of a call depend on."""
    return (
        request.decoder_start_ids,
        request.eos_ids,
        request.suppressed_ids,
        request.forced_bos_id,
        request.bad_words_ids,
    )


def _power(options: Options) -> float:
    """CTranslate2's length penalty: the exponent of the length, for beam search only."""
    is_plain = (options.beam_size or 1) == 1 or options.normalization == "none"
    return 0.0 if is_plain else float(options.length_penalty or 0)


def _open(directory: Path, family: Family, precision: str, settings: Settings, device: str) -> Any:
    extras.require("fast", "the backend ctranslate2")
    select_instructions()
    import ctranslate2

    kinds = {
        "encoder_decoder": ctranslate2.Translator,
        "decoder_only": ctranslate2.Generator,
        "encoder_only": ctranslate2.Encoder,
    }
    try:
        return kinds[family](
            str(directory),
            device=device,
            compute_type=precision,
            inter_threads=settings.workers,
            intra_threads=settings.threads or 0,
            max_queued_batches=-1,  # the caller of `submit` limits the queue
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"CTranslate2 cannot open {directory}: {error}") from None
