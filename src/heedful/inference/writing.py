"""Models that write: greedy, beam, sampled, streamed and speculative generation from prompts."""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from heedful.errors import UserError
from heedful.generation import (
    ForcedTokens,
    Hypothesis,
    Normalization,
    Rule,
    Stop,
    StopStrings,
    beam_search,
    cut,
    sample,
    sample_steps,
    sampling_rules,
)
from heedful.generation.speculative import Draft, DraftModel, PromptLookup, Speculation, speculate
from heedful.inference.card import GenerationIds
from heedful.inference.decoding import Decoding
from heedful.inference.model import SavedModel, Texts, TooLong

Step = TypeVar("Step")


@dataclass(frozen=True)
class GenerationOptions:
    """How a text is gone on with. By default greedily: the likeliest token each time.

    Args:
        max_new_tokens: most tokens written, the end counted; default: what the model's card says
            of a source, or 64.
        min_new_tokens: fewest tokens before the end.
        beam_size: above 1: beam search, which keeps that many hypotheses.
        length_penalty, normalization, stop_rule: of beam search (`heedful.generation.beam_search`).
            The rule's default is that of transformers' `generate`, so that an imported model writes
            what it wrote there.
        num_groups, diversity_penalty: diverse beam search (Vijayakumar et al. 2018).
        num_return: hypotheses, or samples, for each prompt.
        temperature, top_k, top_p, min_p, typical_p: any of them turns sampling on (temperature 0
            is greedy).
        seed: of sampling: one number, from which each prompt gets its own by its place, or one for
            each prompt; a sample does not depend on what else is in the batch. Default: drawn from
            torch's generator.
        repetition_penalty, presence_penalty, frequency_penalty: on tokens that were there before.
        no_repeat_ngram_size: no n-gram of this size twice in what is written; 0: no rule.
        banned: texts, ids or lists of ids that may not be written.
        forced: place among the new tokens -> the token that must stand there.
        prefix_function: `(prompt's number, new ids) -> ids that may come next`.
        stop: texts that end the output; it is cut before them.
        draft: a smaller model with the same vocabulary, or "lookup" for what followed the same
            words before: speculative decoding, which gives the same in fewer steps of the model.
        num_draft_tokens: how many tokens the draft proposes at a time.
        too_long: what to do with a source longer than the net allows.
        batch_tokens: padded tokens times beams that are worked on at once.
        progress: called with the number of prompts after each batch.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    beam_size: int = 1
    length_penalty: float = 1.0
    normalization: Normalization = "average"
    stop_rule: Stop = "heuristic"
    num_groups: int = 1
    diversity_penalty: float = 0.0
    num_return: int = 1
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | Sequence[int] | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int = 0
    banned: Sequence[str | int | Sequence[int]] = ()
    forced: Mapping[int, int] = field(default_factory=dict)
    prefix_function: Callable[[int, list[int]], Sequence[int]] | None = None
    stop: Sequence[str] = ()
    draft: "Writer | str | None" = None
    num_draft_tokens: int = 4
    too_long: TooLong = "error"
    batch_tokens: int = 8_192
    progress: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if self.num_return < 1:
            raise UserError(f"num_return must be at least 1, not {self.num_return}")
        if self.beam_size > 1 and self.samples:
            raise UserError("beam_size above 1 and sampling options exclude each other")
        if self.beam_size > 1 and (self.stop or self.draft is not None):
            raise UserError("stop texts and a draft go with beam_size 1 alone")
        if self.beam_size == 1 and self.num_return > 1 and not self.samples:
            raise UserError(
                f"num_return {self.num_return} greedy outputs would all be the same; "
                "give a temperature, or a beam_size"
            )

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "GenerationOptions":
        """From keywords; raises UserError naming the nearest to an unknown one."""
        known = [option.name for option in fields(cls)]
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
                raise UserError(f"unknown generation option {name}; {hint}")
        return cls(**options)

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn, not chosen."""
        cuts = (self.top_k, self.top_p, self.min_p, self.typical_p)
        if self.temperature is not None:
            return self.temperature != 0
        return any(cut is not None for cut in cuts)

    def seeds(self, count: int) -> list[int] | None:
        """One for each prompt; None where nothing is drawn."""
        if not self.samples:
            return None
        seed = self.seed
        if seed is None:
            seed = int(torch.randint(2**31, ()))
        if isinstance(seed, int):
            return [seed + (place << 32) for place in range(count)]
        if len(seed) != count:
            raise UserError(f"{len(seed)} seeds for {count} prompts")
        return list(seed)


