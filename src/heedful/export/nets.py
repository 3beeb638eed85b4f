"""Nets from and to the Hugging Face format: configuration and weights, without text."""

from typing import Any, NamedTuple

import torch
from torch import nn

from heedful import plugins
from heedful.errors import UserError
from heedful.export.hf_directory import HfDirectory
from heedful.zoo import architecture
from heedful.zoo.hf import config_keys_from_hf, config_to_hf
from heedful.zoo.names import from_hf, to_hf
from heedful.zoo.saved import make_config, undrawn_net


class ImportedNet(NamedTuple):
    """A net of theirs as one of ours, and what is to be said of it."""

    architecture: str
    config: Any
    net: nn.Module
    notices: list[str]


def architecture_of(model_type: str, where: str) -> str:
    """The name of the architecture, also a plugin's, that a model type is; raises UserError."""
    names = plugins.architecture.names()
    formats = {name: getattr(architecture(name), "HF", None) for name in names}
    known = {format.model_type: name for name, format in formats.items() if format is not None}
    if model_type not in known:
        raise UserError(
            f"{where}: the model type {model_type} is not known here; "
            f"known: {', '.join(sorted(known))}"
        )
    return known[model_type]


def net_from_hf(directory: HfDirectory, where: str, **keys: object) -> ImportedNet:
    """Build and fill the net of a directory; `keys` of our Config win over its own.

    Raises:
        UserError: an unknown model type, a setting that we do not build, a tensor too many, too few
            or of the wrong shape.
    """
    name = architecture_of(str(directory.config["model_type"]), where)
    module = architecture(name)
    found = config_keys_from_hf(module.HF, directory.config, where)
    config = make_config(name, found | keys, where)
    net = undrawn_net(name, config)

    def drawn() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            built: nn.Module = module.build(config)
        return built

    notices = from_hf(net, directory.tensors, module.hf_names(config), where, drawn)
    return ImportedNet(name, config, net.eval(), notices)


def net_to_hf(name: str, config: Any, net: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Their `config.json` and tensors; raises UserError where they have no place for ours.

    An architecture that is another one by some of its settings says so by `written_as`.
    """
    module = architecture(name)
    if hasattr(module, "written_as"):
        name, config = module.written_as(config)
        module = architecture(name)
    if not hasattr(module, "HF"):
        raise UserError(
            f"a model of the architecture {name} has no counterpart in the Hugging Face format; "
            "train marian, bart or t5 to export a translator"
        )
    return config_to_hf(module.HF, config), to_hf(net, module.hf_names(config))
