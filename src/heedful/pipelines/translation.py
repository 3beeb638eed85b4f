"""Saved encoder-decoder models: translation and other text-to-text tasks."""

import collections.abc
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from heedful.data.language_tags import is_same_language, matching_tag
from heedful.data.rows import is_blank
from heedful.data.special_tokens import tag_id
from heedful.errors import UserError, format_names
from heedful.fidelity import Glossary, Reason
from heedful.options import Options, TooLong
from heedful.pipelines.base import Texts
from heedful.pipelines.generations import Generation
from heedful.pipelines.keywords import GenerationKeywords
from heedful.pipelines.metadata import GenerationIds
from heedful.pipelines.text_generation import Generator

if TYPE_CHECKING:
    from heedful.documents.word_links import TokenAlignment
    from heedful.pipelines.scoring import TextScore


class Translator(Generator):
    """An encoder-decoder, `net(src, tgt, src_lengths, tgt_lengths) -> logits`, with tokenizers.

    Its prompts are sources; the translation of a blank text is blank.

    >>> import heedful
    >>> model = heedful.load_translator("runs/mine")
    >>> outputs = model.translate("A dog runs.", num_return=2, return_details=True)
    >>> len(outputs), outputs[0].score >= outputs[1].score
    (2, True)
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
    def translate(  # type: ignore[overload-overlap]  # a text is a sequence, too
        self,
        texts: str,
        *,
        return_details: Literal[False] = False,
        **options: Unpack[GenerationKeywords],
    ) -> str: ...

    @overload
    def translate(  # type: ignore[overload-overlap]  # a text is a sequence, too
        self, texts: str, *, return_details: Literal[True], **options: Unpack[GenerationKeywords]
    ) -> list[Generation]: ...

    @overload
    def translate(
        self,
        texts: Sequence[str],
        *,
        return_details: Literal[False] = False,
        **options: Unpack[GenerationKeywords],
    ) -> list[str]: ...

    @overload
    def translate(
        self,
        texts: Sequence[str],
        *,
        return_details: Literal[True],
        **options: Unpack[GenerationKeywords],
    ) -> list[list[Generation]]: ...

    def translate(self, texts: Any, **options: Any) -> Any:
        """The best translation of a text, or of each text of a list; options as in `generate`.

        With `num_return` above 1 a list of translations for each text.

        Example: `model.translate(["A dog runs.", "A man rides."], beam_size=5)`
        """
        return self.generate(texts, **options)

    def options(self, **keywords: Any) -> Options:
        """See `Generator.options`; with the terms of a glossary.

        A note names the terms of a new glossary that are left out.

        Raises:
            UserError: also for a glossary that is wrong, of which nothing can be written, or with a
                translation that is banned.
        """
        if (given := keywords.get("glossary")) is not None:
            from heedful.pipelines.keeping import glossary_for

            keywords["glossary"] = glossary = glossary_for(self, keywords)
            if glossary is not given and glossary.left_out:
                self.note_once(glossary.left_out_note())
        options = super().options(**keywords)
        if options.glossary is not None:
            for text in options.banned or ():
                if isinstance(text, str) and (term := options.glossary.first_with(text)):
                    problem = f"its translation has the banned text {text!r}"
                    raise options.glossary.error(term, f"{problem}; leave one of them out")
        return options

    def prompt_ids(self, prompts: Texts, options: Options | None = None) -> list[list[int]]:
        """Ids of each source with EOS; empty for a blank text; lists of ids are unchanged."""
        options = options or Options()
        read = self.sources(prompts, options)
        prompts = [source.masked.text if hasattr(source, "masked") else source for source in read]
        is_text = any(isinstance(prompt, str) for prompt in prompts)
        if not is_text and len(prompts):
            in_ids = {"src_language"} | (
                set() if self.metadata.language_codes else {"tgt_language"}
            )
            for name in sorted(in_ids & options.explicit):
                raise UserError(f"{name} is for texts; begin lists of ids with the id of its tag")
        tags = self._source_tags(options.src_language, options.tgt_language) if is_text else []
        sources = self.rows_of(
            prompts,
            lambda tokenizer, ids: tokenizer.encode_target([*tags, *ids]) if ids else [],
        )
        for text, row in zip(prompts, sources, strict=True):
            if isinstance(text, str) and is_blank(text):
                row.clear()  # a tokenizer that keeps whitespace has ids for it
        self.check_lengths(sources, "line", options.too_long, map(options.number, count()))
        return sources

    def stream_with(
        self, prompt: str | Sequence[int], options: Options
    ) -> collections.abc.Generator[str, None, str]:
        """See `Generator.stream`; not with `keep` or a glossary, by which complete outputs are
        checked."""
        if self._keeps(options):
            raise UserError(
                "this model keeps placeholders and numbers, so its outputs are complete before "
                "they are shown: call translate, or set keep=False"
            )
        if options.glossary is not None:
            raise UserError(
                "with a glossary outputs are complete before they are shown: call translate, or "
                "leave option glossary out"
            )
        return super().stream_with(prompt, options)

    def sources(self, prompts: Sequence[Any], options: Options) -> Sequence[Any]:
        """The prompts; a text that has pieces or terms to keep as a `Source`, made once."""
        if not self._keeps(options) and options.glossary is None:
            return prompts
        from heedful.pipelines.keeping import Source

        keep = self.metadata.keep if options.keep else None
        return [
            Source(prompt, keep, options.glossary) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]

    def kept(
        self,
        sources: Sequence[Any],
        outputs: list[list[Generation]],
        options: Options,
        *,
        at_once: bool = False,
    ) -> list[Any]:
        """Outputs for each source, or its masks, with its pieces (`Options.keep`) and terms
        (`Options.glossary`), and a reason for what is not read; those of lists of ids are
        unchanged.

        Args:
            sources: texts, or what `sources` has made of them.
            at_once: without a further search: those that need one are None.
        """
        if not self._keeps(options) and options.glossary is None:
            pairs = zip(sources, outputs, strict=True)
            return [self._with_unknown(source, found) for source, found in pairs]
        from heedful.pipelines.keeping import Source, kept_generations

        read = enumerate(self.sources(sources, options))
        of_texts = {index: source for index, source in read if isinstance(source, Source)}
        own = [outputs[index] for index in of_texts]
        kept = kept_generations(self, [*of_texts.values()], own, options, at_once=at_once)
        restored: list[Any] = [*outputs]
        for (index, source), found in zip(of_texts.items(), kept, strict=True):
            if found:
                found = self._with_left_out(source.text, found, options.glossary)
                found = self._with_unknown(source.masked.text, found)
            restored[index] = found
        return restored

    def _with_left_out(
        self, source: str, outputs: list[Generation], glossary: Glossary | None
    ) -> list[Generation]:
        """Outputs with a reason for each term of the source that the glossary leaves out."""
        if glossary is None or not glossary.left_out or is_blank(source):
            return outputs
        patterns = () if self.metadata.keep is None else self.metadata.keep.patterns
        reasons = [
            Reason(
                "term_left_out",
                {"term": term.sources[0], "translations": " or ".join(term.targets)},
            )
            for term in glossary.find_left_out(source, patterns)
        ]
        return [replace(output, reasons=(*output.reasons, *reasons)) for output in outputs]

    def _with_unknown(self, source: Any, outputs: list[Generation]) -> list[Generation]:
        """Outputs with a reason that names what the vocabulary lacks of a text."""
        tokenizer = self._src_tokenizer
        if tokenizer is None or not isinstance(source, str) or is_blank(source):
            return outputs
        tokens = zip(*tokenizer.encode_spans(source), strict=True)
        pieces = [source[start:end] for i, (start, end) in tokens if i == tokenizer.unk_id]
        if not pieces:
            return outputs
        reason = Reason("unknown", {"pieces": ", ".join(dict.fromkeys(pieces))})
        return [
            output  # of a further search, which has it already
            if reason in output.reasons
            else replace(output, reasons=(*output.reasons, reason))
            for output in outputs
        ]

    def _keeps(self, options: Options) -> bool:
        """True if pieces are masked; raises UserError for a wish that the model cannot meet."""
        if self.metadata.keep is None and options.keep and "keep" in options.explicit:
            raise UserError("this model was not trained with data.keep: leave keep out")
        return self.metadata.keep is not None and options.keep

    def first_id(self, options: Options) -> int | None:
        """See `Generator.first_id`: the token of the target language, where each has one."""
        if self.metadata.language_codes:
            return self._code_id("tgt", options.tgt_language)
        return super().first_id(options)

    def target_ids(self, text: str, options: Options | None = None) -> list[int]:
        """The ids of a target, with EOS, and with the token of its language where it has one."""
        tags = self._target_tags(None if options is None else options.tgt_language)
        return self.tgt_tokenizer.encode_target([*tags, *self.tgt_tokenizer.encode(text)])

    def _source_tags(self, src_language: str | None, tgt_language: str | None) -> list[int]:
        """The ids before a source: the token of its language, or the tag of the target's.

        Raises:
            UserError: as `_code_id` and `_tag_ids`; a source language of another model.
        """
        if self.metadata.language_codes:
            return [self._code_id("src", src_language)]
        own = self.metadata.src_language
        if src_language is not None and matching_tag(src_language, [own] if own else []) is None:
            known = f"translates from {own}" if own else "names no source languages"
            raise UserError(f"no src_language {src_language}: this model {known}; leave it out")
        return self._tag_ids(tgt_language)

    def _target_tags(self, tgt_language: str | None) -> list[int]:
        """The ids that a target begins with in training."""
        return [self._code_id("tgt", tgt_language)] if self.metadata.language_codes else []

    def _code_id(self, side: Literal["src", "tgt"], language: str | None) -> int:
        """The id of the token of a language; None: the model's own on that side.

        Raises:
            UserError: a language that the model does not have, or none.
        """
        codes, key = self.metadata.language_codes, f"{side}_language"
        if (wanted := language or getattr(self.metadata, key)) is None:
            verb = "from" if side == "src" else "into"
            raise UserError(
                f"this model translates {verb} {len(codes)} languages: give one as {key}=CODE, "
                f"such as {format_names([*codes], str, most=3)}"
            )
        if (match := matching_tag(wanted, codes)) is None:
            alike = [code for code in codes if is_same_language(code, wanted)]
            listed = f"{format_names(alike or [*codes], str)}"
            raise UserError(f"no {key} {wanted}: this model has {listed}")
        return tag_id(self.src_tokenizer, codes[match])

    def _tag_ids(self, tgt_language: str | None) -> list[int]:
        """The ids of the tag before a source that selects the target language; [] without tags.

        Raises:
            UserError: a language that the model does not translate into; none where it has several.
        """
        tags, own = self.metadata.language_tags, self.metadata.tgt_language
        if tgt_language is None and len(tags) == 1 and own in tags:
            tgt_language = own
        if tgt_language is None:
            if tags:
                raise UserError(
                    f"this model translates into {format_names([*tags], str)}: give one as "
                    "tgt_language=CODE"
                )
            return []
        match = matching_tag(tgt_language, dict.fromkeys([*tags, *([own] if own else [])]))
        if match in tags:
            return [tag_id(self.src_tokenizer, tags[match])]
        if match is not None:
            return []
        known = format_names([*tags] or [own or "one language, without a code"], str)
        raise UserError(f"no tgt_language {tgt_language}: this model translates into {known}")

    def pair_ids(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        *,
        too_long: TooLong = "error",
        src_language: str | None = None,
        tgt_language: str | None = None,
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Ids of sources and of targets, each with EOS, for training and scoring.

        The decoder reads `ids.decoder_start_ids` and all of a target but its last token. A model
        that was trained with `data.keep` reads masks for the pieces that both sides have equally
        often, as in training.

        Args:
            src_language, tgt_language: as in `Options`; their tags are put before the texts.

        Raises:
            UserError: another number of sources than of targets; a side that is too long.
        """
        from heedful.pipelines.scoring import encode_pairs

        tags = self._pair_tags(src_language, tgt_language)
        return encode_pairs(self, sources, targets, too_long, tags)

    def _pair_tags(
        self, src_language: str | None, tgt_language: str | None
    ) -> tuple[list[int], list[int]]:
        """The ids before sources and before targets."""
        tags = self._source_tags(src_language, tgt_language)
        return tags, self._target_tags(tgt_language)

    def length_limit(self, row: list[int], options: Options) -> int:
        """`max_new_tokens`, or the limit of the metadata, at most the net's positions.

        The decoder's input is the start ids and all new tokens but the last.
        """
        start, longest = len(self.ids.decoder_start_ids), self.config.max_length
        if start > longest:
            raise UserError(f"{start} start ids do not fit the {longest} positions of the model")
        limit = options.max_new_tokens or self.metadata.limits.for_source(len(row))
        if "min_new_tokens" not in options.explicit:  # the model's, which a short source must reach
            limit = max(limit, options.min_new_tokens or 0)
        return min(limit, longest - max(start - 1, 0))

    def score(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        *,
        too_long: TooLong = "error",
        batch_tokens: int | None = None,
        src_language: str | None = None,
        tgt_language: str | None = None,
    ) -> "list[TextScore]":
        """Log-probability of each target given its source, EOS included, by teacher forcing.

        It is that of the ids of `pair_ids`, in which a model's masks stand for pieces.

        Args:
            too_long: as in `Options`; a pair with a side left out has a score of 0 tokens.
            batch_tokens: padded tokens of source and target in a batch.
            src_language, tgt_language: the languages of the pairs, as in `Options`.
        """
        from heedful.pipelines.scoring import score_pairs

        options: dict[str, Any] = {"too_long": too_long, "batch_tokens": batch_tokens}
        options["tags"] = self._pair_tags(src_language, tgt_language)
        return score_pairs(self, sources, targets, **options).scores()

    def token_alignments(
        self, texts: Sequence[str], outputs: Sequence[Generation], **options: Any
    ) -> "list[TokenAlignment | None]":
        """The alignment of each text with its output, by the cross-attention of the net.

        Args:
            options: as in `translate`, with which the outputs were made.

        Returns:
            None for an output without tokens, and for all outputs of an ensemble.
        """
        from heedful.pipelines.alignment import token_alignments

        return token_alignments(self, texts, outputs, self.options(**options))

    def teacher_forced(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        *,
        too_long: TooLong = "error",
        batch_tokens: int | None = None,
        src_language: str | None = None,
        tgt_language: str | None = None,
    ) -> dict[str, float]:
        """Perplexity and token accuracy of the targets given their sources.

        Args:
            too_long, batch_tokens, src_language, tgt_language: as in `score`.
        """
        from heedful.pipelines.scoring import teacher_forced

        tags = self._pair_tags(src_language, tgt_language)
        return teacher_forced(self, sources, targets, too_long, batch_tokens, tags)
