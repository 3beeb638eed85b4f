"""Translation of a document's segments: memory first, then a model, sentence by sentence."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Protocol

from heedful.data.inline import TAG
from heedful.documents.choices import IcuChoice, choice_of, choice_with_codes
from heedful.documents.counts import Counts
from heedful.documents.parts import Placed
from heedful.documents.segments import Document, Origin, Result, Segment, with_text_tags
from heedful.documents.sentences import Fits
from heedful.documents.split_segments import SplitSegment
from heedful.documents.word_links import TokenAlignment
from heedful.fidelity import Reason, differences, with_accelerator
from heedful.fidelity.pieces import find_pieces, is_choice
from heedful.fidelity.quality import quality
from heedful.progress import track

TOGETHER = 512  # segments whose parts are translated together


Align = Callable[[Sequence[str], Sequence[Any]], Sequence[TokenAlignment | None]]
Review = Callable[[Segment, str], Sequence[str]]  # reasons to review a translation


class Translated(Protocol):
    """A translation, as `heedful.pipelines.generations.Generation`."""

    @property
    def text(self) -> str:
        """The translation."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why a person should review it."""

    @property
    def is_cut(self) -> bool:
        """It was cut off by the length limit."""

    @property
    def probability(self) -> float:
        """The mean probability of its tokens."""


class Translates(Protocol):
    """A translator of lists of texts: a `heedful.pipelines.Translator`, or a server's batch."""

    @property
    def translate(self) -> Callable[..., Any]:
        """A function of a list of texts, `return_details=True` and options, which returns for each
        text its translations (`Translated`), best first."""


def review_reasons(source: str, translation: Translated) -> list[str]:
    """Why a person should review a translation: what its model says, and other pieces."""
    if source.strip() and not translation.text.strip():
        return [Reason("blank")]
    reasons = [*translation.reasons, *differences(source, translation.text)]
    return [*dict.fromkeys(reasons)]


def worst_quality(
    sources: Sequence[str], translations: Sequence[Translated], *, has_reasons: bool
) -> float:
    """The quality of a text, that of its worst part: 0 if a part came out blank; NaN without words
    or scores.

    Args:
        has_reasons: for a review of the text.
    """
    pairs = zip(sources, translations, strict=True)
    of_words = [translation for source, translation in pairs if source.strip()]
    if any(not translation.text.strip() for translation in of_words):
        return 0.0
    least = min((translation.probability for translation in of_words), default=math.nan)
    return quality(least, has_reasons=has_reasons)


def too_long_words(count: int) -> list[str]:
    """The reason for a review of a text with words that its model does not read; [] without."""
    return [Reason("words_too_long", {"count": count})] if count else []


@dataclass(frozen=True)
class Policy:
    """The choice of the existing translations that are replaced.

    Default: those that the file marks as unfinished (`fuzzy` in PO, `new` in XLIFF).
    """

    overwrite: bool = False
    only_empty: bool = False

    def replaces(self, segment: Segment) -> bool:
        """True if a segment is to be translated."""
        if not segment.target or self.overwrite:
            return True
        return not segment.is_finished and not self.only_empty


