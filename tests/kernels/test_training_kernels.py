"""Kernels of training steps: equal to torch, for all sizes, types and masks."""

import ctypes
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heedful.kernels import dropout as fused
from heedful.kernels import library as kernels
from heedful.kernels.build import has_cpp_compiler
from heedful.parts.attend_kernel import Kernel, Unpadded
from heedful.parts.attention import Attention, attend, plan_attention
from heedful.parts.heads import OutputHead
from heedful.parts.losses import gradient_factor, head_loss
from heedful.parts.residual import Dropout, add_dropped, add_norm, keep_mask, relu_dropped
from heedful.parts.tokens import MaskSpec, Tokens, padding_mask
from heedful.parts.unpadding import Unpadding

OPEN = kernels._open
TYPES = [torch.float32, torch.bfloat16]
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 0.02}


@pytest.fixture(autouse=True)
def loaded() -> Path:
    """The library, which the first test of a worker compiles."""
    if not has_cpp_compiler():
        pytest.skip("needs a C++ compiler")
    assert kernels.load() == ""
    return Path(kernels.loaded._name)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder, and kernels that are not loaded."""
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path))
    monkeypatch.setattr(kernels, "loaded", None)
    monkeypatch.setattr(kernels, "_failure", "")
    monkeypatch.setattr(kernels, "_open", OPEN)
    return tmp_path / "kernels"


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """A list that gets an item for each call of a function of the kernels."""
    calls: list[int] = []
    function = kernels.call

    def call(kernel: str, *arguments: Any) -> Any:
        if kernel == name:
            calls.append(1)
        return function(kernel, *arguments)

    for module in (kernels, fused):
        monkeypatch.setattr(module, "call", call)
    return calls


def both_ways(compute: Callable[[], list[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """The results with kernels and without, with the same random numbers."""
    torch.manual_seed(5)
    with_kernels = compute()
    with kernels.unused():
        torch.manual_seed(5)
        return with_kernels, compute()


def assert_close(pair: tuple[list[Tensor], list[Tensor]], tolerance: float) -> None:
    """Each difference is small beside the largest element."""
    for actual, expected in zip(*pair, strict=True):
        assert actual.dtype == expected.dtype
        difference = (actual - expected).abs().max().item()
        assert difference <= tolerance * expected.abs().max().item()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocab", [3, 16, 100, 8_001])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_cross_entropy(
    dtype: torch.dtype, vocab: int, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted(monkeypatch, "cross_entropy")
    torch.manual_seed(0)
    head = nn.Linear(8, vocab).to(dtype)
    states = (4 * torch.randn(37, 8)).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (37,))

    def compute() -> list[Tensor]:
        states.grad = head.weight.grad = head.bias.grad = None
        sums = head_loss(head, states, targets, label_smoothing=smoothing, count_correct=True)
        sums.loss.backward()
        assert sums.correct is not None and states.grad is not None  # noqa: PT018
        grads = [p.grad for p in head.parameters() if p.grad is not None]
        return [sums.loss.detach(), sums.nll, sums.correct, states.grad, *grads]

    results = both_ways(compute)
    assert_close(results, CLOSE[dtype])
    assert results[0][2] == results[1][2]
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_loss_of_an_output_head_and_its_gradients(
    dtype: torch.dtype, softcap: float | None
) -> None:
    """The gradient takes the place of the logits unless a backward pass reads them (softcap)."""
    torch.manual_seed(0)
    head = OutputHead(nn.Linear(8, 100), softcap=softcap).to(dtype)
    states = (4 * torch.randn(37, 8)).to(dtype).requires_grad_()
    targets = torch.randint(100, (37,))

    def compute() -> list[Tensor]:
        inputs = [states, *head.parameters()]
        return [*torch.autograd.grad(head_loss(head, states, targets).loss, inputs)]

    assert_close(both_ways(compute), CLOSE[dtype])


@pytest.mark.parametrize("dtype", TYPES)
def test_the_gradient_of_the_loss_has_its_factor(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    head = OutputHead(nn.Linear(8, 100)).to(dtype)
    states = (4 * torch.randn(37, 8)).to(dtype).requires_grad_()
    targets, inputs = torch.randint(100, (37,)), [states, *head.parameters()]

    def compute() -> list[Tensor]:
        with gradient_factor(torch.tensor(0.3)):
            loss = head_loss(head, states, targets).loss
        return [*torch.autograd.grad(loss, inputs)]

    with_factor = both_ways(compute)
    assert_close(with_factor, CLOSE[dtype])
    without = [*torch.autograd.grad(head_loss(head, states, targets).loss, inputs)]
    assert_close((with_factor[0], without), CLOSE[dtype])


@pytest.mark.parametrize("part", ["", "out"])
def test_a_hook_may_keep_the_logits_of_a_head(part: str) -> None:
    head = OutputHead(nn.Linear(8, 20))
    states, kept = torch.randn(5, 8), list[Tensor]()
    head.get_submodule(part).register_forward_hook(lambda module, inputs, out: kept.append(out))
    head_loss(head, states, torch.arange(5)).loss.backward()
    torch.testing.assert_close(kept[0], head.out(states))


def test_cross_entropy_without_gradient_and_with_equal_logits() -> None:
    """The first of several highest logits counts as the prediction, as by argmax."""
    logits = torch.zeros(3, 20)
    logits[:, [4, 17]] = 1.0
    sums = kernels.cross_entropy(logits, torch.tensor([4, 17, 5]), 0.0)
    assert sums[2] == 1
    assert sums[1].item() == pytest.approx(
        nn.functional.cross_entropy(logits, torch.tensor([4, 17, 5]), reduction="sum").item()
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, 18])
def test_cross_entropy_of_logits_that_are_not_finite_is_not(value: float, column: int) -> None:
    logits = torch.zeros(2, 19)
    logits[1, column] = value
    grad = torch.empty_like(logits)
    sums = kernels.cross_entropy(logits, torch.tensor([1, 2]), 0.1, grad)
    assert not sums[0].isfinite()
    assert grad[0].isfinite().all()
    assert not grad[1].isfinite().all()


@pytest.mark.parametrize("target", [-100, -1, 19, 2**40])
def test_a_target_out_of_range_is_an_error(target: int) -> None:
    with pytest.raises(IndexError, match="19 classes"):
        kernels.cross_entropy(torch.zeros(2, 19), torch.tensor([1, target]), 0.1)


@pytest.mark.parametrize("part", ["norm", "dropout"])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_full_backward_hook"])
def test_hooks_of_fused_modules_are_called(part: str, kind: str) -> None:
    modules = {"norm": nn.LayerNorm(16), "dropout": Dropout(0.5)}
    calls: list[int] = []
    getattr(modules[part], kind)(lambda *arguments: calls.append(1))
    x = torch.randn(4, 16, requires_grad=True)
    add_norm(x, x, modules["dropout"], modules["norm"]).sum().backward()  # type: ignore[arg-type]
    assert calls == [1]


def test_hidden_logits_have_no_gradient() -> None:
    logits = torch.randn(4, 33)
    logits[:, 5] = -torch.inf
    grad = torch.empty_like(logits)
    sums = kernels.cross_entropy(logits, torch.tensor([1, 2, 3, 4]), 0.0, grad)
    assert sums.isfinite().all()
    assert (grad[:, 5] == 0).all()


@pytest.mark.parametrize("count", [1, 5, 31, 33, 1_000, 4_099])
def test_a_mask_does_not_depend_on_the_number_of_threads(count: int) -> None:
    threads = torch.get_num_threads()
    masks = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            torch.manual_seed(7)
            masks.append(keep_mask(torch.Size([count]), 0.1)[0])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])


def test_the_loss_does_not_depend_on_the_number_of_threads() -> None:
    logits, targets = torch.randn(101, 57), torch.randint(57, (101,))
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(kernels.cross_entropy(logits, targets, 0.1))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("count", [0, 1, 3, 4, 31, 32, 33, 1_000, 100_003])
@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 1 - 1e-9])
def test_masks_are_those_of_numpy(count: int, p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, "keep_mask")

    def compute() -> list[Tensor]:
        return [keep_mask(torch.Size([count]), p)[0]]

    with_kernels, without = both_ways(compute)
    assert torch.equal(with_kernels[0], without[0])
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (5,), (3, 37, 16), (40_000,)])
def test_dropout_equals_torch_bit_by_bit(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted(monkeypatch, "dropout")
    x = torch.randn(shape).to(dtype)

    def compute() -> list[Tensor]:
        return [Dropout(0.3)(x)]

    with_kernels, without = both_ways(compute)
    assert torch.equal(with_kernels[0], without[0])
    assert len(calls) == 1


FUSED: dict[str, Callable[[Tensor, Tensor, Dropout, nn.Module], Tensor]] = {
    "add_dropped": lambda x, y, dropout, norm: add_dropped(x, y, dropout),
    "add_norm": add_norm,
    "relu_dropped": lambda x, y, dropout, norm: relu_dropped(y, dropout),
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [1, 16, 100, 128])
def test_fused_dropout(
    name: str, dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted(monkeypatch, name)
    torch.manual_seed(1)
    norm, dropout = nn.LayerNorm(width), Dropout(0.3)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(3, 37, width, requires_grad=True)
    y = torch.randn(3, 37, width).to(dtype).requires_grad_()
    out_grad = torch.randn(3, 37, width)

    def compute() -> list[Tensor]:
        tensors = [x, y, *norm.parameters()]
        for tensor in tensors:
            tensor.grad = None
        out = FUSED[name](x, y, dropout, norm)
        out.backward(out_grad.to(out.dtype))
        return [out.detach(), *(t.grad for t in tensors if t.grad is not None)]

    results = both_ways(compute)
    if name == "add_norm" and width == 1:  # the other gradients are differences of equal numbers
        results = [results[0][0], results[0][-1]], [results[1][0], results[1][-1]]
    assert_close(results, CLOSE[dtype])
    assert len(calls) == 1


@pytest.mark.parametrize("name", FUSED)
def test_what_is_not_finite_stays_so_unless_it_is_dropped(name: str) -> None:
    """The trainer finds a state that is not finite by the loss."""
    x, y = torch.zeros(50, 16), torch.full((50, 16), torch.nan)

    def compute() -> list[Tensor]:
        return [FUSED[name](x, y, Dropout(0.3), nn.LayerNorm(16)).isnan().float()]

    with_kernels, without = both_ways(compute)
    assert torch.equal(with_kernels[0], without[0])
    assert with_kernels[0].any()


SIZES = [(3, 7, 7, 4, 4, 32), (2, 17, 17, 4, 2, 16), (5, 3, 3, 2, 1, 8), (2, 20, 33, 2, 2, 20)]
SIDES, KINDS = ("none", "right", "left"), ("projection", "rotated", "cross")
BIASES = ("none", "causal", "strided")
# Every combination of these; types and dropout take turns, so that each meets every two of them.
LAYOUTS = [*product(SIZES, SIDES, KINDS, BIASES)]
TURNS = [(TYPES[0], 0.0), (TYPES[1], 0.3), (TYPES[0], 0.3), (TYPES[1], 0.0)]


@pytest.mark.parametrize(
    ("sizes", "side", "kind", "bias_kind", "dtype", "p"),
    [(*layout, *turn) for layout, turn in zip(LAYOUTS, cycle(TURNS), strict=False)],
)
def test_attention(
    sizes: tuple[int, ...], side: str, kind: str, bias_kind: str, dtype: torch.dtype, p: float
) -> None:
    """Equal to plain products of the padded texts; queries, keys and values are parts of one
    projection, or of two, or are those of two texts."""
    batch, length, num_keys, heads, kv_heads, width = sizes
    torch.manual_seed(batch)
    num_keys = num_keys if kind == "cross" else length

    def unpadding(size: int) -> tuple[Unpadding, Tensor]:
        lengths = torch.randint(1, size + 1, (batch,)) if side != "none" else torch.tensor(size)
        lengths = lengths.expand(batch).clone()
        lengths[0] = size
        is_real = padding_mask(lengths, size, "left" if side == "left" else "right")
        index = is_real.flatten().nonzero()[:, 0] if side != "none" else None
        return Unpadding(torch.Size([batch, size]), index), is_real

    queries, is_query = unpadding(length)
    keys, is_key = unpadding(num_keys) if kind == "cross" else (queries, is_query)
    sizes = {"projection": [heads + 2 * kv_heads], "rotated": [heads + kv_heads, kv_heads],
             "cross": [heads, 2 * kv_heads]}[kind]  # fmt: skip
    sides = [queries, keys if kind == "cross" else queries]
    inputs = [
        torch.randn(1, of.num_tokens, size * width).to(dtype).requires_grad_()
        for size, of in zip(sizes, sides, strict=False)
    ]
    repeats, shape = heads // kv_heads, (batch, kv_heads, heads // kv_heads * length, num_keys)
    causal = torch.ones(length, num_keys).tril().repeat(repeats, 1) > 0
    if kind == "cross":  # one of these is no padding
        causal[:, [0, -1]] = True
    bias = {
        "none": None,
        "causal": torch.randn(shape).masked_fill(~causal, -torch.inf),
        "strided": torch.randn(num_keys, shape[2]).T[None, None],
    }[bias_kind]
    scale = width**-0.5
    hidden = torch.where(is_key, 0.0, torch.finfo(torch.float32).min / 2)[:, None, None]
    padded_bias = hidden if bias is None else bias + hidden
    ways = {
        "kernel": Kernel(queries, keys, bias, scale, repeats),
        "products": Unpadded(partial(attend, bias=padded_bias, scale=scale), queries, keys),
    }
    is_real = queries.unpad(is_query[..., None].float())
    out_grad = (torch.randn(1, queries.num_tokens, heads * width) * is_real).to(dtype)

    def compute(attend: Any) -> list[Tensor]:
        parts = [x.unflatten(-1, (-1, width)).transpose(1, 2) for x in inputs]
        if kind == "projection":
            query, key, value = parts[0].split([heads, kv_heads, kv_heads], dim=1)
        elif kind == "rotated":
            query, key = (parts[0] * 1.0).split([heads, kv_heads], dim=1)
            value = parts[1]
        else:
            query = parts[0]
            key, value = parts[1].chunk(2, dim=1)
        torch.manual_seed(5)
        out = attend(query, key, value, Dropout(p))[0].transpose(1, 2).flatten(2)
        grads = torch.autograd.grad(out, inputs, out_grad)
        return [out.detach() * is_real, *grads]

    results = compute(ways["kernel"]), compute(ways["products"])
    assert_close(results, 1e-5 if dtype == torch.float32 else 0.03)


def test_hooks_get_the_gradient_of_a_projection() -> None:
    """They did not where the kernel's gradient went to the projection by a way around it."""
    attention = Attention(16, 2)
    x, grads = torch.randn(1, 6, 16, requires_grad=True), []
    attention.qkv.register_full_backward_hook(lambda module, inputs, outputs: grads.append(outputs))
    side = Unpadding(torch.Size([2, 3]), None)
    spec = MaskSpec(Tokens.from_ids(torch.zeros(2, 3).long()), causal=True)
    padded = x.view(2, 3, 16)
    plan = plan_attention(spec, attention, padded, needs_grad=True, unpaddings=(side, side))
    assert isinstance(plan.attend, Kernel)
    attention(x, plan).sum().backward()
    assert len(grads) == 1


