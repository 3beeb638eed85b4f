"""Units of XLIFF: the marks of their segments, and whether their translations are finished.

In XLIFF 1.2 `seg-source` is a copy of `source` in which each `<mrk mtype="seg">` is a segment; the
one with the same `mid` in `target` is its translation. XLIFF 2 has an element for each segment.
"""

from heedful.data.xml_inline import is_segment
from heedful.data.xml_nodes import Node

_UNFINISHED = {"new", "needs-translation", "initial"}
_CONFIRMED = {"translated", "signed-off", "final"}  # states of `target` in XLIFF 1.2
_CONFIRMED_2 = {"reviewed", "final"}  # of `segment` in XLIFF 2
_CONFIRMED_IN_TRADOS = {"Translated", "ApprovedTranslation", "ApprovedSignOff"}


def segments_of(node: Node | None) -> list[Node]:
    """The marks of segments in an element, without those in others."""
    found: list[Node] = []
    for child in [] if node is None else node.children:
        found += [child] if is_segment(child) else segments_of(child)
    return found


def segments_by_id(node: Node | None) -> dict[str, Node]:
    """The marks of segments in an element by `mid`; none if they do not have one each."""
    marks = segments_of(node)
    found = {mark.attributes.get("mid", ""): mark for mark in marks}
    return found if len(found) == len(marks) and "" not in found else {}


def marked_segments(unit: Node, target: Node | None) -> dict[str, tuple[Node, Node | None]]:
    """The marks of a unit's segments by `mid`, with those of their translations, which are None
    where they are missing, or the target has the marks of other segments."""
    sources, targets = segments_by_id(unit.child("seg-source")), segments_by_id(target)
    targets = targets if targets.keys() <= sources.keys() else {}
    return {mid: (mark, targets.get(mid)) for mid, mark in sources.items()}


def text_between(node: Node | None) -> str:
    """The text of an element that is in no mark of a segment."""
    content = [] if node is None else node.content
    return "".join(
        part if isinstance(part, str) else "" if is_segment(part) else text_between(part)
        for part in content
    )


def segment_definitions(unit: Node) -> dict[str, Node]:
    """The states that Trados keeps of segments (`sdl:seg-defs` in .sdlxliff), by their `mid`."""
    listed = unit.child("seg-defs")
    segments = [] if listed is None else listed.children
    return {node.attributes.get("id", ""): node for node in segments if node.name == "seg"}


def is_locked(node: Node) -> bool:
    """An element has an attribute `locked` that says so: of Trados, memoQ (`mq:locked="locked"`) or
    Phrase (`m:locked="true"`)."""
    names = node.attributes.items()
    return any(
        name.rpartition(":")[2] == "locked" and value in ("true", "locked") for name, value in names
    )


def target_text(target: Node | None) -> str:
    """The text of a translation, or "-" for codes alone; "": there is none, or it has segments that
    are all empty."""
    if target is None:
        return ""
    marks = segments_of(target)
    is_prepared = bool(marks) and all(map(_is_empty, marks))
    return target.text.strip() or ("-" if target.children and not is_prepared else "")


def is_unfinished(holder: Node, target: Node) -> bool:
    """The state of a translation is that of an unfinished one.

    Args:
        holder: the `trans-unit`, or of XLIFF 2 the `segment`.
    """
    return _state(holder, target) in _UNFINISHED and not _is_approved(holder)


def is_by_machine(holder: Node, target: Node, segment: Node) -> bool:
    """A translation is a machine's, and no person has confirmed it.

    Trados keeps the origin in the definition of the segment, Phrase in the unit. In XLIFF 2, which
    has no attribute for it, only heedful's translations are known.

    Args:
        holder: the `trans-unit`, or of XLIFF 2 the `segment`.
        segment: the source, or its mark in `seg-source`.
    """
    state = _state(holder, target)
    if holder.name == "segment":
        return holder.attributes.get("subState") == "heedful:model" and state not in _CONFIRMED_2
    definition = segment_definitions(holder).get(segment.attributes.get("mid", ""))
    if definition is not None and "origin" in definition.attributes:
        is_machine = definition.attributes["origin"] in ("mt", "nmt", "amt")
        return is_machine and definition.attributes.get("conf") not in _CONFIRMED_IN_TRADOS
    of_phrase = {name.rpartition(":")[2]: value for name, value in holder.attributes.items()}
    if of_phrase.get("trans-origin") == "mt":
        return of_phrase.get("confirmed") in (None, "0", "false")
    is_machine = target.attributes.get("state-qualifier") in ("leveraged-mt", "mt-suggestion")
    return is_machine and state not in _CONFIRMED and not _is_approved(holder)


def is_partial(holder: Node, target: Node) -> bool:
    """Some segments of a translation are empty or missing, and the file does not say that it is
    finished, by a state or by `approved`."""
    marks = segments_of(target)
    filled = [mark for mark in marks if not _is_empty(mark)]
    if not filled or _state(holder, target) or _is_approved(holder):
        return False
    ids, wanted = segments_by_id(target), segments_by_id(holder.child("seg-source"))
    return len(filled) < len(marks) or (bool(ids) and ids.keys() < wanted.keys())


def segment_pairs(unit: Node, source: Node, target: Node) -> list[tuple[Node, Node | None]]:
    """The segments of a unit with their translations, None for one that is missing.

    A unit without marks, or whose target has the marks of other segments, is one segment; it is
    none if such a target is not complete.
    """
    marks = [*marked_segments(unit, target).values()]
    if any(translation is not None for _, translation in marks):
        return marks
    return [] if is_partial(unit, target) else [(source, target)]


def _state(holder: Node, target: Node) -> str:
    return (target if holder.name == "trans-unit" else holder).attributes.get("state", "")


def _is_approved(holder: Node) -> bool:
    return holder.attributes.get("approved") == "yes"


def _is_empty(mark: Node) -> bool:
    """Without text and codes; codes alone are a translation too."""
    return not mark.text.strip() and not mark.children
