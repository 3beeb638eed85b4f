"""Whole models from and to directories in the Hugging Face format: net, text, labels, ids."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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

Say = Callable[[str], None]

_TASKS: dict[type[SavedModel], str] = {
    Translator: "text_to_text",
    LanguageModel: "language_modelling",
    MaskedLanguageModel: "masked_lm",
    Classifier: "classification",
    Embedder: "embedding",
}
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TOKENIZER_CONFIG = "tokenizer_config.json"
_SIDES = {"src": "source", "tgt": "target"}


def import_hf(
    directory: str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    architecture: str | None = None,
    say: Say = lambda line: None,
    **config_keys: object,
) -> AnyModel:
    """Make a heedful model directory of one in the Hugging Face format, and open it.

    Weights, tokenizers, labels, and what a text begins and ends with are taken over. Nothing is
    unpickled and nothing of the directory is run. `out` is there whole or not at all.

    Args:
        overwrite: a model directory at `out` is replaced.
        architecture: the one to build; default: heedful's own of the directory's model type, or
            the only one of a plugin.
        say: told what was passed over, and what the directory lacks.
        config_keys: keys of our Config that win over the directory's, such as head="classify".

    Raises:
        UserError: no model in that format; a model type, setting or tokenizer that is not built
            here; a tensor too many, too few or of the wrong shape; `out` holds something else.
    """
    directory, out = Path(directory), Path(out)
    check_new(out, overwrite=overwrite, owns=MODEL_FILES, source=directory)
    found = read_hf_directory(directory)
    made = net_from_hf(found, str(directory), architecture, **config_keys)
    kind = kind_of(made.net)
    src, tgt = _read_tokenizers(directory, kind)
    with _reading_values(str(directory)):
        metadata, notices = _card(found, made, kind, tgt, directory)
    model = open_net(made.net, made.config, metadata, src, tgt)
    notices = [*made.notices, *notices, *_doubts(model, directory)]
    model.save(out)
    for notice in notices:
        say(notice)
    return model


def export_hf(
    model: AnyModel,
    out: str | Path,
    *,
    precision: str = "float32",
    overwrite: bool = False,
    say: Say = lambda line: None,
) -> None:
    """Write a directory that `transformers` opens with its Auto classes, with no code of ours.

    It holds `config.json` with ids and labels, `generation_config.json` for a model that writes,
    the weights, and the tokenizer's files. It is there whole or not at all.

    Args:
        precision: of the weights: one of `PRECISIONS`.

    Raises:
        UserError: an architecture or a choice that the format has no place for; an unknown
            precision, or a weight beyond float16; `out` holds
            something else (`overwrite`: than a model, which is replaced).
    """
    metadata = model.metadata
    check_precision(precision)
    check_new(Path(out), overwrite=overwrite, owns=MODEL_FILES)
    net = model.net  # which brings its Config where it is yet to be opened
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
                f"in transformers {metadata.architecture} counts positions from {key} "
                f"{content[key]}, but this model's tokenizer has {value}; train it with "
                f"model.position_offset={int(value) + 1}"
            )

    def write_text(directory: Path) -> None:
        if model.has_tokenizer:
            src, tgt = model.src_tokenizer, model.tgt_tokenizer
            if isinstance(model, Translator):
                src, tgt = _ended(src), _ended(tgt)
            write_tokenizer(src, directory, tgt)
            _complete_tokenizer(directory, model)

    write_hf_directory(Path(out), content, tensors, generation, write_text)
    own = _format_of(metadata.architecture).config
    if own is None or own.model_type != content["model_type"]:
        say(f"{metadata.architecture} is a {content['model_type']} there, of the same outputs")
    if not model.has_tokenizer:
        say("the model has no tokenizer: the directory takes ids alone")
    elif (Path(out) / "tokenizer_target").exists():
        say(
            "the directory's own tokenizer is that of the source; that of the target is in "
            "tokenizer_target/, because transformers has one a directory"
        )


def check_precision(precision: str) -> None:
    """Refuse what the weights of this format cannot be; raises UserError."""
    if precision not in PRECISIONS:
        raise UserError(
            f"precision of the Hugging Face format must be {', '.join(PRECISIONS)}, not {precision}"
        )


def _cast(name: str, tensor: torch.Tensor, precision: str) -> torch.Tensor:
    """A tensor in another precision; raises UserError where a value is too large for it."""
    cast = tensor.to(PRECISIONS[precision])
    if not cast.isfinite().all():
        raise UserError(f"{name} has values beyond {precision}; export bfloat16 or float32")
    return cast


@contextmanager
def _reading_values(where: str) -> Iterator[None]:
    """Errors of the block are the user's: it reads values of JSON, which may be of any kind."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{where}: a value of its JSON files is of no kind that it may have "
            f"({type(error).__name__}: {error}); it is damaged, or of a format that is not known"
        ) from error


