"""Word alignments of translations from cross-attention, and their error rate."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from jaxtyping import Float

from heedful.backends.torch.cached_net import checked_start_ids
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.fidelity import Masked, unmask
from heedful.insight.plots import heat_map, new_figure
from heedful.insight.reading import Text, check_index, pieces, read
from heedful.options import Options
from heedful.pipelines.alignment import (
    cross_attention,
    decoded_spans,
    encoded_spans,
    read_sources,
)
from heedful.pipelines.base import SavedModel
from heedful.pipelines.generations import Generation
from heedful.pipelines.translation import Translator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Unit = Literal["words", "tokens"]
Position = Literal["output", "input"]
Links = frozenset[tuple[int, int]]
Texts = Sequence[str | None] | None
Sources = Sequence[str | Masked | None] | None


@dataclass(frozen=True)
class Alignment:
    """The alignment of a source and a target.

    Attributes:
        weights: (T, S), cross-attention, averaged over layers and heads: for each target unit its
            weight on each source unit. Special tokens are left out, so that rows may sum to less
            than 1.
        source, target: the units (words or tokens), in order.
    """

    weights: Float[np.ndarray, "T S"]
    source: tuple[str, ...]
    target: tuple[str, ...]

    @property
    def links(self) -> Links:
        """(source index, target index) of each target unit: the source unit of largest weight.

        A unit without weights, such as a word that the tokenizer leaves out, has no link.
        """
        if not self.source:
            return frozenset()
        best, linked = self.weights.argmax(1), self.weights.max(1) > 0
        return frozenset((int(best[target]), int(target)) for target in np.flatnonzero(linked))

    def pharaoh(self) -> str:
        """The links as `0-0 1-2 …`: indices of source and target from 0, in the target's order."""
        ordered = sorted(self.links, key=lambda link: (link[1], link[0]))
        return " ".join(f"{source}-{target}" for source, target in ordered)

    def plot(self) -> "Figure":
        """A heat map, target by source."""
        figure, axes = new_figure(len(self.source), len(self.target))
        heat_map(axes, self.weights, self.target, self.source, "alignment", low=0, high=1)
        return figure


def alignments(
    model: SavedModel,
    text: Text,
    target: Text | None = None,
    *,
    unit: Unit = "words",
    layers: Sequence[int] | None = None,
    at: Position = "output",
    **options: Any,
) -> Alignment:
    """The alignment of a text and a translation by the cross-attention of a model.

    Args:
        target: the translation; None: the model's own.
        unit: `words` are those of the texts, separated by whitespace; of languages without spaces
            take `tokens`.
        layers: of the decoder, from 0 or from -1 downwards; None: all.
        at: the weights of a target token are those of the decoder's position that predicts it
            (`output`), or of the one that reads it (`input`; Chen et al. 2020, "Accurate Word
            Alignment Induction from Neural Machine Translation"). The better one depends on the
            model: see `benchmarks/alignment.py`.
        options: as in `attention`.

    Raises:
        UserError: a model without cross-attention; an unknown unit, layer or `at`; as in
            `attention`.

    >>> import heedful
    >>> from heedful import insight
    >>> model = heedful.load("runs/mine")
    >>> alignment = insight.alignments(model, "the dog sat", "a dog ran home")
    >>> alignment.weights.shape
    (4, 3)
    """
    translator = expect_translator(model)
    reading = read(model, text, target, **options)
    outputs = [token for token in reading.outputs if token is not None]
    texts = [entry if isinstance(entry, str) else None for entry in (text, target)]
    [alignment] = align(
        translator,
        [reading.ids["source"]],
        [outputs],
        source_texts=texts[:1],
        target_texts=texts[1:],
        unit=unit,
        layers=layers,
        at=at,
    )
    return alignment


def align(
    model: Translator,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    source_texts: Sources = None,
    target_texts: Texts = None,
    unit: Unit = "words",
    layers: Sequence[int] | None = None,
    at: Position = "output",
) -> list[Alignment]:
    """The alignment of each source and target, given as ids: one forward pass of a padded batch.

    Args:
        sources, targets: as the net reads and writes them: with tags, without start ids.
        source_texts, target_texts: their texts, whose words are counted; None, for all or for
            one: what its ids are decoded to, which lacks unknown tokens. A piece that is kept
            (`Options.keep`) counts as part of one word; a source may be given with its masks.
        unit, layers, at: as in `alignments`.
    """
    if at not in get_args(Position):
        raise UserError(f"at must be {' or '.join(get_args(Position))}, not {at!r}")
    if unit not in get_args(Unit):
        raise UserError(f"unit must be {' or '.join(get_args(Unit))}, not {unit!r}")
    count = len(model.net.decoder.blocks)
    layers = range(count) if layers is None else layers
    indices = [check_index("layer", layer, count) for layer in layers]
    if not indices:
        raise UserError("layers are empty; give at least one, or leave them out for all")
    start = checked_start_ids(model.ids.decoder_start_ids)
    rows = [index for index, pair in enumerate(zip(sources, targets, strict=True)) if all(pair)]
    tables: dict[int, np.ndarray] = {}
    if rows:
        # The last token of a target is read too, unless the net has no position for it.
        longest = model.config.max_length
        read_ids = [[*start, *targets[index]][:longest] for index in rows]
        weights = cross_attention(model, [sources[index] for index in rows], read_ids, indices)
        tables = dict(zip(rows, weights.cpu().numpy(), strict=True))
    alignments = []
    for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
        table = tables.get(index)
        if table is None:
            table = np.zeros((len(start) + len(target), len(source)), np.float32)
        first = len(start) - (at == "output")
        own = table[first : first + len(target), : len(source)]
        text = None if source_texts is None else source_texts[index]
        masked = text if isinstance(text, Masked) else None
        if model.metadata.keep is not None and isinstance(text, str):
            masked = model.metadata.keep.mask(text)
        if masked is not None:  # the words of the target are those of its masks
            texts = [masked.text, None]
        else:
            texts = [text, None if target_texts is None else target_texts[index]]  # type: ignore[list-item]
        alignment = _by_unit(model, own, source, target[: len(own)], texts, unit)
        if masked is not None:
            src, tgt = (
                tuple(unmask(masked.cased(one), pieces) for one in side)
                for side, pieces in (
                    (alignment.source, masked.source_pieces),
                    (alignment.target, masked.pieces),
                )
            )
            alignment = replace(alignment, source=src, target=tgt)
        alignments.append(alignment)
    return alignments


