"""Training data passed as Python objects: lists of rows, or a `datasets.Dataset`.

Each split becomes a JSONL file in the run's folder, named by the run's recipe. Rows from memory are
thus read, checked, held out, cached and resumed as rows from files are.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeAlias

from heedful.config import Recipe
from heedful.data.rows import LABEL, MESSAGES
from heedful.errors import UserError, format_names
from heedful.files import write_text
from heedful.tasks.corpora import SPLITS

TrainingData: TypeAlias = Sequence[Any] | Mapping[str, Sequence[Any]]

DATA_FOLDER = "data"  # in the run's folder
_PAIR = "pair"
_SPLIT_NAMES = {**{name: name for name in SPLITS}, "validation": "valid"}  # the name in `datasets`


@dataclass(frozen=True)
class InMemoryData:
    """Rows from memory as JSONL files of a run, with the recipe that names them.

    Attributes:
        files: the content of each file by its path.
    """

    recipe: Recipe
    files: Mapping[Path, str]

    @classmethod
    def convert(
        cls, recipe: Recipe, row_columns: Sequence[str], data: TrainingData, out: Path
    ) -> "InMemoryData":
        """Convert `data` for a run in the folder `out`, without writing it.

        Args:
            row_columns: `Task.row_columns` of the recipe's task.
            data: the rows to train on; or a mapping from `train`, `valid` (or `validation`) and
                `test` to rows. Rows are a list, a tuple or a `datasets.Dataset`. A row is a text,
                where the task has one column; a tuple with an item for each column, or (text,
                second text, label) for labeled pairs; a list of messages or (prompt, response),
                where they are chats; or a mapping from column names, which are
                the `*_field` keys of the recipe's `data.train`, by default the names in
                `row_columns`. A label is a text, a number, a boolean, or a list of
                these; class indices of a `datasets.Dataset` become class names.

        Raises:
            UserError: data of another type; a row of another form (with its number); a task that
                generates its data; a recipe that names files for the same split.
        """
        if not row_columns:
            raise UserError(f"the task {recipe.task} reads no rows from memory; leave out data")
        splits = dict(data) if isinstance(data, Mapping) else {"train": data}
        unknown = [str(name) for name in splits if name not in _SPLIT_NAMES]
        if unknown or "train" not in splits:
            problem = f"unknown split {unknown[0]!r}" if unknown else "no split 'train'"
            raise UserError(f"data: {problem}; a mapping has rows for train, valid and test")
        if recipe.data.corpora:
            raise UserError(
                "the recipe names files by data.corpora, and data has rows; leave out one of them"
            )
        sections, files = {}, {}
        for name, rows in splits.items():
            split = _SPLIT_NAMES[name]
            section = getattr(recipe.data, split)
            if section.paths():
                raise UserError(
                    f"the recipe names files for data.{split}, and data has rows for it; leave "
                    "out one of them"
                )
            path = (out / DATA_FOLDER / f"{split}.jsonl").absolute()
            columns, content = _convert_split(recipe, row_columns, f"data, {split}", rows)
            keys: dict[str, Any] = {f"{column}_field": None for column in row_columns}
            if _PAIR in columns:
                keys[f"{_PAIR}_field"] = _PAIR
            if MESSAGES in columns:
                keys |= dict.fromkeys(f"{name}_field" for name in _chat_fields())
            keys["text" if tuple(columns) == ("text",) else "file"] = str(path)
            sections[split] = section.model_copy(update=keys)
            files[path] = content
        data_keys = recipe.data.model_copy(update=sections)
        # `expect` has the score ranges of the recipe's own data.
        return cls(recipe.model_copy(update={"data": data_keys, "expect": []}), files)

    def write(self) -> None:
        """Write the files."""
        for path, content in self.files.items():
            path.parent.mkdir(exist_ok=True)
            write_text(path, content)

    def check_unchanged(self) -> None:
        """Raise UserError where a file of a run to resume has other rows."""
        for path, content in self.files.items():
            if not path.is_file() or path.read_bytes() != content.encode():
                raise UserError(
                    f"data has other rows than {DATA_FOLDER}/{path.name} of the run, with which it "
                    "was started; resume with the same rows, or start a new run"
                )

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """In the block a UserError names rows in place of the files, which are not the caller's:
        `data, valid, row 3`."""
        try:
            yield
        except UserError as error:
            message = str(error)
            for path in self.files:
                split, file = f"data, {path.stem}", re.escape(str(path))
                message = re.sub(rf"{file}, line (\d+)", rf"{split}, row \1", message)
                message = message.replace(str(path), split)
            raise UserError(message) from None


def _convert_split(
    recipe: Recipe, row_columns: Sequence[str], where: str, rows: Sequence[Any]
) -> tuple[Sequence[str], str]:
    """The columns of a split, and its rows as JSON lines."""
    is_dataset = hasattr(rows, "column_names")
    if not is_dataset and not isinstance(rows, list | tuple):
        raise UserError(
            f"{where}: rows must be a list or a datasets.Dataset, not {type(rows).__name__}; "
            "files are named in the recipe"
        )
    if not len(rows):
        raise UserError(f"{where}: there are no rows; give at least one")
    if MESSAGES in row_columns:
        chats = [_chat(recipe, row, f"{where}, row {i}") for i, row in enumerate(rows, 1)]
        return row_columns, "".join(f"{line}\n" for line in chats)
    names = {column: getattr(recipe.data.train, f"{column}_field") for column in row_columns}
    columns = row_columns
    if LABEL in row_columns:
        pair_name = recipe.data.train.pair_field
        first = rows[0]
        is_pair = not isinstance(first, str | Mapping) and isinstance(first, Sequence)
        if pair_name is not None or (is_pair and len(first) == len(row_columns) + 1):
            columns = ("text", _PAIR, LABEL)
            names[_PAIR] = pair_name
    keys = {column: str(names[column] or column) for column in columns}
    features = getattr(rows, "features", None) or {}
    feature = features.get(keys.get(LABEL))
    classes = getattr(getattr(feature, "feature", feature), "names", None)  # of a list: its items'
    lines = []
    for number, row in enumerate(rows, 1):
        cells = _cells(row, keys, f"{where}, row {number}", classes)
        lines.append(json.dumps(cells, ensure_ascii=False) + "\n")
    return columns, "".join(lines)


def _cells(
    row: Any, keys: Mapping[str, str], where: str, classes: Sequence[str] | None
) -> dict[str, Any]:
    """The cells of a row by column; `keys`: the name of each column in a row that is a mapping."""
    if isinstance(row, Mapping):
        values = [_lookup(row, key, where) for key in keys.values()]
    elif isinstance(row, str):
        values = [row]
    elif isinstance(row, list | tuple):
        values = [*row]
    else:
        raise UserError(
            f"{where}: a row is a {'text' if len(keys) == 1 else 'tuple'} or a mapping, not "
            f"{type(row).__name__}"
        )
    if len(values) != len(keys):
        raise UserError(
            f"{where}: {len(values)} items, but a row has {len(keys)}: {', '.join(keys)}"
        )
    cells: dict[str, Any] = {}
    for column, value in zip(keys, values, strict=True):
        if column == LABEL and isinstance(value, list | tuple):
            cells[column] = [_label(item, classes, where) for item in value]
        elif column == LABEL and isinstance(value, Real):
            cells[column] = _label(value, classes, where)
        elif isinstance(value, str):
            cells[column] = value
        else:
            raise UserError(f"{where}: {column} must be a text, not {type(value).__name__}")
    return cells


def _chat_fields() -> tuple[str, ...]:
    from heedful.data.chats import ChatFields  # which only chats need

    return ChatFields._fields


def _chat(recipe: Recipe, row: Any, where: str) -> str:
    """A chat as a line of JSON: of a list of messages, a pair of texts, or a mapping."""
    files = recipe.data.train
    if isinstance(row, Mapping):
        names = {key: getattr(files, f"{key}_field") or key for key in _chat_fields()}
        cells = {key: row[name] for key, name in names.items() if name in row}
        cells = cells or dict(row)  # of other names, which the reader of the file reports
    elif isinstance(row, tuple) and len(row) == 2 and all(isinstance(text, str) for text in row):
        cells = {"prompt": row[0], "response": row[1]}
    elif isinstance(row, list | tuple):
        cells = {MESSAGES: row}
    else:
        raise UserError(
            f"{where}: a chat is a mapping, a list of messages, or a pair of texts, not "
            f"{type(row).__name__}"
        )
    try:
        return json.dumps(cells, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {error}; give texts") from None


def _label(value: Any, classes: Sequence[str] | None, where: str) -> Any:
    """A label, or an item of a list of labels, as JSON or as the name of its class."""
    if isinstance(value, bool | str):
        return value
    if not isinstance(value, Real):
        raise UserError(f"{where}: an item of label must be a text or a number, not {value!r}")
    if not isinstance(value, Integral):
        return float(value)
    number = int(value)
    if classes is None:
        return number
    if not 0 <= number < len(classes):
        raise UserError(f"{where}: label {number} has no class name; leave the row out")
    return str(classes[number])


def _lookup(row: Mapping[str, Any], key: str, where: str) -> Any:
    """The value of `key` in a row; `a.b` is the value of b in the mapping a."""
    value: Any = row
    for part in [key] if key in row else key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise UserError(
                f"{where}: no column {key!r} among {format_names(list(map(str, row)))}; set the "
                "recipe's data.train.*_field to the column's name"
            )
        value = value[part]
    return value
