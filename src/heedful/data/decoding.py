"""Ids to text: the pieces of a vocabulary, whole texts, and token by token."""

import codecs
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tokenizers import Tokenizer as Backend

from heedful.data.tokenizer_training import SPACE, byte_pieces
from heedful.errors import UserError

Decode = Callable[[Sequence[Sequence[int]]], list[str]]

BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a piece of SentencePiece's byte fallback
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_EACH_BYTE = "heedful-each-byte"  # an error handler of `codecs`
_NEAR = 1_000  # characters


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
        for near in (text[:_NEAR], text):  # what is far away changes no token
            if offsets := self._backend.encode(near, add_special_tokens=False).offsets:
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


class TextDecoder:
    """Decodes the ids of one tokenizer.

    Wrong UTF-8 of bytes is decoded as U+FFFD: a wrong sequence by one, as Unicode recommends, and
    of byte pieces such as `<0xE4>` each byte by one, as SentencePiece does.

    Args:
        piece: the piece of an id.
        has_own_pieces: `piece` and not the backend has the ids (Marian).

    Attributes:
        errors: the error handler of `bytes.decode` that replaces wrong bytes.
    """

    def __init__(
        self,
        backend: Backend,
        spelling: Pieces,
        special_ids: frozenset[int],
        piece: Callable[[int], str],
        has_own_pieces: bool,
    ) -> None:
        self._backend = backend
        self._spelling = spelling
        self._special_ids = special_ids
        self._piece = piece
        self._has_own_pieces = has_own_pieces
        self.errors = _EACH_BYTE if spelling.has_byte_pieces else "replace"

    def texts(self, rows: list[list[int]], *, keep_specials: bool = False) -> list[str]:
        """The text of each row of ids, without special tokens, or with their names."""
        if keep_specials:
            return self._library_texts(rows)
        rows = [[token for token in row if token not in self._special_ids] for row in rows]
        texts = self._library_texts(rows)
        if not self._spelling.has_byte_pieces:
            return texts
        # The library replaces every byte of a run of byte pieces if one of them is wrong.
        return [
            self._text_by_bytes(row) if _REPLACEMENT in text else text
            for row, text in zip(rows, texts, strict=True)
        ]

    def added_bytes(self, last: int | None, rows: Sequence[Sequence[int]]) -> list[bytes]:
        """The bytes in UTF-8 that each of several rows of ids adds to the same text.

        A decoder only appends, and what a token adds depends on the token before it at most: on
        whether there is one (SentencePiece), or on the end of a word (GPT-1). So it is the
        difference of two short texts. Parts of characters are read off the pieces.

        Args:
            last: the token before the rows; None: they begin the text. Neither it nor those of the
                rows are skipped.
        """
        before = [] if last is None else [last]
        known, *texts = self._library_texts([before, *([*before, *row] for row in rows)])
        added: list[bytes] = []
        for row, text in zip(rows, texts, strict=True):
            raw = None
            if _REPLACEMENT in known or _REPLACEMENT in text:
                if len(row) > 1:
                    steps = zip([last, *row[:-1]], row, strict=True)
                    parts = [self.added_bytes(one, [[token]])[0] for one, token in steps]
                    added.append(b"".join(parts))
                    continue
                raw = self._spelling.raw_bytes(self._piece(row[0]))
            added.append(text[len(known) :].encode() if raw is None else raw)
        return added

    def skips(self, token: int) -> bool:
        """The token is in no text: it is special, or the net alone has it."""
        is_unknown = not self._has_own_pieces and self._backend.id_to_token(token) is None
        return is_unknown or token in self._special_ids

    def _text_by_bytes(self, row: list[int]) -> str:
        [data] = self.added_bytes(None, [[token for token in row if not self.skips(token)]])
        return data.decode(errors=self.errors)

    def _library_texts(self, rows: list[list[int]]) -> list[str]:
        if not self._has_own_pieces:
            try:
                return list(self._backend.decode_batch(rows, skip_special_tokens=False))
            except OverflowError:
                raise UserError("ids contain a number that is not a token id") from None
        decoder = self._backend.decoder
        return [str(decoder.decode([self._piece(i) for i in ids])) for ids in rows]


