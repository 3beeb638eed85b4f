"""A quality of a translation, from the probability that a model gives it."""

_WITH_REASONS = 0.75


def quality(probability: float, *, has_reasons: bool) -> float:
    """An estimate from 0 to 100: the mean probability of a token in percent, in the same scale for
    all texts; three quarters of it for a translation with reasons for a review.

    It was compared with other figures in docs/log.md.

    Args:
        probability: the geometric mean of the probabilities of the tokens.
    """
    return round(100 * probability * (_WITH_REASONS if has_reasons else 1.0), 1)
