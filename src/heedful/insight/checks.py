"""What a check is, and what checks share: how outputs are compared, what changes with a token."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.insight.kind import Side
from heedful.insight.probe import Probe, first_line
from heedful.insight.report import CheckResult, Status

Seen = tuple[str, float | None]  # what was seen, and the number held against the tolerance
Ask = Callable[[Probe], Seen]


class Failed(Exception):
    """A check found a defect: what was seen, and the number that was too large or too small."""

    def __init__(self, detail: str, error: float | None = None) -> None:
        super().__init__(detail)
        self.error = error


class Skipped(Exception):
    """A check does not apply, or cannot be made: why."""


@dataclass(frozen=True)
class Check:
    """A named question to a net. Words in braces in its texts are those of the kind of net.

    Attributes:
        ask: asks it: returns what was seen where it holds, else raises `Failed` or `Skipped`.
        holds: what is asked for.
        hint: what a failure usually means.
        needs: checks without which the answer would mean nothing: where one of them failed this
            one is skipped, so that one defect is reported once, where it is.
        single_holds, single_hint: the same for a net of one stack, where they differ.
        stacks: of how many it is asked; None: of any net.
        delicate: it fails where effects are no larger than rounding, which those of tiny or 16-bit
            nets may rightly be: it is asked again in fp64 before that counts.
    """

    name: str
    ask: Ask
    holds: str
    hint: str
    needs: Sequence[str] = ()
    single_holds: str = ""
    single_hint: str = ""
    stacks: Literal[1, 2] | None = None
    delicate: bool = False

    def run(self, probe: Probe) -> CheckResult:
        """Ask a net."""
        found = self._run(probe)
        if self.delicate and found.status == "failed" and (finer := probe.in_double()):
            again = self._run(finer)
            return again if again.status == "passed" else found
        return found

    def result(
        self, probe: Probe, status: Status, detail: str, error: float | None = None
    ) -> CheckResult:
        """A result with the check's texts."""
        holds, hint = self.holds, self.hint
        if probe.single:
            holds, hint = self.single_holds or holds, self.single_hint or hint
        holds = holds.format_map(probe.words)
        hint = hint.format_map(probe.words) if status == "failed" else ""
        return CheckResult(self.name, status, detail, hint, error, holds)

    def _run(self, probe: Probe) -> CheckResult:
        try:
            return self.result(probe, "passed", *self.ask(probe))
        except Skipped as reason:
            return self.result(probe, "skipped", str(reason))
        except Failed as found:
            return self.result(probe, "failed", str(found), found.error)
        except Exception as error:  # a net that is being verified may raise anything
            return self.result(probe, "failed", f"raised {first_line(error)}")


def check(
    name: str,
    *,
    holds: str,
    hint: str,
    needs: Sequence[str] = (),
    single_holds: str = "",
    single_hint: str = "",
    stacks: Literal[1, 2] | None = None,
    delicate: bool = False,
) -> Callable[[Ask], Check]:
    """A decorator that makes a `Check`, with these attributes, of the function that asks it."""

    def declare(ask: Ask) -> Check:
        return Check(name, ask, holds, hint, needs, single_holds, single_hint, stacks, delicate)

    return declare


def distances(a: Float[Tensor, "B P V"], b: Float[Tensor, "B P V"]) -> Float[Tensor, "P"]:
    """Largest difference at each position, in standard deviations of `a`; inf where not a number.

    Logits that are equal infinities (tokens that are forbidden) do not differ.
    """
    gap = (a.double() - b.double()).abs().masked_fill(a == b, 0.0)
    finite = a.double()[a.isfinite()]
    spread = float(finite.std(correction=0)) if finite.numel() else 0.0
    return (gap / max(spread, 1e-12)).nan_to_num(nan=math.inf, posinf=math.inf).amax((0, 2))


def distance(a: Float[Tensor, "B P V"], b: Float[Tensor, "B P V"]) -> float:
    """The largest of `distances`."""
    return float(distances(a, b).max())


def must_equal(
    probe: Probe, a: Float[Tensor, "B P V"], b: Float[Tensor, "B P V"], otherwise: str
) -> float:
    """Their distance; raises `Failed` with `otherwise`, which may show `{error}`, if too large."""
    error = distance(a, b)
    if error > probe.tolerance:
        raise Failed(otherwise.replace("{error}", f"{error:.1e}"), error)
    return error


def influence(probe: Probe, side: Side) -> Float[Tensor, "P J"]:
    """[i, j]: by how much the outputs at position i change with token j of `side`."""
    batch = probe.batch(3)
    outputs = probe.outputs(batch)
    columns = []
    for j in range(batch.ids[side].size(1)):
        ids = batch.ids[side].clone()
        ids[:, j] = probe.others(side, ids[:, j])
        columns.append(distances(outputs, probe.outputs(batch.replaced(side, ids))))
    return torch.stack(columns, dim=1)


def usable(outputs: Tensor) -> bool:
    """-inf is a forbidden token; NaN and +inf are accidents."""
    return not bool((outputs.isnan() | (outputs == math.inf)).any())


def not_finite(net: nn.Module) -> str | None:
    """The first parameter whose gradient is not finite."""
    for name, parameter in net.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return name
    return None
