"""Translations that keep the pieces of their sources, and write terms as a glossary does."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice, product
from typing import TYPE_CHECKING, Any

from heedful.errors import UserError
from heedful.fidelity import (
    Glossary,
    Keep,
    Masked,
    Reason,
    Term,
    as_glossary,
    count_masks,
    differences,
    mask_id,
    mask_text,
    place_masks,
    separate_masks,
    unmask,
    with_accelerator,
)
from heedful.fidelity.pieces import find_pieces
from heedful.options import Options
from heedful.pipelines.generations import Generation

if TYPE_CHECKING:
    from heedful.data.tokenizer import Tokenizer
    from heedful.pipelines.translation import Translator

_HYPOTHESES = 5  # of a further beam search, of which the first with all pieces is taken
_CHOICES = 8  # of alternatives of terms that are required, each in a search of its own
# With these a search cannot be repeated for one text.
_OF_ALL_TEXTS = ("prefixes", "forced", "prefix_function", "draft")


def glossary_for(model: "Translator", options: Mapping[str, Any]) -> Glossary:
    """The glossary of a call's options; raises UserError for one that is wrong for the model."""
    value = options["glossary"]
    own = model.metadata.src_language, model.metadata.tgt_language
    given = options.get("src_language"), options.get("tgt_language")
    glossary = as_glossary(value, (given[0] or own[0], given[1] or own[1]))
    if glossary is model.checked_glossary:
        return glossary
    tokenizer = model.tgt_tokenizer
    pairs = [(term, target) for term in glossary.terms for target in term.targets]
    rows = tokenizer.encode_batch([target for _, target in pairs])
    for (term, target), ids in zip(pairs, rows, strict=True):
        if tokenizer.unk_id in ids:
            raise glossary.error(
                term,
                f"the model's vocabulary cannot write {target!r}, only {tokenizer.decode(ids)!r}; "
                "leave it out",
            )
    model.checked_glossary = glossary
    return glossary


def kept_generations(
    model: "Translator", text: str, outputs: list[Generation], options: Options
) -> list[Generation]:
    """Outputs for the masks of a text, with its pieces in place of them.

    A best output that lacks a piece or a term, or has a piece that is not in the source, is
    searched for again: among more hypotheses, then with pieces and terms required, and with masks
    for missing terms, of which the most probable output counts. Pieces that are still wrong, and
    those of all other outputs, are put right by position, with a reason; a term that is missing is
    a reason.
    """
    if not any(output.ids for output in outputs):
        return outputs  # of a blank text, or one that was left out
    source = Source(text, model.metadata.keep if options.keep else None, options.glossary)
    if len(outputs) == 1 and not source.is_kept_by(outputs[0]):
        outputs = [_search_again(model, source, outputs[0], options)]
    return [source.restored(output) for output in outputs]


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
        self.masked = Masked(text, {}) if keep is None else mask_text(text, self.patterns)
        self.masks = count_masks("" if keep is None else self.masked.text)

    def is_kept_by(self, output: Generation) -> bool:
        """True if an output has all terms, and the masks of the source, each as often, and no
        other pieces."""
        if self.missing_terms(output.text):
            return False
        if self._keep is None:
            return True
        if count_masks(output.text) != self.masks:
            return False
        restored = unmask(output.text, self.masked.pieces)
        return not differences(self.text, restored, self.patterns)

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
        for term in self.missing_terms(text):
            forms = " or ".join(term.targets)
            reasons.append(Reason("term", {"term": term.sources[0], "translations": forms}))
        return replace(output, text=text, reasons=tuple(reasons))

    def _with_pieces(self, output: str) -> tuple[str, list[str]]:
        """An output with pieces in place of masks, and reasons, where its pieces are wrong."""
        placed, reasons = place_masks(self.masked, output)
        text = unmask(placed, self.masked.pieces)
        wrong = differences(self.text, text, self.patterns)
        if wrong:  # an address that a word continues, for example
            apart = unmask(separate_masks(placed), self.masked.pieces)
            if not differences(self.text, apart, self.patterns):
                text, wrong = apart, [Reason("pieces_joined")]
        return with_accelerator(self.text, text), [*reasons, *wrong]

    def with_masked_terms(self, output: Generation) -> tuple[str, dict[str, str]]:
        """The text for the model with masks also for the terms that an output lacks, and the
        translations that these stand for; none without `keep`, and for terms with pieces."""
        if self._keep is None:
            return self.masked.text, {}
        missing = {*self.missing_terms(output.text)}
        pieces = [piece.start for piece in find_pieces(self.text, self.patterns)]
        terms = [
            (one.start, one.end, one.term.targets[0])
            for one in self.terms
            if one.term in missing and not any(one.start <= at < one.end for at in pieces)
        ]
        masked = mask_text(self.text, self.patterns, terms)
        own = {m: target for m, target in masked.pieces.items() if m not in self.masked.pieces}
        return masked.text, own

    def requirements(self, tokenizer: "Tokenizer") -> Iterator[list[list[int]]]:
        """Phrases that make an output keep all, for each choice of alternatives of the terms."""
        masks = [[mask_id(tokenizer, mask)] for mask in self.masks.elements()]
        masks_of = {piece: mask for mask, piece in self.masked.pieces.items()}

        def ids_of(target: str) -> list[int]:
            """The ids of a target, whose pieces are masked as those of the source."""
            parts, end = [], 0
            for piece in find_pieces(target, self.patterns):
                parts += [target[end : piece.start], masks_of.get(piece.text, piece.text)]
                end = piece.end
            return tokenizer.encode("".join([*parts, target[end:]]))

        alternatives = dict.fromkeys(one.term.targets for one in self.terms)
        for chosen in islice(product(*alternatives), _CHOICES):
            yield [*masks, *map(ids_of, chosen)]


