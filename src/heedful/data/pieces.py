"""What a tokenizer's single pieces say: how to show them, and which of them begin a word."""

import re
from collections.abc import Sequence

from tokenizers import Tokenizer as Backend

from heedful.data.tokenizer_training import SPACE, byte_pieces

BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte of a character that the vocabulary lacks


class Pieces:
    """How one tokenizer writes its pieces: by bytes or not, with marks for the words or without."""

    def __init__(self, backend: Backend) -> None:
        cutter, model = backend.pre_tokenizer, backend.model
        of_bytes = cutter is not None and b'"ByteLevel"' in cutter.__getstate__()
        self._bytes = {p: byte for byte, p in enumerate(byte_pieces())} if of_bytes else {}
        self._continues = getattr(model, "continuing_subword_prefix", None)
        self._ends = getattr(model, "end_of_word_suffix", None)

    def display(self, piece: str) -> str:
        """As text, with U+2581 for a space; bytes that are not whole characters as `<E4><BB>`."""
        text = self._of_bytes(piece)
        if text is None:
            return piece
        try:
            return text.decode().replace(" ", SPACE)
        except UnicodeDecodeError:
            return "".join(f"<{byte:02X}>" for byte in text)

    def word_starts(self, pieces: Sequence[str | None]) -> list[bool]:
        """Which pieces begin a word, as `Tokenizer.word_starts` says; `None` is a special."""
        starts, begins = [], True
        for piece in pieces:
            if piece is None:
                starts.append(True)
                begins = True
            elif self._continues:
                starts.append(begins or not piece.startswith(self._continues))
                begins = False
            elif self._ends:
                starts.append(begins)
                begins = piece.endswith(self._ends)
            else:
                text = self._plain(piece)
                starts.append(begins or text[:1].isspace())
                # A plain space belongs to the word after it; a newline to none.
                begins = text[-1:].isspace() and text[-1:] != " "
        return starts

    def _plain(self, piece: str) -> str:
        """The piece as text; a byte that is no character of ASCII is as good as any letter."""
        text = self._of_bytes(piece)
        if text is None and (byte := BYTE.fullmatch(piece)):
            text = bytes.fromhex(byte[1])
        return piece.replace(SPACE, " ") if text is None else text.decode("ascii", "replace")

    def _of_bytes(self, piece: str) -> bytes | None:
        """The bytes that the piece is written for, if it is written by bytes."""
        if not self._bytes or not all(c in self._bytes for c in piece):
            return None
        return bytes(self._bytes[c] for c in piece)
