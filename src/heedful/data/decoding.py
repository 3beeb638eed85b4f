"""Ids to text: whole, or token by token, with the bytes that each of them adds."""

import codecs
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer as Backend

from heedful.data.pieces import Pieces
from heedful.errors import UserError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_EACH_BYTE = "heedful-each-byte"  # an error handler of `codecs`


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


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    """U+FFFD for each wrong byte."""
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _each_byte)
