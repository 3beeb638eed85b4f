"""Nets of saved models: which kind of model one is, how large, and on which device."""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.models.decoder_only import DecoderOnly
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.heads import ClassificationHead, MaskedTokenHead
from heedful.parts.layout import make_weights_column_major
from heedful.pipelines.base import CONFIG
from heedful.pipelines.encoders import Classifier, Embedder, MaskedLanguageModel
from heedful.pipelines.kinds import AnyModel
from heedful.pipelines.language_model import LanguageModel
from heedful.pipelines.metadata import ModelCard
from heedful.pipelines.translation import Translator
from heedful.zoo.added_weights import load_weights
from heedful.zoo.names import set_weights
from heedful.zoo.saved import LOCK, WEIGHTS, make_config, read_step, uninitialized_net


def load_net(
    directory: Path, content: dict[str, Any], device: str, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Any]:
    """The net of a model directory and its Config.

    Args:
        content: what `config.json` says.
        dtype: of the weights.

    Raises UserError where it is none, is truncated, or was written by something else.
    """
    try:
        name, keys = content["architecture"], content["model"]
        config = make_config(name, keys, str(directory / CONFIG))
    except (KeyError, TypeError) as error:
        raise UserError(f"{directory / CONFIG} was not written by heedful: {error}") from None
    _check_run(directory)
    weights = load_weights(directory / WEIGHTS)
    net = uninitialized_net(name, config, weights, directory / WEIGHTS)
    set_weights(net, weights, directory / WEIGHTS)
    net.to(choose_device(device), dtype).eval()
    make_weights_column_major(net)
    return net, config


def _check_run(directory: Path) -> None:
    """Say which step the model of an unfinished run is of; raises UserError where it has none."""
    weights = directory / WEIGHTS
    if not weights.is_file() and (directory / "recipe.yaml").is_file():
        raise UserError(
            f"{directory} holds a run, but no model yet: it is written after the first step"
        )
    if (directory / LOCK).is_file() and (step := read_step(weights)) is not None:
        logging.getLogger("heedful").warning(
            f"note: {directory} is a run that goes on, or was killed; its model is of step {step:,}"
        )


def open_net(
    net: nn.Module,
    config: Any,
    card: ModelCard,
    src_tokenizer: Tokenizer | None,
    tgt_tokenizer: Tokenizer | None = None,
) -> AnyModel:
    """The model kind of a net; without a second tokenizer the first serves both sides."""
    kind = kind_of(net)
    return kind(net, config, card, src_tokenizer, tgt_tokenizer or src_tokenizer)


def kind_of(net: nn.Module) -> type[AnyModel]:
    """What a net is, from its family and its head."""
    if isinstance(net, EncoderDecoder):
        return Translator
    if isinstance(net, DecoderOnly):
        return LanguageModel
    head = getattr(net, "head", None)
    if isinstance(head, MaskedTokenHead):
        return MaskedLanguageModel
    return Classifier if isinstance(head, ClassificationHead) else Embedder


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA, then MPS, then the CPU; anything else as torch names it."""
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
    """Parameters, those that are shared counted once."""
    return sum(parameter.numel() for parameter in net.parameters())
