"""Models from directories in the Hugging Face format, in memory."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from heedful import plugins
from heedful.data.hf_tokenizers import read_tokenizer
from heedful.data.labels import ProblemType
from heedful.data.special_tokens import language_tokens
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.files import read_json
from heedful.pipelines.base import SavedModel
from heedful.pipelines.encoders import Classifier, Embedder, MaskedLanguageModel
from heedful.pipelines.hf_generation import read_generation_ids, read_options
from heedful.pipelines.kinds import AnyModel
from heedful.pipelines.language_model import LanguageModel
from heedful.pipelines.metadata import GenerationIds, ModelMetadata
from heedful.pipelines.nets import kind_of, open_net
from heedful.pipelines.pooling import read_pooling
from heedful.pipelines.text_generation import Generator
from heedful.pipelines.translation import Translator
from heedful.zoo.hf import (
    GENERATION_CONFIG,
    HfDirectory,
    ImportedNet,
    architecture_of,
    json_user_errors,
    net_from_hf,
    read_hf_config,
    read_hf_directory,
)

TOKENIZER_CONFIG = "tokenizer_config.json"
HF_SIDES = {"src": "source", "tgt": "target"}
# The problem of a classifier -> `problem_type` in `config.json`.
PROBLEMS: dict[ProblemType, str] = {
    "single_label": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}
_TASKS: dict[type[SavedModel], str] = {
    Translator: "text_to_text",
    LanguageModel: "language_modeling",
    MaskedLanguageModel: "masked_lm",
    Classifier: "classification",
    Embedder: "embedding",
}


def model_from_hf(
    directory: Path, architecture: str | None = None, **config_keys: object
) -> tuple[AnyModel, list[str]]:
    """Read a model directory in the Hugging Face format; nothing is written.

    Args:
        architecture, config_keys: as in `heedful.import_hf`.

    Returns:
        The model, on the CPU in float32, and notices: settings that are not imported, missing
        files.

    Raises:
        UserError: as in `heedful.import_hf`.
    """
    # The type is checked before the weights, which may be of a format that is not read.
    model_type = read_hf_config(directory)["model_type"]
    architecture = architecture_of(model_type, architecture, str(directory))
    content = read_hf_directory(directory)
    imported = net_from_hf(content, str(directory), architecture, **config_keys)
    kind = kind_of(imported.net)
    src, tgt = _read_tokenizers(directory, kind)
    with json_user_errors(str(directory)):
        metadata, notices = _metadata(content, imported, kind, tgt, directory)
    model = open_net(imported.net, imported.config, metadata, src, tgt)
    return model, [*imported.notices, *notices, *_tokenizer_notices(model, directory)]


def _read_tokenizers(
    directory: Path, kind: type[SavedModel]
) -> tuple[Tokenizer | None, Tokenizer | None]:
    """The tokenizers of source and target, the same object if they are equal."""
    src = read_tokenizer(directory, "source")
    if src is None or kind is not Translator:
        return src, src
    tgt = read_tokenizer(directory, "target")
    assert tgt is not None, "a directory has a tokenizer for both sides or for none"
    return src, src if tgt.content() == src.content() else tgt


def _metadata(
    content: HfDirectory,
    imported: ImportedNet,
    kind: type[AnyModel],
    tokenizer: Tokenizer | None,
    directory: Path,
) -> tuple[ModelMetadata, list[str]]:
    """The metadata of the model, and notices."""
    keys: dict[str, Any] = {}
    notices: list[str] = []
    if plugin := plugins.architecture.plugin_of(imported.architecture):
        keys["plugins"] = (plugin,)
    if kind is Translator and (directory / TOKENIZER_CONFIG).is_file():
        settings = read_json(directory / TOKENIZER_CONFIG)
        for side, hf_side in HF_SIDES.items():
            keys[f"{side}_language"] = settings.get(f"{hf_side}_lang")
    codes = language_tokens(tokenizer) if kind is Translator and tokenizer is not None else {}
    if codes:
        keys |= _language_keys(directory, codes)
    is_translator = imported.architecture == "marian" or codes
    task = "translation" if is_translator else _TASKS[kind]
    if issubclass(kind, Generator):
        size = "tgt_vocab_size" if kind is Translator else "vocab_size"
        vocab_size = getattr(imported.config, size)
        keys["generation"], notices = read_generation_ids(content, kind, tokenizer, vocab_size)
        longest = imported.config.max_length
        keys["options"], more = read_options(
            content, kind, longest, vocab_size, has_tokenizer=tokenizer is not None
        )
        notices += more
        if codes:
            keys |= _target_of_ids(keys, tokenizer)
    elif kind is Classifier:
        count = imported.config.num_labels
        keys["labels"] = _labels_from_hf(content.config, count, str(directory))
        keys["problem"] = _problem_from_hf(content.config, count, str(directory))
    stored = read_pooling(directory, imported.config.max_length)
    if stored is not None:
        keys |= stored._asdict()
        keys.pop("notices")
        notices += stored.notices
    return ModelMetadata(imported.architecture, task, **keys), notices


def _language_keys(directory: Path, codes: dict[str, str]) -> dict[str, Any]:
    """The tokens of languages, and the languages that the tokenizer's settings name."""
    path = directory / TOKENIZER_CONFIG
    settings = read_json(path) if path.is_file() else {}
    keys: dict[str, Any] = {"language_codes": codes}
    for side in HF_SIDES:
        language = settings.get(f"{side}_lang")
        if language is not None and language not in codes:
            raise UserError(f"{path}: {side}_lang is {language!r}, which the tokenizer lacks")
        keys[f"{side}_language"] = language
    return keys


