"""Models that write text: one call for what goes on with a prompt and what answers a source."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from heedful.errors import UserError
from heedful.generation import Hypothesis, LengthScore, beam_search, sample, sample_steps
from heedful.generation.rules import IN_ORDER, ForcedTokens, Rule, sampling_rules
from heedful.generation.sampling import StopStrings, cut
from heedful.generation.speculative import Draft, DraftModel, PromptLookup, Speculation
from heedful.inference.card import GenerationIds
from heedful.inference.decoding import Decoding
from heedful.inference.model import SavedModel, Texts, by_length
from heedful.options import Options

Step = TypeVar("Step")


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


@dataclass(frozen=True)
class TextScore:
    """How likely a text is: the sum of its tokens' natural log-probabilities, and their number."""

    log_prob: float
    num_tokens: int


class Generator(SavedModel):
    """A model that writes text. Its kinds say how a prompt is read, and how long an output may be.

    Every call takes the fields of `heedful.options.Options` by keyword; what is not given is as the
    model's card says. A result does not depend on what else is in a batch.
    """

    kind = "language model"
    usual: ClassVar[dict[str, Any]] = {}  # options where neither call nor card says any

    @property
    def ids(self) -> GenerationIds:
        """Tokens that a generation begins and ends with."""
        return self.card.generation

    def generate(self, prompts: Texts, **options: Any) -> list[str] | list[list[int]]:
        """The best output for each prompt, in order: text for text, new ids for lists of ids."""
        found = self.generations(prompts, **options)
        if len(prompts) and not isinstance(prompts[0], str):
            return [outputs[0].ids for outputs in found]
        return [outputs[0].text for outputs in found]

    def generations(self, prompts: Texts, **options: Any) -> list[list[Generation]]:
        """Up to `num_return` outputs for each prompt, best first; samples in their order.

        Raises UserError for an option out of range, and for a prompt that is too long.
        """
        chosen = self.options(**options)
        if chosen.prefixes is not None and len(chosen.prefixes) != len(prompts):
            raise UserError(f"{len(chosen.prefixes)} prefixes for {len(prompts)} texts")
        rows = self.prompt_ids(prompts, chosen)
        seeds = chosen.seeds(len(rows))
        results = [[Generation("", [], 0.0, 0.0, True)] for _ in rows]
        progress = chosen.progress or (lambda count: None)
        progress(sum(not row for row in rows))
        self.net.eval()
        with torch.inference_mode():
            for numbers in self.batches(rows, chosen):
                given = None if seeds is None else [seeds[number] for number in numbers]
                found = self._outputs([rows[n] for n in numbers], numbers, chosen, given)
                for number, outputs in zip(numbers, found, strict=True):
                    results[number] = [self._read(output, chosen.stop) for output in outputs]
                progress(len(numbers))
        return results

    def stream(self, prompt: str | Sequence[int], **options: Any) -> Iterator[str]:
        """The text that `generate` gives, piece by piece as it is written; no beam search."""
        chosen = self.options(**({"beam_size": 1} | options))
        if (chosen.beam_size or 1) > 1 or chosen.num_return > 1:
            raise UserError("only greedy decoding and single samples can be streamed")
        prompts: Any = [prompt]
        [row] = self.prompt_ids(prompts, chosen)
        if not row:
            return
        self.net.eval()
        written: list[int] = []
        shown = ""
        for tokens, ended in self._runs(row, chosen):
            written += tokens
            text = cut(self._decode(written), chosen.stop) if chosen.stop else self._decode(written)
            safe = text if ended else _settled(text, chosen.stop)
            if safe.startswith(shown) and len(safe) > len(shown):
                yield safe[len(shown) :]
                shown = safe

    def options(self, **given: Any) -> Options:
        """What is asked for, the card's defaults behind it; raises UserError for an unknown one."""
        return Options.of(given).with_defaults({**self.usual, **self.card.options})

    def prompt_ids(self, prompts: Texts, options: Options | None = None) -> list[list[int]]:
        """Ids of each prompt with what the model expects around it; none: the output is blank."""
        raise NotImplementedError

    def open(self, rows: list[list[int]], capacity: int, beams: int) -> tuple[Tensor, Decoding]:
        """What a search starts from: the start's ids (B, t), and the net's memory of the rows."""
        raise NotImplementedError

    def length_limit(self, row: list[int], options: Options) -> int:
        """Most new tokens for a prompt."""
        raise NotImplementedError

    def batches(self, rows: Sequence[Sequence[int]], options: Options) -> Iterator[list[int]]:
        """Numbers of the prompts that are worked on together, the longest first."""
        return by_length(rows, options.row_tokens)

    def seen(self, rows: list[list[int]]) -> list[list[int]]:
        """Tokens before the new ones, for the rules that look at them."""
        return rows

    def end_ids(self) -> list[int]:
        """What ends a text; raises UserError for a net without an end mark."""
        if self.ids.end:
            return list(self.ids.end)
        raise UserError("this model has no end mark; import it with its generation_config.json")

    # --- searches -------------------------------------------------------------------------------

    def _outputs(
        self,
        rows: list[list[int]],
        numbers: list[int],
        options: Options,
        seeds: list[int] | None,
    ) -> list[list[Hypothesis]]:
        if options.draft is not None:
            found: list[list[Hypothesis]] = []
            for place, (row, number) in enumerate(zip(rows, numbers, strict=True)):
                seed = None if seeds is None else seeds[place]
                speculation = self._speculation(row, number, options, seed)
                list(speculation)
                found.append([speculation.result()])
            return found
        size = options.rows
        function, start, common = self._search(rows, numbers, options, size)
        length_score = LengthScore(options.normalization or "average", options.length_penalty or 0)
        if (options.beam_size or 1) > 1:
            return beam_search(
                function,
                start,
                beam_size=size,
                length_penalty=length_score.length_penalty,
                normalization=length_score.normalization,
                stop=options.stop_rule or "optimal",
                num_return=options.num_return,
                num_groups=options.num_groups,
                diversity_penalty=options.diversity_penalty,
                **common,
            )
        samples = sample(
            function,
            start,
            seeds=seeds,
            num_samples=options.num_return,
            stop=self._stop(options),
            score=length_score,
            **common,
        )
        return [samples[place : place + size] for place in range(0, len(samples), size)]

    def _search(
        self, rows: list[list[int]], numbers: list[int], options: Options, beams: int
    ) -> tuple[Any, Tensor, dict[str, Any]]:
        """The function, the start and the arguments that searches in batches share."""
        limits = [self.length_limit(row, options) for row in rows]
        start, state = self.open(rows, max(limits), beams)
        common = self._asked(rows, numbers, options, limits) | {"state": state}
        return state.next_log_probs, start, common

    def _asked(
        self, rows: list[list[int]], numbers: list[int], options: Options, limits: list[int]
    ) -> dict[str, Any]:
        """What every search is asked for (`read_request`)."""
        asked: dict[str, Any] = {
            "eos_id": self.end_ids(),
            "max_new_tokens": limits,
            "min_new_tokens": options.min_new_tokens,
            "rules": self._rules(options, numbers, limits),
            "prompts": self.seen(rows),
        }
        if options.prefixes is not None:
            first = [] if self.ids.first is None else [self.ids.first]
            prefixes = [self.tgt_tokenizer.encode(options.prefixes[number]) for number in numbers]
            asked["forced_prefix"] = [[*first, *prefix] for prefix in prefixes]
        return asked

    def _runs(self, row: list[int], options: Options) -> Iterator[tuple[list[int], bool]]:
        """Tokens as they are written, and whether they were the last."""
        seeds = options.seeds(1)
        if options.draft is not None:
            with torch.inference_mode():
                speculation = self._speculation(row, 0, options, seeds[0] if seeds else None)
            for run in _one_at_a_time(iter(speculation)):
                yield run, speculation.ended
            return
        with torch.inference_mode():
            function, start, common = self._search([row], [0], options, 1)
            steps = sample_steps(
                function, start, seeds=seeds, stop=self._stop(options), look_every=1, **common
            )
        for step in _one_at_a_time(steps):
            yield step.tokens, bool(step.ended)

    def _speculation(
        self, row: list[int], number: int, options: Options, seed: int | None
    ) -> Speculation:
        if options.num_return > 1:
            raise UserError("a draft gives one output for each prompt: leave out num_return")
        limit = self.length_limit(row, options)
        helper = options.draft
        nets = [self, *([helper] if isinstance(helper, Generator) else [])]
        left = min(net.config.max_length for net in nets) - len(self.seen([row])[0])
        if options.max_new_tokens is None and left > 0:  # nobody asked for more than there is
            limit = min(limit, left)
        draft: Draft
        if isinstance(helper, Generator):
            if helper.vocab_size != self.vocab_size:
                raise UserError("the draft must have the model's own vocabulary")
            draft = DraftModel(helper._scorer(row, limit)[1])
        elif helper == "lookup":
            draft = PromptLookup()
        else:
            raise UserError(f'draft must be a model or "lookup", not {helper!r}')
        start, target = self._scorer(row, limit)
        return Speculation(
            target,
            draft,
            start,
            num_draft_tokens=options.num_draft_tokens,
            seed=seed,
            stop=self._stop(options),
            **self._asked([row], [number], options, [limit]),
        )

    def _scorer(self, row: list[int], limit: int) -> tuple[list[int], Decoding]:
        """A prompt's first tokens, and what adds tokens to it and takes them back."""
        start, state = self.open([row], limit, 1)
        if start.size(1) + limit > state.longest + 1:
            raise UserError(
                f"speculative decoding cannot outgrow the net: {start.size(1)} tokens and {limit} "
                f"new ones do not fit the {self.config.max_length} that the model allows"
            )
        return start[0].tolist(), state

    def _rules(self, options: Options, numbers: Sequence[int], limits: Sequence[int]) -> list[Rule]:
        """The rules of a batch; a prefix function is told the prompts' own numbers.

        What the card forbids is as if the model did; what it forces is certain, as in transformers:
        it costs no log-probability.
        """
        asked = options.prefix_function
        function = asked and (lambda sentence, ids: asked(numbers[sentence], ids))
        banned = [
            self.tgt_tokenizer.encode(entry) if isinstance(entry, str) else entry
            for entry in options.banned
        ]
        given_rules = {name: value for name, value in vars(options).items() if name in IN_ORDER}
        if not options.draws:
            given_rules["temperature"] = None
        given_rules |= {"prefix_function": function, "banned": banned, "never": self.ids.never}
        rules = sampling_rules(**given_rules)
        if self.ids.first is not None:
            rules.append(ForcedTokens({0: self.ids.first}, certain=True))
        if self.ids.last is not None:
            at_limit = [{length - 1: self.ids.last} for length in limits]
            rules.append(ForcedTokens(at_limit, certain=True))
        return rules

    @property
    def vocab_size(self) -> int:
        """How many ids the net's output has."""
        size: int = self.net.head.out.weight.size(0)
        return size

    def _stop(self, options: Options) -> StopStrings | None:
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
