"""Nets from and to the Hugging Face format."""

from typing import Any, NamedTuple

import torch
from torch import nn

from heedful import plugins, zoo
from heedful.errors import UserError
from heedful.zoo.architectures import Format
from heedful.zoo.hf import HfConfig, config_keys_from_hf, config_to_hf
from heedful.zoo.hf_directory import HfDirectory, json_user_errors
from heedful.zoo.names import from_hf, to_hf
from heedful.zoo.saved import make_config, uninitialized_net


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
        architecture: the architecture to build; default: heedful's own for the model type, or the
            only one of a plugin.
        keys: keys of heedful's Config that override the directory's.

    Raises:
        UserError: an unknown model type, an unsupported setting, a missing or unknown tensor, or
            a wrong shape.
    """
    name = architecture_of(directory.config["model_type"], architecture, where)
    kind, format = zoo.architecture(name), hf_format(name)
    assert format.config is not None, "architectures with this model type have one"
    with json_user_errors(where):
        config_keys = config_keys_from_hf(format.config, kind.config, directory.config, where)
    config = make_config(name, config_keys | keys, where)
    net = uninitialized_net(name, config, directory.tensors, where)

    def initialized() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            return kind.build(config)

    notices = from_hf(net, directory.tensors, format.names(config), where, initialized)
    return ImportedNet(name, config, net.eval(), notices)


def architecture_of(model_type: str, architecture: str | None, where: str) -> str:
    """The architecture for a model type: `architecture`, heedful's own, or the only plugin's.

    Raises UserError for a type that is not supported, or that several plugins read.
    """
    names = plugins.architecture.names()
    configs = {name: hf_format(name).config for name in names}
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
            "them by architecture=NAME"
        )
    return candidates[0]


def net_to_hf(name: str, config: Any, net: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """`config.json` and the tensors of a net in the Hugging Face format.

    An architecture that the format has only as another one, with other settings or another order of
    weights, is converted to that one by its `export_as`.

    Raises:
        UserError: the format does not support the architecture or a setting.
    """
    format = hf_format(name)
    if format.export_as is not None:
        name, config, net = format.export_as(config, net)
        format = hf_format(name)
    if format.config is None:
        raise UserError(f"the Hugging Face format does not support the architecture {name}")
    return config_to_hf(format.config, config), to_hf(net, format.names(config))


def hf_format(name: str) -> Format[HfConfig]:
    """The tables of an architecture for this format; empty if it is not supported."""
    return zoo.architecture(name).formats.get("hf", Format())
