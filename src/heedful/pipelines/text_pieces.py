"""The text of an output in pieces, while its tokens are decoded."""

from collections.abc import Sequence

from heedful.data.decoding import GrowingText, TextDecoder
from heedful.generation.outputs import check_stop_strings, first_stop


class TextPieces:
    """Text of tokens that later ones cannot change; the pieces join to the final text.

    Incomplete characters and possible beginnings of a stop text are held back.

    Args:
        stop: texts before which an output ends; None: none.
        before: ids that the text continues.

    Attributes:
        ids: all tokens so far.
    """

    def __init__(
        self, decoder: TextDecoder, stop: Sequence[str] | None = None, before: Sequence[int] = ()
    ) -> None:
        self._growing = GrowingText(decoder, before)
        self._stop = stop or ()
        check_stop_strings(self._stop)
        self._held = ""
        self._is_cut = False
        self._pieces: list[str] = []
        self.ids: list[int] = []

    @property
    def text(self) -> str:
        """The pieces so far."""
        return "".join(self._pieces)

    def add(self, ids: Sequence[int], ended: bool) -> str:
        """The new piece of text that later tokens cannot change; "" if no more text is final.

        Args:
            ended: no token follows.
        """
        self.ids += ids
        new = self._growing.add(ids) + (self._growing.end() if ended else "")
        if self._is_cut:
            return ""
        self._held += new
        end = first_stop(self._held, self._stop)
        begun = len(self._held) if ended else _first_beginning(self._held, self._stop)
        self._is_cut = end is not None and end <= begun
        final = min(begun, len(self._held) if end is None else end)
        piece, self._held = self._held[:final], self._held[final:]
        if piece:
            self._pieces.append(piece)
        return piece


def _first_beginning(text: str, stop: Sequence[str]) -> int:
    """The index from which the rest of a text is the beginning of a stop text, or its length."""
    longest = max(map(len, stop), default=0)
    for start in range(max(0, len(text) - longest + 1), len(text)):
        if any(string.startswith(text[start:]) for string in stop):
            return start
    return len(text)
