"""The sections `data` and `tokenizer`: sources and filters of the examples, text to ids.

`data.corpora` has several training corpora with weights, tags and held-out files.
"""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from heedful.config.base import Paths, Seed, Strict
from heedful.errors import UserError

Limit = Annotated[int, Field(ge=1)] | None
Share = Annotated[float, Field(gt=0, le=1)] | None
# Held out of `train` where the recipe gives no size: rows, at most a tenth, or a share of texts.
DEFAULT_VALID_ROWS, DEFAULT_TEXT_SHARE = 1_000, 0.1
ScriptNames = str | list[str] | None
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


def _check_names(corpora: dict[str, "Corpus"]) -> dict[str, "Corpus"]:
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


class Filters(Strict):
    """Conditions that each training row must meet; held-out rows are never filtered."""

    min_characters: Limit = Field(
        None,
        description="Fewest characters of a text, or of each side of a pair, without spaces at its "
        "ends; null: no limit.",
    )
    max_characters: Limit = Field(
        None,
        description="Most characters of a text, or of each side of a pair, without spaces at its "
        "ends; null: no limit.",
    )
    min_words: Limit = Field(
        None,
        description="Fewest words of a text, or of each side of a pair, separated by whitespace; "
        "null: no limit.",
    )
    max_words: Limit = Field(
        None,
        description="Most words of a text, or of each side of a pair, separated by whitespace; "
        "null: no limit.",
    )
    max_ratio: Annotated[float, Field(ge=1)] | None = Field(
        None,
        description="Largest ratio of the longer side of a pair to the shorter one, in characters; "
        "null: no limit.",
    )
    different_sides: bool = Field(
        False, description="Drop pairs whose sides are the same text, as in copied sources."
    )
    min_letters: Share = Field(
        None,
        description="Smallest share of letters among the characters of a text, or of each side of "
        "a pair, whitespace excluded; null: no limit.",
    )
    min_script: Share = Field(
        None,
        description="Smallest share of letters in the scripts of its language among the letters of "
        "a text, or of each side of a pair; null: no limit.",
    )
    src_script: ScriptNames = Field(
        None,
        description="Unicode script, or list of scripts, that `min_script` expects in sources or "
        "texts, such as Latin; null: those of `data.src_language`.",
    )
    tgt_script: ScriptNames = Field(
        None,
        description="Unicode script, or list of scripts, that `min_script` expects in targets; "
        "null: those of `data.tgt_language`.",
    )
    language: bool = Field(
        False,
        description="Drop texts, or pairs with a side, that py3langid (extra `langid`) identifies "
        "as another language than that of `data.src_language`, for targets `data.tgt_language`, or "
        "of the corpus; members of a macrolanguage, such as Norwegian, are not distinguished.",
    )
    language_probability: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5,
        description="Smallest probability of another language for which `language` drops a text; "
        "that of short texts is low, so that most are kept.",
    )
    unique: list[Literal["row", "src", "tgt", "text"]] = Field(
        [],
        description="Drop rows that repeat an earlier one in the whole row (row) or in one of its "
        "texts (src, tgt, text), found by a hash of 64 bits; empty: keep repeated rows.",
    )

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        for unit in ("characters", "words"):
            low, high = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if low is not None and high is not None and low > high:
                raise UserError(f"min_{unit} {low} is more than max_{unit} {high}; change one")
        if self.min_script is None and (self.src_script or self.tgt_script):
            raise UserError("src_script and tgt_script have no effect without min_script; set it")
        default = type(self).model_fields["language_probability"].default
        if not self.language and self.language_probability != default:
            raise UserError("language_probability has no effect without language; set it")
        return self


class Generated(Strict):
    """Sizes of the data that the tasks dates, copy, reverse and sort generate."""

    num_train: int = Field(10_000, ge=1, description="Number of generated training examples.")
    num_valid: int = Field(1_000, ge=1, description="Number of generated validation examples.")
    num_test: int = Field(
        1_000, ge=1, description="Number of generated test examples, scored when the run ends."
    )
    num_symbols: int = Field(
        10, ge=2, description="Number of different symbols that sequences are made of."
    )
    min_length: int = Field(10, ge=1, description="Symbols in the shortest sequence.")
    max_length: int = Field(10, ge=1, description="Symbols in the longest sequence.")
    seed: Seed = Field(1, description="Random seed of the generated examples.")


def _check_size(size: int | float | None) -> int | float | None:
    if size is None or 0 < size < 1 or (size >= 1 and isinstance(size, int)):
        return size
    raise UserError(f"give a number of rows, or a share between 0 and 1, not {size}")


Corpora = Annotated[dict[str, Corpus], AfterValidator(_check_names)]
ValidSize = Annotated[int | float | None, AfterValidator(_check_size)]


