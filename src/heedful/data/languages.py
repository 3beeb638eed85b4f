"""Languages: their tags, their scripts, and the language that a text is in.

Tags in any form (`pt-BR`, `pt_BR` and `por` are Portuguese) are read by the library langcodes.
Standards: BCP 47 for tags, ISO 639-3 for macrolanguages. Texts are identified by py3langid (extra
`langid`), Lui and Baldwin 2012, "langid.py: An Off-the-shelf Language Identification Tool".
Probabilities are scaled by the length of the text, so that those of short texts are low.
"""

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import numpy as np
from jaxtyping import Int64
from tokenizers import Regex, normalizers

from heedful.errors import UserError, format_names
from heedful.plugins import nearest

# English names by code.
NAMES = {
    "af": "Afrikaans", "ar": "Arabic", "az": "Azerbaijani", "be": "Belarusian", "bg": "Bulgarian",
    "bn": "Bengali", "bs": "Bosnian", "ca": "Catalan", "cs": "Czech", "cy": "Welsh",
    "da": "Danish", "de": "German", "el": "Greek", "en": "English", "eo": "Esperanto",
    "es": "Spanish", "et": "Estonian", "eu": "Basque", "fa": "Persian", "fi": "Finnish",
    "fr": "French", "ga": "Irish", "gl": "Galician", "gu": "Gujarati", "he": "Hebrew",
    "hi": "Hindi", "hr": "Croatian", "hu": "Hungarian", "hy": "Armenian", "id": "Indonesian",
    "is": "Icelandic", "it": "Italian", "ja": "Japanese", "ka": "Georgian", "kk": "Kazakh",
    "km": "Khmer", "kn": "Kannada", "ko": "Korean", "la": "Latin", "lt": "Lithuanian",
    "lv": "Latvian", "mk": "Macedonian", "ml": "Malayalam", "mn": "Mongolian", "mr": "Marathi",
    "ms": "Malay", "mt": "Maltese", "my": "Burmese", "nb": "Norwegian Bokmål", "ne": "Nepali",
    "nl": "Dutch", "nn": "Norwegian Nynorsk", "no": "Norwegian", "pa": "Punjabi", "pl": "Polish",
    "ps": "Pashto", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "si": "Sinhala",
    "sk": "Slovak", "sl": "Slovenian", "sq": "Albanian", "sr": "Serbian", "sv": "Swedish",
    "sw": "Swahili", "ta": "Tamil", "te": "Telugu", "th": "Thai", "tl": "Tagalog",
    "tr": "Turkish", "uk": "Ukrainian", "ur": "Urdu", "uz": "Uzbek", "vi": "Vietnamese",
    "zh": "Chinese",
}  # fmt: skip
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


@cache
def standard_tag(tag: str) -> str:
    """The tag of BCP 47 for a tag or ISO 639 code, such as `pt-BR`; other names in lower case.

    The usual language of a macrolanguage has its code: `zh` for `cmn`.
    """
    from langcodes import standardize_tag
    from langcodes.tag_parser import LanguageTagError

    try:
        return standardize_tag(tag, macro=True)
    except LanguageTagError:
        return tag.replace("_", "-").lower()


def language_of(tag: str | None) -> str:
    """The language of a tag, without script and region: `pt` for `pt_BR` and `por`; "" for None."""
    return standard_tag(tag or "").partition("-")[0]


@cache
def macrolanguage_of(tag: str) -> str:
    """The macrolanguage of a tag's language, such as `zh` for `yue`, `no` for `nb`; else itself."""
    from langcodes.data_dicts import MACROLANGUAGES

    language = language_of(tag)
    return MACROLANGUAGES.get(language, language)


def matching_tag(tag: str, tags: Collection[str]) -> str | None:
    """The entry of `tags` that means the same as a tag; None: no entry, or several do.

    Without one that is equal in standard form, the only one of the same language counts.
    """
    if tag in tags:
        return tag
    for form in (standard_tag, language_of):
        if len(found := [one for one in tags if form(one) == form(tag)]) == 1:
            return found[0]
    return None


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
