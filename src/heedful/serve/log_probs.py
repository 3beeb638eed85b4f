"""Log-probabilities of an output's tokens in the forms of OpenAI's API."""

from collections.abc import Sequence
from typing import Any

from heedful.data.decoding import GrowingText
from heedful.data.tokenizer import Tokenizer

_LEAST = -9999.0  # in place of -inf, which JSON lacks


class TokenLog:
    """The tokens of an output, each of which is read once, in their order.

    The text of a token is what it adds to the text of the answer, and its bytes those of this text.
    So they join to the answer; a special token adds nothing, and has the text of its name.

    Args:
        echoed, echoed_ids: a prompt that the answer begins with, and its ids; else empty.
    """

    def __init__(
        self, tokenizer: Tokenizer, echoed: str = "", echoed_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._echoed_ids = echoed_ids
        self._echoed = echoed
        self._echoed_offsets = _echoed_offsets(tokenizer, echoed, echoed_ids)
        self._num_read = 0
        self._growing = GrowingText(tokenizer.decoder)

    def completion(
        self,
        ids: Sequence[int],
        values: Sequence[float | None],
        tops: Sequence[list[tuple[int, float]] | None],
    ) -> dict[str, list[Any]]:
        """The next tokens, as completions have them; offsets are in the text of all tokens.

        The most probable tokens are with the token itself, which may be a further one.
        """
        columns: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token, value, top in zip(ids, values, tops, strict=True):
            texts, offset = self._read(token, top or [])
            scores = None
            if value is not None and top is not None:
                scores = {texts[other][0]: _finite(score) for other, score in top}
                scores.setdefault(texts[token][0], _finite(value))
            columns["tokens"].append(texts[token][0])
            columns["token_logprobs"].append(None if value is None else _finite(value))
            columns["top_logprobs"].append(scores)
            columns["text_offset"].append(offset)
        return columns

    def chat(
        self,
        ids: Sequence[int],
        values: Sequence[float | None],
        tops: Sequence[list[tuple[int, float]] | None],
    ) -> dict[str, Any]:
        """The next tokens, as chat completions have them."""
        content = []
        for token, value, top in zip(ids, values, tops, strict=True):
            texts, _ = self._read(token, top or [])
            entries = [
                {"token": texts[one][0], "logprob": _finite(score), "bytes": [*texts[one][1]]}
                for one, score in [(token, value or 0.0), *(top or [])]
            ]
            content.append({**entries[0], "top_logprobs": entries[1:]})
        return {"content": content, "refusal": None}

    def _read(
        self, token: int, top: Sequence[tuple[int, float]]
    ) -> tuple[dict[int, tuple[str, bytes]], int]:
        """The text and the bytes of the next token and of those in its place; and its offset."""
        if self._num_read == len(self._echoed_ids):
            self._growing = GrowingText(self._tokenizer.decoder, self._echoed_ids)
        tokens = list(dict.fromkeys([token, *(other for other, _ in top)]))
        added = self._growing.bytes_of(tokens)
        offset = self._growing.offset_of(added[0])
        self._growing.add([token])
        if self._num_read < len(self._echoed_ids):
            if self._echoed_offsets is not None:
                offset = self._echoed_offsets[self._num_read]
        else:
            offset += len(self._echoed)
        self._num_read += 1
        return self._texts(tokens, added), offset

    def _texts(self, tokens: Sequence[int], added: Sequence[bytes]) -> dict[int, tuple[str, bytes]]:
        """The text and the bytes of tokens that could follow the same text; no texts are equal.

        Of tokens that add the same (a letter, and the byte of the letter), the further ones have
        the names of their pieces.
        """
        texts: dict[int, tuple[str, bytes]] = {}
        taken: set[str] = set()
        for token, data in zip(tokens, added, strict=True):
            piece = self._tokenizer.piece(token)
            names = (self._text(token, data), piece, f"<id {token}>", f"{piece}<id {token}>")
            name = next(name for name in names if name not in taken)
            taken.add(name)
            texts[token] = name, data
        return texts

    def _text(self, token: int, data: bytes) -> str:
        """The text that a token adds; for a part of a character `bytes:` and its bytes (OpenAI)."""
        if self._tokenizer.decoder.skips(token):
            return self._tokenizer.piece(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _echoed_offsets(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> Sequence[int] | None:
    """The offset of each token of an echoed prompt; None: those in the text of the tokens.

    They differ where the tokenizer normalizes a text, or does not know a part of it.
    """
    if tokenizer.decode(ids) == text:
        return None
    encoded, spans = tokenizer.encode_spans(text)
    first = len(ids) - len(encoded)
    if [*ids[max(0, first) :]] != encoded:
        return [0] * len(ids)
    return [*[0] * first, *(start for start, _ in spans)]


def _finite(value: float) -> float:
    return max(value, _LEAST)
