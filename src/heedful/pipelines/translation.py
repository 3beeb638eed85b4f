"""Saved encoder-decoder models: translation and other text-to-text tasks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, overload

from heedful.errors import UserError
from heedful.options import Options, TooLong
from heedful.pipelines.base import Texts
from heedful.pipelines.metadata import GenerationIds
from heedful.pipelines.text_generation import Generator, TextScore


class Translator(Generator):
    """An encoder-decoder, `net(src, tgt, src_lengths, tgt_lengths) -> logits`, with tokenizers.

    Its prompts are sources; the translation of a blank text is blank.
    """

    kind = "translator"
    default_options = {"beam_size": 5}  # noqa: RUF012

    @property
    def ids(self) -> GenerationIds:
        """The ids of the metadata, or else those of heedful's own tokenizer."""
        ids = self.metadata.generation
        if ids.decoder_start_ids or not self.has_tokenizer:
            return ids
        tokenizer = self.tgt_tokenizer
        # Every special token but EOS is suppressed: padding, BOS, masks and sentinels. Training
        # targets can contain the unknown token, so outputs can contain it too.
        allowed = {tokenizer.eos_id, tokenizer.unk_id}
        return replace(
            ids,
            decoder_start_ids=(tokenizer.bos_id,),
            eos_ids=(tokenizer.eos_id,),
            suppressed_ids=tuple(sorted({tokenizer.pad_id, *tokenizer.special_ids} - allowed)),
        )

    @overload
    def translate(self, texts: str, **options: Any) -> str: ...

    @overload
    def translate(self, texts: Sequence[str], **options: Any) -> list[str]: ...

    def translate(self, texts: str | Sequence[str], **options: Any) -> str | list[str]:
        """The best translation of a text, or of each text of a list; options as of `generate`."""
        translations: str | list[str] = self.generate(texts, **options)
        return translations

    def prompt_ids(self, prompts: Texts, options: Options | None = None) -> list[list[int]]:
        """Ids of each source with EOS; empty for a blank text; lists of ids are unchanged."""
        options = options or Options()
        sources = self.rows_of(
            prompts, lambda tokenizer, ids: tokenizer.encode_target(ids) if ids else []
        )
        self.check_lengths(sources, "line", options.too_long, options.first_number)
        return sources

    def pair_ids(
        self, sources: Sequence[str], targets: Sequence[str], *, too_long: TooLong = "error"
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Ids of sources and of targets, each with EOS, for training and scoring.

        The decoder reads `ids.decoder_start_ids` and all of a target but its last token.

        Raises:
            UserError: another number of sources than of targets; a side that is too long.
        """
        from heedful.pipelines.scoring import encode_pairs

        return encode_pairs(self, sources, targets, too_long)

    def length_limit(self, row: list[int], options: Options) -> int:
        """`max_new_tokens`, or the limit of the metadata, at most the net's positions.

        The decoder's input is the start ids and all new tokens but the last.
        """
        start, longest = len(self.ids.decoder_start_ids), self.config.max_length
        if start > longest:
            raise UserError(f"{start} start ids do not fit the {longest} positions of the model")
        limit = options.max_new_tokens or self.metadata.limits.for_source(len(row))
        return min(limit, longest - max(start - 1, 0))

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
            too_long: as of `Options`; a pair with a side left out has a score of 0 tokens.
            batch_tokens: padded tokens of source and target in a batch.
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
