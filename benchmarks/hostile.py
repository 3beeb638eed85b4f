# ruff: noqa: E501, SIM905  (lists of hostile words)
"""What `fuzz.py` gives the commands: a world of small models and files, and wrong uses of it."""

import gzip
import io
import itertools
import json
import os
import random
import re
import shlex
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands import tiny, write_recipe

WORDS = ["the cat sat on the mat", "a dog runs in the park", "hello world and more"]
STACK = {"d_model": 16, "num_heads": 2, "num_layers": 1, "d_ff": 32, "max_length": 24}
TWO = {"d_model": 16, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "d_ff": 32}
MODELS = ("lm", "llama", "mlm", "classes", "two", "own", "t5", "bare", "run", "fast")
EXPORTS = ("hf-lm", "hf-llama", "hf-mlm", "hf-classes", "hf-two", "hf-t5")

NUMBERS = (
    "-1 0 1 2 -0 1e23 1e400 nan inf -inf NaN 0.5 1e-400 99999999999999999999 4294967296 -7 1_0 ½ ٣ "
    "0x10 1e5 3.0 1,5 +2 2147483648"
).split()
TEXTS = [
    "", " ", "null", "~", "[]", "{}", "[1,2]", "true", "no", "=", "a=b", "-", "--", "x\ny", "a\tb",
    "\x1b[31mred", "ünï", "🦜", "'", '"', "%s%n", "{0}", "\udcff\udcfe", "\u202e", "<mask>", "</s>",
    "cpu", "cuda", "cuda:99", "meta", "mps", "xla", "cpu:3", "cpu:-1", "auto,cpu", "hf", "lookup",
    "optimal", "bleu", "bleuu", "bleu,,chrf", "mean", "lastt", "gnmt", "greedy", "a" * 300, "9" * 5000,
    "zh", "src", "text", "1", "0", "[" * 3000,
]  # fmt: skip
PATHS = [
    "", ".", "..", "/", "missing", "no/such/folder/x", "a" * 300, "~", "$HOME", "/dev/null",
    "/dev/full", "/dev/zero", "/proc/self/mem", "/proc/self/environ", "file/inside", "loop",
    "dangling", "secret", "folder", "-", "\udcff", "x\ny", "here\x1b[0m", "*", "file", "../../box",
]  # fmt: skip
STREAMS = (
    "no stdin", "no stdout", "no stderr", "ascii stdout", "full stdout", "broken stdout", "narrow 1",
    "narrow 20", "narrow 59", "unwritable stdout", "latin stdin", "nothing open",
)  # fmt: skip
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 7, 0.5, -0.0, 10**9, 10**7, 10**18, 2**63, -(2**63), 1e308,
    float("nan"), float("inf"), "", "x", "1", "\ud800", "a" * 10_000, "../../x", "/etc/passwd", [],
    {}, [[]], [None], {"": {}}, ["a", "a"], [0] * 100, {"a": {"b": {"c": 1}}}, "cpu", "bpe",
    ["<mask>"], "HUGE", "DEEP",
]  # fmt: skip


LISTS = ["[1, 2]", "[-1, 0.9]", "[]", "[0.9]", "[nan, nan]", "[[0.9, 0.9]]", "{a: 1}", "[1e400, 0]"]


@dataclass
class Case:
    """One command line; `asked` are the entries of its folder that it may write.

    Of `python EXPRESSION` no command is run, but a call of the library. With `ends` the command has
    a process of its own: after these seconds it gets this signal, or its reader is gone (0).
    """

    kind: str
    arguments: list[str]
    stdin: bytes = b""
    streams: str = ""
    asked: tuple[str, ...] = ()
    ends: tuple[float, int] | None = None


