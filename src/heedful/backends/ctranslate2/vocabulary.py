"""The vocabulary of a model for CTranslate2, and the tokens that a shortlist allows."""

import json
from dataclasses import dataclass
from pathlib import Path

from heedful.backends.shortlist import Shortlist
from heedful.data.tokenizer import Tokenizer
from heedful.files import write_text

VOCABULARY_MAP = "vmap.txt"  # of a shortlist


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model by id, and the ids with a role (None: the model has none).

    Attributes:
        source, target: equal where the model has a single vocabulary.
        start: first id of an encoder-decoder's target.
        adds_end: CTranslate2 appends EOS to each source.
    """

    source: list[str]
    target: list[str]
    start: int | None = None
    end: int | None = None
    unknown: int | None = None
    adds_end: bool = False


def names_of(tokenizer: Tokenizer | None, count: int) -> list[str]:
    """A unique name for each of `count` ids: the tokenizer's piece, or the id as text."""
    pieces = [f"<id{i}>" if tokenizer is None else tokenizer.piece(i) for i in range(count)]
    first: dict[str, int] = {}
    return [p if first.setdefault(p, i) == i else f"{p}<id{i}>" for i, p in enumerate(pieces)]


def read_vocabulary(directory: Path, stem: str) -> list[str]:
    """The tokens of a converted model by id: of the file `stem`, or of a shared one."""
    for name in (stem, "shared_vocabulary", "vocabulary"):
        path = directory / f"{name}.json"
        if path.is_file():
            tokens: list[str] = json.loads(path.read_text(encoding="utf-8"))
            return tokens
    return []


def write_vocabulary_map(shortlist: Shortlist, directory: Path) -> None:
    """Write a shortlist into a converted model; raises UserError for tokens with blanks."""
    sides = (read_vocabulary(directory, f"{side}_vocabulary") for side in ("source", "target"))
    write_text(directory / VOCABULARY_MAP, "".join(shortlist.vocabulary_map(*sides)))
