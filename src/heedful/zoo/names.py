"""Weights of a net from and to the Hugging Face format, by one table of tensor names."""

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
    """A module and its Hugging Face name, which map its weight and bias; or one parameter.

    Args:
        path: path of the module in the net, or full name of a parameter; `{i}` is the index of a
            layer.
        hf_name: name in Hugging Face files. `{a,b}` names several tensors, whose rows are joined
            in that order; they are split by the `split_sizes` of the module or of its parent if it
            has that number of sizes, otherwise into equal parts.
        transposed: matrices are stored as (in, out), as in the Conv1D of GPT-2.
        row: stored as (1, n); (n,) in the net.
        zero_bias: the file has a bias that the module lacks: written as zeros; a file that is read
            may lack it, or must hold zeros.
    """

    path: str
    hf_name: str
    transposed: bool = False
    row: bool = False
    zero_bias: bool = False


@dataclass(frozen=True)
class Names:
    """The tensor names of a model, and of other tensors allowed in its files.

    `buffers`, `unused` and `optional` are regular expressions that match whole names; Hugging Face
    names are matched with the prefix and without it.

    Args:
        names: one parameter can have several (tied matrices, older files): a file needs one of
            them, those that it holds must be equal, and the first is written.
        prefix: prefix of the tensors of the base model; files without a head can omit it.
        copies: a name -> the name of the tensor that is used, with a notice, if a file lacks it
            (weights that were tied when the file was written).
        endings: endings of names in older files -> current endings.
        buffers: tensors that are not weights (causal masks, position ids): ignored silently.
        unused: weights that the net does not have: ignored with a notice.
        optional: parameters of the net that a file may lack: left as initialized, with a notice.
        repeated: tensors that are written for other readers and ignored when read (tables that
            their size determines): Hugging Face name -> path in the net.
    """

    names: Sequence[Name]
    prefix: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    endings: Mapping[str, str] = field(default_factory=dict)
    buffers: str = ""
    unused: str = ""
    optional: str = ""
    repeated: Mapping[str, str] = field(default_factory=dict)


def layer_names(path: str, hf_name: str, modules: Mapping[str, str], **more: bool) -> list[Name]:
    """Names of `modules` (path -> Hugging Face name) under two prefixes.

    `more`: attributes of `Name`.
    """
    return [Name(f"{path}.{module}", f"{hf_name}.{hf}", **more) for module, hf in modules.items()]


@torch.no_grad()
def from_hf(
    net: nn.Module,
    tensors: Mapping[str, Tensor],
    names: Names,
    where: Path | str,
    initialized: Callable[[], nn.Module] | None = None,
) -> list[str]:
    """Set the weights of the net from tensors in the Hugging Face format; returns notices.

    16-bit weights are converted to the type of the net without loss; a type that the net cannot
    represent exactly is rounded, with a notice.

    Args:
        where: source of the tensors, for messages.
        initialized: makes such a net with initialized weights, for parameters that a file may lack;
            default: they keep their values.

    Raises:
        UserError: a tensor is missing, unknown, of a wrong shape or of integers; two tensors of one
            parameter differ; or a tensor of a parameter that the net lacks is not zero. The net is
            then unchanged.
    """
    slots = list(_slots(net, names))
    groups = _group_slots(net, slots)
    known = {slot.hf_name for slot in slots}
    loaded, notices = _match_names(tensors, known, names, where)
    for copy, source in names.copies.items():
        if copy not in loaded and source in loaded:
            loaded[copy] = loaded[source]
            notices.append(f"{where} lacks {copy}: {source} is used instead")
    partly_loaded = {slot.owner for slot in slots if slot.hf_name in loaded}
    filled: list[Slot] = []
    absent, missing = set(), []
    for group in groups:
        present, first = [slot for slot in group if slot.hf_name in loaded], group[0]
        if not first.path:
            zeros, tensor = first.view, loaded.get(first.hf_name, first.view)
            if tensor.shape != zeros.shape or tensor.any():
                raise UserError(
                    f"{where}: {first.hf_name} should be zeros {_shape(zeros)}: the model does "
                    "not have it"
                )
        elif present:
            _check_tensors(present, loaded, where)
            filled.append(present[0])
        elif first.owner in partly_loaded or not re.fullmatch(names.optional, first.path):
            missing.append(first.hf_name)
        else:
            absent.add(first.path)
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(f"{where} lacks the tensor {min(missing)}{more}")
    for slot in filled:
        slot.view.copy_(loaded[slot.hf_name])
    if absent:
        notices.append(f"{where} lacks {abbreviate_names([*absent])}: left as initialized")
        source_net = initialized() if initialized is not None else net
        for path in absent:
            net.get_parameter(path).copy_(source_net.get_parameter(path))
    return notices + _rounding_notices(filled, loaded, where)