def translate_document(
    translator: Translates,
    document: Document,
    *,
    policy: Policy = Policy(),
    memory: Mapping[str, str] | None = None,
    review: Review | None = None,
    fits: Fits | None = None,
    align: Align | None = None,
    by_sentence: bool = True,
    together: int = TOGETHER,
    with_quality: bool = False,
    **options: Any,
) -> Counts:
    """Translate the segments of a document; `document.to_bytes()` is then the translated file.

    Texts are translated without their tags, which are then put into the translations by the
    alignment of words. A translation whose numbers or placeholders differ from those of its source,
    or whose tags may be at a wrong place, has a reason for a review, which the file shows where its
    format can.

    Args:
        memory: as of `memory_of`; a segment that is one of its sources gets this translation.
        review: further reasons to review a translation.
        fits: True for a text that the model reads; default: `fits_model`.
        align: the alignment of texts and their translations (`Translated`); None for one that is
            unknown. Default: `translator.token_alignments`, with the options; of a translator
            without it words are aligned if they are equal, others by their order.
        by_sentence: translate sentences one by one; without, lines, and sentences of long ones.
        together: segments that are translated together, after which progress is reported.
        with_quality: each translation has a quality, that of its worst sentence, which the file
            shows where its format can.
        options: of `translator.translate`.
    """
    counts = Counts(segments=len(document.segments), skipped=dict(document.skipped))
    fits = fits or fits_model(translator, keep=options.get("keep", True))
    work = _Work(translator, fits, document.languages, options)
    work.align = align or work.align
    work.by_sentence, work.with_quality = by_sentence, with_quality
    chosen = [segment for segment in document.segments if policy.replaces(segment)]
    counts.kept = len(document.segments) - len(chosen)
    with track(f"translating {document.name}", len(chosen)) as advance:
        for start in range(0, len(chosen), together):
            part = chosen[start : start + together]
            remembered = [_remembered(segment, memory or {}) for segment in part]
            pairs = [*zip(part, remembered, strict=True)]
            outputs = iter(work.translate([s for s, known in pairs if known is None]))
            for segment, known in pairs:
                _settle(segment, known or next(outputs), known is not None, counts, review)
            advance(len(part))
    return counts


def _remembered(segment: Segment, memory: Mapping[str, str]) -> "_Output | None":
    """The translation of a text in a memory, with the blanks around the text; None without one, for
    one with tags that the text lacks, or without tags of its codes, and for a text of several
    plural forms, as the memory does not say of which form its translation is."""
    core = segment.text.strip()
    if core not in memory or segment.is_of_forms:
        return None
    before, _, after = segment.text.partition(core)
    text = f"{before}{memory[core].strip()}{after}"
    others = {*TAG.findall(text)} - {*TAG.findall(segment.text)}  # they would be written as text
    return None if others or segment.tag_problem(text) else _Output(text)


@dataclass(frozen=True)
class _Output:
    """The translation of a text.

    Attributes:
        has_words: False: the text has none, and is its own translation.
        num_blank: its parts whose translation is blank; they are as in the text.
        num_unfit: its words that are too long for the model, likewise.
        reasons: those of the model for a review, and of its tags.
        probability: the mean of a token, in the sentence where it is smallest; None: not asked for.
        is_choice: it chooses between texts, whose pieces were compared one by one.
    """

    text: str
    has_words: bool = True
    num_blank: int = 0
    num_unfit: int = 0
    is_blank: bool = False
    reasons: tuple[str, ...] = ()
    probability: float | None = None
    is_choice: bool = False


def _settle(
    segment: Segment,
    output: _Output,
    is_remembered: bool,
    counts: Counts,
    review: Review | None,
) -> None:
    """Give a segment its result, and count it."""
    if not output.has_words:
        counts.without_words += 1
        segment.result = Result(segment.text, origin="source")
        return
    reasons: list[str] = []
    if output.is_blank:
        counts.blank += 1
        segment.is_blank = True
        return
    if output.num_blank:
        reasons.append(Reason("parts_blank", {"count": output.num_blank}))
    reasons += too_long_words(output.num_unfit)
    reasons += output.reasons
    text = output.text
    if not output.is_choice:
        text, wrong = _with_pieces(segment.text, text)
        reasons += wrong
    reasons += review(segment, text) if review else []
    reasons = [*dict.fromkeys(reasons)]  # of the model, which compares pieces too
    counts.replaced += bool(segment.target)
    counts.to_review += bool(reasons)
    counts.from_memory += is_remembered
    counts.translated += not is_remembered
    origin: Origin = "memory" if is_remembered else "model"
    value = None
    if output.probability is not None:
        value = quality(output.probability, has_reasons=bool(reasons))
    segment.result = Result(text, tuple(reasons), origin=origin, quality=value)


def _with_pieces(source: str, text: str) -> tuple[str, list[str]]:
    """A translation with the accelerator of its source, and what is wrong with its pieces."""
    text, lost = with_accelerator(source, text)
    return text, [*lost, *differences(TAG.sub(" ", source), TAG.sub(" ", text))]


