"""The inline elements of TMX and XLIFF as pieces of a text.

Sources: TMX 1.4b, section 3.2 (`bpt ept hi it ph ut sub`); XLIFF 1.2, section 2.3 (also `g x bx ex
mrk`); XLIFF 2.1, section 4.2.3 (`cp ph pc sc ec mrk sm em`).
"""

from collections.abc import Callable, Iterator
from functools import partial

from heedful.data.inline import InlinePiece
from heedful.data.xml_nodes import Node

_AROUND = {"g", "pc", "hi", "mrk"}  # whose content is text
_BEGINS = {"ept": "bpt", "ex": "bx", "ec": "sc", "em": "sm"}  # the other half of an end
Raw = Callable[[int, int], str]  # the source between two places


def pieces_of(node: Node, raw: Raw | None = None) -> Iterator[InlinePiece]:
    """The texts and codes in an element.

    Args:
        raw: None: the codes are not written, and marks of segments are none.
    """
    parts = _parts(node, with_segments=raw is not None)
    yield from map(partial(_as_piece, raw or (lambda start, end: "")), parts)


def is_segment(node: Node) -> bool:
    """A mark of segmentation, which is no code of the text (XLIFF 1.2)."""
    return node.name == "mrk" and node.attributes.get("mtype") == "seg"


def _parts(node: Node, *, with_segments: bool) -> Iterator[tuple[str, str | Node]]:
    for part in node.content:
        if isinstance(part, str):
            yield "text", part
        elif not with_segments and is_segment(part):
            yield from _parts(part, with_segments=with_segments)
        elif part.name in _AROUND and not part.is_empty_tag and not _is_protected(part):
            yield "open", part
            yield from _parts(part, with_segments=with_segments)
            yield "close", part
        elif part.name in _BEGINS.values():
            yield "begin", part
        elif part.name in _BEGINS:
            yield "end", part
        else:
            yield "alone", part


def _is_protected(node: Node) -> bool:
    """True for text that is not translated: it is one code."""
    names = node.attributes
    return names.get("mtype") == "protected" or names.get("translate") == "no"


def _as_piece(raw: Raw, entry: tuple[str, str | Node]) -> InlinePiece:
    kind, part = entry
    if isinstance(part, str):
        return InlinePiece("text", part)
    names = part.attributes
    # `x` of TMX is equal in all languages, as is `id` of XLIFF.
    name = names.get("x") or names.get("id") or ""
    if kind == "open":
        return InlinePiece("open", raw(part.start, part.inner), f"element {part.start}", name)
    if kind == "close":
        return InlinePiece("close", raw(part.inner_end, part.end), f"element {part.start}")
    whole = raw(part.start, part.end)
    if kind == "alone":
        return InlinePiece("alone", whole, name=name)
    number = next((names[key] for key in ("i", "rid", "startRef", "id") if names.get(key)), "")
    pair = f"{_BEGINS.get(part.name, part.name)} {number}"
    if part.name not in ("bpt", "ept"):  # their ids are of other codes
        name = f"{part.name} {name or number}" if name or number else ""
    return InlinePiece("open" if kind == "begin" else "close", whole, pair, name)
