"""Base of the backends that generate with torch: which search a request needs, its arguments."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from heedful.backends.base import GenerationRequest
from heedful.backends.shortlist import Shortlist
from heedful.backends.torch.cached_net import DecodingNet
from heedful.backends.torch.coverage import Coverage
from heedful.backends.torch.target_scoring import LogProbs, forced_batch
from heedful.backends.torch.threads import ThreadPolicy
from heedful.data.collate import Batch
from heedful.errors import UserError
from heedful.evaluation.likelihood import TargetScores, score_targets
from heedful.generation.constrained import constrained_beam_search, least_beam_size
from heedful.generation.exact_counts import ExactCounts
from heedful.generation.outputs import Hypothesis, StopStrings
from heedful.generation.rules import RULES_BY_OPTION, sampling_rules
from heedful.generation.sampling import sample, sample_steps
from heedful.generation.search import beam_search
from heedful.generation.speculative import CachedScorer, Draft, PromptLookup, Speculation
from heedful.generation.token_rules import (
    BannedAtBegin,
    ForcedTokens,
    NoRepeatNgram,
    Rule,
)
from heedful.options import SAMPLING_OPTIONS, StopRule

Step = TypeVar("Step")


class TorchGenerator:
    """Runs the requests of a `GenerationBackend`: greedy decoding, sampling, beam, constrained and
    speculative search, and teacher forcing, with one net.

    Args:
        decoding: the net of the searches.
        log_probs_of: runs the net on a batch on its device.
        shortlist: the target tokens that each source can become, for encoder-decoders, in searches
            without a draft; None: all.
    """

    stop_rule: StopRule | None = None

    def __init__(
        self,
        decoding: DecodingNet,
        threads: ThreadPolicy,
        log_probs_of: Callable[[Batch], LogProbs],
        shortlist: Shortlist | None = None,
    ) -> None:
        self.decoding = decoding
        self.threads = threads
        self.log_probs_of = log_probs_of
        self.shortlist = shortlist

    def prepare(self) -> None:
        """Called before each pass: puts nets into evaluation mode."""

    def outputs(self, rows: list[list[int]], request: GenerationRequest) -> list[list[Hypothesis]]:
        """See `GenerationBackend.outputs`; outputs do not depend on the other rows."""
        self.prepare()
        with torch.inference_mode(), self.threads.for_tokens(len(rows) * request.options.rows):
            if request.draft is None:
                return self._search(rows, request)
            outputs: list[list[Hypothesis]] = []
            for index, row in enumerate(rows):
                speculation = self._speculation(row, request.select([index]))
                list(speculation)
                outputs.append([speculation.result(request.score)])
            return outputs

    def submit(
        self, rows: list[list[int]], request: GenerationRequest
    ) -> Callable[[], list[list[Hypothesis]]]:
        """A function that computes `outputs`; nothing runs before it is called."""
        return partial(self.outputs, rows, request)

    def stream_tokens(
        self, row: list[int], request: GenerationRequest
    ) -> Iterator[tuple[list[int], bool]]:
        """See `GenerationBackend.stream_tokens`."""
        self.prepare()
        if request.draft is not None:
            with torch.inference_mode():
                speculation = self._speculation(row, request)
            for tokens in self._in_inference_mode(iter(speculation)):
                yield tokens, speculation.ended
            return
        with torch.inference_mode():
            start, state = self.open([row], request, 1)
            steps = sample_steps(
                state.next_log_probs,
                start,
                state=state,
                seeds=request.seeds,
                stop=stop_function(request),
                scores=False,
                steps_per_read=1,
                **self.arguments([row], request),
            )
        for step in self._in_inference_mode(iter(steps)):
            yield step.tokens, bool(step.ended)

    def log_probs(
        self, rows: list[list[int]], targets: list[list[int]] | None, request: GenerationRequest
    ) -> list[np.ndarray]:
        """See `GenerationBackend.log_probs`."""
        batch, counts = forced_batch(rows, targets, request, self.decoding.device)
        log_probs = self.target_scores(batch).log_probs.cpu().numpy()
        return np.split(log_probs, np.cumsum(counts)[:-1])

    def target_scores(self, batch: Batch) -> TargetScores:
        """The score of each target of a batch; see `ScoringBackend.target_scores`."""
        self.prepare()
        with torch.inference_mode(), self.threads.for_tokens(batch.num_tokens):
            batch = batch.to(self.decoding.device)
            return score_targets(self.log_probs_of(batch), batch.targets)

    def open_draft(self, row: list[int], start_ids: Sequence[int], limit: int) -> CachedScorer:
        """The net as the draft of another one, for tokens up to its number of positions."""
        self.prepare()
        longest = self.decoding.max_length
        if len(row) > longest:
            raise UserError(
                f"a prompt has {len(row)} tokens, but the draft allows {longest}; leave "
                "the draft out, or take one of the model's own length"
            )
        return CachedScorer(self.decoding.open([row], start_ids, limit, 1)[1], max_length=longest)

    def _search(self, rows: list[list[int]], request: GenerationRequest) -> list[list[Hypothesis]]:
        options, size = request.options, request.options.rows
        if options.coverage_penalty and not self.decoding.is_encoder_decoder:
            raise UserError("coverage_penalty needs a source, and this model is decoder-only")
        if request.required_ids:
            size = max(size, least_beam_size(request.required_ids))
        start, state = self.open(rows, request, size)
        arguments = self.arguments(rows, request) | {"on_done": request.on_output}
        next_log_probs = state.next_log_probs
        widths: dict[str, Any] = {
            "beam_size": size,
            "num_return": options.num_return,
            "normalization": options.normalization,
            "length_penalty": options.length_penalty,
        }
        if request.required_ids:
            return constrained_beam_search(
                next_log_probs, start, request.required_ids, state=state, **widths, **arguments
            )
        if options.by_beams:
            if options.coverage_penalty:
                state = Coverage(state, options.coverage_penalty)
                next_log_probs = state.next_log_probs
                arguments["penalties"] = state.penalties
            return beam_search(
                next_log_probs,
                start,
                state=state,
                stop=options.stop_rule or "optimal",
                num_groups=options.num_groups,
                diversity_penalty=options.diversity_penalty,
                # The model's own token at the limit is certain, and wins over a forced end.
                force_eos=None if request.forced_eos_id is None else False,
                **widths,
                **arguments,
            )
        samples = sample(
            next_log_probs,
            start,
            state=state,
            seeds=request.seeds,
            num_samples=options.num_return,
            stop=stop_function(request),
            score=request.score,
            scores=options.scores,
            **arguments,
        )
        return [samples[first : first + size] for first in range(0, len(samples), size)]

    def open(
        self, rows: list[list[int]], request: GenerationRequest, beams: int
    ) -> tuple[Tensor, Any]:
        """The first ids of a search, and the state of the net that has read the rows."""
        return self.decoding.open(
            rows,
            request.decoder_start_ids,
            max(request.max_new_tokens),
            beams,
            None if self.shortlist is None else self._allowed_ids(rows, request, self.shortlist),
        )

    def _allowed_ids(
        self, rows: list[list[int]], request: GenerationRequest, shortlist: Shortlist
    ) -> list[list[int]] | None:
        """The ids of the shortlist for each output, and the required ids, also those of which each
        output has an exact number."""
        options = request.options
        if not options.shortlist or not self.decoding.is_encoder_decoder:
            return None
        if options.prefix_function is not None:  # which may require any token
            return None
        required = {
            *request.eos_ids,
            *(options.forced or {}).values(),
            *chain.from_iterable(request.required_ids),
        }
        for forced_id in (request.forced_bos_id, request.forced_eos_id):
            if forced_id is not None:
                required.add(forced_id)
        prefixes = request.output_prefixes or [[] for _ in rows]
        counted = [
            [token for group, number in counts.items() if number for token in group]
            for counts in request.counts or [{} for _ in rows]
        ]
        return [
            [*required, *prefix, *own, *shortlist.allowed_ids(row).tolist()]
            for row, prefix, own in zip(rows, prefixes, counted, strict=True)
        ]

    def arguments(self, rows: list[list[int]], request: GenerationRequest) -> dict[str, Any]:
        """The arguments that every search takes (`SearchRequest.from_options`)."""
        arguments: dict[str, Any] = {
            "eos_id": list(request.eos_ids),
            "max_new_tokens": request.max_new_tokens,
            "min_new_tokens": request.options.min_new_tokens or 0,
            "rules": _rules(request, include_prompt=not self.decoding.is_encoder_decoder),
            "prompts": self._decoder_prompts(rows, request),
            "sources": rows,
        }
        if request.output_prefixes is not None:
            first = [] if request.forced_bos_id is None else [request.forced_bos_id]
            arguments["forced_prefix"] = [[*first, *prefix] for prefix in request.output_prefixes]
        return arguments

    def _decoder_prompts(
        self, rows: list[list[int]], request: GenerationRequest
    ) -> list[list[int]]:
        """The decoder's ids before the new ones, which rules see; a source is not among them."""
        if self.decoding.is_encoder_decoder:
            return [list(request.decoder_start_ids) for _ in rows]
        return rows

    def _speculation(self, row: list[int], request: GenerationRequest) -> Speculation:
        if request.options.num_return > 1:
            raise UserError("a draft supports one output for each prompt: leave out num_return")
        longest = self.decoding.max_length
        left = longest - len(self._decoder_prompts([row], request)[0]) + 1
        limit = request.max_new_tokens[0]
        if request.options.max_new_tokens is None and left > 0:  # the default limit is cut
            limit = min(limit, left)
        request = request.select([0], max_new_tokens=[limit])
        start, state = self.decoding.open([row], request.decoder_start_ids, limit, 1)
        if start.size(1) + limit > state.longest + 1:
            raise UserError(
                f"speculative decoding cannot outgrow the net: {start.size(1)} tokens and {limit} "
                f"new ones do not fit the {longest} that the model allows"
            )
        return Speculation(
            state,
            self._draft(row, request, limit),
            start[0].tolist(),
            num_draft_tokens=request.options.num_draft_tokens,
            seed=None if request.seeds is None else request.seeds[0],
            stop=stop_function(request),
            **self.arguments([row], request),
        )

    def _draft(self, row: list[int], request: GenerationRequest, limit: int) -> Draft:
        if request.draft == "lookup":
            return PromptLookup()
        if not isinstance(request.draft, tuple):
            raise UserError(f'draft must be a model or "lookup", not {request.draft!r}')
        backend, start_ids = request.draft
        if backend.vocab_size != self.decoding.vocab_size:
            raise UserError("the draft must have the model's own vocabulary")
        draft: Draft = backend.open_draft(row, start_ids, limit)
        return draft

    def _in_inference_mode(self, steps: Iterator[Step]) -> Iterator[Step]:
        """Each step in inference mode, which ends before the caller gets the step."""
        while True:
            with torch.inference_mode(), self.threads.for_tokens(1):
                step = next(steps, None)
            if step is None:
                return
            yield step


