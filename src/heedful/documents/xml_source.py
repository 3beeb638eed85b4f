"""XML files that are changed in places: their elements, and the file with edits."""

import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from xml.sax.saxutils import escape, quoteattr

from heedful.data.inline import InlinePiece, TaggedText, tagged, trimmed
from heedful.data.xml_inline import pieces_of
from heedful.data.xml_nodes import Node, NodeReader
from heedful.documents.segments import Encoded

_DECLARED = re.compile(rb"<\?xml[^>]*?encoding\s*=\s*[\"']([\w.:-]+)[\"']")
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")  # in XML 1.0


class XmlSource:
    """The bytes of an XML file and edits to it; places count bytes of UTF-8.

    Attributes:
        found: the wanted elements, each with those around it.
        root: the outermost element, without its content.
    """

    def __init__(self, data: bytes, name: str, wanted: Collection[str]) -> None:
        declared = _DECLARED.match(data[:1_000])
        self._name = name
        self._file = Encoded.of(data, name, declared[1].decode() if declared else None)
        self._data = self._file.text.encode()
        self._has_crlf = self._file.text.partition("\n")[0].endswith("\r")
        reader = NodeReader(name, wanted, "utf-8")
        self.found: list[tuple[Node, list[Node]]] = [*reader.read([self._data])]
        assert reader.root is not None
        self.root = reader.root
        self._edits: dict[tuple[int, int], list[str]] = {}

    def raw(self, start: int, end: int) -> str:
        """The source between two places."""
        return self._data[start:end].decode()

    def inner(self, node: Node) -> str:
        """The source between the tags of an element."""
        return self.raw(node.inner, node.inner_end)

    def pieces(self, node: Node) -> list[InlinePiece]:
        """The texts and codes in an element."""
        return [*pieces_of(node, self.raw)]

    def replace(self, start: int, end: int, new: str) -> None:
        """Replace what is between two places; at one place insertions are in their order. Lines,
        which a parser ends by LF, end as the file's first one."""
        if self._has_crlf:
            new = re.sub(r"(?<!\r)\n", "\r\n", new)
        self._edits.setdefault((start, end), []).append(new)

    def set_inner(self, node: Node, new: str) -> None:
        """Replace what is between the tags of an element."""
        if node.is_empty_tag:
            self.replace(node.start, node.end, self.element(node, new))
        else:
            self.replace(node.inner, node.inner_end, new)

    def element(
        self, node: Node, inner: str, attributes: Mapping[str, str | None] = MappingProxyType({})
    ) -> str:
        """The source of an element with other content; attributes as in `start_tag`."""
        tag = self.start_tag(node, attributes)
        tag = tag.removesuffix("/>").rstrip() + ">" if node.is_empty_tag else tag
        name = f"{node.prefix}:{node.name}" if node.prefix else node.name
        return f"{tag}{inner}</{name}>"

    def remove(self, node: Node) -> None:
        """Remove an element, and its line if it begins one."""
        self.replace(node.start - len(self.indent_of(node).encode()), node.end, "")

    def start_tag(self, node: Node, attributes: Mapping[str, str | None]) -> str:
        """The start tag of an element with other values of attributes; None: without it."""
        tag = self.raw(node.start, node.inner)
        for name, value in attributes.items():
            pattern = re.compile(rf"(?<!\s)(\s+){re.escape(name)}\s*=\s*(\"[^\"]*\"|'[^']*')")
            if value is None:
                tag = pattern.sub("", tag, count=1)
            elif pattern.search(tag):
                new = f"{name}={quoteattr(value)}"
                tag = pattern.sub(lambda match, new=new: match[1] + new, tag, count=1)  # type: ignore[misc]
            else:
                end = -2 if tag.endswith("/>") else -1
                tag = f"{tag[:end].rstrip()} {name}={quoteattr(value)}{tag[end:]}"
        return tag

    def set_attributes(self, node: Node, attributes: dict[str, str | None]) -> None:
        """Change attributes of an element whose content is not changed by `set_inner`."""
        if (new := self.start_tag(node, attributes)) != self.raw(node.start, node.inner):
            self.replace(node.start, node.inner, new)

    def indent_of(self, node: Node) -> str:
        """The line break and blanks before an element, if it begins a line; else ""."""
        before = self._data[max(0, node.start - 1_000) : node.start].decode(errors="replace")
        match = re.search(r"\r?\n[ \t]*\Z", before)
        return match[0] if match else ""

    def to_bytes(self) -> bytes:
        """The file with the edits."""
        parts, place = [], 0
        for (start, end), new in sorted(self._edits.items()):
            assert place <= start
            parts += [self._data[place:start], *(text.encode() for text in new)]
            place = end
        whole = b"".join([*parts, self._data[place:]]).decode()
        self._edits.clear()
        return self._file.encode(whole, self._name, "xmlcharrefreplace")


def segment_codes(
    pieces: Sequence[InlinePiece],
) -> tuple[TaggedText, list[InlinePiece], list[InlinePiece]]:
    """The text of a segment, and the pieces before and after it, which are kept."""
    start, stop = trimmed(pieces)
    return tagged(pieces[start:stop]), [*pieces[:start]], [*pieces[stop:]]


def xml_of(pieces: Sequence[InlinePiece]) -> str:
    """Pieces as XML."""
    return "".join(xml_text(p.raw) if p.kind == "text" else p.raw for p in pieces)


def xml_text(text: str) -> str:
    """A text as XML; characters that XML does not have are left out."""
    return escape(_FORBIDDEN.sub("", text)).replace("\r", "&#13;")
