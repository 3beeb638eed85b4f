"""Tags of HTML whose other half is missing, or in another block."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from heedful.data.inline import InlinePiece, partners_of


def with_other_halves(
    pieces: Sequence[InlinePiece], sizes: Sequence[int], left_open: Counter[str]
) -> tuple[list[InlinePiece], list[int]]:
    """The pieces of a run and their sizes, with an empty piece for each half of a pair of tags that
    is missing, so that what a tag encloses stays within it in a translation.

    A tag without an end encloses all up to the end of the tag around it, or of the run. An end of a
    tag of an earlier run encloses all from there on; any other end has no meaning.

    Args:
        left_open: by name, the number of tags of earlier runs that have no end; it is updated.
    """
    partners = partners_of(pieces)
    texts = [*accumulate((p.kind == "text" and bool(p.raw.strip()) for p in pieces), initial=0)]
    added: dict[int, list[InlinePiece]] = {}  # before the piece of an index
    ends: set[int] = set()
    for index, piece in enumerate(pieces):
        if piece.kind == "close" and index not in partners and left_open[piece.pair]:
            left_open[piece.pair] -= 1
            ends.add(index)
    pending: list[int] = []  # tags without an end
    for index in range(len(pieces) + 1):
        around = partners.get(index, -1 if index == len(pieces) else index)
        while pending and pending[-1] > around:
            first = pending.pop()
            left_open[pieces[first].pair] += 1
            if texts[first] < texts[index]:
                added.setdefault(index, []).append(InlinePiece("close", "", pieces[first].pair))
        if index < len(pieces) and pieces[index].kind == "open" and index not in partners:
            pending.append(index)
    for index in range(len(pieces) - 1, -2, -1):
        around = partners.get(index, len(pieces) if index < 0 else index)
        while pending and pending[-1] < around:
            last = pending.pop()
            if texts[index + 1] < texts[last]:
                added.setdefault(index + 1, []).insert(
                    0, InlinePiece("open", "", pieces[last].pair)
                )
        if index in ends:
            pending.append(index)
    result: list[InlinePiece] = []
    result_sizes: list[int] = []
    for index in range(len(pieces) + 1):
        halves = added.get(index, [])
        result += [*halves, *pieces[index : index + 1]]
        result_sizes += [*([0] * len(halves)), *sizes[index : index + 1]]
    return result, result_sizes
