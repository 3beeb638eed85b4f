"""CTranslate2 as a backend: supported requests, and its calls."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from heedful import extras
from heedful.backends.base import Capability, GenerationRequest, Settings
from heedful.backends.ctranslate2.refusals import option_reasons
from heedful.backends.ctranslate2.vocabulary import VOCABULARY_MAP, read_vocabulary
from heedful.backends.manifest import Family, NetFacts
from heedful.errors import DamagedError, UserError
from heedful.files import read_object
from heedful.generation.outputs import Hypothesis
from heedful.hardware import cpu_flags
from heedful.options import TEMPERATURES, Options, StopRule

HEAD = "head.npz"  # the class matrix of a classifier, which the format lacks


@dataclass(frozen=True, kw_only=True)
class CTranslate2Facts(NetFacts):
    """Facts of a converted net that its files do not hold.

    Attributes:
        longest_prompt: most tokens of a prompt (`longest_prompt` of the conversion); None: any.
        has_equal_beams: beam searches were not found to differ from the net's.
    """

    longest_prompt: int | None = None
    has_equal_beams: bool = True


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

    A beam search ends after `beam_size` finished hypotheses, as by the stop rule `beam_full`; a row
    whose search reaches its length limit has no outputs here. Tokens that the model suppresses are
    excluded before the softmax, so that beams are ranked as by `renormalize_logits`; scores are
    the net's. With a shortlist, the allowed tokens are those of all sources of a batch.

    Args:
        settings: `threads` of each worker; `workers` run batches side by side.
        device: cpu or cuda.

    Raises:
        UserError: ctranslate2 is not installed, or refuses the directory, type or device.
    """

    name = "ctranslate2"
    stop_rule: StopRule | None = "beam_full"

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
        self._end_token = read_object(directory / "config.json").get("eos_token")
        self._ids = {token: index for index, token in enumerate(self._target)}
        self._last: _Call | None = None

    # --- generation -----------------------------------------------------------------------------

    def unsupported_reasons(self, rows: list[list[int]], request: GenerationRequest) -> list[str]:
        """See `GenerationBackend.unsupported_reasons`."""
        options, limits = request.options, request.max_new_tokens
        reasons, longest = [*self._call(request).reasons], self.facts.longest_prompt
        if options.by_beams and not self.facts.has_equal_beams:
            reasons.append("in its proof it had other outputs with option beam_size above 1")
        if self.facts.family == "encoder_decoder":
            # Others are decoded again; a sample that is would favor early ends.
            if options.samples and options.scores and max(limits, default=0) >= request.max_length:
                reasons.append("it cannot score samples of as many tokens as the net has positions")
            return reasons
        if longest is not None and max(map(len, rows), default=0) > longest:
            reasons.append(f"a prompt is longer than the window of {longest} tokens")
        sizes = [len(row) + limit for row, limit in zip(rows, limits, strict=True)]
        if longest is not None and options.scores and max(sizes, default=0) > longest:
            reasons.append(f"it cannot score outputs beyond the window of {longest} tokens")
        if max(sizes, default=0) > request.max_length:
            longest = request.max_length
            reasons.append(f"prompt and output may exceed the {longest} tokens of the net")
        return reasons

    def outputs(self, rows: list[list[int]], request: GenerationRequest) -> list[list[Hypothesis]]:
        """See `GenerationBackend.outputs`."""
        # A synchronous call is a little faster than `submit`.
        with _undamaged(self._directory):
            return self._outputs(self._start(rows, request, asynchronous=False), rows, request)

    def submit(
        self, rows: list[list[int]], request: GenerationRequest
    ) -> Callable[[], list[list[Hypothesis]]]:
        """See `GenerationBackend.submit`."""
        with _undamaged(self._directory):
            futures = self._start(rows, request, asynchronous=True)

        def wait() -> list[list[Hypothesis]]:
            with _undamaged(self._directory):
                return self._outputs([future.result() for future in futures], rows, request)

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
        is_plain = not options.by_beams
        # A sample beyond its limit can be cut, but the score by a shortlist is that of the whole.
        by_limit = options.samples and options.scores and "use_vmap" in self._call(request).keywords
        groups: dict[tuple[int, int], list[int]] = {}
        for index, (row, limit) in enumerate(zip(rows, request.max_new_tokens, strict=True)):
            length = (min(len(row), 2) if is_plain else len(row)) if has_prompts else 0
            groups.setdefault((length, limit if by_limit else 0), []).append(index)
        if len(groups) == 1:
            return self._results(rows, request, asynchronous)
        results: dict[int, Any] = {}
        for indices in groups.values():
            batch = [rows[index] for index in indices]
            batch_results = self._results(batch, request.select(indices), asynchronous)
            results.update(zip(indices, batch_results, strict=True))
        return [results[index] for index in range(len(rows))]

    def _outputs(
        self, results: list[Any], rows: list[list[int]], request: GenerationRequest
    ) -> list[list[Hypothesis]]:
        """The hypotheses of each row; none where they would not be those of the net.

        The limit of a call can be above the row's own: an output is then cut, which is the output
        at the lower limit, too, but not by beams.
        """
        options, outputs = request.options, []
        # These give probabilities after tokens are excluded, as the net does.
        renormalizes = options.by_beams and bool(options.renormalize_logits)
        has_shortlist = "use_vmap" in self._call(request).keywords
        is_own_score = options.scores and (renormalizes or has_shortlist)
        for result, limit in zip(results, request.max_new_tokens, strict=True):
            values = result.scores if is_own_score else repeat(math.nan)
            pairs = zip(self._sequences(result), values, strict=False)
            hypotheses = [self._hypothesis(ids, value, limit, request) for ids, value in pairs]
            known = [hypothesis for hypothesis in hypotheses if hypothesis is not None]
            outputs.append(known if len(known) == len(hypotheses) else [])
        if options.scores and not is_own_score:
            self._add_log_probs(outputs, rows, request)
        for hypothesis in chain.from_iterable(outputs) if options.scores else ():
            hypothesis.score = request.score(hypothesis.log_prob, len(hypothesis.ids))
        if options.by_beams and options.scores:  # those of the net may rank otherwise
            outputs = [sorted(of_row, key=lambda item: -item.score) for of_row in outputs]
        return [of_row[: options.num_return] for of_row in outputs]

    def _hypothesis(
        self, ids: list[int], own_score: float, limit: int, request: GenerationRequest
    ) -> Hypothesis | None:
        """A hypothesis within a row's limit; None: it would not be the net's, or has no score.

        Args:
            own_score: of CTranslate2, at the limit of the call; NaN: it is not used.
        """
        if not ids:  # of a source without words: it is not decoded
            return None
        # At the limit the net forces an end token, and prefers outputs that ended before.
        if request.options.by_beams and len(ids) >= limit:
            return None
        if len(ids) > limit and not math.isnan(own_score):
            return None
        ids, forced = ids[:limit], request.forced_eos_id
        finished = ids[-1] in request.eos_ids
        # The last of as many tokens as the net has positions can be scored if it is the end token.
        is_longest = self.facts.family == "encoder_decoder" and len(ids) >= request.max_length
        if is_longest and request.options.scores and self._target[ids[-1]] != self._end_token:
            return None
        if not finished and forced is not None and len(ids) == limit:
            ids[-1], finished = forced, forced in request.eos_ids
        log_prob = own_score * len(ids) ** _power(request.options)
        return Hypothesis(ids, math.nan, finished, log_prob, [])

    def _sequences(self, result: Any) -> list[list[int]]:
        """The new ids of the hypotheses of a result."""
        if self.facts.family == "decoder_only":
            return [list(ids) for ids in result.sequences_ids]
        return [[self._ids[token] for token in words] for words in result.hypotheses]

    def _add_log_probs(
        self, outputs: list[list[Hypothesis]], rows: list[list[int]], request: GenerationRequest
    ) -> None:
        """Set the net's log-probabilities of outputs, by teacher forcing.

        CTranslate2's own are those after tokens are excluded, whose probability the others share.
        Tokens that are forced in a beam search are certain, as in the net's.
        """
        pairs = [(row, item) for row, of_row in zip(rows, outputs, strict=True) for item in of_row]
        if not pairs:
            return
        given, targets = [row for row, _ in pairs], [item.ids for _, item in pairs]
        if self.facts.family == "decoder_only":
            texts = [row + ids for row, ids in zip(given, targets, strict=True)]
            values = self.log_probs(texts, None, request)
            found = [v[len(v) - len(ids) :] for v, ids in zip(values, targets, strict=True)]
        else:
            # The end token is added to a target.
            ends = [self._target[ids[-1]] == self._end_token for ids in targets]
            cut = [ids[:-1] if end else ids for ids, end in zip(targets, ends, strict=True)]
            values = self.log_probs(given, cut, request)
            found = [v[: len(ids)] for v, ids in zip(values, targets, strict=True)]
        has_certain = request.options.by_beams and request.forced_bos_id is not None
        for log_probs, (_, item) in zip(found, pairs, strict=True):
            item.log_prob = float(log_probs[has_certain:].sum(dtype=np.float64))

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
            unscored = request._replace(options=replace(request.options, scores=False))
            [[best]] = self.outputs([row], unscored)
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
            reasons = option_reasons(request, self.facts.family)
            last = _Call(request.options, _ids(request), reasons, keywords)
            self._last = None if last.reasons else last
        return last

    def _keywords(self, request: GenerationRequest) -> dict[str, Any]:
        """The keywords of a call without the length limit."""
        options = request.options
        keys: dict[str, Any] = {
            "beam_size": options.rows if options.by_beams else 1,
            # Of a beam all, so that a search that reached the length limit is found.
            "num_hypotheses": options.rows if options.by_beams else options.num_return,
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
            temperature = 1.0 if options.temperature is None else options.temperature
            keys["sampling_temperature"] = min(max(temperature, TEMPERATURES[0]), TEMPERATURES[1])
        shortest = max((options.min_new_tokens or 0) - 1, 0)  # it does not count EOS
        if self.facts.family == "decoder_only":
            return keys | {"min_length": shortest, "include_prompt_in_result": False}
        if request.forced_bos_id is not None:
            keys["target_prefix"] = [[self._target[request.forced_bos_id]]]
        if self._has_shortlist and options.shortlist:
            keys["use_vmap"] = True
        return keys | {"min_decoding_length": shortest, "max_input_length": 0}

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
    is_plain = not options.by_beams or options.normalization == "none"
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


def select_instructions() -> None:
    """Let CTranslate2 use AVX-512 on processors with VNNI, unless the environment names others.

    Its default is AVX2, since early processors with AVX-512 lower their frequency for it; those
    with VNNI are later. It reads the variable when the first model is opened.
    """
    if "avx512_vnni" in cpu_flags():
        os.environ.setdefault("CT2_FORCE_CPU_ISA", "AVX512")
