"""Low-rank adapters from and to the format of `peft`: `adapter_config.json` and safetensors."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heedful import zoo
from heedful.errors import UserError
from heedful.export.hf import OnNotice, log_notice
from heedful.files import MODEL_FILES, check_new, read_object, write_directory, write_json
from heedful.models.adapters import LoRA, linear_parts, lora_layers
from heedful.parts.lora import LoRALinear
from heedful.pipelines import (
    AnyModel,
    Classifier,
    Embedder,
    LanguageModel,
    Translator,
    kind_of,
    load,
)
from heedful.pipelines.base import CONFIG
from heedful.pipelines.nets import load_net, read_lora
from heedful.zoo.architectures import Format
from heedful.zoo.names import Names, Slot, abbreviate_names, hf_slots, tied_names
from heedful.zoo.saved import Base, load_tensors, save_tensors

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
_PREFIX = "base_model.model."
_TASK_TYPES: dict[type[Any], str] = {
    Translator: "SEQ_2_SEQ_LM",
    LanguageModel: "CAUSAL_LM",
    Classifier: "SEQ_CLS",
    Embedder: "FEATURE_EXTRACTION",
}
# Modules that peft saves for a task without their being named.
_HEADS: dict[str | None, list[str]] = {"SEQ_CLS": ["classifier", "score"]}
# Settings of peft that change the formula, and their values in plain LoRA.
_PLAIN: dict[str, Any] = {"peft_type": "LORA", "bias": "none", "use_dora": False}
_PLAIN |= {"lora_bias": False, "layer_replication": None, "trainable_token_indices": None}
_PLAIN |= {"target_parameters": None, "alora_invocation_tokens": None, "use_qalora": False}
_PLAIN |= {"kasa_config": None, "monteclora_config": None, "use_bdlora": None, "arrow_config": None}
# Values of `init_lora_weights` that leave the base's weights unchanged; "pissa", "pissa_niter_4",
# "olora", "corda" and "lora_ga" subtract the first update from them, "loftq" quantizes them.
_PLAIN_INITS = ("true", "false", "none", "gaussian", "eva", "orthogonal", "mica")
_TIE = (
    'Train it with modules_to_save=["lm_head"] and ensure_weight_tying=True, or on a base with '
    "tie_word_embeddings=False"
)
_VOCABULARIES = ("vocab_size", "src_vocab_size", "tgt_vocab_size")


def export_peft(
    directory: str | PathLike[str],
    out: str | PathLike[str],
    *,
    overwrite: bool = False,
    say: OnNotice = log_notice,
) -> None:
    """Write the adapter of a model directory for `peft.PeftModel.from_pretrained`.

    The base model that peft needs beside it is that of `heedful export hf BASE`. Where the format
    joins projections that have factors of their own (`c_attn` of GPT-2), these become blocks of
    larger factors, with equal products. A trained matrix that the base has once for several modules
    (embeddings and output) is written for each of them, since peft trains and loads modules.

    Args:
        overwrite: replace an adapter at `out`.
        say: called with notices.

    Raises:
        UserError: a model without an adapter; an architecture that the Hugging Face format lacks;
            `out` holds something else.
    """
    directory, out = Path(directory), Path(out)
    check_new(out, overwrite=overwrite, owns=ADAPTER_FILES, source=directory)
    content = read_object(directory / CONFIG)
    lora = read_lora(content, directory / CONFIG)
    if lora is None:
        raise UserError(f"{directory} has no adapter; export the whole model: heedful export hf")
    net, config = load_net(directory, content, "cpu", merge=False)
    names = _names(content["architecture"], config)
    slots, tied = hf_slots(net, names), tied_names(net, names)
    modules = _modules(slots)
    tensors, scales = {}, {}
    for path, layer in lora_layers(net).items():
        for module, factors in _to_peft(layer, modules[path]).items():
            tensors[f"{_PREFIX}{module}.lora_A.weight"] = factors.a
            tensors[f"{_PREFIX}{module}.lora_B.weight"] = factors.b
            scales[module] = (len(factors.a), factors.scale * len(factors.a))
    named = {name: slot for slot in slots for name in tied.get(slot.hf_name, [slot.hf_name])}
    task_type = _TASK_TYPES.get(kind_of(net))
    heads = _HEADS.get(task_type, [])
    trained = {name.rpartition(".")[0] for name, slot in named.items() if slot.path in lora.trained}
    saved = _outermost({_within(heads, module) for module in trained})
    for name, slot in named.items():
        if _is_read(name, saved + heads):
            tensors[f"{_PREFIX}{name}"] = slot.view.clone()
    settings = _settings(lora, scales, saved, task_type)

    def fill(beside: Path) -> None:
        save_tensors(beside / ADAPTER_WEIGHTS, tensors, metadata={"format": "pt"})
        write_json(beside / ADAPTER_CONFIG, settings)

    write_directory(out, fill, owns=ADAPTER_FILES)
    if (grown := _grown_vocabulary(directory, content)) is not None:
        say(
            f"the vocabulary has {grown[1]:,} tokens, that of the base {grown[0]:,}: before "
            f"PeftModel.from_pretrained, call resize_token_embeddings({grown[1]}) of the base"
        )


def _outermost(modules: Collection[str]) -> list[str]:
    """The modules that are in none of the others, which peft saves with all that is in them."""
    return sorted(
        name for name in modules if not any(name.startswith(f"{other}.") for other in modules)
    )


def _within(heads: Sequence[str], module: str) -> str:
    """The head that a module is in, which peft saves and reads as a whole; else the module."""
    parts = module.split(".")
    ends = (end for end, part in enumerate(parts, 1) if part in heads)
    return ".".join(parts[: next(ends, len(parts))])


def _is_read(name: str, modules: Sequence[str]) -> bool:
    """True if peft reads a tensor of an adapter that saves modules whose names end in these.

    It reads all tensors of such a module, and fails if one is missing.
    """
    parts = name.split(".")
    paths = (".".join(parts[:end]) for end in range(1, len(parts)))
    return any(path.endswith(module) for path in paths for module in modules)


def _grown_vocabulary(directory: Path, content: Mapping[str, Any]) -> tuple[int, int] | None:
    """The sizes of the vocabularies of the base and of the model, where they differ."""
    base = Base.read(content, directory / CONFIG)
    if base is None:
        return None
    own, other = content["model"], read_object(directory / base.path / CONFIG)["model"]
    sizes = [(other.get(key), own.get(key)) for key in _VOCABULARIES]
    return next(((old, new) for old, new in sizes if old != new), None)


def _settings(
    lora: LoRA, scales: Mapping[str, tuple[int, float]], saved: list[str], task_type: str | None
) -> dict[str, Any]:
    """The content of `adapter_config.json`.

    Args:
        scales: rank and alpha of each module.
        saved: modules that are stored whole.
    """
    return {
        **_PLAIN,
        "base_model_name_or_path": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "modules_to_save": saved or None,
        "r": lora.rank,
        "target_modules": sorted(scales),
        "task_type": task_type,
        "rank_pattern": {
            re.escape(module): rank for module, (rank, _) in scales.items() if rank != lora.rank
        },
        "alpha_pattern": {
            re.escape(module): alpha for module, (_, alpha) in scales.items() if alpha != lora.alpha
        },
        "use_rslora": False,
    }


class _Factors(NamedTuple):
    """The update scale · B A of a matrix."""

    a: Tensor
    b: Tensor
    scale: float


def _to_peft(layer: LoRALinear, modules: Mapping[int, str]) -> dict[str, _Factors]:
    """The factors of a layer by module of the Hugging Face format.

    Args:
        modules: the module of each projection; the first alone where the format joins all.
    """
    parts = zip(layer.parts, layer.lora_a.detach(), layer.factors_b(), strict=True)
    factors = {part: _Factors(a, b.detach(), layer.scale) for part, a, b in parts}
    if len(modules) == len(layer.part_sizes):
        return {modules[part]: factors[part] for part in layer.parts}
    rank = layer.rank
    joined = layer.weight.new_zeros(layer.out_features, rank * len(layer.parts))
    for column, part in enumerate(layer.parts):
        begin = sum(layer.part_sizes[:part])
        rows = slice(begin, begin + layer.part_sizes[part])
        joined[rows, column * rank : (column + 1) * rank] = factors[part].b
    return {modules[0]: _Factors(layer.lora_a.detach().flatten(0, 1), joined, layer.scale)}


def import_peft(
    adapter: str | PathLike[str],
    out: str | PathLike[str],
    *,
    base: str | PathLike[str],
    overwrite: bool = False,
    say: OnNotice = log_notice,
) -> AnyModel:
    """Convert an adapter of `peft` to a heedful model directory that refers to a base, and open it.

    Updates of several ranks or scales are padded by zeros to one rank and rescaled to one scale.

    Args:
        base: heedful model directory of the model that the adapter was trained on.
        overwrite: replace a model directory at `out`.
        say: called with notices.

    Raises:
        UserError: not an adapter in this format; another kind than LoRA; a module that the base
            model lacks, or of another shape.
    """
    adapter, out, base = Path(adapter), Path(out), Path(base)
    check_new(out, overwrite=overwrite, owns=MODEL_FILES, source=adapter)
    settings = _read_settings(adapter)
    model = load(base, device="cpu", backend="eager")
    tensor_names = _names(model.metadata.architecture, model.config)
    slots = hf_slots(model.net, tensor_names)
    parts = linear_parts(model.net)
    sizes = {part.path: part.sizes for part in parts.values()}
    tied = tied_names(model.net, tensor_names)
    factors, whole = _read_tensors(adapter, settings, slots, tied, sizes)
    names = {(part.path, part.part): name for name, part in parts.items()}
    rank = max(len(update.a) for update in factors.values())
    scale = abs(next(iter(factors.values())).scale) or 1.0  # that of an adapter is above 0
    trained = sorted({slot.path for slot in slots if slot.hf_name in whole})
    dropout = float(settings.get("lora_dropout") or 0.0)
    targets = tuple(name for key, name in names.items() if key in factors)
    model.add_adapter(LoRA(rank, scale * rank, dropout, targets, tuple(trained)))
    with torch.no_grad():
        for path, layer in lora_layers(model.net).items():
            for index, (part, b) in enumerate(zip(layer.parts, layer.factors_b(), strict=True)):
                _set_factors(layer, index, b, factors[path, part], scale)
        for slot in slots:
            if slot.hf_name in whole:
                slot.view.copy_(whole[slot.hf_name])
    model.save(out, base=base)
    say(f"{len(factors)} matrices have updates of rank {rank}")
    return model


def _set_factors(layer: LoRALinear, index: int, b: Tensor, update: _Factors, scale: float) -> None:
    """Copy an update into the factors of a layer, padded to their rank."""
    rank = len(update.a)
    if update.a.shape[1:] != layer.lora_a.shape[2:] or update.b.shape[:1] != b.shape[:1]:
        raise UserError(
            f"an update of the adapter is {tuple(update.b.shape)} by {tuple(update.a.shape)}, but "
            f"the matrix {len(b)} by {layer.in_features}; the adapter is of another model"
        )
    layer.lora_a[index].zero_()[:rank] = update.a
    b.zero_()[:, :rank] = update.b * (update.scale / scale)


def _read_settings(adapter: Path) -> dict[str, Any]:
    """The content of `adapter_config.json`; raises UserError unless it is of plain LoRA."""
    if not (adapter / ADAPTER_CONFIG).is_file():
        raise UserError(f"{adapter} holds no {ADAPTER_CONFIG}: it is not an adapter of peft")
    settings = read_object(adapter / ADAPTER_CONFIG)
    for key, plain in _PLAIN.items():
        if settings.get(key, plain) not in (plain, None, [], {}):
            raise UserError(
                f"{adapter / ADAPTER_CONFIG}: {key} is {settings[key]!r}; supported: {plain!r}"
            )
    init = settings.get("init_lora_weights", True)
    if str(init).lower() not in _PLAIN_INITS:
        raise UserError(
            f"{adapter / ADAPTER_CONFIG}: init_lora_weights is {init!r}, which changes the weights "
            "of the base, so that the adapter alone is not the whole change. Save it in peft with "
            "path_initial_model_for_weight_conversion, which makes plain LoRA of PiSSA, OLoRA, "
            "CorDA and LoRA-GA; or merge it there (merge_and_unload) and import the whole model by "
            "`heedful import hf`"
        )
    _check_alphas(settings, adapter / ADAPTER_CONFIG)
    return settings


def _check_alphas(settings: Mapping[str, Any], where: Path) -> None:
    """Raise UserError unless alpha and the entries of `alpha_pattern` are numbers and patterns."""
    if not isinstance(settings.get("lora_alpha"), int | float):
        raise UserError(f"{where} has no number lora_alpha; it is damaged")
    patterns = settings.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise UserError(f"{where}: alpha_pattern must be an object, not {patterns!r}")
    for pattern, alpha in patterns.items():
        if not isinstance(alpha, int | float):
            raise UserError(f"{where}: alpha_pattern of {pattern} is {alpha!r}, not a number")
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(
                f"{where}: alpha_pattern has {pattern!r}, not a regular expression: {error}"
            ) from None


def _read_tensors(
    adapter: Path,
    settings: Mapping[str, Any],
    slots: list[Slot],
    tied: Mapping[str, list[str]],
    sizes: Mapping[str, tuple[int, ...]],
) -> tuple[dict[tuple[str, int], _Factors], dict[str, Tensor]]:
    """The updates by path and projection, and the tensors that are stored whole, by first name.

    Args:
        tied: all names of each tensor that has several.
        sizes: numbers of rows of the projections of each linear layer, by path.
    """
    file = adapter / ADAPTER_WEIGHTS
    tensors = {
        name.removeprefix(_PREFIX).replace(".modules_to_save", ""): tensor.float()
        for name, tensor in load_tensors(file).items()
    }
    # Without wrapped modules, a stored tensor is loaded into the one matrix of the base.
    is_tied = not settings.get("modules_to_save")
    whole, used = dict[str, Tensor](), set[str]()
    for slot in slots:
        all_names = tied.get(slot.hf_name, [slot.hf_name])
        if own := {name: tensors[name] for name in all_names if name in tensors}:
            whole[slot.hf_name] = _whole_tensor(own, [] if is_tied else all_names, slot, file)
            used |= own.keys()
    has_bias = any(slot.path == "head.out.bias" for slot in slots)
    if settings.get("ensure_weight_tying") and has_bias and not whole.keys().isdisjoint(tied):
        raise UserError(
            f"{file} was trained with ensure_weight_tying, by which peft leaves out the bias of "
            "the base's output; train on a base with tie_word_embeddings=False"
        )
    factors: dict[tuple[str, int], _Factors] = {}
    for path, modules in _modules(slots).items():
        for part, module in modules.items():
            pair = [f"{module}.lora_{factor}.weight" for factor in "AB"]
            if path not in sizes or not tensors.keys() >= {*pair}:
                continue
            used |= {*pair}
            a, b = (tensors[name] for name in pair)
            scale = _scale(settings, module, len(a))
            if len(modules) == len(sizes[path]):
                factors[path, part] = _Factors(a, b, scale)
            elif len(b) == sum(sizes[path]):  # the format joins the projections
                for index, rows in enumerate(b.split(list(sizes[path]))):
                    factors[path, index] = _Factors(a, rows, scale)
    if unknown := sorted(tensors.keys() - used):
        matrices = {slot.hf_name.removesuffix(".weight") for slot in slots}
        if others := sorted(matrices & {name.partition(".lora_")[0] for name in unknown}):
            names = abbreviate_names(others)
            raise UserError(
                f"{file} has updates of {names}; heedful has them for linear layers of the blocks "
                "alone. Train it without these: exclude_modules in peft"
            )
        names = abbreviate_names(unknown)
        raise UserError(f"{file} holds tensors that the base model does not have: {names}")
    if not factors:
        raise UserError(f"{file} holds no updates (lora_A, lora_B) of the base model's matrices")
    return factors, whole


def _whole_tensor(
    tensors: Mapping[str, Tensor], names: Collection[str], slot: Slot, file: Path
) -> Tensor:
    """The tensor of a slot that is stored whole, under one name or equal under several.

    Args:
        tensors: those of a file by name.
        names: the names that must be among them, if they are not as in the base.

    Raises:
        UserError: another shape than that of the slot; the tensors differ; a name is missing.
    """
    first, *others = tensors
    if tensors[first].shape != slot.view.shape:
        raise UserError(
            f"{file}: {first} is {tuple(tensors[first].shape)}, that of the base "
            f"{tuple(slot.view.shape)}. Where the vocabulary has grown, the base must have the "
            "same one: resize_token_embeddings and save_pretrained in transformers, then "
            "`heedful import hf`"
        )
    for other in others:
        if not torch.equal(tensors[first], tensors[other]):
            raise UserError(
                f"{file}: {first} and {other} differ, but the base has one matrix for both. {_TIE}"
            )
    missing = sorted({*names} - tensors.keys())
    if missing and not torch.equal(tensors[first], slot.view):
        raise UserError(
            f"{file} trains {first} without {', '.join(missing)}, for which the base has the same "
            f"matrix: in peft the latter stays that of the base. {_TIE}"
        )
    return tensors[first]


def _modules(slots: list[Slot]) -> dict[str, dict[int, str]]:
    """The modules of the Hugging Face format by path of a module, and index of the projection."""
    modules: dict[str, dict[int, str]] = {}
    for slot in slots:
        if slot.path.endswith(".weight") and slot.hf_name.endswith(".weight"):
            parts = modules.setdefault(slot.path.removesuffix(".weight"), {})
            parts[slot.part] = slot.hf_name.removesuffix(".weight")
    return modules


def _scale(settings: Mapping[str, Any], module: str, rank: int) -> float:
    """The factor of the update of a module: alpha / r, or alpha / √r (Kalajdzievski 2023).

    As in peft, alpha is that of the first pattern that matches.
    """
    patterns = (settings.get("alpha_pattern") or {}).items()
    alphas = [alpha for key, alpha in patterns if re.match(rf"(.*\.)?({key})$", module)]
    alpha = alphas[0] if alphas else settings["lora_alpha"]
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _names(architecture: str, config: Any) -> Names:
    """The tensor names of an architecture; raises UserError if the format lacks its form."""
    format = zoo.architecture(architecture).formats.get("hf", Format())
    if format.config is None or format.export_as is not None:
        raise UserError(f"adapters of the architecture {architecture} cannot be converted for peft")
    return format.names(config)
