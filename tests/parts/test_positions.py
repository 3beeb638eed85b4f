"""Position tables: reference values, formula, indexing, devices, saved tensors."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from heedful.parts.embeddings import (
    LearnedTable,
    Positions,
    SinusoidalTable,
    TokenEmbedding,
    sinusoidal_table,
)
from heedful.parts.tokens import Tokens

HALVES, OFFSET = partial(SinusoidalTable, halves=True), partial(LearnedTable, offset=2)
TABLES: list[Positions] = [SinusoidalTable, HALVES, LearnedTable, OFFSET]


def filled(scheme: Positions, max_length: int, width: int) -> nn.Module:
    """Learned tables get random values, which the initialization of a net would set."""
    module = scheme(max_length, width)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter))
    return module


def rows(module: nn.Module, *positions: int) -> Tensor:
    return module(torch.tensor([positions]))[0]


def test_reference_values_interleave_sines_and_cosines() -> None:
    """All sines before all cosines only for Marian: checkpoints depend on the order."""
    expected = torch.tensor([
        [0.0, 1.0, 0.0, 1.0],
        [0.841470985, 0.540302306, 0.009999833, 0.999950000],
        [0.909297427, -0.416146837, 0.019998667, 0.999800007],
        [0.141120008, -0.989992497, 0.029995500, 0.999550034],
    ])  # fmt: skip
    for halves, order in ((False, [0, 1, 2, 3]), (True, [0, 2, 1, 3])):
        actual = rows(filled(partial(SinusoidalTable, halves=halves), 4, 4), 0, 1, 2, 3)
        torch.testing.assert_close(actual, expected[:, order], rtol=0, atol=1e-7)


@pytest.mark.parametrize("width", [1, 2, 3, 7, 16, 33, 128])
@pytest.mark.parametrize("base", [10000.0, 100.0])
def test_sinusoids_match_the_formula_at_any_width_and_position(width: int, base: float) -> None:
    """Vaswani et al. 2017, sec. 3.5, one number at a time.

    Angles in fp32 would be off by 1e-3 at position 10,000.
    """
    table = sinusoidal_table(20_001, width, base)
    assert table.dtype == torch.float32
    for position in (*range(30), 9_999, 20_000):
        angles = [position / base ** (2 * (d // 2) / width) for d in range(width)]
        expected = [math.cos(a) if d % 2 else math.sin(a) for d, a in enumerate(angles)]
        np.testing.assert_allclose(table[position].numpy(), expected, rtol=0, atol=1e-6)


def test_products_of_sinusoids_depend_on_the_distance_only() -> None:
    """PE(m) · PE(n) is the sum of cos((m - n) θ) over the frequencies θ."""
    table = sinusoidal_table(300, 16).double()
    thetas = [10000.0 ** (-2 * i / 16) for i in range(8)]
    for m, n in ((0, 0), (5, 2), (250, 247), (17, 90), (299, 0)):
        expected = sum(math.cos((m - n) * theta) for theta in thetas)
        assert (table[m] @ table[n]).item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("scheme", TABLES)
def test_positions_index_rows_and_padding_may_exceed_the_table(scheme: Positions) -> None:
    module = filled(scheme, 4, 6)
    whole = rows(module, 0, 1, 2, 3)
    assert len(whole.unique(dim=0)) == 4
    positions = torch.tensor([[3, 0, 1], [0, 0, 2]])
    assert torch.equal(module(positions), whole[positions])
    assert torch.equal(rows(module, 0, 1, 2, 3, 4, 5)[:4], whole)
    with pytest.raises(IndexError):
        rows(module, 4)


def test_only_learned_positions_are_trained_and_saved() -> None:
    module = filled(OFFSET, 5, 3)
    assert list(module.state_dict()) == ["weight"]
    rows(module, 0, 1).sum().backward()
    assert module.weight.grad[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert filled(SinusoidalTable, 5, 4).state_dict() == {}


@pytest.mark.parametrize("scheme", TABLES)
def test_tables_move_with_their_model(scheme: Positions) -> None:
    """Tables must have the model's device and dtype: otherwise the sum fails, or later states have
    another dtype."""
    module = filled(scheme, 5, 4)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert rows(module.to(dtype), 0, 1, 2).dtype == dtype
    positions = torch.zeros(1, 3, dtype=torch.int64, device="meta")
    assert module.to("meta")(positions).device.type == "meta"


# Embeddings


def test_embeddings_are_scaled_before_positions_are_added_and_dropout_is_on_the_sum() -> None:
    torch.manual_seed(0)
    tokens, table = nn.Embedding(7, 4), sinusoidal_table(60, 4)
    module = TokenEmbedding(tokens, SinusoidalTable(60, 4), max_length=60, scale=2.0, dropout=0.5)
    batch = Tokens.from_ids(torch.randint(7, (3, 50)), torch.tensor([50, 3, 0]), "left")
    expected = tokens.weight[batch.ids] * 2 + table[batch.positions]
    torch.testing.assert_close(module.eval()(batch), expected)
    out = module.train()(batch)
    is_nonzero = out != 0
    assert 200 < is_nonzero.sum() < 400
    torch.testing.assert_close(out[is_nonzero], 2 * expected[is_nonzero])
