"""Paired rounds of timing: which of several cases is the fastest, also on a machine that varies."""

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Case = TypeVar("Case", bound=Hashable)

# For each round from the second on, the share of the fastest case's rate that a case must have
# reached in a round so far.
SURVIVAL_SHARES = (0.7, 0.7, 0.9, 0.9, 0.9)
MAX_ROUNDS = 12
_EQUAL = 0.97  # a ratio of rates above which it does not matter which of the cases is taken
_AGREEMENT = 0.75  # share of the rounds that the fastest case must win against each other one


@dataclass(frozen=True)
class Outcome(Generic[Case]):
    """The result of `find_fastest`.

    Attributes:
        rates: of each case in units per second, the fastest first. Those of cases that were dropped
            early are scaled by the fastest case's rates in the same rounds.
        rival: the case that may be the fastest as well, since rounds disagree; None: decided.
    """

    rates: Mapping[Case, float]
    rival: Case | None

    @property
    def fastest(self) -> Case:
        return next(iter(self.rates))


def find_fastest(
    cases: Sequence[Case],
    measure: Callable[[Case], float],
    advance: Callable[[int], None] = lambda count: None,
    max_rounds: int = MAX_ROUNDS,
) -> Outcome[Case]:
    """Compare the rates of cases within rounds, in each of which every remaining case is measured.

    Rates of one round are seconds apart, so that other work on the machine affects all of them. A
    case is dropped that is far from the fastest one in all rounds so far, two or more; slow rounds
    drop none that has had a fast one. Rounds that disagree about the fastest case are repeated.

    Args:
        measure: returns the rate of a case in one round.
        advance: receives numbers of finished measurements, len(cases) * (1 + len(SURVIVAL_SHARES))
            in all; those of repeated rounds are not counted.
    """
    rates: dict[Case, list[float]] = {case: [] for case in cases}
    remaining, usual = [*cases], min(max_rounds, 1 + len(SURVIVAL_SHARES))
    for number in range(1, max_rounds + 1):
        order = remaining if number % 2 else reversed(remaining)
        for case in [*order]:
            rates[case].append(measure(case))
            advance(int(number <= usual))
        leader = _leader(remaining, rates)
        if 2 <= number <= usual:
            share = SURVIVAL_SHARES[number - 2]
            kept = [
                case
                for case in remaining
                if case == leader or max(_ratios(case, leader, rates)) >= share
            ]
            advance((len(remaining) - len(kept)) * (usual - number))
            remaining = kept
        rival = _rival(leader, remaining, rates)
        if number >= usual and rival is None:
            break
    else:
        rival = _rival(leader, remaining, rates)
    best = statistics.median(rates[leader])
    scaled = {case: best * _paired(case, leader, rates) for case in cases}
    others = sorted((case for case in cases if case != leader), key=scaled.__getitem__)
    return Outcome({case: scaled[case] for case in [leader, *reversed(others)]}, rival)


def _ratios(one: Case, other: Case, rates: Mapping[Case, list[float]]) -> list[float]:
    """The ratios of two cases' rates, in the rounds of both."""
    return [a / b for a, b in zip(rates[one], rates[other], strict=False)]


def _paired(one: Case, other: Case, rates: Mapping[Case, list[float]]) -> float:
    return statistics.median(_ratios(one, other, rates))


def _leader(remaining: Sequence[Case], rates: Mapping[Case, list[float]]) -> Case:
    """The case whose least paired ratio to another one is the highest."""
    return max(
        remaining,
        key=lambda case: min(_paired(case, other, rates) for other in remaining),
    )


def _rival(
    leader: Case, remaining: Sequence[Case], rates: Mapping[Case, list[float]]
) -> Case | None:
    """The first case that wins too many rounds to be the slower one; None: the leader is fastest.

    Cases of nearly equal rates are no rivals: it does not matter which one is taken.
    """
    for case in remaining:
        ratios = _ratios(case, leader, rates)
        wins = sum(ratio <= 1 for ratio in ratios)
        is_equal = statistics.median(ratios) >= _EQUAL
        if case != leader and not is_equal and wins < _AGREEMENT * len(ratios):
            return case
    return None