def _rules(request: GenerationRequest, *, include_prompt: bool) -> list[Rule]:
    """The rules of a batch; a prefix function gets the prompts' numbers among all prompts.

    As in transformers, the prompt of a decoder-only net has n-grams that outputs may not repeat.
    Suppressed and banned ids count as impossible before probabilities are formed. Forced ids are
    certain, as in transformers: they cost no log-probability.
    """
    options, function = request.options, request.options.prefix_function
    prefix_function = function and (
        lambda sentence, ids: function(request.prompt_numbers[sentence], ids)
    )
    values = {name: value for name, value in vars(options).items() if name in RULES_BY_OPTION}
    if not options.samples:
        values |= dict.fromkeys(SAMPLING_OPTIONS)
    if options.beam_size == 1:  # it changes neither the choice nor the model's log-probabilities
        values["renormalize_logits"] = None
    begin_ids = values.pop("begin_suppress_tokens")
    values |= {
        "prefix_function": prefix_function,
        "banned": request.bad_words_ids,
        "suppressed": request.suppressed_ids,
    }
    ngram_size = values.pop("no_repeat_ngram_size")
    rules: list[Rule] = [NoRepeatNgram(ngram_size, include_prompt)] if ngram_size else []
    if begin_ids:
        rules.append(BannedAtBegin(begin_ids, int(request.forced_bos_id is not None)))
    if request.banned_texts is not None:
        rules.append(request.banned_texts)
    rules += sampling_rules(min_tokens_to_keep=options.min_tokens_to_keep, **values)
    if request.counts is not None:
        rules.append(ExactCounts(request.counts))
    if request.forced_bos_id is not None:
        rules.append(ForcedTokens({0: request.forced_bos_id}, certain=True))
    if request.forced_eos_id is not None:
        at_limit = [{length - 1: request.forced_eos_id} for length in request.max_new_tokens]
        rules.append(ForcedTokens(at_limit, certain=True))
    return rules


def stop_function(request: GenerationRequest) -> StopStrings | None:
    if not request.options.stop:
        return None
    if request.decoder is None:
        raise UserError("stop needs the texts of outputs, and this model has no tokenizer")
    return StopStrings(request.decoder, request.options.stop)
