"""`Architecture`, the decorator of its Config, and the size of its net before it is built."""

import inspect
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import (
    Any,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    TypeVar,
    dataclass_transform,
    runtime_checkable,
)

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from heedful.errors import UserError
from heedful.parts.helpers import checked_dataclass
from heedful.zoo import architecture
from heedful.zoo.names import Names

FormatName = Literal["hf", "gguf"]
Conversion = TypeVar("Conversion")


@dataclass(frozen=True)
class Format(Generic[Conversion]):
    """A file format of another library for models of an architecture.

    Args:
        config: conversion of the configuration, such as an `HfConfig`; None: files are written with
            `export_as`, and never read as this architecture.
        names: tensor names of the net of a Config; raises UserError for an unsupported Config.
        export_as: name of the architecture, Config and net to write instead of a Config and its
            net, if another architecture computes the same; raises UserError if none does. Default:
            they are written as they are.
    """

    config: Conversion | None = None
    names: Callable[[Any], Names] = lambda config: Names([])
    export_as: Callable[[Any, nn.Module], tuple[str, Any, nn.Module]] | None = None


Formats = Mapping[FormatName, Format[Any]]


@dataclass(frozen=True)
class Architecture:
    """A published model, which recipes and saved models refer to by name.

    Args:
        name: name in recipes and in `config.json`.
        config: frozen dataclass of the sizes and choices.
        build: makes the net of a Config, with weights initialized from torch's random generator.
        sizes: keys of the Config for each published size.
        formats: file formats of other libraries.
    """

    name: str
    config: type[Any]
    build: Callable[[Any], nn.Module]
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    formats: Formats = field(default_factory=dict)

    def has_key(self, key: str) -> bool:
        """True if the Config has this key."""
        return key in self.config.__dataclass_fields__


# --- Configs ------------------------------------------------------------------------------------


T = TypeVar("T")
_MOST_MODULES, _MOST = 1_024, 2**31 - 1  # DeepNet had 1,000 layers


@runtime_checkable
class HasCheck(Protocol):
    """A Config with a rule that only its architecture has."""

    def check(self) -> None:
        """Raises ValueError for what the architecture cannot have."""


@dataclass_transform(frozen_default=True)
def model_config(cls: type[T]) -> type[T]:
    """A frozen dataclass that refuses unknown keys and wrong sizes; `check()` may add rules."""
    cls.__post_init__ = _check  # type: ignore[attr-defined]
    return checked_dataclass(cls)


