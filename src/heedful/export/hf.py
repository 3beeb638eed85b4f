"""Import and export models in the Hugging Face format: net, tokenizers, labels, special ids."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import processors
from torch import nn

from heedful import plugins, zoo
from heedful.data.hf_tokenizers import read_tokenizer, write_tokenizer
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.export.generation_ids import generation_to_hf, read_generation_ids, read_options
from heedful.export.hf_directory import HfDirectory, read_hf_directory, write_hf_directory
from heedful.files import MODEL_FILES, check_new, read_json, write_json
from heedful.pipelines import (
    AnyModel,
    Classifier,
    Embedder,
    Generator,
    LanguageModel,
    MaskedLanguageModel,
    ModelMetadata,
    SavedModel,
    Translator,
    kind_of,
    open_net,
)
from heedful.zoo.architectures import Format
from heedful.zoo.hf import config_keys_from_hf, config_to_hf, labels_to_hf
from heedful.zoo.names import from_hf, to_hf
from heedful.zoo.saved import make_config, uninitialized_net

OnNotice = Callable[[str], None]

_TASKS: dict[type[SavedModel], str] = {
    Translator: "text_to_text",
    LanguageModel: "language_modeling",
    MaskedLanguageModel: "masked_lm",
    Classifier: "classification",
    Embedder: "embedding",
}
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TOKENIZER_CONFIG = "tokenizer_config.json"
_SIDES = {"src": "source", "tgt": "target"}


def import_hf(
    directory: str | PathLike[str],
    out: str | PathLike[str],
    *,
    overwrite: bool = False,
    architecture: str | None = None,
    on_notice: OnNotice = lambda line: None,
    **config_keys: object,
) -> AnyModel:
    """Convert a directory in the Hugging Face format to a heedful model directory, and open it.

    Weights, tokenizers, labels, special token ids and generation options are imported. Pickled
    files are not opened, and no code in the directory is run. `out` appears complete or not at all.

    Args:
        overwrite: replace a model directory at `out`.
        architecture: the architecture to build; default: heedful's own for the model type, or the
            only one of a plugin.
        on_notice: called with notices: settings that are not imported, missing files.
        config_keys: keys of heedful's Config that override the directory's, as head="classify".

    Raises:
        UserError: not a model in this format; a model type, setting or tokenizer that is not
            supported; a missing or unknown tensor or a wrong shape; `out` holds something else.
    """
    directory, out = Path(directory), Path(out)
    check_new(out, overwrite=overwrite, owns=MODEL_FILES, source=directory)
    content = read_hf_directory(directory)
    imported = net_from_hf(content, str(directory), architecture, **config_keys)
    kind = kind_of(imported.net)
    src, tgt = _read_tokenizers(directory, kind)
    with _user_errors(str(directory)):
        metadata, notices = _metadata(content, imported, kind, tgt, directory)
    model = open_net(imported.net, imported.config, metadata, src, tgt)
    notices = [*imported.notices, *notices, *_tokenizer_notices(model, directory)]
    model.save(out)
    for notice in notices:
        on_notice(notice)
    return model


def export_hf(
    model: AnyModel,
    out: str | PathLike[str],
    *,
    precision: str = "float32",
    overwrite: bool = False,
    on_notice: OnNotice = lambda line: None,
) -> None:
    """Write a directory for the Auto classes of `transformers`, which does not need heedful.

    It holds `config.json` with ids and labels, `generation_config.json` for generative models, the
    weights, and the tokenizer files. It appears complete or not at all.

    Args:
        precision: type of the weights, one of `PRECISIONS`.
        overwrite: replace a model directory at `out`.
        on_notice: called with notices.

    Raises:
        UserError: an architecture or setting that the format does not support; an unknown
            precision, or a weight out of its range; `out` holds something else.
    """
    metadata = model.metadata
    check_precision(precision)
    check_new(Path(out), overwrite=overwrite, owns=MODEL_FILES)
    net = model.net  # before `model.config`: opening the net may set the config
    content, tensors = net_to_hf(metadata.architecture, model.config, net)
    content["torch_dtype"] = precision
    tensors = {name: _cast(name, tensor, precision) for name, tensor in tensors.items()}
    if isinstance(model, Classifier):
        content |= labels_to_hf(model.labels)
    ids, generation = generation_to_hf(model, content["model_type"])
    for key, value in ids.items():
        if content.get(key) is None:
            content[key] = value
        elif value is not None and content[key] != value:
            raise UserError(
                f"in transformers the positions of {metadata.architecture} begin after {key} "
                f"{content[key]}, but this model's tokenizer has {value}; train it with "
                f"model.position_offset={int(value) + 1}"
            )

    def write_text(directory: Path) -> None:
        if model.has_tokenizer:
            src, tgt = model.src_tokenizer, model.tgt_tokenizer
            if isinstance(model, Translator):
                src, tgt = _with_final_eos(src), _with_final_eos(tgt)
            write_tokenizer(src, directory, tgt)
            _complete_tokenizer(directory, model)

    write_hf_directory(Path(out), content, tensors, generation, write_text)
    own = _format_of(metadata.architecture).config
    if own is None or own.model_type != content["model_type"]:
        on_notice(
            f"{metadata.architecture} is exported as {content['model_type']}, with equal outputs"
        )
    if not model.has_tokenizer:
        on_notice("the model has no tokenizer: the directory accepts ids only")
    elif (Path(out) / "tokenizer_target").exists():
        on_notice(
            "the tokenizer in the directory is that of the source; that of the target is in "
            "tokenizer_target/, because transformers has one tokenizer per directory"
        )


def check_precision(precision: str) -> None:
    """Raise UserError for a precision that this format does not support."""
    if precision not in PRECISIONS:
        raise UserError(
            f"precision of the Hugging Face format must be {', '.join(PRECISIONS)}, not {precision}"
        )


def _cast(name: str, tensor: torch.Tensor, precision: str) -> torch.Tensor:
    """A tensor in another precision; raises UserError if a value is out of its range."""
    cast = tensor.to(PRECISIONS[precision])
    if not cast.isfinite().all():
        raise UserError(
            f"{name} has values out of the range of {precision}; export bfloat16 or float32"
        )
    return cast


@contextmanager
def _user_errors(where: str) -> Iterator[None]:
    """Raise errors of a block that reads JSON values of unknown types as UserError."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{where}: a value in its JSON files has a wrong type or range "
            f"({type(error).__name__}: {error}); it is damaged, or of an unknown format"
        ) from error


