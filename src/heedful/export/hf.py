"""Import and export models in the Hugging Face format: net, tokenizers, labels, special ids."""

import json
import logging
import re
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from heedful.data.hf_tokenizers import write_tokenizer
from heedful.data.labels import ProblemType
from heedful.data.language_tags import matching_tag
from heedful.data.special_tokens import allow_in_texts
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError, describe
from heedful.export.model_card import CARD, model_card
from heedful.files import (
    MODEL_FILES,
    as_path,
    check_new,
    read_json,
    write_directory,
    write_json,
    write_text,
)
from heedful.pipelines import (
    AnyModel,
    Classifier,
    Generator,
    LanguageModel,
    ModelMetadata,
    SavedModel,
    Translator,
)
from heedful.pipelines.hf_generation import generation_to_hf, lost_options
from heedful.pipelines.hf_models import HF_SIDES, PROBLEMS, TOKENIZER_CONFIG, model_from_hf
from heedful.training.folder import is_run
from heedful.training.run_report import RecordedRun
from heedful.zoo.hf import hf_format, labels_to_hf, net_to_hf, write_hf_directory

OnNotice = Callable[[str], None]


def log_notice(line: str) -> None:
    """Log a notice, as the library does where a caller gives no function for it."""
    logging.getLogger("heedful").warning(f"note: {line}")


_POOLING = (
    "the pooling of its vectors is not in this format; "
    "heedful export sentence-transformers keeps it"
)
_PROMPTS = (
    "the prompts of its texts are not in this format; "
    "heedful export sentence-transformers keeps them"
)
_MBART_CODE = re.compile("[a-z]{2}_[A-Z]{2}")
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def import_hf(
    directory: str | PathLike[str],
    out: str | PathLike[str],
    *,
    overwrite: bool = False,
    architecture: str | None = None,
    on_notice: OnNotice = log_notice,
    **config_keys: object,
) -> AnyModel:
    """Convert a directory in the Hugging Face format to a heedful model directory, and open it.

    Weights, tokenizers, labels, special token ids and generation options are imported. Pickled
    files are not opened, and no code in the directory is run. `out` appears complete or not at all.

    Args:
        overwrite: replace a model directory at `out`.
        architecture: the architecture to build; default: heedful's own for the model type, or the
            only one of a plugin.
        on_notice: called with notices: settings that are not imported, missing files. Default: they
            are logged.
        config_keys: keys of heedful's Config that override the directory's, as head="classify".

    Raises:
        UserError: not a model in this format; a model type, setting or tokenizer that is not
            supported; a missing or unknown tensor or a wrong shape; `out` holds something else.

    >>> import heedful
    >>> heedful.export_hf(heedful.load("runs/novel"), "exported")
    >>> heedful.import_hf("exported", "runs/imported").kind
    'language model'
    """
    directory, out = as_path(directory, "directory"), as_path(out, "out")
    check_new(out, overwrite=overwrite, owns=MODEL_FILES, source=directory)
    model, notices = model_from_hf(directory, architecture, **config_keys)
    write_directory(out, model.file_writer(out))
    for notice in notices:
        on_notice(notice)
    return model


