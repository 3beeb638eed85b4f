"""Export models as ONNX graphs with their tokenizers (`heedful.backends.onnxruntime.writing`)."""

import json
from os import PathLike
from pathlib import Path
from typing import Any

from heedful import extras
from heedful.backends.onnxruntime.writing import PRECISIONS, write_graphs
from heedful.data.special_tokens import allow_in_texts
from heedful.errors import UserError, describe
from heedful.export.hf import OnNotice
from heedful.files import as_path, check_new, write_directory, write_json
from heedful.pipelines import AnyModel, Classifier, Generator, SavedModel

FACTS = "onnx.json"
ONNX_FILES = frozenset(
    (
        *(FACTS, "tokenizer.json", "tokenizer.source.json", "tokenizer.target.json"),
        *(f"{graph}.onnx{more}" for graph in ("encoder", "decoder") for more in ("", ".data")),
    )
)


def export_onnx(
    model: AnyModel,
    out: str | PathLike[str],
    *,
    precision: str = "float32",
    overwrite: bool = False,
    on_notice: OnNotice = lambda line: None,
) -> None:
    """Write a directory of ONNX graphs, tokenizers and `onnx.json`, which describes them.

    `encoder.onnx`: `ids` (B, S), right-padded, and `lengths` (B,) to `states` (B, S, D), and
    `logits` if the model has a head; of an encoder-decoder to `cross_i`, keys and values of layer
    i. `decoder.onnx`: new `ids` (B, T), right-padded, and `lengths` (B,), `past_lengths` (B,) and
    `past_i` (B, P, 2·G, E) of the tokens before, to `logits` (B, V) after the last new token of
    each row and `cache_i` (B, P + T, 2·G, E), which are the next `past_i`; of an encoder-decoder
    also `source_lengths` (B,) and `cross_i`.

    Args:
        precision: of the matrices, one of `PRECISIONS`; int8: quantized when they are read.
        overwrite: replace such a directory at `out`.
        on_notice: called with the largest error that was measured.

    Raises:
        UserError: a package is missing; an unknown precision; a graph that does not agree with the
            net within `TOLERANCE`; `out` holds something else.
    """
    check_precision(precision)
    extras.require("onnx", "export to ONNX")
    if not isinstance(model, SavedModel):
        raise UserError(f"export needs a model, not {describe(model)}; heedful.load makes one")
    directory = as_path(out, "out")
    check_new(directory, overwrite=overwrite, owns=ONNX_FILES)
    net, errors = model.net, []

    def fill(folder: Path) -> None:
        graphs, error = write_graphs(net, model.config, folder, precision)
        errors.append(error)
        write_json(folder / FACTS, _facts(model, precision, graphs))
        for name, tokenizer in _tokenizers(model).items():
            tags = model.metadata.language_tags.values()
            content = allow_in_texts(tokenizer.content()["tokenizer"], tags)
            (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")

    write_directory(directory, fill, owns=ONNX_FILES)
    on_notice(f"{precision}: largest error {errors[0]:.2g} of the size of the outputs")


def check_precision(precision: str) -> None:
    """Raise UserError for a precision that this format does not support."""
    if precision not in PRECISIONS:
        raise UserError(f"precision of ONNX must be {' or '.join(PRECISIONS)}, not {precision}")


def _tokenizers(model: SavedModel) -> dict[str, Any]:
    """The tokenizers by the names of their files."""
    if not model.has_tokenizer:
        return {}
    if model.src_tokenizer is model.tgt_tokenizer:
        return {"tokenizer.json": model.src_tokenizer}
    return {
        "tokenizer.source.json": model.src_tokenizer,
        "tokenizer.target.json": model.tgt_tokenizer,
    }


def _facts(model: SavedModel, precision: str, graphs: list[str]) -> dict[str, Any]:
    """Metadata for programs that run the graphs: special ids, sizes of the cache, labels."""
    facts: dict[str, Any] = {
        "kind": model.kind,
        "precision": precision,
        "graphs": graphs,
        "tokenizers": [*_tokenizers(model)],
        "max_length": model.config.max_length,
    }
    if model.has_tokenizer:
        tokenizer, ends = model.src_tokenizer, []
        if isinstance(model, Generator) and "encoder" in graphs:  # sources end as in training
            ends = tokenizer.encode_target([])[len(tokenizer.prefix_ids) :]
        elif not isinstance(model, Generator):
            ends = list(tokenizer.suffix_ids)
        facts |= {"prefix_ids": list(tokenizer.prefix_ids), "suffix_ids": ends}
    if isinstance(model, Classifier):
        facts["labels"] = list(model.labels)
    if isinstance(model, Generator):
        facts |= {
            "decoder_start_ids": list(model.ids.decoder_start_ids),
            "eos_ids": list(model.ids.eos_ids),
            "suppressed_ids": list(model.ids.suppressed_ids),
            "cache": [
                [2 * layer.num_kv_heads, layer.head_dim] for layer in model.net.decoder.cache_layers
            ],
        }
    return facts
