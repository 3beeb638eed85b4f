"""Small tokenizers of every kind: trained here, and with the decoders of imported ones."""

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from heedful.data.tokenizer import Tokenizer, train_tokenizer

LINES = ["Der Hund und der kleine Hund rennen", "unser Haus, rund und bunt", "Übung macht müde"]
SIZES = {"bpe": 60, "unigram": 50, "wordpiece": 80, "byte_bpe": 300}
KINDS = [*SIZES, "word", "char", "byte"]


def tokenizer_of(kind: str) -> Tokenizer:
    return train_tokenizer(LINES, kind=kind, vocab_size=SIZES.get(kind), or_fewer=True)


def byte_fallback() -> Tokenizer:
    """A tokenizer with a piece for each byte, and few others, as of SentencePiece."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁H",
        "u",
        "un",
        "nd",
        "▁u",
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return Tokenizer(backend, "imported", {"unk": "<unk>"})


def bert_like() -> Tokenizer:
    """A tokenizer whose decoder puts spaces between words."""
    pieces = ["[UNK]", "Hund", "H", "##und", "un", "##un", "##d", "r", "b", "ü", "##ü"]
    backend = Backend(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(prefix="##")
    return Tokenizer(backend, "imported", {"unk": "[UNK]"})


def gpt1_like() -> Tokenizer:
    """A tokenizer whose pieces mark the end of a word."""
    pieces = ["<unk>", "un", "d</w>", "un</w>", "H", "und</w>", "ü</w>", ".</w>", "r"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocab, [], unk_token="<unk>", end_of_word_suffix="</w>")
    backend = Backend(model)
    backend.decoder = decoders.BPEDecoder("</w>")
    return Tokenizer(backend, "imported", {"unk": "<unk>"})


def every_tokenizer() -> dict[str, Tokenizer]:
    """One of each kind by name."""
    imported = {make.__name__: make() for make in (byte_fallback, bert_like, gpt1_like)}
    return {kind: tokenizer_of(kind) for kind in KINDS} | imported
