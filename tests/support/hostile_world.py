"""A folder of small models of every kind, their exports, runs, recipes, and files."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from commands import tiny, write_recipe
from heedful.data.tokenizer import train_tokenizer
from heedful.deploy.optimize import optimize
from heedful.export.hf import export_hf
from heedful.pipelines import GenerationIds, ModelMetadata, load, open_net
from heedful.run import train
from heedful.zoo import architecture
from heedful.zoo.saved import make_config

WORDS = ["the cat sat on the mat", "a dog runs in the park", "hello world and more"]
STACK = {"d_model": 16, "num_heads": 2, "num_layers": 1, "d_ff": 32}
TWO = {"d_model": 16, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "d_ff": 32}
CLASSES = {"head": "classify", "num_labels": 3}
NETS: dict[str, tuple[str, str, dict[str, Any]]] = {  # a name: architecture, task, sizes
    "lm": ("gpt2", "language_modeling", STACK),
    "llama": ("llama", "language_modeling", STACK),
    "mlm": ("bert", "masked_lm", STACK),
    "classes": ("bert", "classification", {**STACK, **CLASSES}),
    "two": ("marian", "translation", TWO),
    "own": ("vaswani2017", "translation", TWO),
    "t5": ("t5", "text_to_text", TWO),
    "bare": ("gpt2", "language_modeling", STACK),  # without a tokenizer
}
CHAT = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
MODELS = (*NETS, "run", "fast")
EXPORTS = ("hf-lm", "hf-llama", "hf-mlm", "hf-classes", "hf-two", "hf-t5")
RECIPES = (
    "short.json",
    "lm.json",
    "chats.json",
    "mlm.json",
    "noise.json",
    "pairs.json",
    "classes.json",
)


def make_world(world: Path) -> None:
    """Fill a new folder with everything that `hostile_input.py` names."""
    world.mkdir(parents=True)
    for name in NETS:
        make_net(world, name)
    for name in EXPORTS:
        export_hf(load(world / name.removeprefix("hf-"), device="cpu"), world / name)
    for name, content in _files().items():
        (world / name).write_bytes(content)
    (world / "folder").mkdir()
    _make_recipes(world)
    train(write_recipe(world / "copy.json", training__max_steps=4), world / "run")
    train(world / "pairs.json", world / "fast")
    _optimize(world / "fast")


def make_net(world: Path, name: str) -> None:
    """Save the net of `NETS` with this name, of random weights, as a model of the folder."""
    kind, task, keys = NETS[name]
    tokenizer = train_tokenizer(
        WORDS * 20,
        kind="bpe",
        vocab_size=40,
        extra_specials=["<mask>", "<extra_0>"],
        template="both" if kind == "bert" else "none",
    )
    if name == "llama":
        tokenizer = tokenizer.extended((), CHAT)
    two = "num_encoder_layers" in keys
    sides = ("src_vocab_size", "tgt_vocab_size") if two else ("vocab_size",)
    sizes = {**keys, "max_length": 24, **dict.fromkeys(sides, tokenizer.vocab_size)}
    config = make_config(kind, sizes)
    torch.manual_seed(1)
    ids = GenerationIds()
    if kind != "bert":
        start = (0,) if two and kind != "vaswani2017" else ()
        ids = GenerationIds(decoder_start_ids=start, eos_ids=(2,), suppressed_ids=(0, 1))
    labels = ("no", "yes", "maybe") if name == "classes" else ()
    metadata = ModelMetadata(kind, task, labels=labels, generation=ids)
    net = architecture(kind).build(config).eval()
    open_net(net, config, metadata, None if name == "bare" else tokenizer).save(world / name)


def _optimize(model: Path) -> None:
    actual = optimize(
        load(model, device="cpu", backend="eager"),
        model,
        WORDS,
        WORDS,
        backends=["eager", "ctranslate2"],
        precisions=["float32", "int8"],
        threads=[1],
        pairs=[([5, 6, 2], [5, 6, 2])] * 9,
        tolerance=100,
    )
    assert actual.proofs
    assert (model / "backends" / "shortlist.safetensors").is_file()


def _make_recipes(world: Path) -> None:
    lines, labels = str(world / "lines"), str(world / "labels.tsv")
    write_recipe(world / "short.json", training__max_steps=1, training__average_checkpoints=1)
    pairs = {"train": {"src": lines, "tgt": lines}, "valid_size": 4}
    write_recipe(world / "pairs.json", task="translation", data=pairs, training__max_steps=1)
    char = {"kind": "char", "vocab_size": None}
    texts = {"train": {"text": lines}, "valid_size": 0.3}
    classes = {"train": {"file": labels}, "valid_size": 4}
    chats = {"train": {"file": str(world / "chats.jsonl")}, "valid_size": 4}
    score: dict[str, Any] = {"metric": "accuracy"}
    for name, task, net, data, evaluation in (
        ("lm", "language_modeling", {"architecture": "gpt2", **STACK}, texts, {}),
        ("chats", "sft", {"architecture": "gpt2", **STACK}, chats, {}),
        ("mlm", "masked_lm", {"architecture": "bert", **STACK}, texts, {}),
        ("noise", "denoising", {"architecture": "bart", **TWO}, texts, {"decode_sentences": 2}),
        ("classes", "classification", {"architecture": "bert", **STACK}, classes, score),
    ):
        content = tiny(training__max_steps=1, task=task, data=data, tokenizer=char, model=net)
        (world / f"{name}.json").write_text(json.dumps(content | {"evaluation": evaluation}))


def _files() -> dict[str, bytes]:
    data = "".join(f"{line}\n" for line in WORDS * 8).encode()
    labels = ["yes", "no", "maybe"] * 8
    rows = "".join(f"{line}\t{label}\n" for line, label in zip(WORDS * 8, labels, strict=True))
    good = "".join(
        f'{{"src": "{w}", "tgt": "{w}", "text": "{w}", "label": "yes"}}\n' for w in WORDS
    )
    deep = "[" * 20_000 + "]" * 20_000
    emoji = "🦜🦜 ünï \u202e ﷽\u2028x\n".encode()
    return {
        "lines": data,
        "labels.tsv": rows.encode(),
        "answers": "".join(f"{label}\n" for label in labels).encode(),
        "fewer": data[:60],
        "empty": b"",
        "blank": b"\n \n\t\n",
        "latin": b"caf\xe9\n" * 9,
        "utf16": data.decode().encode("utf-16"),
        "nul": b"a\0b\n" * 24,
        "bom": b"\xef\xbb\xbf" + data,
        "long": b"word " * 3000 + b"\n",
        "wide": b"x" * 1_000_000 + b"\n",
        "gz.gz": gzip.compress(data),
        "app.po": b'msgid "hello"\nmsgstr ""\n',
        "page.html": b"<p>hello <b>world</b>. hello</p>\n",
        "memory.tmx": b'<tmx><body><tu><tuv xml:lang="en"><seg>hello</seg></tuv>'
        b'<tuv xml:lang="de"><seg>world</seg></tuv></tu></body></tmx>',
        "half.gz": gzip.compress(data)[:40],
        "named.gz": data,
        "ragged.tsv": b"a\tb\na\tb\tc\n" * 9,
        "untold.tsv": b"a\t\n\tb\n" * 9,
        "foreign.tsv": b"a text\tunheard\n" * 9,
        "good.jsonl": good.encode() * 8,
        "chats.jsonl": "".join(
            f'{{"messages": [{{"role": "user", "content": "{word} {i}"}}, '
            f'{{"role": "assistant", "content": "{word}"}}]}}\n'
            f'{{"prompt": "{i}", "response": "a"}}\n'
            for i, word in enumerate(WORDS * 4)
        ).encode(),
        "bad.jsonl": b'{"text": 1}\n{"a": }\n',
        "deep.jsonl": f'{{"text": {deep}}}\n'.encode(),
        "huge.jsonl": b'{"text": ' + b"9" * 5000 + b"}\n",
        "nan.jsonl": b'{"text": NaN, "label": NaN}\n',
        "half.jsonl": b'{"text": "\\ud800", "label": "x", "src": "\\ud800", "tgt": "a"}\n' * 9,
        "list.jsonl": b"[1]\n" * 9,
        "cr": b"a\rb\rc",
        "controls": bytes(range(1, 32)) * 9 + b"\n",
        "specials": b"<mask> </s> <pad> <s> [MASK] <unk>\n" * 24,
        "emoji": emoji * 24,
        "png": b"\x89PNG\r\n\x1a\n" + bytes(200),
        "pickle": b"\x80\x04\x95\x05\x00.",
        "same": b"a\n" * 24,
    }


def copy_of(source: Path, target: Path) -> Path:
    """A copy of a model's folder that may be damaged."""
    return Path(shutil.copytree(source, target))
