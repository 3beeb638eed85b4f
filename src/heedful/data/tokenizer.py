"""Tokenizers, trained here (seven kinds) or imported: text to ids and back, saved as JSON."""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from operator import index
from os import PathLike
from typing import Any, Literal

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from heedful.data.decoding import Pieces, TextDecoder, TokenTexts
from heedful.data.special_tokens import Continuation, Markup, find_specials, read_template
from heedful.data.tokenizer_training import (
    SPECIALS,
    TrainingSettings,
    UnicodeForm,
    check_texts,
    text_errors,
    train_backend,
)
from heedful.data.words import WordCache
from heedful.errors import UserError, describe
from heedful.files import as_path, read_json, write_json

IMPORTED = "imported"  # the `kind` of imported tokenizers
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # roles of special tokens

# Names of original files that an imported tokenizer may contain (Marian's and M2M100's).
ORIGINAL_FILES = {"source.spm", "target.spm", "sentencepiece.bpe.model", "vocab.json"}
ORIGINAL_FILES |= {"target_vocab.json"}
_FORMAT = "heedful-tokenizer-3"


def train_tokenizer(
    texts: Iterable[str],
    *,
    kind: str = "bpe",
    vocab_size: int | None = None,
    or_fewer: bool = False,
    lowercase: bool = False,
    normalization: UnicodeForm | None = None,
    extra_specials: Sequence[str] = (),
    template: Literal["none", "bos", "eos", "both"] = "none",
    keep_whitespace: bool = False,
    num_workers: int = 1,
) -> "Tokenizer":
    """Train a tokenizer on text. It is deterministic: equal texts give equal tokenizers.

    Kinds: `bpe` (Sennrich et al. 2016), `unigram` (Kudo 2018), `wordpiece` (Schuster and Nakajima
    2012, with pieces selected by pair counts as for BERT), `byte_bpe` (Radford et al. 2019, on
    UTF-8 bytes), `word` (separated by whitespace), `char` (code points), `byte` (the 256
    bytes, untrained).

    Ids 0 to 3 are `<pad>`, `<s>`, `</s>`, `<unk>`, followed by the extra special tokens. Text is
    never encoded to special tokens except `<unk>`. All characters of the training text are in the
    vocabulary, except for `char` with a `vocab_size`. Text is normalized first. All kinds except
    `byte_bpe` and `byte` collapse whitespace to single spaces and strip the ends; U+2581, which
    represents the space inside pieces, counts as whitespace. These kinds also drop the invisible
    characters (`heedful.data.rows.INVISIBLE`) that are not in the training text.

    Args:
        texts: lines of text; for a vocabulary shared by two languages, the lines of both.
        vocab_size: number of ids, with special tokens. Required and exact for subword kinds; a
            maximum for `word` and `char` (`None`: no maximum); not allowed for `byte`.
        or_fewer: accept a smaller vocabulary if the text is too short for `vocab_size`.
        lowercase: lowercase text in the normalizer; decoding does not restore case.
        normalization: Unicode normal form; `None` means "nfkc", or "none" for `byte_bpe` and
            `byte`, which then restore every string exactly.
        extra_specials: names of further special tokens, such as "<sep>". "<mask>" is
            `specials.mask_id`; "<extra_0>", "<extra_1>", … are `specials.sentinel_ids`.
        template: special tokens around a text: BOS, EOS, or "both" as in BERT.
        keep_whitespace: preserve newlines and repeated spaces (U+2581 is decoded as a space, except
            by `char`) and add no space before a text. `byte_bpe` and `byte` always do; not
            possible for `word`.
        num_workers: most processes that count words; the tokenizer does not depend on it.

    Raises:
        UserError: an unknown kind or normalization; a vocabulary larger than the text allows, or
            too small for its characters; no text; a setting that the kind does not support.

    >>> tokenizer = train_tokenizer(["a dog runs", "a cat sleeps"], kind="bpe", vocab_size=24)
    >>> tokenizer.vocab_size, tokenizer.tokens(tokenizer.encode("a dog"))
    (24, ['▁a', '▁', 'do', 'g'])
    """
    lines = texts if isinstance(texts, str) or not isinstance(texts, Iterable) else list(texts)
    check_texts(lines)
    check_texts(extra_specials, "extra_specials")
    specials = SPECIALS + tuple(extra_specials)
    if type(num_workers) is not int or num_workers < 1:
        raise UserError(f"num_workers must be a whole number from 1, not {describe(num_workers)}")
    settings = TrainingSettings(
        kind, vocab_size, lowercase, normalization, specials, keep_whitespace, template, or_fewer
    )
    backend = train_backend(list(lines), settings, num_workers)
    roles = dict(zip(("pad", "bos", "eos", "unk"), SPECIALS, strict=True))
    if "<mask>" in settings.specials:
        roles["mask"] = "<mask>"
    if template == "both":
        roles |= {"cls": roles["bos"], "sep": roles["eos"]}
    return Tokenizer(backend, kind, roles, specials_are_text=True)


