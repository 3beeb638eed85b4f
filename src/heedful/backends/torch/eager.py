"""The net itself as an engine: every option of every architecture, by torch as it is."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from heedful.backends.base import GenerationRequest, Settings
from heedful.backends.shortlist import Shortlist
from heedful.backends.torch.coverage import Coverage
from heedful.backends.torch.state import STEPS_AT_FIRST, Decoding, Listed, left_padded
from heedful.backends.torch.threads import run_with, threads_for, weights_of_step
from heedful.data.collate import Batch
from heedful.errors import UserError
from heedful.evaluation.target_scores import TargetScores, log_softmax, score_targets, target_states
from heedful.generation.constrained import constrained_beam_search
from heedful.generation.context import Rule
from heedful.generation.hypotheses import Hypothesis
from heedful.generation.rules import IN_ORDER, sampling_rules
from heedful.generation.sampling import sample, sample_steps
from heedful.generation.search import beam_search
from heedful.generation.speculative import Draft, PromptLookup, Reader, Speculation
from heedful.generation.stopping import StopStrings
from heedful.generation.token_rules import ForcedTokens
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.encoder_only import EncoderOnly
from heedful.parts.cache import capacity_for
from heedful.parts.tokens import Tokens

Step = TypeVar("Step")


class Eager:
    """A net as an `Backend`.

    Args:
        max_length: positions that the net has.
        shortlist: of two stacks: the target tokens that a source may become, in searches without a
            draft; default: all.
        settings: its threads; None: by the size of the work (`heedful.backends.torch.threads`).

    Attributes:
        two_stacks: whether a source is read.
    """

    name = "eager"
    reads = frozenset({"states", "logits", "scores"})

    def __init__(
        self,
        net: Any,
        max_length: int,
        shortlist: Shortlist | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.net = net
        self.shortlist = shortlist
        self.max_length = max_length
        self.two_stacks = isinstance(net, EncoderDecoder)
        self.settings = settings or Settings()

    @property
    def precision(self) -> str:
        """Of the weights."""
        return str(next(self.net.parameters()).dtype).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        """Where the net is."""
        device: torch.device = next(self.net.parameters()).device
        return device

    def unsupported_reasons(self, rows: list[list[int]], request: GenerationRequest) -> list[str]:
        """Nothing."""
        return []

    def submit(
        self, rows: list[list[int]], request: GenerationRequest
    ) -> Callable[[], list[list[Hypothesis]]]:
        """Nothing is begun before it is waited for."""
        return partial(self.outputs, rows, request)

    def outputs(self, rows: list[list[int]], request: GenerationRequest) -> list[list[Hypothesis]]:
        """Outputs of each row, best first; what else is in the batch does not matter."""
        self.net.eval()
        with torch.inference_mode(), self._threads(len(rows) * request.options.rows):
            if request.draft is None:
                return self._searched(rows, request)
            found: list[list[Hypothesis]] = []
            for place, row in enumerate(rows):
                speculation = self._speculation(row, request.of([place]))
                list(speculation)
                found.append([speculation.result()])
            return found

    def runs(self, row: list[int], request: GenerationRequest) -> Iterator[tuple[list[int], bool]]:
        """Tokens of one output as they are written, and whether they were the last."""
        self.net.eval()
        if request.draft is not None:
            with torch.inference_mode():
                speculation = self._speculation(row, request)
            for run in self._one_at_a_time(iter(speculation)):
                yield run, speculation.ended
            return
        with torch.inference_mode():
            function, start, common = self._search([row], request, 1)
            common |= {"seeds": request.seeds, "stop": _stop(request), "look_every": 1}
            steps = sample_steps(function, start, **common)
        for step in self._one_at_a_time(steps):
            yield step.tokens, bool(step.ended)

    def log_probs(
        self, rows: list[list[int]], targets: list[list[int]] | None, request: GenerationRequest
    ) -> list[np.ndarray]:
        """As `Backend.log_probs`."""
        if targets is None:
            inputs, scored, source = rows, [row[1:] for row in rows], None
            first_scored = 0
        else:
            start = start_ids(request.decoder_start_ids)
            inputs = [[*start, *target] for target in targets]
            scored = [[*target, request.eos_ids[0]] for target in targets]
            source, first_scored = Tokens.from_ids(*self._batch(rows)), len(start) - 1
        tokens = Tokens.from_ids(*self._batch(inputs))
        counts = [len(row) for row in scored]
        places = [torch.arange(count) for count in counts]
        width = tokens.ids.size(1)
        batch = Batch(
            tokens=tokens,
            source=source,
            targets=torch.tensor([*chain.from_iterable(scored)], dtype=torch.long),
            target_positions=torch.cat(
                [p + n * width + first_scored for n, p in enumerate(places)]
            ),
            indices=np.arange(len(rows)),
            num_tokens=sum(map(len, inputs)),
        )
        log_probs = self.target_scores(batch).log_probs.cpu().numpy()
        return np.split(log_probs, np.cumsum(counts)[:-1])

    def target_scores(self, batch: Batch) -> TargetScores:
        """Scores of the targets of a batch."""
        self.net.eval()
        with torch.inference_mode(), self._threads(batch.num_tokens):
            batch = batch.to(self.device)
            return score_targets(self.log_probs_of(batch), batch.targets)

    def log_probs_of(self, batch: Batch) -> Callable[[slice], Float[Tensor, "n V"]]:
        """A function that gives the log-probabilities of all entries for a slice of a batch's
        targets; see `score_targets`."""
        states = target_states(self.net, batch)
        return lambda rows: log_softmax(self.net.head(states[rows]))

    def states(
        self, rows: list[list[int]], types: list[list[int]] | None = None
    ) -> list[np.ndarray]:
        """As `Backend.states`; of two stacks the encoder's."""

        def of(ids: Tensor, lengths: Tensor, kinds: Tensor | None) -> Any:
            tokens = Tokens.from_ids(ids, lengths)
            if isinstance(self.net, EncoderDecoder):
                return self.net.encode(tokens).states
            if isinstance(self.net, EncoderOnly):
                return self.net.encode(tokens, kinds)
            return self.net.decode(tokens)

        return self._read(rows, types, of)

    def logits(
        self, rows: list[list[int]], types: list[list[int]] | None = None
    ) -> list[np.ndarray]:
        """As `Backend.logits`."""
        return self._read(rows, types, lambda ids, lengths, k: self.net(ids, lengths, types=k))

    def open(
        self,
        rows: list[list[int]],
        start: Sequence[int],
        capacity: int,
        beams: int,
        listed: Listed | None = None,
    ) -> tuple[Int[Tensor, "B t"], Decoding]:
        """What a search starts from, and the net's memory of the rows.

        Args:
            start: what a decoder of two stacks reads first.
            capacity: new tokens that may come.
            listed: those that a target may have.
        """
        if not self.two_stacks:
            begin, padding = left_padded(rows, self.device)
            size = capacity_for(begin.size(1) + beams * min(capacity, STEPS_AT_FIRST))
            cache = self.net.start(len(rows), capacity=size, beams=beams)
            return begin, Decoding(self.net, cache, longest=self.max_length, left_padding=padding)
        source = Tokens.from_ids(*self._batch(rows))
        begin = torch.tensor([list(start_ids(start))] * len(rows), device=self.device)
        size = capacity_for(begin.size(1) + beams * min(capacity, STEPS_AT_FIRST))
        cache = self.net.start(source, capacity=size, beams=beams)
        longest = capacity + begin.size(1) - 1
        return begin, Decoding(self.net, cache, longest=longest, listed=listed)

    # --- searches -------------------------------------------------------------------------------

    def _searched(
        self, rows: list[list[int]], request: GenerationRequest
    ) -> list[list[Hypothesis]]:
        options, size = request.options, request.options.rows
        function, start, common = self._search(rows, request, size)
        beams = {"beam_size": size, "num_return": options.num_return, **vars(request.score)}
        if request.required_ids:
            return constrained_beam_search(function, start, request.required_ids, **beams, **common)
        if options.coverage_penalty:
            if not self.two_stacks:
                raise UserError("coverage_penalty is of a source, and this model reads none")
            covered = Coverage(common["state"], options.coverage_penalty)
            function = covered.next_log_probs
            common |= {"state": covered, "penalties": covered.penalties}
        if (options.beam_size or 1) > 1:
            return beam_search(
                function,
                start,
                stop=options.stop_rule or "optimal",
                num_groups=options.num_groups,
                diversity_penalty=options.diversity_penalty,
                # The card's own token at the limit is certain, and wins over a forced end.
                force_eos=None if request.forced_eos_id is None else False,
                **beams,
                **common,
            )
        samples = sample(
            function,
            start,
            seeds=request.seeds,
            num_samples=options.num_return,
            stop=_stop(request),
            score=request.score,
            **common,
        )
        return [samples[place : place + size] for place in range(0, len(samples), size)]

    def _search(
        self, rows: list[list[int]], request: GenerationRequest, beams: int
    ) -> tuple[Any, Tensor, dict[str, Any]]:
        """The function, the start and the arguments that searches in batches share."""
        listed = self._listed(rows, request)
        start, state = self.open(
            rows, request.decoder_start_ids, max(request.max_new_tokens), beams, listed
        )
        common = self._search_arguments(rows, request) | {"state": state}
        return state.next_log_probs, start, common

    def _listed(self, rows: list[list[int]], request: GenerationRequest) -> Listed | None:
        """What a shortlist lets each row become, and what it must have."""
        options = request.options
        if self.shortlist is None or not options.shortlist or not self.two_stacks:
            return None
        if options.prefix_function is not None:  # which may ask for any token
            return None
        forced = (options.forced or {}).values()
        phrases = chain.from_iterable(request.required_ids)
        must = {
            *request.eos_ids,
            *forced,
            *phrases,
            request.forced_bos_id,
            request.forced_eos_id,
        } - {None}
        prefixes = request.output_prefixes or [[] for _ in rows]
        words = [
            [*must, *prefix, *self.shortlist.words(row).tolist()]
            for row, prefix in zip(rows, prefixes, strict=True)
        ]
        return Listed(self.net.head, words)

    def _search_arguments(
        self, rows: list[list[int]], request: GenerationRequest
    ) -> dict[str, Any]:
        """The arguments that every search takes (`read_request`)."""
        arguments: dict[str, Any] = {
            "eos_id": list(request.eos_ids),
            "max_new_tokens": request.max_new_tokens,
            "min_new_tokens": request.options.min_new_tokens,
            "rules": rules_of(request),
            "prompts": self._seen(rows, request),
        }
        if request.output_prefixes is not None:
            first = [] if request.forced_bos_id is None else [request.forced_bos_id]
            arguments["forced_prefix"] = [[*first, *prefix] for prefix in request.output_prefixes]
        return arguments

    def _seen(self, rows: list[list[int]], request: GenerationRequest) -> list[list[int]]:
        """Tokens before the new ones: rules look at what is written, not at a source."""
        return [list(request.decoder_start_ids) for _ in rows] if self.two_stacks else rows

    def _speculation(self, row: list[int], request: GenerationRequest) -> Speculation:
        if request.options.num_return > 1:
            raise UserError("a draft gives one output for each prompt: leave out num_return")
        left = self.max_length - len(self._seen([row], request)[0]) + 1
        limit = request.max_new_tokens[0]
        if (
            request.options.max_new_tokens is None and left > 0
        ):  # nobody asked for more than there is
            limit = min(limit, left)
        request = request.of([0], max_new_tokens=[limit])
        draft: Draft
        if isinstance(request.draft, tuple):
            helper, start = request.draft
            if helper.vocab_size != self.vocab_size:
                raise UserError("the draft must have the model's own vocabulary")
            draft = helper._draft(row, start, limit)
        elif request.draft == "lookup":
            draft = PromptLookup()
        else:
            raise UserError(f'draft must be a model or "lookup", not {request.draft!r}')
        begin, target = self.open([row], request.decoder_start_ids, limit, 1)
        if begin.size(1) + limit > target.longest + 1:
            raise UserError(
                f"speculative decoding cannot outgrow the net: {begin.size(1)} tokens and {limit} "
                f"new ones do not fit the {self.max_length} that the model allows"
            )
        return Speculation(
            target,
            draft,
            begin[0].tolist(),
            num_draft_tokens=request.options.num_draft_tokens,
            seed=None if request.seeds is None else request.seeds[0],
            stop=_stop(request),
            **self._search_arguments([row], request),
        )

    def _draft(self, row: list[int], start: Sequence[int], limit: int) -> Reader:
        """This net as the draft of another one, for as many tokens as it has positions."""
        if len(row) > self.max_length:
            raise UserError(
                f"a prompt has {len(row)} tokens, but the draft allows {self.max_length}; leave "
                "the draft out, or take one of the model's own length"
            )
        return Reader(self.open([row], start, limit, 1)[1], longest=self.max_length)

    @property
    def vocab_size(self) -> int:
        """How many ids the net's output has."""
        size: int = self.net.head.out.weight.size(0)
        return size

    def _one_at_a_time(self, steps: Iterator[Step]) -> Iterator[Step]:
        """Each step in inference mode, which is not held while the caller has what it gave."""
        while True:
            with torch.inference_mode(), self._threads(1):
                step = next(steps, None)
            if step is None:
                return
            yield step

    @cached_property
    def _weights_of_step(self) -> int:
        return weights_of_step(self.net)

    def _threads(self, rows: int) -> AbstractContextManager[None]:
        """What runs a pass of so many tokens with the threads that it is worth."""
        count = self.settings.threads
        if count is None:
            count = threads_for(self._weights_of_step, rows, torch.get_num_threads())
        return run_with(count)

    # --- batches --------------------------------------------------------------------------------

    def _batch(self, rows: list[list[int]]) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B"]]:
        """Rows as ids padded on the right, and their lengths; no pass looks at what pads."""
        ids = pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], True)
        return ids.to(self.device), torch.tensor([len(row) for row in rows], device=self.device)

    def _read(
        self,
        rows: list[list[int]],
        types: list[list[int]] | None,
        answer: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    ) -> list[np.ndarray]:
        """What a pass over whole rows gives; of what it gives for each token without padding."""
        self.net.eval()
        with torch.inference_mode(), self._threads(sum(map(len, rows))):
            ids, lengths = self._batch(rows)
            kinds = None
            if types is not None and (table := self.net.embedding.types) is not None:
                # RoBERTa has one type alone.
                kinds = self._batch(types)[0].clamp(max=table.num_embeddings - 1)
            found = answer(ids, lengths, kinds).float().cpu().numpy()
        if found.ndim < 3:
            return list(found)
        return [each[: len(row)] for each, row in zip(found, rows, strict=True)]