class ImportedNet(NamedTuple):
    """A net that was built from a Hugging Face directory, and notices."""

    architecture: str
    config: Any
    net: nn.Module
    notices: list[str]


def net_from_hf(
    directory: HfDirectory, where: str, architecture: str | None = None, **keys: object
) -> ImportedNet:
    """Build the net of a directory and load its weights.

    Args:
        where: name of the directory, for messages.
        architecture: as in `import_hf`.
        keys: keys of heedful's Config that override the directory's.

    Raises:
        UserError: an unknown model type, an unsupported setting, a missing or unknown tensor, or
            a wrong shape.
    """
    name = _architecture_of(directory.config["model_type"], architecture, where)
    kind, format = zoo.architecture(name), _format_of(name)
    assert format.config is not None, "architectures with this model type have one"
    with _user_errors(where):
        config_keys = config_keys_from_hf(format.config, kind.config, directory.config, where)
    config = make_config(name, config_keys | keys, where)
    net = uninitialized_net(name, config, directory.tensors, where)

    def initialized_net() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            return kind.build(config)

    notices = from_hf(net, directory.tensors, format.names(config), where, initialized_net)
    return ImportedNet(name, config, net.eval(), notices)


def _architecture_of(model_type: str, architecture: str | None, where: str) -> str:
    """The architecture for a model type: `architecture`, heedful's own, or the only plugin's."""
    names = plugins.architecture.names()
    configs = {name: _format_of(name).config for name in names}
    types = {name: config.model_type for name, config in configs.items() if config is not None}
    readers = [name for name, supported in types.items() if supported == model_type]
    if not readers:
        raise UserError(
            f"{where}: the model type {model_type} is not supported; "
            f"supported: {', '.join(sorted(set(types.values())))}"
        )
    own = [name for name in readers if plugins.architecture.plugin_of(name) is None]
    candidates = own or readers
    if architecture is not None:
        candidates = [name for name in readers if name == architecture]
    if not candidates:
        raise UserError(
            f"{where}: {architecture} does not read the model type {model_type}; "
            f"architectures that do: {', '.join(readers)}"
        )
    if len(candidates) > 1:
        raise UserError(
            f"{where}: {' and '.join(candidates)} read the model type {model_type}; choose one of "
            "them (--architecture)"
        )
    return candidates[0]


