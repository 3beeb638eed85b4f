"""The chi-square test for samples with a fixed seed."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np


def fits(observed: np.ndarray, expected: np.ndarray) -> bool:
    """True if counts agree with the expected ones: false for one in some 2,000 correct samples.

    By the cube-root approximation of the chi-square distribution (Wilson and Hilferty 1931).
    """
    observed, expected = np.asarray(observed, float), np.asarray(expected, float)
    assert observed.shape == expected.shape
    assert expected.min() >= 5, expected
    assert math.isclose(observed.sum(), expected.sum()), (observed.sum(), expected.sum())
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = observed.size - 1
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread) < 3.3


def fits_uniform(observed: np.ndarray) -> bool:
    """True if counts agree with a uniform distribution."""
    return fits(observed, np.full(np.shape(observed), np.mean(observed)))


def fits_outcomes(counts: Counter[Any], probs: Mapping[Any, float]) -> bool:
    """True if outcomes agree with these probabilities; rare ones are merged."""
    assert set(counts) <= {outcome for outcome, prob in probs.items() if prob}
    bins = [np.zeros(2)]
    for outcome in sorted(probs, key=lambda outcome: probs[outcome]):
        bins[-1] = bins[-1] + [counts[outcome], probs[outcome] * counts.total()]
        if bins[-1][1] >= 5:
            bins.append(np.zeros(2))
    rest = bins.pop()
    bins[-1] = bins[-1] + rest
    assert len(bins) > 1
    return fits(*np.transpose(bins))
