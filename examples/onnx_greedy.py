"""Greedy decoding of `heedful export onnx`: `python onnx_greedy.py DIRECTORY < LINES`.

For a model of many languages, those of source and target: `… DIRECTORY en de < LINES`.

Needs numpy, onnxruntime and tokenizers.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

folder = Path(sys.argv[1])
facts = json.loads((folder / "onnx.json").read_text(encoding="utf-8"))
source, target = (Tokenizer.from_file(str(folder / facts["tokenizers"][i])) for i in (0, -1))
languages = [facts["language_ids"][code] for code in sys.argv[2:4]]
graphs = {n: onnxruntime.InferenceSession(folder / f"{n}.onnx") for n in facts["graphs"]}


def decode(ids: list[int], limit: int) -> list[int]:
    """The new tokens after a prompt, or of the translation of a source."""
    fixed: dict[str, Any] = {}
    if "encoder" in graphs:
        keys = graphs["encoder"].run(None, {"ids": [ids], "lengths": [len(ids)]})
        fixed = {f"cross_{i}": value for i, value in enumerate(keys)} | {
            "source_lengths": [len(ids)]
        }
        ids = facts["decoder_start_ids"]
    output: list[int] = []
    first = languages[1] if languages else facts["forced_bos_id"]
    forced = {0: first, limit - 1: facts["forced_eos_id"]}
    cache, length = [np.zeros((1, 0, *s), np.float32) for s in facts["cache"]], 0
    while len(output) < limit and not {*output[-1:]} & {*facts["eos_ids"]}:
        past = {f"past_{i}": value for i, value in enumerate(cache)}
        new = {"ids": [ids], "lengths": [len(ids)], "past_lengths": [length]}
        logits, *cache = graphs["decoder"].run(None, new | past | fixed)
        logits[0, facts["suppressed_ids"]] = -np.inf
        token = forced.get(len(output))
        length, ids = length + len(ids), [int(logits[0].argmax()) if token is None else token]
        output += ids
    return output


for line in sys.stdin:
    ids = source.encode(line.rstrip("\n"), add_special_tokens=False).ids
    ids = facts["prefix_ids"] + languages[:1] + ids + facts["suffix_ids"]
    prompt = facts["decoder_start_ids"] if "encoder" in graphs else ids  # of the decoder
    print(target.decode(decode(ids, min(64, facts["max_length"] - len(prompt)))))
