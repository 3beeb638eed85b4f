"""Tokens of a vocabulary as text: how to display them, and which of them begin a word."""

import re
from collections.abc import Sequence

from tokenizers import Tokenizer as Backend

from heedful.data.tokenizer_training import SPACE, byte_pieces

_NEAR = 1_000  # characters
BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a piece of SentencePiece's byte fallback


class Pieces:
    """The spelling of a tokenizer's pieces: byte-level or not, and how it marks words.

    Attributes:
        has_byte_pieces: pieces such as `<0x41>` are decoded as a byte.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        pre_tokenizer, model = backend.pre_tokenizer, backend.model
        is_bytes = pre_tokenizer is not None and b'"ByteLevel"' in pre_tokenizer.__getstate__()
        self._bytes = {p: byte for byte, p in enumerate(byte_pieces())} if is_bytes else {}
        self._continues = getattr(model, "continuing_subword_prefix", None)
        self._ends = getattr(model, "end_of_word_suffix", None)
        decoder = backend.decoder
        self.has_byte_pieces = decoder is not None and b'"ByteFallback"' in decoder.__getstate__()

    def first_end(self, text: str) -> int:
        """The index in a text at which its first token ends; without tokens, the text's length.

        A character of which the token is a part of the bytes counts as a whole.
        """
        for part in (text[:_NEAR], text):  # what is far away changes no token
            if offsets := self._backend.encode(part, add_special_tokens=False).offsets:
                return int(offsets[0][1])
        return len(text)

    def display(self, piece: str) -> str:
        """The piece as text, with U+2581 for a space; incomplete characters as `<E4><BB>`."""
        text = self._to_bytes(piece)
        if text is None:
            return piece
        try:
            return text.decode().replace(" ", SPACE)
        except UnicodeDecodeError:
            return "".join(f"<{byte:02X}>" for byte in text)

    def word_starts(self, pieces: Sequence[str | None]) -> list[bool]:
        """For each piece, True if it begins a word (`Tokenizer.word_starts`).

        `None` is a special token.
        """
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
                # A space is part of the word after it; a newline is part of no word.
                begins = text[-1:].isspace() and text[-1:] != " "
        return starts

    def to_bytes(self, piece: str) -> bytes | None:
        """The bytes that the piece adds to a text; None if they depend on the pieces beside it."""
        if self._continues or self._ends:
            return None
        if byte := BYTE.fullmatch(piece):
            return bytes.fromhex(byte[1])
        text = self._to_bytes(piece)
        return piece.replace(SPACE, " ").encode() if text is None else text

    def raw_bytes(self, piece: str) -> bytes | None:
        """The bytes of a piece that may be a part of a character; None for other pieces."""
        if self.has_byte_pieces and (byte := BYTE.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        return self._to_bytes(piece)

    def added_bytes(self, piece: str) -> bytes | None:
        """`to_bytes`, and for pieces that mark the end of a word (GPT-1) their text and a space."""
        return piece.replace(self._ends, " ").encode() if self._ends else self.to_bytes(piece)

    def _plain(self, piece: str) -> str:
        """The piece as text, with U+FFFD, which is no whitespace, for each byte beyond ASCII."""
        text = self._to_bytes(piece)
        if text is None and (byte := BYTE.fullmatch(piece)):
            text = bytes.fromhex(byte[1])
        return piece.replace(SPACE, " ") if text is None else text.decode("ascii", "replace")

    def _to_bytes(self, piece: str) -> bytes | None:
        """The bytes of a byte-level piece; None for other pieces."""
        if not self._bytes or not all(c in self._bytes for c in piece):
            return None
        return bytes(self._bytes[c] for c in piece)
