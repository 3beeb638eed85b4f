"""Initialization of a run's model from another one (`init_from`), with a summary of it."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from heedful.errors import UserError
from heedful.files import write_json
from heedful.pipelines import SavedModel
from heedful.progress import PrintLine
from heedful.zoo.saved import VOCABULARY_TENSORS, copy_matching

VOCABULARIES = ("vocab_size", "src_vocab_size", "tgt_vocab_size")
SUMMARY_FILE = "init_from.json"
_MAX_NAMES = 3  # tensor names in a printed line


def load_matching_weights(
    model: SavedModel, source: SavedModel, print_line: PrintLine, name: str, out: Path | None
) -> list[str]:
    """Copy all tensors with equal name and shape, and print a summary.

    Tensors with a row per vocabulary entry are copied only if both models have the same
    tokenizers. `init_from.json` in the folder `out` lists all names.

    Args:
        name: the path of `source`.
        out: None: no file is written.

    Returns:
        Names of the tensors that were not copied.

    Raises:
        UserError: no tensor fits.
    """
    own, other = ([m.src_tokenizer.content(), m.tgt_tokenizer.content()] for m in (model, source))

    def origin(name: str) -> str:
        return "" if own != other and re.fullmatch(VOCABULARY_TENSORS, name) else name

    loaded, new, unused = copy_matching(model.net, source.net, origin)
    if not loaded:
        raise UserError(
            f"init_from: no tensor of {name} fits this model; its architecture or sizes differ"
        )
    print_line(f"init_from  {len(loaded)} tensors of {name} loaded")
    for description, names in (
        ("initialized, not loaded", new),
        ("of its tensors not used", unused),
    ):
        if names:
            print_line(f"           {len(names)} {description}: {_summary(names)}")
    if out is not None:
        write_json(out / SUMMARY_FILE, {"loaded": loaded, "initialized": new, "not_used": unused})
        if len(new) > _MAX_NAMES or len(unused) > _MAX_NAMES:
            print_line(f"           all names are in {out / SUMMARY_FILE}")
    sizes, source_sizes = asdict(model.config), asdict(source.config)
    for key in sizes.keys() & source_sizes.keys() - {*VOCABULARIES, "head", "num_labels"}:
        if sizes[key] != source_sizes[key] and "dropout" not in key:
            print_line(
                f"           model.{key} is {sizes[key]}, where {name} has {source_sizes[key]}"
            )
    return new


def _summary(names: Sequence[str]) -> str:
    """A few tensor names in full, many by their first two parts, each with its count."""
    if len(names) <= _MAX_NAMES:
        return ", ".join(names)
    parts = Counter(".".join(name.split(".")[:2]) for name in names)
    return ", ".join(f"{part} ({count})" for part, count in parts.items())