def to_hf(net: nn.Module, names: Names) -> dict[str, Tensor]:
    """The weights of the net in the Hugging Face format: views, except for copies of `repeated`.

    A parameter that several modules share is written once, under the first of its names.
    """
    slots = list(_slots(net, names))
    first = (group[0] for group in _group_slots(net, slots))
    repeated = {hf_name: attrgetter(path)(net).clone() for hf_name, path in names.repeated.items()}
    return {slot.hf_name: slot.view for slot in first} | repeated


def hf_slots(net: nn.Module, names: Names) -> list["Slot"]:
    """The tensors of a file by the table's first name of each; other parameters are left out."""
    slots: dict[tuple[int, int], Slot] = {}
    for slot in _slots(net, names):
        if slot.path:
            slots.setdefault((slot.owner, slot.part), slot)
    return [*slots.values()]


def tied_names(net: nn.Module, names: Names) -> dict[str, list[str]]:
    """All names of each tensor of a file that has several in the table, by the first of them."""
    groups: dict[tuple[int, int], list[str]] = {}
    for slot in _slots(net, names):
        groups.setdefault((slot.owner, slot.part), []).append(slot.hf_name)
    return {group[0]: group for group in groups.values() if len(group) > 1}


class Slot(NamedTuple):
    """A tensor of a file: a parameter or a part of one, as a view in the layout of the file.

    Attributes:
        hf_name: name in the file.
        path: name of the parameter in the net; empty for a bias that the module lacks (zeros).
        owner: id of the parameter, the same for all modules that share it.
        part: index of the part.
        view: the tensor.
    """

    hf_name: str
    path: str
    owner: int
    part: int
    view: Tensor


def _slots(net: nn.Module, names: Names) -> Iterator[Slot]:
    """All tensors that the table names, in its order."""
    parameters = dict(net.named_parameters(remove_duplicate=False))
    for name in names.names:
        joined = re.fullmatch(r"(.*)\{([^{}]*,[^{}]*)\}(.*)", name.hf_name)
        hf_names = [name.hf_name]
        if joined is not None:
            hf_names = [joined[1] + part + joined[3] for part in joined[2].split(",")]
        for path, layer, leaf in _matching_parameters(name.path, parameters):
            parts = _split(net, path, parameters[path].detach(), len(hf_names))
            for index, (hf_name, part) in enumerate(zip(hf_names, parts, strict=True)):
                view = _to_file_layout(part, name)
                hf_name = hf_name.replace("{i}", layer)
                yield Slot(hf_name + leaf, path, id(parameters[path]), index, view)
                if (
                    name.zero_bias
                    and leaf == ".weight"
                    and path.removesuffix("weight") + "bias" not in parameters
                ):
                    zeros = view.new_zeros(view.size(-1 if name.transposed else 0))
                    yield Slot(f"{hf_name}.bias", "", id(zeros), 0, zeros)


def _matching_parameters(path: str, parameters: Mapping[str, Tensor]) -> list[tuple[str, str, str]]:
    """Parameters of a path with `{i}`: full name, index of the layer, and `.weight` or `.bias`."""
    if "{i}" not in path:  # without a regular expression, which would slow the start
        leaves = ("", ".weight", ".bias")
        return [(path + leaf, "", leaf) for leaf in leaves if path + leaf in parameters]
    pattern = re.escape(path).replace(re.escape("{i}"), r"(?P<i>\d+)")
    whole = re.compile(pattern + r"(?P<leaf>\.(weight|bias))?")
    matches = map(whole.fullmatch, parameters)
    return [(match[0], match["i"], match["leaf"] or "") for match in matches if match is not None]


def _group_slots(net: nn.Module, slots: Sequence[Slot]) -> Iterable[list[Slot]]:
    """The slots of each parameter, or of each part of one: a slot for each of its names."""
    groups: dict[tuple[int, int], list[Slot]] = {}
    owner: dict[str, int] = {}
    for slot in slots:
        is_same = owner.setdefault(slot.hf_name, slot.owner) == slot.owner
        assert is_same, f"{slot.hf_name} is the name of two parameters"
        groups.setdefault((slot.owner, slot.part), []).append(slot)
    unnamed = [name for name, weight in net.named_parameters() if (id(weight), 0) not in groups]
    assert not unnamed, f"the table has no name for {unnamed}"
    return groups.values()


