"""Tokenizers: text to ids and back, of seven kinds trained here or imported, each one JSON file."""

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tokenizers import Encoding, models
from tokenizers import Tokenizer as Backend

from heedful.data.pieces import Pieces
from heedful.data.tokenizer_training import SPECIALS, Normalization, Plan, train_backend
from heedful.errors import UserError
from heedful.files import read_json, write_json

IMPORTED = "imported"  # the kind of a tokenizer that was not trained here

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # what a special may be

# What a tokenizer may keep of the directory that it comes from: Marian's.
KEPT_FILES = frozenset(("source.spm", "target.spm", "vocab.json", "target_vocab.json"))

_FORMAT = "heedful-tokenizer-3"


@dataclass(frozen=True)
class Specials:
    """The ids with a meaning of their own; `None` where a tokenizer lacks one.

    `sentinel_ids` stand for cut-out spans, first to last (T5's `<extra_id_0>` and on). `cls_id` and
    `sep_id` are what BERT opens and divides its input with.
    """

    pad_id: int | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    mask_id: int | None = None
    sentinel_ids: tuple[int, ...] = ()
    cls_id: int | None = None
    sep_id: int | None = None


def train_tokenizer(
    texts: Iterable[str],
    *,
    kind: str = "bpe",
    vocab_size: int | None = None,
    or_fewer: bool = False,
    lowercase: bool = False,
    normalization: Normalization | None = None,
    extra_specials: Sequence[str] = (),
    template: Literal["none", "bos", "eos", "both"] = "none",
    keep_whitespace: bool = False,
) -> "Tokenizer":
    """Learn a tokenizer from raw text. The same text always gives the same tokenizer.

    Kinds: `bpe` (Sennrich et al. 2016), `unigram` (Kudo 2018), `wordpiece` (Schuster and Nakajima
    2012, pieces chosen by pair counts as in BERT's), `byte_bpe` (Radford et al. 2019, over UTF-8
    bytes), `word` (between spaces), `char` (code points), `byte` (the 256 bytes, nothing learnt).

    Ids 0 to 3 are `<pad>`, `<s>`, `</s>`, `<unk>`, then the extra ones; no text is ever encoded to
    any of them but `<unk>`. Every character of the training text is kept, whatever its frequency,
    by all kinds but a capped `char`. Text is normalised before anything else. For all kinds but the
    two of bytes a run of whitespace becomes one space, and none is left at the ends; U+2581, which
    stands for the space inside pieces, counts as whitespace.

    Args:
        texts: lines of text; join both sides of a corpus here for one shared vocabulary.
        vocab_size: how many ids, specials counted. Needed for the subword kinds, where it is met
            exactly; for `word` and `char` a cap, `None` for no cap; not for `byte`.
        or_fewer: take what a little text gives where that is fewer.
        lowercase: in the normaliser, so decoding cannot bring capitals back.
        normalization: Unicode normal form; `None` stands for "nfkc", and for "none" with the kinds
            of bytes, which then give every string back as it was.
        extra_specials: names for the ids from 4 on, such as "<sep>". "<mask>" becomes
            `specials.mask_id`, and "<extra_0>", "<extra_1>" … in their order `sentinel_ids`.
        template: which of `<s>` and `</s>` stand around a text; "both" is BERT's form.
        keep_whitespace: keep every newline and run of spaces, so that decoding gives them back
            (U+2581 as a space, but for `char`); then no space is put before a text either. The
            kinds of bytes always do, `word` never can.

    Raises:
        UserError: an unknown kind or normalisation; a vocabulary larger than the text gives, or
            too small for its characters; no text; a setting that the kind cannot use.
    """
    specials = SPECIALS + tuple(extra_specials)
    plan = Plan(
        kind, vocab_size, lowercase, normalization, specials, keep_whitespace, template, or_fewer
    )
    backend = train_backend(list(texts), plan)
    roles = dict(zip(("pad", "bos", "eos", "unk"), SPECIALS, strict=True))
    if "<mask>" in plan.specials:
        roles["mask"] = "<mask>"
    if template == "both":
        roles |= {"cls": roles["bos"], "sep": roles["eos"]}
    return Tokenizer(backend, kind, roles, specials_are_text=True)