def make_world(world: Path) -> None:
    """Models of every kind, their exports, a run, recipes, and files of every kind."""
    import torch

    from heedful.data.tokenizer import train_tokenizer
    from heedful.export.hf import export_hf
    from heedful.inference import GenerationIds, ModelCard, load, open_net, optimizing
    from heedful.run import train
    from heedful.zoo import architecture
    from heedful.zoo.saved import make_config

    world.mkdir(parents=True)
    os.environ["HEEDFUL_CACHE"] = str(world.parent / "cache")

    def make(name: str, of: str, task: str, keys: dict[str, Any]) -> None:
        both = of == "bert"
        tokenizer = train_tokenizer(
            WORDS * 20,
            kind="bpe",
            vocab_size=40,
            extra_specials=["<mask>", "<extra_0>"],
            template="both" if both else "none",
        )
        sides = (
            ("src_vocab_size", "tgt_vocab_size")
            if "num_encoder_layers" in keys
            else ("vocab_size",)
        )
        config = make_config(of, {**keys, **dict.fromkeys(sides, tokenizer.vocab_size)})
        torch.manual_seed(1)
        net = architecture(of).build(config).eval()
        labels = ("no", "yes", "maybe") if keys.get("head") == "classify" else ()
        ids = GenerationIds(end=(2,), never=(0, 1)) if not both else GenerationIds()
        if "num_encoder_layers" in keys and of != "vaswani2017":
            ids = GenerationIds(start=(0,), end=(2,), never=(0, 1))
        given = None if name == "bare" else tokenizer
        open_net(net, config, ModelCard(of, task, labels=labels, generation=ids), given).save(
            world / name
        )

    make("lm", "gpt2", "language_modelling", STACK)
    make("llama", "llama", "language_modelling", STACK)
    make("mlm", "bert", "masked_lm", STACK)
    make("classes", "bert", "classification", {**STACK, "head": "classify", "num_labels": 3})
    make("two", "marian", "translation", {**TWO, "max_length": 24})
    make("own", "vaswani2017", "translation", {**TWO, "max_length": 24})
    make("t5", "t5", "text_to_text", {**TWO, "max_length": 24})
    make("bare", "gpt2", "language_modelling", STACK)
    for name in EXPORTS:
        export_hf(load(world / name.removeprefix("hf-"), device="cpu"), world / name)
    write_recipe(world / "copy.json", training__max_steps=4)
    train(world / "copy.json", world / "run")
    write_recipe(world / "short.json", training__max_steps=1, training__average_last=1)
    data = {"train": {"text": str(world / "lines")}, "valid_fraction": 0.3}
    (world / "lines").write_text("".join(f"{line}\n" for line in WORDS * 8))
    tokenizer = {"kind": "char", "vocab_size": None}
    for name, task, net in (
        ("lm", "language_modelling", {"architecture": "gpt2", **STACK}),
        ("mlm", "masked_lm", {"architecture": "bert", **STACK}),
        ("noise", "denoising", {"architecture": "bart", **TWO}),
    ):
        net = {key: value for key, value in net.items() if key != "max_length"}
        limit = {} if name == "lm" else {"max_length": 20}
        own = {"task": task, "data": data | limit, "model": net, "evaluation": {}}
        content = tiny(training__max_steps=1, tokenizer=tokenizer) | own
        (world / f"{name}.json").write_text(json.dumps(content))
    pairs = {"train": {"src": str(world / "lines"), "tgt": str(world / "lines")}, "hold_out": 4}
    write_recipe(world / "pairs.json", task="translation", data=pairs, training__max_steps=1)
    labels = {"train": {"file": str(world / "labels.tsv")}, "hold_out": 4}
    train(world / "pairs.json", world / "fast")
    found = optimizing.optimize(
        load(world / "fast", device="cpu", engine="eager"),
        world / "fast",
        WORDS,
        WORDS,
        engines=["eager", "ctranslate2"],
        precisions=["float32", "int8"],
        threads=[1],
        pairs=[([5, 6, 2], [5, 6, 2])] * 9,
        tolerance=100,
    )
    assert found.proofs
    assert (world / "fast" / "engines" / "shortlist.safetensors").is_file()
    net = {key: value for key, value in STACK.items() if key != "max_length"}
    content = tiny(training__max_steps=1, task="classification", data=labels, tokenizer=tokenizer)
    content |= {"model": {"architecture": "bert", **net}, "evaluation": {"metric": "accuracy"}}
    (world / "classes.json").write_text(json.dumps(content))
    _make_files(world)


def _make_files(world: Path) -> None:
    lines = "".join(f"{line}\n" for line in WORDS * 8)
    data = lines.encode()
    rows = [
        f"{line}\t{label}\n"
        for line, label in zip(WORDS * 8, ["yes", "no", "maybe"] * 8, strict=True)
    ]
    objects = [
        json.dumps({"src": line, "tgt": line, "text": line, "label": "yes"}) for line in WORDS
    ]
    deep = "[" * 20_000 + "]" * 20_000
    files: dict[str, bytes] = {
        "empty": b"", "blank": b"\n \n\t\n", "latin": b"caf\xe9\n" * 9, "utf16": lines.encode("utf-16"),
        "nul": b"a\0b\n" * 24, "bom": b"\xef\xbb\xbf" + data, "long": b"word " * 3000 + b"\n",
        "wide": b"x" * 1_000_000 + b"\n", "one": b"hello", "gz.gz": gzip.compress(data),
        "half.gz": gzip.compress(data)[:40], "named.gz": data, "bomb.gz": gzip.compress(bytes(3 * 10**5)),
        "labels.tsv": "".join(rows).encode(), "ragged.tsv": b"a\tb\na\tb\tc\n" * 9,
        "header.tsv": b"text\tlabel\n" + "".join(rows).encode(), "untold.tsv": b"a\t\n\tb\n" * 9,
        "foreign.tsv": b"a text\tunheard\n" * 9, "bad.jsonl": b'{"text": 1}\n{"a": }\n',
        "good.jsonl": "\n".join(objects * 8).encode(), "deep.jsonl": f'{{"text": {deep}}}\n'.encode(),
        "huge.jsonl": b'{"text": ' + b"9" * 5000 + b"}\n", "nan.jsonl": b'{"text": NaN, "label": NaN}\n',
        "half.jsonl": b'{"text": "\\ud800", "label": "x", "src": "\\ud800", "tgt": "a"}\n' * 9,
        "list.jsonl": b"[1]\n" * 9, "cr": b"a\rb\rc", "controls": bytes(range(1, 32)) * 9 + b"\n",
        "specials": b"<mask> </s> <pad> <s> [MASK] <unk>\n" * 24, "spaces": b"   a   \n" * 24,
        "emoji": "🦜🦜 ünï \u202e ﷽\u2028x\n".encode() * 24, "png": b"\x89PNG\r\n\x1a\n" + bytes(200),
        "html": b"<html><body>404</body></html>\n" * 3, "pickle": b"\x80\x04\x95\x05\x00.", "two.lines": b"a\nb\n",
        "same": b"a\n" * 24, "answers": b"yes\nno\nmaybe\n" * 8, "fewer": lines.encode()[:60],
    }  # fmt: skip
    for name, content in files.items():
        (world / name).write_bytes(content)
    (world / "folder").mkdir()


