"""The matrix products of a training step, recorded and run alone."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operators by those that a step calls, which may write to a given tensor.
_PRODUCTS = {
    getattr(getattr(torch.ops.aten, name), overload): getattr(torch.ops.aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm")
    for overload in ("default", "out")
}


class Operand(NamedTuple):
    """The memory layout of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Product(NamedTuple):
    """A call of a matrix product, an operator of torch; the two factors are the last operands."""

    operator: Callable[..., Tensor]
    operands: tuple[Operand, ...]

    @property
    def flops(self) -> int:
        """Two per multiplication: 2 · m · k · n for (…, m, k) times (…, k, n)."""
        left, right = self.operands[-2:]
        return 2 * math.prod(left.shape) * right.shape[-1]


def record_products(run: Callable[[], Any]) -> list[Product]:
    """The matrix products of a call, backward passes included, in their order."""
    with _Recorder() as recorder:
        run()
    return recorder.products


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.products: list[Product] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _PRODUCTS:
            operands = tuple(Operand(tuple(t.shape), t.stride(), t.dtype) for t in args)
            self.products.append(Product(_PRODUCTS[func], operands))
        return func(*args, **(kwargs or {}))


def runner(products: Sequence[Product]) -> Callable[[], None]:
    """A function that computes the products, of random numbers; equal operands share memory."""
    tensors = {operand: _random(operand) for product in products for operand in product.operands}
    calls = [(product.operator, [tensors[o] for o in product.operands]) for product in products]

    @torch.no_grad()
    def run() -> None:
        """Compute each product once."""
        for operator, operands in calls:
            operator(*operands)

    return run


def _random(operand: Operand) -> Tensor:
    """Standard normal numbers with a shape, strides and type."""
    steps = zip(operand.shape, operand.strides, strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps)
    return torch.randn(elements).to(operand.dtype).as_strided(operand.shape, operand.strides)
