"""Train tokenizers of the `tokenizers` library: settings, trainers, and deterministic results."""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, get_args

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from heedful.data.rows import INVISIBLE, INVISIBLE_CHARACTER
from heedful.data.words import count_words, train_on_words
from heedful.errors import UserError, describe
from heedful.progress import has_display

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
SPACE = "\u2581"  # represents a space inside a piece, as in SentencePiece

UnicodeForm = Literal["nfc", "nfkc", "none"]

_SUBWORDS = ("bpe", "unigram", "wordpiece", "byte_bpe")
_KINDS = (*_SUBWORDS, "word", "char", "byte")
_BYTES = ("byte_bpe", "byte")
_UNK = SPECIALS[3]
LARGEST_VOCABULARY = 1 << 24  # ids; the largest published tokenizers have 2^18
# An upper bound of the pieces per character: normalization expands one to up to 18, and each may be
# a piece and part of merged ones.
_PIECES_OF_CHARACTER = 64
_TEMPLATES = {  # of one text, and of a pair
    "none": ("$A", "$A $B"),
    "bos": ("<s> $A", "<s> $A <s> $B"),
    "eos": ("$A </s>", "$A </s> $B </s>"),
    "both": ("<s> $A </s>", "<s> $A </s> $B </s>"),
}
_CONTINUES = "##"  # prefix of a WordPiece piece that continues a word

# Pre-tokenizers split brackets from letters and digits: no piece of a text is such a name.
SPECIAL_NAME = re.compile(r"<[\w|/:-]*[A-Za-z0-9][\w|/:-]*>", re.ASCII)

# Masks (`heedful.fidelity`) are tokens of their own, without the space before them.
_MASKS = r"\x{E000}-\x{E07F}"
# A space is part of the word after it; punctuation and symbols are separate words.
_WORDS = (
    rf"[{_MASKS}]|{SPACE}?[\p{{L}}\p{{M}}]+|{SPACE}?\p{{N}}+"
    rf"|{SPACE}?[^{SPACE}\p{{L}}\p{{M}}\p{{N}}{_MASKS}]"
)
# One unknown character makes a whole word unknown to WordPiece, and Chinese text has no spaces, so
# that its words would be long: each Han character is a word, as in BERT.
_WORDPIECE_WORDS = (
    rf"\p{{Han}}|{SPACE}?[\p{{L}}\p{{M}}&&[^\p{{Han}}]]+|{SPACE}?\p{{N}}+"
    r"|[^\p{L}\p{M}\p{N}]"
)


@dataclass(frozen=True)
class TrainingSettings:
    """The arguments of `train_tokenizer`, checked.

    Args:
        specials: names of all special tokens, in the order of their ids, which are the first.
    """

    kind: str
    vocab_size: int | None
    lowercase: bool
    normalization: UnicodeForm | None
    specials: tuple[str, ...]
    keep_whitespace: bool
    template: str
    or_fewer: bool = False

    def __post_init__(self) -> None:
        kind, size, num_specials = self.kind, self.vocab_size, len(self.specials)
        if kind not in _KINDS:
            raise UserError(f"tokenizer kind must be {', '.join(_KINDS)}, not {kind!r}")
        if self.template not in _TEMPLATES:
            raise UserError(f"template must be {', '.join(_TEMPLATES)}, not {self.template!r}")
        if self.normalization not in (None, *get_args(UnicodeForm)):
            known = ", ".join(get_args(UnicodeForm))
            raise UserError(f"normalization must be {known}, not {self.normalization!r}")
        if size is not None and not isinstance(size, int):
            raise UserError(f"vocab_size must be a whole number, not {describe(size)}")
        if kind in _SUBWORDS and size is None:
            raise UserError(f"tokenizer kind {kind} needs a vocab_size, such as 8000")
        if kind == "byte" and size is not None:
            raise UserError(
                f"tokenizer kind byte always has 256 bytes and {num_specials} special tokens;"
                " unset vocab_size"
            )
        if size is not None and size <= num_specials:
            raise UserError(
                f"vocab_size {size} must be more than the {num_specials} special tokens; raise it"
            )
        if size is not None and size > LARGEST_VOCABULARY:
            raise UserError(f"vocab_size must be at most {LARGEST_VOCABULARY:,}, not {size:,}")
        if self.keep_whitespace and kind == "word":
            raise UserError(
                "tokenizer kind word splits text at whitespace and cannot keep it;"
                " unset keep_whitespace, or choose another kind"
            )
        for name in self.specials:
            if not SPECIAL_NAME.fullmatch(name):
                raise UserError(f"special token {name!r} needs a name in angle brackets, as <mask>")
            if self.specials.count(name) > 1:
                raise UserError(f"special token {name!r} is given twice; give it once")

    @property
    def keeps_whitespace(self) -> bool:
        """True if decoding restores all whitespace."""
        return self.keep_whitespace or self.kind in _BYTES