class ImportedNet(NamedTuple):
    """A net of theirs as one of ours, and what is to be said of it."""

    architecture: str
    config: Any
    net: nn.Module
    notices: list[str]


def net_from_hf(
    directory: HfDirectory, where: str, wanted: str | None = None, **keys: object
) -> ImportedNet:
    """Build and fill the net of a directory; `keys` of our Config win over its own.

    `wanted`: the architecture to build; default: as `import_hf`.

    Raises:
        UserError: an unknown model type, a setting that we do not build, a tensor too many, too few
            or of the wrong shape.
    """
    name = _architecture_of(directory.config["model_type"], wanted, where)
    kind, format = zoo.architecture(name), _format_of(name)
    assert format.config is not None, "its model type was found"
    with _reading_values(where):
        found = config_keys_from_hf(format.config, kind.config, directory.config, where)
    config = make_config(name, found | keys, where)
    net = uninitialized_net(name, config, directory.tensors, where)

    def drawn() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            return kind.build(config)

    notices = from_hf(net, directory.tensors, format.names(config), where, drawn)
    return ImportedNet(name, config, net.eval(), notices)


def _architecture_of(model_type: str, wanted: str | None, where: str) -> str:
    """The architecture that reads a model type: `wanted`, heedful's own, or the only plugin's."""
    names = plugins.architecture.names()
    configs = {name: _format_of(name).config for name in names}
    types = {name: each.model_type for name, each in configs.items() if each is not None}
    readers = [name for name, of in types.items() if of == model_type]
    if not readers:
        raise UserError(
            f"{where}: the model type {model_type} is not known here; "
            f"known: {', '.join(sorted(set(types.values())))}"
        )
    own = [name for name in readers if plugins.architecture.plugin_of(name) is None]
    chosen = own or readers if wanted is None else [name for name in readers if name == wanted]
    if not chosen:
        raise UserError(
            f"{where}: {wanted} does not read the model type {model_type}; "
            f"architectures that do: {', '.join(readers)}"
        )
    if len(chosen) > 1:
        raise UserError(
            f"{where}: {' and '.join(chosen)} read the model type {model_type}; choose one of them "
            "(--architecture)"
        )
    return chosen[0]


