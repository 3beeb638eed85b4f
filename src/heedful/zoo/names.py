"""What our weights are called in the Hugging Face format: a map that is read both ways."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.zoo.saved import weights_of

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Name:
    """One tensor of ours and what it is called over there.

    Args:
        ours: its name in our net; `{i}` stands for a layer's number, each time the same.
        theirs: its name over there. Several: joined along our first dimension, in that order, and
            taken apart again by the `split_sizes` of the module that holds the parameter or of that
            module's parent; without any, into equal parts.
        transposed: stored over there as (in, out), as the Conv1D of GPT-2 does.
        row: stored over there as (1, n), here as (n,).
    """

    ours: str
    theirs: str | tuple[str, ...]
    transposed: bool = False
    row: bool = False


@dataclass(frozen=True)
class Names:
    """All tensors of a model, and what else a file of it may hold.

    `buffers`, `unused` and `optional` are regular expressions that match whole names; those of
    names over there match with the prefix or without it.

    Args:
        names: the map. A parameter that the net shares may have a name for each place; of these a
            file needs one, all that it holds must be equal, and the first is written.
        prefix: of the base model's tensors in `names`; a file of a model without head may lack it.
        aliases: a name over there, and the one in `names` whose tensor it must equal where a file
            holds both (tied weights). A file may hold either; the alias is never written.
        copies: a name over there, and the one whose tensor is taken for it, with a notice, where a
            file lacks it (weights that were tied when the file was written).
        zeros: a name over there that our net has nothing for because it is zero (biases, where it
            has none), and the weight of ours whose outputs it has as many entries as. Written as
            zeros; a file may lack it, and what it holds must be exactly zero.
        buffers: tensors that hold no weights (causal masks, position ids): passed over silently.
        unused: weights that our net has no place for: passed over with a notice.
        optional: names of ours that a file may lack: left as initialised, with a notice.
    """

    names: tuple[Name, ...]
    prefix: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    zeros: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


@torch.no_grad()
def from_hf(
    net: nn.Module, tensors: Mapping[str, Tensor], names: Names, where: Path | str
) -> list[str]:
    """Set the net's weights from tensors in the Hugging Face format; returns notices.

    16-bit weights are widened to the net's format with nothing lost; a format that the net cannot
    hold exactly is rounded, with a notice.

    Args:
        where: what the tensors were read from, for messages.

    Raises:
        UserError: a tensor too many, too few, of a wrong shape or of integers, two that the net has
            one parameter for and that differ, or one that is not zero and the net has nothing for.
            The net is then as it was.
    """
    places, zeros = _places(net, names), _zeros(net, names)
    held, notices = _recognise(tensors, _known(places, names) | zeros.keys(), names, where)
    for theirs in sorted(zeros.keys() & held.keys()):
        _check_zero(theirs, held[theirs], zeros[theirs], where)
    for alias, target in names.aliases.items():
        if alias in held:
            _check_equal(held.setdefault(target, held[alias]), held[alias], alias, target, where)
    for copy, source in names.copies.items():
        if copy not in held and source in held:
            held[copy] = held[source]
            notices.append(f"{where} lacks {copy}: {source} is taken for it")
    groups, left = _present(places, held, names, where)
    for group in groups:
        for place in group:
            _check_shapes(place, held, where)
        one, *others = group
        for other in others:
            _check_equal(one.join(held), other.join(held), other.theirs[0], one.theirs[0], where)
    filled = [group[0] for group in groups]
    for place in filled:
        for theirs, part in zip(place.theirs, place.parts, strict=True):
            part.copy_(held[theirs])
    if left:
        notices.append(f"{where} has nothing for {_listed(left)}: left as initialised")
    return notices + _rounded(filled, held, where)


def to_hf(net: nn.Module, names: Names) -> dict[str, Tensor]:
    """The net's weights in the Hugging Face format: views of them, no copies (but for `zeros`).

    A parameter that the net shares is there once, under the first of its names in the map.
    """
    tensors: dict[str, Tensor] = {}
    written: set[int] = set()
    for place in _places(net, names):
        if id(place.parameter) not in written:
            written.add(id(place.parameter))
            tensors.update(zip(place.theirs, place.parts, strict=True))
    return tensors | _zeros(net, names)


@dataclass(frozen=True)
class _Place:
    """A parameter of the net, and views of its parts laid out as the tensors over there are."""

    name: Name
    ours: str
    parameter: nn.Parameter
    theirs: tuple[str, ...]
    parts: tuple[Tensor, ...]

    def join(self, held: Mapping[str, Tensor]) -> Tensor:
        """The tensors over there as one of ours."""
        parts = [held[theirs] for theirs in self.theirs]
        if self.name.transposed:
            parts = [part.T for part in parts]
        if self.name.row:
            parts = [part[0] for part in parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _places(net: nn.Module, names: Names) -> list[_Place]:
    """Every parameter under every name of it that is in the map, in the order of the map."""
    places = [place for name in names.names for place in _places_of(net, name)]
    all_ours = [place.ours for place in places]
    assert len(set(all_ours)) == len(all_ours), f"two names for one of ours: {all_ours}"
    covered = {id(place.parameter) for place in places}
    forgotten = [ours for ours, weight in weights_of(net).items() if id(weight) not in covered]
    assert not forgotten, f"the map has no name for {forgotten}"
    owner: dict[str, int] = {}
    for place in places:
        for theirs in place.theirs:
            same = owner.setdefault(theirs, id(place.parameter)) == id(place.parameter)
            assert same, f"{theirs} is the name of two parameters"
    return places


def _places_of(net: nn.Module, name: Name) -> Iterator[_Place]:
    theirs = (name.theirs,) if isinstance(name.theirs, str) else name.theirs
    assert "{i}" in name.ours or "{i}" not in "".join(theirs), f"{name}: which number?"
    start, *rest = (re.escape(piece) for piece in name.ours.split("{i}"))
    pattern = re.compile(start + (r"(?P<i>\d+)" + r"(?P=i)".join(rest) if rest else ""))
    for ours, parameter in net.named_parameters(remove_duplicate=False):
        if found := pattern.fullmatch(ours):
            number = found["i"] if rest else ""
            yield _Place(
                name,
                ours,
                parameter,
                tuple(each.replace("{i}", number) for each in theirs),
                tuple(_as_theirs(part, name) for part in _split(net, ours, len(theirs))),
            )


def _zeros(net: nn.Module, names: Names) -> dict[str, Tensor]:
    """What is zero over there because our net has nothing for it."""
    zeros: dict[str, Tensor] = {}
    for theirs, ours in names.zeros.items():
        found = {
            place.theirs[0]: place.parameter.detach()
            for place in _places_of(net, Name(ours, theirs))
        }
        assert found, f"the map has zeros for {ours}, which the net lacks"
        zeros |= {each: weight.new_zeros(weight.size(0)) for each, weight in found.items()}
    return zeros


def _split(net: nn.Module, ours: str, num_parts: int) -> tuple[Tensor, ...]:
    """Views of a parameter's parts along its first dimension."""
    weight = net.get_parameter(ours).detach()
    if num_parts == 1:
        return (weight,)
    length = weight.size(0)
    path = ours.rpartition(".")[0]
    for module in (net.get_submodule(path), net.get_submodule(path.rpartition(".")[0])):
        sizes = getattr(module, "split_sizes", None)
        if sizes is not None:
            break
    else:
        sizes = (length // num_parts,) * num_parts
    assert len(sizes) == num_parts, f"{ours} is split into {sizes}, the map says {num_parts}"
    assert sum(sizes) == length, f"{ours} has {length} rows, which {sizes} do not make up"
    return weight.split(list(sizes))


def _as_theirs(part: Tensor, name: Name) -> Tensor:
    if name.transposed:
        assert part.dim() == 2, f"{name} is transposed, but has {part.dim()} dimensions"
        part = part.T
    return part.unsqueeze(0) if name.row else part


def _known(places: Iterable[_Place], names: Names) -> set[str]:
    """The names over there that this net has a place for."""
    known = {theirs for place in places for theirs in place.theirs}
    known |= {alias for alias, target in names.aliases.items() if target in known}
    doubtful = {name for name in known if names.prefix and names.prefix + name in known}
    assert not doubtful, f"with the prefix {names.prefix} and without: {doubtful}"
    return known


def _recognise(
    tensors: Mapping[str, Tensor], known: set[str], names: Names, where: Path | str
) -> tuple[dict[str, Tensor], list[str]]:
    """The weights of a file under their full names, and a notice of those left out."""
    held: dict[str, Tensor] = {}
    unused, unknown = [], []
    for name, tensor in tensors.items():
        both = (name, names.prefix + name)
        full = next((each for each in both if each in known), None)
        if full is None and _any_matches(names.buffers, both):
            continue
        if full is None and _any_matches(names.unused, both):
            unused.append(name)
            continue
        _check_format(name, tensor, where)
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
    places: Iterable[_Place], held: Mapping[str, Tensor], names: Names, where: Path | str
) -> tuple[list[list[_Place]], list[str]]:
    """For each parameter the places that a file fills; names of ours that it may leave."""
    by_parameter: dict[int, list[_Place]] = {}
    for place in places:
        by_parameter.setdefault(id(place.parameter), []).append(place)
    groups, left, missing = [], [], []
    for group in by_parameter.values():
        lacks = [[theirs for theirs in place.theirs if theirs not in held] for place in group]
        whole = [place for place, lack in zip(group, lacks, strict=True) if not lack]
        partly = [
            theirs
            for place, lack in zip(group, lacks, strict=True)
            if len(lack) < len(place.theirs)
            for theirs in lack
        ]
        if partly:
            missing += partly
        elif whole:
            groups.append(whole)
        elif _any_matches(names.optional, [place.ours for place in group]):
            left.append(group[0].ours)
        else:
            missing += group[0].theirs
    if missing:
        raise UserError(f"{where} lacks the tensor {_first(missing)}")
    return groups, left


