"""CTranslate2 as a backend: the requests that it can run, and how it is called."""

import json
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

from heedful.backends.base import Capability, GenerationRequest, Settings
from heedful.backends.manifest import NetFacts
from heedful.backends.shortlist import Shortlist
from heedful.errors import UserError
from heedful.files import write_text
from heedful.generation.hypotheses import Hypothesis
from heedful.options import Options

Family = Literal["encoder_decoder", "decoder_only", "encoder_only"]
VOCABULARY_MAP = "vmap.txt"  # of a shortlist
HEAD = "head.npz"  # of a classifier: the matrix of classes, which has no place there
INSTALL = "ctranslate2 is not installed: pip install 'heedful[fast]'"
# Options that it lacks, and what they are where they change nothing.
_LACKING: dict[str, tuple[Any, ...]] = {
    "num_groups": (1,),
    "coverage_penalty": (0,),
    "min_p": (None, 0),
    "typical_p": (None, 1),
    "repetition_penalty": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "stop": ((), []),
    "draft": (None,),
    "prefix_function": (None,),
    "forced": (None, {}),
    "require": ((), []),
    "prefixes": (None,),
}
_lacking = attrgetter(*_LACKING)


@dataclass(frozen=True, kw_only=True)
class CTranslate2Facts(NetFacts):
    """Facts of a converted net that its files do not hold.

    Attributes:
        longest_prompt: most tokens of a prompt (`longest_prompt` of the conversion); None: any.
    """

    longest_prompt: int | None = None


class _Call(NamedTuple):
    """How calls of the same options are made: what is lacking, and the options in its words."""

    options: Options
    ids: tuple[Any, ...]
    lacking: list[str]
    keys: dict[str, Any]


@contextmanager
def _undamaged(directory: Path) -> Iterator[None]:
    """Tells what damaged or exchanged files lead to, some of them only when they are used."""
    try:
        yield
    except UserError:
        raise
    except (RuntimeError, ValueError, LookupError, OSError, BadZipFile) as error:
        raise UserError(
            f"{directory} is damaged, or of another model ({error}): make it again by "
            "`heedful optimize`"
        ) from None


