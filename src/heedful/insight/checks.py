"""The `Check` class, and helpers of checks: comparing outputs, effects of single tokens."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from heedful.insight.kind import Side
from heedful.insight.probe import Probe, first_line
from heedful.insight.report import CheckResult, Status

# Rounding errors of a gradient, in units of the type's precision and of the largest gradient: of a
# net in its own type, and of one in fp64, where more of them are still far from any defect.
_ROUNDINGS, _DOUBLE_ROUNDINGS = 64, 1000

POOLED = "the net has one output per text, not per position"  # why a check is skipped
Outcome = tuple[str, float | None]  # observation, and the number compared with the tolerance
CheckFunction = Callable[[Probe], Outcome]


class Failed(Exception):
    """Raised by a check that failed, with its observation and the number that was out of bounds."""

    def __init__(self, detail: str, error: float | None = None) -> None:
        super().__init__(detail)
        self.error = error


class Skipped(Exception):
    """Raised by a check that does not apply to the net, with the reason."""


@dataclass(frozen=True)
class Check:
    """A named check of a net.

    Names in braces in the texts are replaced by `NetKind.terms`.

    Attributes:
        function: returns the outcome if the check passed; else raises `Failed` or `Skipped`.
        requirement: the property that the net must have.
        hint: usual causes of a failure.
        needs: names of checks without which the result is meaningless. If one of them failed this
            check is skipped, so that a defect is reported once.
        single_requirement, single_hint: texts for nets of a single stack, if they differ.
        stacks: run only for nets with this number of stacks; None: for all.
        retry_in_double: repeat a failed check in fp64, where it may pass: effects as small as the
            rounding errors of fp32 or 16-bit types are correct for tiny nets, and differences as
            large as them for deep nets.
    """

    name: str
    function: CheckFunction
    requirement: str
    hint: str
    needs: Sequence[str] = ()
    single_requirement: str = ""
    single_hint: str = ""
    stacks: Literal[1, 2] | None = None
    retry_in_double: bool = False

    def run(self, probe: Probe) -> CheckResult:
        """Run the check on a net."""
        result = self._run(probe)
        if self.retry_in_double and result.status == "failed" and (double := probe.to_double()):
            repeated = self._run(double)
            return repeated if repeated.status == "passed" else result
        return result

    def result(
        self, probe: Probe, status: Status, detail: str, error: float | None = None
    ) -> CheckResult:
        """A result with the texts of the check."""
        requirement, hint = self.requirement, self.hint
        if probe.is_single_stack:
            requirement, hint = self.single_requirement or requirement, self.single_hint or hint
        requirement = requirement.format_map(probe.terms)
        hint = hint.format_map(probe.terms) if status == "failed" else ""
        return CheckResult(self.name, status, detail, hint, error, requirement)

    def _run(self, probe: Probe) -> CheckResult:
        try:
            return self.result(probe, "passed", *self.function(probe))
        except Skipped as reason:
            return self.result(probe, "skipped", str(reason))
        except Failed as failure:
            return self.result(probe, "failed", str(failure), failure.error)
        except Exception as error:  # the net may raise any exception
            return self.result(probe, "failed", f"raised {first_line(error)}")


def check(
    name: str,
    *,
    requirement: str,
    hint: str,
    needs: Sequence[str] = (),
    single_requirement: str = "",
    single_hint: str = "",
    stacks: Literal[1, 2] | None = None,
    retry_in_double: bool = False,
) -> Callable[[CheckFunction], Check]:
    """Decorator that turns a function into a `Check` with these attributes."""

    def declare(function: CheckFunction) -> Check:
        return Check(
            name=name,
            function=function,
            requirement=requirement,
            hint=hint,
            needs=needs,
            single_requirement=single_requirement,
            single_hint=single_hint,
            stacks=stacks,
            retry_in_double=retry_in_double,
        )

    return declare


def distances(a: Float[Tensor, "B P V"], b: Float[Tensor, "B P V"]) -> Float[Tensor, "P"]:
    """(P,): largest difference at each position, in standard deviations of `a`; inf for NaN.

    Equal infinities (logits of forbidden tokens) have a difference of 0. A single number, which has
    no deviation, is compared by its magnitude.
    """
    gap = (a.double() - b.double()).abs().masked_fill(a == b, 0.0)
    finite = a.double()[a.isfinite()]
    is_single = finite.numel() < 2  # or none: then 0
    spread = float(finite.abs().sum() if is_single else finite.std(correction=0))
    return (gap / max(spread, 1e-12)).nan_to_num(nan=math.inf, posinf=math.inf).amax((0, 2))


def distance(a: Float[Tensor, "B P V"], b: Float[Tensor, "B P V"]) -> float:
    """The maximum of `distances`."""
    return float(distances(a, b).max())


def require_equal(
    probe: Probe, a: Float[Tensor, "B P V"], b: Float[Tensor, "B P V"], message: str
) -> float:
    """The distance of `a` and `b`; raises `Failed` if it is above the tolerance.

    Args:
        message: the observation on failure; `{error}` is replaced by the distance.
    """
    error = distance(a, b)
    if error > probe.tolerance:
        raise Failed(message.replace("{error}", f"{error:.1e}"), error)
    return error


def gradient_beyond_rounding(
    probe: Probe, gradient_of: Callable[[Probe], Tensor | None], forbidden: Bool[Tensor, "B T"]
) -> float | None:
    """The largest gradient at `forbidden`, relative to the largest anywhere; 0.0 for rounding.

    A right net may have a gradient of rounding errors there: softmax, mask and renormalize cancels
    only up to them. So the gradient is computed again in fp64. There it is

    - within the rounding of fp64: none;
    - above the rounding of fp32: a gradient;
    - between: a gradient if fp32 and fp64 agree on it, else rounding of operations that the fp64
      net does in fp32.

    Args:
        gradient_of: gradients (B, T, D) of the net of a probe; None: unknown. Its random numbers
            are equal in both calls.

    Returns:
        NaN if a gradient is NaN; None if the gradient is unknown.
    """

    state = probe.generator.get_state()

    def relative(at: Probe) -> Tensor | None:
        probe.generator.set_state(state)  # which all copies of the probe share
        gradient = gradient_of(at)
        if gradient is None:
            return None
        values = gradient.double()
        return values[forbidden] / values.abs().nan_to_num(nan=1.0).max().clamp(min=1e-30)

    found = relative(probe)
    if found is None:
        return None
    leak = float(found.abs().max()) if found.numel() else 0.0
    single = _ROUNDINGS * torch.finfo(torch.float32).eps
    double = probe.to_double() if leak > 0 else None
    exact = None if double is None else relative(double)
    if exact is None:  # no gradient, NaN, or a net that does not run in fp64
        types = {p.dtype for p in probe.net.parameters() if p.is_floating_point()}
        eps = max((torch.finfo(dtype).eps for dtype in types), default=0.0)
        return 0.0 if leak <= _ROUNDINGS * eps else leak
    size = float(exact.abs().max())
    if size <= _DOUBLE_ROUNDINGS * torch.finfo(torch.float64).eps:
        return 0.0
    agree = float((found - exact).norm()) < 0.5 * float(exact.norm())
    return leak if agree or not size <= single else 0.0


def influence(probe: Probe, side: Side) -> Float[Tensor, "P J"]:
    """(P, J): the change of the outputs at position i when token j of `side` is replaced."""
    batch = probe.batch(3)
    outputs = probe.outputs(batch)
    columns = []
    for j in range(batch.ids[side].size(1)):
        ids = batch.ids[side].clone()
        ids[:, j] = probe.other_tokens(side, ids[:, j])
        columns.append(distances(outputs, probe.outputs(batch.replace_ids(side, ids))))
    return torch.stack(columns, dim=1)


def period_of_positions(probe: Probe, side: Side) -> int | None:
    """The number of positions after which the vectors of positions recur in a long text; or None.

    They are read from the first states, (T, D), that differ in a text of one token repeated. Those
    of schemes that enter attention alone are not found.
    """
    batch = probe.long_batch(2)  # of two rows: some nets drop the dimension of one
    for other in probe.sides:
        ids = batch.ids[other][:, :1].expand(-1, probe.long_length if other == side else 8)
        batch = batch.replace_ids(other, ids)
    found: list[Tensor] = []

    def record(module: object, args: object, out: object) -> None:
        for value in out if isinstance(out, tuple) else (out,):
            if not found and isinstance(value, Tensor) and value.is_floating_point():
                states = value.detach().float()
                if states.dim() == 3:  # (B, T, D), or of positions (1, T, D)
                    states = states[0]
                if states.dim() != 2 or len(states) != probe.long_length:
                    continue
                if unequal(states, 0).any():
                    found.append(states)

    def unequal(states: Tensor, position: int) -> Tensor:
        """(T,): True at the positions whose state is not that at `position`."""
        return (states - states[position]).abs().amax(1) > probe.tolerance * states.abs().amax()

    hooks = [module.register_forward_hook(record) for module in probe.net.modules()]
    try:
        probe.outputs(batch, grad=True)  # without gradients torch's fast path calls no modules
    finally:
        for hook in hooks:
            hook.remove()
    for states in found:
        equal = (~unequal(states, 0)).nonzero().flatten().tolist()
        if len(equal) > 1 and equal[1] > 1:
            error = (states[equal[1] :] - states[: -equal[1]]).abs().amax()
            if error <= probe.tolerance * states.abs().amax():
                return int(equal[1])
    return None


def has_no_nan(outputs: Tensor) -> bool:
    """True without NaN and +inf; -inf is the logit of a forbidden token."""
    return not bool((outputs.isnan() | (outputs == math.inf)).any())


def first_non_finite_gradient(net: nn.Module) -> str | None:
    """Name of the first parameter whose gradient is not finite; None if all are finite."""
    for name, parameter in net.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return name
    return None
