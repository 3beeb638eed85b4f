"""Languages of translators: their names, and the detection of a text's language."""

from collections.abc import Collection

from heedful.data.language_tags import NAMES, language_of, macrolanguage_of, with_script
from heedful.data.languages import language_probabilities
from heedful.pipelines import Translator


def name_of(code: str) -> str:
    """The English name of a language code; the code itself if it is not known."""
    return NAMES.get(code.lower()) or NAMES.get(language_of(code), code)


def targets_of(model: Translator) -> list[str]:
    """The codes of the languages that a translator translates into."""
    metadata, own = model.metadata, model.metadata.tgt_language
    if metadata.language_codes:
        return [*metadata.language_codes]
    return list(dict.fromkeys([*metadata.language_tags, *([own] if own else [])]))


def sources_of(model: Translator) -> list[str]:
    """The codes of the languages that a translator translates from; [] if it does not name any.

    With several targets each may be a source as well.
    """
    metadata, own = model.metadata, model.metadata.src_language
    return [*metadata.language_codes] or ([own] if own else [])


def detect(text: str, languages: Collection[str]) -> list[tuple[str, float]]:
    """The probability of each of some languages among all that are known, the most probable first.

    It is that of the macrolanguage, such as Norwegian for `nb`, as its members often have the same
    words; of several members, the one that is more probable itself comes first. Codes of languages
    that `language_probabilities` lacks have probability 0.
    """
    by_language, by_macrolanguage = dict[str, float](), dict[str, float]()
    for code, probability in language_probabilities(text).items():
        for sums, name in (
            (by_language, language_of(code)),
            (by_macrolanguage, macrolanguage_of(code)),
        ):
            sums[name] = sums.get(name, 0.0) + probability

    def of_macrolanguage(code: str) -> float:
        return by_macrolanguage.get(macrolanguage_of(code), 0.0)

    def of_language(code: str) -> float:
        """The probability of a language; if it is unknown, that of its macrolanguage's code."""
        rest = by_language.get(macrolanguage_of(code), 0.0)
        return by_language.get(language_of(code), rest)

    def is_usual(code: str) -> tuple[bool, bool]:
        """Of codes that are equally probable: a known language goes first, and its usual script."""
        language = language_of(code)
        return language in by_language, with_script(code) == with_script(language)

    order = sorted(
        sorted(languages),
        key=lambda code: (of_macrolanguage(code), of_language(code), is_usual(code)),
        reverse=True,
    )
    return [(code, of_macrolanguage(code)) for code in order]