def _parts_of(
    segment: Segment, choice: IcuChoice | None, branches: Mapping[str, str]
) -> list[Segment]:
    """The segments that are translated for one: itself, or the branches of its choice; none for one
    with codes in another choice, as they cannot be put back into it."""
    if choice is not None:
        return [
            Segment(text, segment.line, codes=choice.codes_of(text)) for text in branches.values()
        ]
    return [] if choice_with_codes(segment.text, segment.codes) else [segment]


def _kept(segment: Segment) -> _Output:
    """A segment as it is, with a choice that is not translated."""
    piece = choice_with_codes(segment.text, segment.codes)
    return _Output(segment.text, reasons=(Reason("choice", {"piece": piece}),))


def _without_choice(segment: Segment, output: _Output) -> _Output:
    """The translation of a segment, with a reason for each choice in it that stays as it is."""
    choices = [piece.text for piece in find_pieces(segment.text) if is_choice(piece.text)]
    choices = [choice for choice in choices if choice in output.text]
    if not choices:
        return output
    reasons = [*output.reasons, *(Reason("choice", {"piece": piece}) for piece in choices)]
    return replace(output, reasons=tuple(dict.fromkeys(reasons)))


def _chosen(
    choice: IcuChoice, branches: Mapping[str, str], outputs: Sequence[_Output], language: str | None
) -> _Output:
    """The choice between the translations of its texts, in a language."""
    forms = [name for name in choice.lacks(language) if name not in branches]
    reasons: list[str] = [Reason("forms", {"forms": ", ".join(forms)})] if forms else []
    texts = {}
    for (key, source), output in zip(branches.items(), outputs, strict=True):
        texts[key], wrong = _with_pieces(source, output.text)
        reasons += [*output.reasons, *wrong]
    joined = choice.joined(texts)
    if joined is None:
        reasons, joined = [Reason("choice", {"piece": choice.text})], choice.text
    probabilities = [output.probability for output in outputs if output.probability is not None]
    return _Output(
        joined,
        has_words=any(output.has_words for output in outputs),
        num_blank=sum(output.num_blank for output in outputs),
        num_unfit=sum(output.num_unfit for output in outputs),
        is_blank=any(output.is_blank for output in outputs),
        reasons=tuple(dict.fromkeys(reasons)),
        probability=min(probabilities, default=None),
        is_choice=True,
    )


def fits_model(translator: Any, *, keep: bool = True) -> Fits:
    """True for a text that a translator reads, by its tokenizer and the length of its net.

    Without a tokenizer all texts fit.

    Args:
        keep: as `Options.keep`: pieces are masked, if the translator was trained so, and a text is
            as long as with masks; False: it is read as it is.
    """
    tokenizer = getattr(translator, "src_tokenizer", None)
    if tokenizer is None:
        return lambda text: True
    metadata = translator.metadata
    has_tag = bool(metadata.language_tags or metadata.language_codes)
    num_special = len(tokenizer.encode_target([])) + has_tag
    limit = max(1, translator.config.max_length - num_special)
    masked = metadata.keep if keep else None

    def fits(text: str) -> bool:
        """True for at most `limit` tokens. Of ASCII each has a character or more, but for a space
        that the tokenizer puts before the text."""
        form = text if masked is None else masked.mask(text).text
        return (form.isascii() and len(form) < limit) or len(tokenizer.encode(form)) <= limit

    return fits


