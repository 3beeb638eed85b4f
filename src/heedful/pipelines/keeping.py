"""Translations that keep the pieces of their sources, and write terms as a glossary does."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice, product
from typing import TYPE_CHECKING, Any

from heedful.errors import UserError
from heedful.fidelity import (
    CHARACTERS,
    Glossary,
    Keep,
    Masked,
    Reason,
    Term,
    as_glossary,
    count_masks,
    differences,
    mask_id,
    place_masks,
    separate_masks,
    unmask,
    with_accelerator,
)
from heedful.fidelity.masking import source_mask
from heedful.fidelity.pieces import find_pieces, is_choice
from heedful.fidelity.reasons import tags_reason
from heedful.fidelity.tag_order import TagOrder
from heedful.generation.outputs import Counts
from heedful.options import Options
from heedful.pipelines.generations import Generation

if TYPE_CHECKING:
    from heedful.data.tokenizer import Tokenizer
    from heedful.pipelines.translation import Translator

# Beams of a further search, whatever those of the first one: the output with all masks is the best
# one, and with five beams, which take twice the time, hardly more texts have one. Terms may be in
# another output: least beams with a glossary.
_BEAM_SIZE, _WITH_TERMS = 2, 5
_TERM_CHOICES = 8  # of alternatives of terms that are required, each in a search of its own
# With these a search cannot be repeated for one text.
_OF_ALL_TEXTS = ("prefixes", "forced", "prefix_function", "draft")


def glossary_for(model: "Translator", options: Mapping[str, Any]) -> Glossary:
    """The glossary of a call's options, without what the model's vocabulary cannot write.

    Raises:
        UserError: a glossary that is wrong, or of which nothing can be written.
    """
    value = options["glossary"]
    own = model.metadata.src_language, model.metadata.tgt_language
    given = options.get("src_language"), options.get("tgt_language")
    glossary = as_glossary(value, (given[0] or own[0], given[1] or own[1]))
    tokenizer = model.tgt_tokenizer
    if glossary.checked_for is tokenizer:
        return glossary
    targets = [*dict.fromkeys(target for term in glossary.terms for target in term.targets)]
    rows = tokenizer.encode_batch(targets)
    unknown = {
        target: ids for target, ids in zip(targets, rows, strict=True) if tokenizer.unk_id in ids
    }
    if unknown:
        kept = glossary.without(unknown)
        if not kept.terms:
            [term, *_] = glossary.terms
            target = term.targets[0]
            raise glossary.error(
                term,
                f"the model's vocabulary cannot write {target!r}, only "
                f"{tokenizer.decode(unknown[target])!r}, and no other term of the glossary; "
                "leave it out",
            )
        glossary = kept
    glossary.checked_for = tokenizer
    return glossary


def kept_generations(
    model: "Translator",
    sources: Sequence["Source"],
    outputs: Sequence[list[Generation]],
    options: Options,
    *,
    at_once: bool = False,
) -> list[list[Generation] | None]:
    """Outputs for the masks of each source, with its pieces in place of them.

    A best output that lacks a piece or a term, or has a piece that is not in the source, is
    searched for again, together with those of the other texts (`_search_again`). Pieces that are
    still wrong, and those of all other outputs, are put right by position, with a reason; a term
    that is missing is a reason.

    Args:
        at_once: without a further search: those that need one are None.
    """
    kept: list[list[Generation] | None] = [*outputs]
    if _can_search_again(model, options):
        missing = {
            index: source
            for index, source in enumerate(sources)
            if len(outputs[index]) == 1
            and _has_tokens(outputs[index])
            and not source.is_kept_by(outputs[index][0])
        }
        firsts = [outputs[index][0] for index in missing]
        best: Sequence[Generation | None] = [None] * len(missing)
        if missing and not at_once:
            best = _search_again(model, [*missing.values()], firsts, options)
        for index, output in zip(missing, best, strict=True):
            kept[index] = None if output is None else [output]
    return [
        [source.restored(one) for one in found] if found and _has_tokens(found) else found
        for source, found in zip(sources, kept, strict=True)
    ]


def _has_tokens(outputs: list[Generation]) -> bool:
    """False for those of a text that is blank, or was left out."""
    return any(output.ids for output in outputs)


class Source:
    """A source, with what its translation must keep.

    Args:
        keep: pieces are masked; None: they are not.
        glossary: terms and the words that a translation must have for them; None: none.

    Attributes:
        masked: the text that the model reads.
    """

    def __init__(self, text: str, keep: Keep | None, glossary: Glossary | None) -> None:
        self.text, self._keep, self._glossary = text, keep, glossary
        self.patterns = () if keep is None else keep.patterns
        self.terms = [] if glossary is None else glossary.find(text, self.patterns)
        self._pieces = [] if keep is None else [*find_pieces(text, self.patterns)]
        self.masked = Masked(text, {}) if keep is None else keep.mask(text, self._pieces)
        self.masks = count_masks("" if keep is None else self.masked.text)
        self._tags = TagOrder(self.masked)
        self._right: dict[str, str] = {}  # outputs that keep all, with pieces

    def is_kept_by(self, output: Generation) -> bool:
        """True if an output has all terms, and the masks of the source, each as often, and no
        other pieces."""
        if self.missing_terms(output.text):
            return False
        if self._keep is None:
            return True
        if count_masks(output.text) != self.masks or not self._tags.is_kept(output.text):
            return False
        text, _ = self._tags.restored(self.masked.cased(output.text))
        restored = unmask(text, self.masked.pieces)
        if differences(self.text, restored, self.patterns, self._pieces):
            return False
        self._right[output.text] = restored
        return True

    def missing_terms(self, text: str) -> list[Term]:
        """The terms of the source that an output, with or without masks, has less often."""
        if self._glossary is None or not self.terms:
            return []
        return self._glossary.missing(self.terms, unmask(text, self.masked.pieces))

    def restored(self, output: Generation) -> Generation:
        """An output with pieces in place of masks; with reasons, where its pieces are wrong."""
        text, reasons = output.text, list(output.reasons)
        if self._keep is not None:
            text, wrong = self._with_pieces(text)
            reasons += wrong
            choices = filter(is_choice, self.masked.pieces.values())
            reasons += [Reason("choice", {"piece": piece}) for piece in choices]
        # Terms in capitals are not found.
        for term in self.missing_terms(output.text if self.masked.is_in_capitals else text):
            forms = " or ".join(term.targets)
            reasons.append(Reason("term", {"term": term.sources[0], "translations": forms}))
        masked = output.masked or self.masked
        return replace(output, text=text, reasons=tuple(reasons), masked=masked)

    def _with_pieces(self, output: str) -> tuple[str, list[str]]:
        """An output with pieces in place of masks, and reasons, where its pieces are wrong."""
        if output in self._right:
            return with_accelerator(self.text, self._right[output], self.patterns)
        placed, reasons = place_masks(self.masked, self.masked.cased(output))
        placed, has_moved = self._tags.restored(placed)
        if has_moved:
            reasons = (*reasons, tags_reason(self.text))
        text = unmask(placed, self.masked.pieces)
        wrong = differences(self.text, text, self.patterns, self._pieces)
        if wrong:  # an address that a word continues, for example
            apart = unmask(separate_masks(placed), self.masked.pieces)
            if not differences(self.text, apart, self.patterns, self._pieces):
                text, wrong = apart, [Reason("pieces_joined")]
        text, lost = with_accelerator(self.text, text, self.patterns)
        return text, [*reasons, *wrong, *lost]

    def with_masked_terms(self, output: Generation) -> Masked:
        """The text for the model with masks also for the terms that an output lacks, which stand
        for their translations; without `keep`, and for terms with pieces, there are none."""
        if self._keep is None:
            return self.masked
        missing = {*self.missing_terms(output.text)}
        pieces = [piece.start for piece in self._pieces]
        terms = [
            (one.start, one.end, one.term.targets[0])
            for one in self.terms
            if one.term in missing and not any(one.start <= at < one.end for at in pieces)
        ]
        return self._keep.mask(self.text, self._pieces, terms)

    def with_terms(self, output: Generation, masked: Masked) -> Generation:
        """An output for `with_masked_terms`, with the terms in place of their masks."""
        pieces = self.masked.pieces
        own = {mask: target for mask, target in masked.pieces.items() if mask not in pieces}
        return replace(output, text=unmask(output.text, own), masked=masked)

    def required_terms(self, tokenizer: "Tokenizer") -> list[list[list[int]]]:
        """The phrases of all terms, for each choice of their alternatives."""
        masks_of = {piece: mask for mask, piece in self.masked.pieces.items()}

        def ids_of(target: str) -> list[int]:
            """The ids of a target, whose pieces are masked as those of the source."""
            parts, end = [], 0
            for piece in find_pieces(target, self.patterns):
                parts += [target[end : piece.start], masks_of.get(piece.text, piece.text)]
                end = piece.end
            return tokenizer.encode("".join([*parts, target[end:]]))

        alternatives = dict.fromkeys(one.term.targets for one in self.terms)
        choices = islice(product(*alternatives), _TERM_CHOICES) if alternatives else ()
        return [[*map(ids_of, chosen)] for chosen in choices]


def _can_search_again(model: "Translator", options: Options) -> bool:
    """False where a search cannot be repeated for some of the texts."""
    if options.samples or options.stop:
        return False
    if any(getattr(options, name) is not None for name in _OF_ALL_TEXTS):
        return False
    # Else the language was chosen by ids.
    return not model.metadata.language_tags or options.tgt_language is not None


def _search_again(
    model: "Translator", sources: list[Source], firsts: list[Generation], options: Options
) -> list[Generation]:
    """For each source an output with all masks and terms, if one is found; else the one with the
    most terms, of equal ones the first.

    The first search is a beam search for outputs with exactly the masks of the source. For terms
    there are further ones, of which the most probable output counts: with their translations
    required, and with masks for those that are missing.
    """
    searches = _Searches(model, options)
    masked = [source.masked.text for source in sources]
    found = [[first, *new] for first, new in zip(firsts, searches.outputs(masked), strict=True)]
    complete = [_first_kept(*pair) for pair in zip(sources, found, strict=True)]
    lacking = [i for i, source in enumerate(sources) if source.terms and not complete[i]]

    def add(indices: list[int], new: list[list[Generation]]) -> None:
        """Add outputs of some sources."""
        for index, outputs in zip(indices, new, strict=True):
            found[index] += outputs
            complete[index] += _first_kept(sources[index], outputs)

    choices = {i: sources[i].required_terms(model.tgt_tokenizer) for i in lacking}
    for requires_masks in (False, True):  # where no output with exact counts ends
        tried = [i for i in lacking if not requires_masks or (sources[i].masks and not complete[i])]
        for number in range(_TERM_CHOICES):
            own = [i for i in tried if number < len(choices[i])]
            phrases = [choices[i][number] for i in own]
            add(own, searches.outputs([masked[i] for i in own], phrases, requires_masks))
    with_masks = {i: sources[i].with_masked_terms(firsts[i]) for i in lacking}
    own = [i for i, one in with_masks.items() if len(one.pieces) > len(sources[i].masked.pieces)]
    new = searches.outputs([with_masks[i].text for i in own])
    for i, outputs in zip(own, new, strict=True):
        add([i], [[sources[i].with_terms(output, with_masks[i]) for output in outputs]])
    return [
        max(kept, key=lambda output: output.score)
        if kept
        else min(outputs, key=lambda output: len(source.missing_terms(output.text)))
        for source, outputs, kept in zip(sources, found, complete, strict=True)
    ]


def _first_kept(source: Source, outputs: list[Generation]) -> list[Generation]:
    """The first output that keeps all, if there is one."""
    return [output for output in outputs if source.is_kept_by(output)][:1]


class _Searches:
    """Beam searches for texts of a call whose outputs do not keep all; texts are in batches."""

    def __init__(self, model: "Translator", options: Options) -> None:
        self._model, self._counts_masks = model, options.keep and model.metadata.keep is not None
        has_terms = options.glossary is not None
        size = max(_WITH_TERMS, options.beam_size or 0) if has_terms else _BEAM_SIZE
        self._options = replace(
            options,
            keep=False,
            glossary=None,
            on_output=None,
            progress=None,
            numbers=None,
            too_long="error",  # a text that was cut has not all of its pieces, and is counted once
            scores=True,
            num_groups=1,
            diversity_penalty=0.0,
            beam_size=size,
            num_return=size if has_terms else 1,
        )

    def outputs(
        self,
        texts: Sequence[str],
        phrases: Sequence[list[list[int]]] | None = None,
        requires_masks: bool = False,
    ) -> list[list[Generation]]:
        """The outputs of each text that meet their constraints.

        Args:
            phrases: that are required in the outputs of each text.
            requires_masks: masks are required like phrases, and others are not forbidden.
        """
        if phrases is not None and requires_masks:
            masks = [self._mask_ids(text) for text in texts]
            phrases = [[*own, *more] for own, more in zip(masks, phrases, strict=True)]
        groups: dict[str, list[int]] = {}
        for index in filter(lambda index: self._fits(texts[index]), range(len(texts))):
            groups.setdefault("" if phrases is None else repr(phrases[index]), []).append(index)
        results: list[list[Generation]] = [[] for _ in texts]
        for indices in groups.values():
            options = self._options
            if phrases is not None:
                required = [*options.require, *phrases[indices[0]]]
                options = replace(options, require=required, coverage_penalty=0.0)
            found = self._run([texts[index] for index in indices], options, not requires_masks)
            for index, outputs in zip(indices, found, strict=True):
                results[index] = outputs
        return results

    def _fits(self, text: str) -> bool:
        try:
            return bool(self._model.prompt_ids([text], self._options))
        except UserError:  # too long
            return False

    def _mask_ids(self, text: str) -> list[list[int]]:
        """A phrase for each mask of a text."""
        if not self._counts_masks:
            return []
        tokenizer = self._model.tgt_tokenizer
        return [[mask_id(tokenizer, mask)] for mask in count_masks(text).elements()]

    def _run(self, texts: list[str], options: Options, has_counts: bool) -> list[list[Generation]]:
        try:
            has_phrases = bool(options.require)
            counts = [self._counts(text, has_phrases) if has_counts else {} for text in texts]
            found = self._model.generations(texts, options, counts=counts)
        except UserError:  # phrases do not fit a text: the others are searched without it
            if len(texts) == 1:
                return [[]]
            half = len(texts) // 2
            return self._run(texts[:half], options, has_counts) + self._run(
                texts[half:], options, has_counts
            )
        # Where the end is forbidden without a mask, an output may be cut by the limit of tokens.
        return [[output for output in outputs if output.finished] for outputs in found]

    def _counts(self, text: str, has_phrases: bool) -> Counts:
        """The number of each mask in an output, which is that of the text; no tokens with digits.

        Args:
            has_phrases: that are required, and may have digits.
        """
        if not self._counts_masks:
            return {}
        groups, digits = _mask_tokens(self._model.tgt_tokenizer)
        masks = count_masks(text)
        counts = {group: masks[mask] for mask, group in groups.items()}
        return counts if has_phrases or re.search(r"[0-9]", text) else {**counts, digits: 0}


@lru_cache(maxsize=8)
def _mask_tokens(tokenizer: "Tokenizer") -> tuple[dict[str, tuple[int, ...]], tuple[int, ...]]:
    """The tokens of each mask of a source, and those with digits."""
    groups: dict[str, tuple[int, ...]] = {}
    for character in CHARACTERS:
        mask = source_mask(character) or character
        groups[mask] = (*groups.get(mask, ()), mask_id(tokenizer, character))
    pieces = tokenizer.token_texts.later
    digits = tuple(token for token, piece in enumerate(pieces) if re.search(rb"[0-9]", piece))
    return groups, digits