class CTranslate2:
    """A directory that `ctranslate2_spec.write` wrote, opened.

    A beam search ends after as many endings as the beam is wide, whose scores are then compared,
    as under the stop rule `beam_full`, but an output at the length limit gets no end. What may not
    be written counts as impossible before probabilities are formed, so that theirs is shared by the
    others. Of a batch each prompt has its own limit, as everywhere here. By a shortlist a batch may
    have what any of its sources can become.

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
        self._target = _vocabulary(directory, stem)
        self._source = _vocabulary(directory, "source_vocabulary")
        self._has_shortlist = (directory / VOCABULARY_MAP).is_file()
        self._ids = {token: place for place, token in enumerate(self._target)}
        self._last: _Call | None = None

    # --- what writes ----------------------------------------------------------------------------

    def unsupported_reasons(self, rows: list[list[int]], request: GenerationRequest) -> list[str]:
        """As `Backend.unsupported_reasons`."""
        found = self._call_of(request).lacking
        if self.facts.family == "encoder_decoder":
            return found
        found, longest = [*found], self.facts.longest_prompt
        if longest is not None and max(map(len, rows)) > longest:
            found.append(f"a prompt is longer than the window of {longest} tokens")
        if any(
            len(r) + n > request.max_length
            for r, n in zip(rows, request.max_new_tokens, strict=True)
        ):
            found.append(f"a text may outgrow the {request.max_length} tokens of the net")
        return found

    def outputs(self, rows: list[list[int]], request: GenerationRequest) -> list[list[Hypothesis]]:
        """As `Backend.outputs`."""
        # Not by `submit`: a call that waits for its own answers is done a little sooner.
        with _undamaged(self._directory):
            return self._read(self._begin(rows, request, asynchronous=False), rows, request)

    def submit(
        self, rows: list[list[int]], request: GenerationRequest
    ) -> Callable[[], list[list[Hypothesis]]]:
        """As `Backend.submit`."""
        with _undamaged(self._directory):
            begun = self._begin(rows, request, asynchronous=True)

        def wait() -> list[list[Hypothesis]]:
            with _undamaged(self._directory):
                return self._read([each.result() for each in begun], rows, request)

        return wait

    def _begin(
        self, rows: list[list[int]], request: GenerationRequest, *, asynchronous: bool
    ) -> list[Any]:
        """What it answers to each row, or what waits for that: in calls that leave each result
        independent of the other rows.

        What a prompt has beyond the shortest of its call is there as if it were written: rules and
        beams see it, and beside a prompt of a single token it is given back.
        """
        options = request.options
        has_prompts = self.facts.family == "decoder_only"
        is_plain = (options.beam_size or 1) == 1 and not options.no_repeat_ngram_size
        groups: dict[tuple[int, int], list[int]] = {}
        for place, (row, limit) in enumerate(zip(rows, request.max_new_tokens, strict=True)):
            length = (min(len(row), 2) if is_plain else len(row)) if has_prompts else 0
            # A sample that is longer than its limit can be cut, but its score is of the whole.
            own_limit = limit if options.samples and options.scores else 0
            groups.setdefault((length, own_limit), []).append(place)
        if len(groups) == 1:
            return self._answers(rows, request, asynchronous)
        begun: dict[int, Any] = {}
        for places in groups.values():
            chosen = [rows[place] for place in places]
            answers = self._answers(chosen, request.select(places), asynchronous)
            begun.update(zip(places, answers, strict=True))
        return [begun[place] for place in range(len(rows))]

    def _read(
        self, found: list[Any], rows: list[list[int]], request: GenerationRequest
    ) -> list[list[Hypothesis]]:
        """Outputs in the rows' order, searched again where one is longer than its own limit.

        Samples are not drawn again, which would favor those that end early: `_outputs` cuts them,
        or their call has a single limit.
        """
        limits = request.max_new_tokens
        outputs = list(map(self._outputs, found, limits, repeat(request)))
        if len({*limits}) == 1:
            return outputs
        long: dict[int, list[int]] = {}
        for place, (limit, of_row) in enumerate(zip(limits, outputs, strict=True)):
            if max(len(each.ids) for each in of_row) > limit:
                long.setdefault(limit, []).append(place)
        begun = {
            limit: self._begin([rows[p] for p in places], request.select(places), asynchronous=True)
            for limit, places in long.items()
        }
        for limit, places in long.items():
            for place, each in zip(places, begun[limit], strict=True):
                outputs[place] = self._outputs(each.result(), limit, request)
        return outputs

    def stream_tokens(
        self, row: list[int], request: GenerationRequest
    ) -> Iterator[tuple[list[int], bool]]:
        """As `GenerationBackend.stream_tokens`."""
        keys, limit = {**self._call_of(request).keys}, request.max_new_tokens[0]
        for beside in ("beam_size", "num_hypotheses", "length_penalty", "return_scores"):
            del keys[beside]
        del keys["return_end_token"]
        [source] = self._words([row], self._source)
        if keys.pop("include_prompt_in_result", None) is not None:
            steps = self._model.generate_tokens(source, max_length=limit, **keys)
        elif keys.pop("min_decoding_length") > 0 or "use_vmap" in keys:
            # The first cannot be asked for there, and ids by a shortlist count within it.
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
            last = request.forced_eos_id
            token = last if at_limit and last is not None else step.token_id
            yield [token], bool(step.is_last)

    def log_probs(
        self, rows: list[list[int]], targets: list[list[int]] | None, request: GenerationRequest
    ) -> list[np.ndarray]:
        """As `Backend.log_probs`."""
        if targets is None:
            sides = [self._words(rows)]
        else:
            sides = [self._words(rows, self._source), self._words(targets)]
        with _undamaged(self._directory):
            found = self._model.score_batch(*sides, max_input_length=0)
        return [np.array(each.log_probs, np.float32) for each in found]

    def _answers(
        self, rows: list[list[int]], request: GenerationRequest, asynchronous: bool
    ) -> list[Any]:
        keys, words = self._call_of(request).keys, self._words(rows, self._source)
        limit = max(request.max_new_tokens)
        if self.facts.family == "decoder_only":
            answer, keys = self._model.generate_batch, keys | {"max_length": limit}
        else:
            answer, keys = self._model.translate_batch, keys | {"max_decoding_length": limit}
        if "target_prefix" in keys:
            keys["target_prefix"] = keys["target_prefix"] * len(rows)
        return list(answer(words, asynchronous=asynchronous, **keys))

    def _call_of(self, request: GenerationRequest) -> "_Call":
        """How it is called, looked up where the last call was alike."""
        last = self._last
        if last is None or last.options is not request.options or last.ids != _ids(request):
            with _undamaged(self._directory):
                keys = self._keys(request)
            last = _Call(request.options, _ids(request), self._unsupported(request), keys)
            self._last = None if last.lacking else last
        return last

    def _unsupported(self, request: GenerationRequest) -> list[str]:
        """What it lacks for any prompt."""
        options = request.options
        values = _lacking(options)
        found = [
            f"it has no {name}"
            for (name, idle), value in zip(_LACKING.items(), values, strict=True)
            if value not in idle
        ]
        if (options.beam_size or 1) > 1:
            if "stop_rule" in options.explicit and options.stop_rule != "beam_full":
                found.append(f"it has no stop rule {options.stop_rule}")
            if len(request.eos_ids) > 1:  # it would go on behind one where many rank high
                found.append("its beams end with one token")
            if options.normalization == "gnmt":
                found.append("it has no normalization gnmt")
            if (options.length_penalty or 0) < 0:
                found.append("it has no length penalty below 0")
        if options.samples and "seed" in options.explicit:
            found.append("what it draws does not follow a seed")
        if self.facts.family == "encoder_decoder" and len(request.decoder_start_ids) != 1:
            found.append("its decoder starts with one token")
        if self.facts.family == "decoder_only" and any(
            len(ids) > 1 for ids in request.bad_words_ids
        ):
            found.append("a banned sequence does not see the prompt")
        return found

    def _keys(self, request: GenerationRequest) -> dict[str, Any]:
        """The options in its words, but for the length."""
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
            keys["sampling_topk"] = options.top_k or 0  # 0: all
            keys["sampling_topp"] = options.top_p or 1.0
            keys["sampling_temperature"] = (
                1.0 if options.temperature is None else options.temperature
            )
        shortest = max(options.min_new_tokens - 1, 0)  # it does not count the end
        if self.facts.family == "decoder_only":
            return keys | {"min_length": shortest, "include_prompt_in_result": False}
        if request.forced_bos_id is not None:
            keys["target_prefix"] = [[self._target[request.forced_bos_id]]]
        if self._has_shortlist and options.shortlist:
            keys["use_vmap"] = True
        return keys | {"min_decoding_length": shortest, "max_input_length": 0}

    def _outputs(self, result: Any, limit: int, request: GenerationRequest) -> list[Hypothesis]:
        """Outputs of ours, of its answer for a row whose limit is given."""
        options, end, last = request.options, request.eos_ids, request.forced_eos_id
        if self.facts.family == "decoder_only":
            found = result.sequences_ids
        else:
            found = [[self._ids[token] for token in words] for words in result.hypotheses]
        # The limit of a batch may be above the row's own. A score is of the whole output.
        if (options.samples or options.rows == 1) and not options.scores:
            found = [ids[:limit] for ids in found]
        scores = result.scores if options.scores else repeat(math.nan, len(found))
        outputs = []
        for ids, mean in zip(found, scores, strict=True):
            finished = bool(ids) and ids[-1] in end
            if not finished and last is not None and len(ids) == limit:
                ids[-1] = last
                finished = last in end
            outputs.append(Hypothesis(ids, mean, finished, mean, []))
        if options.scores:
            score = request.score
            for each in outputs:
                each.log_prob *= len(each.ids) ** _power(options)
                each.score = score(each.log_prob, len(each.ids))
        return outputs

    def _words(self, rows: list[list[int]], tokens: list[str] | None = None) -> list[list[str]]:
        tokens = self._target if tokens is None else tokens
        return [[tokens[token] for token in row] for row in rows]

    # --- what reads -----------------------------------------------------------------------------

    def states(
        self, rows: list[list[int]], types: list[list[int]] | None = None
    ) -> list[np.ndarray]:
        """As `Backend.states`, of an encoder alone."""
        found = np.array(self._forward(rows, types).last_hidden_state)
        return [each[: len(row)] for each, row in zip(found, rows, strict=True)]

    def logits(
        self, rows: list[list[int]], types: list[list[int]] | None = None
    ) -> list[np.ndarray]:
        """As `Backend.logits`, of a classifier alone."""
        weight, bias = self._labels
        return list(np.array(self._forward(rows, types).pooler_output) @ weight.T + bias)

    def _forward(self, rows: list[list[int]], types: list[list[int]] | None) -> Any:
        last = self.facts.num_types - 1  # RoBERTa has one type alone
        kinds = None
        if types is not None and last >= 0:
            kinds = [[min(each, last) for each in row] for row in types]
        with _undamaged(self._directory):
            return self._model.forward_batch(rows, token_type_ids=kinds)


def write_vocabulary_map(shortlist: Shortlist, directory: Path) -> None:
    """Put a shortlist into a form; raises UserError for names of tokens with blanks."""
    sides = (_vocabulary(directory, f"{side}_vocabulary") for side in ("source", "target"))
    write_text(directory / VOCABULARY_MAP, "".join(shortlist.vocabulary_map(*sides)))


def _ids(request: GenerationRequest) -> tuple[Any, ...]:
    """What beside the options decides how it is called."""
    return (
        request.decoder_start_ids,
        request.eos_ids,
        request.suppressed_ids,
        request.forced_bos_id,
        request.bad_words_ids,
    )


def _power(options: Options) -> float:
    """What it calls the length penalty: the exponent of the length, which beams alone have."""
    is_plain = (options.beam_size or 1) == 1 or options.normalization == "none"
    return 0.0 if is_plain else float(options.length_penalty or 0)


def _open(directory: Path, family: Family, precision: str, settings: Settings, device: str) -> Any:
    try:
        import ctranslate2
    except ImportError:
        raise UserError(INSTALL) from None
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
            max_queued_batches=-1,  # who submits bounds what waits
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"CTranslate2 cannot open {directory}: {error}") from None


def _vocabulary(directory: Path, stem: str) -> list[str]:
    for name in (stem, "shared_vocabulary", "vocabulary"):
        path = directory / f"{name}.json"
        if path.is_file():
            tokens: list[str] = json.loads(path.read_text(encoding="utf-8"))
            return tokens
    return []
