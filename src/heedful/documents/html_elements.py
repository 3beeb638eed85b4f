"""Elements of HTML: those that end a line of text, and those whose content is kept."""

from collections import Counter


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# With display block, list-item or table in browsers (WHATWG HTML, section 15.3), and those that
# break a line or hold texts of their own. All other elements are in a line of text, also unknown
# and custom ones.
BLOCKS = _names("""
address article aside blockquote body center dd details dialog dir div dl dt fieldset figcaption
figure footer form frame frameset h1 h2 h3 h4 h5 h6 head header hgroup hr html legend li listing
main menu nav ol p plaintext pre search section summary ul xmp
caption col colgroup table tbody td tfoot th thead tr
br datalist marquee noembed noframes optgroup option select title
""")
KEPT = _names("""
code kbd samp var svg math script style template textarea noscript object iframe audio video canvas
""")
VOID = _names("""
area base basefont bgsound br col embed frame hr image img input keygen link meta param source track
wbr
""")

_SECTIONS = _names("thead tbody tfoot")
_ROWS = _SECTIONS | {"tr"}
_CELLS = _ROWS | {"td", "th"}
_CAPTIONS = _names("caption colgroup")
# Elements whose end tag may be left out (WHATWG HTML, section 13.1.2.4), with the start tags that
# end them, or an element of this kind around them.
_ENDING_STARTS: dict[str, frozenset[str]] = {
    "li": _names("li"),
    **dict.fromkeys(["dt", "dd"], _names("dt dd")),
    "p": BLOCKS
    - _names("br datalist legend marquee noembed noframes optgroup option select title"),
    **dict.fromkeys(["rt", "rp"], _names("rt rp")),
    "option": _names("option optgroup hr"),
    "optgroup": _names("optgroup hr"),
    **dict.fromkeys(_CAPTIONS, _CAPTIONS | _CELLS),
    **dict.fromkeys(_SECTIONS, _SECTIONS),
    "tr": _ROWS,
    **dict.fromkeys(["td", "th"], _CELLS),
    **dict.fromkeys(["body", "html"], frozenset()),
}
# The end tags of elements that may be around them.
_ENDING_ENDS = {
    **dict.fromkeys(_ENDING_STARTS, (BLOCKS - VOID - {"p"}) | {"ruby"}),
    **dict.fromkeys(_CAPTIONS | _CELLS, _ROWS | {"table"}),
    **dict.fromkeys(["body", "html"], _names("html")),
}
# Elements in them whose content ends none of them; within a part of a table only other tables do.
_HOLDERS = _names("button math noscript object ruby svg template") | (
    BLOCKS - VOID - _ENDING_STARTS.keys() - {"address", "div"}
)
_TABLE_HOLDERS = _names("table template")
_FOLLOWED = (BLOCKS - VOID) | _HOLDERS


class KeptElement:
    """An element whose content is kept, up to its end.

    Args:
        name: of its tag, in lower case.
        place: of its start tag.
        is_xml: it has an end tag; that of some elements of HTML may be left out.
    """

    def __init__(self, name: str, place: int, is_xml: bool) -> None:
        self.name, self.place = name, place
        self._starts, self._ends, self._followed = frozenset[str](), frozenset[str](), {name}
        if name in _ENDING_STARTS and not is_xml:
            self._starts, self._ends = _ENDING_STARTS[name], _ENDING_ENDS[name]
            self._followed |= _FOLLOWED
        self._holders = _TABLE_HOLDERS if name in _CAPTIONS | _CELLS else _HOLDERS
        self._open = [name]  # it, and what is open in it
        self._num_open = Counter(self._open)  # by name
        self._num_holders = 0

    @property
    def has_ended(self) -> bool:
        """The last event in it was its end tag."""
        return not self._open

    @property
    def ends_with_page(self) -> bool:
        """The end of the page may end it without an end tag."""
        return "html" in self._ends

    def ends_before(self, kind: str, name: str) -> bool:
        """True for an event that ends it without being its own end tag."""
        if kind == "end":
            return name in self._ends and not self._num_open[name]
        return name in self._starts and not self._num_holders

    def add(self, kind: str, name: str) -> None:
        """Add an event in it."""
        if name not in self._followed:
            return
        if kind in ("start", "kept"):
            self._open.append(name)
            self._num_open[name] += 1
            self._num_holders += name in self._holders
        elif kind == "end" and self._num_open[name]:
            last = ""
            while last != name:
                last = self._open.pop()
                self._num_open[last] -= 1
                self._num_holders -= last in self._holders
