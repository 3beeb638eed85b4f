"""Language tags in one form, however they are written: `pt-BR`, `pt_BR` and `por` are Portuguese.

Standards: BCP 47 for tags, ISO 639-3 for macrolanguages, by the library langcodes.
"""

from collections.abc import Collection
from functools import cache

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
_RIGHT_TO_LEFT = {"Adlm", "Arab", "Hebr", "Mand", "Nkoo", "Rohg", "Samr", "Syrc", "Thaa"}


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
    return standard_tag(tag).partition("-")[0] if tag else ""


@cache
def with_script(tag: str) -> str:
    """The language of a tag with its script, or the usual one: `zh-Hans` for `zh`, `zh-CN`."""
    from langcodes import Language
    from langcodes.tag_parser import LanguageTagError

    try:
        likely = Language.get(standard_tag(tag)).maximize()
    except LanguageTagError:
        return standard_tag(tag)
    return f"{likely.language}-{likely.script}"


def is_right_to_left(tag: str) -> bool:
    """True for a language whose script, or usual one, is written from right to left."""
    return with_script(tag).rpartition("-")[2] in _RIGHT_TO_LEFT


@cache
def macrolanguage_of(tag: str) -> str:
    """The macrolanguage of a tag's language, such as `zh` for `yue`, `no` for `nb`; else itself."""
    from langcodes.data_dicts import MACROLANGUAGES

    language = language_of(tag)
    return MACROLANGUAGES.get(language, language)


def is_same_language(tag: str, other: str) -> bool:
    """True for tags of one language, or of one and its macrolanguage."""
    return language_of(tag) == language_of(other) or macrolanguage_of(tag) == macrolanguage_of(
        other
    )


def matching_tag(tag: str, tags: Collection[str]) -> str | None:
    """The entry of `tags` that means the same as a tag; None: no entry, or several do.

    Without one that is equal in standard form, the only one of the same language and script
    counts, or else of the same language. Where there is none, `no` and `nb` are the same.
    """
    if tag in tags:
        return tag
    for form in (standard_tag, with_script, language_of, _usual_member):
        if len(found := [one for one in tags if form(one) == form(tag)]) == 1:
            return found[0]
    return None


def _usual_member(tag: str) -> str:
    """The language of a tag; of `no` the language that CLDR means by it, `nb`.

    `no` is the only macrolanguage whose usual member has a code beside it in standard tags.
    """
    language = language_of(tag)
    return "nb" if language == "no" else language