class Tokenizer:
    """Text to ids and back. Made by `train_tokenizer`, `read_tokenizer` or `Tokenizer.load`.

    For tokenizers trained here `decode(encode(text)) == normalize(text)` if all characters of the
    text (for kind `word`: words) are in the vocabulary.

    Args:
        backend: of the `tokenizers` library, with special tokens, the template as post-processor.
        roles: the special token of each role in `ROLES` that has one.
        specials_are_text: names of special tokens in a text are ordinary text, as of all here.
        piece_ids: ids by piece, if not those of `backend` (Marian, M2M100); others are unknown.
        files: original files of an imported tokenizer that `transformers` needs to load it.
        chat_template: the Jinja source of the chat template that its model was trained with.

    Attributes:
        pad_id: id for padding; 0 without a padding token (padding masks are made from lengths).
        unk_id: id of unknown pieces; -1 for a vocabulary without an unknown token.
        special_ids: ids of special tokens, which `decode` leaves out.
        prefix_ids, suffix_ids: special tokens of the template before and after a text.
        pair_middle_ids: special tokens between the texts of a pair; `None` if the template of a
            pair begins or ends differently than that of one text.

    >>> tokenizer = train_tokenizer(["a dog runs", "a cat sleeps"], kind="word")
    >>> tokenizer.encode("a dog sleeps"), tokenizer.decode([4, 6, 8])
    ([4, 6, 8], 'a dog sleeps')
    """

    def __init__(
        self,
        backend: Backend,
        kind: str,
        roles: Mapping[str, str],
        *,
        specials_are_text: bool = False,
        piece_ids: Mapping[str, int] | None = None,
        files: Mapping[str, bytes] | None = None,
        chat_template: str | None = None,
    ) -> None:
        backend.encode_special_tokens = specials_are_text
        self._backend = backend
        self.kind = kind
        self.roles = dict(roles)
        self.specials_are_text = specials_are_text
        self._piece_ids = piece_ids
        self._pieces = None if piece_ids is None else {i: piece for piece, i in piece_ids.items()}
        self.files = dict(files or {})
        assert chat_template is None or isinstance(chat_template, str), "chat_template is no text"
        self.chat_template = chat_template
        id_of = backend.token_to_id if piece_ids is None else piece_ids.get
        self.specials = find_specials(self.roles, id_of)
        self.pad_id = self.specials.pad_id or 0
        self.unk_id = -1 if self.specials.unk_id is None else self.specials.unk_id
        added = backend.get_added_tokens_decoder().values()
        names = [*self.roles.values(), *(token.content for token in added if token.special)]
        ids = (*map(id_of, names), *self.specials.sentinel_ids)
        self.special_ids = frozenset(i for i in ids if i is not None)
        self.prefix_ids, self.suffix_ids, self.pair_middle_ids = read_template(backend)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the arguments of the class: the backend alone would lose settings."""
        make = partial(
            Tokenizer,
            specials_are_text=self.specials_are_text,
            piece_ids=self._piece_ids,
            files=self.files,
            chat_template=self.chat_template,
        )
        return make, (self._backend, self.kind, self.roles)

    @cached_property
    def spelling(self) -> Pieces:
        """The spelling of its pieces, as text and in texts."""
        return Pieces(self._backend)

    @cached_property
    def decoder(self) -> TextDecoder:
        """The decoder of its ids."""
        return TextDecoder(
            self._backend, self.spelling, self.special_ids, self.piece, self.has_own_pieces
        )

    @cached_property
    def bos_id(self) -> int:
        """Id of the start token. Raises UserError without one."""
        return self._require(self.specials.bos_id, "start token (bos)")

    @cached_property
    def eos_id(self) -> int:
        """Id of the end token. Raises UserError without one."""
        return self._require(self.specials.eos_id, "end token (eos)")

    @cached_property
    def lowercases(self) -> bool:
        """True if the normalizer lowercases text."""
        return self.normalize("A") == "a"

    @cached_property
    def vocab_size(self) -> int:
        """The number of rows of an embedding, which is the highest id plus one."""
        vocab = self._backend.get_vocab() if self._piece_ids is None else self._piece_ids
        return max(vocab.values()) + 1

    def normalize(self, text: str) -> str:
        """The normalized text, which is the best that decoding can restore."""
        normalizer = self._backend.normalizer
        with text_errors([text]):
            return text if normalizer is None else str(normalizer.normalize_str(text))

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without the special tokens of the template."""
        with text_errors([text]):
            return self._ids(self._backend.encode(text, add_special_tokens=False))

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of `encode`, and for each id the span (start, end) of its characters in the text.

        That of each byte of a character, and of what NFKC makes of it, is the whole character.
        """
        with text_errors([text]):
            encoding = self._backend.encode(text, add_special_tokens=False)
        return self._ids(encoding), list(encoding.offsets)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """`encode` for each text; of tokenizers without a word cache, on all cores."""
        with text_errors(texts):
            encode = self._encode_whole if self._words is None else self._words.encode_batch
            return encode(texts)

    def encode_rows(self, texts: list[str]) -> Sequence[Sequence[int]]:
        """The ids of `encode_batch`, as arrays (`WordCache.encode_arrays`) if there is a cache."""
        if self._words is None:
            return self.encode_batch(texts)
        with text_errors(texts):
            return self._words.encode_arrays(texts)

    @cached_property
    def markup(self) -> Markup:
        """The encoding of rendered chat templates, without checks of the texts."""
        return Markup(self._backend)

    def encode_markup(self, text: str, after: str = "") -> list[int]:
        """See `Markup.encode`."""
        with text_errors([text]):
            return self.markup.encode(text, after)

    def encode_continuation(self, before: str, text: str) -> Continuation:
        """See `Markup.encode_continuation`."""
        with text_errors([text]):
            return self.markup.encode_continuation(before, text)

    def extended(self, names: Sequence[str], chat_template: str | None) -> "Tokenizer":
        """A copy with a chat template, and with special tokens behind the last id.

        Args:
            names: of the new special tokens; those that exist already have no effect.
        """
        backend = Backend.from_str(self._backend.to_str())
        backend.add_special_tokens(
            [AddedToken(name, special=True, normalized=False) for name in names]
        )
        return Tokenizer(
            backend,
            self.kind,
            self.roles,
            specials_are_text=self.specials_are_text,
            piece_ids=self._piece_ids,
            files=self.files,
            chat_template=chat_template,
        )

    def add_special_tokens(
        self, ids: Sequence[int], pair: Sequence[int] | None = None
    ) -> list[int]:
        """The ids of a text, or of a pair of texts, with the special tokens of the template.

        Raises UserError if the template does not support pairs.
        """
        if pair is None:
            return [*self.prefix_ids, *ids, *self.suffix_ids]
        if self.pair_middle_ids is None:
            raise UserError("this tokenizer does not support pairs of texts; give single texts")
        return [*self.prefix_ids, *ids, *self.pair_middle_ids, *pair, *self.suffix_ids]

    def encode_target(self, ids: Sequence[int]) -> list[int]:
        """The ids of a text as the target of a decoder: with special tokens, ending in EOS."""
        target = self.add_special_tokens(ids)
        return target if target[-1:] == [self.eos_id] else [*target, self.eos_id]

    def decode(self, ids: Sequence[int], *, keep_specials: bool = False) -> str:
        """The text of ids, without special tokens or with their names; invalid UTF-8 is U+FFFD."""
        return self.decode_batch([ids], keep_specials=keep_specials)[0]

    def decode_batch(
        self, batch: Sequence[Sequence[int]], *, keep_specials: bool = False
    ) -> list[str]:
        """`decode` for each sequence of ids."""
        try:
            rows = [list(map(index, ids)) for ids in batch]
        except TypeError:
            raise UserError(f"decode takes lists of token ids, not {describe(batch)}") from None
        return self.decoder.texts(rows, keep_specials=keep_specials)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """The piece of each id, for display.

        U+2581 is a space inside a piece; special tokens are shown by name. A byte-level piece that
        is not whole characters is shown as bytes, such as `<E4><BB>`.
        """
        return [
            self.piece(i) if i in self.special_ids else self.spelling.display(self.piece(i))
            for i in ids
        ]

    def token_bytes(self) -> list[bytes]:
        """The bytes of each token; for special tokens, those of their names.

        Raises UserError if the text of a token depends on its neighbors (WordPiece).
        """
        pieces = [self.piece(i) for i in range(self.vocab_size)]
        texts = [
            piece.encode() if i in self.special_ids else self.spelling.to_bytes(piece)
            for i, piece in enumerate(pieces)
        ]
        fixed = [text for text in texts if text is not None]
        if len(fixed) < len(texts):
            raise UserError(f"the text of a token of this {self.kind} tokenizer is not fixed")
        return fixed

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The bytes that each token adds to a decoded text."""
        pieces = [self.spelling.added_bytes(self.piece(i)) for i in range(self.vocab_size)]
        return TokenTexts.read(pieces, self.special_ids, self.decode_batch)

    def word_starts(self, ids: Sequence[int]) -> list[bool]:
        """For each token, True if it begins a word (used for whole-word masking).

        Words are separated by spaces; a space is part of the word after it. With pieces that mark
        the continuation or end of a word (WordPiece, GPT-1) words are those of the pre-tokenizer,
        and punctuation is separate. Each special token is a word.
        """
        return self.spelling.word_starts(
            [None if i in self.special_ids else self.piece(i) for i in ids]
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write the tokenizer to a JSON file.

        The key "tokenizer" holds the JSON of the `tokenizers` library, which refuses unknown keys.

        Raises:
            UserError: the file cannot be written.
        """
        write_json(as_path(path, "path"), self.content())

    def content(self) -> dict[str, Any]:
        """The tokenizer as JSON, as written by `save`."""
        content = {
            "format": _FORMAT,
            "kind": self.kind,
            "roles": self.roles,
            "specials_are_text": self.specials_are_text,
            "tokenizer": json.loads(self._backend.to_str()),
        }
        if self._piece_ids is not None:
            content["piece_ids"] = dict(self._piece_ids)
        if self.files:
            encoded = {name: base64.b64encode(data).decode() for name, data in self.files.items()}
            content["files"] = encoded
        if self.chat_template is not None:
            content["chat_template"] = self.chat_template
        return content

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Tokenizer":
        """Load a file of `save`.

        Raises:
            UserError: the file is missing, damaged, or was not written by `save`.
        """
        path = as_path(path, "path")
        content = read_json(path)
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise UserError(f"{path} is not a tokenizer written by heedful ({_FORMAT})")
        try:
            saved = content.get("files", {}).items()
            files = {name: base64.b64decode(text) for name, text in saved}
            for name in files.keys() - ORIGINAL_FILES:  # exports write these files: no other paths
                raise UserError(
                    f"{path} contains a file {name!r}, which no tokenizer has; do not use it"
                )
            return cls(
                Backend.from_str(json.dumps(content["tokenizer"])),
                content["kind"],
                content["roles"],
                specials_are_text=content["specials_are_text"],
                piece_ids=content.get("piece_ids"),
                files=files,
                chat_template=content.get("chat_template"),
            )
        except UserError:
            raise
        except Exception as error:  # the library raises plain `Exception`
            raise UserError(f"{path} is damaged: {error!r}; save the tokenizer again") from error

    @cached_property
    def _words(self) -> WordCache | None:
        """The cache for tokenizers that encode each word of a text separately."""
        if self.kind == "byte_bpe":
            return WordCache(self._encode_whole, "borders")
        is_collapsing = self.normalize(" a  b ") == "a b"
        if self.kind in ("bpe", "unigram", "wordpiece", "word") and is_collapsing:
            return WordCache(self._encode_whole, "spaces")
        return None

    def _encode_whole(self, texts: list[str]) -> list[list[int]]:
        # `encode_batch_fast` returns ids without pieces.
        encode = self._backend.encode_batch if self._piece_ids else self._backend.encode_batch_fast
        return [self._ids(encoding) for encoding in encode(texts, add_special_tokens=False)]

    def _ids(self, encoding: Any) -> list[int]:
        if self._piece_ids is None:
            return list(encoding.ids)
        return [self._piece_ids.get(piece, self.unk_id) for piece in encoding.tokens]

    @property
    def has_own_pieces(self) -> bool:
        """True if ids differ from those of the `tokenizers` library, but not pieces (Marian)."""
        return self._pieces is not None

    def piece(self, i: int) -> str:
        """The piece of an id; `<id N>` for ids beyond the vocabulary, as some models have (T5)."""
        piece = self._backend.id_to_token(i) if self._pieces is None else self._pieces.get(i)
        return f"<id {i}>" if piece is None else str(piece)

    def _require(self, special_id: int | None, name: str) -> int:
        if special_id is None:
            raise UserError(f"this {self.kind} tokenizer has no {name}; use one that has it")
        return special_id
