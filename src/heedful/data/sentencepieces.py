"""SentencePiece models (Kudo and Richardson 2018) as tokenizers of the `tokenizers` library."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from heedful import extras
from heedful.data.tokenizer_training import SPACE
from heedful.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of pieces

# The score that SentencePiece uses for user-defined symbols instead of that in the file. It is
# higher than all others, so that they are always selected.
_USER_DEFINED_SCORE = -0.1


class VocabularyPiece(NamedTuple):
    """One entry of the vocabulary; `type` is one of the types above."""

    piece: str
    score: float
    type: int


def read_sentencepiece(path: Path) -> Any:
    """The `ModelProto` of a `.model` or `.spm` file.

    Raises:
        UserError: the file cannot be read, is not a SentencePiece model, or has a type that is not
            supported (word, char, spaces after words); sentencepiece is not installed.
    """
    extras.require("import", f"{path} is a SentencePiece model, which")
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2 as protocol

    try:
        model = getattr(protocol, "ModelProto").FromString(path.read_bytes())  # noqa: B009
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (DecodeError, ValueError) as error:
        raise UserError(f"{path} is damaged or not a SentencePiece model: {error}") from None
    if not any(piece.type == UNKNOWN for piece in model.pieces):
        raise UserError(f"{path} is damaged or not a SentencePiece model: it has no unknown piece")
    spec = model.trainer_spec
    kind = spec.ModelType.Name(spec.model_type).lower()
    if kind not in ("unigram", "bpe") or spec.treat_whitespace_as_suffix:
        raise UserError(
            f"{path} is a SentencePiece model of type {kind}, or puts spaces after words; only"
            " unigram and bpe with spaces before words can be imported"
        )
    return model


def sentencepiece_backend(
    model: Any, pieces: Sequence[Any], *, prepend: bool | None = None, legacy: bool = False
) -> Backend:
    """A tokenizer of the `tokenizers` library that is equivalent to a SentencePiece model.

    Control pieces are matched in the raw text first, as in `transformers`. User-defined pieces are
    always preferred: in a unigram model by their scores, as in SentencePiece; with BPE they are
    matched in the normalized text first.

    Args:
        model: the result of `read_sentencepiece`.
        pieces: the vocabulary in the order of the ids, which may differ from the model's.
        prepend: add a space before a text; `None`: as set in the model.
        legacy: also add one before the text after each special token (LLaMA's first tokenizer).
    """
    is_bpe = model.trainer_spec.model_type == model.trainer_spec.BPE
    backend = Backend(_bpe(model, pieces) if is_bpe else _unigram(model, pieces))
    settings = model.normalizer_spec
    charsmap, trims = settings.precompiled_charsmap, settings.remove_extra_whitespaces
    steps: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if trims:
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    prepends = settings.add_dummy_prefix if prepend is None else prepend
    symbols = [piece for piece in pieces if is_bpe and piece.type == USER_DEFINED]
    # A user-defined symbol splits the text, and no space is added after it.
    prepends_always = legacy or (trims and not symbols)
    scheme = "never" if not prepends else "always" if prepends_always else "first"
    split = model.trainer_spec.split_by_whitespace and trims  # pieces may contain several spaces
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=split)
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prepends:
        decoding.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(decoding)
    specials = [piece for piece in pieces if piece.type in (CONTROL, UNKNOWN)]
    backend.add_special_tokens([AddedToken(p.piece, normalized=False) for p in specials])
    backend.add_tokens([AddedToken(p.piece, normalized=True) for p in symbols])
    return backend


def _unigram(model: Any, pieces: Sequence[Any]) -> models.Unigram:
    lowest = min(piece.score for piece in pieces if piece.type == NORMAL)
    scores = {USER_DEFINED: _USER_DEFINED_SCORE, UNUSED: lowest}
    return models.Unigram(
        [(piece.piece, scores.get(piece.type, piece.score)) for piece in pieces],
        unk_id=[piece.type for piece in pieces].index(UNKNOWN),
        byte_fallback=model.trainer_spec.byte_fallback,
    )


def _bpe(model: Any, pieces: Sequence[Any]) -> models.BPE:
    """A BPE model whose merges are equivalent to the scores of SentencePiece's pieces.

    SentencePiece merges the two adjacent pieces whose union has the highest score.
    """
    scores = {piece.piece: piece.score for piece in pieces if piece.type == NORMAL}
    merges = [
        (-score, cut, len(text), text[:cut], text[cut:])
        for text, score in scores.items()
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]
    merges.sort(key=lambda merge: merge[:3])
    return models.BPE(
        {piece.piece: i for i, piece in enumerate(pieces)},
        [merge[3:] for merge in merges],
        unk_token=next(piece.piece for piece in pieces if piece.type == UNKNOWN),
        fuse_unk=True,
        byte_fallback=model.trainer_spec.byte_fallback,
    )
