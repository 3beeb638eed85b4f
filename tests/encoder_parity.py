"""What the parity tests of all encoder-only models share."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heedful.export.hf_directory import read_hf_directory, write_hf_directory
from heedful.export.nets import ImportedNet, net_from_hf, net_to_hf
from heedful.parts.dropout import Dropout
from heedful.zoo import architecture
from heedful.zoo.hf import config_keys_from_hf
from heedful.zoo.saved import make_config
from hf_parity import CLOSE, padded


def output(model: Any, ids: Tensor, mask: Tensor | None = None, **inputs: Any) -> Tensor:
    """Logits of a model of theirs, or its states where it has no head."""
    found = model(ids, attention_mask=mask, **inputs)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


@torch.no_grad()
def assert_same_outputs(
    model: Any, net: nn.Module, rows: list[Tensor], pad_id: int, types: list[Tensor] | None = None
) -> None:
    """Our net on rows that are padded on either side says what theirs says of them on the right."""
    ids, lengths, mask = padded(rows, "right", pad_id)
    theirs_types = {} if types is None else {"token_type_ids": padded(types, "right")[0]}
    theirs = output(model, ids, mask, **theirs_types)
    for side in ("right", "left"):
        ids, lengths, placed = padded(rows, side, pad_id)
        ours_types = None if types is None else padded(types, side)[0]
        ours = net(ids, lengths, types=ours_types, padding_side=side)
        assert ours.shape == theirs.shape
        if ours.dim() == 2:  # a class for each row
            torch.testing.assert_close(ours, theirs, **CLOSE)
        else:
            torch.testing.assert_close(ours[placed.bool()], theirs[mask.bool()], **CLOSE)


def rewritten(found: ImportedNet, directory: Path, **changes: Tensor | None) -> ImportedNet:
    """What heedful wrote, read again; `changes` are tensors to add, or None to leave out."""
    config, tensors = net_to_hf(found.architecture, found.config, found.net)
    tensors = {**tensors, **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    write_hf_directory(directory, config, kept)
    return net_from_hf(read_hf_directory(directory), "file")


def read_config(name: str, content: dict[str, Any]) -> Any:
    """Our Config of a `config.json`."""
    return make_config(name, config_keys_from_hf(architecture(name).HF, content, "config.json"))


def assert_same_encoder(one: nn.Module, other: nn.Module) -> None:
    """Bit-equal embeddings and layers, whatever the heads."""
    for part in ("embedding", "encoder"):
        left = dict(one.get_submodule(part).named_parameters())
        right = dict(other.get_submodule(part).named_parameters())
        assert left.keys() == right.keys()
        for name, parameter in left.items():
            assert torch.equal(parameter, right[name]), name


def dropouts(module: nn.Module) -> set[float]:
    """The rates of all dropouts in a module."""
    return {part.p for part in module.modules() if isinstance(part, Dropout)}
