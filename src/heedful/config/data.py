"""The sections `data` and `tokenizer`: sources and filters of the examples, text to ids."""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from heedful.config.base import Seed, Strict
from heedful.config.corpora import Corpus, Files, check_names
from heedful.errors import UserError

Limit = Annotated[int, Field(ge=1)] | None
Share = Annotated[float, Field(gt=0, le=1)] | None
# Held out of `train` where the recipe gives no size: rows, at most a tenth, or a share of texts.
DEFAULT_VALID_ROWS, DEFAULT_TEXT_SHARE = 1_000, 0.1
ScriptNames = str | list[str] | None


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


Corpora = Annotated[dict[str, Corpus], AfterValidator(check_names)]
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
        description="Number of training rows that a new tokenizer is trained on, chosen at random; "
        "smaller data are used whole.",
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
