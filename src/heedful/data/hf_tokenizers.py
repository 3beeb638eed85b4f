"""Read tokenizers of Hugging Face directories, and write them for `transformers`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from heedful.data.hf_settings import GENERIC, MULTILINGUAL, TokenizerSettings, read_settings
from heedful.data.language_codes import M2M100, MBART50, NLLB
from heedful.data.sentencepieces import (
    CONTROL,
    UNKNOWN,
    UNUSED,
    VocabularyPiece,
    read_sentencepiece,
    sentencepiece_backend,
)
from heedful.data.special_tokens import language_names, language_tokens, read_template
from heedful.data.tokenizer import IMPORTED, ROLES, Tokenizer
from heedful.errors import UserError
from heedful.files import atomic_open, read_json, write_json

Side = Literal["source", "target"]
T = TypeVar("T")

_SPM_FILES = ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model")
_SHIFTED = "sentencepiece.bpe.model"  # name of files whose ids are shifted, differently by model
_PLAIN = "sentencepiece"  # family of SentencePiece models whose ids are unchanged
_END_OF_WORD = "</w>"
_BYTE_LEVEL = ("gpt2", "roberta")  # families with byte-level BPE
_BERT_NORMALIZER = {  # attributes of the normalizer -> keys of `tokenizer_config.json`
    "lowercase": "do_lower_case",
    "strip_accents": "strip_accents",
    "handle_chinese_chars": "tokenize_chinese_chars",
}


def open_tokenizer(path: Path, side: Side | None = None) -> Tokenizer:
    """Read a tokenizer from a directory or a file.

    A file is a `tokenizer.json` of heedful or Hugging Face, or a SentencePiece model (`.model`,
    `.spm`); other files in its folder define the special tokens, as in `read_tokenizer`.

    Raises:
        UserError: no tokenizer; see also `read_tokenizer`.
    """
    if path.is_dir():
        tokenizer = read_tokenizer(path, side)
        if tokenizer is None:
            raise UserError(f"{path} holds no tokenizer files; name a tokenizer's file or folder")
        return tokenizer
    settings = read_settings(path.parent)
    if path.suffix in (".model", ".spm"):
        return _read_sentencepiece(path, settings)
    return _read_json(path, settings)


def read_tokenizer(directory: Path, side: Side | None = None) -> Tokenizer | None:
    """Read the tokenizer of a Hugging Face directory; `None` if it has no tokenizer files.

    Ids, special tokens and template are preserved, and text is encoded as by `transformers`: names
    of special tokens in a text are encoded as special tokens, unlike by tokenizers trained here.
    Files, the first that exist: `tokenizer.json`; `source.spm` and `target.spm` with `vocab.json`
    (Marian); `vocab.txt` (BERT's WordPiece); `vocab.json` with `merges.txt` (byte-level BPE of
    GPT-2, RoBERTa and BART, or GPT-1's), or with a SentencePiece model (M2M100); a SentencePiece
    model alone (T5, LLaMA, XLM-RoBERTa, NLLB, mBART-50 and others). All SentencePiece models need
    the packages of the extra `import`. Tokens of languages are in no template: models put them
    before a text.

    Args:
        side: for models with a tokenizer for the source and one for the target; default: source.

    Raises:
        UserError: a file is damaged, or of a model that is not supported.
    """
    side_directory = directory / f"tokenizer_{side or 'source'}"
    if side_directory.is_dir():
        directory = side_directory
    names = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    settings = read_settings(directory)
    if "tokenizer.json" in names:
        return _read_json(directory / "tokenizer.json", settings)
    if {"source.spm", "target.spm", "vocab.json"} <= names:
        return _read_marian(settings, side or "source")
    if "vocab.txt" in names:
        return _read_wordpiece(directory / "vocab.txt", settings)
    if {"vocab.json", "merges.txt"} <= names:
        return _read_bpe(directory / "vocab.json", directory / "merges.txt", settings)
    if {"vocab.json", _SHIFTED} <= names:
        return _read_m2m100(settings)
    for name in _SPM_FILES:
        if name in names:
            return _read_sentencepiece(directory / name, settings)
    return None


def write_tokenizer(tokenizer: Tokenizer, directory: Path, target: Tokenizer | None = None) -> None:
    """Write a tokenizer for `transformers.AutoTokenizer.from_pretrained(directory)`.

    The files are `tokenizer.json` and `tokenizer_config.json`, with special tokens, roles and
    template. Encoded ids are equal. Exception: with mask or sentinel tokens, transformers encodes
    the names of special tokens in a text as such, since it has no other way to write them.

    `transformers` has one tokenizer per directory. Of a model with two different tokenizers
    `directory` has the source's, and its folders `tokenizer_source/` and `tokenizer_target/` both.
    Imported Marian tokenizers are written as their original files (`source.spm`, `target.spm`,
    `vocab.json`) for `MarianTokenizer`, which has both, and so are those of M2M100.

    Args:
        target: the tokenizer of the target, if it is another one.

    Raises:
        UserError: the files cannot be written, or the directory already holds two tokenizers.
    """
    for side in ("source", "target"):
        if (directory / f"tokenizer_{side}").exists():
            raise UserError(f"{directory} already holds two tokenizers; name another folder")
    if target is not None and needs_two_folders(tokenizer, target):
        _write_one(tokenizer, directory)
        _write_one(tokenizer, directory / "tokenizer_source")
        _write_one(target, directory / "tokenizer_target")
    elif target is not None and tokenizer.files and target.files:
        _write_original(tokenizer, target, directory)
    else:
        _write_one(tokenizer, directory)


def needs_two_folders(tokenizer: Tokenizer, target: Tokenizer) -> bool:
    """True if `write_tokenizer` writes the tokenizers of source and target into two folders."""
    if target is tokenizer or (tokenizer.files and target.files):
        return False
    return target.content() != tokenizer.content()


def _read_json(path: Path, settings: TokenizerSettings) -> Tokenizer:
    content = read_json(path)
    if isinstance(content, dict) and "format" in content:
        return Tokenizer.load(path)  # a model directory of heedful
    backend: Backend = _call_library(path, lambda: Backend.from_file(str(path)))
    # The file may hold the truncation and padding of the batches that it was last used for.
    backend.no_truncation()
    backend.no_padding()
    if settings.config.get("tokenizer_class") not in GENERIC:
        _call_library(settings.directory, lambda: _set_by_class(backend, settings))
    settings, has_template = _without_language(backend, settings, path)
    return _make_tokenizer(backend, settings, has_template=has_template)


def _set_by_class(backend: Backend, settings: TokenizerSettings) -> None:
    """Set what the tokenizer classes of transformers make of `tokenizer_config.json`, whatever
    `tokenizer.json` has: BERT's normalizer, and the space before a text of byte-level BPE."""
    config, normalizer, splitter = settings.config, backend.normalizer, backend.pre_tokenizer
    if settings.family == "bert" and isinstance(normalizer, normalizers.BertNormalizer):
        for name, key in _BERT_NORMALIZER.items():
            if key in config:
                setattr(normalizer, name, config[key])
        backend.normalizer = normalizer
    if settings.family in _BYTE_LEVEL and isinstance(splitter, pre_tokenizers.ByteLevel):
        splitter.add_prefix_space = bool(config.get("add_prefix_space", False))
        backend.pre_tokenizer = splitter


def _without_language(
    backend: Backend, settings: TokenizerSettings, path: Path
) -> tuple[TokenizerSettings, bool]:
    """Settings for a tokenizer of several languages, and False if its template is not to be kept.

    The template of its file has the token of one of the languages.

    Raises:
        UserError: the token of a language is behind a text.
    """
    added = backend.get_added_tokens_decoder().values()
    languages = language_names(token.content for token in added if token.special)
    ids = set(map(backend.token_to_id, languages.values()))
    prefix, suffix, _ = read_template(backend)
    is_known = settings.family in MULTILINGUAL and bool(languages)
    # Files of NLLB have a former template, which its class in transformers replaces.
    if bool(settings.config.get("legacy_behaviour")) if is_known else ids & {*suffix}:
        raise UserError(
            f"{path} puts the token of its language behind a text, as mBART-25 and NLLB with "
            "legacy_behaviour do; only models with that token before a text are supported"
        )
    if not is_known and ids & {*prefix}:
        settings, is_known = replace(settings, family="nllb"), True
    return settings, not is_known


def _read_wordpiece(path: Path, settings: TokenizerSettings) -> Tokenizer:
    settings = settings.require_family(("bert",), path, default="bert")
    text: str = _call_library(path, lambda: path.read_text(encoding="utf-8"))
    vocab = {piece: i for i, piece in enumerate(text.removesuffix("\n").split("\n"))}
    unk = settings.name("unk")
    if unk not in vocab:
        raise UserError(f"{path} is damaged or not of a WordPiece model: it has no {unk}")
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
    return _make_tokenizer(backend, settings)


def _read_bpe(path: Path, merges: Path, settings: TokenizerSettings) -> Tokenizer:
    vocab = _read_vocab(path)
    ends_words = any(piece.endswith(_END_OF_WORD) for piece in vocab)
    family = "gpt1" if ends_words else "roberta" if "<s>" in vocab else "gpt2"
    families = ("gpt1",) if ends_words else _BYTE_LEVEL
    settings = settings.require_family(families, path, default=family)
    options: dict[str, Any] = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    if ends_words:
        options |= {"end_of_word_suffix": _END_OF_WORD, "unk_token": settings.name("unk")}
    model = _call_library(merges, lambda: models.BPE.from_file(str(path), str(merges), **options))
    backend = Backend(model)
    if ends_words:
        backend.normalizer = normalizers.BertNormalizer(lowercase=True)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.BPEDecoder(suffix=_END_OF_WORD)
    else:
        prefix_space = bool(settings.config.get("add_prefix_space", False))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
        backend.decoder = decoders.ByteLevel()
    return _make_tokenizer(backend, settings)


def _read_sentencepiece(path: Path, settings: TokenizerSettings) -> Tokenizer:
    if path.name == _SHIFTED:
        families = ("xlm-roberta", "nllb", "mbart50")
        settings = settings.require_family(families, path, default=None)
    else:
        settings = settings.require_family(("t5", "llama"), path, default=_PLAIN)
    model = read_sentencepiece(path)
    pieces, config = list(model.pieces), settings.config
    if settings.family == "t5":
        # The first sentinel has the last id.
        numbers = reversed(range(int(config.get("extra_ids", 100))))
        pieces += [VocabularyPiece(f"<extra_id_{number}>", 0.0, CONTROL) for number in numbers]
    elif path.name == _SHIFTED:
        first = [VocabularyPiece(name, 0.0, CONTROL) for name in ("<s>", "<pad>", "</s>")]
        languages = {"nllb": NLLB, "mbart50": MBART50}.get(settings.family or "", [])
        last = [VocabularyPiece(name, 0.0, CONTROL) for name in (*languages, "<mask>")]
        pieces = [*first, VocabularyPiece("<unk>", 0.0, UNKNOWN), *pieces[3:], *last]
    prepend, legacy = config.get("add_prefix_space"), bool(config.get("legacy", False))
    backend: Backend = _call_library(
        path, lambda: sentencepiece_backend(model, pieces, prepend=prepend, legacy=legacy)
    )
    if settings.family == _PLAIN:
        spec = model.trainer_spec
        ids = {"bos": spec.bos_id, "eos": spec.eos_id, "pad": spec.pad_id, "unk": spec.unk_id}
        settings = settings.with_ids(backend, ids)
    return _make_tokenizer(backend, settings)


def _read_marian(settings: TokenizerSettings, side: Side) -> Tokenizer:
    """A Marian tokenizer: the SentencePiece model of a side, with ids from `vocab.json`."""
    directory = settings.directory
    path, vocab_path = directory / f"{side}.spm", directory / "vocab.json"
    settings = settings.require_family(("marian",), path, default="marian")
    if side == "target" and settings.config.get("separate_vocabs", False):
        vocab_path = directory / "target_vocab.json"
    piece_ids = _read_vocab(vocab_path)
    if settings.name("unk") not in piece_ids:
        raise UserError(f"{vocab_path} is damaged: it has no {settings.name('unk')}")
    model = read_sentencepiece(path)
    # SentencePiece never encodes text to control pieces, and Marian does not use their ids.
    pieces = [piece for piece in model.pieces if piece.type not in (CONTROL, UNUSED)]
    backend: Backend = _call_library(path, lambda: sentencepiece_backend(model, pieces))
    languages = [piece for piece in piece_ids if piece.startswith(">>") and piece.endswith("<<")]
    backend.add_tokens([AddedToken(name, normalized=False) for name in languages])
    replace(settings, added={}, explicit=settings.names).register(backend)
    settings.set_template(backend, piece_ids.get)
    files = {file.name: file.read_bytes() for file in (path, vocab_path)}
    return Tokenizer(backend, IMPORTED, settings.roles, piece_ids=piece_ids, files=files)


def _read_m2m100(settings: TokenizerSettings) -> Tokenizer:
    """M2M100's tokenizer: a SentencePiece model with ids from `vocab.json`, then the languages."""
    directory = settings.directory
    path, vocab_path = directory / _SHIFTED, directory / "vocab.json"
    settings = settings.require_family(("m2m100",), path, default="m2m100")
    names, piece_ids = settings.config.get("language_codes", "m2m100"), _read_vocab(vocab_path)
    if names not in M2M100:
        raise UserError(
            f"{directory / 'tokenizer_config.json'}: language_codes is {names!r}; supported: "
            f"{', '.join(M2M100)}"
        )
    if missing := {settings.name(role) for role in ("unk", "eos", "pad")} - piece_ids.keys():
        raise UserError(f"{vocab_path} is damaged: it has no {min(missing)}")
    model = read_sentencepiece(path)
    pieces = [piece for piece in model.pieces if piece.type not in (CONTROL, UNUSED)]
    backend: Backend = _call_library(path, lambda: sentencepiece_backend(model, pieces))
    languages = [f"__{code}__" for code in M2M100[names]]
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in languages])
    files = {file.name: file.read_bytes() for file in (path, vocab_path)}
    piece_ids |= {name: len(piece_ids) + number for number, name in enumerate(languages)}
    replace(settings, added={}, extra=(), explicit=settings.names).register(backend)
    settings.set_template(backend, piece_ids.get)
    return Tokenizer(backend, IMPORTED, settings.roles, piece_ids=piece_ids, files=files)