class Tokenizer:
    """Text to ids and back. Made by `train_tokenizer`, `read_tokenizer` or `Tokenizer.load`.

    For those trained here `decode(encode(text)) == normalize(text)` for every text whose characters
    (for kind `word`: words) are known, which those of the training text are.

    Args:
        backend: its special tokens are what decoding leaves out, and its post-processor says what
            the model expects around a text and between the two of a pair.
        roles: the special of each of `ROLES` that there is.
        specials_are_text: whether a special's name in a text is text like any other, as it is for
            those trained here.
        piece_ids: ids by piece where they are not the backend's own (Marian's); a piece that it
            lacks is unknown.
        files: files of the directory that it was imported from, kept because only they say to
            `transformers` what this tokenizer does.

    Attributes:
        special_ids: those that decoding leaves out.
        prefix_ids, suffix_ids: what the model expects before and after a text.
        pair_middle_ids: what it expects between the two texts of a pair; `None` where a pair does
            not begin and end as one text does.
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
    ) -> None:
        backend.encode_special_tokens = specials_are_text
        self._backend = backend
        self.kind = kind
        self.roles = dict(roles)
        self.specials_are_text = specials_are_text
        self._piece_ids = piece_ids
        self._pieces = None if piece_ids is None else {i: piece for piece, i in piece_ids.items()}
        self.files = dict(files or {})
        self._spelling = Pieces(backend)
        id_of = backend.token_to_id if piece_ids is None else piece_ids.get
        self.specials = _specials(self.roles, id_of)
        added = backend.get_added_tokens_decoder().values()
        names = [*self.roles.values(), *(token.content for token in added if token.special)]
        found = (*map(id_of, names), *self.specials.sentinel_ids)
        self.special_ids = frozenset(i for i in found if i is not None)
        self.prefix_ids, self.suffix_ids, self.pair_middle_ids = _template(backend)

    @property
    def pad_id(self) -> int:
        """The id that fills a batch up; 0 where there is none, since lengths tell the padding."""
        return self.specials.pad_id or 0

    @property
    def bos_id(self) -> int:
        """The start mark. Raises UserError where there is none."""
        return self._needed(self.specials.bos_id, "start (bos)")

    @property
    def eos_id(self) -> int:
        """The end mark. Raises UserError where there is none."""
        return self._needed(self.specials.eos_id, "end (eos)")

    @property
    def unk_id(self) -> int:
        """What stands for anything unknown; -1, which no text gives, where nothing is unknown."""
        return -1 if self.specials.unk_id is None else self.specials.unk_id

    @cached_property
    def lowercases(self) -> bool:
        """Whether it makes capitals small, so that a model of it writes none."""
        return self.normalize("A") == "a"

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id: how many rows an embedding needs, specials counted."""
        vocab = self._backend.get_vocab() if self._piece_ids is None else self._piece_ids
        return max(vocab.values()) + 1

    def normalize(self, text: str) -> str:
        """The text as the model gets to see it: what decoding can give back at best."""
        normalizer = self._backend.normalizer
        with _of_characters():
            return text if normalizer is None else str(normalizer.normalize_str(text))

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without what the template adds. Empty text gives no ids."""
        with _of_characters():
            return self._ids(self._backend.encode(text, add_special_tokens=False))

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """`encode` for each text, on all cores."""
        # The fast way leaves the pieces out.
        fast = self._piece_ids is None
        encode = self._backend.encode_batch_fast if fast else self._backend.encode_batch
        with _of_characters():
            return [self._ids(each) for each in encode(texts, add_special_tokens=False)]

    def add_special_tokens(
        self, ids: Sequence[int], pair: Sequence[int] | None = None
    ) -> list[int]:
        """The ids of a text, or of a pair of texts, with what the model expects around them.

        Raises UserError where the tokenizer has no form for a pair.
        """
        if pair is None:
            return [*self.prefix_ids, *ids, *self.suffix_ids]
        if self.pair_middle_ids is None:
            raise UserError("this tokenizer has no form for a pair of texts; give them one by one")
        return [*self.prefix_ids, *ids, *self.pair_middle_ids, *pair, *self.suffix_ids]

    def encode_target(self, ids: Sequence[int]) -> list[int]:
        """The ids of a text as a decoder learns to write it: with special tokens, ending in EOS."""
        whole = self.add_special_tokens(ids)
        return whole if whole[-1:] == [self.eos_id] else [*whole, self.eos_id]

    def decode(self, ids: Sequence[int], *, keep_specials: bool = False) -> str:
        """The text of some ids; the specials are left out, or written by their names.

        For the kinds of bytes, bytes that are not UTF-8 become U+FFFD.
        """
        return self.decode_batch([ids], keep_specials=keep_specials)[0]

    def decode_batch(
        self, batch: Sequence[Sequence[int]], *, keep_specials: bool = False
    ) -> list[str]:
        """`decode` for each sequence of ids."""
        left_out = frozenset() if keep_specials else self.special_ids
        kept = [[i for i in ids if i not in left_out] for ids in batch]
        if self._pieces is None:
            try:
                return list(self._backend.decode_batch(kept, skip_special_tokens=False))
            except OverflowError:
                raise UserError("ids hold a number that is no token's") from None
        decoder = self._backend.decoder
        return [str(decoder.decode([self.piece(i) for i in ids])) for ids in kept]

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """The piece of each id, for display.

        U+2581 marks a space that belongs to a piece, and specials have their names. For the kinds
        of bytes a piece that is not whole characters is shown as bytes, such as `<E4><BB>`.
        """
        return [
            self.piece(i) if i in self.special_ids else self._spelling.display(self.piece(i))
            for i in ids
        ]

    def word_starts(self, ids: Sequence[int]) -> list[bool]:
        """Which tokens begin a word, so that whole words can be masked.

        A word reaches to the next space, which belongs to the word after it; with pieces that say
        whether they continue or end a word (WordPiece, GPT-1's) it is the word of the vocabulary,
        where punctuation stands alone. A special is a word of its own.
        """
        return self._spelling.word_starts(
            [None if i in self.special_ids else self.piece(i) for i in ids]
        )

    def save(self, path: Path) -> None:
        """Write one JSON file: all that is ours, and under "tokenizer" the library's own form.

        Wrapped, because that library refuses a file with keys that it does not know.

        Raises:
            UserError: the file cannot be written.
        """
        write_json(path, self.content())

    def content(self) -> dict[str, Any]:
        """What `save` writes, as JSON; equal for tokenizers that do the same."""
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
        return content

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read what `save` wrote.

        Raises:
            UserError: the file is missing, cut short, or not one of ours.
        """
        content = read_json(path)
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise UserError(f"{path} is not a tokenizer written by heedful ({_FORMAT})")
        try:
            saved = content.get("files", {}).items()
            files = {name: base64.b64decode(text) for name, text in saved}
            for name in files.keys() - KEPT_FILES:  # an export writes them: names, never paths
                raise UserError(f"{path} holds {name!r}, which is of no tokenizer; do not use it")
            return cls(
                Backend.from_str(json.dumps(content["tokenizer"])),
                content["kind"],
                content["roles"],
                specials_are_text=content["specials_are_text"],
                piece_ids=content.get("piece_ids"),
                files=files,
            )
        except UserError:
            raise
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{path} is damaged: {error!r}; save the tokenizer again") from error

    def _ids(self, encoding: Any) -> list[int]:
        if self._piece_ids is None:
            return list(encoding.ids)
        return [self._piece_ids.get(piece, self.unk_id) for piece in encoding.tokens]

    @property
    def has_own_pieces(self) -> bool:
        """Whether ids are not the library's own (Marian's), so that pieces alone agree."""
        return self._pieces is not None

    def piece(self, i: int) -> str:
        """The piece of an id; models may have more ids than their tokenizer (T5's 28 spare)."""
        found = self._backend.id_to_token(i) if self._pieces is None else self._pieces.get(i)
        return f"<id {i}>" if found is None else str(found)

    def _needed(self, special_id: int | None, what: str) -> int:
        if special_id is None:
            raise UserError(
                f"this {self.kind} tokenizer has no {what} mark; use one that has, or its template"
            )
        return special_id


def _specials(roles: Mapping[str, str], id_of: Callable[[str], int | None]) -> Specials:
    ids = {f"{role}_id": id_of(name) for role, name in roles.items()}
    if ids.get("unk_id") in (ids.get("bos_id"), ids.get("eos_id")):
        ids["unk_id"] = None  # GPT-2's one special is an end; its bytes leave nothing unknown
    sentinels = [_numbered(name, id_of) for name in ("<extra_id_{}>", "<extra_{}>")]
    return Specials(**ids, sentinel_ids=sentinels[0] or sentinels[1])


def _numbered(name: str, id_of: Callable[[str], int | None]) -> tuple[int, ...]:
    found: list[int] = []
    while (i := id_of(name.format(len(found)))) is not None:
        found.append(i)
    return tuple(found)


@contextmanager
def _of_characters() -> Iterator[None]:
    """Tell what the library below calls no text: half of a surrogate pair, which Python lets in."""
    try:
        yield
    except TypeError:
        raise UserError(
            "a text must be of characters; a lone surrogate is none, as of a file that is not UTF-8"
        ) from None


def _template(backend: Backend) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]:
    """What the backend puts before, after and between texts, found by letting it do so."""
    text = Backend(models.WordLevel({"a": 0}, unk_token="a")).encode("a")

    def parts(pair: Encoding | None) -> list[tuple[int, ...]]:
        done = backend.post_process(text, pair, add_special_tokens=True)
        found: list[tuple[int, ...]] = [()]
        for i, sequence in zip(done.ids, done.sequence_ids, strict=True):
            found = [*found, ()] if sequence is not None else [*found[:-1], (*found[-1], i)]
        return found

    prefix, suffix = parts(None)
    pair_prefix, middle, pair_suffix = parts(text)
    fits = (pair_prefix, pair_suffix) == (prefix, suffix)
    return prefix, suffix, middle if fits else None
