"""Models of two stacks opened for use: text in, text out."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from heedful.errors import UserError
from heedful.options import Options, TooLong
from heedful.pipelines.base import Texts
from heedful.pipelines.metadata import GenerationIds
from heedful.pipelines.text_generation import Generator, TextScore


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
        found = self.generations(texts, **{"scores": False} | options)
        return [outputs[0].text for outputs in found]

    def prompt_ids(self, prompts: Texts, options: Options | None = None) -> list[list[int]]:
        """Ids of each source, none for a blank text; those given as ids stay as they are."""
        options = options or Options()
        sources = self.rows_of(
            prompts, lambda tokenizer, ids: tokenizer.encode_target(ids) if ids else []
        )
        self.check_lengths(sources, "line", options.too_long, options.first_number)
        return sources

    def length_limit(self, row: list[int], options: Options) -> int:
        """As asked for, or as the card says, and never more than the net has positions for.

        The decoder reads its start ids and all new tokens but the last.
        """
        start, longest = len(self.ids.start), self.config.max_length
        if start > longest:
            raise UserError(f"{start} start ids do not fit the {longest} positions of the model")
        asked = options.max_new_tokens or self.card.limits.of_source(len(row))
        return min(asked, longest - max(start - 1, 0))

    def score(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        *,
        too_long: TooLong = "error",
        batch_tokens: int | None = None,
    ) -> list[TextScore]:
        """Log-probability of each target given its source, EOS included, by teacher forcing.

        Args:
            too_long: a pair with a side that is left out has a score of no tokens.
            batch_tokens: padded tokens, of source and target, of a batch.
        """
        from heedful.pipelines.scoring import score_pairs

        options: dict[str, Any] = {"too_long": too_long, "batch_tokens": batch_tokens}
        return score_pairs(self, sources, targets, **options).scores()

    def teacher_forced(
        self, sources: Sequence[str], targets: Sequence[str], *, too_long: TooLong = "error"
    ) -> dict[str, float]:
        """Perplexity and token accuracy of the targets given their sources."""
        from heedful.pipelines.scoring import teacher_forced

        return teacher_forced(self, sources, targets, too_long)
