"""Writes docs/formats.md: which architectures each file format and backend supports."""

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "formats.md"
HEAD = """# File formats

<!-- Written by `make docs` (docs/make_formats.py) from the architectures' tables. Do not edit. -->

| architecture | Hugging Face | GGUF (llama.cpp) | CTranslate2 | ONNX | sentence-transformers |
|---|---|---|---|---|---|
"""
FOOT = """
An architecture in brackets is the one that a model is written as, with equal outputs. CTranslate2
is tried with a tiny net of each architecture; [results/backends.md](results/backends.md) has the
settings that it refuses. Settings that a format lacks are refused when a model is exported.

| format | command | precisions | tests compare | extra |
|---|---|---|---|---|
{rows}
GGUF holds the tokenizer if llama.cpp has one like it: byte-level BPE with the words of GPT-2,
LLaMA 3 or Qwen (`tokenizer.kind: byte_bpe` and `byte`; give it texts in NFC), and SentencePiece
models (BPE with bytes, unigram) with the rule `identity`. Others are refused with the reason, and
`--no-tokenizer` writes the net alone. [examples/onnx_greedy.py](../examples/onnx_greedy.py)
decodes with the ONNX files without heedful and torch.

## Tasks of lm-evaluation-harness

Language models are evaluated as the model type `heedful` (extra `harness`); results equal those of
the harness's adapter for transformers on the exported model.

```bash
python -m heedful.harness run --model heedful --model_args path=runs/lm --tasks lambada_openai
```

## Outputs of a grammar

`--json-schema FILE` and `--regex TEXT` (in Python also a mapping: `generate(json_schema={{...}})`)
restrict outputs of all searches through llguidance (extra `grammar`). JSON is written as by
Python's `json.dumps`; give `max_new_tokens` enough to complete it.

```bash
heedful generate runs/lm 'A person: ' --json-schema person.json --max-new-tokens 200
```
"""

# Format, its commands, the module that has its precisions, the proof of an export, the extra.
ROWS = (
    ("Hugging Face", "export hf, import hf", "hf", "logits of transformers", "–"),
    ("GGUF", "export gguf", "gguf", "logits and ids of llama.cpp", "`gguf`"),
    ("CTranslate2", "export ctranslate2", "ctranslate2", "tokens and scores there", "`fast`"),
    ("ONNX", "export onnx", "onnx", "outputs of ONNX Runtime, at every export", "`onnx`"),
    ("sentence-transformers", "export sentence-transformers", "hf", "vectors there", "–"),
    ("peft (adapters)", "export peft, import peft", "peft", "logits of peft", "–"),
)


def render() -> str:
    """The current page."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import torch

    from architectures import tiny
    from heedful.backends.ctranslate2 import conversion
    from heedful.export import gguf, hf, onnx
    from heedful.models.encoder_only import EncoderOnly
    from heedful.zoo import ARCHITECTURES, architecture

    lines = []
    for name in ARCHITECTURES:
        formats = architecture(name).formats
        with torch.no_grad():
            net = tiny(name).float()
        is_encoder = isinstance(net, EncoderOnly)
        gguf_format = formats.get("gguf")
        through = "yes" if gguf_format is not None else "–"
        if gguf_format is not None and gguf_format.config is None:
            through = "(gpt2)"
        cells = [
            "yes" if formats["hf"].config is not None else "(another)",
            through,
            "–" if conversion.refusals(net) else "yes",
            "yes",
            "yes" if is_encoder else "–",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |\n")
    precisions: dict[str, Iterable[str]] = {
        "hf": hf.PRECISIONS,
        "gguf": gguf.PRECISIONS,
        "ctranslate2": conversion.PRECISIONS,
        "onnx": onnx.PRECISIONS,
        "peft": ("float32",),
    }
    rows = ""
    for name, commands, module, proof, extra in ROWS:
        spelled = ", ".join(f"`heedful {command}`" for command in commands.split(", "))
        kinds = ", ".join(precisions[module])
        rows += f"| {name} | {spelled} | {kinds} | {proof} | {extra} |\n"
    return HEAD + "".join(lines) + FOOT.format(rows=rows)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote docs/{PAGE.name}")