def net_to_hf(name: str, config: Any, net: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """`config.json` and the tensors of a net in the Hugging Face format.

    An architecture that the format has only as another one, with other settings or another order of
    weights, is converted to that one by its `export_as`.

    Raises:
        UserError: the format does not support the architecture or a setting.
    """
    format = _format_of(name)
    if format.export_as is not None:
        name, config, net = format.export_as(config, net)
        format = _format_of(name)
    if format.config is None:
        raise UserError(f"the Hugging Face format does not support the architecture {name}")
    return config_to_hf(format.config, config), to_hf(net, format.names(config))


def _format_of(name: str) -> Format:
    """The tables of an architecture for this format; empty if it is not supported."""
    return zoo.architecture(name).formats.get("hf", Format())


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
    task = "translation" if imported.architecture == "marian" else _TASKS[kind]
    keys: dict[str, Any] = {}
    notices: list[str] = []
    if plugin := plugins.architecture.plugin_of(imported.architecture):
        keys["plugins"] = (plugin,)
    if kind is Translator and (directory / _TOKENIZER_CONFIG).is_file():
        settings = read_json(directory / _TOKENIZER_CONFIG)
        for side, hf_side in _SIDES.items():
            keys[f"{side}_language"] = settings.get(f"{hf_side}_lang")
    if issubclass(kind, Generator):
        size = "tgt_vocab_size" if kind is Translator else "vocab_size"
        vocab_size = getattr(imported.config, size)
        keys["generation"], notices = read_generation_ids(content, kind, tokenizer, vocab_size)
        keys["options"] = read_options(content)
    elif kind is Classifier:
        keys["labels"] = _labels_from_hf(content.config, imported.config.num_labels, str(directory))
        problem = content.config.get("problem_type")
        if problem not in (None, "single_label_classification"):
            notices.append(
                f"{directory} was trained for {problem}: its logits are equal in heedful, but "
                "`classify` returns one label for each text, by their softmax"
            )
    return ModelMetadata(imported.architecture, task, **keys), notices


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


def _complete_tokenizer(directory: Path, model: AnyModel) -> None:
    """Add settings of the model to the tokenizer files: lengths, sides, languages, token types."""
    path = directory / _TOKENIZER_CONFIG
    settings = read_json(path)
    settings["model_max_length"] = model.config.max_length
    if isinstance(model, LanguageModel):
        settings["padding_side"] = "left"  # `generate` appends tokens on the right
    if settings.get("tokenizer_class") == "MarianTokenizer":
        for side, hf_side in _SIDES.items():
            if (language := getattr(model.metadata, f"{side}_language")) is not None:
                settings[f"{hf_side}_lang"] = language
    has_types = getattr(model.config, "type_vocab_size", 1) > 1
    if has_types and "token_type_ids" not in settings["model_input_names"]:
        settings["model_input_names"].insert(1, "token_type_ids")
        content = read_json(directory / "tokenizer.json")
        _set_token_types(content["post_processor"])
        write_json(directory / "tokenizer.json", content)
    write_json(path, settings)


def _with_final_eos(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with a template that ends in EOS, as in training (`encode_target`)."""
    eos_id = tokenizer.eos_id
    if tokenizer.suffix_ids[-1:] == (eos_id,) or tokenizer.files:
        return tokenizer
    prefix, [eos] = tokenizer.tokens(tokenizer.prefix_ids), tokenizer.tokens([eos_id])
    backend = Backend.from_str(json.dumps(tokenizer.content()["tokenizer"]))
    backend.post_processor = processors.TemplateProcessing(
        single=[*prefix, "$A", eos],
        pair=[*prefix, "$A", "$B", eos],
        special_tokens=list(zip([*prefix, eos], [*tokenizer.prefix_ids, eos_id], strict=True)),
    )
    as_text = tokenizer.specials_are_text
    return Tokenizer(backend, tokenizer.kind, tokenizer.roles, specials_are_text=as_text)


def _set_token_types(processor: dict[str, Any]) -> None:
    """Set the token type of the second text in a template of a pair, and after it, to 1."""
    is_second = False
    for piece in processor["pair"]:
        ((name, content),) = piece.items()
        is_second = is_second or (name == "Sequence" and content["id"] == "B")
        content["type_id"] = int(is_second)
