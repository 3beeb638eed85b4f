"""The order of the tags of a translation with masks, and the blanks beside them."""

import re
from collections.abc import Sequence

from heedful.fidelity.masking import Masked

_NAME = re.compile(r"<(/?)([\w:.-]+)")


class TagOrder:
    """The tags of a source that come in pairs, which are nested in its translations too.

    A source whose own tags are not nested has no pairs here.
    """

    def __init__(self, source: Masked) -> None:
        names = {mask: _NAME.match(piece) for mask, piece in source.pieces.items()}
        opened = {match[2] for match in names.values() if match and not match[1]}
        closed = {match[2] for match in names.values() if match and match[1]}
        self._names = {
            mask: (match[2], bool(match[1]))
            for mask, match in names.items()
            if match and match[2] in opened & closed and not source.pieces[mask].endswith("/>")
        }
        self._tags = [character for character in source.text if character in self._names]
        if not self._is_nested(self._tags):
            self._names, self._tags = {}, []
        beside = {
            mask
            for mask, (_, closes) in self._names.items()
            if re.search(rf"\s{mask}" if closes else rf"{mask}\s", source.text)
        }
        # Tags that have no blank between them and the text of their pair.
        self._opening = self._class_of(closes=False, without=beside)
        self._closing = self._class_of(closes=True, without=beside)

    def _class_of(self, *, closes: bool, without: set[str]) -> str:
        masks = [mask for mask, (_, own) in self._names.items() if own == closes]
        return "".join(mask for mask in masks if mask not in without)

    def _is_nested(self, tags: Sequence[str]) -> bool:
        opened: list[str] = []
        for tag in tags:
            name, closes = self._names[tag]
            if not closes:
                opened.append(name)
            elif not opened or opened.pop() != name:
                return False
        return not opened

    def is_kept(self, output: str) -> bool:
        """True for an output with masks whose pairs of tags are nested."""
        return self._is_nested([mask for mask in output if mask in self._names])

    def restored(self, output: str) -> tuple[str, bool]:
        """An output with all tags of its source, in an order in which pairs are nested, and without
        blanks that the source does not have; and True if the order was another one."""
        if not self._names:
            return output, False
        is_kept = self.is_kept(output)
        if not is_kept:
            rest = iter(self._tags)
            output = "".join(next(rest, "") if c in self._names else c for c in output)
        if self._opening:
            output = re.sub(rf"[{self._opening}]+\s+", _moved, output)
        if self._closing:
            output = re.sub(rf"(?<!\s)\s+[{self._closing}]+", _moved, output)
        return output, not is_kept


def _moved(match: re.Match[str]) -> str:
    """Tags without the blanks between them and the text of their pair; a blank is on their other
    side where a word is."""
    text, (start, end) = match.string, match.span()
    tags = match[0].strip()
    if match[0][0].isspace():
        return f"{tags} " if text[end : end + 1].isalnum() else tags
    return f" {tags}" if text[max(0, start - 1) : start].isalnum() else tags
