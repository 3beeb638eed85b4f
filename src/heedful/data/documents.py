"""Running text in: documents from files, a tail of them held out, and their ids on disk."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from fractions import Fraction
from math import floor
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Int64, Integer

from heedful.data.corpus import share
from heedful.data.lines import is_jsonl, read_lines, read_objects, read_whole, text_of
from heedful.data.store import IdStore, joined, open_ids, pack_ids, write_store
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.files import read_json, write_json

Unit: TypeAlias = Literal["line", "paragraph", "file"]

_CHUNK = 2**21  # characters that are tokenised at a time, unless one document is longer


@dataclass(frozen=True)
class Origins:
    """Where each text was read: the file, and the line on which it begins."""

    names: tuple[str, ...]
    files: Int64[np.ndarray, " N"]  # index into `names`
    lines: Int64[np.ndarray, " N"]  # counted from 1

    @classmethod
    def of(cls, names: Sequence[str], places: Sequence[tuple[int, int]]) -> "Origins":
        """From the pair (file, line) of each text."""
        table = np.array(places, dtype=np.int64).reshape(-1, 2)
        return cls(tuple(names), table[:, 0].copy(), table[:, 1].copy())

    def place(self, index: int) -> str:
        """Where text `index`, counted from 0, was read."""
        return f"{self.names[self.files[index]]}, line {self.lines[index]}"

    def select(self, indices: Integer[np.ndarray, " n"]) -> "Origins":
        """The origins of some of the texts, in that order."""
        return Origins(self.names, self.files[indices], self.lines[indices])


@dataclass(frozen=True)
class TextReport:
    """What was read, what was left out, and what the tokenizer did not know."""

    num_lines: int
    num_kept: int
    num_empty: int = 0  # dropped: a unit with nothing but whitespace
    num_dropped: int = 0  # over-long
    num_truncated: int = 0  # over-long
    num_tokens: int = 0  # of the text alone: no marks
    num_unknown: int = 0
    origins: Origins | None = field(default=None, repr=False, compare=False)

    def place(self, index: int) -> str:
        """Where text `index`, counted from 0 over the kept ones, was read."""
        return f"text {index + 1}" if self.origins is None else self.origins.place(index)

    def summary(self) -> str:
        """One line for a person."""
        parts = [f"{self.num_lines:,} lines read, {self.num_kept:,} texts kept"]
        if self.num_empty:
            parts.append(f"{self.num_empty:,} dropped as empty")
        if self.num_dropped:
            parts.append(f"{self.num_dropped:,} dropped as too long")
        if self.num_truncated:
            parts.append(f"{self.num_truncated:,} cut to the longest allowed")
        if self.num_tokens:
            parts.append(f"unknown tokens: {share(self.num_unknown, self.num_tokens)}")
        return "; ".join(parts)


def read_documents(
    paths: Sequence[Path],
    unit: Unit,
    *,
    text_field: str = "text",
    format: Literal["text", "jsonl"] | None = None,
) -> tuple[list[str], TextReport]:
    r"""The documents of some files, one file after the other, with an account of them.

    Units of plain text: "line"; "paragraph", the lines between blank ones joined by "\n"; "file",
    all of it, character by character as it stands (a byte order mark at the start apart). A blank
    line is one of nothing but whitespace. In a JSONL file each object is a document, whatever the
    unit. Empty ones are left out and counted: blank lines under "line", empty texts of JSONL.

    Args:
        text_field: the key of the text in a JSONL file.
        format: of all files. By default a file named `.jsonl` or `.jsonl.gz` is one of JSONL, any
            other is plain text. Either may be gzip.

    Raises:
        UserError: no file; one that cannot be read, holds no text at all, is not UTF-8 (with the
            line), or is damaged; a line of JSONL that is no object with a text.
    """
    if unit not in ("line", "paragraph", "file"):
        raise UserError(f"unknown unit {unit!r}; choose line, paragraph or file")
    if not paths:
        raise UserError("no file is named; name at least one text file")
    documents: list[str] = []
    places: list[tuple[int, int]] = []
    num_lines = num_empty = 0
    for number, path in enumerate(paths):
        before = len(documents)
        jsonl = is_jsonl(path) if format is None else format == "jsonl"
        found = _of_jsonl(path, text_field) if jsonl else _UNITS[unit](path)
        for text, line, size in found:
            num_lines += size
            if text.strip():
                documents.append(text)
                places.append((number, line))
            else:
                num_empty += jsonl or unit == "line"
        if len(documents) == before:
            raise UserError(f"{path} holds no text; leave it out, or name another file")
    origins = Origins.of([str(path) for path in paths], places)
    return documents, TextReport(num_lines, len(documents), num_empty, origins=origins)


def split_tail(
    documents: Sequence[str], fraction: float, unit: Unit
) -> tuple[list[str], list[str]]:
    """The documents to train on, and the last `fraction` of all CHARACTERS to hold out.

    The border stands where tiny Shakespeare is split 90/10 by convention: `fraction` of n
    characters leaves the first floor(n x (1 - fraction)) to train on, `fraction` read as the
    decimal number that it is written as. Where the border falls inside a document, one of unit
    "file" is cut there; any other goes whole to the side that has the more of it (to training
    if both have as much).

    Raises:
        UserError: `fraction` is not between 0 and 1, or one side would be empty.
    """
    if not 0 < fraction < 1:
        raise UserError(f"the fraction to hold out is {fraction}; set it between 0 and 1")
    ends = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    border = floor(int(ends[-1]) * (1 - Fraction(str(fraction))))
    index = int(np.searchsorted(ends, border, side="right")) - 1  # the document of the border
    inside = border - int(ends[index])
    train, held_out = list(documents[:index]), list(documents[index:])
    if inside and unit == "file":
        train.append(held_out[0][:inside])
        held_out[0] = held_out[0][inside:]
    elif inside and 2 * inside >= len(held_out[0]):
        train.append(held_out.pop(0))
    if not train or not held_out:
        side = "hold out" if train else "train on"
        raise UserError(
            f"a fraction of {fraction} of {len(documents)} documents leaves none to {side};"
            " change it, or give more text"
        )
    return train, held_out


@dataclass(frozen=True)
class TokenCounts:
    """How large a text is by each measure that a loss is told in.

    Characters (code points), bytes (UTF-8) and words (between whitespace) are those of the text
    as it was read, before the tokenizer normalised it. With L the sum of the loss in nats, bits
    per character are L / ln 2 / num_characters, so per byte; word perplexity is
    exp(L / num_words).
    """

    num_documents: int
    num_characters: int
    num_bytes: int
    num_words: int
    num_tokens: int  # of the text alone: no marks
    num_unknown: int
    marks: bool  # BOS and EOS around each document

    @property
    def num_stored(self) -> int:
        """The tokens of the store, marks counted."""
        return self.num_tokens + 2 * self.num_documents * self.marks


def encode_documents(
    documents: Sequence[str], tokenizer: Tokenizer, path: Path, *, marks: bool
) -> TokenCounts:
    """Tokenise documents into a store at `path`, one sequence each, its counts beside it.

    Texts become ids some at a time: besides the ids, packed, memory is taken by one chunk, or by
    the longest document, which is tokenised whole because no cut of it is sure to be one between
    tokens.

    Args:
        marks: store `bos ids... eos` instead of the bare ids.

    Raises:
        UserError: the files cannot be written, or no token comes of the text.
    """
    chunks: list[IdStore] = []
    num_unknown = 0
    for chunk in _chunks(documents):
        encoded = tokenizer.encode_batch(chunk)
        num_unknown += sum(ids.count(tokenizer.unk_id) for ids in encoded)
        if marks:
            encoded = [[tokenizer.bos_id, *ids, tokenizer.eos_id] for ids in encoded]
        chunks.append(pack_ids(encoded, tokenizer.vocab_size))
    store = joined(chunks)
    counts = TokenCounts(
        num_documents=len(documents),
        num_characters=sum(map(len, documents)),
        num_bytes=sum(len(text.encode()) for text in documents),
        num_words=sum(len(text.split()) for text in documents),
        num_tokens=len(store.ids) - 2 * len(documents) * marks,
        num_unknown=num_unknown,
        marks=marks,
    )
    if not counts.num_tokens:
        raise UserError("the tokenizer makes no token of the text; give other text")
    # Gone before new ids have their name, so that no counts ever stand beside other ids.
    _counts_path(path).unlink(missing_ok=True)
    write_store(path, store)
    write_json(_counts_path(path), asdict(counts))
    return counts


def open_documents(path: Path) -> tuple[IdStore, TokenCounts]:
    """Open what `encode_documents` wrote.

    Raises:
        UserError: a file is missing or damaged, or the counts are not those of the store.
    """
    store, content = open_ids(path), read_json(_counts_path(path))
    expected = {one.name: one.type for one in fields(TokenCounts)}
    if not (
        isinstance(content, dict)
        and content.keys() == expected.keys()
        and all(type(content[name]) is kind for name, kind in expected.items())
    ):
        raise UserError(f"{_counts_path(path)} is not the counts of a text; encode again")
    counts = TokenCounts(**content)
    if (counts.num_documents, counts.num_stored) != (len(store), len(store.ids)):
        raise UserError(f"{_counts_path(path)} counts another text than the ids; encode again")
    return store, counts


class _Found(NamedTuple):
    text: str
    line: int  # where it begins
    size: int  # lines read for it


def _of_jsonl(path: Path, text_field: str) -> Iterator[_Found]:
    for number, entry in read_objects(path):
        text = "" if entry is None else text_of(entry, text_field, f"{path}, line {number}")
        yield _Found(text, number, 1)


def _of_lines(path: Path) -> Iterator[_Found]:
    for number, line in enumerate(read_lines(path), 1):
        yield _Found(line, number, 1)


def _of_paragraphs(path: Path) -> Iterator[_Found]:
    lines: list[str] = []
    number = 0
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            lines.append(line)
            continue
        yield _Found("\n".join(lines), number - len(lines), len(lines) + 1)
        lines = []
    if lines:
        yield _Found("\n".join(lines), number - len(lines) + 1, len(lines))


def _of_file(path: Path) -> Iterator[_Found]:
    text, num_lines = read_whole(path)
    yield _Found(text, 1, num_lines)


_UNITS = {"line": _of_lines, "paragraph": _of_paragraphs, "file": _of_file}


def _chunks(documents: Sequence[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    size = 0
    for text in documents:
        if chunk and size + len(text) > _CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(text)
        size += len(text)
    if chunk:
        yield chunk


def _counts_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.counts.json")
