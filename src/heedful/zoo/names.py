"""A net's weights from and to the Hugging Face format, by a map of names that is read both ways."""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from heedful.errors import UserError, format_names

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Name:
    """A module of ours and its Hugging Face name; its weight and bias come with it.

    Args:
        ours: the module's path, or the full name of one parameter; `{i}` is a layer's number.
        theirs: its name there. `{a,b}` lists several, whose rows are joined in that order here;
            they are split again by the `split_sizes` of the module or of its parent where these
            are as many, else into equal parts.
        transposed: matrices are stored as (in, out), as the Conv1D of GPT-2 does.
        row: stored as (1, n), here as (n,).
        zero_bias: theirs has a bias where our module has none: it is written as zeros; a file may
            lack it, and what it holds must be exactly zero.
    """

    ours: str
    theirs: str
    transposed: bool = False
    row: bool = False
    zero_bias: bool = False


@dataclass(frozen=True)
class Names:
    """The names of all tensors of a model, and what else a file of it may hold.

    `buffers`, `unused` and `optional` are regular expressions that match whole names; those of
    Hugging Face names match with the prefix or without it.

    Args:
        names: a parameter may have several (tied matrices, older files): a file needs one of them,
            all that it holds must be equal, and the first is written.
        prefix: of the base model's tensors; a file of a model without head may lack it.
        copies: a name, and the one whose tensor is taken for it, with a notice, where a file lacks
            it (weights that were tied when the file was written).
        endings: older endings of names -> today's.
        buffers: tensors that hold no weights (causal masks, position ids): passed over silently.
        unused: weights that our net has no place for: passed over with a notice.
        optional: names of ours that a file may lack: left as initialised, with a notice.
        repeated: further tensors that are written, for readers that miss them, and passed over
            when read (tables that follow from their size): their name -> where it is in our net.
    """

    names: Sequence[Name]
    prefix: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    endings: Mapping[str, str] = field(default_factory=dict)
    buffers: str = ""
    unused: str = ""
    optional: str = ""
    repeated: Mapping[str, str] = field(default_factory=dict)


def layer_names(ours: str, theirs: str, modules: Mapping[str, str], **more: bool) -> list[Name]:
    """The names of `modules` (ours -> theirs) under two prefixes; `more`: attributes of `Name`."""
    return [Name(f"{ours}.{one}", f"{theirs}.{other}", **more) for one, other in modules.items()]


@torch.no_grad()
def from_hf(
    net: nn.Module,
    tensors: Mapping[str, Tensor],
    names: Names,
    where: Path | str,
    drawn: Callable[[], nn.Module] | None = None,
) -> list[str]:
    """Set the net's weights from tensors in the Hugging Face format; returns notices.

    16-bit weights are widened to the net's format with nothing lost; a format that the net cannot
    hold exactly is rounded, with a notice.

    Args:
        where: what the tensors were read from, for messages.
        drawn: gives such a net with new weights, from which those that a file may lack are taken;
            default: they stay as they are.

    Raises:
        UserError: a tensor too many, too few, of a wrong shape or of integers, two that the net has
            one parameter for and that differ, or one that is not zero and the net has nothing for.
            The net is then as it was.
    """
    slots = list(_slots(net, names))
    groups = _by_part(net, slots)
    known = {slot.theirs for slot in slots}
    held, notices = _recognise(tensors, known, names, where)
    for copy, source in names.copies.items():
        if copy not in held and source in held:
            held[copy] = held[source]
            notices.append(f"{where} lacks {copy}: {source} is taken for it")
    begun = {slot.owner for slot in slots if slot.theirs in held}
    filled: list[_Slot] = []
    left, missing = set(), []
    for group in groups:
        present, first = [slot for slot in group if slot.theirs in held], group[0]
        if not first.ours:
            zeros, tensor = first.view, held.get(first.theirs, first.view)
            if tensor.shape != zeros.shape or tensor.any():
                raise UserError(
                    f"{where}: {first.theirs} should be zeros {_shape(zeros)}: the model has "
                    "nothing for it"
                )
        elif present:
            _check_alike(present, held, where)
            filled.append(present[0])
        elif first.owner in begun or not re.fullmatch(names.optional, first.ours):
            missing.append(first.theirs)
        else:
            left.add(first.ours)
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(f"{where} lacks the tensor {min(missing)}{more}")
    for slot in filled:
        slot.view.copy_(held[slot.theirs])
    if left:
        notices.append(f"{where} has nothing for {few([*left])}: left as initialised")
        source_net = drawn() if drawn is not None else net
        for ours in left:
            net.get_parameter(ours).copy_(source_net.get_parameter(ours))
    return notices + _rounded(filled, held, where)


