"""Text with the names of special tokens, such as a rendered chat template, as token ids."""

import json
from functools import cached_property
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend


class Continuation(NamedTuple):
    """A text in the middle of another one.

    Attributes:
        ids: its token ids.
        ends: for each id the index in the text behind its last character.
    """

    ids: list[int]
    ends: list[int]


class Markup:
    """Encodes text in which names of special tokens are these tokens, for any tokenizer.

    Tokenizers that are trained here encode such names as ordinary text otherwise.

    Args:
        backend: a tokenizer of the `tokenizers` library; it is not changed.

    Attributes:
        added: ids of the tokens beside the vocabulary of the model, special or not, by name.
    """

    def __init__(self, backend: Backend) -> None:
        self._content = backend.to_str()
        self._backend = Backend.from_str(self._content)
        added = self._backend.get_added_tokens_decoder()
        self.added = {token.content: token_id for token_id, token in added.items()}

    def encode(self, text: str, after: str = "") -> list[int]:
        """The ids of a text in which names of special tokens are these tokens.

        Args:
            after: the name of the special token that the text follows; empty: none.
        """
        ids = self._backend.encode(after + text, add_special_tokens=False).ids
        return list(ids[bool(after) :])

    def encode_continuation(self, before: str, text: str) -> Continuation:
        """The ids of `text`, which follows `before`, whose ids are known and do not change.

        Many tokenizers put a space before a text, so that its first word is encoded as in a
        sentence. None is put here, unless there is one that the tokenizer does not encode
        otherwise: at the end of `before`, which the normalizer strips.
        """
        has_space = before[-1:].isspace() or text[:1].isspace()
        backend = self._backend if has_space and self._strips else self._inner
        encoding = backend.encode(text, add_special_tokens=False)
        return Continuation(list(encoding.ids), [end for _, end in encoding.offsets])

    @cached_property
    def _strips(self) -> bool:
        """True if the normalizer strips spaces at the end of a text."""
        normalizer = self._backend.normalizer
        return normalizer is not None and normalizer.normalize_str("a ") == "a"

    @cached_property
    def _inner(self) -> Backend:
        """The tokenizer without the space that it puts before a text."""
        content = json.loads(self._content)
        parts = {name: _without_space(content[name]) for name in ("normalizer", "pre_tokenizer")}
        unchanged = all(content[name] == part for name, part in parts.items())
        return self._backend if unchanged else Backend.from_str(json.dumps({**content, **parts}))


def _without_space(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer that puts no space before a text; None for no part."""
    if part is None or part["type"] == "Prepend":
        return None
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    if part["type"] == "ByteLevel":
        return {**part, "add_prefix_space": False}
    for key in ("normalizers", "pretokenizers"):
        if key in part:
            parts = [left for inner in part[key] if (left := _without_space(inner)) is not None]
            return {**part, key: parts} if parts else None
    return part