def _make_tokenizer(
    backend: Backend, settings: TokenizerSettings, *, has_template: bool = False
) -> Tokenizer:
    """A `Tokenizer` with the special tokens of the settings added to `backend`.

    Args:
        has_template: keep the post-processor of `backend` as template.
    """
    if not settings.names:
        ids = {role: settings.model.get(f"{role}_token_id") for role in ROLES}
        settings = settings.with_ids(backend, ids)
    settings.register(backend)
    if not has_template:
        settings.set_template(backend, backend.token_to_id)
    as_text = bool(settings.config.get("split_special_tokens", False))
    return Tokenizer(
        backend,
        IMPORTED,
        settings.roles,
        specials_are_text=as_text,
        chat_template=settings.chat_template,
    )


def _read_vocab(path: Path) -> dict[str, int]:
    vocab = read_json(path)
    if not isinstance(vocab, dict) or not all(isinstance(i, int) for i in vocab.values()):
        raise UserError(f"{path} is damaged: it must map pieces to ids")
    return vocab


def _call_library(path: Path, read: Callable[[], T]) -> T:
    """Call the `tokenizers` library to read `path`; raises UserError for its errors."""
    try:
        return read()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # plain `Exception`, and BaseException for panics in Rust
        raise UserError(f"{path} is damaged or of another kind: {error}") from error


