"""The language of a text, by py3langid (extra `langid`).

Lui and Baldwin 2012, "langid.py: An Off-the-shelf Language Identification Tool". Probabilities are
scaled by the length of the text, so that those of short texts are low.
"""

from functools import cache
from typing import Any

from heedful.data.language_tags import macrolanguage_of
from heedful.errors import UserError, format_names

NO_LANGUAGE = "zxx"  # ISO 639-2: no linguistic content


def identify(text: str) -> str:
    """The macrolanguage (`macrolanguage_of`) of the most probable language of a text."""
    return macrolanguage_of(_identifier().classify(text)[0])


def language_probabilities(text: str) -> dict[str, float]:
    """The probability of each known language, by ISO 639 code; their sum is 1."""
    return {code: float(probability) for code, probability in _identifier().rank(text)}


def probability_of(text: str, macrolanguage: str) -> float:
    """The sum of the probabilities of the members of a macrolanguage."""
    probabilities = language_probabilities(text).items()
    return sum(value for code, value in probabilities if macrolanguage_of(code) == macrolanguage)


def known_macrolanguage(language: str | None, keys: str) -> str:
    """The macrolanguage of an expected language.

    Args:
        keys: recipe keys that give the language, for messages.

    Raises:
        UserError: no language; one that the identifier does not know.
    """
    if not language:
        raise UserError(f"data.filters.language: no language; set {keys}")
    expected, labels = macrolanguage_of(language), _identifier().labels
    if expected not in map(macrolanguage_of, labels):
        known = format_names(sorted({*labels} - {NO_LANGUAGE}), str)
        raise UserError(
            f"data.filters.language: py3langid does not know the language {language}; change {keys}"
            f", or leave the filter out (known: {known})"
        )
    return expected


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
