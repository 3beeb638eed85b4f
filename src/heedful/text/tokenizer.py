"""Tokenizers of seven kinds, trained from raw text, saved as one JSON file."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from heedful.errors import UserError
from heedful.files import replacing

KINDS = ("bpe", "unigram", "wordpiece", "byte_bpe", "word", "char", "byte")
SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")

Normalization = Literal["nfc", "nfkc", "none"]

_FORMAT = "heedful-tokenizer-1"
_SUBWORDS = ("bpe", "unigram", "wordpiece", "byte_bpe")
_BYTES = ("byte_bpe", "byte")
_SPACE = "\u2581"  # stands for a space inside a piece, as in SentencePiece
_CONTINUES = "##"  # a WordPiece piece that does not begin its word

# A space belongs to the piece after it; punctuation and symbols never join a word.
_WORDS = rf"{_SPACE}?[\p{{L}}\p{{M}}]+|{_SPACE}?\p{{N}}+|{_SPACE}?[^{_SPACE}\p{{L}}\p{{M}}\p{{N}}]"
# WordPiece gives up on a whole word for one unknown character, and Han text has no spaces that
# would keep its words short; so there each Han character is a word, as in BERT.
_WORDPIECE_WORDS = (
    rf"\p{{Han}}|{_SPACE}?[\p{{L}}\p{{M}}&&[^\p{{Han}}]]+|{_SPACE}?\p{{N}}+"
    r"|[^\p{L}\p{M}\p{N}]"
)


def train_tokenizer(
    texts: Iterable[str],
    *,
    kind: str = "bpe",
    vocab_size: int | None = None,
    lowercase: bool = False,
    normalization: Normalization | None = None,
    min_frequency: int = 1,
) -> "Tokenizer":
    """Learn a tokenizer from raw text. The same text always gives the same tokenizer.

    Kinds: `bpe` (Sennrich et al. 2016), `unigram` (Kudo 2018), `wordpiece` (Schuster and Nakajima
    2012, pieces chosen by pair counts as in BERT's), `byte_bpe` (Radford et al. 2019, over UTF-8
    bytes), `word` (between spaces), `char` (code points), `byte` (the 256 bytes, nothing learnt).

    Ids 0 to 3 are `<pad>`, `<s>`, `</s>`, `<unk>`; no text is ever encoded to the first three.
    Every character of the training text is kept, whatever its frequency, by all kinds but a capped
    `char`. Text is normalised before anything else. For all kinds but the two of bytes a run of
    whitespace becomes one space, and none is left at the ends; U+2581, which stands for the space
    inside pieces, counts as whitespace.

    Args:
        texts: lines of text; join both sides of a corpus here for one shared vocabulary.
        vocab_size: how many ids, specials counted. Needed for the subword kinds, where it is met
            exactly; for `word` and `char` a cap, `None` for no cap; not for `byte`.
        lowercase: in the normaliser, so decoding cannot bring capitals back.
        normalization: Unicode normal form; `None` stands for "nfkc", and for "none" with the kinds
            of bytes, which then give every string back as it was.
        min_frequency: pairs (`bpe`, `byte_bpe`, `wordpiece`) or entries (`word`, `char`) seen less
            often than this are not learnt.

    Raises:
        UserError: an unknown kind or normalisation; a vocabulary larger than the text gives, or
            too small for its characters; no text; a setting that the kind cannot use.
    """
    _check_settings(kind, vocab_size, normalization, min_frequency)
    lines = list(texts)
    if kind != "byte" and not any(line.strip() for line in lines):
        raise UserError("there is no text to train a tokenizer on; give at least one line")
    normal_form = normalization or ("none" if kind in _BYTES else "nfkc")
    backend = _untrained(kind, normal_form, lowercase)
    if kind != "byte":
        _train(backend, lines, kind, vocab_size, min_frequency)
    tokenizer = Tokenizer(_canonical(backend, kind), kind)
    if kind in _SUBWORDS:
        assert vocab_size is not None
        _check_size(tokenizer.vocab_size, vocab_size, kind)
    return tokenizer


class Tokenizer:
    """Text to ids and back. Made by `train_tokenizer` or `Tokenizer.load`.

    `decode(encode(text)) == normalize(text)` for every text whose characters (for kind `word`:
    words) are known, which those of the training text are.
    """

    pad_id, bos_id, eos_id, unk_id = range(len(SPECIALS))

    def __init__(self, backend: Backend, kind: str) -> None:
        assert [backend.id_to_token(i) for i in range(len(SPECIALS))] == list(SPECIALS)
        self._backend = backend
        self.kind = kind

    @property
    def vocab_size(self) -> int:
        """The number of ids, specials counted."""
        return int(self._backend.get_vocab_size())

    def normalize(self, text: str) -> str:
        """The text as the model gets to see it: what decoding can give back at best."""
        normalizer = self._backend.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without a start or an end mark. Empty text gives no ids."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """`encode` for each text, on all cores."""
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; the four specials are left out.

        For the kinds of bytes, bytes that are not UTF-8 become U+FFFD.
        """
        return self.decode_batch([ids])[0]

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        """`decode` for each sequence of ids."""
        kept = [[i for i in ids if i >= len(SPECIALS)] for ids in batch]
        return list(self._backend.decode_batch(kept, skip_special_tokens=False))

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """The piece of each id, for display.

        U+2581 marks a space that belongs to a piece, and specials have their names. For the kinds
        of bytes a piece that is not whole characters is shown as bytes, such as `<E4><BB>`.
        """
        pieces = [str(self._backend.id_to_token(i)) for i in ids]
        if self.kind not in _BYTES:
            return pieces
        of_byte = {piece: byte for byte, piece in enumerate(_byte_pieces())}
        return [
            piece if i < len(SPECIALS) else _shown(bytes(of_byte[c] for c in piece))
            for i, piece in zip(ids, pieces, strict=True)
        ]

    def save(self, path: Path) -> None:
        """Write one JSON file: the kind, and under "tokenizer" the `tokenizers` library's own form.

        Wrapped, because that library refuses a file with keys that it does not know.

        Raises:
            UserError: the file cannot be written.
        """
        content = {
            "format": _FORMAT,
            "kind": self.kind,
            "tokenizer": json.loads(self._backend.to_str()),
        }
        with replacing(path) as file:
            file.write(json.dumps(content, ensure_ascii=False, indent=1).encode())

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read what `save` wrote.

        Raises:
            UserError: the file is missing, cut short, or not one of ours.
        """
        try:
            content = json.loads(path.read_bytes())
        except OSError as error:
            raise UserError(f"cannot read the tokenizer {path}: {error.strerror}") from error
        except ValueError as error:  # both broken UTF-8 and broken JSON
            raise UserError(f"{path} is not a tokenizer file, or is cut short: {error}") from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise UserError(f"{path} is not a tokenizer written by heedful ({_FORMAT})")
        try:
            backend = Backend.from_str(json.dumps(content["tokenizer"]))
            known = [backend.id_to_token(i) for i in range(len(SPECIALS))] == list(SPECIALS)
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{path} is damaged: {error}; save the tokenizer again") from error
        if content.get("kind") not in KINDS or not known:
            raise UserError(f"{path} is damaged: its kind or its specials are not ours")
        return cls(backend, content["kind"])


def _check_settings(
    kind: str, vocab_size: int | None, normalization: str | None, min_frequency: int
) -> None:
    if kind not in KINDS:
        raise UserError(f"unknown tokenizer kind {kind!r}; choose one of {', '.join(KINDS)}")
    if normalization not in (None, "nfc", "nfkc", "none"):
        raise UserError(f"unknown normalization {normalization!r}; choose nfc, nfkc or none")
    if kind in _SUBWORDS and vocab_size is None:
        raise UserError(f"tokenizer kind {kind} needs a vocab_size, such as 8000")
    if kind == "byte" and vocab_size is not None:
        raise UserError("tokenizer kind byte has its 256 bytes and 4 specials; unset vocab_size")
    if vocab_size is not None and vocab_size <= len(SPECIALS):
        raise UserError(
            f"vocab_size {vocab_size} leaves no room beside the {len(SPECIALS)} specials; raise it"
        )
    if min_frequency != 1 and kind in ("unigram", "byte"):
        raise UserError(f"tokenizer kind {kind} has no use for min_frequency; unset it")


def _check_size(size: int, wanted: int, kind: str) -> None:
    if size < wanted:
        raise UserError(
            f"a {kind} vocabulary of {wanted} is more than the text gives: it gives {size};"
            f" set vocab_size to {size} or less, or train on more text"
        )
    if size > wanted:
        raise _too_small(size, wanted, kind)


def _too_small(least: int, wanted: int, kind: str) -> UserError:
    instead = "" if kind == "byte_bpe" else ", or kind to byte_bpe"
    return UserError(
        f"a {kind} vocabulary of {wanted} is too small for the text: its characters and the"
        f" {len(SPECIALS)} specials need {least}; set vocab_size to {least} or more{instead}"
    )


def _untrained(kind: str, normal_form: str, lowercase: bool) -> Backend:
    """The library's tokenizer of this kind, with its way from text to pieces and back."""
    special_ids = {token: i for i, token in enumerate(SPECIALS)}
    unk = SPECIALS[Tokenizer.unk_id]
    metaspace = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="always", split=kind == "word")
    from_metaspace = decoders.Metaspace(_SPACE, prepend_scheme="always")
    if kind in ("bpe", "unigram"):
        backend = Backend(models.BPE(unk_token=unk) if kind == "bpe" else models.Unigram())
        words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([metaspace, words])
        backend.decoder = from_metaspace
    elif kind == "wordpiece":
        backend = Backend(models.WordPiece(unk_token=unk))
        words = pre_tokenizers.Split(Regex(_WORDPIECE_WORDS), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([metaspace, words])
        joined = decoders.Replace(Regex(f"^{_CONTINUES}"), "")
        backend.decoder = decoders.Sequence([joined, from_metaspace])
    elif kind == "word":
        backend = Backend(models.WordLevel(special_ids, unk_token=unk))
        # The space before each word also keeps a word that looks like a special from being one.
        backend.pre_tokenizer = metaspace
        backend.decoder = from_metaspace
    elif kind == "char":
        backend = Backend(models.WordLevel(special_ids, unk_token=unk))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
    else:
        # For kind byte this is already the whole model: one piece a byte, and no merges.
        pieces = special_ids | {piece: i for i, piece in enumerate(_byte_pieces(), len(SPECIALS))}
        backend = Backend(models.BPE(vocab=pieces, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=kind == "byte_bpe"
        )
        backend.decoder = decoders.ByteLevel()
    steps = _normalizers(normal_form, lowercase, keep_whitespace=kind in _BYTES)
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    return backend


def _normalizers(normal_form: str, lowercase: bool, *, keep_whitespace: bool) -> list[Any]:
    steps: list[Any] = []
    if normal_form != "none":
        steps.append(normalizers.NFKC() if normal_form == "nfkc" else normalizers.NFC())
    if lowercase:
        steps.append(normalizers.Lowercase())
    if not keep_whitespace:
        # After the normal form, which itself may make spaces (of U+3000, for one).
        steps.append(normalizers.Replace(Regex(rf"[\s{_SPACE}]+"), " "))
        steps.append(normalizers.Strip())
    return steps


def _byte_pieces() -> list[str]:
    """The character by which the library shows each byte, in the order of the bytes.

    Those of the alphabet below 256 stand for their own byte, the rest in order for those left.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {ord(piece): piece for piece in alphabet if ord(piece) < 256}
    others = (piece for piece in alphabet if ord(piece) >= 256)
    return [own[byte] if byte in own else next(others) for byte in range(256)]


def _shown(piece: bytes) -> str:
    try:
        return piece.decode().replace(" ", _SPACE)
    except UnicodeDecodeError:
        return "".join(f"<{byte:02X}>" for byte in piece)


def _train(
    backend: Backend, lines: list[str], kind: str, vocab_size: int | None, min_frequency: int
) -> None:
    if kind == "unigram":
        assert vocab_size is not None
        # One more, because with none to add to the characters the trainer adds all it has.
        least = len(SPECIALS) + len(_alphabet(backend, lines)) + 1
        if vocab_size < least:
            raise _too_small(least, vocab_size, kind)
    trainer = _trainer(backend, lines, kind, vocab_size, min_frequency)
    backend.train_from_iterator(lines, trainer=trainer)


def _trainer(
    backend: Backend, lines: list[str], kind: str, vocab_size: int | None, min_frequency: int
) -> Any:
    settings: dict[str, Any] = {
        "vocab_size": 2**31 if vocab_size is None else vocab_size,
        "special_tokens": list(SPECIALS),
        "show_progress": False,
    }
    if kind == "unigram":
        return trainers.UnigramTrainer(unk_token=SPECIALS[Tokenizer.unk_id], **settings)
    settings["min_frequency"] = min_frequency
    if kind in ("word", "char"):
        return trainers.WordLevelTrainer(**settings)
    if kind == "wordpiece":
        # The trainer numbers the continuing characters in the order of a hash table, and the
        # numbers decide ties; given as further specials they keep this order.
        settings["special_tokens"] += _continuing(backend, _alphabet(backend, lines))
        return trainers.WordPieceTrainer(continuing_subword_prefix=_CONTINUES, **settings)
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "byte_bpe" else []
    return trainers.BpeTrainer(initial_alphabet=alphabet, **settings)


def _alphabet(backend: Backend, lines: list[str]) -> list[str]:
    characters = set(_SPACE)
    for line in lines:
        characters.update(backend.normalizer.normalize_str(line))
    return sorted(characters - {" "})


def _continuing(backend: Backend, alphabet: list[str]) -> list[str]:
    """The characters that may stand inside a word after its first, as WordPiece writes them."""
    cut = backend.pre_tokenizer.pre_tokenize_str
    return [_CONTINUES + c for c in alphabet if any(len(cut(lead + c)) == 1 for lead in "a1")]


def _canonical(backend: Backend, kind: str) -> Backend:
    """The trained tokenizer without added tokens and without traces of chance.

    Trainers register the specials as added tokens, which the library finds in raw text before
    anything else: a user's "</s>" would end the sentence. Left in the vocabulary alone they are
    out of reach, because no piece of text is cut that way.
    """
    content = json.loads(backend.to_str())
    content["added_tokens"] = []
    if kind == "unigram":
        content["model"]["vocab"] = _canonical_scores(content["model"]["vocab"])
    elif kind == "wordpiece":
        # The default of 100 would make one unknown token of a long word.
        content["model"]["max_input_chars_per_word"] = 10_000
    return Backend.from_str(json.dumps(content))


def _canonical_scores(vocab: list[list[Any]]) -> list[list[Any]]:
    """Unigram pieces with the scores that do not depend on the order of a hash table.

    Characters that the estimation dropped come back with the lowest score and a step of 0.0001
    more for each, in the table's order: all get the lowest score here. Sums of floats in that
    order differ near the 11th digit: scores are rounded far above it. Equal scores sort by piece.
    """
    specials, pieces = vocab[: len(SPECIALS)], vocab[len(SPECIALS) :]
    lowest = min(score for _, score in pieces)

    def canonical(piece: str, score: float) -> float:
        steps = (score - lowest) / 1e-4
        brought_back = len(piece) == 1 and abs(steps - round(steps)) < 1e-6
        return round(lowest if brought_back else score, 4)

    scored = [[piece, canonical(piece, score)] for piece, score in pieces]
    return specials + sorted(scored, key=lambda entry: (-entry[1], entry[0]))