def kind_of(draw: random.Random) -> str:
    """What a case by chance is of: its first draw."""
    return draw.choices([*KINDS], [weight for _, weight in KINDS.values()])[0]


def make_case(draw: random.Random, world: Path, here: Path) -> Case:
    """A case by chance; `here` is its folder, where it may put what it damages."""
    (here / "file").write_text("x\n")
    (here / "folder").mkdir()
    (here / "folder" / "precious").write_text("keep\n")
    (here / "loop").symlink_to("loop")
    (here / "dangling").symlink_to("nowhere")
    (here / "secret").write_text("s\n")
    (here / "secret").chmod(0)
    kind = kind_of(draw)
    case: Case = KINDS[kind][0](draw, world, here)
    case.kind = kind
    if case.arguments[:1] == ["optimize"]:
        _copy_optimized(case, world, here)
    writes = case.arguments[:1] in (["translate"], ["generate"], ["evaluate"])
    if writes and draw.random() < 0.7 and "--max-new-tokens" not in case.arguments:
        case.arguments += ["--max-new-tokens", "4"]
    return case


def _copy_optimized(case: Case, world: Path, here: Path) -> None:
    """`optimize` writes into its model: give it one of its own."""
    names = {f"{world}/{name}": name for name in (*MODELS, *EXPORTS)}
    if (here / "model").is_dir():
        case.asked += ("model/engines",)
    for place, word in enumerate(case.arguments):
        if word in names:
            case.arguments[place] = names[word]
            shutil.copytree(word, here / names[word], dirs_exist_ok=True)
            case.asked += (f"{names[word]}/engines",)


def _template(draw: random.Random, world: Path, verb: str | None = None) -> Case:
    """A command that works."""
    forms = TEMPLATES if verb is None else [form for form in TEMPLATES if form.startswith(verb)]
    line = draw.choice(forms)
    for kind, names in _OF_KIND.items():
        line = line.replace(f"{{{kind}}}", f"{world}/{draw.choice(names)}")
    words = shlex.split(line.replace("{w}", str(world)))
    asked = tuple(word for word in words if word.split(".")[0] == "out")
    if words[:2] == ["recipes", "cp"]:
        asked += ("dates.yaml", "folder/dates.yaml")
    stdin = "".join(f"{each}\n" for each in WORDS).encode()
    return Case("", words, stdin, "", asked)


_OF_KIND = {
    "tr": ("two", "own", "t5", "run", "fast"),
    "lm": ("lm", "llama"),
    "mlm": ("mlm",),
    "cls": ("classes",),
    "any": MODELS,
    "hf": EXPORTS,
    "run": ("run", "fast"),
    "recipe": ("short.json", "lm.json", "mlm.json", "noise.json", "pairs.json", "classes.json"),
}
TEMPLATES = [
    "translate {tr} -i {w}/lines -o out",
    "translate {tr}",
    "translate {w}/fast --engine ctranslate2 --precision int8 --threads 1",
    "translate {w}/own {w}/own {w}/own -i {w}/lines -o out --weight 1 --weight 2 --weight 0.5",
    "generate {lm} -p hello",
    "generate {lm} -i {w}/lines -o out",
    "generate {tr} -i {w}/lines --json -o out",
    "fill {mlm} -t 'the <mask> sat' -o out",
    "fill {mlm} -t 'the <mask> sat' --json",
    "classify {cls} -i {w}/lines -o out",
    "classify {cls} --scores",
    "embed {any} -i {w}/lines -o out.npy",
    "embed {any} -i {w}/lines -o out.jsonl",
    "embed {mlm}",
    "evaluate {tr} --src {w}/lines --ref {w}/lines -o out",
    "evaluate {lm} --text {w}/lines --json",
    "evaluate {cls} --labelled {w}/labels.tsv -o out",
    "score {tr} --src {w}/lines --tgt {w}/lines -o out",
    "score {lm} -i {w}/lines",
    "average {run} out",
    "verify {any} --no-overfit",
    "info {any}",
    "info",
    "export {any} out --to hf",
    "export {any} out --to ctranslate2",
    "optimize {tr} --src {w}/lines --ref {w}/lines --for latency --engine ctranslate2",
    "optimize {any} --src {w}/lines --threads 1 --precision int8",
    "optimize {cls} --src {w}/lines --ref {w}/answers --tolerance 100 --precision float32",
    "optimize {run} --shortlist --tolerance 100",
    "import hf {hf} out",
    "recipes ls",
    "recipes show dates",
    "recipes cp dates out",
    "train {recipe} --out out --quiet",
    "distill {tr} {w}/pairs.json --out out --quiet --set data.max_length=20",
    "distill {w}/fast --student --out out --quiet --set training.max_steps=1 --set model.d_model=16 "
    "--set model.num_heads=2 --set model.d_ff=32 --set distillation.level=word",
    "demo --out {w}/run",
]
VERBS = sorted({form.split()[0] for form in TEMPLATES})


