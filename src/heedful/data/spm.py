"""SentencePiece models (Kudo and Richardson 2018) read from their files and made ours for good.

The file is a protobuf message; the few fields that matter are read here, so no library is needed.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from heedful.data.tokenizer_training import SPACE
from heedful.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of pieces

# What SentencePiece takes for the score of a symbol that a user defined, whatever the file says: as
# good as certain, so that it is always chosen.
_USER_DEFINED_SCORE = -0.1
_UNIGRAM, _BPE = 1, 2
_MODEL_TYPES = ("unigram", "bpe", "word", "char")

# Numbers of the fields in sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _SPLIT_AT_SPACE, _SPACE_AS_SUFFIX, _BYTE_FALLBACK = 3, 22, 24, 35
_UNK_ID, _BOS_ID, _EOS_ID, _PAD_ID = 40, 41, 42, 43
_CHARSMAP, _DUMMY_PREFIX, _REMOVE_SPACES = 2, 3, 4


@dataclass(frozen=True)
class Piece:
    """One entry of the vocabulary; `kind` is one of the types above."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SpmModel:
    """What a SentencePiece file says. Ids are -1 where the model has no such token."""

    pieces: tuple[Piece, ...]
    is_bpe: bool
    unk_id: int
    bos_id: int
    eos_id: int
    pad_id: int
    byte_fallback: bool
    split_by_whitespace: bool
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool


def read_spm(path: Path) -> SpmModel:
    """Read a `.model` or `.spm` file.

    Raises:
        UserError: it cannot be read, is no SentencePiece model, or one of a type that no
            Transformer uses (word, char, spaces at the end of words).
    """
    try:
        fields = list(_fields(path.read_bytes()))
        pieces = tuple(_piece(value) for number, value in fields if number == _PIECES)
        trainer = _last(fields, _TRAINER)
        normalizer = _last(fields, _NORMALIZER)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, IndexError, TypeError, AttributeError, struct.error) as error:
        raise UserError(f"{path} is damaged or no SentencePiece model: {error}") from None
    if not any(piece.kind == UNKNOWN for piece in pieces):
        raise UserError(f"{path} is damaged or no SentencePiece model: it has no unknown piece")
    model_type = trainer.get(_MODEL_TYPE, _UNIGRAM)
    if model_type not in (_UNIGRAM, _BPE) or trainer.get(_SPACE_AS_SUFFIX, 0):
        named = dict(enumerate(_MODEL_TYPES, 1)).get(model_type, str(model_type))
        raise UserError(
            f"{path} is a SentencePiece model of type {named}, or puts spaces after words; only"
            " unigram and bpe with spaces before words can be imported"
        )
    return SpmModel(
        pieces,
        is_bpe=model_type == _BPE,
        unk_id=[piece.kind for piece in pieces].index(UNKNOWN),
        bos_id=trainer.get(_BOS_ID, 1),
        eos_id=trainer.get(_EOS_ID, 2),
        pad_id=trainer.get(_PAD_ID, -1),
        byte_fallback=bool(trainer.get(_BYTE_FALLBACK, 0)),
        split_by_whitespace=bool(trainer.get(_SPLIT_AT_SPACE, 1)),
        charsmap=normalizer.get(_CHARSMAP, b""),
        add_dummy_prefix=bool(normalizer.get(_DUMMY_PREFIX, 1)),
        remove_extra_whitespaces=bool(normalizer.get(_REMOVE_SPACES, 1)),
    )