def _write_one(tokenizer: Tokenizer, directory: Path) -> None:
    if tokenizer.files:
        _write_original(tokenizer, tokenizer, directory)
        return
    write_json(directory / "tokenizer.json", tokenizer.content()["tokenizer"])
    write_json(directory / "tokenizer_config.json", _config(tokenizer))


def _write_original(tokenizer: Tokenizer, target: Tokenizer, directory: Path) -> None:
    """Write the original files of Marian's or M2M100's tokenizers."""
    files, config = {**target.files, **tokenizer.files}, _config(tokenizer)
    if _SHIFTED in files:
        config["tokenizer_class"] = "M2M100Tokenizer"
        codes = [*language_tokens(tokenizer)]
        config["language_codes"] = next(name for name, known in M2M100.items() if codes == known)
        del config["additional_special_tokens"]  # which follow from it
    else:
        # A single tokenizer has the file of one side, which is written for both.
        single = files["source.spm" if "source.spm" in files else "target.spm"]
        files = {"source.spm": single, "target.spm": single} | files
        config["tokenizer_class"] = "MarianTokenizer"
        config["separate_vocabs"] = "target_vocab.json" in files
    for name, data in files.items():
        with atomic_open(directory / name) as file:
            file.write(data)
    write_json(directory / "tokenizer_config.json", config)


def _config(tokenizer: Tokenizer) -> dict[str, Any]:
    specials = tokenizer.specials
    ids = {role: getattr(specials, f"{role}_id") for role in ROLES}
    names = {f"{role}_token": tokenizer.tokens([i])[0] for role, i in ids.items() if i is not None}
    others = sorted(tokenizer.special_ids - set(ids.values()))
    inputs = ["input_ids", "attention_mask"]
    # In transformers a mask, or a token of a chat template, is written by its name in the text.
    has_mask = specials.mask_id is not None or bool(specials.sentinel_ids)
    template = tokenizer.chat_template
    is_named = has_mask or template is not None
    as_text = tokenizer.specials_are_text and (tokenizer.kind == IMPORTED or not is_named)
    if specials.cls_id is not None and specials.cls_id != specials.bos_id:
        inputs.insert(1, "token_type_ids")  # BERT distinguishes the texts of a pair by them
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "additional_special_tokens": tokenizer.tokens(others),
        "model_input_names": inputs,
        "split_special_tokens": as_text,
        "clean_up_tokenization_spaces": False,
        **({} if template is None else {"chat_template": template}),
    }
