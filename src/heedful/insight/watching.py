"""`watch(net)`: attention weights, head outputs and residual states of a net, read and changed.

Hooks exist only inside the `with` block, and only for the names that are watched or changed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from heedful.errors import UserError, format_names
from heedful.models.stack import Stack
from heedful.parts.attention import MultiHead

Change = Callable[[Tensor], Tensor]
SUBLAYERS = ("self_attention", "cross_attention", "feedforward")


class Site(NamedTuple):
    """A tensor of a forward pass: the module that computes or takes it.

    Attributes:
        module: the hooked module.
        is_input: the tensor is the first argument of the module, not its output.
        num_heads: heads that the last dimension is split into; 0: it is not split.
    """

    module: nn.Module
    is_input: bool = False
    num_heads: int = 0


def stacks_of(net: nn.Module) -> dict[str, Stack]:
    """The stacks of a net of any family by name: `encoder`, `decoder`.

    Raises:
        UserError: a module that is not a net of `heedful.models`.
    """
    stacks = {name: getattr(net, name, None) for name in ("encoder", "decoder")}
    known = {name: stack for name, stack in stacks.items() if isinstance(stack, Stack)}
    if not known:
        raise UserError(
            f"{type(net).__name__} has no stack of blocks; give a net of heedful, such as model.net"
        )
    return known


def sites_of(net: nn.Module) -> dict[str, Site]:
    """The tensors of a net by name, in the order of the forward pass; see `Watch`."""
    sites: dict[str, Site] = {}
    for stack_name, stack in stacks_of(net).items():
        sites[f"{stack_name}.embedding.state"] = Site(stack, is_input=True)
        for index, block in enumerate(stack.blocks):
            for part in SUBLAYERS:
                residual: Any = getattr(block, part)
                if residual is None:
                    continue
                name, sublayer = f"{stack_name}.{index}.{part}", residual.sublayer
                if isinstance(sublayer, MultiHead):
                    sites[f"{name}.weights"] = Site(sublayer.weights_hook)
                    sites[f"{name}.heads"] = Site(sublayer.out, True, sublayer.num_heads)
                sites[f"{name}.output"] = Site(sublayer)
                sites[f"{name}.state"] = Site(residual)
        sites[f"{stack_name}.final.state"] = Site(stack)
    if isinstance(head := getattr(net, "head", None), nn.Module):
        sites["head.logits"] = Site(head)
    return sites


class Watch(Mapping[str, Tensor]):
    """The watched tensors of the last forward pass by name, and changes of them.

    Names, of layers counted from 0:

    * `STACK.embedding.state` (B, T, D): embeddings, the input of the first block.
    * `STACK.LAYER.self_attention.weights` (B, H, T, K), and `cross_attention`: weights after the
      softmax, zero for queries without a visible key.
    * `STACK.LAYER.self_attention.heads` (B, T, H, E): outputs of the heads before the projection.
    * `STACK.LAYER.self_attention.output`, `cross_attention`, `feedforward` (B, T, D): output of the
      sub-layer, before it is added to the residual.
    * `STACK.LAYER.self_attention.state` and so on (B, T, D): state after the residual connection.
    * `STACK.final.state` (B, T, D): after the final norm.
    * `head.logits`: (B, T, V), or (B, C) of a classifier.

    STACK is `encoder` or `decoder`. A name is absent until a pass has computed it.
    """

    def __init__(self, net: nn.Module, names: Sequence[str]) -> None:
        self._sites = sites_of(net)
        self._watched = {site for name in names for site in self._matching(name)}
        self._changes: dict[str, list[Change]] = {}
        self._tensors: dict[str, Tensor] = {}
        self._handles: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._sites if name in self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that can be watched and changed, in the order of the forward pass."""
        return tuple(self._sites)

    def change(self, name: str, function: Change) -> None:
        """Replace a tensor by a function of it, in the passes that follow.

        Args:
            name: one name, or a pattern with `*` for several.
            function: returns a tensor of the same shape.

        Raises:
            UserError: no such name; at the forward pass, a result of another shape.
        """
        for site in self._matching(name):
            self._changes.setdefault(site, []).append(function)
            self._hook(site)

    def disable_head(self, name: str, head: int) -> None:
        """Set the output of one head to zero, before the projection, in the passes that follow.

        Args:
            name: the attention, such as `decoder.0.self_attention`.
            head: its index, from 0.

        Raises:
            UserError: no such attention or head.
        """
        for site in self._matching(f"{name}.heads"):
            if not 0 <= head < (count := self._sites[site].num_heads):
                raise UserError(f"{name} has heads 0 to {count - 1}, not {head}")
            self.change(site, lambda heads: heads.index_fill(2, _index(heads, head), 0))

    def patch(self, name: str, values: Tensor, positions: Sequence[int] | None = None) -> None:
        """Replace a tensor (B, T, …) by the values of another pass, at some positions.

        Args:
            values: of the same shape, or with B = 1.
            positions: indices into T; None: all.

        Raises:
            UserError: no such name; at the forward pass, values of another shape.
        """

        def replace(tensor: Tensor) -> Tensor:
            if values.shape[1:] != tensor.shape[1:] or values.size(0) not in (1, tensor.size(0)):
                raise UserError(
                    f"{name} has shape {tuple(tensor.shape)}, but the values to patch have "
                    f"{tuple(values.shape)}; take them from a text of the same length"
                )
            if positions is None:
                return values.to(tensor).expand_as(tensor)
            index = _index(tensor, *positions)
            patched = tensor.clone()
            patched[:, index] = values.to(tensor).expand_as(tensor)[:, index]
            return patched

        self.change(name, replace)

    def restore(self) -> None:
        """Remove all changes."""
        self._changes.clear()
        for name in self._handles.keys() - self._watched:
            self._handles.pop(name).remove()

    def __enter__(self) -> Self:
        for name in self._watched:
            self._hook(name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._changes.clear()
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _matching(self, name: str) -> list[str]:
        matches = [site for site in self._sites if site == name or fnmatchcase(site, name)]
        if not matches:
            known = format_names([*self._sites], str, most=12)
            raise UserError(f"the net has nothing named {name}; names: {known}")
        return matches

    def _hook(self, name: str) -> None:
        if name in self._handles:
            return
        site = self._sites[name]

        def process(tensor: Tensor) -> Tensor:
            """Apply the changes to a tensor of this name, and record the result."""
            heads = site.num_heads
            value = tensor.unflatten(-1, (heads, -1)) if heads else tensor
            for function in self._changes.get(name, ()):
                shape, value = value.shape, function(value)
                if value.shape != shape:
                    raise UserError(
                        f"a change of {name} returned shape {tuple(value.shape)}; it must keep "
                        f"{tuple(shape)}"
                    )
            if name in self._watched:
                self._tensors[name] = value
            return value.flatten(-2) if heads else value

        if site.is_input:
            self._handles[name] = site.module.register_forward_pre_hook(
                lambda module, arguments: (process(arguments[0]), *arguments[1:])
            )
        else:
            self._handles[name] = site.module.register_forward_hook(
                lambda module, arguments, output: process(output)
            )


def watch(net: nn.Module, *names: str) -> Watch:
    """A context that records tensors of a net's forward passes by name, and can change them.

    Args:
        net: a net of any family (`model.net`).
        names: names to record, with `*` for any text; none: all. The attention weights of a long
            text are large, and are formed only where they are watched.

    Raises:
        UserError: a module that is no net of `heedful.models`; no such name.

    >>> from heedful.zoo import gpt2
    >>> net = gpt2.build(gpt2.Config(40, d_model=16, num_heads=2, num_layers=2)).eval()
    >>> ids = torch.tensor([[5, 6, 7]])
    >>> with watch(net, "*.weights") as watched:
    ...     logits = net(ids)
    >>> watched["decoder.1.self_attention.weights"].shape
    torch.Size([1, 2, 3, 3])
    >>> with watch(net) as watched:
    ...     watched.disable_head("decoder.0.self_attention", 1)
    ...     changed = net(ids)
    >>> torch.equal(changed, logits)
    False
    """
    return Watch(net, names or ("*",))


def _index(like: Tensor, *indices: int) -> Tensor:
    return torch.tensor(indices, device=like.device)
