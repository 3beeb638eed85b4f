"""Starting a run from another model (`init_from`): what is taken over, and what is said of it."""

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
NAMES = "init_from.json"
_LISTED = 3  # names that a line lists


def load_matching_weights(
    model: SavedModel, source: SavedModel, print_line: PrintLine, name: str, out: Path
) -> None:
    """Copy what fits, tables of words only where both have the same words, and say what did.

    All names of tensors stand in `out/init_from.json`.

    Raises:
        UserError: nothing fits.
    """
    ours, theirs = (
        [each.src_tokenizer.content(), each.tgt_tokenizer.content()] for each in (model, source)
    )

    def origin(name: str) -> str:
        return "" if ours != theirs and re.fullmatch(VOCABULARY_TENSORS, name) else name

    loaded, new, unused = copy_matching(model.net, source.net, origin)
    if not loaded:
        raise UserError(
            f"init_from: no tensor of {name} fits this model; its architecture or sizes differ"
        )
    print_line(f"init_from  {len(loaded)} tensors of {name} loaded")
    for what, names in (("drawn anew, not loaded", new), ("of it not used", unused)):
        if names:
            print_line(f"           {len(names)} {what}: {_summary(names)}")
    write_json(out / NAMES, {"loaded": loaded, "drawn_anew": new, "not_used": unused})
    if len(new) > _LISTED or len(unused) > _LISTED:
        print_line(f"           all names are in {out / NAMES}")
    sizes, its = asdict(model.config), asdict(source.config)
    for key in sizes.keys() & its.keys() - {*VOCABULARIES, "head", "num_labels"}:
        if sizes[key] != its[key] and "dropout" not in key:
            print_line(f"           model.{key} is {sizes[key]}, where {name} has {its[key]}")


def _summary(names: Sequence[str]) -> str:
    """A few names as they are, many by the parts of the net that they are of."""
    if len(names) <= _LISTED:
        return ", ".join(names)
    parts = Counter(".".join(name.split(".")[:2]) for name in names)
    return ", ".join(f"{part} ({count})" for part, count in parts.items())
