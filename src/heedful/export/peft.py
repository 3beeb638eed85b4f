"""Low-rank adapters from and to the format of `peft`: `adapter_config.json` and safetensors."""

import math
import re
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heedful import zoo
from heedful.errors import UserError
from heedful.files import check_new, read_object, write_directory, write_json
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
from heedful.zoo.names import Names, Slot, abbreviate_names, hf_slots
from heedful.zoo.saved import load_tensors, save_tensors

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
# Settings of peft that change the formula, and their values in plain LoRA.
_PLAIN: dict[str, Any] = {"peft_type": "LORA", "bias": "none", "use_dora": False}
_PLAIN |= {"lora_bias": False, "layer_replication": None, "trainable_token_indices": None}
_PLAIN |= {"target_parameters": None, "alora_invocation_tokens": None, "use_qalora": False}


def export_peft(
    directory: str | PathLike[str], out: str | PathLike[str], *, overwrite: bool = False
) -> None:
    """Write the adapter of a model directory for `peft.PeftModel.from_pretrained`.

    The base model that peft needs beside it is that of `heedful export hf BASE`. Where the format
    joins projections that have factors of their own (`c_attn` of GPT-2), these become blocks of
    larger factors, with equal products.

    Args:
        overwrite: replace an adapter at `out`.

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
    slots = hf_slots(net, _names(content["architecture"], config))
    modules = _modules(slots)
    tensors, scales = {}, {}
    for path, layer in lora_layers(net).items():
        for module, factors in _to_peft(layer, modules[path]).items():
            tensors[f"{_PREFIX}{module}.lora_A.weight"] = factors.a
            tensors[f"{_PREFIX}{module}.lora_B.weight"] = factors.b
            scales[module] = (len(factors.a), factors.scale * len(factors.a))
    saved = set()
    for slot in slots:
        if slot.path in lora.trained:
            tensors[f"{_PREFIX}{slot.hf_name}"] = slot.view
            saved.add(slot.hf_name.rpartition(".")[0])
    settings = _settings(lora, scales, sorted(saved), _TASK_TYPES.get(kind_of(net)))

    def fill(beside: Path) -> None:
        save_tensors(beside / ADAPTER_WEIGHTS, tensors, metadata={"format": "pt"})
        write_json(beside / ADAPTER_CONFIG, settings)

    write_directory(out, fill, owns=ADAPTER_FILES)


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
    say: Callable[[str], None] = lambda line: None,
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
    check_new(out, overwrite=overwrite, owns=("model.safetensors", CONFIG), source=adapter)
    settings = _read_settings(adapter)
    model = load(base, device="cpu", backend="eager")
    slots = hf_slots(model.net, _names(model.metadata.architecture, model.config))
    parts = linear_parts(model.net)
    sizes = {part.path: part.sizes for part in parts.values()}
    factors, whole = _read_tensors(adapter, settings, slots, sizes)
    names = {(part.path, part.part): name for name, part in parts.items()}
    rank = max(len(update.a) for update in factors.values())
    scale = next(iter(factors.values())).scale
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
    if not isinstance(settings.get("lora_alpha"), int | float):
        raise UserError(f"{adapter / ADAPTER_CONFIG} has no number lora_alpha; it is damaged")
    return settings


def _read_tensors(
    adapter: Path,
    settings: Mapping[str, Any],
    slots: list[Slot],
    sizes: Mapping[str, tuple[int, ...]],
) -> tuple[dict[tuple[str, int], _Factors], dict[str, Tensor]]:
    """The updates by path and projection, and the tensors that are stored whole, by name.

    Args:
        sizes: numbers of rows of the projections of each linear layer, by path.
    """
    file = adapter / ADAPTER_WEIGHTS
    tensors = {
        name.removeprefix(_PREFIX).replace(".modules_to_save", ""): tensor.float()
        for name, tensor in load_tensors(file).items()
    }
    known = {slot.hf_name for slot in slots}
    whole = {name: tensor for name, tensor in tensors.items() if name in known}
    factors: dict[tuple[str, int], _Factors] = {}
    used = {*whole}
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
        names = abbreviate_names(unknown)
        raise UserError(f"{file} holds tensors that the base model does not have: {names}")
    if not factors:
        raise UserError(f"{file} holds no updates (lora_A, lora_B) of the base model's matrices")
    return factors, whole


def _modules(slots: list[Slot]) -> dict[str, dict[int, str]]:
    """The modules of the Hugging Face format by path of a module, and index of the projection."""
    modules: dict[str, dict[int, str]] = {}
    for slot in slots:
        if slot.path.endswith(".weight") and slot.hf_name.endswith(".weight"):
            parts = modules.setdefault(slot.path.removesuffix(".weight"), {})
            parts[slot.part] = slot.hf_name.removesuffix(".weight")
    return modules


def _scale(settings: Mapping[str, Any], module: str, rank: int) -> float:
    """The factor of the update of a module: alpha / r, or alpha / √r (Kalajdzievski 2023)."""
    alpha = settings["lora_alpha"]
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            alpha = value
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _names(architecture: str, config: Any) -> Names:
    """The tensor names of an architecture; raises UserError if the format lacks its form."""
    format = zoo.architecture(architecture).formats.get("hf", Format())
    if format.config is None or format.export_as is not None:
        raise UserError(f"adapters of the architecture {architecture} cannot be converted for peft")
    return format.names(config)
