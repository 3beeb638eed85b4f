"""Tokenizers of Hugging Face directories: read into ours, and written for `transformers`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from heedful.data.hf_settings import Settings, read_settings
from heedful.data.sentencepieces import (
    CONTROL,
    UNKNOWN,
    UNUSED,
    Piece,
    read_sentencepiece,
    sentencepiece_backend,
)
from heedful.data.tokenizer import IMPORTED, ROLES, Tokenizer
from heedful.errors import UserError
from heedful.files import read_json, replacing, write_json

Side = Literal["source", "target"]
Made = TypeVar("Made")

_SPM_FILES = ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model")
_SHIFTED = "sentencepiece.bpe.model"  # the name of files whose ids each model shifts in its own way
_PLAIN = "sentencepiece"  # a model of that library whose ids are taken as they are
_END_OF_WORD = "</w>"


def open_tokenizer(path: Path, side: Side | None = None) -> Tokenizer:
    """One's own tokenizer: a directory, or one file of it.

    Files: a `tokenizer.json` of heedful or of Hugging Face, or a SentencePiece model (`.model`,
    `.spm`). What stands beside a file says its specials, as in `read_tokenizer`.

    Raises:
        UserError: there is no tokenizer; as `read_tokenizer`.
    """
    if path.is_dir():
        found = read_tokenizer(path, side)
        if found is None:
            raise UserError(f"{path} holds no tokenizer's files; name a tokenizer's file or folder")
        return found
    settings = read_settings(path.parent)
    if path.suffix in (".model", ".spm"):
        return _read_sentencepiece(path, settings)
    return _read_whole(path, settings)


def read_tokenizer(directory: Path, side: Side | None = None) -> Tokenizer | None:
    """The tokenizer of a local Hugging Face directory; `None` where it has no tokenizer files.

    It keeps its ids, its specials and its template, and encodes as `transformers` does; unlike one
    trained here it therefore also finds specials in text ("</s>" becomes EOS). Read in this order:
    `tokenizer.json`; `source.spm` and `target.spm` with `vocab.json` (Marian); `vocab.txt` (BERT's
    WordPiece); `vocab.json` with `merges.txt` (byte-level BPE of GPT-2, RoBERTa and BART, and
    GPT-1's); a SentencePiece model (T5, LLaMA, XLM-RoBERTa and others; these and Marian's need the
    packages of the extra `import`).

    Args:
        side: which one of a model with two; the source's when it is not said. What
            `write_tokenizer` wrote as a pair is found again.

    Raises:
        UserError: a file is broken, or made for a model whose rules are not known here.
    """
    of_side = directory / f"tokenizer_{side or 'source'}"
    here = of_side if of_side.is_dir() else directory
    names = {path.name for path in here.iterdir()} if here.is_dir() else set()
    settings = read_settings(here)
    if "tokenizer.json" in names:
        return _read_whole(here / "tokenizer.json", settings)
    if {"source.spm", "target.spm", "vocab.json"} <= names:
        return _read_marian(settings, side or "source")
    if "vocab.txt" in names:
        return _read_wordpiece(here / "vocab.txt", settings)
    if {"vocab.json", "merges.txt"} <= names:
        return _read_bpe(here / "vocab.json", here / "merges.txt", settings)
    for name in _SPM_FILES:
        if name in names:
            return _read_sentencepiece(here / name, settings)
    return None


def write_tokenizer(tokenizer: Tokenizer, directory: Path, target: Tokenizer | None = None) -> None:
    """Write what `transformers.AutoTokenizer.from_pretrained(directory)` loads.

    That is `tokenizer.json` and `tokenizer_config.json`, with the specials by their roles and the
    template; the ids are the same, also for names of specials written in text (but where masks or
    sentinels are among them: over there these can only be written so).

    A model with two different tokenizers gets the source's in `directory` itself, and each in a
    directory of its own, `tokenizer_source/` and `tokenizer_target/`, because `transformers` has
    one tokenizer a directory. Only Marian's is two in one: those that were imported go back as the
    files that they came from (`source.spm`, `target.spm`, `vocab.json`), for `MarianTokenizer`.

    Raises:
        UserError: the files cannot be written, or a pair is there that would be taken for them.
    """
    for side in ("source", "target"):
        if (directory / f"tokenizer_{side}").exists():
            raise UserError(f"{directory} holds a pair of tokenizers already; name another place")
    if target is None or target is tokenizer or target.content() == tokenizer.content():
        _write_one(tokenizer, directory)
    elif tokenizer.files and target.files:
        _write_marian(tokenizer, target, directory)
    else:
        _write_one(tokenizer, directory)
        _write_one(tokenizer, directory / "tokenizer_source")
        _write_one(target, directory / "tokenizer_target")


def _read_whole(path: Path, settings: Settings) -> Tokenizer:
    content = read_json(path)
    if isinstance(content, dict) and "format" in content:
        return Tokenizer.load(path)  # a model directory of heedful
    backend: Backend = _made(path, lambda: Backend.from_file(str(path)))
    # To what length batches were once cut and filled is no business of the text.
    backend.no_truncation()
    backend.no_padding()
    return _finished(backend, settings, has_template=True)


def _read_wordpiece(path: Path, settings: Settings) -> Tokenizer:
    settings = settings.of(("bert",), path, otherwise="bert")
    text: str = _made(path, lambda: path.read_text(encoding="utf-8"))
    vocab = {piece: i for i, piece in enumerate(text.removesuffix("\n").split("\n"))}
    unk = settings.name("unk")
    if unk not in vocab:
        raise UserError(f"{path} is damaged or not WordPiece's: it lacks {unk}")
    config = settings.config
    backend = Backend(models.WordPiece(vocab, unk_token=unk))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case", True),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return _finished(backend, settings)


def _read_bpe(path: Path, merges: Path, settings: Settings) -> Tokenizer:
    vocab = _read_vocab(path)
    ends_words = any(piece.endswith(_END_OF_WORD) for piece in vocab)
    family = "gpt1" if ends_words else "roberta" if "<s>" in vocab else "gpt2"
    settings = settings.of(("gpt1",) if ends_words else ("gpt2", "roberta"), path, otherwise=family)
    options: dict[str, Any] = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    if ends_words:
        options |= {"end_of_word_suffix": _END_OF_WORD, "unk_token": settings.name("unk")}
    model = _made(merges, lambda: models.BPE.from_file(str(path), str(merges), **options))
    backend = Backend(model)
    if ends_words:
        backend.normalizer = normalizers.BertNormalizer(lowercase=True)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.BPEDecoder(suffix=_END_OF_WORD)
    else:
        prefix_space = bool(settings.config.get("add_prefix_space", False))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
        backend.decoder = decoders.ByteLevel()
    return _finished(backend, settings)


def _read_sentencepiece(path: Path, settings: Settings) -> Tokenizer:
    if path.name == _SHIFTED:
        settings = settings.of(("xlm-roberta",), path, otherwise=None)
    else:
        settings = settings.of(("t5", "llama"), path, otherwise=_PLAIN)
    model = read_sentencepiece(path)
    pieces, config = list(model.pieces), settings.config
    if settings.family == "t5":
        # The first sentinel is the last id.
        numbers = reversed(range(int(config.get("extra_ids", 100))))
        pieces += [Piece(f"<extra_id_{number}>", 0.0, CONTROL) for number in numbers]
    elif settings.family == "xlm-roberta":
        first = [Piece(name, 0.0, CONTROL) for name in ("<s>", "<pad>", "</s>")]
        pieces = [*first, Piece("<unk>", 0.0, UNKNOWN), *pieces[3:], Piece("<mask>", 0.0, CONTROL)]
    prepend, legacy = config.get("add_prefix_space"), bool(config.get("legacy", False))
    backend: Backend = _made(
        path, lambda: sentencepiece_backend(model, pieces, prepend=prepend, legacy=legacy)
    )
    if settings.family == _PLAIN:
        spec = model.trainer_spec
        ids = {"bos": spec.bos_id, "eos": spec.eos_id, "pad": spec.pad_id, "unk": spec.unk_id}
        settings = settings.with_ids(backend, ids)
    return _finished(backend, settings)


def _read_marian(settings: Settings, side: Side) -> Tokenizer:
    """Marian's: pieces of the side's SentencePiece model, with their ids from `vocab.json`."""
    directory = settings.directory
    path, vocab_path = directory / f"{side}.spm", directory / "vocab.json"
    settings = settings.of(("marian",), path, otherwise="marian")
    if side == "target" and settings.config.get("separate_vocabs", False):
        vocab_path = directory / "target_vocab.json"
    piece_ids = _read_vocab(vocab_path)
    if settings.name("unk") not in piece_ids:
        raise UserError(f"{vocab_path} is damaged: it lacks {settings.name('unk')}")
    model = read_sentencepiece(path)
    # A control piece is never cut from text, and its id here means nothing.
    pieces = [piece for piece in model.pieces if piece.type not in (CONTROL, UNUSED)]
    backend: Backend = _made(path, lambda: sentencepiece_backend(model, pieces))
    languages = [piece for piece in piece_ids if piece.startswith(">>") and piece.endswith("<<")]
    backend.add_tokens([AddedToken(name, normalized=False) for name in languages])
    replace(settings, added={}, stated=settings.names).register(backend)
    settings.set_template(backend, piece_ids.get)
    files = {file.name: file.read_bytes() for file in (path, vocab_path)}
    return Tokenizer(backend, IMPORTED, settings.roles, piece_ids=piece_ids, files=files)


def _finished(backend: Backend, settings: Settings, *, has_template: bool = False) -> Tokenizer:
    """The tokenizer, with every special of the settings known to the backend."""
    if not settings.names:
        ids = {role: settings.model.get(f"{role}_token_id") for role in ROLES}
        settings = settings.with_ids(backend, ids)
    settings.register(backend)
    if not has_template:
        settings.set_template(backend, backend.token_to_id)
    as_text = bool(settings.config.get("split_special_tokens", False))
    return Tokenizer(backend, IMPORTED, settings.roles, specials_are_text=as_text)


def _read_vocab(path: Path) -> dict[str, int]:
    vocab = read_json(path)
    if not isinstance(vocab, dict) or not all(isinstance(i, int) for i in vocab.values()):
        raise UserError(f"{path} is damaged: it holds no pieces with their ids")
    return vocab


def _made(path: Path, make: Callable[[], Made]) -> Made:
    try:
        return make()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises nothing narrower, and panics of its Rust
        raise UserError(f"{path} is damaged or of another kind: {error}") from error


def _write_one(tokenizer: Tokenizer, directory: Path) -> None:
    if tokenizer.files:
        _write_marian(tokenizer, tokenizer, directory)
        return
    write_json(directory / "tokenizer.json", tokenizer.content()["tokenizer"])
    write_json(directory / "tokenizer_config.json", _config(tokenizer))


def _write_marian(tokenizer: Tokenizer, target: Tokenizer, directory: Path) -> None:
    files = {**target.files, **tokenizer.files}
    one = files["source.spm" if "source.spm" in files else "target.spm"]  # stands for both
    for name, data in ({"source.spm": one, "target.spm": one} | files).items():
        with replacing(directory / name) as file:
            file.write(data)
    config = _config(tokenizer)
    config["tokenizer_class"] = "MarianTokenizer"
    config["separate_vocabs"] = "target_vocab.json" in files
    write_json(directory / "tokenizer_config.json", config)


def _config(tokenizer: Tokenizer) -> dict[str, Any]:
    specials = tokenizer.specials
    ids = {role: getattr(specials, f"{role}_id") for role in ROLES}
    names = {f"{role}_token": tokenizer.tokens([i])[0] for role, i in ids.items() if i is not None}
    others = sorted(tokenizer.special_ids - set(ids.values()))
    inputs = ["input_ids", "attention_mask"]
    # What is to be filled in can only be written by its name over there.
    is_filled = specials.mask_id is not None or bool(specials.sentinel_ids)
    as_text = tokenizer.specials_are_text and (tokenizer.kind == IMPORTED or not is_filled)
    if specials.cls_id is not None and specials.cls_id != specials.bos_id:
        inputs.insert(1, "token_type_ids")  # BERT's, which tells the texts of a pair apart
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "additional_special_tokens": tokenizer.tokens(others),
        "model_input_names": inputs,
        "split_special_tokens": as_text,
        "clean_up_tokenization_spaces": False,
    }