def test_other_tensors_are_computed_by_torch() -> None:
    class Subclass(Tensor):
        pass

    x = torch.zeros(4, 4)
    assert kernels.can_run(x, None, nn.Parameter(x))
    others = [x.double(), x.half(), x.T[1:], x.to("meta"), x.as_subclass(Subclass)]
    assert not any(map(kernels.can_run, others))
    with kernels.unused():
        assert not kernels.can_run(x)


@pytest.mark.parametrize("name", [*FUSED, "dropout"])
def test_second_derivatives_are_refused(name: str) -> None:
    x = torch.ones(20, 16, requires_grad=True)
    norm, dropout = nn.LayerNorm(16), Dropout(0.5)
    out = dropout(x) if name == "dropout" else FUSED[name](x, x, dropout, norm)
    (grad,) = torch.autograd.grad((out**3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_kernels_are_compiled_once_and_again_where_damaged(
    loaded: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the compiler has made for `loaded` stands for another compilation of seconds."""
    sources: list[Path] = []

    def build(given: list[Path], path: Path) -> None:
        sources.extend(given)
        shutil.copyfile(loaded, path)

    monkeypatch.setattr(kernels, "build_library", build)
    fresh.mkdir(parents=True)
    path = fresh / f"training-{kernels._key()}.so"
    path.write_bytes(b"cut off")
    assert kernels.load() == ""
    assert sources == kernels._SOURCES
    assert [*fresh.iterdir()] == [path]
    assert path.stat().st_size > 10_000
    assert isinstance(kernels.loaded, ctypes.CDLL)
    written = path.stat().st_mtime_ns
    monkeypatch.setattr(kernels, "loaded", None)
    monkeypatch.setattr(kernels, "_build", lambda path: pytest.fail("compiled again"))
    assert kernels.load() == ""
    assert path.stat().st_mtime_ns == written


def test_without_a_compiler_torch_computes(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "has_cpp_compiler", lambda: False)
    assert kernels.load().startswith("there is no C++ compiler")
    assert not kernels.can_run()
    assert [*fresh.glob("*")] == []
    Dropout(0.5)(torch.ones(3))


def test_a_cache_folder_that_cannot_be_written_is_a_reason(fresh: Path) -> None:
    fresh.write_text("a file in its place")
    assert "File exists" in kernels.load()
    assert not kernels.can_run()