def _search_again(
    model: "Translator", source: Source, first: Generation, options: Options
) -> Generation:
    """An output with all masks and terms of the source, if one is found; else the one with the
    most terms, of equal ones the first."""
    if options.samples or options.stop:
        return first
    if any(getattr(options, name) is not None for name in _OF_ALL_TEXTS):
        return first
    if model.metadata.language_tags and options.tgt_language is None:
        return first  # the language was chosen by ids
    size = max(_HYPOTHESES, options.beam_size or 0)
    wider = replace(
        options,
        keep=False,
        glossary=None,
        on_output=None,
        progress=None,
        too_long="error",  # a text that was cut has not all of its pieces, and is counted once
        scores=True,
        beam_size=size,
        num_return=size,
    )

    def outputs(text: str, options: Options) -> list[Generation]:
        """The outputs of a text that meet their constraints."""
        try:
            [found] = model.generations([text], options, reports=False)
        except UserError:  # text or phrases do not fit, or the backend does not support them
            return []
        return [output for output in found if output.failure is None]

    def requiring(phrases: list[list[int]]) -> Options:
        """Options of a search for outputs with some phrases."""
        own: dict[str, Any] = {"require": [*options.require, *phrases], "coverage_penalty": 0.0}
        return replace(wider, **own, num_groups=1, diversity_penalty=0.0)

    found = [first]
    if options.num_groups == 1:
        found += outputs(source.masked.text, wider)
    complete = [output for output in found if source.is_kept_by(output)][:1]
    if complete:
        return complete[0]
    for phrases in source.requirements(model.tgt_tokenizer):
        new = outputs(source.masked.text, requiring(phrases))
        complete += [output for output in new if source.is_kept_by(output)][:1]
        found += new
    text, targets = source.with_masked_terms(first)
    masks = [[mask_id(model.tgt_tokenizer, mask)] for mask in count_masks(text) if targets]
    for search in (wider, requiring(masks)) if targets else ():
        new = [replace(one, text=unmask(one.text, targets)) for one in outputs(text, search)]
        found += new
        if kept := [output for output in new if source.is_kept_by(output)][:1]:
            complete += kept
            break
    if complete:
        return max(complete, key=lambda output: output.score)
    return min(found, key=lambda output: len(source.missing_terms(output.text)))
