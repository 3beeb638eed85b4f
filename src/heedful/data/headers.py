"""Recognition of a first line that names the columns of a table."""

import re
from collections import Counter
from collections.abc import Sequence

# Names of columns in common data sets; names and codes of languages.
_COLUMN_NAMES = """
src source tgt target trg ref reference input output text texts text1 text2 text_a text_b
sentence sentence1 sentence2 sentence_a sentence_b premise hypothesis question answer query
passage review comment tweet title label labels class category sentiment polarity intent
rating score original translation translated source_text target_text source_sentence
target_sentence src_text tgt_text
"""
_LANGUAGE_NAMES = """
arabic bengali bulgarian catalan chinese croatian czech danish dutch english estonian finnish
french german greek hebrew hindi hungarian icelandic indonesian irish italian japanese korean
latvian lithuanian malay norwegian persian polish portuguese romanian russian serbian slovak
slovenian spanish swahili swedish tamil thai turkish ukrainian urdu vietnamese welsh
ar bg bn ca cs cy da de el en es et fa fi fr ga he hi hr hu id is it ja ko lt lv ms nl no pl
pt ro ru sk sl sr sv sw ta th tr uk ur vi zh
"""
_NAMES, _LANGUAGES = frozenset(_COLUMN_NAMES.split()), frozenset(_LANGUAGE_NAMES.split())
_REGION = re.compile(r"[-_][a-z]{2,4}$")  # of a language code
_MIN_ROWS = 10  # from which a label that occurs once is a name
_MIN_REPEATS = 4.0  # mean number of rows of a label, likewise


def has_names(rows: Sequence[Sequence[str]], label: int | None) -> bool:
    """True if the first of some rows names the columns.

    Its cells are all names of columns in common data sets, or names or codes of languages; or its
    label occurs in no other row, where other labels are repeated.

    Args:
        label: index of the column with the label, if there is one.
    """
    if not rows:
        return False
    cells = [cell.strip().lower() for cell in rows[0]]
    if len({*cells}) == len(cells) and all(map(_is_name, cells)):
        return True
    if label is None or len(rows) <= _MIN_ROWS:
        return False
    counts = Counter(row[label].strip() for row in rows[1:])
    is_repeated = len(rows) - 1 >= _MIN_REPEATS * len(counts)
    first = rows[0][label].strip()
    return is_repeated and first not in counts and not _is_number(first)


def _is_name(cell: str) -> bool:
    language = _REGION.sub("", cell)
    return cell.replace(" ", "_").replace("-", "_") in _NAMES or language in _LANGUAGES


def _is_number(text: str) -> bool:
    return text.lstrip("+-").replace(".", "", 1).isdigit()
