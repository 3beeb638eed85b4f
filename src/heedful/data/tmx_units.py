"""The units of translation memories (TMX) by language."""

from heedful.data.language_tags import language_of, standard_tag, with_script
from heedful.data.xml_nodes import Node


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


def _has_text(variant: Node) -> bool:
    """True if its segment has text, or codes alone."""
    segment = variant.child("seg")
    return segment is not None and bool(segment.text.strip() or segment.children)
