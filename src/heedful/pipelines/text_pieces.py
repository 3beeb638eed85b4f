"""The text of an output in pieces, while its tokens are decoded."""

from collections.abc import Callable, Sequence

from heedful.generation.stopping import cut


class TextPieces:
    """Text of tokens that later ones cannot change.

    Incomplete characters and possible beginnings of a stop text are held back. The pieces join to
    the final text if the tokenizer's decoder only appends, as those of heedful and of known models
    do. Where a decoder changes earlier text, the next piece begins with the first changed
    character.

    Args:
        decode: returns the text of ids.
        stop: texts before which an output ends; None: none.

    Attributes:
        ids: all tokens so far.
        text: of them, without the stop text and what follows it.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] | None = None
    ) -> None:
        self._decode = decode
        self._stop = stop or ()
        self._sent = ""
        self.ids: list[int] = []
        self.text = ""

    def add(self, ids: Sequence[int], ended: bool) -> str:
        """The new piece of text that later tokens cannot change; "" if no more text is final.

        Args:
            ended: no token follows.
        """
        self.ids += ids
        text = self._decode(self.ids)
        self.text = text = cut(text, self._stop) if self._stop else text
        final = text if ended else _final_part(text, self._stop)
        if self._sent.startswith(final):
            return ""
        pairs = enumerate(zip(self._sent, final, strict=False))
        changed = next((n for n, (old, new) in pairs if old != new), len(self._sent))
        self._sent = final
        return final[changed:]


def _final_part(text: str, stop: Sequence[str]) -> str:
    """The text without incomplete characters and possible beginnings of stop texts at its end."""
    text = text.rstrip("\N{REPLACEMENT CHARACTER}")
    longest = max((len(string) for string in stop), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-size:]) for string in stop):
            return text[:-size]
    return text