def check_texts(texts: Any, name: str = "texts") -> None:
    """Raises UserError for anything but a list of texts."""
    if isinstance(texts, str | bytes) or not isinstance(texts, Sequence):
        raise UserError(f"{name} must be a list of texts, not {describe(texts)}")
    for text in texts:
        if not isinstance(text, str):
            raise UserError(f"{name} must be a list of texts, but one is {describe(text)}")


@contextmanager
def text_errors(texts: Any) -> Iterator[None]:
    """Raise UserError for a value that is not a text, and for a lone surrogate, which Python's str
    allows and the library does not."""
    try:
        yield
    except TypeError:
        check_texts(texts)
        raise UserError(
            "a text contains a lone surrogate, as from a file that is not UTF-8; remove it"
        ) from None


def train_backend(lines: list[str], settings: TrainingSettings, num_workers: int) -> Backend:
    """Train a tokenizer of the `tokenizers` library; its first ids are `settings.specials`.

    Args:
        num_workers: as in `count_words`.

    Raises:
        UserError: no text; a vocabulary larger than the text allows, or too small for it.
    """
    texts = lines if settings.keeps_whitespace else (line.strip() for line in lines)
    if settings.kind != "byte" and not any(texts):
        raise UserError("no text to train a tokenizer on; give at least one line that is not blank")
    invisible = {*chain.from_iterable(map(INVISIBLE_CHARACTER.findall, lines))}
    backend = _untrained(settings, invisible)
    words: Mapping[str, int] | None = None  # that are split one by one; None: texts are split whole
    if settings.kind == "byte_bpe":
        words = count_words(lines, "borders", num_workers)
    elif not settings.keeps_whitespace and settings.kind != "char":
        words = count_words(lines, "spaces", num_workers)
    if settings.kind != "byte":
        trainer = _trainer(backend, lines, lines if words is None else words, settings)
        if words is None:
            backend.train_from_iterator(lines, trainer=trainer)
        else:
            train_on_words(backend, words, trainer)
    backend = _canonical(backend, settings)
    # For decoding only: `Tokenizer` encodes their names in a text as ordinary text.
    backend.add_special_tokens(list(settings.specials))
    single, pair = _TEMPLATES[settings.template]
    ids = [(name, SPECIALS.index(name)) for name in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(single, pair, ids)
    size = int(backend.get_vocab_size())
    if settings.vocab_size is not None and settings.kind in _SUBWORDS:
        if size < settings.vocab_size and not settings.or_fewer:
            raise UserError(
                f"a {settings.kind} vocabulary of {settings.vocab_size} is more than the text"
                f" allows: {size}; set vocab_size to {size} or less, or train on more text"
            )
        _check_minimum(size, settings)
    return backend


def byte_pieces() -> list[str]:
    """The character that represents each byte 0 to 255 in byte-level pieces (GPT-2's table).

    Characters below 256 represent the byte of the same number; the others the remaining bytes in
    order.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {ord(piece): piece for piece in alphabet if ord(piece) < 256}
    others = (piece for piece in alphabet if ord(piece) >= 256)
    return [own[byte] if byte in own else next(others) for byte in range(256)]


def _check_minimum(minimum: int, settings: TrainingSettings) -> None:
    if settings.vocab_size is not None and settings.vocab_size < minimum:
        instead = "" if settings.kind == "byte_bpe" else ", or kind to byte_bpe"
        raise UserError(
            f"a {settings.kind} vocabulary of {settings.vocab_size} is too small for the text: its"
            f" characters and the {len(settings.specials)} special tokens need {minimum}; set"
            f" vocab_size to {minimum} or more{instead}"
        )


def _untrained(settings: TrainingSettings, known_invisible: Set[str]) -> Backend:
    """The untrained tokenizer of this kind: model, normalizer, pre-tokenizer and decoder.

    Args:
        known_invisible: invisible characters of the text, which will be in the vocabulary.
    """
    kind = settings.kind
    special_ids = {token: i for i, token in enumerate(settings.specials)}
    # If whitespace is kept, a space added before the text would look like a real one.
    prepend = "never" if settings.keep_whitespace else "always"
    metaspace = pre_tokenizers.Metaspace(SPACE, prepend_scheme=prepend, split=kind == "word")
    from_metaspace = decoders.Metaspace(SPACE, prepend_scheme=prepend)
    if kind in ("bpe", "unigram"):
        backend = Backend(models.BPE(unk_token=_UNK) if kind == "bpe" else models.Unigram())
        words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([metaspace, words])
        backend.decoder = from_metaspace
    elif kind == "wordpiece":
        backend = Backend(models.WordPiece(unk_token=_UNK))
        words = pre_tokenizers.Split(Regex(_WORDPIECE_WORDS), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([metaspace, words])
        joined = decoders.Replace(Regex(f"^{_CONTINUES}"), "")
        backend.decoder = decoders.Sequence([joined, from_metaspace])
    elif kind == "word":
        backend = Backend(models.WordLevel(special_ids, unk_token=_UNK))
        # With the space before it no word equals the name of a special token.
        backend.pre_tokenizer = metaspace
        backend.decoder = from_metaspace
    elif kind == "char":
        backend = Backend(models.WordLevel(special_ids, unk_token=_UNK))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
    else:
        # Kind byte needs no training: one piece for each byte, and no merges.
        pieces = special_ids | {piece: i for i, piece in enumerate(byte_pieces(), len(special_ids))}
        backend = Backend(models.BPE(vocab=pieces, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=kind == "byte_bpe"
        )
        backend.decoder = decoders.ByteLevel()
    steps = _normalizers(settings, known_invisible)
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    return backend


def _normalizers(settings: TrainingSettings, known_invisible: Set[str]) -> list[Any]:
    normal_form = settings.normalization or ("none" if settings.kind in _BYTES else "nfkc")
    steps: list[Any] = []
    if settings.kind not in _BYTES:
        # They would be unknown, and of some kinds the whole word with them.
        others = "".join(sorted(known_invisible))
        removed = f"[{INVISIBLE}&&[^{others}]]" if others else f"[{INVISIBLE}]"
        steps.append(normalizers.Replace(Regex(removed), ""))
    if normal_form != "none":
        steps.append(normalizers.NFKC() if normal_form == "nfkc" else normalizers.NFC())
    if settings.lowercase:
        steps.append(normalizers.Lowercase())
    if not settings.keeps_whitespace:
        # After the normal form, which may produce spaces (from U+3000, for example).
        # Python's whitespace also has the separators U+001C to U+001F.
        steps.append(normalizers.Replace(Regex(rf"[\s\x1C-\x1F{SPACE}]+"), " "))
        steps.append(normalizers.Strip())
    elif settings.kind in ("bpe", "unigram", "wordpiece"):
        steps.append(normalizers.Replace(SPACE, " "))
    return steps


def _trainer(
    backend: Backend, lines: list[str], texts: Iterable[str], settings: TrainingSettings
) -> Any:
    """The trainer of this kind, for these lines.

    Args:
        texts: their words, or the lines.
    """
    kind = settings.kind
    if kind == "unigram":
        # One more than the characters: the trainer ignores a limit that equals their number.
        minimum = len(settings.specials) + len(_alphabet(backend, texts, settings)) + 1
        _check_minimum(minimum, settings)
    # The trainers allocate memory for vocab_size pieces and abort the process if they cannot.
    bound = 1_024 + len(settings.specials) + _PIECES_OF_CHARACTER * sum(map(len, lines))
    arguments: dict[str, Any] = {
        "vocab_size": min(settings.vocab_size or bound, bound),
        "special_tokens": list(settings.specials),
        "show_progress": has_display() and sys.stderr.isatty(),
    }
    if kind == "unigram":
        return trainers.UnigramTrainer(unk_token=_UNK, **arguments)
    arguments["min_frequency"] = 1
    if kind in ("word", "char"):
        return trainers.WordLevelTrainer(**arguments)
    if kind == "wordpiece":
        # The trainer would number the continuing characters in the order of a hash table, and ties
        # are broken by these numbers; as special tokens they keep the order of this list.
        arguments["special_tokens"] += _continuing(backend, _alphabet(backend, texts, settings))
        return trainers.WordPieceTrainer(continuing_subword_prefix=_CONTINUES, **arguments)
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "byte_bpe" else []
    return trainers.BpeTrainer(initial_alphabet=alphabet, **arguments)


def _alphabet(backend: Backend, texts: Iterable[str], settings: TrainingSettings) -> list[str]:
    """The characters of normalized texts, sorted, with U+2581 for the space."""
    characters = set() if settings.keep_whitespace else {SPACE}
    normalizer = backend.normalizer
    for text in texts:
        characters.update(text if normalizer is None else normalizer.normalize_str(text))
    return sorted({SPACE if c == " " else c for c in characters})


def _continuing(backend: Backend, alphabet: list[str]) -> list[str]:
    """WordPiece pieces of the characters that can continue a word."""
    split = backend.pre_tokenizer.pre_tokenize_str
    return [_CONTINUES + c for c in alphabet if any(len(split(lead + c)) == 1 for lead in "a1")]


def _canonical(backend: Backend, settings: TrainingSettings) -> Backend:
    """The trained tokenizer without added tokens, made deterministic."""
    content = json.loads(backend.to_str())
    content["added_tokens"] = []
    if settings.kind == "unigram":
        vocab, num_specials = content["model"]["vocab"], len(settings.specials)
        content["model"]["vocab"] = vocab[:num_specials] + _canonical_scores(vocab[num_specials:])
    elif settings.kind == "wordpiece":
        # With the default of 100 a longer word would be one unknown token.
        content["model"]["max_input_chars_per_word"] = 10_000
    return Backend.from_str(json.dumps(content))


def _canonical_scores(pieces: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Unigram pieces with scores that do not depend on the order of the trainer's hash table.

    The trainer adds characters that its estimation dropped with the lowest score plus 0.0001 for
    each, in the table's order; here all get the lowest score. Sums of floats in that order differ
    near the 11th digit, so scores are rounded to 4. Pieces with equal scores are sorted.
    """
    lowest = min(score for _, score in pieces)

    def canonical(piece: str, score: float) -> float:
        steps = (score - lowest) / 1e-4
        was_dropped = len(piece) == 1 and abs(steps - round(steps)) < 1e-6
        return round(lowest if was_dropped else score, 4)

    scored = [[piece, canonical(piece, score)] for piece, score in pieces]
    return sorted(scored, key=lambda entry: (-entry[1], entry[0]))
