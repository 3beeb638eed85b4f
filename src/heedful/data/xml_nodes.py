"""Elements of XML with their places in the bytes of the file, read in parts, by expat.

Entities that a file declares are refused, and nothing outside of the file is read.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn
from xml.parsers import expat

from heedful.errors import UserError

MAX_DEPTH = 256  # of elements; documents have fewer than 50


@dataclass(slots=True)
class Node:
    """An element. Places are indices of bytes, as the parser was given them.

    Attributes:
        name: without its prefix.
        start: of its start tag.
        inner, inner_end: what is between start tag and end tag.
        end: behind its end tag; equal to `inner_end` for an empty-element tag `<a/>`.
        line: of its start tag, from 1.
        content: texts and elements.
    """

    name: str
    prefix: str
    attributes: dict[str, str]
    line: int
    start: int
    inner: int = -1
    inner_end: int = -1
    end: int = -1
    content: "list[str | Node]" = field(default_factory=list)

    @property
    def is_empty_tag(self) -> bool:
        """It is written `<a/>`."""
        return self.end == self.inner_end

    @property
    def children(self) -> "list[Node]":
        """The elements of the content."""
        return [part for part in self.content if isinstance(part, Node)]

    def child(self, name: str) -> "Node | None":
        """The first element of this name in the content."""
        return next((node for node in self.children if node.name == name), None)

    @property
    def text(self) -> str:
        """All text in it, with that of elements in it."""
        return "".join(part if isinstance(part, str) else part.text for part in self.content)

    @property
    def language(self) -> str | None:
        """Its attribute `xml:lang`, or `lang` of old files."""
        return self.attributes.get("xml:lang", self.attributes.get("lang"))

    def walk(self) -> "Iterator[Node]":
        """The element and all elements in it, in the order of the file."""
        yield self
        for node in self.children:
            yield from node.walk()


class NodeReader:
    """Reads elements of some names with their content.

    Args:
        name: of the file, for messages.
        wanted: names of the elements that are returned; elements in them are their content.
        encoding: of the bytes; None: the one that the file declares.

    Attributes:
        open: the elements around the current place, outermost first, without their content.
        root: the outermost element, without its content.
    """

    def __init__(self, name: str, wanted: Collection[str], encoding: str | None = None) -> None:
        self._name, self._wanted = name, frozenset(wanted)
        self.open: list[Node] = []
        self.root: Node | None = None
        self._outermost: Node | None = None  # of the wanted ones around the current place
        self._without_inner: Node | None = None
        self._without_end: list[Node] = []
        self._texts: list[str] = []  # one after the other, in the innermost element
        self._complete: list[tuple[Node, list[Node]]] = []
        parser = self._parser = expat.ParserCreate(encoding)
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._text
        parser.EntityDeclHandler = self._refuse_entity
        parser.SkippedEntityHandler = self._refuse_skipped
        # Each event ends the tag before it.
        parser.CommentHandler = lambda data: self._place()
        parser.ProcessingInstructionHandler = lambda target, data: self._place()
        parser.StartCdataSectionHandler = parser.EndCdataSectionHandler = self._place
        parser.DefaultHandler = lambda data: self._place()

    def read(self, parts: Iterable[bytes]) -> Iterator[tuple[Node, list[Node]]]:
        """Each wanted element with the elements around it, outermost first.

        Raises:
            UserError: XML that is not well-formed, with line and column; a declared entity.
        """
        for part in parts:
            self._feed(part, is_last=False)
            yield from self._take()
        self._feed(b"", is_last=True)
        yield from self._take()

    def _feed(self, part: bytes, *, is_last: bool) -> None:
        try:
            self._parser.Parse(part, is_last)
        except expat.ExpatError as error:
            reason = expat.ErrorString(error.code) or "not well-formed"
            raise UserError(
                f"{self._name}, line {error.lineno}, column {error.offset + 1}: broken XML:"
                f" {reason}; correct it there"
            ) from None
        except (LookupError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{self._name}: its declaration names an encoding that is not supported; convert it"
                " to UTF-8"
            ) from None
        if is_last:
            for node in self._without_end:
                node.end = self._parser.CurrentByteIndex

    def _take(self) -> list[tuple[Node, list[Node]]]:
        # An element is complete when the event behind it is known.
        pending = {id(node) for node in self._without_end}
        done = [entry for entry in self._complete if id(entry[0]) not in pending]
        self._complete = [entry for entry in self._complete if id(entry[0]) in pending]
        return done

    def _place(self) -> int:
        """The place of the current event, which is the end of the tags before it."""
        place = self._parser.CurrentByteIndex
        if self._without_inner is not None:
            self._without_inner.inner = place
            self._without_inner = None
        for node in self._without_end:
            node.end = place
        self._without_end.clear()
        return place

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        place = self._place()
        prefix, _, local = name.rpartition(":")
        line = self._parser.CurrentLineNumber
        if len(self.open) >= MAX_DEPTH:
            raise UserError(
                f"{self._name}, line {line}: elements are nested more than {MAX_DEPTH} deep; such a"
                " file is not read"
            )
        node = Node(local, prefix, attributes, line, place)
        self._without_inner = node
        if self._outermost is not None:
            self._end_text()
            self.open[-1].content.append(node)
        elif local in self._wanted:
            self._outermost = node
        self.root = self.root or node
        self.open.append(node)

    def _end(self, name: str) -> None:
        place = self._place()
        self._end_text()
        node = self.open.pop()
        node.inner_end = place
        self._without_end.append(node)
        if node is self._outermost:
            self._complete.append((node, [*self.open]))
            self._outermost = None

    def _text(self, text: str) -> None:
        self._place()
        if self._outermost is not None:
            self._texts.append(text)

    def _end_text(self) -> None:
        """Add the text before a tag to the innermost element; the parser gives it line by line."""
        if self._texts:
            self.open[-1].content.append("".join(self._texts))
            self._texts.clear()

    def _refuse_entity(self, entity: str, *details: object) -> None:
        self._refuse(
            self._parser.CurrentLineNumber, f"it declares the entity {entity}, which is not read"
        )

    def _refuse_skipped(self, entity: str, is_parameter: bool) -> None:
        if not is_parameter:
            self._refuse(self._parser.CurrentLineNumber, f"the entity &{entity}; is not known")

    def _refuse(self, line: int, problem: str) -> NoReturn:
        raise UserError(f"{self._name}, line {line}: {problem}; write its text instead")