def _check(config: Any) -> None:
    """Check values that hold for all models; raises ValueError naming the key.

    * Integers are at least 1 and below 2³¹, numbers of layers and experts at most 1,024; dropouts
      are in [0, 1); other floats are positive and finite.
    * num_heads divides d_model (unless `head_dim` is given), and num_kv_heads divides num_heads.
    * Rotary positions need an even width of a head.
    * One matrix for source and target (any `tie_embeddings` but none and decoder) needs
      vocabularies of equal size.
    """
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    for name, value in values.items():
        if value is None or isinstance(value, bool):
            continue
        if "dropout" in name:
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, not {value}")
        elif isinstance(value, int) and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
        elif isinstance(value, int):
            most = _MOST_MODULES if name.endswith(("layers", "experts")) else _MOST
            if value > most:
                raise ValueError(f"{name} must be at most {most:,}, not {value:,}")
        elif isinstance(value, float) and not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0, not {value}")
    width, heads = values["d_model"], values["num_heads"]
    for name in ("num_heads", "num_decoder_heads"):
        count = values.get(name)
        if values.get("head_dim") is None and count is not None and width % count:
            raise ValueError(f"d_model {width} is not divisible by {name} {count}")
    groups = values.get("num_kv_heads")
    if groups is not None and heads % groups:
        raise ValueError(f"num_heads {heads} is not divisible by num_kv_heads {groups}")
    is_rotary = "rope_base" in values or values.get("positions") == "rotary"
    if is_rotary and (head_dim := values.get("head_dim") or width // heads) % 2:
        raise ValueError(f"rotary positions need an even head_dim, not {head_dim}")
    if "src_vocab_size" in values and values.get("tie_embeddings") not in ("none", "decoder"):
        check_one_vocabulary(config)
    if isinstance(config, HasCheck):
        config.check()


def check_one_vocabulary(config: Any) -> None:
    """Raise ValueError if source and target share a matrix but not the size of the vocabulary."""
    if config.src_vocab_size != config.tgt_vocab_size:
        raise ValueError(
            "one matrix for source and target needs one vocabulary, but src_vocab_size is "
            f"{config.src_vocab_size} and tgt_vocab_size {config.tgt_vocab_size}; "
            "use a joint tokenizer, or tie_embeddings=decoder where the model has it"
        )


class CommonKeys:
    """Keys that mean the same in every Config that has them, if its docstring says nothing else.

    Args:
        vocab_size: entries of the vocabulary, which follow from the tokenizer.
        src_vocab_size: entries of the vocabulary of sources, which follow from the tokenizer.
        tgt_vocab_size: entries of the vocabulary of targets, which follow from the tokenizer.
        d_model: width of the model: features per token.
        num_heads: attention heads per layer.
        num_layers: number of layers.
        num_encoder_layers: number of layers of the encoder.
        num_decoder_layers: number of layers of the decoder.
        d_ff: width of the hidden units of the feed-forward.
        max_length: longest text, in tokens.
        activation: activation of the feed-forward; names with glu are gated.
        norm_eps: constant added to the variance in norms.
        head: output of an encoder: mlm, logits of tokens; classify, logits of classes; none, its
            states.
        num_labels: number of classes, for the head classify.
        dropout: dropout probability of embeddings and of outputs of sub-layers.
        attention_dropout: dropout probability of the attention weights.
        activation_dropout: dropout probability of the hidden units of the feed-forward.
        classifier_dropout: dropout probability before the linear layer of the classes.
        scale_embeddings: multiply the embeddings by the square root of d_model.
        tie_embeddings: one matrix for input and output.
    """


def key_descriptions(config: type[Any] | None) -> dict[str, str]:
    """The description of each key of a Config, from the docstrings of its class and its bases.

    Args:
        config: None: the keys that most Configs have.
    """
    descriptions: dict[str, str] = {}
    for cls in reversed(() if config is None else config.__mro__[:-1]):
        descriptions |= _described_arguments(cls)
    common = _described_arguments(CommonKeys)
    if config is None:
        return common
    known = [field.name for field in fields(config)]
    return {key: text for key, text in (common | descriptions).items() if key in known}


def _described_arguments(cls: type[Any]) -> dict[str, str]:
    """The entries of the section `Args:` of a docstring, as sentences in the words of a recipe."""
    section = (inspect.getdoc(cls) or "").partition("\nArgs:\n")[2].split("\n\n")[0]
    descriptions: dict[str, str] = {}
    for entry in re.split(r"\n(?= {4}\S)", f"\n{section}")[1:]:
        names, _, text = " ".join(entry.split()).partition(": ")
        text = re.sub(r"\bNone\b", "null", text[:1].upper() + text[1:])
        descriptions |= dict.fromkeys(names.split(", "), text)
    return descriptions


# --- Sizes --------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """Numbers of elements of a net: parameters (shared ones once) and tables (buffers)."""

    parameters: int
    tables: int


def meta_net(name: str, config: Any, where: str) -> nn.Module:
    """A net of an architecture on torch's meta device, which allocates no memory.

    Raises UserError, starting with `where`, for a tensor whose size in bytes exceeds 64 bits.
    """
    try:
        with torch.device("meta"), _OnMeta():
            net = architecture(name).build(config)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise UserError(f"{where}: the sizes exceed any memory: {error}") from None
    return net


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """In the block modules get parameters on the meta device, and buffers with their values.

    A parameter that several modules share remains one if they share it by the attribute of a
    module. One parameter at a time has memory, until it is registered.
    """

    def on_meta(
        module: nn.Module, name: str, parameter: nn.Parameter | None
    ) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter
        empty = torch.empty_like(parameter, device="meta")
        return nn.Parameter(empty, requires_grad=parameter.requires_grad)

    hook: Any = on_meta  # torch's annotation has no result
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def sizes_of(name: str, config: Any, where: str) -> Sizes:
    """The numbers of elements of a net of an architecture; raises UserError as `meta_net`."""
    net = meta_net(name, config, where)
    parameters = sum(parameter.numel() for parameter in net.parameters())
    return Sizes(parameters, sum(buffer.numel() for buffer in net.buffers()))


def check_memory(name: str, config: Any, device: torch.device) -> None:
    """Raise UserError, with both sizes, if the memory is too small to train a net on a device."""
    parameters, tables = sizes_of(name, config, "model")
    weights, all_states = 4 * (parameters + tables), 4 * (4 * parameters + tables)
    is_cuda = device.type == "cuda"
    bounds = [(weights if is_cuda else all_states, host_memory(), "machine")]
    if is_cuda:
        bounds.append((all_states, torch.cuda.mem_get_info(device)[1], "GPU"))
    for needed, available, owner in bounds:
        if needed > available:
            raise UserError(
                f"model: {parameters:,} parameters need {needed / 2**30:,.0f} GiB to be trained, "
                f"and this {owner} has {available / 2**30:,.0f}; make it smaller"
            )


def host_memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Bytes of memory available to the process: of the host, or the limit of its container.

    Args:
        limit: file with the limit of the control group ("max": no limit).
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(memory, int(limit.read_text()))
    except (OSError, ValueError):
        return memory


# Functions whose result has the shape that their arguments broadcast to.
_ELEMENTWISE = frozenset(
    ["add", "sub", "__rsub__", "mul", "div", "neg", "__rpow__", "exp", "sin", "cos", "clamp"]
)


class _OnMeta(TorchFunctionMode):
    """Compute shapes without meta functions of torch, whose import takes a second.

    Functions that are not handled here are called as usual.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__"):  # in place: the shape stays
            return args[0] if args else kwargs["tensor"]
        if name == "__setitem__":
            return None
        if func is torch.arange:
            return torch.empty(len(range(*args)))
        if name in _ELEMENTWISE or func is torch.empty_like:
            shapes = [arg.shape for arg in args if isinstance(arg, torch.Tensor)]
            return torch.empty(np.broadcast_shapes(*shapes))
        return func(*args, **kwargs)
