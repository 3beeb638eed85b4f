"""CTranslate2 as an engine: what it can run of a call, and how it is asked."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np

from heedful.engines.engine import Asked, Settings
from heedful.engines.shortlist import Shortlist
from heedful.errors import UserError
from heedful.files import write_text
from heedful.generation.hypotheses import Hypothesis, LengthScore
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


@dataclass(frozen=True)
class Facts:
    """What must be known of a written net beside its files.

    Attributes:
        longest_prompt: tokens of a prompt that it may be given (`ctranslate2_spec`); None: any.
        num_types: how many texts of a row the encoder tells apart; 0: it knows no types.
    """

    family: Family
    longest_prompt: int | None = None
    num_types: int = 0


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
        facts: Facts,
        precision: str,
        settings: Settings,
        device: str = "cpu",
    ) -> None:
        self.facts, self.precision, self.settings = facts, precision, settings
        self._directory = directory
        with self._undamaged():
            self._open(device)

    def _open(self, device: str) -> None:
        facts, directory = self.facts, self._directory
        self.reads = frozenset({"states"} if facts.family == "encoder_only" else ())
        if facts.family == "encoder_only" and (directory / HEAD).is_file():
            self.reads |= {"logits"}
            with np.load(directory / HEAD) as head:
                self._labels = head["weight"], head["bias"]
        self._model = _open(directory, facts.family, self.precision, self.settings, device)
        stem = {"encoder_decoder": "target_vocabulary"}.get(facts.family, "vocabulary")
        self._target = _vocabulary(directory, stem)
        self._source = _vocabulary(directory, "source_vocabulary")
        self._has_shortlist = (directory / VOCABULARY_MAP).is_file()
        self._ids = {token: place for place, token in enumerate(self._target)}

    @contextmanager
    def _undamaged(self) -> Iterator[None]:
        """Tell what damaged or exchanged files lead to, some of them only when they are used."""
        try:
            yield
        except UserError:
            raise
        except (RuntimeError, ValueError, LookupError, OSError, BadZipFile) as error:
            raise UserError(
                f"{self._directory} is damaged, or of another model ({error}): make it again by "
                "`heedful optimize`"
            ) from None

    # --- what writes ----------------------------------------------------------------------------

    def lacks(self, rows: list[list[int]], asked: Asked) -> list[str]:
        """As `Engine.lacks`."""
        options = asked.options
        found = [
            f"it has no {name}"
            for name, idle in _LACKING.items()
            if getattr(options, name) not in idle
        ]
        if (options.beam_size or 1) > 1:
            if "stop_rule" in options.said and options.stop_rule != "beam_full":
                found.append(f"it has no stop rule {options.stop_rule}")
            if len(asked.end) > 1:  # it would go on behind one where many rank high
                found.append("its beams end with one token")
            if options.normalization == "gnmt":
                found.append("it has no normalization gnmt")
            if (options.length_penalty or 0) < 0:
                found.append("it has no length penalty below 0")
        if options.draws and "seed" in options.said:
            found.append("what it draws does not follow a seed")
        if self.facts.family == "encoder_decoder":
            if len(asked.start) != 1:
                found.append("its decoder starts with one token")
        else:
            if any(len(ids) > 1 for ids in asked.banned):
                found.append("a banned sequence does not see the prompt")
            longest = self.facts.longest_prompt
            if longest is not None and max(map(len, rows)) > longest:
                found.append(f"a prompt is longer than the window of {longest} tokens")
            if any(len(r) + n > asked.max_length for r, n in zip(rows, asked.limits, strict=True)):
                found.append(f"a text may outgrow the {asked.max_length} tokens of the net")
        return found

    def outputs(self, rows: list[list[int]], asked: Asked) -> list[list[Hypothesis]]:
        """As `Engine.outputs`."""
        return self._submit(rows, asked, asynchronous=False)()

    def submit(self, rows: list[list[int]], asked: Asked) -> Callable[[], list[list[Hypothesis]]]:
        """As `Engine.submit`."""
        return self._submit(rows, asked, asynchronous=True)

    def _submit(
        self, rows: list[list[int]], asked: Asked, *, asynchronous: bool
    ) -> Callable[[], list[list[Hypothesis]]]:
        """Begin batches; a call that waits for its own is done a little sooner."""

        def begin(groups: Iterable[list[int]]) -> list[tuple[int, Any]]:
            return [
                pair
                for places in groups
                for pair in zip(
                    places,
                    self._begin([rows[p] for p in places], asked.of(places), asynchronous),
                    strict=True,
                )
            ]

        read = self._reader(asked)
        with self._undamaged():
            begun = begin(self._together(rows, asked.options))

        def results(begun: list[tuple[int, Any]]) -> dict[int, list[Hypothesis]]:
            return {
                place: read(found.result() if asynchronous else found, asked.limits[place])
                for place, found in begun
            }

        def complete() -> list[list[Hypothesis]]:
            found = results(begun)
            # Anew where the limit of the batch let an output outgrow its own.
            long: dict[tuple[int, int], list[int]] = {}
            for place, outputs in found.items() if len({*asked.limits}) > 1 else ():
                if max(len(each.ids) for each in outputs) > asked.limits[place]:
                    same = (asked.limits[place], self._likeness(rows[place], asked.options))
                    long.setdefault(same, []).append(place)
            found |= results(begin(long.values()))
            return [found[place] for place in range(len(rows))]

        def wait() -> list[list[Hypothesis]]:
            with self._undamaged():
                return complete()

        return wait

    def runs(self, row: list[int], asked: Asked) -> Iterator[tuple[list[int], bool]]:
        """As `Engine.runs`."""
        keys, limit = self._asked(asked), asked.limits[0]
        for beside in ("beam_size", "num_hypotheses", "length_penalty", "return_scores"):
            del keys[beside]
        del keys["return_end_token"]
        if self.facts.family == "decoder_only":
            keys["min_length"] = keys.pop("min_length", 0)
            steps = self._model.generate_tokens(self._words([row])[0], max_length=limit, **keys)
        elif keys.pop("min_decoding_length") > 0 or "use_vmap" in keys:
            # The first cannot be asked for there, and ids by a shortlist count within it.
            [[best]] = self.outputs([row], asked)
            yield best.ids, True
            return
        else:
            [source] = self._words([row], self._source)
            prefix = keys.pop("target_prefix", [None])[0]
            steps = self._model.generate_tokens(
                source, target_prefix=prefix, max_decoding_length=limit, max_input_length=0, **keys
            )
        count = 0
        while True:
            with self._undamaged():
                step = next(steps, None)
            if step is None:
                return
            count += 1
            at_limit = count == limit and step.token_id not in asked.end
            token = asked.last if at_limit and asked.last is not None else step.token_id
            yield [token], bool(step.is_last)

    def log_probs(
        self, rows: list[list[int]], targets: list[list[int]] | None, asked: Asked
    ) -> list[np.ndarray]:
        """As `Engine.log_probs`."""
        if targets is None:
            sides = [self._words(rows)]
        else:
            sides = [self._words(rows, self._source), self._words(targets)]
        with self._undamaged():
            found = self._model.score_batch(*sides, max_input_length=0)
        return [np.array(each.log_probs, np.float32) for each in found]

    def _together(self, rows: list[list[int]], options: Options) -> list[list[int]]:
        """Places of the rows that one call may have, so that no result depends on the others.

        What a prompt has beyond the shortest of its batch is there as if it were written: rules and
        beams see it, and beside a prompt of a single token it is given back.
        """
        groups: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            groups.setdefault(self._likeness(row, options), []).append(place)
        return list(groups.values())

    def _likeness(self, row: list[int], options: Options) -> int:
        """Equal for rows that one call may have."""
        if self.facts.family == "encoder_decoder":
            return 0
        is_plain = (options.beam_size or 1) == 1 and not options.no_repeat_ngram_size
        return min(len(row), 2) if is_plain else len(row)

    def _begin(self, rows: list[list[int]], asked: Asked, asynchronous: bool) -> list[Any]:
        keys, limit = self._asked(asked), max(asked.limits)
        if self.facts.family == "decoder_only":
            return list(
                self._model.generate_batch(
                    self._words(rows),
                    max_length=limit,
                    include_prompt_in_result=False,
                    asynchronous=asynchronous,
                    **keys,
                )
            )
        if "target_prefix" in keys:
            keys["target_prefix"] *= len(rows)
        return list(
            self._model.translate_batch(
                self._words(rows, self._source),
                max_decoding_length=limit,
                max_input_length=0,
                asynchronous=asynchronous,
                **keys,
            )
        )

    def _asked(self, asked: Asked) -> dict[str, Any]:
        """The options in its words, but for the length."""
        options = asked.options
        keys: dict[str, Any] = {
            "beam_size": options.rows if (options.beam_size or 1) > 1 else 1,
            "num_hypotheses": options.num_return,
            "length_penalty": _power(options) if (options.beam_size or 1) > 1 else 0,
            "no_repeat_ngram_size": options.no_repeat_ngram_size or 0,
            "return_scores": options.scores or options.rows > 1,
            "return_end_token": True,
            "end_token": [self._target[token] for token in asked.end],
        }
        banned = [*([token] for token in asked.never), *asked.banned]
        if banned:
            keys["suppress_sequences"] = [[self._target[token] for token in ids] for ids in banned]
        if options.draws:
            keys["sampling_topk"] = options.top_k or 0  # 0: all
            keys["sampling_topp"] = options.top_p or 1.0
            keys["sampling_temperature"] = (
                1.0 if options.temperature is None else options.temperature
            )
        shortest = max(options.min_new_tokens - 1, 0)  # it does not count the end
        if self.facts.family == "decoder_only":
            return keys | {"min_length": shortest}
        if asked.first is not None:
            keys["target_prefix"] = [[self._target[asked.first]]]
        if self._has_shortlist and options.shortlist:
            keys["use_vmap"] = True
        return keys | {"min_decoding_length": shortest}

    def _reader(self, asked: Asked) -> Callable[[Any, int], list[Hypothesis]]:
        """What makes outputs of ours of those for a row, whose limit is given."""
        options, end, last = asked.options, asked.end, asked.last
        is_one_stack, number = self.facts.family == "decoder_only", self._ids
        power = _power(options) if (options.beam_size or 1) > 1 else None
        score_of = LengthScore(options.normalization or "average", options.length_penalty or 0)
        # One output alone is cut where the limit of its batch let it go on; of its score, not.
        is_cut = options.rows == 1 and not options.scores

        def output(ids: list[int], score: float, limit: int) -> Hypothesis:
            finished = bool(ids) and ids[-1] in end
            if not finished and last is not None and len(ids) == limit:
                ids = [*ids[:-1], last]
                finished = last in end
            log_prob = score if power is None else score * len(ids) ** power
            return Hypothesis(ids, log_prob / score_of.divisor(len(ids)), finished, log_prob, [])

        def read(result: Any, limit: int) -> list[Hypothesis]:
            if is_one_stack:
                found = result.sequences_ids
            else:
                found = [[number[token] for token in words] for words in result.hypotheses]
            if is_cut:
                return [output(found[0][:limit], (result.scores or [math.nan])[0], limit)]
            pairs = zip(found, result.scores or [math.nan] * len(found), strict=True)
            return [output(ids, score, limit) for ids, score in pairs]

        return read

    def _words(self, rows: list[list[int]], tokens: list[str] | None = None) -> list[list[str]]:
        tokens = self._target if tokens is None else tokens
        return [[tokens[token] for token in row] for row in rows]

    # --- what reads -----------------------------------------------------------------------------

    def states(
        self, rows: list[list[int]], types: list[list[int]] | None = None
    ) -> list[np.ndarray]:
        """As `Engine.states`, of an encoder alone."""
        found = np.array(self._forward(rows, types).last_hidden_state)
        return [each[: len(row)] for each, row in zip(found, rows, strict=True)]

    def logits(
        self, rows: list[list[int]], types: list[list[int]] | None = None
    ) -> list[np.ndarray]:
        """As `Engine.logits`, of a classifier alone."""
        weight, bias = self._labels
        return list(np.array(self._forward(rows, types).pooler_output) @ weight.T + bias)

    def _forward(self, rows: list[list[int]], types: list[list[int]] | None) -> Any:
        last = self.facts.num_types - 1  # RoBERTa has one type alone
        kinds = None
        if types is not None and last >= 0:
            kinds = [[min(each, last) for each in row] for row in types]
        with self._undamaged():
            return self._model.forward_batch(rows, token_type_ids=kinds)


def write_vocabulary_map(shortlist: Shortlist, directory: Path) -> None:
    """Put a shortlist into a form; raises UserError for names of tokens with blanks."""
    sides = (_vocabulary(directory, f"{side}_vocabulary") for side in ("source", "target"))
    write_text(directory / VOCABULARY_MAP, "".join(shortlist.vocabulary_map(*sides)))


def _power(options: Options) -> float:
    """What it calls the length penalty: the exponent of the length."""
    return 0.0 if options.normalization == "none" else float(options.length_penalty or 0)


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
