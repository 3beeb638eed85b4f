"""The scripts of languages, and the language that a text is in.

Texts are identified by py3langid (extra
`langid`), Lui and Baldwin 2012, "langid.py: An Off-the-shelf Language Identification Tool".
Probabilities are scaled by the length of the text, so that those of short texts are low.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from jaxtyping import Int64
from tokenizers import Regex, normalizers

from heedful.data.language_tags import language_of, macrolanguage_of
from heedful.errors import UserError, format_names
from heedful.plugins import nearest

LETTERS = r"\p{L}\p{M}"  # with combining marks, which are vowels in Indic scripts
# Letters that belong to a script; the prolonged sound mark of Japanese, for one, does not.
SCRIPT_LETTERS = r"\p{L}&&[^\p{Common}\p{Inherited}]"

# The usual scripts of languages by ISO 639 code, as Unicode names them (CLDR, likely subtags).
_LANGUAGES = {
    ("Latin",): "af az bs ca ceb cs cy da de en eo es et eu fi fil fo fr fy ga gd gl ha hr ht hu id"
    " ig is it jv ku la lb lt lv mg mi ms mt nb nl nn no oc pl pt ro rw sk sl sn so sq st su sv sw"
    " tk tn tr ts uz vi wo xh yo zu",
    ("Latin", "Cyrillic"): "sr",
    ("Cyrillic",): "ba be bg ce cv ky kk mk mn os ru tg tt uk",
    ("Arabic",): "ar arz ckb fa ps sd ug ur",
    ("Devanagari",): "bho hi mai mr ne sa",
    ("Bengali",): "as bn",
    ("Han",): "zh yue wuu",
    ("Han", "Hiragana", "Katakana"): "ja",
    ("Hangul", "Han"): "ko",
    ("Greek",): "el grc",
    ("Hebrew",): "he yi",
    ("Armenian",): "hy",
    ("Georgian",): "ka",
    ("Ethiopic",): "am ti",
    ("Gujarati",): "gu",
    ("Gurmukhi",): "pa",
    ("Kannada",): "kn",
    ("Khmer",): "km",
    ("Lao",): "lo",
    ("Malayalam",): "ml",
    ("Myanmar",): "my",
    ("Oriya",): "or",
    ("Sinhala",): "si",
    ("Tamil",): "ta",
    ("Telugu",): "te",
    ("Thaana",): "dv",
    ("Thai",): "th",
    ("Tibetan",): "bo dz",
}
_SCRIPTS_OF = {code: names for names, codes in _LANGUAGES.items() for code in codes.split()}
SCRIPTS = sorted({name for names in _LANGUAGES for name in names})
NO_LANGUAGE = "zxx"  # ISO 639-2: no linguistic content


def scripts_of(language: str | None, names: str | Sequence[str] | None, key: str) -> list[str]:
    """The scripts called `names`, or those of a language.

    Args:
        language: a tag or ISO 639 code, as `pt-BR` or `por`.
        key: recipe key of the names, for messages.

    Raises:
        UserError: an unknown script; neither names nor a language with known scripts.
    """
    if not names:
        code = language_of(language)
        if code in _SCRIPTS_OF:
            return list(_SCRIPTS_OF[code])
        problem = f"the language {language} has no known script" if language else "no language"
        raise UserError(f"data.filters.min_script: {problem}; set data.filters.{key}")
    listed = [names] if isinstance(names, str) else list(names)
    for name in listed:
        if name not in SCRIPTS:
            raise UserError(
                f"data.filters.{key}: unknown script {name}; {nearest(name, SCRIPTS)} (known: "
                f"{format_names(SCRIPTS, str)})"
            )
    return listed


def letters_of(scripts: Sequence[str]) -> str:
    """The letters of some scripts, for `CharacterClass`."""
    names = "".join(rf"\p{{{name}}}" for name in scripts)
    return rf"\p{{L}}&&[{names}]"


class CharacterClass:
    r"""A set of characters, given as the inside of a regular expression's brackets.

    Unicode properties such as `\p{Cyrillic}` are those of the `tokenizers` library (Oniguruma).
    Each character that occurs is looked up once.
    """

    def __init__(self, pattern: str) -> None:
        self._keep_members = normalizers.Replace(Regex(f"[^{pattern}]"), "")
        self._is_member = np.full(0x110000, -1, np.int8)  # by code point; -1: not looked up yet

    def counts(self, texts: Sequence[str]) -> Int64[np.ndarray, " N"]:
        """The number of members in each text."""
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), "<u4")
        unknown = np.unique(codes[self._is_member[codes] < 0])
        self._is_member[unknown] = 0
        # Half of a surrogate pair is in no class.
        scalars = "".join(map(chr, unknown[(unknown < 0xD800) | (unknown > 0xDFFF)].tolist()))
        for character in self._keep_members.normalize_str(scalars):
            self._is_member[ord(character)] = 1
        sums = np.concatenate([[0], np.cumsum(self._is_member[codes], dtype=np.int64)])
        ends = np.cumsum(lengths)
        return np.asarray(sums[ends] - sums[ends - lengths])


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
