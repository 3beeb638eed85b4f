"""Positions: golden numbers, the paper's formula, lengths, devices, left padding."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from heedful.errors import UserError
from heedful.parts.positions import Learned, NoPositions, Positions, Sinusoidal, sinusoidal_table

SCHEMES: list[Positions] = [Sinusoidal(), Learned(), NoPositions()]


def formula(max_length: int, width: int, base: float = 10000.0) -> np.ndarray:
    """PE of Vaswani et al. 2017, sec. 3.5, one number at a time."""
    table = np.empty((max_length, width))
    for position in range(max_length):
        for dimension in range(width):
            angle = position / base ** (2 * (dimension // 2) / width)
            table[position, dimension] = math.cos(angle) if dimension % 2 else math.sin(angle)
    return table


def test_golden_numbers_interleave_sines_and_cosines() -> None:
    """Not all sines and then all cosines: checkpoints depend on the order."""
    expected = [
        [0.0, 1.0, 0.0, 1.0],
        [0.841470985, 0.540302306, 0.009999833, 0.999950000],
        [0.909297427, -0.416146837, 0.019998667, 0.999800007],
        [0.141120008, -0.989992497, 0.029995500, 0.999550034],
    ]
    torch.testing.assert_close(sinusoidal_table(4, 4), torch.tensor(expected), rtol=0, atol=1e-7)


@pytest.mark.parametrize("width", [1, 2, 3, 7, 16, 33, 128])
@pytest.mark.parametrize("base", [10000.0, 100.0])
def test_the_formula_at_even_and_odd_widths(width: int, base: float) -> None:
    table = sinusoidal_table(50, width, base)
    assert table.dtype == torch.float32
    np.testing.assert_allclose(table.numpy(), formula(50, width, base), rtol=0, atol=1e-6)


def test_far_positions_are_as_exact_as_near_ones() -> None:
    """Angles formed in fp32 are off by 1e-3 at position 10,000."""
    table = sinusoidal_table(20_001, 10)
    for position in (9_999, 20_000):
        angles = [position / 10000.0 ** (2 * pair / 10) for pair in range(5)]
        expected = [wave(angle) for angle in angles for wave in (math.sin, math.cos)]
        np.testing.assert_allclose(table[position].numpy(), expected, rtol=0, atol=1e-6)


def test_an_offset_is_a_rotation() -> None:
    """What the paper chose sines for: PE(p + k) is a linear function of PE(p), for every p."""
    table = sinusoidal_table(60, 8).double()
    sines, cosines = table[:, 0::2], table[:, 1::2]
    turn_sines, turn_cosines = sines[7], cosines[7]
    torch.testing.assert_close(
        sines[7:], sines[:-7] * turn_cosines + cosines[:-7] * turn_sines, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_sequence_longer_than_the_table_is_refused_with_both_lengths(scheme: Positions) -> None:
    module = filled(scheme.build(7, 4))
    assert module(7).isfinite().all()
    for length, start in ((8, 0), (1, 7), (4, 4)):
        with pytest.raises(UserError, match=rf"{length + start} tokens.*max_length 7"):
            module(length, start)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_wider_than_the_table_holds_texts_that_are_not(scheme: Positions) -> None:
    """Left padding, or other texts before it: what counts is where a token stands in its own."""
    module = filled(scheme.build(4, 4))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1]])
    found = module(6, 0, positions)
    assert torch.equal(found.expand(1, 6, 4), module(4).expand(1, 4, 4)[:, positions[0]])
    with pytest.raises(UserError, match=r"5 tokens.*max_length 4"):
        module(6, 0, positions + 1)


@pytest.mark.parametrize("scheme", [Sinusoidal(), Learned()])
def test_start_and_explicit_positions_choose_rows(scheme: Positions) -> None:
    module = filled(scheme.build(9, 4))
    whole = module(9)
    assert whole.shape == (1, 9, 4)
    assert torch.equal(module(3, 5), whole[:, 5:8])
    explicit = torch.tensor([[0, 1, 2], [0, 0, 1]])
    assert torch.equal(module(3, 0, explicit), whole[0][explicit])


def test_learned_positions_are_trained_and_saved() -> None:
    module = filled(Learned().build(5, 3))
    assert list(module.state_dict()) == ["weight"]
    module(2).sum().backward()
    assert module.weight.grad.tolist() == [[1.0] * 3] * 2 + [[0.0] * 3] * 3


def test_no_positions_add_nothing() -> None:
    module = NoPositions().build(5, 3)
    assert not (torch.zeros(2, 4, 3) + module(4)).any()
    assert list(module.parameters()) == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tables_move_with_their_model(scheme: Positions) -> None:
    """What is added must be on the device and of the type of the model: else the sum fails there,
    or all that follows is in another type."""
    module = filled(scheme.build(5, 4))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert module.to(dtype)(3).dtype == dtype
    assert module.to("meta")(3).device.type == "meta"


@pytest.mark.parametrize("scheme", [Sinusoidal(), NoPositions()])
def test_what_follows_from_the_shape_is_not_saved(scheme: Positions) -> None:
    assert scheme.build(5, 4).state_dict() == {}


def filled(module: nn.Module) -> nn.Module:
    """Learned tables are filled by the initialisation of the whole net: here, with anything."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter))
    return module
