"""Entries of gettext catalogues (PO, POT) with the lines that they are in.

Format: GNU gettext manual, "The Format of PO Files".
"""

import codecs
import gettext
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from heedful.errors import UserError

_PLURAL = re.compile(r"nplurals\s*=\s*(\d+)\s*;\s*plural\s*=([^;]+);?\s*")
_CHARSET = re.compile(rb"charset=([\w.:-]+)")
_KEYWORD = re.compile(r"\s*(?:(msgctxt|msgid_plural|msgid|msgstr)(?:\[\s*(\d+)\s*\])?\s*)?(\".*)")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"\s*\Z')
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|([0-7]{1,3}))")
_ESCAPE = re.compile(rf"(?:{_CODE.pattern})+|\\(?P<letter>.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_REVERSED = {"\\": "\\\\", '"': '\\"', **{value: f"\\{key}" for key, value in _ESCAPES.items()}}
_NUMBER = re.compile(r"(?<!%)%(?!%)|\{")  # a placeholder that may be of a number
MAX_FORMS = 10


@dataclass
class Entry:
    """A message of a catalogue.

    Attributes:
        first, stop: its lines from the first comment, counted from 0, to before `stop`.
        lines: of each keyword, such as `msgid` and `msgstr[1]`, its lines and their text.
        flags: such as `fuzzy` and `c-format`.
        flag_line: the line with the first flags; None: none.
    """

    first: int
    stop: int = 0
    lines: dict[str, tuple[int, int]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    flag_line: int | None = None

    @property
    def is_header(self) -> bool:
        """It has the settings of the file."""
        others = {"msgctxt", "msgid_plural"}
        return self.texts.get("msgid") == "" and others.isdisjoint(self.texts)

    @property
    def is_fuzzy(self) -> bool:
        """Its translation is a guess, which programs do not use."""
        return "fuzzy" in self.flags

    @property
    def first_string(self) -> int:
        """The line of its first keyword."""
        return min(first for first, _ in self.lines.values())

    def translations(self) -> dict[int, str]:
        """The text of each plural form; of a message without plural that of form 0."""
        if "msgid_plural" not in self.texts:
            return {0: self.texts.get("msgstr", "")}
        return {
            int(key[7:-1]): text for key, text in self.texts.items() if key.startswith("msgstr[")
        }

    def source_of(self, form: int, rule: "PluralRule") -> str:
        """The source of a plural form; of a message without plural its text."""
        singular, plural = self.texts["msgid"], self.texts.get("msgid_plural")
        return singular if plural is None else rule.source_of(form, singular, plural)


def charset_of(data: bytes, name: str) -> str | None:
    """The charset that the header of a catalogue declares; None for none, or a template's.

    Raises:
        UserError: one whose characters are single bytes, where the file is UTF-8.
    """
    head = data[:10_000].replace(b'"\n"', b"")
    match = _CHARSET.search(head)
    if match is None or match[1] == b"CHARSET":
        return None
    charset = match[1].decode("ascii", "replace")
    if not data.isascii() and _has_single_bytes(charset) and _is_utf8(data):
        raise UserError(f"{name} declares the charset {charset}, but is UTF-8; correct its header")
    return charset


def _has_single_bytes(charset: str) -> bool:
    """True for a charset without characters of several bytes; False for an unknown one."""
    try:
        is_utf8 = codecs.lookup(charset).name == "utf-8"
        return not is_utf8 and len(bytes(range(128, 256)).decode(charset, "replace")) == 128
    except (LookupError, UnicodeError, ValueError):
        return False


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def read_entries(lines: list[str], name: str) -> tuple[list[Entry], int]:
    """The entries of a catalogue's lines, and the number of obsolete ones, which are left out.

    Raises:
        UserError: a line that is none of a catalogue; a message without a translation, or twice
            the same part of one.
    """
    reader = _Reader(name)
    for number, line in enumerate(lines):
        reader.line(number, line.strip(" \t\r\n\f"))
    reader.end(len(lines))
    return reader.entries, reader.num_obsolete


class _Reader:
    """Collects entries line by line."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.entries: list[Entry] = []
        self.num_obsolete = 0
        self._entry: Entry | None = None
        self._key = ""

    def line(self, number: int, line: str) -> None:
        """Read a line; `number` counts from 0."""
        if not line:
            self.end(number)
            return
        if line.startswith("#"):
            if self._entry is not None and self._entry.lines:
                self.end(number)
            if line.startswith("#~"):
                self.num_obsolete += line[2:].lstrip().startswith("msgid ")
                self._entry = None  # comments and flags before it are its own
                return
            entry = self._entry = self._entry or Entry(number)
            if line.startswith("#,"):
                flags = [flag.strip() for flag in line[2:].split(",")]
                entry.flags += [flag for flag in flags if flag]
                entry.flag_line = number if entry.flag_line is None else entry.flag_line
            return
        self._string(number, line)

    def _string(self, number: int, line: str) -> None:
        match = _KEYWORD.fullmatch(line)
        text = match and _STRING.fullmatch(match[3])
        if match is None or text is None:
            raise self._error(number, "neither a comment, a keyword with a text, nor a text")
        value = unescape(text[1])
        if match[1] is None:
            if self._entry is None or not self._key:
                raise self._error(number, "a text without its keyword, such as msgid")
            self._entry.texts[self._key] += value
            first, _ = self._entry.lines[self._key]
            self._entry.lines[self._key] = first, number + 1
            return
        key = match[1] if match[2] is None else f"{match[1]}[{int(match[2])}]"
        is_next = self._entry is not None and (
            key == "msgctxt" or (key == "msgid" and "msgid" in self._entry.texts)
        )
        if is_next and self._entry is not None and self._entry.lines:
            self.end(number)
        entry = self._entry = self._entry or Entry(number)
        if key in entry.texts:
            raise self._error(number, f"a second {key} of one message")
        if match[2] is not None and not (match[1] == "msgstr" and int(match[2]) < MAX_FORMS):
            raise self._error(number, f"{key} is not a plural form")
        if key != "msgctxt" and key != "msgid" and "msgid" not in entry.texts:
            raise self._error(number, f"{key} without its msgid")
        self._key, entry.texts[key], entry.lines[key] = key, value, (number, number + 1)

    def end(self, number: int) -> None:
        """End the entry before a line."""
        entry, self._entry, self._key = self._entry, None, ""
        if entry is None or not entry.lines:
            return
        entry.stop = number
        has_plural = "msgid_plural" in entry.texts
        if not any(key.startswith("msgstr") for key in entry.texts):
            raise self._error(entry.first_string, "a message without msgstr")
        if has_plural == ("msgstr" in entry.texts):
            wanted = "msgstr[0]" if has_plural else "msgstr"
            raise self._error(entry.first_string, f"a message without {wanted}")
        self.entries.append(entry)

    def _error(self, number: int, problem: str) -> UserError:
        return UserError(f"{self._name}, line {number + 1}: {problem}; correct it")


def unescape(text: str) -> str:
    """The text of a string in a catalogue."""
    return _ESCAPE.sub(_unescaped, text) if "\\" in text else text


def _unescaped(match: re.Match[str]) -> str:
    if letter := match["letter"]:
        return _ESCAPES.get(letter, letter)
    # Codes are of bytes, such as those of a character that `msgcat --escape` writes.
    codes = (int(hex_, 16) if hex_ else int(octal, 8) for hex_, octal in _CODE.findall(match[0]))
    data = bytes(code & 0xFF for code in codes)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def escape(text: str) -> str:
    """A text as in the quotes of a catalogue."""
    return "".join(_REVERSED.get(character, character) for character in text)


@dataclass(frozen=True)
class PluralRule:
    """The rule of a catalogue that gives the plural form for a number.

    Attributes:
        num_forms: of each message.
        of_one: the form for 1; -1 if all numbers have one form.
        is_of_many: that form is also for more than five other numbers below 1,000, such as 21 and
            31 in Russian; then `msgfmt --check` requires the number in it.
    """

    num_forms: int
    of_one: int
    is_of_many: bool

    @classmethod
    def of(cls, rule: str) -> "PluralRule | None":
        """The rule of a header's Plural-Forms; None: it is none."""
        match = _PLURAL.fullmatch(rule)
        try:
            if match is None or not 1 <= (num_forms := int(match[1])) <= MAX_FORMS:
                return None
            expression = match[2].strip()
            if "\n" in expression:
                return None
            form_of = gettext.c2py(expression)
            of_one = int(form_of(1))
            if not 0 <= of_one < num_forms:
                return None
            if num_forms == 1:
                return cls(1, -1, is_of_many=False)
            count = sum(int(form_of(number)) == of_one for number in range(1_000))
            return cls(num_forms, of_one, is_of_many=count > 6)
        except (ValueError, ArithmeticError, RecursionError):
            return None

    def source_of(self, form: int, singular: str, plural: str) -> str:
        """The source of a form: the singular for 1, unless the number, which its form needs, is
        written in the plural alone ("One file", "%d files")."""
        needs_number = self.is_of_many and _NUMBER.search(singular) is None
        if form != self.of_one or (needs_number and _NUMBER.search(plural)):
            return plural
        return singular


def plural_rule(fields: Mapping[str, str]) -> PluralRule:
    """The rule of a header's fields; without one the first form is that of 1."""
    return PluralRule.of(fields.get("Plural-Forms", "")) or PluralRule(2, 0, is_of_many=False)


def header_fields(text: str) -> Iterator[tuple[str, str]]:
    """The names and values of a header, in order."""
    for line in text.split("\n"):
        name, colon, value = line.partition(":")
        if colon:
            yield name.strip(), value.strip()