def to_hf(net: nn.Module, names: Names) -> dict[str, Tensor]:
    """The net's weights in the Hugging Face format: views, no copies but of what is `repeated`.

    A parameter that the net shares is there once, under the first of its names.
    """
    slots = list(_slots(net, names))
    first = (group[0] for group in _by_part(net, slots))
    again = {theirs: attrgetter(ours)(net).clone() for theirs, ours in names.repeated.items()}
    return {slot.theirs: slot.view for slot in first} | again


def weights_of(net: nn.Module) -> dict[str, Tensor]:
    """The net's parameters, those that are shared under their first name only."""
    return dict(net.named_parameters())


def trainable(net: nn.Module) -> dict[str, nn.Parameter]:
    """Those of the net's parameters that require a gradient: what an optimizer changes."""
    return {name: weight for name, weight in net.named_parameters() if weight.requires_grad}


def set_weights(net: nn.Module, tensors: Mapping[str, Tensor], where: Path | str) -> None:
    """Copy tensors of our own names into the net; raises UserError as `from_hf` does."""
    from_hf(net, tensors, Names([Name(name, name) for name in weights_of(net)]), where)


class _Slot(NamedTuple):
    """A tensor of a file: a parameter or the part of one, as a view in the file's layout.

    Without a name of ours it is zeros: a bias that our module lacks.
    """

    theirs: str
    ours: str
    owner: int  # of the parameter, however many modules share it
    part: int
    view: Tensor


def _slots(net: nn.Module, names: Names) -> Iterator[_Slot]:
    """All tensors that the map has names for, in its order."""
    parameters = dict(net.named_parameters(remove_duplicate=False))
    for name in names.names:
        joined = re.fullmatch(r"(.*)\{([^{}]*,[^{}]*)\}(.*)", name.theirs)
        each = [name.theirs]
        if joined is not None:
            each = [joined[1] + one + joined[3] for one in joined[2].split(",")]
        for ours, layer, leaf in _named(name.ours, parameters):
            parts = _split(net, ours, parameters[ours].detach(), len(each))
            for index, (theirs, part) in enumerate(zip(each, parts, strict=True)):
                view = _laid_out(part, name)
                theirs = theirs.replace("{i}", layer)
                yield _Slot(theirs + leaf, ours, id(parameters[ours]), index, view)
                if (
                    name.zero_bias
                    and leaf == ".weight"
                    and ours.removesuffix("weight") + "bias" not in parameters
                ):
                    zeros = view.new_zeros(view.size(-1 if name.transposed else 0))
                    yield _Slot(f"{theirs}.bias", "", id(zeros), 0, zeros)


def _named(ours: str, parameters: Mapping[str, Tensor]) -> list[tuple[str, str, str]]:
    """The parameters of a name, each with its layer's number and with `.weight` or `.bias`."""
    if "{i}" not in ours:  # looked up, as patterns would make a start-up slow
        leaves = ("", ".weight", ".bias")
        return [(ours + leaf, "", leaf) for leaf in leaves if ours + leaf in parameters]
    pattern = re.escape(ours).replace(re.escape("{i}"), r"(?P<i>\d+)")
    whole = re.compile(pattern + r"(?P<leaf>\.(weight|bias))?")
    found = map(whole.fullmatch, parameters)
    return [(each[0], each["i"], each["leaf"] or "") for each in found if each is not None]


def _by_part(net: nn.Module, slots: Sequence[_Slot]) -> Iterable[list[_Slot]]:
    """For each parameter or part of one its slots: one for each of its names."""
    groups: dict[tuple[int, int], list[_Slot]] = {}
    owner: dict[str, int] = {}
    for slot in slots:
        same = owner.setdefault(slot.theirs, slot.owner) == slot.owner
        assert same, f"{slot.theirs} is the name of two parameters"
        groups.setdefault((slot.owner, slot.part), []).append(slot)
    forgotten = [name for name, weight in net.named_parameters() if (id(weight), 0) not in groups]
    assert not forgotten, f"the map has no name for {forgotten}"
    return groups.values()


