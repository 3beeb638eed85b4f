"""Low-rank adapters (LoRA) of a net: added to linear layers of its blocks, and merged into them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import ConfigDict, Field
from torch import Tensor, nn

from heedful.errors import UserError, format_names
from heedful.parts.attention import Attention
from heedful.parts.cross_attention import CrossAttention
from heedful.parts.feedforward import FeedForward
from heedful.parts.lora import LoRALinear


@dataclass(frozen=True)
class LoRA:
    """An adapter of a net (Hu et al. 2022).

    Attributes:
        rank: r, the rank of each update.
        alpha: α; an update is multiplied by α / r.
        dropout: on the input of an update, in training.
        targets: patterns of linear layers, as in `matches`: those that have an update. The paper
            adapts queries and values.
        trained: names of other parameters that are trained, such as those of a new head.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    rank: Annotated[int, Field(ge=1)] = 8
    alpha: Annotated[float, Field(gt=0)] = 16.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: tuple[str, ...] = ("q", "v")
    trained: tuple[str, ...] = ()


class LinearPart(NamedTuple):
    """A projection: some rows of a linear layer, or all.

    Attributes:
        path: the path of the layer in the net.
        part: index of the projection in the layer.
        sizes: numbers of rows of all projections of the layer.
    """

    path: str
    part: int
    sizes: tuple[int, ...]


def linear_parts(net: nn.Module) -> dict[str, LinearPart]:
    """The projections of all blocks of a net by name, as `decoder.blocks.0.self_attention.q`.

    A matrix that holds several projections (`qkv`, `kv`, a gated `up`) has a name for each.
    """
    parts: dict[str, LinearPart] = {}
    for path, module in net.named_modules():
        if not isinstance(module, nn.Linear) or "blocks" not in path.split("."):
            continue
        parent, _, child = path.rpartition(".")
        names, sizes = _projections(net.get_submodule(parent), child, module)
        for index, name in enumerate(names):
            parts[f"{plain_name(parent)}.{name}"] = LinearPart(path, index, sizes)
    return parts


def _projections(
    parent: nn.Module, child: str, linear: nn.Linear
) -> tuple[Sequence[str], tuple[int, ...]]:
    """Names and numbers of rows of the projections in a linear layer."""
    rows = linear.out_features
    if isinstance(parent, Attention) and child == "qkv":
        return ("q", "k", "v"), parent.split_sizes
    if isinstance(parent, CrossAttention) and child == "kv":
        return ("k", "v"), (rows // 2, rows // 2)
    if isinstance(parent, FeedForward) and child == "up" and parent.is_gated:
        return ("gate", "up"), (rows // 2, rows // 2)
    return (child,), (rows,)


def plain_name(path: str) -> str:
    """The path of a module or parameter without the modules of residual connections."""
    return path.replace(".sublayer.", ".").removesuffix(".sublayer")


def matches(name: str, pattern: str) -> bool:
    """True if the pattern is a run of whole parts of a dotted name; `*` is any text in a part.

    >>> matches("decoder.blocks.1.self_attention.q", "blocks.1.*.q")
    True
    >>> matches("decoder.blocks.11.self_attention.q", "blocks.1")
    False
    """
    regex = re.escape(pattern).replace(r"\*", "[^.]*")
    return re.search(rf"(?:^|\.){regex}(?:\.|$)", name) is not None


def select(names: Sequence[str], patterns: Sequence[str], key: str) -> list[str]:
    """The names that match any of the patterns, in order.

    Args:
        key: the setting that holds the patterns, for errors.

    Raises:
        UserError: a pattern that matches no name.
    """
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            known = [*dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names)]
            raise UserError(
                f"{key}: {pattern} matches nothing; names: {format_names(known, str, most=24)}"
            )
    return [name for name in names if any(matches(name, pattern) for pattern in patterns)]


def add_lora(net: nn.Module, lora: LoRA) -> None:
    """Add an adapter to a net, in place, and freeze all other parameters but `lora.trained`.

    The factors are initialized from torch's random generator; the outputs of the net are unchanged.

    Raises:
        UserError: the net has an adapter; a target that matches no layer.

    >>> from heedful.zoo import architecture
    >>> gpt2 = architecture("gpt2")
    >>> net = gpt2.build(gpt2.config(20, d_model=16, num_heads=2, num_layers=1))
    >>> add_lora(net, LoRA(rank=4))  # of the queries and the values
    >>> sum(weight.numel() for weight in net.parameters() if weight.requires_grad)
    256
    """
    if lora_layers(net):
        raise UserError("the net has an adapter already; merge it first (merge_lora)")
    parts = linear_parts(net)
    targets = select([*parts], lora.targets, "adapter.targets")
    if not targets:
        raise UserError("adapter.targets is empty; give patterns of linear layers, such as q and v")
    layers: dict[str, list[LinearPart]] = {}
    for name in targets:
        layers.setdefault(parts[name].path, []).append(parts[name])
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name in lora.trained)
    for path, selected in layers.items():
        parent, _, child = path.rpartition(".")
        linear = net.get_submodule(path)
        assert isinstance(linear, nn.Linear), "linear_parts are of linear layers"
        layer = LoRALinear(
            linear,
            selected[0].sizes,
            [linear_part.part for linear_part in selected],
            rank=lora.rank,
            alpha=lora.alpha,
            dropout=lora.dropout,
        )
        setattr(net.get_submodule(parent), child, layer.train(linear.training))


def lora_layers(net: nn.Module) -> dict[str, LoRALinear]:
    """The layers of a net with a low-rank update, by path."""
    return {path: m for path, m in net.named_modules() if isinstance(m, LoRALinear)}


def merge_lora(net: nn.Module) -> None:
    """Replace the layers of an adapter by plain ones with W + (α / r) B A, in place.

    All parameters of a net with an adapter then require a gradient again.

    >>> from heedful.zoo import architecture
    >>> gpt2 = architecture("gpt2")
    >>> net = gpt2.build(gpt2.config(20, d_model=16, num_heads=2, num_layers=1))
    >>> add_lora(net, LoRA(rank=4))  # and train it
    >>> merge_lora(net)
    >>> any("lora" in name for name, _ in net.named_parameters())
    False
    """
    layers = lora_layers(net)
    for path, layer in layers.items():
        parent, _, child = path.rpartition(".")
        setattr(net.get_submodule(parent), child, layer.merged())
    if layers:
        net.requires_grad_(True)


def without_factors(net: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a net without the factors of its adapter."""
    factors = {f"{path}.{name}" for path in lora_layers(net) for name in ("lora_a", "lora_b")}
    return {name: weight for name, weight in weights.items() if name not in factors}


def freeze(net: nn.Module, patterns: Sequence[str], key: str) -> None:
    """Freeze the parameters of a net whose names match any of the patterns (`matches`).

    Args:
        key: the setting that holds the patterns, for errors.

    Raises:
        UserError: a pattern that matches no parameter; no parameter is left to train.

    >>> from heedful.zoo import architecture
    >>> gpt2 = architecture("gpt2")
    >>> net = gpt2.build(gpt2.config(20, d_model=16, num_heads=2, num_layers=1))
    >>> freeze(net, ["embedding.*"], key="patterns")
    >>> [name for name, weight in net.named_parameters() if not weight.requires_grad]
    ['embedding.tokens.weight', 'embedding.positions.weight']
    """
    parameters = {plain_name(name): weight for name, weight in net.named_parameters()}
    for name in select([*parameters], patterns, key):
        parameters[name].requires_grad_(False)
    if not any(weight.requires_grad for weight in parameters.values()):
        raise UserError(f"{key} freezes all parameters; leave some to train")