def _split(net: nn.Module, name: str, weight: Tensor, num_parts: int) -> Sequence[Tensor]:
    """Views of the parts of a parameter along its first dimension."""
    path = name.rpartition(".")[0]
    modules = (net.get_submodule(path), net.get_submodule(path.rpartition(".")[0]))
    candidates = [getattr(module, "split_sizes", ()) for module in modules]
    equal = (weight.size(0) // num_parts,) * num_parts
    sizes = next((sizes for sizes in candidates if len(sizes) == num_parts), equal)
    assert sum(sizes) == weight.size(0), f"{name} has {weight.size(0)} rows, not the sum of {sizes}"
    return weight.split(list(sizes))


def _to_file_layout(part: Tensor, name: Name) -> Tensor:
    """A view in the layout of the file."""
    if name.transposed and part.dim() == 2:
        return part.T
    return part.unsqueeze(0) if name.row else part


def _match_names(
    tensors: Mapping[str, Tensor], known: set[str], names: Names, where: Path | str
) -> tuple[dict[str, Tensor], list[str]]:
    """The weights of a file under their full names, and a notice of ignored ones."""
    loaded: dict[str, Tensor] = {}
    unused, unknown = [], []
    for name, tensor in tensors.items():
        candidates = [name, names.prefix + name]
        for old, new in names.endings.items():
            if name.endswith(old):
                candidates += [candidate.removesuffix(old) + new for candidate in candidates]
        if not names.repeated.keys().isdisjoint(candidates):
            continue
        full = next((candidate for candidate in candidates if candidate in known), None)
        if full is None and any(re.fullmatch(names.buffers, other) for other in candidates):
            continue
        if full is None and any(re.fullmatch(names.unused, other) for other in candidates):
            unused.append(name)
            continue
        if tensor.dtype not in FLOATS:
            raise UserError(
                f"{where}: {name} is {_plain(tensor.dtype)}, not a floating-point type of 16 bits "
                "or more: quantized weights cannot be loaded; use the model before quantization"
            )
        if full is None:
            unknown.append(name)
        elif full in loaded:
            raise UserError(
                f"{where} holds {full} both with and without {names.prefix}; remove one of them"
            )
        else:
            loaded[full] = tensor
    if unknown:
        close = difflib.get_close_matches(min(unknown), sorted(known), n=1, cutoff=0)
        hint = f"; the nearest known name is {close[0]}" if close else ""
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise UserError(
            f"{where} holds a tensor that is not in the model: {min(unknown)}{more}{hint}"
        )
    if unused:
        return loaded, [
            f"{where}: ignored tensors that are not in the model: {abbreviate_names(unused)}"
        ]
    return loaded, []


def _check_tensors(slots: Sequence[Slot], loaded: Mapping[str, Tensor], where: Path | str) -> None:
    """Check shapes, and that tensors of one parameter are equal; raises UserError."""
    for slot in slots:
        tensor, first = loaded[slot.hf_name], loaded[slots[0].hf_name]
        if tensor.shape != slot.view.shape:
            raise UserError(
                f"{where}: {slot.hf_name} is {_shape(tensor)}, but the model's {slot.path} needs "
                f"{_shape(slot.view)}"
            )
        wide = torch.promote_types(first.dtype, tensor.dtype)
        if slot is not slots[0] and not torch.equal(first.to(wide), tensor.to(wide)):
            raise UserError(
                f"{where}: {slot.hf_name} differs from {slots[0].hf_name}, but the model has one "
                "parameter for both"
            )


def _rounding_notices(
    slots: Sequence[Slot], loaded: Mapping[str, Tensor], where: Path | str
) -> list[str]:
    """A notice for each type of the file that the type of the net cannot represent exactly."""
    rounded: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for slot in slots:
        stored, own = loaded[slot.hf_name].dtype, slot.view.dtype
        if torch.promote_types(stored, own) != own:
            rounded.setdefault((stored, own), []).append(slot.hf_name)
    return [
        f"{where}: rounded from {_plain(stored)} to {_plain(own)}: {abbreviate_names(names)}"
        for (stored, own), names in rounded.items()
    ]


def abbreviate_names(names: Sequence[str]) -> str:
    """The first of some tensor names in order, for a message."""
    return format_names(sorted(names), str, most=3)


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