def _split(net: nn.Module, ours: str, weight: Tensor, num_parts: int) -> Sequence[Tensor]:
    """Views of a parameter's parts along its first dimension."""
    path = ours.rpartition(".")[0]
    modules = (net.get_submodule(path), net.get_submodule(path.rpartition(".")[0]))
    given = [getattr(module, "split_sizes", ()) for module in modules]
    equal = (weight.size(0) // num_parts,) * num_parts
    sizes = next((each for each in given if len(each) == num_parts), equal)
    assert sum(sizes) == weight.size(0), f"{ours} is {weight.size(0)} rows, not those of {sizes}"
    return weight.split(list(sizes))


def _laid_out(part: Tensor, name: Name) -> Tensor:
    """In their layout."""
    if name.transposed and part.dim() == 2:
        return part.T
    return part.unsqueeze(0) if name.row else part


def _recognise(
    tensors: Mapping[str, Tensor], known: set[str], names: Names, where: Path | str
) -> tuple[dict[str, Tensor], list[str]]:
    """The weights of a file under their full names, and a notice of those left out."""
    held: dict[str, Tensor] = {}
    unused, unknown = [], []
    for name, tensor in tensors.items():
        both = [name, names.prefix + name]
        for old, new in names.endings.items():
            if name.endswith(old):
                both += [each.removesuffix(old) + new for each in both]
        if not names.repeated.keys().isdisjoint(both):
            continue
        full = next((each for each in both if each in known), None)
        if full is None and any(re.fullmatch(names.buffers, each) for each in both):
            continue
        if full is None and any(re.fullmatch(names.unused, each) for each in both):
            unused.append(name)
            continue
        if tensor.dtype not in FLOATS:
            raise UserError(
                f"{where}: {name} is {_plain(tensor.dtype)}, no floating-point format of 16 bits "
                "or more: weights that were quantised cannot be loaded; take the model as it was "
                "before"
            )
        if full is None:
            unknown.append(name)
        elif full in held:
            raise UserError(
                f"{where} holds {full} both with and without {names.prefix}; remove one of them"
            )
        else:
            held[full] = tensor
    if unknown:
        close = difflib.get_close_matches(min(unknown), sorted(known), n=1, cutoff=0)
        hint = f"; the nearest known name is {close[0]}" if close else ""
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise UserError(
            f"{where} holds a tensor that the model has no place for: {min(unknown)}{more}{hint}"
        )
    if unused:
        return held, [f"{where}: left out what the model has no place for: {few(unused)}"]
    return held, []


def _check_alike(slots: Sequence[_Slot], held: Mapping[str, Tensor], where: Path | str) -> None:
    """Refuse a wrong shape, and what differs under two names of one parameter."""
    for slot in slots:
        tensor, first = held[slot.theirs], held[slots[0].theirs]
        if tensor.shape != slot.view.shape:
            raise UserError(
                f"{where}: {slot.theirs} is {_shape(tensor)}, but the model's {slot.ours} needs "
                f"{_shape(slot.view)}"
            )
        wide = torch.promote_types(first.dtype, tensor.dtype)
        if slot is not slots[0] and not torch.equal(first.to(wide), tensor.to(wide)):
            raise UserError(
                f"{where}: {slot.theirs} differs from {slots[0].theirs}, but the model has one "
                "parameter for both"
            )


def _rounded(slots: Sequence[_Slot], held: Mapping[str, Tensor], where: Path | str) -> list[str]:
    """A notice for each format that the net's own cannot hold exactly."""
    rounded: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for slot in slots:
        stored, own = held[slot.theirs].dtype, slot.view.dtype
        if torch.promote_types(stored, own) != own:
            rounded.setdefault((stored, own), []).append(slot.theirs)
    return [
        f"{where}: rounded from {_plain(stored)} to {_plain(own)}: {few(found)}"
        for (stored, own), found in rounded.items()
    ]


def few(names: Sequence[str]) -> str:
    """The first tensors' names in order, for a message."""
    return format_names(sorted(names), str, most=3)


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