def spm_backend(
    model: SpmModel, pieces: Sequence[Piece], *, prepend: bool | None = None, legacy: bool = False
) -> Backend:
    """The `tokenizers` library's tokenizer that cuts text as the model does.

    Control pieces are found in raw text before all else, as `transformers` does it. Those that a
    user defined are always preferred: in a unigram model by their scores, as SentencePiece does it,
    with BPE by looking for them in the normalised text first.

    Args:
        pieces: the vocabulary in the order of the ids: the model's own, or rearranged.
        prepend: whether a space is put before a text; `None` for what the model says.
        legacy: put it also before the text after each special (LLaMA's first tokenizer).
    """
    backend = Backend(_bpe(model, pieces) if model.is_bpe else _unigram(model, pieces))
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    prepends = model.add_dummy_prefix if prepend is None else prepend
    trims = model.remove_extra_whitespaces
    symbols = [piece for piece in pieces if model.is_bpe and piece.kind == USER_DEFINED]
    each = legacy or (trims and not symbols)  # a symbol cuts the text, and no space comes after it
    scheme = "never" if not prepends else "always" if each else "first"
    split = model.split_by_whitespace and trims  # else pieces may hold several spaces
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=split)
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prepends:
        decoding.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(decoding)
    marks = [piece for piece in pieces if piece.kind in (CONTROL, UNKNOWN)]
    backend.add_special_tokens([AddedToken(p.text, normalized=False) for p in marks])
    backend.add_tokens([AddedToken(p.text, normalized=True) for p in symbols])
    return backend


def _unigram(model: SpmModel, pieces: Sequence[Piece]) -> models.Unigram:
    lowest = min(piece.score for piece in pieces if piece.kind == NORMAL)

    def score(piece: Piece) -> float:
        if piece.kind == USER_DEFINED:
            return _USER_DEFINED_SCORE
        return lowest if piece.kind == UNUSED else piece.score

    unk_id = [piece.kind for piece in pieces].index(UNKNOWN)
    vocab = [(piece.text, score(piece)) for piece in pieces]
    return models.Unigram(vocab, unk_id=unk_id, byte_fallback=model.byte_fallback)


def _bpe(model: SpmModel, pieces: Sequence[Piece]) -> models.BPE:
    """Byte pair encoding with the merges that the scores of the pieces stand for.

    SentencePiece joins the two neighbours whose union has the highest score, whichever they are.
    """
    ids = {piece.text: i for i, piece in enumerate(pieces)}
    joinable = {piece.text for piece in pieces if piece.kind == NORMAL}
    merges = [
        (-piece.score, len(piece.text[:cut]), len(piece.text), piece.text[:cut], piece.text[cut:])
        for piece in pieces
        if piece.kind == NORMAL
        for cut in range(1, len(piece.text))
        if piece.text[:cut] in joinable and piece.text[cut:] in joinable
    ]
    merges.sort(key=lambda merge: merge[:3])
    unk = next(piece.text for piece in pieces if piece.kind == UNKNOWN)
    return models.BPE(
        ids,
        [merge[3:] for merge in merges],
        unk_token=unk,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def _piece(data: bytes) -> Piece:
    fields = dict(_fields(data))
    (score,) = struct.unpack("<f", fields.get(_SCORE, bytes(4)))
    return Piece(fields[_PIECE].decode(), score, fields.get(_TYPE, NORMAL))


def _last(fields: list[tuple[int, Any]], number: int) -> dict[int, Any]:
    """The fields of a message inside the message; none where it is absent."""
    found = [value for key, value in fields if key == number]
    return dict(_fields(found[-1])) if found else {}


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The numbers and values of a protobuf message's fields (the wire format, version 3).

    A value is an int (varint), or bytes: fixed width or with a length.
    """
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        wire = key & 7
        if wire == 0:
            value, place = _varint(data, place)
            # Negative numbers come as 64 bits of two's complement.
            yield key >> 3, value - (1 << 64) if value >> 63 else value
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"no protobuf field of type {wire} at byte {place}")
        width = 8 if wire == 1 else 4
        if wire == 2:
            width, place = _varint(data, place)
        if place + width > len(data):
            raise ValueError(f"cut short at byte {place}")
        yield key >> 3, data[place : place + width]
        place += width


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """A number of 7 bits a byte, lowest first, and the place after it."""
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
