"""Tokenizers in the metadata of GGUF, so that llama.cpp encodes texts to the same ids.

llama.cpp has no general tokenizer but three algorithms, each with fixed steps before it: byte-level
BPE, SentencePiece's BPE and SentencePiece's unigram. All other tokenizers are refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from heedful.data.decoding import BYTE
from heedful.data.tokenizer import Tokenizer
from heedful.data.tokenizer_training import SPACE
from heedful.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE_PIECE = range(1, 7)  # types of tokens

_CASELESS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
_REST = "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
# The words of a byte-level BPE, and whether a word in the vocabulary is left whole -> the name of
# both in llama.cpp.
_PRE_TOKENIZERS = {
    ("ByteLevel", False): "gpt-2",
    (_CASELESS + "\\p{N}{1,3}" + _REST, True): "llama-bpe",
    (_CASELESS + "\\p{N}" + _REST, False): "qwen2",
}
_NO_MERGE = f"{SPACE} {SPACE}"  # a merge that no text has: the space is another character there


class _Model(NamedTuple):
    """The vocabulary for one algorithm: metadata, and a score and type for each ordinary piece."""

    metadata: dict[str, Any]
    scores: Mapping[str, float]
    types: Mapping[str, int]


def tokenizer_to_gguf(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """The keys of the metadata for a tokenizer.

    Args:
        vocab_size: rows of the net's embedding; ids without a token get a name that no text has.

    Raises:
        UserError: llama.cpp has no such tokenizer, with the reason.
    """
    if tokenizer.has_own_pieces:
        raise _unsupported("its ids are not those of its pieces (Marian)")
    content = tokenizer.content()["tokenizer"]
    kind = content["model"]["type"]
    if kind == "BPE" and _is_byte_level(content):
        model = _byte_level(content)
    elif kind == "BPE":
        model = _sentencepiece_bpe(content, tokenizer)
    elif kind == "Unigram":
        model = _unigram(content)
    else:
        raise _unsupported(f"its pieces are those of {kind}")
    return {
        f"tokenizer.ggml.{key}": value
        for key, value in {
            **model.metadata,
            **_tokens(tokenizer, content, model, vocab_size),
            **_special_ids(tokenizer),
        }.items()
    } | ({} if (template := tokenizer.chat_template) is None else {_CHAT_TEMPLATE: template})


_CHAT_TEMPLATE = "tokenizer.chat_template"


def tokenizer_notice(tokenizer: Tokenizer) -> str | None:
    """The known difference between the encodings of llama.cpp and of a supported tokenizer."""
    content = tokenizer.content()["tokenizer"]
    if any(step["type"] == "NFC" for step in _steps(content, "normalizer")):
        return (
            "llama.cpp does not normalize texts to NFC as the tokenizer does: give it texts in NFC"
        )
    splits = _steps(content, "pre_tokenizer")
    if any(step["type"] == "Metaspace" and step["prepend_scheme"] != "never" for step in splits):
        return "llama.cpp adds a space before a text that begins with one; heedful does not"
    return None


def _unsupported(reason: str) -> UserError:
    return UserError(
        f"llama.cpp has no tokenizer like this one: {reason}; give tokenizer=False to export the "
        "net alone, which then reads ids, or train with tokenizer.kind byte_bpe"
    )


def _tokens(
    tokenizer: Tokenizer, content: Mapping[str, Any], model: _Model, vocab_size: int
) -> dict[str, Any]:
    """The list of tokens with their types, and scores if the algorithm has them."""
    added = {token["id"]: token for token in content["added_tokens"]}
    for token in added.values():
        if not token["special"] and (token["lstrip"] or token["rstrip"] or token["single_word"]):
            raise _unsupported(f"the token {token['content']!r} depends on the text around it")
    ids = _pieces(content)
    names, types, scores = [], [], []
    for i in range(max(vocab_size, tokenizer.vocab_size)):
        token = added.get(i)
        name = ids.get(i) if token is None else token["content"]
        kind = UNUSED if name is None else model.types.get(name, NORMAL)
        if i == tokenizer.unk_id:
            kind = UNKNOWN
        elif i in tokenizer.special_ids:
            kind = CONTROL
        elif token is not None:
            kind = USER_DEFINED
        names.append(f"[PAD{i}]" if name is None else name)
        types.append(kind)
        scores.append(float(model.scores.get(names[-1], 0.0)))
    if len({*names}) < len(names):
        raise _unsupported("two ids have the same token")
    return {"tokens": names, "token_type": types} | ({"scores": scores} if model.scores else {})


def _special_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """Ids of special tokens by role, and whether a prompt begins with BOS."""
    specials, prefix = tokenizer.specials, tokenizer.prefix_ids
    if prefix not in ((), (specials.bos_id,)):
        raise _unsupported(f"it puts {' '.join(tokenizer.tokens(prefix))} before a text")
    roles = {
        "bos": specials.bos_id,
        "eos": specials.eos_id,
        "unknown": specials.unk_id,
        "padding": specials.pad_id,
    }
    ids = {f"{role}_token_id": i for role, i in roles.items() if i is not None}
    # Prompts end without EOS, whatever the template of the texts in training.
    return {**ids, "add_bos_token": bool(prefix), "add_eos_token": False}


def _pieces(content: Mapping[str, Any]) -> dict[int, str]:
    """The pieces of the vocabulary by id, without added tokens."""
    vocab = content["model"]["vocab"]
    if isinstance(vocab, dict):
        return {i: piece for piece, i in vocab.items()}
    return {i: piece for i, (piece, _) in enumerate(vocab)}


def _is_byte_level(content: Mapping[str, Any]) -> bool:
    return any(step["type"] == "ByteLevel" for step in _steps(content, "pre_tokenizer"))


def _steps(content: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The steps of the normalizer or pre-tokenizer, in their order."""
    step = content[name]
    if step is None:
        return []
    inner = step.get("normalizers" if name == "normalizer" else "pretokenizers")
    return [step] if inner is None else list(inner)


