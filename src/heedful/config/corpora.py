"""Files of a split (`data.train`, `data.valid`, `data.test`), and `data.corpora`: several training
corpora with weights, tags and held-out files."""

import re
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from heedful.config.base import Paths, Strict
from heedful.errors import UserError

FieldName = int | str | None
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_TAG = re.compile(r"\S+")
_TABLES = ".tsv, .csv, .jsonl, .parquet or a folder of Hugging Face `datasets`"
_PAIRS = ".tmx, .xliff, .xlf, .po or .mo with the languages of the run"


class Files(Strict):
    """Files of one split; text files may be compressed (.gz, .zst)."""

    src: Paths = Field(
        None,
        description="File, or list of files, with one source sentence per line; null: pairs are "
        "read from `file`.",
    )
    tgt: Paths = Field(
        None,
        description="File, or list of files, with the target of the same line of `src`; null: "
        "pairs are read from `file`. A .srt or .vtt file beside that of `src` is aligned by time.",
    )
    file: Paths = Field(
        None,
        description="Table, or list of tables, of sentence pairs, labeled texts or chats "
        f"({_TABLES}; chats not in .tsv and .csv; of sentence pairs also {_PAIRS}); null: none.",
    )
    text: Paths = Field(
        None,
        description=f"File, or list of files, of texts (plain, {_TABLES}); null: none.",
    )
    src_field: FieldName = Field(
        None,
        description="Column of `file` with the source, by number from 1 or by name; null: the "
        "first column, or `src`.",
    )
    tgt_field: FieldName = Field(
        None,
        description="Column of `file` with the target, by number from 1 or by name; null: the "
        "second column, or `tgt`.",
    )
    text_field: FieldName = Field(
        None,
        description="Column of `file` or of tables in `text` with the text, by number from 1 or by "
        "name; null: the first column, or `text`.",
    )
    label_field: FieldName = Field(
        None,
        description="Column of `file` with the label (`objective.problem`), by number from 1 or by "
        "name; null: the second column, or `label`.",
    )
    pair_field: FieldName = Field(
        None,
        description="Column of `file` with a second text, by number from 1 or by name; null: each "
        "example has one text.",
    )

    header: bool | None = Field(
        None,
        description="The first line of a .tsv or .csv whose columns are given by number, or not at "
        "all, names the columns and is left out; false: it is a row; null: it is left out if it "
        "has names such as src, text, label, de or German, or a label that no other row has.",
    )
    messages_field: str | None = Field(
        None,
        description="Key or column of `file` with the list of messages of a chat, each with role "
        "and content; null: `messages`.",
    )
    prompt_field: str | None = Field(
        None,
        description="Key or column of `file` with the prompt of a row without messages; null: "
        "`prompt`.",
    )
    response_field: str | None = Field(
        None,
        description="Key or column of `file` with the response to the prompt; null: `response`.",
    )

    def paths(self) -> list[str]:
        """All files and folders that are named."""
        named = (self.src, self.tgt, self.file, self.text)
        lists = ([paths] if isinstance(paths, str) else paths or [] for paths in named)
        return [path for paths in lists for path in paths]


WeightValue = float | list[tuple[int, float]]


def _check_weight(weight: WeightValue) -> WeightValue:
    changes = weight if isinstance(weight, list) else [(0, weight)]
    firsts = [first for first, _ in changes]
    if not changes or firsts[0] != 0 or firsts != sorted(set(firsts)):
        raise UserError(
            f"weights of a list begin at epoch 0 and ascend, as [[0, 1], [5, 0.2]], not {changes}"
        )
    if min(value for _, value in changes) < 0 or not any(value for _, value in changes):
        raise UserError(f"a corpus of weight {weight} is never read; raise it, or leave it out")
    return weight


def _check_tag(tag: str | None) -> str | None:
    if tag is not None and not _TAG.fullmatch(tag):
        raise UserError(f"a tag is one token without spaces, as <2de>, not {tag!r}")
    return tag


def check_names(corpora: dict[str, "Corpus"]) -> dict[str, "Corpus"]:
    """The corpora; raises UserError for a name that cannot be part of a dotted key."""
    for name in corpora:
        if not _NAME.fullmatch(name):
            raise UserError(f"a corpus has a name of letters, digits, _ and -, not {name!r}")
    return corpora


Weight = Annotated[WeightValue, AfterValidator(_check_weight)]
Tag = Annotated[str | None, AfterValidator(_check_tag)]


class Corpus(Files):
    """One corpus of `data.corpora`: the keys of `data.train` for its files, and these."""

    valid: Files = Field(
        default_factory=Files,
        description="Files of its validation rows, with the keys of `data.train`; if no corpus has "
        "any, rows of all corpora are held out (`data.valid_size`).",
    )
    test: Files = Field(
        default_factory=Files,
        description="Files of its test rows, with the keys of `data.train`, scored for each corpus "
        "when the run ends.",
    )
    weight: Weight = Field(
        1.0,
        description="Passes over the corpus in an epoch: 2 reads each row twice, 0.25 another "
        "quarter of the rows in each epoch; a list of [epoch, weight] changes it from these epochs "
        "on (the first is 0).",
    )
    src_tag: Tag = Field(
        None,
        description="Token put before each source, after `tgt_tag`, that marks the source, such as "
        "`<bt>` for back-translated ones (translation); null: none.",
    )
    tgt_tag: Tag = Field(
        None,
        description="Token put before each source that names the language of the target, such as "
        "`<2de>`, for models with several target languages (translation); null: none.",
    )
    src_language: str | None = Field(
        None,
        description="Language code of its sources or texts; null: that of `data.src_language`.",
    )
    tgt_language: str | None = Field(
        None,
        description="Language code of its targets, by which `heedful translate --tgt-lang` finds "
        "`tgt_tag` (translation); null: that of `data.tgt_language`.",
    )

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if not self.paths():
            raise UserError("names no files of training rows: give src and tgt, file or text")
        return self

    def weights(self) -> list[tuple[int, float]]:
        """The weight from each epoch on at which it changes."""
        return self.weight if isinstance(self.weight, list) else [(0, self.weight)]