class GrowingText:
    """The text of tokens that come one by one; each is decoded with the one before it alone.

    Args:
        before: ids that the text continues, and that are not in it.

    Attributes:
        length: characters so far, without an incomplete one at the end.
    """

    def __init__(self, decoder: TextDecoder, before: Sequence[int] = ()) -> None:
        self._decoder = decoder
        shown = (token for token in reversed(before) if not decoder.skips(token))
        self._last = next(shown, None)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(decoder.errors)
        self.length = 0

    def bytes_of(self, tokens: Sequence[int]) -> list[bytes]:
        """The bytes that each of some tokens would add as the next one."""
        is_skipped = [*map(self._decoder.skips, tokens)]
        rows = [[token] for token, skipped in zip(tokens, is_skipped, strict=True) if not skipped]
        added = iter(self._decoder.added_bytes(self._last, rows))
        return [b"" if skipped else next(added) for skipped in is_skipped]

    def offset_of(self, data: bytes) -> int:
        """The index of the character that the first of the next bytes belongs to."""
        if not data:
            return self.length
        state = self._utf8.getstate()
        text = self._utf8.decode(data[:1])  # also U+FFFD of bytes that it does not continue
        is_complete = not self._utf8.getstate()[0]
        self._utf8.setstate(state)
        return self.length + max(0, len(text) - is_complete)

    def add(self, ids: Sequence[int]) -> str:
        """The characters that some tokens complete."""
        ids = [token for token in ids if not self._decoder.skips(token)]
        if not ids:
            return ""
        [data] = self._decoder.added_bytes(self._last, [ids])
        self._last = ids[-1]
        return self._counted(self._utf8.decode(data))

    def end(self) -> str:
        """An incomplete character at the end, as U+FFFD."""
        return self._counted(self._utf8.decode(b"", final=True))

    def _counted(self, text: str) -> str:
        self.length += len(text)
        return text


@dataclass(frozen=True, eq=False)
class TokenTexts:
    """The bytes (UTF-8) that each token adds to a text; none for special tokens.

    Attributes:
        first: at the beginning of a text, where most decoders drop a space.
        later: after other tokens.
    """

    first: list[bytes]
    later: list[bytes]

    @classmethod
    def read(
        cls, pieces: Sequence[bytes | None], specials: Iterable[int], decode: Decode
    ) -> "TokenTexts":
        """From the bytes of each token; None: they depend on the token before it (WordPiece).

        Args:
            decode: returns the texts of lists of ids.
        """
        special = set(specials)
        ids = [token for token in range(len(pieces)) if token not in special]
        first, later = ([b""] * len(pieces) for _ in range(2))
        alone = decode([[token] for token in ids])
        # The text of a pair begins with that of its first token, whichever follows.
        anchor, before = next(zip(ids, alone, strict=True), (0, ""))
        missing = [token for token in ids if pieces[token] is None]
        pairs = dict(zip(missing, decode([[anchor, token] for token in missing]), strict=True))
        for token, text in zip(ids, alone, strict=True):
            piece = pieces[token]
            later[token] = pairs[token][len(before) :].encode() if piece is None else piece
            # A part of a character is decoded as U+FFFD.
            first[token] = later[token] if _REPLACEMENT in text else text.encode()
        return cls(first, later)

    def containing(self, texts: Sequence[bytes], *, at_start: bool) -> list[int]:
        """The tokens that add one of some texts as a whole."""
        added = self.first if at_start else self.later
        return [token for token, text in enumerate(added) if any(whole in text for whole in texts)]

    def beginning_with(self, prefix: bytes) -> list[int]:
        """The tokens that add a text with this beginning after other tokens."""
        tokens, first = [], bisect_left(self._sorted, (prefix, -1))
        for text, token in self._sorted[first:]:
            if not text.startswith(prefix):
                break
            tokens.append(token)
        return tokens

    @cached_property
    def _sorted(self) -> list[tuple[bytes, int]]:
        return sorted((text, token) for token, text in enumerate(self.later) if text)


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    """U+FFFD for each wrong byte."""
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _each_byte)