class _Work:
    """Translates texts part by part; a text that was translated before is not translated again."""

    def __init__(
        self,
        translator: Translates,
        fits: Fits,
        languages: tuple[str | None, str | None],
        options: Mapping[str, Any],
    ) -> None:
        self._translator, self._fits, self._options = translator, fits, options
        self._languages = languages
        self._known: dict[str, Translated] = {}
        self._aligned: dict[str, TokenAlignment | None] = {}
        self.align: Align | None = None
        if token_alignments := getattr(translator, "token_alignments", None):
            self.align = partial(token_alignments, **options)
        # A mask is copied: single tags that stand for words are then words of the text.
        metadata = getattr(translator, "metadata", None)
        self._keeps = getattr(metadata, "keep", None) is not None and options.get("keep", True)
        self.by_sentence, self.with_quality = True, False

    def translate(self, segments: Sequence[Segment]) -> list[_Output]:
        """The translation of each segment, with its tags."""
        language = self._languages[1]
        choices = [choice_of(segment.text, segment.codes) for segment in segments]
        branches = [{} if choice is None else choice.of_language(language) for choice in choices]
        parts = [  # of each segment
            _parts_of(segment, choice, texts)
            for segment, choice, texts in zip(segments, choices, branches, strict=True)
        ]
        results = iter(self._translate_parts([*chain.from_iterable(parts)]))
        translated = []
        for segment, choice, texts, own in zip(segments, choices, branches, parts, strict=True):
            outputs = [next(results) for _ in own]
            if choice is not None:
                translated.append(_chosen(choice, texts, outputs, language))
            else:
                translated.append(
                    _without_choice(segment, outputs[0]) if outputs else _kept(segment)
                )
        return translated

    def _translate_parts(self, segments: Sequence[Segment]) -> list[_Output]:
        """The translation of segments without choices of texts; those whose tags came out damaged
        are translated a second time, without single tags as words."""
        read = [with_text_tags(segment) for segment in segments]
        outputs = self._translate_sentences(read, keeps_words=self._keeps)
        pairs = zip(read, outputs, strict=True)
        damaged = [
            index
            for index, (segment, output) in enumerate(pairs)
            if segment.tag_problem(output.text)
        ]
        again = self._translate_sentences([read[index] for index in damaged], keeps_words=False)
        for index, output in zip(damaged, again, strict=True):
            outputs[index] = output
            if read[index].tag_problem(output.text):  # of pairs that cross
                text = read[index].text
                shown = Placed(text, (" ".join(TAG.sub(" ", text).split()),))
                outputs[index] = replace(output, text=text, reasons=shown.reasons)
        for index, (segment, tagged) in enumerate(zip(segments, read, strict=True)):
            if tagged is not segment and tagged.codes is not None:
                codes = tagged.codes.restored(outputs[index].text)
                outputs[index] = replace(outputs[index], text="".join(code.raw for code in codes))
        return outputs

    def _translate_sentences(
        self, segments: Sequence[Segment], *, keeps_words: bool
    ) -> list[_Output]:
        """The translation of each segment, by that of its sentences; `keeps_words` as in
        `without_tags`."""
        split = [
            SplitSegment(
                segment,
                self._fits,
                self._languages,
                by_sentence=self.by_sentence,
                keeps_words=keeps_words,
            )
            for segment in segments
        ]
        rows = dict.fromkeys(row for text in split for row in text.rows)
        if new := [row for row in rows if row not in self._known]:
            outputs: list[list[Translated]] = self._translator.translate(
                new, return_details=True, **{"scores": self.with_quality, **self._options}
            )
            self._known |= zip(new, [hypotheses[0] for hypotheses in outputs], strict=True)
        cut = dict.fromkeys(row for text in split for row in text.cut_rows)
        unknown = [row for row in cut if row not in self._aligned and not self._is_copied(row)]
        if unknown and self.align is not None:
            aligned = self.align(unknown, [self._known[row] for row in unknown])
            self._aligned |= zip(unknown, aligned, strict=True)
        return [*map(self._joined, split)]

    def _is_copied(self, row: str) -> bool:
        """True for a row that is its own translation, or has a blank one and stays as it is."""
        return self._known[row].text.strip() in ("", row)

    def _joined(self, text: SplitSegment) -> _Output:
        rows = [self._known[row] for row in text.rows]
        reasons = tuple(reason for row in rows for reason in row.reasons)
        reasons += (Reason("cut"),) if any(row.is_cut for row in rows) else ()
        least = min((row.probability for row in rows), default=None) if self.with_quality else None
        placed = text.joined([row.text for row in rows], self._aligned)
        reasons += placed.reasons
        blank = placed.num_blank
        all_blank = blank > 0 and blank == len(rows)
        has_words = bool(text.rows or text.num_unfit)
        reasons = tuple(dict.fromkeys(reasons))  # of several sentences
        return _Output(placed.text, has_words, blank, text.num_unfit, all_blank, reasons, least)


def memory_of(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """A translation memory: the first translation of each source, without blanks around it."""
    memory: dict[str, str] = {}
    for source, target in pairs:
        if target.strip():
            memory.setdefault(source.strip(), target)
    return memory
