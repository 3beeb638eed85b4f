"""Hugging Face tensor names, module by module: a map that is read both ways."""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from heedful.errors import UserError

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
    """

    names: Sequence[Name]
    prefix: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    endings: Mapping[str, str] = field(default_factory=dict)
    buffers: str = ""
    unused: str = ""
    optional: str = ""


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
    groups, zeros = _groups(net, names), _zeros(net, names)
    listed = (theirs for group in groups for place in group for theirs in place.theirs)
    known = {*zeros, *listed}
    held, notices = _recognise(tensors, known, names, where)
    for theirs, rows in sorted(zeros.items()):
        _check_zero(theirs, held.get(theirs, rows), rows, where)
    for copy, source in names.copies.items():
        if copy not in held and source in held:
            held[copy] = held[source]
            notices.append(f"{where} lacks {copy}: {source} is taken for it")
    present, left = _present(groups, held, names, where)
    for one, *others in present:
        _check_shapes(one, held, where)
        for other in others:
            _check_shapes(other, held, where)
            _check_equal(one, other, held, where)
    filled = [group[0] for group in present]
    for place in filled:
        for theirs, part in place.pairs():
            part.copy_(held[theirs])
    if left:
        notices.append(f"{where} has nothing for {_listed(left)}: left as initialised")
        source_net = drawn() if drawn is not None else net
        for ours in left:
            net.get_parameter(ours).copy_(source_net.get_parameter(ours))
    return notices + _rounded(filled, held, where)


def to_hf(net: nn.Module, names: Names) -> dict[str, Tensor]:
    """The net's weights in the Hugging Face format: views of them, no copies (but for zeros).

    A parameter that the net shares is there once, under the first of its names.
    """
    first = (group[0] for group in _groups(net, names))
    return {theirs: part for place in first for theirs, part in place.pairs()} | _zeros(net, names)


def weights_of(net: nn.Module) -> dict[str, Tensor]:
    """The net's parameters, those that are shared under their first name only."""
    return dict(net.named_parameters())


def set_weights(net: nn.Module, tensors: Mapping[str, Tensor], where: Path | str) -> None:
    """Copy tensors of our own names into the net; raises UserError as `from_hf` does."""
    from_hf(net, tensors, Names([Name(name, name) for name in weights_of(net)]), where)


