"""Gettext catalogues (.po, .pot): messages with their plural forms and contexts."""

import re
from dataclasses import dataclass

from heedful import extras
from heedful.data.language_tags import language_of, standard_tag
from heedful.data.po_entries import (
    Entry,
    PluralRule,
    charset_of,
    escape,
    header_fields,
    read_entries,
)
from heedful.documents.segments import Document, Encoded, Segment
from heedful.errors import UserError

_PREVIOUS = "# previous translation"
_NOTES = ("# needs review: ", "# quality: ")


@dataclass
class Message:
    """A message with the segments of its forms."""

    entry: Entry
    segments: list[Segment]


class PoDocument(Document):
    """A catalogue. Translations are marked `fuzzy`: programs use them when the mark is removed.

    A fuzzy translation that is replaced becomes a comment, and so do the forms of a message that
    lacks one. Of several replaced one after the other the first, which may be a person's, and the
    last are kept.
    """

    keeps_targets = True

    def __init__(
        self, data: bytes, name: str, languages: tuple[str | None, str | None] = (None, None)
    ) -> None:
        super().__init__(name, languages)
        self._file = Encoded.of(data, name, charset_of(data, name))
        self._lines = self._file.text.split("\n")
        self._end = "\r\n" if self._lines[0].endswith("\r") else "\n"
        entries, num_obsolete = read_entries(self._lines, name)
        if not entries:
            raise UserError(f"{name} has no messages; name a catalogue")
        if num_obsolete:
            self.skip("obsolete messages", num_obsolete)
        self._header = next((entry for entry in entries if entry.is_header), None)
        fields = dict(header_fields(self._header.texts["msgstr"])) if self._header else {}
        self.settle_languages((None, fields.get("Language") or None))
        messages = [entry for entry in entries if not entry.is_header]
        has_plurals = any("msgid_plural" in entry.texts for entry in messages)
        self._rule = self._plural_rule(fields) if has_plurals else ""
        self._fields = fields
        rule = self._forms() if has_plurals else PluralRule(1, -1, is_of_many=False)
        self._messages = [self._message(entry, rule) for entry in messages]

    def _message(self, entry: Entry, rule: PluralRule) -> Message:
        has_plural = "msgid_plural" in entry.texts
        translations, segments = entry.translations(), []
        # All forms of a message are translated together.
        forms = range(rule.num_forms if has_plural else 1)
        is_complete = not has_plural or all(map(translations.get, forms))
        is_finished = not entry.is_fuzzy and is_complete
        texts = [entry.source_of(form, rule) for form in forms]
        for form, text in enumerate(texts):
            line = entry.lines["msgid"][0] + 1
            target, is_of_forms = translations.get(form, ""), texts.count(text) > 1
            segment = Segment(text, line, target, is_finished, is_of_forms=is_of_forms)
            segments.append(self.add(segment))
        return Message(entry, segments)

    def _plural_rule(self, fields: dict[str, str]) -> str:
        """The rule of the header, or that of the target language."""
        rule = fields.get("Plural-Forms", "")
        if rule and "INTEGER" not in rule:
            return rule
        extras.require("documents", "plural forms of a catalogue")
        from babel.messages.plurals import PLURALS

        target = self.languages[1]
        if target is None:
            raise UserError(
                f"{self.name} has messages with plurals, but no Plural-Forms in its header; give "
                "the language of the translations as target_language=CODE"
            )
        tag = standard_tag(target).replace("-", "_")
        found = PLURALS.get(tag) or PLURALS.get(language_of(target))
        if found is None:
            raise UserError(
                f"{self.name} has no Plural-Forms in its header, and the rules of {target} are not "
                "known; write them there"
            )
        return f"nplurals={found[0]}; plural={found[1]};"

    def _forms(self) -> PluralRule:
        """The rule, parsed; raises UserError if it is none."""
        found = PluralRule.of(self._rule)
        if found is None:
            raise UserError(
                f"{self.name}: the header's Plural-Forms {self._rule[:80]!r} are no rule; correct "
                "them, as nplurals=2; plural=(n != 1);"
            )
        return found

    def to_bytes(self) -> bytes:
        """See `Document.to_bytes`."""
        parts, place = [], 0
        is_changed = False
        for message in self._messages:
            if not any(segment.result for segment in message.segments):
                continue
            entry = message.entry
            parts += [*self._lines[place : entry.first], *self._rendered(message)]
            place, is_changed = entry.stop, True
        parts += self._lines[place:]
        if is_changed and self._header is not None:
            # The header is the first message, or nothing was written before it.
            shift = self._header.lines["msgstr"]
            if all(m.entry.first >= shift[1] for m in self._messages):
                parts[shift[0] : shift[1]] = self._header_lines(self._header)
        return self._file.encode("\n".join(parts), self.name)

    def _rendered(self, message: Message) -> list[str]:
        """The lines of a message with new translations."""
        entry, segments = message.entry, message.segments
        results = [segment.result for segment in segments]
        is_machine = any(result and result.origin == "model" for result in results)
        first = entry.first_string
        comments = [
            line for line in self._lines[entry.first : first] if not line.startswith(_NOTES)
        ]
        if is_machine and not entry.is_fuzzy:
            if entry.flag_line is None:
                index = next(
                    (i for i, line in enumerate(comments) if line.startswith("#|")), len(comments)
                )
                comments.insert(index, self._own("#, fuzzy"))
            else:
                index = comments.index(self._lines[entry.flag_line])
                comments[index] = re.sub(r"#,\s*", "#, fuzzy, ", comments[index], count=1)
        elif not is_machine and entry.is_fuzzy and all(results):
            comments = [*filter(None, map(_without_fuzzy, comments))]
        lines = [line for result in results if result for line in result.notes]
        notes = [
            self._own("# " + " ".join(line.split()).replace("\\", "/"))
            for line in dict.fromkeys(lines)
        ]
        drafts, comments = self._with_drafts(message, comments)
        keys = [key for key in entry.lines if not key.startswith("msgstr")]
        source = [line for key in keys for line in self._lines[slice(*entry.lines[key])]]
        after = max(stop for _, stop in entry.lines.values())
        return [
            *notes,
            *drafts,
            *comments,
            *source,
            *(line for index in range(len(segments)) for line in self._form(message, index)),
            *self._lines[after : entry.stop],
        ]

    def _with_drafts(self, message: Message, comments: list[str]) -> tuple[list[str], list[str]]:
        """Comments with the unfinished translations that are replaced, and with those of forms
        that the language does not have, which may be a person's work; and the other comments,
        without earlier drafts but the first one of each form."""
        segments = message.segments
        is_plural = "msgid_plural" in message.entry.texts

        def is_draft(form: int, old: str) -> bool:
            """True for a translation that is not finished, and not in the new message."""
            if not old or form >= len(segments):
                return bool(old)
            result = segments[form].result
            return not segments[form].is_finished and result is not None and result.text != old

        drafts: list[str] = []
        for form, old in sorted(message.entry.translations().items()):
            start = f"{_PREVIOUS}{f' [{form}]' if is_plural else ''}: "
            draft = self._own(f'{start}"{escape(old)}"')
            if is_draft(form, old) and draft not in comments:
                earlier = [line for line in comments if line.startswith(start)]
                drafts.append(draft)
                # The last one is the first that was written: each goes before those before it.
                replaced = {*earlier[:-1]}
                comments = [line for line in comments if line not in replaced]
        return drafts, comments

    def _form(self, message: Message, index: int) -> list[str]:
        """The lines of a translation, in one line as its source, or one for each line of it."""
        entry, segment = message.entry, message.segments[index]
        has_plural = "msgid_plural" in entry.texts
        keyword = f"msgstr[{index}]" if has_plural else "msgstr"
        if segment.result is None:
            if keyword in entry.lines:
                return self._lines[slice(*entry.lines[keyword])]
            return [self._own(f'{keyword} ""')]
        text = segment.result.text
        if entry.texts.get(keyword) == text:
            return self._lines[slice(*entry.lines[keyword])]
        for key in ("msgid_plural", "msgid"):
            if entry.texts.get(key) == text:
                line, *others = self._lines[slice(*entry.lines[key])]
                return [re.sub(r"msgid(_plural)?\s*", f"{keyword} ", line, count=1), *others]
        first, stop = entry.lines["msgid"]
        if stop == first + 1 or "\n" not in text.rstrip("\n"):
            return [self._own(f'{keyword} "{escape(text)}"')]
        pieces = re.findall(r"[^\n]*\n|[^\n]+", text)
        lines = [f'{keyword} ""', *(f'"{escape(piece)}"' for piece in pieces)]
        return [self._own(line) for line in lines]

    def _header_lines(self, header: Entry) -> list[str]:
        """The lines of the header's msgstr with the rule and the language, where it has none."""
        lines = self._lines[slice(*header.lines["msgstr"])]
        target = self.languages[1]
        wanted = {}
        if self._rule and self._fields.get("Plural-Forms", "") != self._rule:
            wanted["Plural-Forms"] = self._rule
        if target and not self._fields.get("Language"):
            wanted["Language"] = standard_tag(target).replace("-", "_")
        # A template names no charset; what is not ASCII is written in UTF-8.
        lines = [line.replace("charset=CHARSET", "charset=UTF-8") for line in lines]
        for name, value in wanted.items():
            line = self._own(f'"{name}: {value}\\n"')
            index = next((i for i, old in enumerate(lines) if old.startswith(f'"{name}:')), None)
            if index is None and header.texts["msgstr"].endswith("\n"):
                lines = [*lines, line]
            elif index is None:  # behind an unfinished line it would be a part of it
                continue
            else:
                lines[index] = line
        return lines

    def _own(self, line: str) -> str:
        """A line with the line end of the file."""
        return line + self._end.removesuffix("\n")


def _without_fuzzy(line: str) -> str:
    """A line of comments without the flag; "" if it has no other."""
    if not line.startswith("#,"):
        return line
    flags = [flag for flag in line[2:].rstrip().split(",") if flag.strip() != "fuzzy"]
    end = line[len(line.rstrip()) :]
    return "#," + ",".join(flags) + end if any(flag.strip() for flag in flags) else ""
