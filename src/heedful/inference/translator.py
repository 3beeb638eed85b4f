"""Sequence-to-sequence models opened for use: text in, text out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from heedful.data.batches import PairBatch, collate, plan_epoch
from heedful.data.pair_store import PairStore
from heedful.data.store import pack_ids
from heedful.errors import UserError
from heedful.evaluation.metrics import perplexity, token_accuracy
from heedful.generation import Hypothesis, Normalization, Stop, beam_search, greedy_search
from heedful.inference.card import GenerationIds
from heedful.inference.decoding import Decoding
from heedful.inference.model import Texts, TooLong, by_length
from heedful.inference.writing import GenerationOptions, Writer
from heedful.parts.losses import LossSum
from heedful.parts.tokens import Tokens
from heedful.tasks.translation import pair_loss


@dataclass(frozen=True)
class Translation:
    """One output. `finished` is False where the length limit cut it off."""

    text: str
    score: float
    finished: bool
    ids: list[int]


@dataclass(frozen=True)
class PairScore:
    """How likely a given target is: the sum of natural log-probabilities, EOS included."""

    log_prob: float
    num_tokens: int


class Translator(Writer):
    """A net of two stacks with its tokenizers: text in, text out.

    Attributes:
        net: the bare module, `net(src, tgt, src_lengths, tgt_lengths) -> logits`.
        num_truncated: sources cut to the net's length so far, where that was asked for.
    """

    kind = "translator"

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

    def translate(self, texts: Sequence[str], *, beam_size: int = 5, **options: Any) -> list[str]:
        """The best translation of each text, in order. Options as of `search`."""
        found = self.search(texts, beam_size=beam_size, **options)
        return [translations[0].text for translations in found]

    def search(
        self,
        texts: Sequence[str],
        *,
        beam_size: int = 5,
        num_return: int = 1,
        length_penalty: float = 1.0,
        normalization: Normalization = "average",
        stop: Stop = "optimal",
        max_new_tokens: int | None = None,
        min_new_tokens: int = 0,
        no_repeat_ngram_size: int = 0,
        prefixes: Sequence[str] | None = None,
        too_long: TooLong = "error",
        batch_tokens: int = 8_192,
        first_number: int = 1,
        progress: Callable[[int], None] | None = None,
    ) -> list[list[Translation]]:
        """Up to `num_return` translations of each text, best first; texts keep their order.

        A blank text has a blank translation. `beam_size` 1 is greedy. A result does not depend on
        what else is in `texts`.

        Args:
            max_new_tokens: longest output; default: from the training data (`Limits`).
            prefixes: how each translation must begin.
            too_long: what to do with a text longer than the net allows.
            batch_tokens: padded source tokens times beams that are searched at once.
            first_number: what the first text is called in an error (a line number).
            progress: called with the number of texts after each batch.

        Raises:
            UserError: an option out of range; a text that is too long, with its number and lengths.
        """
        if isinstance(texts, str):
            raise UserError("texts must be a list of strings; for one text write [text]")
        if prefixes is not None and len(prefixes) != len(texts):
            raise UserError(f"{len(prefixes)} prefixes for {len(texts)} texts")
        sources = self._encode_sources(texts, too_long, first_number)
        results = [[Translation("", 0.0, True, [])]] * len(texts)
        if progress is not None:
            progress(sum(not ids for ids in sources))
        options: dict[str, Any] = {
            "eos_id": list(self.ids.end),
            "min_new_tokens": min_new_tokens,
            "length_penalty": length_penalty,
            "normalization": normalization,
            "no_repeat_ngram_size": no_repeat_ngram_size,
        }
        for rows in by_length(sources, max(1, batch_tokens // beam_size)):
            batch = [sources[row] for row in rows]
            options["max_new_tokens"] = [
                min(self.config.max_length, max_new_tokens or self.card.limits.of_source(len(ids)))
                for ids in batch
            ]
            if prefixes is not None or self.ids.first is not None:
                first = [] if self.ids.first is None else [self.ids.first]
                asked = [""] * len(texts) if prefixes is None else prefixes
                options["forced_prefix"] = [
                    [*first, *self.tgt_tokenizer.encode(asked[row])] for row in rows
                ]
            found = self._search_batch(
                batch, beam_size, options | {"stop": stop, "num_return": num_return}
            )
            for row, hypotheses in zip(rows, found, strict=True):
                results[row] = [self._translation(hypothesis) for hypothesis in hypotheses]
            if progress is not None:
                progress(len(rows))
        return results

    @torch.inference_mode()
    def score(
        self, sources: Sequence[str], targets: Sequence[str], *, too_long: TooLong = "error"
    ) -> list[PairScore]:
        """Log-probability of each target given its source, by teacher forcing."""
        store = self._encode_pairs(sources, targets, too_long)
        scores = [PairScore(0.0, 0)] * len(store)
        self.net.eval()
        for rows in evaluation_plan(store):
            batch = self.collate(store, rows)
            logits = self.net(batch.src, batch.tgt_in, batch.src_lengths, batch.tgt_lengths)
            log_probs = logits.log_softmax(-1).gather(-1, batch.tgt_out[..., None]).squeeze(-1)
            for index, row in enumerate(rows):
                length = int(batch.tgt_lengths[index])
                scores[row] = PairScore(float(log_probs[index, :length].sum()), length)
        return scores

    def teacher_forced(
        self, sources: Sequence[str], targets: Sequence[str], *, too_long: TooLong = "error"
    ) -> dict[str, float]:
        """Perplexity and token accuracy of the targets given their sources."""
        found = self.teacher_forced_sums(self._encode_pairs(sources, targets, too_long))
        return {
            "perplexity": perplexity(float(found.nll), found.tokens),
            "token_accuracy": token_accuracy(int(found.correct), found.tokens),
        }

    @torch.inference_mode()
    def teacher_forced_sums(self, store: PairStore, label_smoothing: float = 0.0) -> LossSum:
        """Loss, likelihood and correct tokens, summed over the pairs of a store."""
        self.net.eval()
        found = [
            pair_loss(
                self.net,
                self.collate(store, rows),
                label_smoothing=label_smoothing,
                count_correct=True,
            )
            for rows in evaluation_plan(store)
        ]
        return LossSum(
            torch.stack([part.loss for part in found]).double().sum(),
            torch.stack([part.nll for part in found]).double().sum(),
            torch.stack([part.correct for part in found]).sum(),
            sum(part.tokens for part in found),
        )

    def collate(self, store: PairStore, rows: np.ndarray) -> PairBatch:
        """Pairs of a store as a batch for this net, on its device."""
        # What the decoder hears first: BOS, or what an imported model was trained with.
        start, pad_id = self.ids.start[-1], self.tgt_tokenizer.pad_id
        return collate(store, rows, bos_id=start, pad_id=pad_id, device=self.device)

    def _encode_pairs(
        self, sources: Sequence[str], targets: Sequence[str], too_long: TooLong
    ) -> PairStore:
        if len(sources) != len(targets):
            raise UserError(f"{len(sources)} sources but {len(targets)} targets")
        if not sources:
            raise UserError("there are no pairs to score")
        sides = []
        for what, tokenizer, texts in (
            ("source line", self.src_tokenizer, sources),
            ("target line", self.tgt_tokenizer, targets),
        ):
            ids = [tokenizer.frame(line) for line in tokenizer.encode_batch(list(texts))]
            self.check_lengths(ids, what, too_long)
            sides.append(pack_ids(ids, tokenizer.vocab_size))
        return PairStore(*sides)

    def prompt_ids(self, prompts: Texts, too_long: TooLong = "error") -> list[list[int]]:
        """Ids of each source; those given as ids stay as they are."""
        if isinstance(prompts, str):
            raise UserError("prompts must be a list; for one prompt write [prompt]")
        if all(isinstance(prompt, str) for prompt in prompts):
            texts = [str(prompt) for prompt in prompts]
            rows = self._encode_sources(texts, too_long)
            return [ids or [self.src_tokenizer.eos_id] for ids in rows]
        return self.encode(prompts, too_long=too_long)

    def room(self, row: list[int], options: GenerationOptions) -> int:
        """As asked for, or as the card says, and never more than the net has positions for."""
        asked = options.max_new_tokens or self.card.limits.of_source(len(row))
        return min(asked, self.config.max_length)

    def open(self, rows: list[list[int]], capacity: int) -> tuple[Tensor, Decoding]:
        src, lengths = self.batch(rows)
        begin = torch.tensor([list(self.ids.start)] * len(rows), device=self.device)
        if not self.ids.start:
            raise UserError("this model has no start mark; import it with its generation_config")
        size = capacity + begin.size(1) - 1
        cache = self.net.start(Tokens.of(src, lengths), capacity=size)
        return begin, Decoding(self.net, cache, never=self.ids.never, longest=size)

    def states(self, ids: Tensor, lengths: Tensor) -> Float[Tensor, "B T D"]:
        """The encoder's."""
        states: Tensor = self.net.encode(Tokens.of(ids, lengths)).states
        return states

    def _batches(self, rows: list[list[int]], options: GenerationOptions) -> Iterator[list[int]]:
        budget = options.batch_tokens // max(options.beam_size, options.num_return)
        return by_length(rows, max(1, budget))

    def _seen(self, rows: list[list[int]]) -> list[list[int]]:
        """Rules look at what is written, not at the source."""
        return [list(self.ids.start) for _ in rows]

    def _encode_sources(
        self, texts: Sequence[str], too_long: TooLong, first_number: int = 1
    ) -> list[list[int]]:
        """Framed ids; none for a blank text."""
        tokenizer = self.src_tokenizer
        encoded = tokenizer.encode_batch(list(texts))
        sources = [tokenizer.frame(ids) if ids else [] for ids in encoded]
        self.check_lengths(sources, "line", too_long, first_number)
        return sources

    @torch.inference_mode()
    def _search_batch(
        self, sources: list[list[int]], beam_size: int, options: dict[str, Any]
    ) -> list[list[Hypothesis]]:
        self.net.eval()
        start, state = self.open(sources, max(options["max_new_tokens"]))
        if beam_size == 1 and options["num_return"] == 1:
            options = {k: v for k, v in options.items() if k not in ("stop", "num_return")}
            return greedy_search(state.next_log_probs, start, state=state, **options)
        return beam_search(state.next_log_probs, start, beam_size=beam_size, state=state, **options)

    def _translation(self, hypothesis: Hypothesis) -> Translation:
        text = self.tgt_tokenizer.decode(hypothesis.ids)
        return Translation(text, hypothesis.score, hypothesis.finished, hypothesis.ids)


def evaluation_plan(store: PairStore, max_tokens: int = 8_192) -> list[np.ndarray]:
    """Batches of a held-out set, the longest first; a pair above the budget goes alone."""
    if not len(store):
        return []
    src, tgt = store.src_lengths, store.tgt_lengths
    return plan_epoch(
        src,
        tgt,
        max_tokens=max(max_tokens, int((src + tgt).max())),
        max_sentences=None,
        seed=0,
        epoch=0,
        shuffle=False,
    )