def rules_of(request: GenerationRequest) -> list[Rule]:
    """The rules of a batch; a prefix function is told the prompts' own numbers.

    What the card forbids is as if the model did; what it forces is certain, as in transformers:
    it costs no log-probability.
    """
    options, function = request.options, request.options.prefix_function
    own = function and (lambda sentence, ids: function(request.prompt_numbers[sentence], ids))
    given = {name: value for name, value in vars(options).items() if name in IN_ORDER}
    if not options.draws:
        given["temperature"] = None
    given |= {
        "prefix_function": own,
        "banned": request.bad_words_ids,
        "never": request.suppressed_ids,
    }
    rules = sampling_rules(**given)
    if request.forced_bos_id is not None:
        rules.append(ForcedTokens({0: request.forced_bos_id}, certain=True))
    if request.forced_eos_id is not None:
        at_limit = [{length - 1: request.forced_eos_id} for length in request.max_new_tokens]
        rules.append(ForcedTokens(at_limit, certain=True))
    return rules


def start_ids(ids: Sequence[int]) -> Sequence[int]:
    """The ids that a decoder of two stacks reads first; raises UserError where there are none."""
    if not ids:
        raise UserError("this model has no start mark; import it with its generation_config")
    return ids


def _stop(request: GenerationRequest) -> StopStrings | None:
    return StopStrings(request.decode, request.options.stop) if request.options.stop else None
