"""How a tokenizer is learnt from text: settings, trainers, and what makes them repeatable."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from heedful.errors import UserError
from heedful.progress import has_display

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
SPACE = "\u2581"  # stands for a space inside a piece, as in SentencePiece

Normalization = Literal["nfc", "nfkc", "none"]

_SUBWORDS = ("bpe", "unigram", "wordpiece", "byte_bpe")
_BYTES = ("byte_bpe", "byte")
_UNK = SPECIALS[3]
LARGEST_VOCABULARY = 1 << 24  # ids; the largest published tokenizers have 2^18
_PIECES_OF_CHARACTER = 64  # normalization makes up to 18 of one; each can be a piece, and merged
_TEMPLATES = {  # around one text, and around a pair
    "none": ("$A", "$A $B"),
    "bos": ("<s> $A", "<s> $A <s> $B"),
    "eos": ("$A </s>", "$A </s> $B </s>"),
    "both": ("<s> $A </s>", "<s> $A </s> $B </s>"),
}
_CONTINUES = "##"  # a WordPiece piece that does not begin its word

# A name that starts with a bracket and holds a letter or a digit is never one piece of any text.
_SPECIAL_NAME = re.compile(r"<[\w|/:-]*[A-Za-z0-9][\w|/:-]*>", re.ASCII)

# A space belongs to the piece after it; punctuation and symbols never join a word.
_WORDS = rf"{SPACE}?[\p{{L}}\p{{M}}]+|{SPACE}?\p{{N}}+|{SPACE}?[^{SPACE}\p{{L}}\p{{M}}\p{{N}}]"
# WordPiece gives up on a whole word for one unknown character, and Han text has no spaces that
# would keep its words short; so there each Han character is a word, as in BERT.
_WORDPIECE_WORDS = (
    rf"\p{{Han}}|{SPACE}?[\p{{L}}\p{{M}}&&[^\p{{Han}}]]+|{SPACE}?\p{{N}}+"
    r"|[^\p{L}\p{M}\p{N}]"
)


@dataclass(frozen=True)
class Plan:
    """What to learn; the words are those of `train_tokenizer`. Made by it, and checked here."""

    kind: str
    vocab_size: int | None
    lowercase: bool
    normalization: Normalization | None
    specials: tuple[str, ...]  # the names of the first ids, in order
    keep_whitespace: bool
    template: str
    or_fewer: bool = False

    def __post_init__(self) -> None:
        kind, size, num_specials = self.kind, self.vocab_size, len(self.specials)
        if kind in _SUBWORDS and size is None:
            raise UserError(f"tokenizer kind {kind} needs a vocab_size, such as 8000")
        if kind == "byte" and size is not None:
            raise UserError(
                f"tokenizer kind byte has its 256 bytes and {num_specials} specials;"
                " unset vocab_size"
            )
        if size is not None and size <= num_specials:
            raise UserError(
                f"vocab_size {size} leaves no room beside the {num_specials} specials; raise it"
            )
        if size is not None and size > LARGEST_VOCABULARY:
            raise UserError(f"vocab_size must be at most {LARGEST_VOCABULARY:,}, not {size:,}")
        if self.keep_whitespace and kind == "word":
            raise UserError(
                "tokenizer kind word is cut at whitespace and cannot keep it;"
                " unset keep_whitespace, or choose another kind"
            )
        for name in self.specials:
            if not _SPECIAL_NAME.fullmatch(name):
                raise UserError(f"special {name!r} needs a name like <mask>, in angle brackets")
            if self.specials.count(name) > 1:
                raise UserError(f"special {name!r} is there twice; name each once")

    @property
    def keeps_whitespace(self) -> bool:
        """Whether decoding gives every space and newline back."""
        return self.keep_whitespace or self.kind in _BYTES


def train_backend(lines: list[str], plan: Plan) -> Backend:
    """The `tokenizers` library's tokenizer, trained; its first ids are `plan.specials`.

    Raises:
        UserError: no text; a vocabulary larger than the text gives, or too small for it.
    """
    given = lines if plan.keeps_whitespace else (line.strip() for line in lines)
    if plan.kind != "byte" and not any(given):
        raise UserError("there is no text to train a tokenizer on; give at least one line")
    backend = _untrained(plan)
    if plan.kind == "unigram":
        # One more, because with none to add to the characters the trainer adds all it has.
        _check_least(len(plan.specials) + len(_alphabet(backend, lines, plan)) + 1, plan)
    if plan.kind != "byte":
        backend.train_from_iterator(lines, trainer=_trainer(backend, lines, plan))
    backend = _canonical(backend, plan)
    # Only so that decoding knows them: Tokenizer has their names in a text read as text.
    backend.add_special_tokens(list(plan.specials))
    single, pair = _TEMPLATES[plan.template]
    ids = [(name, SPECIALS.index(name)) for name in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(single, pair, ids)
    size = int(backend.get_vocab_size())
    if plan.vocab_size is not None and plan.kind in _SUBWORDS:
        if size < plan.vocab_size and not plan.or_fewer:
            raise UserError(
                f"a {plan.kind} vocabulary of {plan.vocab_size} is more than the text gives: it"
                f" gives {size}; set vocab_size to {size} or less, or train on more text"
            )
        _check_least(size, plan)
    return backend


def byte_pieces() -> list[str]:
    """The character by which the library shows each byte, in the order of the bytes.

    Those of the alphabet below 256 stand for their own byte, the rest in order for those left.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {ord(piece): piece for piece in alphabet if ord(piece) < 256}
    others = (piece for piece in alphabet if ord(piece) >= 256)
    return [own[byte] if byte in own else next(others) for byte in range(256)]


