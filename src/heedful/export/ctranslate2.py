"""Export models as CTranslate2 directories, with their tokenizers and an example program."""

from os import PathLike
from pathlib import Path
from typing import Any

from heedful.backends.ctranslate2.conversion import PRECISIONS, embeddings_of
from heedful.backends.ctranslate2.runtime import HEAD
from heedful.backends.ctranslate2.vocabulary import names_of
from heedful.data.labels import ProblemType
from heedful.data.special_tokens import allow_in_texts
from heedful.deploy.convert import write_ctranslate2
from heedful.errors import UserError
from heedful.files import MODEL_FILES, check_new, write_directory, write_json
from heedful.pipelines import Classifier, Generator, SavedModel, Translator

EXAMPLE = "example.py"
_HEADER = '''"""{what}: `python example.py{arguments} < FILE`.

Needs ctranslate2, tokenizers{more}.
"""

import sys
from pathlib import Path
from typing import Any

{imports}from ctranslate2 import {kind}
from tokenizers import Tokenizer

folder = Path(__file__).parent
tokenizer = Tokenizer.from_file(str(folder / "{source}"))
model = {kind}(str(folder), intra_threads=1)  # more threads are slower for small models
'''
_TRANSLATE = """target = Tokenizer.from_file(str(folder / "{target}"))
for line in sys.stdin:
    tokens = {first}[tokenizer.id_to_token(i) for i in tokenizer.encode(line.strip()).ids]
    [result] = model.translate_batch(
        [tokens], {options}
    )
    print({decode})
"""
_GENERATE = """for line in sys.stdin:
    prompt = {prefix} + tokenizer.encode(line.strip(), add_special_tokens=False).tokens
    [result] = model.generate_batch(
        [prompt], include_prompt_in_result=False, {options}
    )
    print(tokenizer.decode(result.sequences_ids[0]))
"""
_EMBED = """for line in sys.stdin:
    result = model.forward_batch([tokenizer.encode({prompt}line.strip()).tokens])
    states = np.array(result.last_hidden_state)[0]
    vector = {vector}
    print({printed})
"""
_VECTORS = {"mean": "states.mean(0)", "first": "states[0]", "last": "states[-1]"}
_VECTORS |= {"max": "states.max(0)"}
_CLASSIFY = """labels, head = {labels}, np.load(folder / "{head}")
for line in sys.stdin:
    result = model.forward_batch([tokenizer.encode(line.strip()).tokens])
    logits = np.array(result.pooler_output)[0] @ head["weight"].T + head["bias"]
    print({printed})
"""
_CLASSES: dict[ProblemType, str] = {
    "single_label": "labels[logits.argmax()]",
    "multi_label": '",".join(label for label, logit in zip(labels, logits) if logit >= 0)',
    "regression": '*logits, sep="\\t"',
}


def export_ctranslate2(
    model: SavedModel,
    out: str | PathLike[str],
    *,
    precision: str = "float32",
    overwrite: bool = False,
) -> None:
    """Write a CTranslate2 model, which can be used without torch and heedful.

    The directory holds the model, its vocabularies, its tokenizers in the format of the library
    `tokenizers`, and an example program.

    Args:
        precision: type of the weights, one of `PRECISIONS`.
        overwrite: replace a model at `out`.

    Raises:
        UserError: CTranslate2 is not installed, or does not support the model (with all reasons);
            `out` exists and is not a model, or `overwrite` is False.
    """
    check_precision(precision)
    directory = Path(out)
    check_new(directory, overwrite=overwrite, owns=MODEL_FILES)
    sides = (model.src_tokenizer, model.tgt_tokenizer) if model.has_tokenizer else (None, None)

    def fill(folder: Path) -> None:
        adds_end = False
        if isinstance(model, Translator) and model.has_tokenizer:
            adds_end = not set(model.src_tokenizer.suffix_ids) & set(model.end_ids())
        write_ctranslate2(model, folder, precision, adds_end=adds_end)
        for name, tokenizer in zip(_names(model), sides, strict=False):
            if tokenizer is not None:
                tags = model.metadata.language_tags.values()
                content = allow_in_texts(tokenizer.content()["tokenizer"], tags)
                write_json(folder / name, content)
        if model.has_tokenizer:
            (folder / EXAMPLE).write_text(_example(model), encoding="utf-8")

    write_directory(directory, fill)