def export_hf(
    model: AnyModel,
    out: str | PathLike[str],
    *,
    precision: str = "float32",
    overwrite: bool = False,
    on_notice: OnNotice = log_notice,
    run: str | PathLike[str] | None = None,
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Write a directory for the Auto classes of `transformers`, which does not need heedful.

    It holds `config.json` with ids and labels, `generation_config.json` for generative models, the
    weights, the tokenizer files, and a model card, `README.md`, where there is none yet. It appears
    complete or not at all.

    Args:
        precision: type of the weights, one of `PRECISIONS`.
        overwrite: replace a model directory at `out`, but keep its README.md.
        on_notice: called with notices.
        run: the folder of the run that trained the model, whose recipe, facts and scores the card
            has; None or a folder of no run: they are unknown.
        write_more: called with the directory before it appears, to write further files in place of
            the card.

    Raises:
        UserError: an architecture or setting that the format does not support; an unknown
            precision, or a weight out of its range; `out` holds something else.

    >>> import heedful
    >>> heedful.export_hf(heedful.load("runs/novel"), "novel-hf", precision="bfloat16")
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer  # doctest: +SKIP
    >>> net = AutoModelForCausalLM.from_pretrained("novel-hf")  # doctest: +SKIP
    >>> tokenizer = AutoTokenizer.from_pretrained("novel-hf")  # doctest: +SKIP
    """
    if not isinstance(model, SavedModel):
        raise UserError(
            f"export needs a model, not {describe(model)}; heedful.load and heedful.from_net make "
            "one"
        )
    out, metadata = as_path(out, "out"), model.metadata
    check_precision(precision)
    owns = MODEL_FILES if write_more else MODEL_FILES | {CARD}
    check_new(out, overwrite=overwrite, owns=owns)
    recorded = None if run is None else _recorded(as_path(run, "run"), on_notice)
    net = model.net  # before `model.config`: opening the net may set the config
    content, tensors = net_to_hf(metadata.architecture, model.config, net)
    content["torch_dtype"] = precision
    tensors = {name: _cast(name, tensor, precision) for name, tensor in tensors.items()}
    if isinstance(model, Classifier):
        content |= labels_to_hf(model.labels) | _problem_to_hf(metadata.problem)
    ids, generation = generation_to_hf(model, content["model_type"])
    _add_ids(content, ids, metadata.architecture)
    has_card = write_more is None and (out / CARD).is_file()
    old_card = (out / CARD).read_bytes() if has_card else None

    def write_others(directory: Path) -> None:
        if model.has_tokenizer:
            _write_tokenizers(directory, model)
        if write_more is not None:
            write_more(directory)
        elif old_card is None:
            card = model_card(model, out.resolve().name, content["model_type"], recorded)
            write_text(directory / CARD, card)
        else:
            (directory / CARD).write_bytes(old_card)

    write_hf_directory(out, content, tensors, generation, write_others, owns)
    if old_card is not None:
        on_notice(f"{out / CARD} is kept as it was; delete it for a new model card")
    own = hf_format(metadata.architecture).config
    if own is None or own.model_type != content["model_type"]:
        on_notice(
            f"{metadata.architecture} is exported as {content['model_type']}, with equal outputs"
        )
    for notice in [] if write_more else _lost(metadata):
        on_notice(notice)
    if isinstance(model, Generator) and (lost := lost_options(model)):
        on_notice(f"options that this format does not have: {', '.join(lost)}")
    for notice in _tokenizer_notices(model, content["model_type"], out):
        on_notice(notice)


def _tokenizer_notices(model: AnyModel, model_type: str, out: Path) -> list[str]:
    """Notices of how the tokenizer of an export is used."""
    if not model.has_tokenizer:
        return ["the model has no tokenizer: the directory accepts ids only"]
    if model_type == "qwen2" and not _is_of_qwen(model.tokenizer):
        return [
            "transformers opens the tokenizer of a qwen2 as Qwen's own, which splits texts "
            "otherwise than this one: open it by PreTrainedTokenizerFast, not by AutoTokenizer"
        ]
    if (out / "tokenizer_target").exists():
        return [
            "the tokenizer in the directory is that of the source; that of the target is in "
            "tokenizer_target/, because transformers has one tokenizer per directory"
        ]
    return []


def _lost(metadata: ModelMetadata) -> list[str]:
    """Notices of how vectors are made, which `config.json` does not say."""
    pooling = [_POOLING] if metadata.pooling != "mean" or metadata.normalize else []
    return pooling + ([_PROMPTS] if any(metadata.prompts.values()) else [])


def _recorded(path: Path, on_notice: OnNotice) -> RecordedRun | None:
    """The run in a folder; None for a folder of no run, and with a notice for one not readable."""
    try:
        return RecordedRun.read(path) if is_run(path) else None
    except UserError as error:
        on_notice(f"the model card has no facts of the run: {error}")
        return None


def _problem_to_hf(problem: ProblemType) -> dict[str, str]:
    """The key of `config.json` for what the logits of a classifier mean; none for the default."""
    return {} if problem == "single_label" else {"problem_type": PROBLEMS[problem]}


def _add_ids(content: dict[str, Any], ids: dict[str, Any], architecture: str) -> None:
    """Add special token ids to a `config.json`; raises UserError for ids that it contradicts."""
    for key, value in ids.items():
        if content.get(key) is None:
            content[key] = value
        elif value is not None and content[key] != value:
            raise UserError(
                f"in transformers the positions of {architecture} begin after {key} "
                f"{content[key]}, but this model's tokenizer has {value}; train it with "
                f"model.position_offset={int(value) + 1}"
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


def _write_tokenizers(directory: Path, model: AnyModel) -> None:
    """Write the tokenizers of a model, with the settings that `transformers` needs."""
    src, tgt = model.src_tokenizer, model.tgt_tokenizer
    if isinstance(model, Translator):
        src, tgt = _with_final_eos(src), _with_final_eos(tgt)
    write_tokenizer(src, directory, tgt)
    _complete_tokenizer(directory, model)


def _complete_tokenizer(directory: Path, model: AnyModel) -> None:
    """Add settings of the model to the tokenizer files: lengths, sides, languages, token types."""
    path = directory / TOKENIZER_CONFIG
    settings = read_json(path)
    settings["model_max_length"] = model.config.max_length
    if isinstance(model, LanguageModel):
        settings["padding_side"] = "left"  # `generate` appends tokens on the right
    if settings.get("tokenizer_class") == "MarianTokenizer":
        for side, hf_side in HF_SIDES.items():
            if (language := getattr(model.metadata, f"{side}_language")) is not None:
                settings[f"{hf_side}_lang"] = language
    if isinstance(model, Translator) and model.metadata.language_codes:
        _add_languages(settings, model)
    if tags := model.metadata.language_tags:
        content = allow_in_texts(read_json(directory / "tokenizer.json"), {*tags.values()})
        write_json(directory / "tokenizer.json", content)
    has_types = getattr(model.config, "type_vocab_size", 1) > 1
    if has_types and "token_type_ids" not in settings["model_input_names"]:
        settings["model_input_names"].insert(1, "token_type_ids")
        content = read_json(directory / "tokenizer.json")
        _set_token_types(content["post_processor"])
        write_json(directory / "tokenizer.json", content)
    write_json(path, settings)


def _add_languages(settings: dict[str, Any], model: Translator) -> None:
    """The class that puts the tokens of languages before texts, and the model's own languages."""
    codes = model.metadata.language_codes
    if settings["tokenizer_class"] != "M2M100Tokenizer":
        is_mbart = all(map(_MBART_CODE.fullmatch, codes))
        settings["tokenizer_class"] = "MBart50Tokenizer" if is_mbart else "NllbTokenizer"
    for side in HF_SIDES:
        own = getattr(model.metadata, f"{side}_language")
        settings[f"{side}_lang"] = None if own is None else matching_tag(own, codes)


def _is_of_qwen(tokenizer: Tokenizer) -> bool:
    """A byte-level tokenizer that splits texts by a pattern of its own, as that of Qwen."""
    steps = tokenizer.content()["tokenizer"]["pre_tokenizer"] or {}
    kinds = [step["type"] for step in steps.get("pretokenizers", [])]
    return kinds == ["Split", "ByteLevel"]


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