@dataclass(frozen=True)
class Generation:
    """One output. `finished` is False where the length limit cut it off.

    `ids` are the new tokens, the end included where it was reached; `log_prob` is the sum of the
    tokens' natural log-probabilities under the model, `score` what outputs are ranked by.
    """

    text: str
    ids: list[int]
    score: float
    log_prob: float
    finished: bool


class Writer(SavedModel):
    """A model that writes text: of one stack, which goes on with a prompt, or of two."""

    kind = "model that writes"

    @property
    def ids(self) -> GenerationIds:
        """Tokens that a generation begins and ends with."""
        return self.card.generation

    def generate(self, prompts: Texts, **options: Any) -> list[str] | list[list[int]]:
        """The best output for each prompt, in order: text for text, new ids for lists of ids.

        Options: those of `GenerationOptions`, by keyword: max_new_tokens, beam_size, temperature,
        top_k, top_p, seed, stop, and more. A result does not depend on what else is in `prompts`.
        """
        found = self.generations(prompts, **options)
        if len(prompts) and not isinstance(prompts[0], str):
            return [outputs[0].ids for outputs in found]
        return [outputs[0].text for outputs in found]

    def generations(self, prompts: Texts, **options: Any) -> list[list[Generation]]:
        """Up to `num_return` outputs for each prompt, best first; samples in their order."""
        chosen = GenerationOptions.of(options)
        rows = self.prompt_ids(prompts, chosen.too_long)
        seeds = chosen.seeds(len(rows))
        results: list[list[Generation]] = [[] for _ in rows]
        self.net.eval()
        with torch.inference_mode():
            for numbers in self._batches(rows, chosen):
                given = None if seeds is None else [seeds[number] for number in numbers]
                found = self._outputs([rows[n] for n in numbers], numbers, chosen, given)
                for number, outputs in zip(numbers, found, strict=True):
                    results[number] = [self._read(output, chosen.stop) for output in outputs]
                if chosen.progress is not None:
                    chosen.progress(len(numbers))
        return results

    def stream(self, prompt: str | Sequence[int], **options: Any) -> Iterator[str]:
        """The text that `generate` gives, piece by piece as it is written."""
        chosen = GenerationOptions.of(options)
        if chosen.beam_size > 1 or chosen.num_return > 1:
            raise UserError("only greedy decoding and single samples can be streamed")
        prompts: Any = [prompt]
        row = self.prompt_ids(prompts, chosen.too_long)[0]
        seeds = chosen.seeds(1)
        self.net.eval()
        written: list[int] = []
        shown = ""
        for tokens, ended in self._runs(row, chosen, seeds):
            written += tokens
            text = cut(self._decode(written), chosen.stop) if chosen.stop else self._decode(written)
            safe = text if ended else _settled(text, chosen.stop)
            if safe.startswith(shown) and len(safe) > len(shown):
                yield safe[len(shown) :]
                shown = safe

    def prompt_ids(self, prompts: Texts, too_long: TooLong) -> list[list[int]]:
        """Ids of each prompt with what the model expects before it (and after a source)."""
        raise NotImplementedError

    def open(self, rows: list[list[int]], capacity: int) -> tuple[Tensor, Decoding]:
        """What a search starts from: the start's ids (N, t), and the net's memory of the rows."""
        raise NotImplementedError

    def room(self, row: list[int], options: GenerationOptions) -> int:
        """Most new tokens for a prompt."""
        raise NotImplementedError

    def _batches(self, rows: list[list[int]], options: GenerationOptions) -> Iterator[list[int]]:
        """Numbers of the prompts that are worked on together."""
        raise NotImplementedError

    def _outputs(
        self,
        rows: list[list[int]],
        numbers: list[int],
        options: GenerationOptions,
        seeds: list[int] | None,
    ) -> list[list[Hypothesis]]:
        if options.draft is not None:
            return [
                self._speculated(row, number, options, None if seeds is None else seeds[place])
                for place, (row, number) in enumerate(zip(rows, numbers, strict=True))
            ]
        rooms = [self.room(row, options) for row in rows]
        start, state = self.open(rows, max(rooms))
        common: dict[str, Any] = {
            "eos_id": self._end_ids(),
            "max_new_tokens": rooms,
            "min_new_tokens": options.min_new_tokens,
            "rules": self._rules(options, numbers, rooms),
            "prompts": self._seen(rows),
            "state": state,
        }
        if options.beam_size > 1:
            return beam_search(
                state.next_log_probs,
                start,
                beam_size=options.beam_size,
                length_penalty=options.length_penalty,
                normalization=options.normalization,
                stop=options.stop_rule,
                num_return=options.num_return,
                num_groups=options.num_groups,
                diversity_penalty=options.diversity_penalty,
                **common,
            )
        found = sample(
            state.next_log_probs,
            start,
            seeds=seeds,
            num_samples=options.num_return,
            stop=self._stop(options),
            **common,
        )
        size = options.num_return
        return [found[place : place + size] for place in range(0, len(found), size)]

    def _runs(
        self, row: list[int], options: GenerationOptions, seeds: list[int] | None
    ) -> Iterator[tuple[list[int], bool]]:
        """Tokens as they are written, and whether they were the last."""
        if options.draft is not None:
            with torch.inference_mode():
                speculation = self._speculation(row, 0, options, seeds[0] if seeds else None)
            for run in _one_at_a_time(iter(speculation)):
                yield run, speculation.ended
            return
        with torch.inference_mode():
            start, state = self.open([row], self.room(row, options))
            steps = sample_steps(
                state.next_log_probs,
                start,
                rules=self._rules(options, [0], [self.room(row, options)]),
                eos_id=self._end_ids(),
                max_new_tokens=self.room(row, options),
                min_new_tokens=options.min_new_tokens,
                seeds=seeds,
                prompts=self._seen([row]),
                stop=self._stop(options),
                state=state,
            )
        for step in _one_at_a_time(steps):
            yield step.tokens, bool(step.ended)

    def _speculated(
        self, row: list[int], number: int, options: GenerationOptions, seed: int | None
    ) -> list[Hypothesis]:
        """One prompt by speculative decoding."""
        speculation = self._speculation(row, number, options, seed)
        for _ in speculation:
            pass
        found = speculation.result()
        score = found.log_prob / max(1, len(found.ids))
        return [Hypothesis(found.ids, score, found.finished, found.log_prob, found.token_log_probs)]

    def _speculation(
        self, row: list[int], number: int, options: GenerationOptions, seed: int | None
    ) -> Speculation:
        if options.num_return > 1:
            raise UserError("a draft gives one output for each prompt: leave out num_return")
        room = self.room(row, options)
        nets = [self, *([options.draft] if isinstance(options.draft, Writer) else [])]
        left = min(net.config.max_length for net in nets) - len(self._seen([row])[0])
        if options.max_new_tokens is None and left > 0:  # nobody asked for more than there is
            room = min(room, left)
        draft: Draft
        if isinstance(options.draft, Writer):
            if options.draft.config_vocab_size() != self.config_vocab_size():
                raise UserError("the draft must have the model's own vocabulary")
            draft = DraftModel(options.draft.scorer(row, room)[1])
        elif options.draft == "lookup":
            draft = PromptLookup()
        else:
            raise UserError(f'draft must be a model or "lookup", not {options.draft!r}')
        start, target = self.scorer(row, room)
        return speculate(
            target,
            draft,
            start,
            eos_id=self._end_ids(),
            max_new_tokens=room,
            num_draft_tokens=options.num_draft_tokens,
            rules=self._rules(options, [number], [room]),
            seed=seed,
            stop=self._stop(options),
        )

    def scorer(self, row: list[int], room: int) -> tuple[list[int], Decoding]:
        """A prompt's first tokens, and what adds tokens to it and takes them back."""
        start, state = self.open([row], room)
        if start.size(1) + room > state.cache.capacity + 1:
            raise UserError(
                f"speculative decoding cannot outgrow the net: {start.size(1)} tokens and {room} "
                f"new ones do not fit the {self.config.max_length} that the model allows"
            )
        return start[0].tolist(), state

    def config_vocab_size(self) -> int:
        """How many ids the net's output has."""
        size: int = self.net.head.out.weight.size(0)
        return size

    def _rules(
        self, options: GenerationOptions, numbers: Sequence[int], rooms: Sequence[int]
    ) -> list[Rule]:
        """The rules of a batch; a prefix function is told the prompts' own numbers.

        What the model's card forces is certain, as in transformers: it costs no log-probability.
        """
        asked = options.prefix_function
        function = None
        if asked is not None:
            given = asked

            def function(sentence: int, ids: list[int]) -> Sequence[int]:
                return given(numbers[sentence], ids)

        banned: list[int | Sequence[int]] = []
        for entry in options.banned:
            banned.append(self.tgt_tokenizer.encode(entry) if isinstance(entry, str) else entry)
        rules = sampling_rules(
            temperature=options.temperature if options.samples else None,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            typical_p=options.typical_p,
            repetition_penalty=options.repetition_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            no_repeat_ngram_size=options.no_repeat_ngram_size,
            banned=banned,
            forced=options.forced or None,
            prefix_function=function,
        )
        if self.ids.first is not None:
            rules.append(ForcedTokens({0: self.ids.first}, certain=True))
        if self.ids.last is not None:
            at_limit = [{length - 1: self.ids.last} for length in rooms]
            rules.append(ForcedTokens(at_limit, certain=True))
        return rules

    def _seen(self, rows: list[list[int]]) -> list[list[int]]:
        """Tokens before the new ones, for the rules that look at them."""
        return rows

    def _end_ids(self) -> list[int]:
        """What ends a text; a net without an end mark writes until its limit."""
        if self.ids.end:
            return list(self.ids.end)
        raise UserError("this model has no end mark; import it with its generation_config.json")

    def _stop(self, options: GenerationOptions) -> StopStrings | None:
        return StopStrings(self._decode, options.stop) if options.stop else None

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tgt_tokenizer.decode(list(ids))

    def _read(self, found: Hypothesis, stop: Sequence[str]) -> Generation:
        text = self._decode(found.ids) if self.has_tokenizer else ""
        text = cut(text, stop) if stop else text
        return Generation(text, found.ids, found.score, found.log_prob, found.finished)


def _one_at_a_time(steps: Iterator[Step]) -> Iterator[Step]:
    """Each step in inference mode, which is not held while the caller has what it gave."""
    while True:
        with torch.inference_mode():
            step = next(steps, None)
        if step is None:
            return
        yield step


def _settled(text: str, stop: Sequence[str]) -> str:
    """What of a text cannot change any more: not a broken character, nor what may begin a stop."""
    text = text.rstrip("\N{REPLACEMENT CHARACTER}")
    longest = max((len(string) for string in stop), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-size:]) for string in stop):
            return text[:-size]
    return text
