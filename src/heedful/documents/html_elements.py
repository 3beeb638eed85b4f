"""Elements of HTML: those that end a line of text, and those whose content is kept."""


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
