"""Special tokens of a tokenizer: their ids by role, around a text, before it, and named in it."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import Tokenizer as Backend
from tokenizers import models

from heedful.errors import UserError

if TYPE_CHECKING:
    from heedful.data.tokenizer import Tokenizer

# `__de__` of M2M100, `deu_Latn` of NLLB, `de_DE` of mBART-50.
_LANGUAGE_TOKEN = re.compile(r"__([a-z]{2,3})__|([a-z]{3}_[A-Z][a-z]{3})|([a-z]{2}_[A-Z]{2})")


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of special tokens by role; `None` where a tokenizer has none.

    `sentinel_ids` replace masked spans, in order (T5's `<extra_id_0>`, `<extra_id_1>`, …).
    `cls_id` and `sep_id` are BERT's first token and separator.
    """

    pad_id: int | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    mask_id: int | None = None
    sentinel_ids: tuple[int, ...] = ()
    cls_id: int | None = None
    sep_id: int | None = None


def find_specials(roles: Mapping[str, str], id_of: Callable[[str], int | None]) -> SpecialTokens:
    """The special tokens of a tokenizer, by the names of its roles."""
    ids = {f"{role}_id": id_of(name) for role, name in roles.items()}
    if ids.get("unk_id") in (ids.get("bos_id"), ids.get("eos_id")):
        ids["unk_id"] = None  # GPT-2 uses one token for all roles; its bytes are never unknown
    sentinels = [_numbered(name, id_of) for name in ("<extra_id_{}>", "<extra_{}>")]
    return SpecialTokens(**ids, sentinel_ids=sentinels[0] or sentinels[1])


def read_template(
    backend: Backend,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]:
    """Special tokens before, after and between texts; None for between if pairs differ otherwise.

    They are read off the result of post-processing a text and a pair of texts.
    """
    text = Backend(models.WordLevel({"a": 0}, unk_token="a")).encode("a")

    found: list[list[tuple[int, ...]]] = []  # of a text, and of a pair
    for second in (None, text):
        encoding = backend.post_process(text, second, add_special_tokens=True)
        groups: list[tuple[int, ...]] = [()]
        for i, sequence in zip(encoding.ids, encoding.sequence_ids, strict=True):
            groups = [*groups, ()] if sequence is not None else [*groups[:-1], (*groups[-1], i)]
        found.append(groups)
    (prefix, suffix), (pair_prefix, middle, pair_suffix) = found
    fits = (pair_prefix, pair_suffix) == (prefix, suffix)
    return prefix, suffix, middle if fits else None


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
        names = ("normalizer", "pre_tokenizer")
        steps = {name: _without_space(content[name]) for name in names}
        unchanged = all(content[name] == step for name, step in steps.items())
        return self._backend if unchanged else Backend.from_str(json.dumps({**content, **steps}))


def tag_id(tokenizer: "Tokenizer", tag: str) -> int:
    """The id of a tag, a single token put before a text, such as `<2de>` for its output's language.

    It is a special token, or the one token that its text is.

    Raises:
        UserError: the tokenizer splits the tag, or does not know it.
    """
    special = {tokenizer.piece(i): i for i in tokenizer.special_ids}
    if tag in special:
        return special[tag]
    ids = tokenizer.encode(tag)
    if len(ids) == 1 and ids[0] != tokenizer.unk_id:
        return ids[0]
    pieces = " ".join(tokenizer.tokens(ids))
    raise UserError(
        f"the tokenizer has no token {tag}, which it splits ({pieces}); use a tag that it has, or "
        "train a tokenizer with these corpora"
    )


def language_tokens(tokenizer: "Tokenizer") -> dict[str, str]:
    """The token of each language that a tokenizer has one for, by the code that is in the token."""
    return language_names(map(tokenizer.piece, sorted(tokenizer.special_ids)))


def language_names(specials: Iterable[str]) -> dict[str, str]:
    """The tokens of languages among special tokens, by the code of the language."""
    return {
        next(filter(None, match.groups())): token
        for token in specials
        if (match := _LANGUAGE_TOKEN.fullmatch(token))
    }


def allow_in_texts(content: dict[str, Any], tags: Collection[str]) -> dict[str, Any]:
    """The content of a `tokenizer.json` for other programs, where tags are written in texts.

    There they are no special tokens, which such a tokenizer may split, and the space after a tag
    is not part of the text.
    """
    added = [
        token | {"special": False, "rstrip": True} if token["content"] in tags else token
        for token in content["added_tokens"]
    ]
    return {**content, "added_tokens": added}


def _numbered(name: str, id_of: Callable[[str], int | None]) -> tuple[int, ...]:
    ids: list[int] = []
    while (i := id_of(name.format(len(ids)))) is not None:
        ids.append(i)
    return tuple(ids)


def _without_space(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer that puts no space before a text; None for none."""
    if step is None or step["type"] == "Prepend":
        return None
    if step["type"] == "Metaspace":
        return {**step, "prepend_scheme": "never"}
    if step["type"] == "ByteLevel":
        return {**step, "add_prefix_space": False}
    for key in ("normalizers", "pretokenizers"):
        if key in step:
            steps = [left for inner in step[key] if (left := _without_space(inner)) is not None]
            return {**step, key: steps} if steps else None
    return step
