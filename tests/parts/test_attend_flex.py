"""FlexAttention, uncompiled on the CPU, has the outputs and gradients of the other paths."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention

from heedful.parts import attend_flex
from heedful.parts import attention as attention_module
from heedful.parts.attention import Attention
from heedful.parts.cross_attention import CrossAttention
from heedful.parts.positions import RotaryPositions
from heedful.parts.tokens import MaskSpec, Tokens

D, E, WIDTH = 32, 16, 300


def packed_tokens() -> Tokens:
    """Rows without padding, with padding numbered as its last text, and of a single text."""
    texts = ([70, 200, 30], [20, 5, 160], [260])
    segments = torch.zeros(len(texts), WIDTH, dtype=torch.long)
    for row, lengths in enumerate(texts):
        numbers = [[number] * length for number, length in enumerate(lengths)]
        numbers.append([len(lengths) - 1] * (WIDTH - sum(lengths)))
        segments[row] = torch.tensor(list(itertools.chain(*numbers)))
    lengths_of_rows = torch.tensor([sum(lengths) for lengths in texts])
    return Tokens.from_ids(torch.ones_like(segments), lengths_of_rows, segments=segments)


def attention(heads: int, key_heads: int, window: int | None, dropout: float = 0.0) -> Attention:
    torch.manual_seed(0)
    module = Attention(
        D,
        heads,
        num_kv_heads=key_heads,
        head_dim=E,
        window=window,
        position=RotaryPositions(E),
        dropout=dropout,
    ).double()
    module.preferred_kernel = "flex"
    return module


def as_on_a_gpu(spec: MaskSpec, device: torch.device) -> bool:
    return spec.queries.segments is not None


def outputs_and_gradients(module: nn.Module, spec: MaskSpec) -> list[Tensor]:
    """Output, and gradients of input and weights."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, WIDTH, D, generator=generator, dtype=torch.float64, requires_grad=True)
    module.zero_grad()
    out = module(x, spec)
    out.backward(torch.randn(out.shape, generator=generator, dtype=torch.float64))
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]  # type: ignore[list-item]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("number_and_window", [*enumerate([None, 1, 40, 150])])
def test_packed_rows_equal_a_full_bias_in_outputs_and_gradients(
    monkeypatch: pytest.MonkeyPatch, causal: bool, number_and_window: tuple[int, int | None]
) -> None:
    """Every pair of a kind of mask, a window, and a number of heads of the keys."""
    number, window = number_and_window
    key_heads = 1 if causal == number % 2 else 4
    module = attention(4, key_heads, window)
    spec = MaskSpec(packed_tokens(), causal=causal)
    expected = outputs_and_gradients(module, spec)
    monkeypatch.setattr(attend_flex, "can_skip_blocks", as_on_a_gpu)
    monkeypatch.setattr(attention_module, "_FUSED_WEIGHTS", 0)
    # Its gradient is refused on a CPU, though the uncompiled formula has it.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    x = torch.zeros(3, WIDTH, D, dtype=torch.float64)
    plan = attention_module.plan_attention(spec, module, x, needs_grad=True)
    assert isinstance(plan.attend, attend_flex.Flex)
    for ours, reference in zip(outputs_and_gradients(module, spec), expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_autocast_and_head_norms_have_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    module = attention(2, 1, None).float()
    module.query_norm, module.key_norm = nn.LayerNorm(E), nn.LayerNorm(E)
    spec = MaskSpec(packed_tokens(), causal=True)
    x = torch.randn(3, WIDTH, D, generator=torch.Generator().manual_seed(1))
    expected = module(x, spec).detach()
    monkeypatch.setattr(attend_flex, "can_skip_blocks", as_on_a_gpu)
    monkeypatch.setattr(attention_module, "_FUSED_WEIGHTS", 0)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    with torch.autocast("cpu", torch.bfloat16):
        actual = module(x, spec)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.detach().float(), expected, rtol=0.05, atol=0.02)


def test_blocks_of_other_texts_are_left_out() -> None:
    """Three texts of 128 tokens: three blocks of nine are computed."""
    segments = torch.arange(3).repeat_interleave(128)[None]
    tokens = Tokens.from_ids(torch.ones_like(segments), segments=segments)
    mask = attend_flex.packed_block_mask(MaskSpec(tokens, causal=True), None)
    assert mask.to_dense()[0, 0].tolist() == torch.eye(3).int().tolist()


@pytest.mark.parametrize(
    "case",
    ["dropout", "hooks", "weights", "no gradient", "no segments", "softcap", "cross", "uncompiled"],
)
def test_unsupported_attention_uses_the_other_paths(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(attend_flex, "can_skip_blocks", as_on_a_gpu)
    module = attention(2, 2, None, dropout=0.1 if case == "dropout" else 0.0)
    tokens = packed_tokens()
    if case == "uncompiled":
        module.preferred_kernel = None
    if case == "no segments":
        tokens = Tokens.from_ids(tokens.ids)
    if case == "hooks":
        module.weights_hook.register_forward_hook(lambda *_: None)
    if case == "softcap":
        module.softcap = 5.0
    spec = MaskSpec(tokens, causal=True)
    if case == "cross":
        module = CrossAttention(D, 2, head_dim=E).double()  # type: ignore[assignment]
        spec = MaskSpec(tokens, Tokens.from_ids(tokens.ids), causal=False)
        monkeypatch.undo()
    plan = attention_module.plan_attention(
        spec,
        module,
        torch.zeros(3, WIDTH, D, dtype=torch.float64),
        needs_grad=case != "no gradient",
        returns_weights=case == "weights",
    )
    assert not isinstance(plan.attend, attend_flex.Flex)


def test_flex_attention_is_used_for_packed_rows_of_several_blocks_on_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    tokens = packed_tokens()
    spec = MaskSpec(tokens, causal=True)
    gpu = torch.device("cuda")
    assert attend_flex.can_skip_blocks(spec, gpu)
    assert not attend_flex.can_skip_blocks(spec, torch.device("cpu"))
    short = Tokens.from_ids(tokens.ids[:, :128], segments=tokens.segments[:, :128])
    for other in (
        MaskSpec(short, short, causal=True),
        MaskSpec(tokens, Tokens.from_ids(tokens.ids), causal=False),
        MaskSpec(Tokens.from_ids(tokens.ids), causal=True),
        MaskSpec(tokens, causal=True, allowed=torch.ones(1, WIDTH, WIDTH, dtype=torch.bool)),
    ):
        assert not attend_flex.can_skip_blocks(other, gpu)
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    assert not attend_flex.can_skip_blocks(spec, gpu)
