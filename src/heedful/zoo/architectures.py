"""`Architecture`: Config, build function, published sizes and file formats of a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from torch import nn

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