def net_to_hf(name: str, config: Any, net: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Their `config.json` and tensors; raises UserError where they have no place for ours.

    An architecture that is another one by some of its settings, or once its weights are put into
    another order, gives that one by `export_as`.
    """
    format = _format_of(name)
    if format.export_as is not None:
        name, config, net = format.export_as(config, net)
        format = _format_of(name)
    if format.config is None:
        raise UserError(
            f"a model of the architecture {name} has no place in the Hugging Face format"
        )
    return config_to_hf(format.config, config), to_hf(net, format.names(config))


def _format_of(name: str) -> Format:
    """How an architecture's models stand in this format; empty where they do not."""
    return zoo.architecture(name).formats.get("hf", Format())


def _read_tokenizers(
    directory: Path, kind: type[SavedModel]
) -> tuple[Tokenizer | None, Tokenizer | None]:
    """Those of what goes in and of what comes out; the same one unless they differ."""
    src = read_tokenizer(directory, "source")
    if src is None or kind is not Translator:
        return src, src
    tgt = read_tokenizer(directory, "target")
    assert tgt is not None, "a directory has a tokenizer for both sides or for none"
    return src, src if tgt.content() == src.content() else tgt


def _card(
    found: HfDirectory,
    made: ImportedNet,
    kind: type[AnyModel],
    tokenizer: Tokenizer | None,
    directory: Path,
) -> tuple[ModelMetadata, list[str]]:
    """What the model is for, and notices."""
    task = "translation" if made.architecture == "marian" else _TASKS[kind]
    keys: dict[str, Any] = {}
    notices: list[str] = []
    if plugin := plugins.architecture.plugin_of(made.architecture):
        keys["plugins"] = (plugin,)
    if kind is Translator and (directory / _TOKENIZER_CONFIG).is_file():
        said = read_json(directory / _TOKENIZER_CONFIG)
        keys |= {f"{ours}_language": said.get(f"{theirs}_lang") for ours, theirs in _SIDES.items()}
    if issubclass(kind, Generator):
        size = "tgt_vocab_size" if kind is Translator else "vocab_size"
        vocab_size = getattr(made.config, size)
        keys["generation"], notices = read_generation_ids(found, kind, tokenizer, vocab_size)
        keys["options"] = read_options(found)
    elif kind is Classifier:
        keys["labels"] = _labels_from_hf(found.config, made.config.num_labels, str(directory))
        problem = found.config.get("problem_type")
        if problem not in (None, "single_label_classification"):
            notices.append(
                f"{directory} was trained for {problem}: its logits are the same here, but "
                "`classify` gives each text one label by their softmax"
            )
    return ModelMetadata(made.architecture, task, **keys), notices


def _labels_from_hf(content: Mapping[str, Any], num_labels: int, where: str) -> tuple[str, ...]:
    """Names of the classes in the order of the logits; those of transformers where none are said.

    Raises:
        UserError: names that are not numbered from 0, or two that are alike.
    """
    said = content.get("id2label") or {}
    if len(said) != num_labels:  # other classes were asked for, or their names left out
        return tuple(f"LABEL_{label}" for label in range(num_labels))
    try:
        labels = tuple(str(said[str(label)]) for label in range(num_labels))
    except (KeyError, TypeError):
        raise UserError(f"{where}: id2label must name the classes 0 to {num_labels - 1}") from None
    if len(set(labels)) < num_labels:
        raise UserError(f"{where}: id2label gives two classes the same name: {', '.join(labels)}")
    return labels


def _doubts(model: AnyModel, directory: Path) -> list[str]:
    """What a user should know of a model's text."""
    if not model.has_tokenizer:
        return [f"{directory} has no tokenizer files: the model takes lists of ids alone"]
    sides = [("", model.tgt_tokenizer, "vocab_size")]
    if isinstance(model, Translator):
        sides = [("source ", model.src_tokenizer, "src_vocab_size")]
        sides += [("target ", model.tgt_tokenizer, "tgt_vocab_size")]
    return [
        f"{directory}: the {side}tokenizer has {tokenizer.vocab_size:,} ids, but the net "
        f"{getattr(model.config, size):,}: text that needs the others cannot be read"
        for side, tokenizer, size in sides
        if tokenizer.vocab_size > getattr(model.config, size)
    ]


def _complete_tokenizer(directory: Path, model: AnyModel) -> None:
    """Add to the tokenizer's files what only the model knows: lengths, sides, languages, types."""
    path = directory / _TOKENIZER_CONFIG
    settings = read_json(path)
    settings["model_max_length"] = model.config.max_length
    if isinstance(model, LanguageModel):
        settings["padding_side"] = "left"  # what a row goes on with stands behind its own text
    if settings.get("tokenizer_class") == "MarianTokenizer":
        for ours, theirs in _SIDES.items():
            if (language := getattr(model.metadata, f"{ours}_language")) is not None:
                settings[f"{theirs}_lang"] = language
    tells_apart = getattr(model.config, "type_vocab_size", 1) > 1
    if tells_apart and "token_type_ids" not in settings["model_input_names"]:
        settings["model_input_names"].insert(1, "token_type_ids")
        content = read_json(directory / "tokenizer.json")
        _type_second(content["post_processor"])
        write_json(directory / "tokenizer.json", content)
    write_json(path, settings)


def _ended(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer that ends a text as the model was trained to read it, by the end mark."""
    end = tokenizer.eos_id
    if tokenizer.suffix_ids[-1:] == (end,) or tokenizer.files:
        return tokenizer
    before, [after] = tokenizer.tokens(tokenizer.prefix_ids), tokenizer.tokens([end])
    backend = Backend.from_str(json.dumps(tokenizer.content()["tokenizer"]))
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", after],
        pair=[*before, "$A", "$B", after],
        special_tokens=list(zip([*before, after], [*tokenizer.prefix_ids, end], strict=True)),
    )
    as_text = tokenizer.specials_are_text
    return Tokenizer(backend, tokenizer.kind, tokenizer.roles, specials_are_text=as_text)


def _type_second(processor: dict[str, Any]) -> None:
    """Let a template give the second text of a pair, and what follows it, the type 1."""
    second = False
    for piece in processor["pair"]:
        ((name, content),) = piece.items()
        second = second or (name == "Sequence" and content["id"] == "B")
        content["type_id"] = int(second)