def _flags(words: list[str]) -> list[Any]:
    """The parameters that click knows of a command."""
    import typer

    from heedful.cli.app import make_app

    command: Any = typer.main.get_command(make_app())
    for word in words[:2]:
        command = getattr(command, "commands", {}).get(word, command)
    return list(command.params)


def _asked(words: list[str], asked: tuple[str, ...], here: Path) -> tuple[str, ...]:
    """What a command line names as its output."""
    found = set(asked)
    for flag, value in itertools.pairwise(words):
        if flag in ("-o", "--output", "--out"):
            path = os.path.normpath(os.path.join(here, value))
            if path in (str(here), str(here.parent)):
                found.add(os.path.relpath(path, here))
            if path.startswith(f"{here}/"):
                found.add(os.path.relpath(path, here))
                real = os.path.realpath(path)
                if real.startswith(f"{here}/"):
                    found.add(os.path.relpath(real, here))
    return tuple(found)


def _values(draw: random.Random, world: Path, here: Path) -> Case:
    """Values of options and arguments that no one should give."""
    case = _template(draw, world)
    options = [each for each in _flags(case.arguments) if each.param_type_name == "option"]
    touched: set[int] = set()
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        if options and draw.random() < 0.8:
            option = draw.choice(options)
            flag = draw.choice(option.opts)
            if flag == "--overfit":
                continue
            writes = flag in ("-o", "--output", "--out")
            pool = PATHS if writes else draw.choice([NUMBERS, NUMBERS, TEXTS, PATHS])
            case.arguments += [flag] if option.is_flag else [flag, draw.choice(pool)]
            continue
        places = [i for i, word in enumerate(case.arguments) if i and not word.startswith("-")]
        if not places:
            continue
        place = draw.choice(places)
        if place in touched:
            continue
        touched.add(place)
        writes = case.arguments[place - 1] in ("-o", "--output", "--out")
        writes = writes or case.arguments[place].startswith("out")
        case.arguments[place] = draw.choice(PATHS if writes else [*NUMBERS, *TEXTS, *PATHS])
        if writes and place and not case.arguments[place - 1].startswith("-"):
            case.asked += tuple(_asked(["-o", case.arguments[place]], (), here))
    if case.arguments[:1] == ["demo"]:  # a folder that it may make is one that it trains in
        case.arguments = ["demo", "--out", draw.choice(["file", "loop", "/dev/null", "secret"])]
    case.asked = _asked(case.arguments, case.asked, here)
    return case


def _shapes(draw: random.Random, world: Path, here: Path) -> Case:
    """Command lines with words too few, too many, twice, or in another order."""
    case = _template(draw, world)
    words = case.arguments
    for _ in range(draw.choice([1, 1, 2])):
        place = draw.randrange(len(words))
        way = draw.randrange(6)
        if way == 0:
            del words[place]
        elif way == 1:
            words.insert(place, words[place])
        elif way == 2:
            words.insert(place, draw.choice([*TEXTS, "--nonsense", "-z", "--jsn", "--help", "-h"]))
        elif way == 3 and len(words) > 1:
            other = draw.randrange(len(words))
            words[place], words[other] = words[other], words[place]
        elif way == 4:
            words[place] = words[place][:-1] or "x"
        else:
            words[:] = words[:place]
        if not words:
            break
    if words[:1] == ["demo"]:
        words += ["--nonsense", "--nonsense"]  # the first may be a folder's name
    case.asked = _asked(words, (*case.asked, "runs", "dates.yaml", "ou"), here)
    return case


def _kinds(draw: random.Random, world: Path, here: Path) -> Case:
    """A model of another kind, or something that is no model."""
    case = _template(draw, world)
    places = [i for i, word in enumerate(case.arguments) if word.startswith(f"{world}/")]
    others = [*MODELS, *EXPORTS, "folder", "lines", "png", "copy.json", "missing"]
    if case.arguments[0] == "demo":
        others = ["run", "lines", "png"]
    for place in places or [len(case.arguments) - 1]:
        if draw.random() < 0.7 and case.arguments[:2] != ["recipes", "cp"]:
            case.arguments[place] = f"{world}/{draw.choice(others)}"
    return case


def _files(draw: random.Random, world: Path, here: Path) -> Case:
    """Files of another kind than is wanted, empty, damaged, or foreign."""
    forms = [form for form in TEMPLATES if "{w}/l" in form]
    case = _template(draw, world, draw.choice(forms).split(" ")[0])
    texts = [p.name for p in world.iterdir() if p.is_file() or p.name == "folder"]
    for place, word in enumerate(case.arguments):
        if word in (f"{world}/lines", f"{world}/labels.tsv") and draw.random() < 0.8:
            case.arguments[place] = f"{world}/{draw.choice(texts)}"
    if not any(word.startswith(f"{world}/") for word in case.arguments[2:]):
        case.stdin = (world / draw.choice([t for t in texts if t != "folder"])).read_bytes()
    return case


