"""The units of translation memories (TMX) by language."""

from collections.abc import Sequence

from heedful.data.language_tags import language_of, standard_tag, with_script
from heedful.data.xml_nodes import Node

ORIGIN, MACHINE = "x-origin", "machine"  # type and text of the `prop` of a machine's translation


def variant(unit: Node, language: str) -> Node | None:
    """The `tuv` of a unit in a language; `en` is also `en-US`.

    One with the same tag goes before others in the same or usual script, and these before others of
    the language; of each the first with text counts, or without any the first.
    """
    variants = [node for node in unit.children if node.name == "tuv" and node.language]
    for form in (standard_tag, with_script, language_of):
        found = [node for node in variants if form(node.language or "") == form(language)]
        if found:
            return next(filter(_has_text, found), found[0])
    return None


def is_by_machine(unit: Node, pair: Sequence[Node]) -> bool:
    """One of two variants is a machine's translation that no person has changed.

    heedful marks its own by a `prop`; in memories of other tools the last user is `MT!`.
    """
    changed, created = (
        {node.attributes.get(name) for node in (unit, *pair)} - {None}
        for name in ("changeid", "creationid")
    )
    return "MT!" in (changed or created) or any(
        is_origin(child) and child.text == MACHINE
        for node in pair
        if not node.attributes.keys() & {"changeid", "changedate"}
        for child in node.children
    )


def is_origin(node: Node) -> bool:
    """The element that says where a translation is from."""
    return node.name == "prop" and node.attributes.get("type") == ORIGIN


def _has_text(variant: Node) -> bool:
    """True if its segment has text, or codes alone."""
    segment = variant.child("seg")
    return segment is not None and bool(segment.text.strip() or segment.children)
