"""Models of two stacks opened for use: text in, text out."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.data.collate import Batch, collate_pairs
from heedful.data.columns import Sequences, pack_ids
from heedful.data.plans import plan_batches
from heedful.errors import UserError
from heedful.evaluation.likelihood import batch_loss, target_states, total
from heedful.evaluation.metrics import perplexity, token_accuracy
from heedful.inference.card import GenerationIds
from heedful.inference.decoding import STEPS_AT_FIRST, Decoding, capacity_for
from heedful.inference.generator import Generator, TextScore
from heedful.inference.model import Texts
from heedful.options import Options, TooLong
from heedful.parts.tokens import Tokens

_SCORED_TOKENS = 8_192  # padded, of a batch of pairs to score


class Translator(Generator):
    """A net of two stacks, `net(src, tgt, src_lengths, tgt_lengths) -> logits`; prompts: sources.

    A blank text has a blank translation.
    """

    kind = "translator"
    usual = {"beam_size": 5}  # noqa: RUF012

    @property
    def ids(self) -> GenerationIds:
        """Those of the card; of heedful's own tokenizer where it says none."""
        ids = self.card.generation
        if ids.start or not self.has_tokenizer:
            return ids
        tokenizer = self.tgt_tokenizer
        # No special but the end may be written: no padding, second beginning, mask or sentinel.
        # Of what is unknown the model has read, so it may say so.
        ends = {tokenizer.eos_id, tokenizer.unk_id}
        never = tuple(sorted({tokenizer.pad_id, *tokenizer.special_ids} - ends))
        return replace(ids, start=(tokenizer.bos_id,), end=(tokenizer.eos_id,), never=never)

    def translate(self, texts: Sequence[str], **options: Any) -> list[str]:
        """The best translation of each text, in order: `generate` of texts."""
        return [outputs[0].text for outputs in self.generations(texts, **options)]

    def prompt_ids(self, prompts: Texts, options: Options | None = None) -> list[list[int]]:
        """Ids of each source, none for a blank text; those given as ids stay as they are."""
        options = options or Options()
        sources = self.rows_of(
            prompts, lambda tokenizer, ids: tokenizer.encode_target(ids) if ids else []
        )
        self.check_lengths(sources, "line", options.too_long, options.first_number)
        return sources

    def length_limit(self, row: list[int], options: Options) -> int:
        """As asked for, or as the card says, and never more than the net has positions for."""
        asked = options.max_new_tokens or self.card.limits.of_source(len(row))
        return min(asked, self.config.max_length)

    def open(self, rows: list[list[int]], capacity: int, beams: int) -> tuple[Tensor, Decoding]:
        src, lengths = self.batch(rows)
        begin = torch.tensor([list(self.ids.start)] * len(rows), device=self.device)
        if not self.ids.start:
            raise UserError("this model has no start mark; import it with its generation_config")
        size = capacity_for(begin.size(1) + beams * min(capacity, STEPS_AT_FIRST))
        cache = self.net.start(Tokens.of(src, lengths), capacity=size, beams=beams)
        return begin, Decoding(self.net, cache, longest=capacity + begin.size(1) - 1)

    def seen(self, rows: list[list[int]]) -> list[list[int]]:
        """Rules look at what is written, not at the source."""
        return [list(self.ids.start) for _ in rows]

    def states(self, ids: Tensor, lengths: Tensor) -> Float[Tensor, "B T D"]:
        """The encoder's."""
        states: Tensor = self.net.encode(Tokens.of(ids, lengths)).states
        return states

    # --- given targets --------------------------------------------------------------------------

    @torch.inference_mode()
    def score(
        self, sources: Sequence[str], targets: Sequence[str], *, too_long: TooLong = "error"
    ) -> list[TextScore]:
        """Log-probability of each target given its source, EOS included, by teacher forcing."""
        pairs = self._encode_pairs(sources, targets, too_long)
        scores = [TextScore(0.0, 0)] * len(pairs[0])
        self.net.eval()
        for batch in self._held_out(pairs):
            log_probs = self.net.head(target_states(self.net, batch)).log_softmax(-1)
            told = log_probs.gather(-1, batch.targets[:, None]).squeeze(-1)
            lengths = pairs[1].lengths[batch.indices].tolist()
            for row, part in zip(batch.indices.tolist(), told.split(lengths), strict=True):
                scores[row] = TextScore(float(part.sum()), len(part))
        return scores

    @torch.inference_mode()
    def teacher_forced(
        self, sources: Sequence[str], targets: Sequence[str], *, too_long: TooLong = "error"
    ) -> dict[str, float]:
        """Perplexity and token accuracy of the targets given their sources."""
        self.net.eval()
        batches = self._held_out(self._encode_pairs(sources, targets, too_long))
        found = total([batch_loss(self.net, batch, count_correct=True) for batch in batches])
        return {
            "perplexity": perplexity(float(found.nll), found.tokens),
            "token_accuracy": token_accuracy(int(found.correct), found.tokens),
        }

    def _held_out(self, pairs: tuple[Sequences, Sequences]) -> Iterator[Batch]:
        """Batches of pairs, the longest first; one above the budget goes alone."""
        src, tgt = pairs
        budget = max(_SCORED_TOKENS, int((src.lengths + tgt.lengths).max()))
        limits: dict[str, Any] = {"max_tokens": budget, "max_sentences": None, "shuffle": False}
        # What the decoder reads first: BOS, or what an imported model was trained with.
        start, pad_id = self.ids.start[-1], self.tgt_tokenizer.pad_id
        for rows in plan_batches(src.lengths, tgt.lengths, **limits, seed=0, epoch=0):
            yield collate_pairs(src, tgt, rows, bos_id=start, pad_id=pad_id).to(self.device)

    def _encode_pairs(
        self, sources: Sequence[str], targets: Sequence[str], too_long: TooLong
    ) -> tuple[Sequences, Sequences]:
        if len(sources) != len(targets):
            raise UserError(f"{len(sources)} sources but {len(targets)} targets")
        if not sources:
            raise UserError("there are no pairs to score")
        sides = []
        for what, tokenizer, texts in (
            ("source line", self.src_tokenizer, sources),
            ("target line", self.tgt_tokenizer, targets),
        ):
            ids = [tokenizer.encode_target(line) for line in tokenizer.encode_batch(list(texts))]
            self.check_lengths(ids, what, too_long)
            sides.append(pack_ids(ids, tokenizer.vocab_size))
        return sides[0], sides[1]
