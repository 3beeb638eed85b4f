"""An architecture: its Config, its net, its published sizes, and its files of other programs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from heedful.zoo.hf import HfConfig
from heedful.zoo.names import Names

FormatName = Literal["hf"]


@dataclass(frozen=True)
class Format:
    """The files of another program that hold models of an architecture.

    Args:
        config: translates its configuration file both ways; None: such files are written as
            `export_as` says and never read as this architecture.
        names: its names of the tensors of a Config's net; raises UserError where it has none.
        export_as: the architecture's name, Config and net that are written in place of a Config
            and its net, where another architecture gives the same outputs; raises UserError where
            none does. Default: the same ones.
    """

    config: HfConfig | None = None
    names: Callable[[Any], Names] = lambda config: Names([])
    export_as: Callable[[Any, nn.Module], tuple[str, Any, nn.Module]] | None = None


@dataclass(frozen=True)
class Architecture:
    """A kind of model that recipes and saved models name.

    Args:
        name: as in recipes and in `config.json`.
        config: a frozen dataclass of the sizes and choices.
        build: a net of a Config, its weights drawn from torch's generator.
        sizes: keys of the Config for each published size.
        formats: files of other programs.
    """

    name: str
    config: type[Any]
    build: Callable[[Any], nn.Module]
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    formats: Mapping[FormatName, Format] = field(default_factory=dict)

    def has_key(self, key: str) -> bool:
        """Whether the Config has a key."""
        return key in self.config.__dataclass_fields__