def check_precision(precision: str) -> None:
    """Raise UserError for a precision that CTranslate2 does not support."""
    if precision not in PRECISIONS:
        raise UserError(
            f"precision for CTranslate2 must be {', '.join(PRECISIONS)}, not {precision}"
        )


def _names(model: SavedModel) -> list[str]:
    """The names of the tokenizer files: one, or those of source and target."""
    if model.src_tokenizer is model.tgt_tokenizer:
        return ["tokenizer.json"]
    return ["tokenizer.source.json", "tokenizer.target.json"]


def _example(model: SavedModel) -> str:
    """The source code of the example program."""
    names, max_length = _names(model), model.config.max_length
    suppressed, first_token = _rules(model)
    keys: dict[str, Any] = {"source": names[0], "target": names[-1], "more": "", "imports": ""}
    keys |= {"arguments": "", "first": ""}
    if isinstance(model, Translator):
        options = model.options()
        penalty = 0.0 if options.normalization == "none" else options.length_penalty
        keys |= {"what": "Translates lines", "kind": "Translator"}
        keys["options"] = (
            f"beam_size={options.beam_size}, length_penalty={penalty}, "
            f"max_input_length={max_length}, max_decoding_length={min(256, max_length)}{suppressed}"
        )
        if tokens := model.metadata.language_codes:
            arguments = [*tokens.values()] * 2
            keys |= {"arguments": f" {arguments[0]} {arguments[1]}", "first": "[sys.argv[1]] + "}
            keys["options"] = f"target_prefix=[[sys.argv[2]]], {keys['options']}"
        elif first_token:
            keys["options"] = f"target_prefix=[[{first_token!r}]], {keys['options']}"
        keys["decode"] = (
            "target.decode([target.token_to_id(token) for token in result.hypotheses[0]])"
        )
        if model.tgt_tokenizer.has_own_pieces:
            first = int(bool(model.metadata.language_codes or first_token))
            keys["decode"] = f"target.decoder.decode(result.hypotheses[0]{f'[{first}:]' * first})"
        return (_HEADER + _TRANSLATE).format(**keys)
    if isinstance(model, Generator):
        keys |= {"what": "Continues lines", "kind": "Generator"}
        keys["prefix"] = [model.tokenizer.piece(token) for token in model.tokenizer.prefix_ids]
        keys["options"] = f"max_length={min(64, max_length // 2)}{suppressed}"
        return (_HEADER + _GENERATE).format(**keys)
    keys |= {"kind": "Encoder", "more": " and numpy", "imports": "import numpy as np\n"}
    if isinstance(model, Classifier):
        keys |= {"what": "Classifies lines", "labels": [*model.labels], "head": HEAD}
        keys["printed"] = _CLASSES[model.metadata.problem]
        return (_HEADER + _CLASSIFY).format(**keys)
    [prompt] = model.with_prompt([""])
    keys["prompt"] = f"{prompt!r} + " if prompt else ""
    keys["vector"] = _VECTORS[model.metadata.pooling]
    is_normal = model.metadata.normalize
    keys["printed"] = "vector / np.linalg.norm(vector)" if is_normal else "vector"
    return (_HEADER + _EMBED).format(**keys, what="Embeds lines as vectors")


def _rules(model: SavedModel) -> tuple[str, str | None]:
    """What a model excludes from its outputs, as an argument of a call; and their first token."""
    if not isinstance(model, Generator):
        return "", None
    tokens = names_of(model.tgt_tokenizer, embeddings_of(model.net)[-1].tokens.num_embeddings)
    ids = model.ids
    excluded = [*([token] for token in ids.suppressed_ids), *ids.suppressed_sequences]
    sequences = [[tokens[token] for token in sequence] for sequence in excluded]
    first = None if ids.forced_bos_id is None else tokens[ids.forced_bos_id]
    return f", suppress_sequences={sequences!r}" if sequences else "", first
