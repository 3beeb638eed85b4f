"""Export decoder-only models as GGUF files, which llama.cpp and programs built on it open."""

import re
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heedful import extras, zoo
from heedful.errors import UserError, describe
from heedful.export.gguf_tokenizer import tokenizer_notice, tokenizer_to_gguf
from heedful.export.hf import OnNotice, log_notice
from heedful.files import as_path, atomic_replace, check_writable
from heedful.pipelines import AnyModel, LanguageModel
from heedful.progress import track
from heedful.zoo.architectures import Format
from heedful.zoo.gguf import GgufConfig
from heedful.zoo.names import abbreviate_names, to_hf

# Precision -> the name of the tensors' type, and of the file's type, in the package gguf.
PRECISIONS = {
    "f32": ("F32", "ALL_F32"),
    "bf16": ("BF16", "MOSTLY_BF16"),
    "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
}
_BLOCK = 32  # weights that share a scale in q8_0
_MAGIC = b"GGUF"
_EXPERT = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))\.(\d+)(\.weight)")


def export_gguf(
    model: AnyModel,
    out: str | PathLike[str],
    *,
    precision: str = "f32",
    tokenizer: bool = True,
    overwrite: bool = False,
    on_notice: OnNotice = log_notice,
) -> None:
    """Write a GGUF file with the net, and the tokenizer in its metadata.

    Matrices are in the precision; norms, biases, position tables and routers in float32, as
    llama.cpp's own converter writes them.

    Args:
        precision: one of `PRECISIONS`; q8_0 has 8-bit integers with a scale for each 32 weights.
        tokenizer: False: write the net alone, which reads and writes ids.
        overwrite: replace a GGUF file at `out`.
        on_notice: called with notices.

    Raises:
        UserError: an architecture, setting or tokenizer that llama.cpp does not have; an unknown
            precision; the package gguf is missing; `out` exists, or cannot be written.
    """
    extras.require("gguf", "export to GGUF")
    if not isinstance(model, LanguageModel):
        raise UserError(f"GGUF is for language models (decoder-only), not {_kind(model)}")
    out = as_path(out, "out")
    check_precision(precision)
    check_file(out, overwrite=overwrite)
    net = model.net  # before `model.config`: opening the net may set the config
    format, config, net = _as_gguf(model.metadata.architecture, model.config, net)
    conversion = format.config
    assert conversion is not None, "architectures in GGUF have one"
    metadata = {
        f"{conversion.architecture}.{key}": value for key, value in conversion.write(config).items()
    }
    metadata |= _tokenizer_metadata(model, on_notice) if tokenizer else _NO_TOKENIZER
    length = metadata[f"{conversion.architecture}.context_length"]
    if length < config.max_length:
        on_notice(
            f"the context length of the file is {length}, that of the window: llama.cpp has no "
            f"window for {model.metadata.architecture}"
        )
    tensors = to_hf(net, format.names(config)) | dict(conversion.more_tensors(config))
    joined = [
        (name, conversion.tensor(config, name, tensor)) for name, tensor in _join_experts(tensors)
    ]
    with atomic_replace(out) as temporary:
        whole = _write(temporary, conversion.architecture, metadata, joined, precision)
    if whole:
        on_notice(
            f"in float32, since their rows are not a multiple of {_BLOCK}: "
            f"{abbreviate_names(whole)}"
        )


_NO_TOKENIZER = {"tokenizer.ggml.model": "no_vocab"}


def check_precision(precision: str) -> None:
    """Raise UserError for a precision that this format does not support."""
    if precision not in PRECISIONS:
        raise UserError(f"precision of GGUF must be {', '.join(PRECISIONS)}, not {precision}")


def check_file(path: Path, *, overwrite: bool) -> None:
    """Raise UserError for a path that cannot be written, or holds what must not be replaced."""
    check_writable(path)
    if not path.is_file():
        return
    if not overwrite:
        raise UserError(f"{path} exists already; name a new file, or give overwrite=True")
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise UserError(f"{path} is no GGUF file, so it is not replaced; name another place")


def _kind(model: Any) -> str:
    return f"a {model.kind}" if hasattr(model, "kind") else describe(model)


def _as_gguf(name: str, config: Any, net: Any) -> tuple[Format[GgufConfig], Any, Any]:
    """The tables, Config and net to write; raises UserError if llama.cpp has no such net."""
    format: Format[GgufConfig] | None = zoo.architecture(name).formats.get("gguf")
    if format is None:
        known = [n for n in zoo.ARCHITECTURES if "gguf" in zoo.architecture(n).formats]
        raise UserError(
            f"llama.cpp does not support {name} as heedful has it; export to GGUF supports "
            f"{', '.join(known)}"
        )
    if format.export_as is not None:
        name, config, net = format.export_as(config, net)
        format = zoo.architecture(name).formats["gguf"]
    if format.config is None:
        raise UserError(
            f"llama.cpp has no {name} with these settings, only with those that make it another "
            "architecture (for gpt3: no window, scale_scores and qkv_bias true, no head_dim)"
        )
    return format, config, net


def _tokenizer_metadata(model: LanguageModel, on_notice: OnNotice) -> dict[str, Any]:
    """The metadata of the tokenizer, with the model's own ids that end a text."""
    if not model.has_tokenizer:
        on_notice("the model has no tokenizer: the file accepts ids only")
        return _NO_TOKENIZER
    metadata = tokenizer_to_gguf(model.tokenizer, model.config.vocab_size)
    if notice := tokenizer_notice(model.tokenizer):
        on_notice(notice)
    for key, token in zip(("eos", "eot"), model.ids.eos_ids, strict=False):
        metadata[f"tokenizer.ggml.{key}_token_id"] = token
    if len(model.ids.eos_ids) > 2:
        others = ", ".join(model.tokenizer.tokens(model.ids.eos_ids[2:]))
        on_notice(f"the file names two tokens that end a text, and not {others}")
    if suppressed := list(model.ids.suppressed_ids):
        metadata["tokenizer.ggml.suppress_tokens"] = suppressed
    return metadata


def _join_experts(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, with the matrices of a layer's experts stacked to one."""
    experts: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            yield name, tensor
        else:
            same = experts.setdefault(f"{match[1]}_exps{match[3]}", [])
            assert len(same) == int(match[2]), "experts are named in order"
            same.append(tensor)
    for name, matrices in experts.items():
        yield name, torch.stack(matrices)


def _write(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: list[tuple[str, Tensor]],
    precision: str,
) -> list[str]:
    """Write the file; returns the names of matrices that could not be quantized."""
    import gguf

    type_name, file_type = PRECISIONS[precision]
    kind = gguf.GGMLQuantizationType[type_name]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(gguf.LlamaFileType[file_type])
    for key, value in metadata.items():
        _add(writer, key, value)
    whole = []
    with track("gguf", len(tensors)) as advance:
        for name, tensor in tensors:
            array = np.ascontiguousarray(tensor.detach().float().cpu().numpy())
            is_matrix = array.ndim > 1 and name not in _FLOAT32 and "ffn_gate_inp" not in name
            if is_matrix and type_name == "Q8_0" and array.shape[-1] % _BLOCK:
                whole.append(name)
                is_matrix = False
            data = gguf.quantize(array, kind) if is_matrix else array
            writer.add_tensor(name, data, raw_dtype=kind if is_matrix else None)
            advance(1)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()
    return whole


_FLOAT32 = {"position_embd.weight"}


def _add(writer: Any, key: str, value: Any) -> None:
    """Add a key of the metadata with the type that llama.cpp expects."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
