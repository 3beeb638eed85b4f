"""Nets of saved models: loading, the kind of model, the size and the device."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.models.adapters import LoRA, add_lora, merge_lora
from heedful.models.decoder_only import DecoderOnly
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.heads import ClassificationHead, MaskedTokenHead
from heedful.parts.helpers import make_weights_column_major
from heedful.pipelines.base import CONFIG
from heedful.pipelines.encoders import Classifier, Embedder, MaskedLanguageModel
from heedful.pipelines.kinds import AnyModel
from heedful.pipelines.language_model import LanguageModel
from heedful.pipelines.metadata import ModelMetadata
from heedful.pipelines.translation import Translator
from heedful.zoo.saved import (
    LOCK,
    WEIGHTS,
    Base,
    load_tensors,
    make_config,
    read_step,
    set_weights,
    uninitialized_net,
    weights_of,
)


def load_net(
    directory: Path,
    content: dict[str, Any],
    device: str,
    dtype: torch.dtype = torch.float32,
    weights: Mapping[str, Tensor] | None = None,
    merge: bool = True,
) -> tuple[nn.Module, Any]:
    """The net of a model directory and its Config.

    Args:
        content: of `config.json`.
        dtype: of the weights.
        weights: in place of those in the directory's `model.safetensors`.
        merge: merge an adapter into the weights.

    Raises:
        UserError: a directory that is incomplete, damaged or not written by heedful.
    """
    try:
        name, keys = content["architecture"], content["model"]
        config = make_config(name, keys, str(directory / CONFIG))
    except (KeyError, TypeError) as error:
        raise UserError(f"{directory / CONFIG} was not written by heedful: {error}") from None
    _check_run(directory)
    file = directory / WEIGHTS
    tensors = load_tensors(file) if weights is None else weights
    base, lora = Base.read(content, directory / CONFIG), read_lora(content, directory / CONFIG)
    if base is not None:
        tensors = {**base.load(directory), **tensors}
    net = uninitialized_net(name, config, tensors, file)
    if lora is not None:
        add_lora(net, lora)
    if base is not None:  # its tensors of another head are left out
        own = weights_of(net)
        tensors = {name: tensor for name, tensor in tensors.items() if name in own}
    set_weights(net, tensors, file)
    if merge:
        merge_lora(net)
    place_net(net, device, dtype)
    return net, config


def place_net(net: nn.Module, device: str, dtype: torch.dtype) -> None:
    """Move a net to a device and a type, to be used and not trained."""
    net.to(choose_device(device), dtype).eval()
    make_weights_column_major(net)


def read_lora(content: Mapping[str, Any], where: Path) -> LoRA | None:
    """The entry `adapter` in the content of a `config.json`, the file `where`; None without one.

    Raises:
        UserError: a damaged entry.
    """
    if "adapter" not in content:
        return None
    try:
        return TypeAdapter(LoRA).validate_python(content["adapter"])
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise UserError(f"{where}: its entry `adapter` is damaged: {reason}") from None


def _check_run(directory: Path) -> None:
    """Log the step of an unfinished run's model; raises UserError for a run without a model."""
    weights = directory / WEIGHTS
    if not weights.is_file() and (directory / "recipe.yaml").is_file():
        raise UserError(
            f"{directory} holds a run, but no model yet: it is written after the first step"
        )
    if (directory / LOCK).is_file() and (step := read_step(weights)) is not None:
        logging.getLogger("heedful").warning(
            f"note: the run {directory} has not finished; its model is of step {step:,}"
        )


def open_net(
    net: nn.Module,
    config: Any,
    metadata: ModelMetadata,
    src_tokenizer: Tokenizer | None,
    tgt_tokenizer: Tokenizer | None = None,
) -> AnyModel:
    """A net as its kind of model; without a second tokenizer both sides use the first."""
    kind = kind_of(net)
    return kind(net, config, metadata, src_tokenizer, tgt_tokenizer or src_tokenizer)


def kind_of(net: nn.Module) -> type[AnyModel]:
    """The class of model by a net's family and head."""
    if isinstance(net, EncoderDecoder):
        return Translator
    if isinstance(net, DecoderOnly):
        return LanguageModel
    head = getattr(net, "head", None)
    if isinstance(head, MaskedTokenHead):
        return MaskedLanguageModel
    return Classifier if isinstance(head, ClassificationHead) else Embedder


def choose_device(name: str) -> torch.device:
    """A device by torch's name; `auto`: CUDA, else MPS, else the CPU."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"no device {name} here: {reason}; use auto or cpu") from None
    return device


def parameter_count(net: nn.Module) -> int:
    """The number of parameters; shared ones count once."""
    return sum(parameter.numel() for parameter in net.parameters())
