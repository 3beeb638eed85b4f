"""`heedful tokenizer`: train a tokenizer, and encode and decode texts with one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from heedful.cli.flags import Json, leave_out
from heedful.cli.guard import add_command
from heedful.cli.help import IN_OUT, new_group
from heedful.cli.lines import InputOutput, check_plain, json_line, line_writer
from heedful.cli.shared import print_json
from heedful.errors import UserError

app = new_group("Train a tokenizer, or encode and decode texts with one.")
Kind = Literal["bpe", "unigram", "wordpiece", "byte_bpe", "word", "char", "byte"]
_DEFAULT_SIZE = 8_000  # as in a recipe, where a text may give fewer
TokenizerPath = Annotated[
    Path,
    typer.Argument(
        metavar="TOKENIZER", help="Tokenizer file, model directory, or Hugging Face directory."
    ),
]
RowJson = Annotated[
    bool,
    typer.Option(
        "--json", help="Print a line of JSON per text, with its ids.", rich_help_panel=IN_OUT
    ),
]
Side = Annotated[
    Literal["source", "target"],
    typer.Option(metavar="source|target", help="Tokenizer of a model with two."),
]


@dataclass(frozen=True)
class IdLines(InputOutput):
    """Input and output of a command that maps lists of ids to texts."""

    texts: list[str] | None = typer.Argument(
        None,
        metavar="IDS",
        help="Ids of a text, separated by spaces, as one argument.",
        show_default="lines of --input or stdin",
    )


def train(
    files: list[Path] = typer.Argument(..., metavar="FILE", help="Texts, one per line."),
    output: Path = typer.Option(
        ..., "--output", "-o", metavar="FILE", help="New tokenizer file.", rich_help_panel=IN_OUT
    ),
    kind: Kind = typer.Option(
        "bpe",
        metavar="KIND",
        help="bpe, unigram, wordpiece, byte_bpe, word, char or byte.",
    ),
    vocab_size: int | None = typer.Option(
        None,
        min=5,
        metavar="N",
        help="Vocabulary size, special tokens included.",
        show_default=f"{_DEFAULT_SIZE:,} or fewer; byte: 256 bytes",
    ),
    lowercase: bool = typer.Option(False, "--lowercase", help="Lowercase all text."),
    keep_whitespace: bool = typer.Option(
        False, "--keep-whitespace", help="Keep line breaks and runs of spaces."
    ),
    normalization: Literal["nfc", "nfkc", "none"] = typer.Option(
        "nfkc", metavar="nfc|nfkc|none", help="Unicode normalization of the text."
    ),
    json: Json = False,
) -> None:
    """Train a tokenizer on the lines of text files, plain, gzip or zstd.

    A recipe uses it by tokenizer.path. For one vocabulary of two languages give the files of both.

    Example: heedful tokenizer train train.en train.de -o tokenizer.json
    """
    from heedful.data.text_files import read_lines
    from heedful.data.tokenizer import train_tokenizer

    for file in files:
        check_plain(file)
    default_size = None if kind == "byte" else _DEFAULT_SIZE
    tokenizer = train_tokenizer(
        [line for file in files for line in read_lines(file)],
        kind=kind,
        vocab_size=default_size if vocab_size is None else vocab_size,
        or_fewer=vocab_size is None,
        lowercase=lowercase,
        normalization=normalization,
        keep_whitespace=keep_whitespace,
    )
    tokenizer.save(output)
    if json:
        print_json({"path": str(output), "kind": kind, "vocab_size": tokenizer.vocab_size})
    else:
        typer.echo(f"{output}: {kind}, {tokenizer.vocab_size:,} entries")


@leave_out("truncate", "strict")
def encode(
    *,
    tokenizer: TokenizerPath,
    in_out: InputOutput,
    side: Side = "source",
    pieces: bool = typer.Option(False, "--pieces", help="Print pieces in place of ids."),
    specials: bool = typer.Option(
        False, "--specials", help="Add the special tokens around a text."
    ),
    json: RowJson = False,
) -> None:
    """Print the token ids of each text, separated by spaces.

    Example: heedful tokenizer encode runs/translation 'Hello.' --pieces
    """
    opened = _open(tokenizer, side)
    with line_writer(in_out.output) as write:
        for chunk in in_out.chunks():
            for text, ids in zip(chunk, opened.encode_batch(chunk), strict=True):
                row = opened.add_special_tokens(ids) if specials else ids
                names = opened.tokens(row) if pieces or json else []
                if json:
                    write(json_line(text=text, ids=row, pieces=names))
                else:
                    write(" ".join(names if pieces else map(str, row)))


@leave_out("truncate", "strict")
def decode(
    *,
    tokenizer: TokenizerPath,
    in_out: IdLines,
    side: Side = "source",
    specials: bool = typer.Option(False, "--specials", help="Print special tokens by name."),
    json: RowJson = False,
) -> None:
    """Print the text of each list of ids, which are separated by spaces.

    Example: heedful tokenizer decode runs/translation '52 17 6'
    """
    opened, number = _open(tokenizer, side), 0
    with line_writer(in_out.output) as write:
        for chunk in in_out.chunks():
            rows = [
                _ids(line, number + index, opened.vocab_size) for index, line in enumerate(chunk, 1)
            ]
            number += len(chunk)
            for row, text in zip(
                rows, opened.decode_batch(rows, keep_specials=specials), strict=True
            ):
                write(json_line(ids=row, text=text) if json else text)


_DIGITS = 18  # of a number that is above every id


def _ids(line: str, number: int, vocab_size: int) -> list[int]:
    words = line.split()
    wrong = next((word for word in words if not (word.isascii() and word.isdigit())), None)
    if wrong is not None:
        raise UserError(f"line {number}: {wrong} is no token id; give numbers separated by spaces")
    # Python refuses numbers of thousands of digits.
    ids = [int(word.lstrip("0")[:_DIGITS] or "0") for word in words]
    if ids and max(ids) >= vocab_size:
        raise UserError(
            f"line {number}: {max(ids)} is not a token id of a vocabulary of {vocab_size:,}"
        )
    return ids


def _open(path: Path, side: str) -> Any:
    """The tokenizer of a file, or of one side of a model directory."""
    from heedful.data.tokenizer import Tokenizer
    from heedful.files import read_object
    from heedful.pipelines.loading import tokenizer_files

    config = path / "config.json"
    if path.is_dir() and config.is_file() and "heedful" in read_object(config):
        files = tokenizer_files(path)
        if not files:
            raise UserError(f"{path} is a model without a tokenizer")
        return Tokenizer.load(files[0 if side == "source" else -1])
    from heedful.data.hf_tokenizers import open_tokenizer

    return open_tokenizer(path, "target" if side == "target" else "source")


add_command(app, "train", train)
add_command(app, "encode", encode)
add_command(app, "decode", decode)
