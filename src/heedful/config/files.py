"""Files of one split of the data: `data.train`, `data.valid`, `data.test`, and of a corpus."""

from pydantic import Field

from heedful.config.base import Paths, Strict

FieldName = int | str | None
_TABLES = ".tsv, .jsonl, .parquet or a folder of Hugging Face `datasets`"


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
        "pairs are read from `file`.",
    )
    file: Paths = Field(
        None,
        description="Table, or list of tables, of sentence pairs, labeled texts or chats "
        f"({_TABLES}; chats not in .tsv); null: none.",
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
        description="The first line of a .tsv whose columns are given by number, or not at all, "
        "names the columns and is left out; false: it is a row; null: it is left out if it has "
        "names such as src, text, label, de or German, or a label that no other row has.",
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