def _byte_level(content: Mapping[str, Any]) -> _Model:
    """Byte-level BPE (GPT-2, LLaMA 3, Qwen3)."""
    model = content["model"]
    for step in _steps(content, "normalizer"):
        if step["type"] != "NFC":  # see `tokenizer_notice`
            raise _unsupported(f"it normalizes texts ({step['type']}) before byte-level BPE")
    *splits, last = _steps(content, "pre_tokenizer")
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        raise _unsupported("it adds a space before a text")
    words = "ByteLevel" if last["use_regex"] else None
    if splits:
        pattern = splits[0].get("pattern", {}).get("Regex")
        words = pattern if words is None and len(splits) == 1 else None
    if not model["merges"]:
        words = "ByteLevel"  # without merges all splits are equal
    pre = _PRE_TOKENIZERS.get((str(words), bool(model["ignore_merges"])))
    if pre is None:
        raise _unsupported("it splits texts into words as none of GPT-2, LLaMA 3 and Qwen does")
    merges = [" ".join(merge) for merge in model["merges"]]
    return _Model({"model": "gpt2", "pre": pre, "merges": merges or [_NO_MERGE]}, {}, {})


def _sentencepiece_bpe(content: Mapping[str, Any], tokenizer: Tokenizer) -> _Model:
    """SentencePiece's BPE (LLaMA, Mistral, Gemma): the best piece is merged first, by its score."""
    model = content["model"]
    vocab: dict[str, int] = model["vocab"]
    if not model["byte_fallback"] or any(f"<0x{byte:02X}>" not in vocab for byte in range(256)):
        raise _unsupported(
            "it is BPE on characters without a piece for each byte, so that characters may be "
            "unknown"
        )
    if model["ignore_merges"] or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        raise _unsupported("its merges are not those of SentencePiece")
    prefix = _adds_space(content)
    added = {token["content"] for token in content["added_tokens"]}
    others = added - {tokenizer.piece(i) for i in tokenizer.special_ids}
    if prefix and others:
        raise _unsupported(f"it adds a space before a text, but none after {min(others)!r}")
    ranks: dict[str, int] = {}
    last = None
    for first, second in model["merges"]:
        piece = first + second
        if piece != last and piece in ranks:
            raise _unsupported(f"its merges to {piece!r} are not next to each other")
        ranks.setdefault(piece, len(ranks))
        last = piece
    pairs = {(first, second) for first, second in model["merges"]}
    for first, second in _cuts(set(vocab) - added, vocab):
        if (first, second) not in pairs:
            raise _unsupported(f"it does not merge {first!r} and {second!r} to a piece that it has")
    types = {piece: BYTE_PIECE for piece in vocab if BYTE.fullmatch(piece)}
    scores = dict.fromkeys(vocab, 0.0) | {piece: -float(rank) for piece, rank in ranks.items()}
    metadata = {"model": "llama", "pre": "default", "add_space_prefix": prefix}
    return _Model(metadata, scores, types)