def _target_of_ids(keys: dict[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The target language by the first token of all outputs, if the token is of a language."""
    assert tokenizer is not None
    ids: GenerationIds = keys["generation"]
    if ids.forced_bos_id is None:
        return {}
    token = tokenizer.piece(ids.forced_bos_id)
    of_token = {name: code for code, name in keys["language_codes"].items()}
    if token not in of_token:
        raise UserError(
            f"{GENERATION_CONFIG}: forced_bos_token_id is {token}, which is no language, but the "
            "outputs of this model begin with that of their language"
        )
    return {"tgt_language": of_token[token], "generation": replace(ids, forced_bos_id=None)}


def _problem_from_hf(content: Mapping[str, Any], num_labels: int, where: str) -> ProblemType:
    """The problem of a classifier. As in the pipeline of transformers, the logit of a single class
    has a sigmoid unless `problem_type` is regression.

    Raises:
        UserError: a problem that transformers does not have.
    """
    name = content.get("problem_type")
    if name is not None and name not in PROBLEMS.values():
        raise UserError(
            f"{where}: problem_type is {name!r}; supported: {', '.join(PROBLEMS.values())}"
        )
    if num_labels != (len(content.get("id2label") or ()) or content.get("num_labels") or 2):
        return "single_label"  # a new head, which `config_keys` asked for
    for problem, value in PROBLEMS.items():
        if value == name and problem != "single_label":
            return problem
    return "multi_label" if num_labels == 1 else "single_label"


def _labels_from_hf(content: Mapping[str, Any], num_labels: int, where: str) -> tuple[str, ...]:
    """The names of the classes in the order of the logits; default: those of transformers.

    Raises:
        UserError: names that are not numbered from 0, or two equal names.
    """
    names = content.get("id2label") or {}
    if len(names) != num_labels:  # no names, or `config_keys` changed the number of classes
        return tuple(f"LABEL_{label}" for label in range(num_labels))
    try:
        labels = tuple(str(names[str(label)]) for label in range(num_labels))
    except (KeyError, TypeError):
        raise UserError(f"{where}: id2label must name the classes 0 to {num_labels - 1}") from None
    if len(set(labels)) < num_labels:
        raise UserError(f"{where}: id2label gives two classes the same name: {', '.join(labels)}")
    return labels


def _tokenizer_notices(model: AnyModel, directory: Path) -> list[str]:
    """Notices of a missing tokenizer, and of one with more ids than the net."""
    if not model.has_tokenizer:
        return [f"{directory} has no tokenizer files: the model accepts only lists of ids"]
    sides = [("", model.tgt_tokenizer, "vocab_size")]
    if isinstance(model, Translator):
        sides = [("source ", model.src_tokenizer, "src_vocab_size")]
        sides += [("target ", model.tgt_tokenizer, "tgt_vocab_size")]
    return [
        f"{directory}: the {side}tokenizer has {tokenizer.vocab_size:,} ids, but the net "
        f"{getattr(model.config, size):,}: texts with other ids are not supported"
        for side, tokenizer, size in sides
        if tokenizer.vocab_size > getattr(model.config, size)
    ]