def _tree_paths(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    pairs: Any = ()
    if isinstance(content, dict):
        pairs = content.items()
    elif isinstance(content, list):
        pairs = enumerate(content[:8])
    for key, value in pairs:
        found += _tree_paths(value, (*path, key))
    return found


def _hurt_json(draw: random.Random, data: bytes) -> bytes:
    """JSON with something wrong in it, in its values or as a file."""
    if draw.random() < 0.2:
        return draw.choice(
            [
                b"", b"null", b"[]", b"{}", b"[" * 100_000, b'{"a":' * 50_000, data[: len(data) // 2],
                data + b"}", b"\xff\xfe" + data, b"\0" * 100, b'"' + data, b"9" * 5000, b"NaN",
                data.decode().encode("utf-16"), b"\xef\xbb\xbf" + data, data.replace(b'"', b"'"),
                data.replace(b":", b": " + b"[" * 10_000, 1),
            ]
        )  # fmt: skip
    content = json.loads(data)
    if not isinstance(content, dict | list):
        return b"{}"
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        paths = _tree_paths(content)
        if not paths:
            break
        top = [path for path in paths if len(path) < 3]
        *parents, last = draw.choice(top if draw.random() < 0.7 else paths)
        place = content
        for key in parents:
            place = place[key]
        way = draw.random()
        if way < 0.15 and isinstance(place, dict):
            del place[last]
        elif way < 0.2 and isinstance(place, dict):
            place[f"{last}x"] = place.pop(last)
        else:
            place[last] = draw.choice(VALUES)
    text = json.dumps(content)
    deep = "[" * 20_000 + "]" * 20_000
    return text.replace('"HUGE"', "9" * 5000).replace('"DEEP"', deep).encode()


def _hurt_weights(draw: random.Random, data: bytes) -> bytes:
    """A safetensors file with something wrong in its header or its numbers."""
    (size,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    names = [name for name in header if name != "__metadata__"]
    name = draw.choice(names)
    entry = header[name]
    way = draw.randrange(14)
    if way == 0:
        return data[: draw.randrange(len(data))]
    if way == 1:
        return struct.pack("<Q", draw.choice([0, 2**63, 10**8, len(data), 7])) + data[8:]
    if way == 2:
        return data[:8] + b"[" * size + body
    if way == 3:
        entry["shape"] = draw.choice(
            [[], [10**9, 10**9], [-1, 4], [1], [2**62, 4], [0], [1.5], "x"]
        )
    elif way == 4:
        entry["dtype"] = draw.choice(["I64", "BOOL", "F16", "BF16", "F64", "F8_E4M3", "X", 3])
    elif way == 5:
        entry["data_offsets"] = draw.choice([[0, 10**15], [-4, 0], [8, 4], [0], [0, 4], "x"])
    elif way == 6:
        del header[name]
    elif way == 7:
        header[draw.choice(["", "other", "a" * 1000, "../x", name + ".extra"])] = header.pop(name)
    elif way in (8, 9):
        word = {8: b"\0\0\xc0\x7f", 9: b"\0\0\x80\x7f"}[way]  # NaN, infinity
        start = draw.choice([0, entry["data_offsets"][0]])
        body = body[:start] + word * ((len(body) - start) // 4)
    elif way == 10:
        body += bytes(100)
    elif way == 11:
        header["__metadata__"] = draw.choice([1, {"a": 1}, [], "x"])
    elif way == 12:
        return draw.choice([b"", b"\x80\x04\x95", bytes(1000), b"PK\x03\x04" + data])
    else:
        spot = draw.randrange(8, 8 + size)
        return data[:spot] + bytes([data[spot] ^ (1 << draw.randrange(8))]) + data[spot + 1 :]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def _hurt_file(draw: random.Random, path: Path) -> None:
    way = draw.random()
    if way < 0.06:
        path.unlink()
        if draw.random() < 0.5:
            path.mkdir()
        elif draw.random() < 0.5:
            path.symlink_to(path.name)
        return
    data = path.read_bytes()
    try:
        data = _hurt_data(draw, path.suffix, data)
    except (
        ValueError,
        KeyError,
        TypeError,
        struct.error,
        IndexError,
        RecursionError,
    ):  # it is damaged already
        data = data[: len(data) // 2]
    path.write_bytes(data)


def _hurt_data(draw: random.Random, suffix: str, data: bytes) -> bytes:
    if suffix == ".safetensors":
        return _hurt_weights(draw, data)
    if suffix == ".json":
        return _hurt_json(draw, data)
    if suffix == ".jsonl":
        lines = data.split(b"\n")
        spot = draw.randrange(len(lines))
        lines[spot] = _hurt_json(draw, lines[spot] or b"{}")
        return b"\n".join(lines)
    if suffix == ".yaml":
        return _hurt_yaml(draw, data)
    spot = draw.randrange(len(data) or 1)
    return draw.choice([data[:spot], b"", data[:spot] + b"\xff" + data[spot + 1 :], data * 2])


def _copy_and_hurt(draw: random.Random, source: Path, target: Path, pattern: str) -> None:
    shutil.copytree(source, target)
    files = [path for path in sorted(target.rglob(pattern)) if path.is_file()]
    for _ in range(draw.choice([1, 1, 1, 2])):
        path = draw.choice(files)
        if path.is_file():
            _hurt_file(draw, path)


def _damaged(pattern: str) -> Callable[[random.Random, Path, Path], Case]:
    """A model directory whose files of a pattern are damaged."""

    def make(draw: random.Random, world: Path, here: Path) -> Case:
        while True:
            case = _template(draw, world)
            models = {f"{world}/{name}": name for name in (*MODELS, *EXPORTS)}
            places = [i for i, word in enumerate(case.arguments) if word in models]
            if places and case.arguments[0] != "demo":
                break
        place = places[0]
        source = Path(case.arguments[place])
        while not any(p.is_file() for p in source.rglob(pattern)):
            source = world / draw.choice(EXPORTS if source.name.startswith("hf") else MODELS)
        _copy_and_hurt(draw, source, here / "model", pattern)
        case.arguments[place] = "model"
        return case

    return make


def _engines(draw: random.Random, world: Path, here: Path) -> Case:
    """A model whose forms for engines are damaged, or are of another model."""
    shutil.copytree(world / "fast", here / "model")
    folder = here / "model" / "engines"
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for _ in range(draw.choice([1, 1, 1, 2])):
        path = draw.choice(files)
        if draw.random() < 0.4:
            path = folder / "engines.json"
        if path.is_file():
            _hurt_file(draw, path)
    if draw.random() < 0.1:
        shutil.rmtree(folder)
        folder.symlink_to(draw.choice(["engines", "..", "nowhere", f"{world}/lines"]))
    words = draw.choice(
        [
            "translate model", "translate model --engine ctranslate2", "translate model --precision int8",
            "translate model --engine ctranslate2 --precision float32 -o out", "info model",
            "generate model -p hello --engine ctranslate2", "embed model", "translate model --beam 2",
            f"evaluate model --src {world}/lines --ref {world}/lines", "verify model --no-overfit",
            f"optimize model --src {world}/lines --threads 1 --precision int8", "export model out --to hf",
            "translate model model",
        ]
    ).split()  # fmt: skip
    return Case("", words, "".join(f"{each}\n" for each in WORDS).encode(), asked=("out",))


def _exchanged(draw: random.Random, world: Path, here: Path) -> Case:
    """A model one of whose files is another model's: a smaller tokenizer, another net's weights."""
    while True:
        case = _template(draw, world)
        models = {f"{world}/{name}": name for name in (*MODELS, *EXPORTS)}
        places = [i for i, word in enumerate(case.arguments) if word in models]
        if places and case.arguments[0] != "demo":
            break
    source = Path(case.arguments[places[0]])
    shutil.copytree(source, here / "model")
    for place in places:
        if case.arguments[place] == str(source):
            case.arguments[place] = "model"
    ours = sorted(p.name for p in source.iterdir() if p.suffix in (".json", ".safetensors", ".spm"))
    name = draw.choice(ours)
    if name.startswith("tokenizer") and draw.random() < 0.5:
        from heedful.data.tokenizer import train_tokenizer

        kind, size = draw.choice([("char", None), ("bpe", 50), ("byte", None), ("word", None)])
        train_tokenizer(WORDS * 9, kind=kind, vocab_size=size).save(here / "model" / name)
        return case
    others = [world / each / name for each in (*MODELS, *EXPORTS) if world / each != source]
    shutil.copy(draw.choice([p for p in others if p.is_file()] or [source / name]), here / "model")
    return case


def _ended(draw: random.Random, world: Path, here: Path) -> Case:
    """Signals at any moment, and readers that leave."""
    case = _template(draw, world)
    case.ends = (draw.uniform(0, 0.6), draw.choice([0, 1, 2, 2, 15]))
    return case


def _written(value: Any) -> str:
    """A value as Python."""
    return re.sub(
        r"(?<![\w'])-?(nan|inf)(?![\w'])", lambda found: f"float('{found[0]}')", repr(value)
    )


def _calls(draw: random.Random, world: Path, here: Path) -> Case:
    """Calls of the library with values that no one should give, of the kinds that it takes."""
    whole = [-1, 0, 1, 3, 10**9, 2**63, 10**23, -(2**63)]
    real = [-1.0, 0.0, 0.5, 1e308, -1e308, 1e23, float("nan"), float("inf"), 5e-324]
    texts = [text for text in TEXTS if len(text) < 400] + [
        "\ud800",
        "a\udfffb",
        "\0",
        "a\0b",
        "x" * 5000,
    ]
    form = draw.choice(
        [
            "load(W + '/{tr}').translate([T, T], {o})", "load(W + '/{lm}').generate([T], {o})",
            "load(W + '/{tr}').generations([T], {o})", "list(load(W + '/{lm}').stream(T, {o}))",
            "load(W + '/{tr}').generations([[N, 5]], max_new_tokens=3)", "load(W + '/mlm').fill(T, top_k=N)",
            "load(W + '/mlm').fill('<mask> ' + T)", "load(W + '/classes').classify([T, 'a'])",
            "load(W + '/classes').classify(['a'], pairs=[T])", "load(W + '/{lm}').vectors([T], pooling=T)",
            "load(W + '/{lm}').vectors([T, 'a'], batch_tokens=N)", "load(W + '/{lm}').score([T, 'a b'])",
            "load(W + '/{lm}').score(['a b'], stride=N)", "load(W + '/{tr}').score([T], [T])",
            "load(W + '/{tr}').score(['a'], [])", "load(T)", "load(W + '/{any}', device=T)",
            "load(W + '/{any}', engine=T)", "load(W + '/{any}', precision=T)", "load(W + '/fast', threads=N)",
            "load(W + '/{any}').tokenizer.encode(T)", "load(W + '/{any}').tokenizer.decode([N])",
            "ensemble([load(W + '/own')] * 2, [F, F]).translate([T])", "load_recipe('dates', [T])",
            "load_recipe('dates', ['training.max_steps=' + T])", "load(W + '/{lm}').generate([[N]])",
        ]
    )  # fmt: skip
    for kind, names in _OF_KIND.items():
        form = form.replace(f"{{{kind}}}", draw.choice(names))
    options = {
        "beam_size": whole, "num_return": whole, "max_new_tokens": whole, "min_new_tokens": whole,
        "temperature": real, "top_k": whole, "top_p": real, "min_p": real, "typical_p": real, "seed": whole,
        "length_penalty": real, "num_groups": whole, "diversity_penalty": real, "coverage_penalty": real, "repetition_penalty": real,
        "presence_penalty": real, "frequency_penalty": real, "no_repeat_ngram_size": whole,
        "banned": [["\ud800"], [""], ["a"], [10**9], [[]], [[-1]]], "stop": [[""], ["\ud800"], ["a"], []],
        "require": [["\ud800"], [""], ["a b c d e f g h i j k l m n o p q"], [[]], [[10**9]]],
        "prefixes": [["\ud800"], ["a" * 5000], [""], ["a", "a", "a"]], "forced": [{0: -1}, {0: 10**9}, {-1: 3}],
        "batch_tokens": whole, "normalization": TEXTS, "stop_rule": TEXTS, "num_draft_tokens": whole,
        "too_long": TEXTS, "draft": ["lookup", "x", ""], "no_unknown": [True], "nonsense": [1],
    }  # fmt: skip
    given = {
        name: draw.choice(options[name])
        for name in draw.sample(sorted(options), draw.choice([1, 1, 2]))
    }
    pools: dict[str, list[Any]] = {"T": texts, "N": whole, "F": real}
    form = re.sub(r"\b([TNF])\b(?!')", lambda found: _written(draw.choice(pools[found[1]])), form)
    form = form.replace("{o}", "**" + _written({"max_new_tokens": 4} | given))
    form = form.replace("W + '", f"'{world}")
    return Case("", ["python", form])


def _imports(draw: random.Random, world: Path, here: Path) -> Case:
    """Directories of another program with something wrong in one of their files."""
    source = world / draw.choice(EXPORTS)
    _copy_and_hurt(draw, source, here / "model", draw.choice(["*", "*.json", "config.json"]))
    more = [
        "--set",
        f"{draw.choice(['head', 'num_labels', 'd_model', 'max_length'])}={draw.choice(NUMBERS)}",
    ]
    words = ["import", "hf", "model", "out", *(more if draw.random() < 0.1 else [])]
    return Case("", words, asked=("out",))


def _settings(draw: random.Random, world: Path, here: Path) -> Case:
    """Values of a recipe's keys, given on the command line."""
    from heedful.config import Recipe
    from heedful.nested_keys import keys_of

    case = _template(draw, world, draw.choice(["train", "train", "distill"]))
    keys = [key.name for key in keys_of(Recipe) if key.name != "plugins"]
    models = ["model." + each for each in (
        "d_model num_heads num_layers num_encoder_layers num_decoder_layers d_ff dropout activation "
        "max_length architecture size norm_placement vocab_size src_vocab_size tie_embeddings head "
        "num_labels nonsense position_offset"
    ).split()]  # fmt: skip
    for _ in range(draw.choice([1, 1, 2])):
        key = draw.choice(
            [*keys, *keys, *models, "objective.kind", "objective.fraction", "plugins"]
        )
        pool = draw.choice(
            [NUMBERS, NUMBERS, TEXTS, PATHS, [json.dumps(v) for v in VALUES[:33]], LISTS]
        )
        value = draw.choice(pool)
        case.arguments += ["--set", f"{key}={value}"]
    return case


def _hurt_yaml(draw: random.Random, data: bytes) -> bytes:
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(12)
    )
    if draw.random() < 0.4:
        return draw.choice(
            [
                bomb.encode(), b"[" * 10_000, b"a: " + b"{b: " * 5_000, b"- " * 10_000 + b"x", b"\t",
                b"!!python/object/apply:os.system [id]", b"a: !!binary x", b"? [1]\n: 2\n", b"{}: 1\n",
                b"1: 2\n", b"a: 1\na: 2\n", b"---\na: 1\n---\nb: 2\n", b"&a [*a]", b"<<: [1]\n",
                b"task: " + b"9" * 5000, b"training: {seed: 9" + b"9" * 5000 + b"}", b"\0", b"\xff\xfe",
                b"%YAML 9.9\n---\na: 1", b"task: [", b"'", b'"\\x', b"training: *b", b"@", b"`",
                b"task: copy\n" + b"#" * 1_000_000, b"training: {seed: 0b12}", b"training: {seed: 1:2:3}",
                b"task: !!int x", b"task: !!timestamp x", b"task: !!float x", b"? ? ? x",
                b"data: {generated: {seed: 2001-99-99}}", b"task: !!set {a, b}", b"training: ",
                b"a: &x {b: *x}",
            ]
        )  # fmt: skip
    spot = draw.randrange(len(data) or 1)
    return (
        data[:spot]
        + draw.choice([b"", b"[", b": ", b"\t", b"{", b"\xff", b"*", b"&", b"\n\n- x"])
        + data[spot + draw.choice([0, 1, 5]) :]
    )


def _recipes(draw: random.Random, world: Path, here: Path) -> Case:
    """Recipe files with something wrong in them."""
    from heedful.recipe_files import RECIPES

    if draw.random() < 0.6:
        source = world / draw.choice(list(_OF_KIND["recipe"]))
        data = _hurt_json(draw, source.read_bytes())
    else:
        data = _hurt_yaml(draw, draw.choice(sorted(RECIPES.glob("*.yaml"))).read_bytes())
    (here / "recipe.json").write_bytes(data)
    limits = ["--set", "training.max_steps=1", "--set", "data.generated.num_train=20"]
    verb = draw.choice(["train", "train", "recipes show", "distill"])
    if verb == "train":
        return Case(
            "", ["train", "recipe.json", "--out", "out", "--quiet", *limits], asked=("out",)
        )
    if verb == "distill":
        words = ["distill", f"{world}/own", "recipe.json", "--out", "out", "--quiet", *limits]
        return Case("", words, asked=("out",))
    return Case("", ["recipes", "show", "recipe.json"])


def _sources(draw: random.Random, world: Path, here: Path) -> Case:
    """Training on files that hold something else."""
    name = draw.choice(["lm", "mlm", "noise", "pairs", "classes"])
    texts = [p.name for p in world.iterdir() if p.is_file() or p.name == "folder"]
    words = ["train", f"{world}/{name}.json", "--out", "out", "--quiet"]
    keys = {"pairs": ["src", "tgt"], "classes": ["file"]}.get(name, ["text"])
    for key in keys if draw.random() < 0.8 else ["file", "src", "text"]:
        path = f"{world}/{draw.choice(texts)}"
        value = path if draw.random() < 0.85 else json.dumps([path, f"{world}/lines"])
        words += ["--set", f"data.{draw.choice(['train', 'train', 'valid', 'test'])}.{key}={value}"]
    if draw.random() < 0.2:
        words += ["--set", f"tokenizer.path={world}/{draw.choice([*texts, *MODELS, *EXPORTS])}"]
    if draw.random() < 0.2:
        words += ["--set", f"init_from={world}/{draw.choice([*texts, *MODELS, *EXPORTS])}"]
    return Case("", words, asked=("out",))


def _resumed(draw: random.Random, world: Path, here: Path) -> Case:
    """Runs that go on, or are averaged, from a folder in which something is damaged."""
    shutil.copytree(world / "run", here / "out")
    files = [path for path in sorted((here / "out").rglob("*")) if path.is_file()]
    state = [
        path for path in files if "checkpoints" in path.parts or path.suffix in (".yaml", ".jsonl")
    ]
    for _ in range(draw.choice([1, 1, 2])):
        path = draw.choice(state if draw.random() < 0.7 else files)
        if path.is_file():
            _hurt_file(draw, path)
    words = draw.choice(
        [
            ["train", "out", "--resume", "--quiet"],
            ["train", "out", "--resume", "--quiet"],
            ["average", "out", "out2"],
            ["translate", "out"],
        ]
    )
    return Case("", words, b"1 2\n", asked=("out2", "out"))


def _streams(draw: random.Random, world: Path, here: Path) -> Case:
    """Closed, broken and foreign streams, and narrow terminals."""
    case = _template(draw, world)
    case.streams = draw.choice(STREAMS)
    if draw.random() < 0.3:
        case.stdin = draw.choice([b"", b"\xff\xfe\n", "ünï 🦜\n".encode(), b"x" * 100_000, b"\0\n"])
    return case


ENDED = "signals, readers that leave"
KINDS: dict[str, tuple[Callable[[random.Random, Path, Path], Case], float]] = {
    "values of options": (_values, 20),
    "words of the command": (_shapes, 8),
    "models of another kind": (_kinds, 7),
    "text files": (_files, 10),
    "damaged config.json": (_damaged("config.json"), 9),
    "damaged tokenizers": (_damaged("tokenizer*.json"), 5),
    "damaged weights": (_damaged("*.safetensors"), 7),
    "foreign directories": (_imports, 9),
    "recipe keys": (_settings, 12),
    "recipe files": (_recipes, 6),
    "training data": (_sources, 5),
    "damaged runs": (_resumed, 5),
    "streams": (_streams, 6),
    "damaged engines": (_engines, 6),
    "files of another model": (_exchanged, 6),
    ENDED: (_ended, 4),
    "calls of the library": (_calls, 10),
}


def arrange_streams(streams: str) -> None:
    """Make the streams of this process what a case says."""
    if streams in ("no stdin", "nothing open"):
        os.close(0)
    if streams in ("no stdout", "nothing open"):
        os.close(1)
    if streams in ("no stderr", "nothing open"):
        os.close(2)
    if streams == "full stdout":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    if streams == "broken stdout":
        read, write = os.pipe()
        os.close(read)
        os.dup2(write, 1)
    if streams == "unwritable stdout":
        os.dup2(os.open("/dev/null", os.O_RDONLY), 1)
    if streams.startswith("narrow"):
        os.environ["COLUMNS"] = streams.split()[1]
    encoding = {"ascii stdout": "ascii", "latin stdin": "latin-1"}.get(streams, "utf-8")
    # As the interpreter does it at its start: a stream that is not open is None.
    for name, handle, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        try:
            os.fstat(handle)
            errors = "backslashreplace" if name == "stderr" else "surrogateescape"
            errors = "strict" if encoding != "utf-8" and name != "stderr" else errors
            raw = io.FileIO(handle, mode, closefd=False)
            buffer = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
            stream = io.TextIOWrapper(buffer, encoding=encoding, errors=errors)
        except OSError:
            stream = None
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