def _cuts(pieces: set[str], vocab: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """All ways to make a piece from two other ones."""
    for piece in pieces:
        if BYTE.fullmatch(piece):
            continue
        for cut in range(1, len(piece)):
            if piece[:cut] in vocab and piece[cut:] in vocab:
                yield piece[:cut], piece[cut:]


def _adds_space(content: Mapping[str, Any]) -> bool:
    """True if a space is added before a text; raises UserError for other normalization.

    Two spellings: a normalizer that replaces spaces by U+2581, and a pre-tokenizer that does.
    """
    normalizers = [step["type"] for step in _steps(content, "normalizer")]
    splits = _steps(content, "pre_tokenizer")
    if normalizers in (["Prepend", "Replace"], ["Replace"]):
        replace = _steps(content, "normalizer")[-1]
        if replace["pattern"] == {"String": " "} and replace["content"] == SPACE:
            splits = [step for step in splits if step.get("pattern") != {"String": " "}]
            if not splits:
                return normalizers[0] == "Prepend"
    if not normalizers and [step["type"] for step in splits] == ["Metaspace"]:
        return _metaspace(content, splits[0])
    raise _unsupported("it normalizes texts otherwise than by U+2581 for spaces")


def _metaspace(content: Mapping[str, Any], step: Mapping[str, Any]) -> bool:
    """True if this pre-tokenizer adds a space; raises UserError if it splits pieces."""
    if step["split"] and any(SPACE in piece[1:] for piece in _pieces(content).values()):
        raise _unsupported("it splits texts at spaces, but has pieces with a space inside")
    return bool(step["prepend_scheme"] != "never")


def _unigram(content: Mapping[str, Any]) -> _Model:
    """SentencePiece's unigram model."""
    model = content["model"]
    if model["unk_id"] is None or model["byte_fallback"]:
        raise _unsupported("it is a unigram model without an unknown token, or with bytes")
    steps, splits = _steps(content, "normalizer"), _steps(content, "pre_tokenizer")
    if [step["type"] for step in splits] != ["Metaspace"] or not _trims_only(steps):
        raise _unsupported(
            "it normalizes or splits texts otherwise than a SentencePiece model with the rule "
            "`identity`"
        )
    metadata: dict[str, Any] = {
        "model": "t5",
        "pre": "default",
        "add_space_prefix": _metaspace(content, splits[0]),
        "remove_extra_whitespaces": bool(steps),
    }
    return _Model(metadata, dict(model["vocab"]), {})


def _trims_only(steps: Sequence[Mapping[str, Any]]) -> bool:
    """True for no steps, and for those that remove spaces at the ends and repeated ones."""
    patterns = [(step.get("pattern", {}).get("Regex"), step.get("content")) for step in steps]
    return patterns in ([], [(" {2,}", " "), (r"\A +| +\z", "")])
