"""What all models' parity tests share: a random model of transformers, read as one of ours."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heedful.export.hf_directory import read_hf_directory, write_hf_directory
from heedful.export.nets import ImportedNet, net_from_hf, net_to_hf

transformers = pytest.importorskip("transformers")

CLOSE = {"rtol": 0, "atol": 1e-5}  # of logits whose size is about 1


def random_hf(model_class: Any, config: Any, seed: int = 0) -> Any:
    """A model of transformers in eval mode in which no weight is as its initialisation left it."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue  # Marian's table of sines
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def imported(model: Any, directory: Path, **keys: object) -> ImportedNet:
    """The model, saved by transformers and read by heedful."""
    model.save_pretrained(directory)
    return net_from_hf(read_hf_directory(directory), str(directory), **keys)


def exported(found: ImportedNet, directory: Path, model_class: Any) -> Any:
    """Our net, written by heedful and loaded by transformers; no weight may be missing or left."""
    config, tensors = net_to_hf(found.architecture, found.config, found.net)
    write_hf_directory(directory, config, tensors)
    model, report = model_class.from_pretrained(
        directory, output_loading_info=True, attn_implementation="eager"
    )
    assert not report["missing_keys"], report
    assert not report["unexpected_keys"], report
    assert not report["mismatched_keys"], report
    return model.eval()


def assert_same_net(one: nn.Module, other: nn.Module) -> None:
    """Bit-equal weights under the same names."""
    left, right = dict(one.named_parameters()), dict(other.named_parameters())
    assert left.keys() == right.keys()
    for name, parameter in left.items():
        assert torch.equal(parameter, right[name]), name


def assert_round_trips(model: Any, found: ImportedNet, directory: Path, model_class: Any) -> Any:
    """heedful -> HF -> heedful is bit-equal, and transformers loads what we write; that model."""
    back = exported(found, directory / "exported", model_class)
    again = net_from_hf(read_hf_directory(directory / "exported"), "exported")
    assert again.config == found.config
    assert_same_net(found.net, again.net)
    theirs, ours = dict(model.state_dict()), dict(back.state_dict())
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours[name]), name
    return back


def padded(rows: list[Tensor], side: str, pad_id: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows as one batch, their lengths, and transformers' attention mask."""
    lengths = torch.tensor([row.numel() for row in rows])
    width = int(lengths.max())
    ids = torch.full((len(rows), width), pad_id)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        place = slice(0, row.numel()) if side == "right" else slice(width - row.numel(), width)
        ids[index, place] = row
        mask[index, place] = 1
    return ids, lengths, mask


def positions_of(mask: Tensor) -> Tensor:
    """Position ids that left padding does not move, which transformers leaves to the caller."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def random_rows(vocab_size: int, lengths: list[int], seed: int = 0, low: int = 0) -> list[Tensor]:
    """One row of random ids from `low` on for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(low, vocab_size, (length,), generator=generator) for length in lengths]
