"""Initialization of a run's model from another one (`init_from`), with a summary of it."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError, format_names
from heedful.files import write_json
from heedful.pipelines import SavedModel
from heedful.progress import PrintLine
from heedful.zoo.saved import VOCABULARY_TENSORS, copy_matching, weights_of

VOCABULARIES = ("vocab_size", "src_vocab_size", "tgt_vocab_size")
SUMMARY_FILE = "init_from.json"
_TOKENIZERS = ("src_tokenizer", "tgt_tokenizer")
_MAX_NAMES = 3  # tensor names in a printed line


def load_matching_weights(
    model: SavedModel, source: SavedModel, print_line: PrintLine, name: str, out: Path | None
) -> list[str]:
    """Copy all tensors with equal name and shape, and print a summary.

    Tensors with a row per vocabulary entry are copied only if both models have the same
    tokenizers, up to new special tokens of this model, whose rows become the mean of the others
    (Hewitt 2021, "Initializing new word embeddings for pretrained language models").
    `init_from.json` in the folder `out` lists all names.

    Args:
        name: the path of `source`.
        out: None: no file is written.

    Returns:
        Names of the tensors that were not copied, or that have rows for new special tokens.

    Raises:
        UserError: no tensor fits.
    """
    pairs = [(getattr(model, side), getattr(source, side)) for side in _TOKENIZERS]
    is_same = all(_extends(own, other) for own, other in pairs)

    def origin(name: str) -> str:
        return name if is_same or not re.fullmatch(VOCABULARY_TENSORS, name) else ""

    loaded, new, unused = copy_matching(model.net, source.net, origin)
    (own, other), extended = pairs[0], list[str]()
    if is_same and own.vocab_size > other.vocab_size:
        extended = _extend_vocabulary(model.net, source.net, other.vocab_size, own.vocab_size)
        loaded, new = sorted({*loaded, *extended}), [name for name in new if name not in extended]
    if not loaded:
        raise UserError(
            f"init_from: no tensor of {name} fits this model; its architecture or sizes differ"
        )
    print_line(f"init_from  {len(loaded)} tensors of {name} loaded")
    if extended:
        added = own.tokens(range(other.vocab_size, own.vocab_size))
        print_line(f"           new special tokens: {format_names(added, str)}")
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
    return [*new, *extended]


@torch.no_grad()
def _extend_vocabulary(net: nn.Module, source: nn.Module, known: int, size: int) -> list[str]:
    """Copy the vocabulary rows of `source`, and set the rows `known` to `size` to their mean.

    Returns the names of these tensors.
    """
    own, others = weights_of(net), weights_of(source)
    names = [name for name in own if name in others and re.fullmatch(VOCABULARY_TENSORS, name)]
    names = [name for name in names if own[name].shape[1:] == others[name].shape[1:]]
    for name in names:
        rows = min(len(own[name]), len(others[name]))
        own[name][:rows] = others[name][:rows]
        own[name][known:size] = others[name][:known].mean(0)
    return names


def _extends(own: Tokenizer, other: Tokenizer) -> bool:
    """True if each text has the same ids with both, up to names of new special tokens."""

    def parts(tokenizer: Tokenizer) -> tuple[dict[str, Any], list[Any]]:
        content = tokenizer.content()
        content.pop("chat_template", None)
        return content, content["tokenizer"].pop("added_tokens")

    (rest, added), (rest_of_other, known) = parts(own), parts(other)
    return rest == rest_of_other and added[: len(known)] == known


def _summary(names: Sequence[str]) -> str:
    """A few tensor names in full, many by their first two parts, each with its count."""
    if len(names) <= _MAX_NAMES:
        return ", ".join(names)
    parts = Counter(".".join(name.split(".")[:2]) for name in names)
    return ", ".join(f"{part} ({count})" for part, count in parts.items())