@dataclass(frozen=True)
class _Place:
    """A parameter of the net, and views of its parts laid out as the tensors of a file."""

    name: Name
    ours: str
    parameter: nn.Parameter
    theirs: tuple[str, ...]
    parts: tuple[Tensor, ...]

    def pairs(self) -> Iterator[tuple[str, Tensor]]:
        """Names in a file, and the part of each."""
        return zip(self.theirs, self.parts, strict=True)

    def join(self, held: Mapping[str, Tensor]) -> Tensor:
        """The tensors of a file as one of ours."""
        parts = [_laid_out(held[theirs], self.name) for theirs in self.theirs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _groups(net: nn.Module, names: Names) -> list[list[_Place]]:
    """For each parameter its places under each of its names, in the order of the map."""
    groups: dict[int, list[_Place]] = {}
    owner: dict[str, int] = {}
    parameters = list(net.named_parameters(remove_duplicate=False))
    for place in (place for name in names.names for place in _places_of(net, name, parameters)):
        groups.setdefault(id(place.parameter), []).append(place)
        for theirs in place.theirs:
            same = owner.setdefault(theirs, id(place.parameter)) == id(place.parameter)
            assert same, f"{theirs} is the name of two parameters"
    forgotten = [ours for ours, weight in weights_of(net).items() if id(weight) not in groups]
    assert not forgotten, f"the map has no name for {forgotten}"
    doubtful = [name for name in owner if names.prefix and names.prefix + name in owner]
    assert not doubtful, f"with the prefix {names.prefix} and without: {doubtful}"
    return list(groups.values())


def _places_of(
    net: nn.Module, name: Name, parameters: Iterable[tuple[str, nn.Parameter]]
) -> Iterator[_Place]:
    listed = _expanded(name.theirs)
    assert "{i}" in name.ours or "{i}" not in name.theirs, f"{name}: which number?"
    number = re.escape("{i}")
    pattern = re.escape(name.ours).replace(number, r"(?P<i>\d+)", 1).replace(number, r"(?P=i)")
    whole = re.compile(pattern + r"(?P<leaf>\.(weight|bias))?")
    for ours, parameter in parameters:
        if found := whole.fullmatch(ours):
            layer, leaf = found.groupdict().get("i", ""), found["leaf"] or ""
            theirs = tuple(each.replace("{i}", layer) + leaf for each in listed)
            parts = tuple(_laid_out(part, name) for part in _split(net, ours, len(listed)))
            yield _Place(name, ours, parameter, theirs, parts)


def _expanded(name: str) -> list[str]:
    """All names that one with `{a,b}` in it stands for."""
    found = re.search(r"\{([^{}]*,[^{}]*)\}", name)
    if found is None:
        return [name]
    return [name[: found.start()] + each + name[found.end() :] for each in found[1].split(",")]


def _zeros(net: nn.Module, names: Names) -> dict[str, Tensor]:
    """The biases that are zero there because our modules have none."""
    return {
        theirs.removesuffix("weight") + "bias": part.new_zeros(
            part.size(-1 if name.transposed else 0)
        )
        for name in names.names
        if name.zero_bias
        for place in _places_of(net, name, net.named_parameters(remove_duplicate=False))
        if place.ours.endswith(".weight")
        and net.get_submodule(place.ours.removesuffix(".weight")).bias is None
        for theirs, part in place.pairs()
    }


def _split(net: nn.Module, ours: str, num_parts: int) -> Sequence[Tensor]:
    """Views of a parameter's parts along its first dimension."""
    weight = net.get_parameter(ours).detach()
    if num_parts == 1:
        return [weight]
    path = ours.rpartition(".")[0]
    modules = (net.get_submodule(path), net.get_submodule(path.rpartition(".")[0]))
    given = [getattr(module, "split_sizes", ()) for module in modules]
    equal = (weight.size(0) // num_parts,) * num_parts
    sizes = next((each for each in given if len(each) == num_parts), equal)
    assert sum(sizes) == weight.size(0), f"{ours} is {weight.size(0)} rows, not those of {sizes}"
    return weight.split(list(sizes))


def _laid_out(part: Tensor, name: Name) -> Tensor:
    """From our layout to theirs, and back."""
    if name.transposed and part.dim() == 2:
        return part.T
    if name.row:
        return part.unsqueeze(0) if part.dim() == 1 else part[0]
    return part


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
        raise UserError(
            f"{where} holds a tensor that the model has no place for: {_first(unknown)}{hint}"
        )
    if unused:
        return held, [f"{where}: left out what the model has no place for: {_listed(unused)}"]
    return held, []


def _present(
    groups: list[list[_Place]], held: Mapping[str, Tensor], names: Names, where: Path | str
) -> tuple[list[list[_Place]], list[str]]:
    """For each parameter the places that a file fills; names of ours that it may leave."""
    present: list[list[_Place]] = []
    left: list[str] = []
    missing: list[str] = []
    for group in groups:
        begun = [place for place in group if not held.keys().isdisjoint(place.theirs)]
        lacks = [theirs for place in begun for theirs in place.theirs if theirs not in held]
        if begun and not lacks:
            present.append(begun)
        elif not begun and any(re.fullmatch(names.optional, place.ours) for place in group):
            left.append(group[0].ours)
        else:
            missing += lacks or group[0].theirs
    if missing:
        raise UserError(f"{where} lacks the tensor {_first(missing)}")
    return present, left


def _check_shapes(place: _Place, held: Mapping[str, Tensor], where: Path | str) -> None:
    for theirs, part in place.pairs():
        if held[theirs].shape != part.shape:
            whole = f"the model's {place.ours}, {_shape(place.parameter)},"
            if len(place.parts) > 1:
                shapes = " + ".join(_shape(other) for other in place.parts)
                whole += f" is joined of {shapes} and"
            raise UserError(
                f"{where}: {theirs} is {_shape(held[theirs])}, but {whole} needs {_shape(part)}"
            )


def _check_zero(name: str, tensor: Tensor, zeros: Tensor, where: Path | str) -> None:
    if tensor.shape != zeros.shape or tensor.any():
        found = "not zero" if tensor.shape == zeros.shape else f"{_shape(tensor)}"
        raise UserError(
            f"{where}: {name} is {found}, but should be zeros {_shape(zeros)}: the model has "
            "nothing for it"
        )


def _check_equal(one: _Place, other: _Place, held: Mapping[str, Tensor], where: Path | str) -> None:
    first, second = one.join(held), other.join(held)
    wide = torch.promote_types(first.dtype, second.dtype)
    if not torch.equal(first.to(wide), second.to(wide)):
        raise UserError(
            f"{where}: {other.theirs[0]} differs from {one.theirs[0]}, but the model has one "
            "parameter for both"
        )


def _rounded(places: Iterable[_Place], held: Mapping[str, Tensor], where: Path | str) -> list[str]:
    """A notice for each format that the net's own cannot hold exactly."""
    rounded: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for place in places:
        own = place.parameter.dtype
        for theirs in place.theirs:
            if torch.promote_types(held[theirs].dtype, own) != own:
                rounded.setdefault((held[theirs].dtype, own), []).append(theirs)
    return [
        f"{where}: rounded from {_plain(stored)} to {_plain(own)}: {_listed(found)}"
        for (stored, own), found in rounded.items()
    ]


def _first(names: Sequence[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return min(names) + more


def _listed(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(sorted(names)[:most]) + more


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