def align_outputs(
    model: Translator,
    texts: Sequence[str],
    outputs: Sequence[Generation],
    options: Options,
    *,
    unit: Unit = "words",
) -> list[Alignment]:
    """The alignment of each text with its output; with `options` the outputs were made."""
    return align(
        model,
        read_sources(model, texts, outputs, options),
        [output.ids for output in outputs],
        source_texts=[output.masked or text for text, output in zip(texts, outputs, strict=True)],
        target_texts=[output.text for output in outputs],
        unit=unit,
    )


def expect_translator(model: SavedModel) -> Translator:
    """The model; raises UserError for one without cross-attention."""
    if not isinstance(model, Translator) or not model.has_net:
        raise UserError(
            f"alignments need a translator, an encoder-decoder; this model is a {model.kind}"
        )
    return model


def _by_unit(
    model: Translator,
    weights: Float[np.ndarray, "T S"],
    source: Sequence[int],
    target: Sequence[int],
    texts: Sequence[str | None],
    unit: Unit,
) -> Alignment:
    """The alignment of tokens or of words: sums over source tokens, means over target tokens."""
    if unit == "tokens" or not model.has_tokenizer:
        sides = []
        for tokenizer, ids in _sides(model, source, target):
            special = frozenset[int]() if tokenizer is None else tokenizer.special_ids
            positions = [index for index, token in enumerate(ids) if token not in special]
            sides.append((positions, pieces(tokenizer, [ids[index] for index in positions])))
        (columns, names), (rows, target_names) = sides
        return Alignment(weights[np.ix_(rows, columns)], names, target_names)
    (words, of_source), (target_words, of_target) = (
        words_of(tokenizer, ids, text)
        for (tokenizer, ids), text in zip(_sides(model, source, target), texts, strict=True)
        if tokenizer
    )
    table = np.zeros((len(target_words), len(words)), np.float32)
    for row, word in enumerate(of_target):
        for column, source_word in enumerate(of_source):
            if word is not None and source_word is not None:
                table[word, source_word] += weights[row, column]
    counts = np.bincount([word for word in of_target if word is not None], minlength=len(table))
    return Alignment(table / np.maximum(counts, 1)[:, None], words, target_words)


def _sides(
    model: Translator, source: Sequence[int], target: Sequence[int]
) -> list[tuple[Tokenizer | None, Sequence[int]]]:
    tokenizers = (model.src_tokenizer, model.tgt_tokenizer) if model.has_tokenizer else (None, None)
    return [*zip(tokenizers, (source, target), strict=True)]


def words_of(
    tokenizer: Tokenizer, ids: Sequence[int], text: str | None = None
) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """The words of a text, separated by whitespace, and for each id the index of its word.

    All bytes of a character belong to its word, and so does an unknown token that a text was
    encoded to. Special tokens, whitespace of its own and what follows the end of the text belong
    to no word.

    Args:
        text: that `ids` are the encoding of, perhaps cut, between special tokens; or an output of
            the model, perhaps cut, with these ids. None: what they are decoded to.
    """
    spans = None if text is None else encoded_spans(tokenizer, ids, text)
    if text is None:
        text = tokenizer.decode(ids)
    if spans is None:
        spans = decoded_spans(tokenizer, ids)
    matches = [*re.finditer(r"\S+", text)]
    word_at = dict[int, int]()
    for number, match in enumerate(matches):
        word_at |= dict.fromkeys(range(*match.span()), number)
    of_ids = []
    for start, end in spans:
        touched = [word_at[index] for index in range(start, end) if index in word_at]
        of_ids.append(touched[-1] if touched else None)
    return tuple(match[0] for match in matches), tuple(of_ids)


def alignment_error_rate(
    actual: Iterable[Links], sure: Iterable[Links], possible: Iterable[Links] | None = None
) -> float:
    """1 - (|A ∩ S| + |A ∩ P|) / (|A| + |S|), over all sentences (Och and Ney 2003, section 4.1).

    Args:
        actual: links A of each sentence.
        sure: links S that must be found.
        possible: links P that may be found, sure ones included; None: S.

    >>> alignment_error_rate([{(0, 0), (1, 2)}], sure=[{(0, 0), (1, 1)}])
    0.5
    """
    sure = [*sure]
    matches = total = 0
    for links, must, may in zip(actual, sure, sure if possible is None else possible, strict=True):
        matches += len(links & must) + len(links & (may | must))
        total += len(links) + len(must)
    return 1 - matches / total if total else 0.0