def _check_least(least: int, plan: Plan) -> None:
    if plan.vocab_size is not None and plan.vocab_size < least:
        instead = "" if plan.kind == "byte_bpe" else ", or kind to byte_bpe"
        raise UserError(
            f"a {plan.kind} vocabulary of {plan.vocab_size} is too small for the text: its"
            f" characters and the {len(plan.specials)} specials need {least}; set vocab_size to"
            f" {least} or more{instead}"
        )


def _untrained(plan: Plan) -> Backend:
    """The library's tokenizer of this kind, with its way from text to pieces and back."""
    kind = plan.kind
    special_ids = {token: i for i, token in enumerate(plan.specials)}
    # A space before the text would be one more than there was: no way to tell it from a real one.
    prepend = "never" if plan.keep_whitespace else "always"
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
        # The space before each word also keeps a word that looks like a special from being one.
        backend.pre_tokenizer = metaspace
        backend.decoder = from_metaspace
    elif kind == "char":
        backend = Backend(models.WordLevel(special_ids, unk_token=_UNK))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
    else:
        # For kind byte this is already the whole model: one piece a byte, and no merges.
        pieces = special_ids | {piece: i for i, piece in enumerate(byte_pieces(), len(special_ids))}
        backend = Backend(models.BPE(vocab=pieces, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=kind == "byte_bpe"
        )
        backend.decoder = decoders.ByteLevel()
    steps = _normalizers(plan)
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    return backend


def _normalizers(plan: Plan) -> list[Any]:
    normal_form = plan.normalization or ("none" if plan.kind in _BYTES else "nfkc")
    steps: list[Any] = []
    if normal_form != "none":
        steps.append(normalizers.NFKC() if normal_form == "nfkc" else normalizers.NFC())
    if plan.lowercase:
        steps.append(normalizers.Lowercase())
    if not plan.keeps_whitespace:
        # After the normal form, which itself may make spaces (of U+3000, for one).
        steps.append(normalizers.Replace(Regex(rf"[\s{SPACE}]+"), " "))
        steps.append(normalizers.Strip())
    elif plan.kind in ("bpe", "unigram", "wordpiece"):
        steps.append(normalizers.Replace(SPACE, " "))
    return steps


def _trainer(backend: Backend, lines: list[str], plan: Plan) -> Any:
    kind = plan.kind
    # The trainers allocate by vocab_size, and abort the process where they cannot.
    most = 1_024 + len(plan.specials) + _PIECES_OF_CHARACTER * sum(map(len, lines))
    settings: dict[str, Any] = {
        "vocab_size": min(plan.vocab_size or most, most),
        "special_tokens": list(plan.specials),
        "show_progress": has_display() and sys.stderr.isatty(),
    }
    if kind == "unigram":
        return trainers.UnigramTrainer(unk_token=_UNK, **settings)
    settings["min_frequency"] = 1
    if kind in ("word", "char"):
        return trainers.WordLevelTrainer(**settings)
    if kind == "wordpiece":
        # The trainer numbers the continuing characters in the order of a hash table, and the
        # numbers decide ties; given as further specials they keep this order.
        settings["special_tokens"] += _continuing(backend, _alphabet(backend, lines, plan))
        return trainers.WordPieceTrainer(continuing_subword_prefix=_CONTINUES, **settings)
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "byte_bpe" else []
    return trainers.BpeTrainer(initial_alphabet=alphabet, **settings)


def _alphabet(backend: Backend, lines: list[str], plan: Plan) -> list[str]:
    """The characters that pieces are made of, sorted."""
    characters = set() if plan.keep_whitespace else {SPACE}
    for line in lines:
        normalizer = backend.normalizer
        characters.update(line if normalizer is None else normalizer.normalize_str(line))
    return sorted({SPACE if c == " " else c for c in characters})


def _continuing(backend: Backend, alphabet: list[str]) -> list[str]:
    """The characters that may stand inside a word after its first, as WordPiece writes them."""
    cut = backend.pre_tokenizer.pre_tokenize_str
    return [_CONTINUES + c for c in alphabet if any(len(cut(lead + c)) == 1 for lead in "a1")]


def _canonical(backend: Backend, plan: Plan) -> Backend:
    """The trained tokenizer without added tokens and without traces of chance."""
    content = json.loads(backend.to_str())
    content["added_tokens"] = []
    if plan.kind == "unigram":
        vocab, num_specials = content["model"]["vocab"], len(plan.specials)
        content["model"]["vocab"] = vocab[:num_specials] + _canonical_scores(vocab[num_specials:])
    elif plan.kind == "wordpiece":
        # The default of 100 would make one unknown token of a long word.
        content["model"]["max_input_chars_per_word"] = 10_000
    return Backend.from_str(json.dumps(content))


def _canonical_scores(pieces: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Unigram pieces with the scores that do not depend on the order of a hash table.

    Characters that the estimation dropped come back with the lowest score and a step of 0.0001
    more for each, in the table's order: all get the lowest score here. Sums of floats in that
    order differ near the 11th digit: scores are rounded far above it. Equal scores sort by piece.
    """
    lowest = min(score for _, score in pieces)

    def canonical(piece: str, score: float) -> float:
        steps = (score - lowest) / 1e-4
        brought_back = len(piece) == 1 and abs(steps - round(steps)) < 1e-6
        return round(lowest if brought_back else score, 4)

    scored = [[piece, canonical(piece, score)] for piece, score in pieces]
    return sorted(scored, key=lambda entry: (-entry[1], entry[0]))
