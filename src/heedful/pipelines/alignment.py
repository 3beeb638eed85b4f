"""Cross-attention of a translator's net on given outputs, and the places of tokens in texts."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from heedful.backends.torch.cached_net import checked_start_ids, right_padded
from heedful.data.decoding import GrowingText
from heedful.data.tokenizer import Tokenizer
from heedful.documents.word_links import TokenAlignment
from heedful.fidelity import Masked, unmask
from heedful.options import Options
from heedful.parts.tokens import Tokens
from heedful.pipelines.generations import Generation

if TYPE_CHECKING:
    from heedful.pipelines.translation import Translator

_BATCH = 32  # outputs of one pass, whose weights are in memory
Spans = list[tuple[int, int]]


def token_alignments(
    model: "Translator", texts: Sequence[str], outputs: Sequence[Generation], options: Options
) -> list[TokenAlignment | None]:
    """See `Translator.token_alignments`; ranges are those in the outputs without blanks around."""
    rows = [index for index, output in enumerate(outputs) if output.ids and model.has_net]
    rows.sort(key=lambda index: len(outputs[index].ids))
    found: list[TokenAlignment | None] = [None] * len(outputs)
    if not rows:
        return found
    sources = read_sources(model, texts, outputs, options)
    start = checked_start_ids(model.ids.decoder_start_ids)
    layers = range(len(model.net.decoder.blocks))
    for first in range(0, len(rows), _BATCH):
        part = [index for index in rows[first : first + _BATCH] if sources[index]]
        if not part:
            continue
        read = [[*start, *outputs[index].ids][: model.config.max_length] for index in part]
        weights = cross_attention(model, [sources[index] for index in part], read, layers)
        for index, table in zip(part, weights.cpu().numpy(), strict=True):
            ids = outputs[index].ids
            masked = outputs[index].masked or Masked(texts[index], {})
            own = table[len(start) - 1 : len(start) - 1 + len(ids), : len(sources[index])]
            found[index] = _alignment(model, own, sources[index], outputs[index], masked)
    return found


def read_sources(
    model: "Translator", texts: Sequence[str], outputs: Sequence[Generation], options: Options
) -> list[list[int]]:
    """The ids of each text as the net read it for its output; not counted as read again."""
    read = [
        text if output.masked is None else output.masked.text
        for text, output in zip(texts, outputs, strict=True)
    ]
    counts = model.num_truncated, model.num_left_out, model.num_unknown
    rows = model.prompt_ids(read, replace(options, keep=False))
    model.num_truncated, model.num_left_out, model.num_unknown = counts
    return rows


def cross_attention(
    model: "Translator",
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    layers: Sequence[int],
) -> Float[Tensor, "B T S"]:
    """Weights of a pass of the net, averaged over heads and some layers of the decoder.

    Args:
        sources, targets: rows as the net reads them, targets with start ids.
    """
    src, tgt = (
        Tokens.from_ids(*right_padded([list(row) for row in rows], model.device))
        for rows in (sources, targets)
    )
    net, tables = model.net, list[Tensor]()

    def add(module: Any, inputs: Any, weights: Tensor) -> None:
        """Keep the mean over the heads of a layer."""
        tables.append(weights.float().mean(1))

    was_training = net.training
    with ExitStack() as stack, torch.no_grad():
        stack.callback(net.train, was_training)
        net.eval()
        for layer in layers:
            hook = net.decoder.blocks[layer].cross_attention.sublayer.weights_hook
            stack.enter_context(hook.register_forward_hook(add))
        net.states(src, tgt)
    return torch.stack(tables).mean(0)


def _alignment(
    model: "Translator",
    weights: Float[np.ndarray, "T S"],
    source: Sequence[int],
    output: Generation,
    masked: Masked,
) -> TokenAlignment:
    """The alignment of a text and an output, in which masks stand for pieces."""
    spans = encoded_spans(model.src_tokenizer, source, masked.text)
    if spans is None:
        spans = decoded_spans(model.src_tokenizer, source)
        decoded = model.src_tokenizer.decode(source)
        spans = _moved(spans, decoded, masked.text)
    ids = output.ids[: len(weights)]
    written = masked.cased(model.tgt_tokenizer.decode(ids))
    target = _unmasked(decoded_spans(model.tgt_tokenizer, ids), written, masked.pieces)
    target = _moved(target, unmask(written, masked.pieces), output.text.strip())
    return TokenAlignment(_unmasked(spans, masked.text, masked.source_pieces), target, weights)


def _unmasked(spans: Spans, text: str, pieces: dict[str, str]) -> Spans:
    """Ranges of a text with masks in the one with pieces in place of them."""
    if not pieces:
        return spans
    places = [0]
    for character in text:
        places.append(places[-1] + len(unmask(character, pieces)))
    return _at(spans, places)


def _moved(spans: Spans, old: str, new: str) -> Spans:
    """Ranges of a text in one that differs a little."""
    if old == new:
        return spans
    places: list[int] = []
    for _, start, end, first, stop in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        share = (stop - first) / max(1, end - start)
        places += [first + int(index * share) for index in range(end - start)]
    return _at(spans, [*places, len(new)])


def _at(spans: Spans, places: Sequence[int]) -> Spans:
    """Ranges whose characters are at other places."""
    last = len(places) - 1
    return [(places[min(start, last)], places[min(end, last)]) for start, end in spans]


def encoded_spans(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> Spans | None:
    """The span of each id in the text that it was encoded from; None: they are of another text."""
    encoded, spans = tokenizer.encode_spans(text)
    num_after = len(tokenizer.encode_target([])) - len(tokenizer.prefix_ids)
    for first in range(len(ids)):  # tags and special tokens come before
        count = _num_equal(encoded, ids[first:])
        after = ids[first + count :]
        ends = len(after) <= num_after and all(token in tokenizer.special_ids for token in after)
        if ends and count:
            return [*[(0, 0)] * first, *spans[:count], *[(0, 0)] * len(after)]
    return None


def decoded_spans(tokenizer: Tokenizer, ids: Sequence[int]) -> Spans:
    """The span of each id in the text that the ids are decoded to."""
    growing = GrowingText(tokenizer.decoder)
    spans = []
    for token in ids:
        [data] = growing.bytes_of([token])
        start = growing.offset_of(data)
        growing.add([token])
        # All tokens of a character have it in their span.
        spans.append((start, max(growing.length, start + bool(data))))
    return spans


def _num_equal(first: Sequence[Any], second: Sequence[Any]) -> int:
    """The length of the equal beginning of two sequences."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