class Data(Strict):
    """Files or generated examples of the splits, and the selection among them."""

    folder: str | None = Field(
        None,
        description="Folder that relative paths of `train`, `valid` and `test` start from; null: "
        "the current folder.",
    )
    train: Files = Field(
        default_factory=Files,
        description="Files of the training split; a name may also be a folder, for all files in "
        "it, or a pattern such as part-*.gz, for all files that it matches in the order of their "
        "names.",
    )
    valid: Files = Field(
        default_factory=Files,
        description="Files of the validation split; if empty, rows of `train` are held out "
        "(`valid_size`), all rows with one source or none.",
    )
    test: Files = Field(
        default_factory=Files,
        description="Files of the test split, scored when the run ends; if empty, the validation "
        "split is scored.",
    )
    corpora: Corpora = Field(
        {},
        description="Several training corpora in place of `train`, by name: a mapping from names "
        "to sections with the keys of `train` and those of `data.corpora.NAME` below; empty: one "
        "corpus, `train`.",
    )
    temperature: float | None = Field(
        None,
        ge=1,
        description="Share of a corpus in proportion to (rows ** (1 / temperature)) times its "
        "weight, in epochs of the number of rows of all corpora together: above 1 small corpora "
        "are read more often; null: the weights alone.",
    )
    valid_size: ValidSize = Field(
        None,
        description="Validation rows held out of `train` where `valid` is empty: an integer is a "
        "number of rows, a fraction below 1 a share of the rows (of plain texts, the last ones, a "
        f"share of the characters); null: {DEFAULT_VALID_ROWS:,} rows but at most a tenth (of "
        f"plain texts, {DEFAULT_TEXT_SHARE}).",
    )
    drop_held_out: bool | None = Field(
        None,
        description="Drop training rows, and count them, whose source (of labeled rows the texts, "
        "of chats the part before the first answer) is also in `valid` or `test`, apart from "
        "spaces and Unicode forms (NFKC); null: true, but false for plain texts "
        "(`data.train.text`), whose lines recur. The last texts of `train`, where they are the "
        "validation split, are never compared.",
    )
    keep: bool = Field(
        False,
        description="Placeholders, tags, addresses and numbers that both sides of a pair have are "
        "tokens of their own, which the model learns to copy: a translation then has each of them "
        "as often as its source.",
    )
    keep_patterns: list[str] = Field(
        default_factory=list,
        description="With `keep`, regular expressions of further placeholders, such as part "
        "numbers.",
    )
    filters: Filters = Field(
        default_factory=Filters,
        description="Conditions on training rows, applied in the order of these keys before rows "
        "are held out; dropped rows are counted and shown (`heedful prepare --dry-run`).",
    )
    text_unit: Literal["line", "paragraph", "file"] = Field(
        "line",
        description="Extent of one plain text: a line, a paragraph (up to a blank line) or a whole "
        "file.",
    )
    generated: Generated = Field(
        default_factory=Generated, description="Sizes of data that the task generates."
    )
    src_language: str | None = Field(
        None,
        description="Language code of the source or of the texts, such as en, kept in the model's "
        "metadata; null: unknown.",
    )
    tgt_language: str | None = Field(
        None,
        description="Language code of the target, such as de, which selects sacreBLEU's tokenizer; "
        "null: the default tokenizer, 13a.",
    )
    max_length: int = Field(
        128,
        ge=2,
        description="Maximum length of a text or of each side of a pair, in tokens with special "
        "tokens.",
    )
    truncation: Literal["drop", "truncate", "error"] = Field(
        "drop",
        description="Treatment of texts longer than max_length: drop them, truncate them (both are "
        "counted), or stop with an error.",
    )
    workers: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Number of processes that read and tokenize the data, each on one core; null: "
        "the number of cores, or 1 for small files. The prepared data do not depend on it.",
    )

    @model_validator(mode="after")
    def _check_patterns(self) -> Self:
        if self.keep_patterns and not self.keep:
            raise UserError("keep_patterns have no effect without keep; set it")
        for pattern in self.keep_patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UserError(
                    f"keep_patterns: {pattern} is no regular expression: {error}"
                ) from None
        return self


class TokenizerRecipe(Strict):
    """Tokenizer of the run: trained on the training split, or an existing one."""

    path: str | None = Field(
        None,
        description="File or folder of an existing tokenizer; null: one is trained with the keys "
        "below.",
    )
    kind: Literal["bpe", "unigram", "wordpiece", "byte_bpe", "word", "char", "byte"] = Field(
        "bpe", description="Algorithm that splits text into tokens."
    )
    vocab_size: Annotated[int, Field(ge=5, le=2**31 - 1)] | Literal["auto"] | None = Field(
        "auto",
        description="Vocabulary size in entries with special tokens; auto: 8,000, or fewer if the "
        "text has fewer; null: all words, characters or bytes (kinds word, char, byte).",
    )
    sample_size: int = Field(
        1_000_000,
        ge=1,
        description="Number of rows that are chosen at random to train a new tokenizer, without "
        "the held-out ones among them; smaller data are used whole.",
    )
    joint: bool = Field(
        True, description="Share one tokenizer between source and target; false: train one each."
    )
    lowercase: bool = Field(
        False, description="Lowercase all text before tokenization, outputs included."
    )
    keep_whitespace: bool = Field(
        False,
        description="Keep line breaks and runs of spaces as they are; false: each becomes one "
        "space.",
    )
    normalization: Literal["nfc", "nfkc", "none"] = Field(
        "nfkc", description="Unicode normalization form applied before tokenization."
    )