def _check_format(name: str, tensor: Tensor, where: Path | str) -> None:
    if tensor.dtype not in FLOATS:
        raise UserError(
            f"{where}: {name} is {_plain(tensor.dtype)}, no floating-point format of 16 bits or "
            "more: weights that were quantised cannot be loaded; take the model as it was before"
        )


def _check_shapes(place: _Place, held: Mapping[str, Tensor], where: Path | str) -> None:
    for theirs, part in zip(place.theirs, place.parts, strict=True):
        if held[theirs].shape != part.shape:
            whole = f"the model's {place.ours}, {_shape(place.parameter)},"
            if len(place.parts) > 1:
                shapes = " + ".join(_shape(other) for other in place.parts)
                whole += f" is joined of {shapes} and"
            raise UserError(
                f"{where}: {theirs} is {_shape(held[theirs])}, but {whole} needs {_shape(part)}"
            )


def _check_zero(name: str, tensor: Tensor, zeros: Tensor, where: Path | str) -> None:
    if tensor.shape != zeros.shape:
        raise UserError(
            f"{where}: {name} is {_shape(tensor)}, but should be zeros {_shape(zeros)}: the model "
            "has nothing for it"
        )
    if tensor.any():
        raise UserError(f"{where}: {name} is not zero, but the model has nothing for it")


def _check_equal(one: Tensor, other: Tensor, name: str, same: str, where: Path | str) -> None:
    wide = torch.promote_types(one.dtype, other.dtype)
    if not torch.equal(one.to(wide), other.to(wide)):
        raise UserError(
            f"{where}: {name} differs from {same}, but the model has one parameter for both"
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


def _any_matches(patterns: Sequence[str], names: Sequence[str]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns for name in names)


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
