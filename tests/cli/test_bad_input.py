"""Bad input, by running the command: one clear line, exit code 2, no partial files."""

import ast
import gzip
import json
import os
import pickle
import re
import shlex
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

import heedful
from commands import assert_refused, tree, write_recipe
from heedful.cli.flags import with_flags

SENTENCES = [
    f"the {a} dog sees a {b} cat" for a in ["red", "old", "big", "shy"] for b in ["wet", "sad"]
]
LONG = " ".join("012345012345")  # 12 symbols and EOS are 13 tokens; the model allows 12


@pytest.fixture(scope="module")
def trained(commands, tmp_path_factory):
    """A model that allows 12 tokens; symbols are 0 to 5."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = write_recipe(folder / "recipe.json", training__max_steps=3)
    ended = commands.train(recipe, folder / "model")
    assert ended.code == 0, ended.err
    return folder / "model"


@pytest.fixture
def model(trained, tmp_path):
    """A copy that may be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "model"))


@pytest.fixture
def workdir(tmp_path):
    """A folder with the files that the commands below name."""
    english = "".join(f"{line}\n" for line in SENTENCES * 4)
    files = {
        "a.en": english,
        "a.de": "".join(f"{line[::-1]}\n" for line in SENTENCES * 4),
        "more.de": english + "one more\n",
        "long.en": english + "very " * 60,
        "empty": "",
        "blank": "\n  \n\n",
        "lines": "1 2\n",
        "two": "1 2\n3 4\n",
        "three": "1 2\n3 4\n5 0\n",
        "four": "1 2\n3\n3\n3\n",
        "long": f"1 2\n{LONG}\n{LONG}\n3\n",
        "list.yaml": "- task\n- copy\n",
        "open.yaml": "task: [copy",
        "endless.yaml": "task: copy\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    lines = english.encode().splitlines(keepends=True)
    (tmp_path / "latin.en").write_bytes(b"".join([*lines[:6], b"caf\xe9\n", *lines[7:]]))
    (tmp_path / "latin").write_bytes(b"1 2\n3 \xff\n")
    (tmp_path / "latin.yaml").write_bytes(b"task: copy\nname: caf\xe9\n")
    packed = gzip.compress(english.encode())
    (tmp_path / "half.en.gz").write_bytes(packed[: len(packed) // 2])
    (tmp_path / "folder").mkdir()
    write_recipe(tmp_path / "copy.json")
    write_recipe(tmp_path / "bare.json", task="translation", data={})
    write_recipe(tmp_path / "half.json", task="translation", data={"train": {"src": "a.en"}})
    write_recipe(tmp_path / "tight.json", training__batch_tokens=8)
    write_recipe(tmp_path / "short.json", data__max_length=5)
    data = {"train": {"src": "a.en", "tgt": "a.de"}, "valid_size": 4, "max_length": 40}
    write_recipe(tmp_path / "pairs.json", task="translation", data=data, training__max_steps=2)
    data |= {"train": {"src": "long.en", "tgt": "long.en"}, "truncation": "error"}
    write_recipe(tmp_path / "long.json", task="translation", data=data)
    return tmp_path


USES = (  # of a model, by the commands of this file
    "translate {} --input lines --output out",
    "evaluate {} --src lines --ref lines",
    "score {} --src lines --tgt lines",
    "average {} average",
    "verify {}",
    "info {}",
)
NO_FILE, FOLDER, TOO_LONG = "No such file", "Is a directory", "line 2 has 13 tokens"
KEYS = {  # a key, its value, and parts of the error
    "tasks": ("copy", "unknown key tasks; did you mean task?"),
    "training.lr": (1, "unknown key training.lr; did you mean training.schedule.learning_rate?"),
    "training.zz": (1, "unknown key training.zz; known: "),
    "model.num_head": (2, "unknown key model.num_head; did you mean num_heads?"),
    "training.max_steps ": (0, "unknown key training.max_steps ; did you mean max_steps?"),
    "task": ("translate", "task: unknown value translate; did you mean translation?"),
    "tokenizer.kind": ("bpee", "tokenizer.kind: unknown value bpee; did you mean bpe?"),
    "training.precision": ("fp8", "training.precision: unknown value fp8; did you mean"),
    "training.schedule.name": ("cosin", "unknown value cosin; did you mean cosine?"),
    "training.optimizer.name": ("adamww", "unknown value adamww; did you mean adamw?"),
    "evaluation.metric": ("blue", "unknown value blue; did you mean"),
    "training.max_steps": ("many", "training.max_steps: input should be a valid integer"),
    "training.gradient_accumulation": (0, "input should be greater than or equal to 1"),
    "training.optimizer.betas": ("[0.9, x]", "training.optimizer.betas: input should be a valid"),
    "training.device": ("gpu9", "no device gpu9 here"),
    "data.train.src": (5, "data.train.src: expected str | list of str | null, not 5"),
    "training": (5, "training: expected a mapping of keys, not 5"),
    "model.architecture": ("vaswani", "no architecture vaswani; did you mean vaswani2017?"),
    "model.size": ("smal", "no size smal of vaswani2017; known: tiny, base, big"),
    "model.positions": ("sine", "model.positions: Input should be 'sinusoidal'"),
    "model.dropout": (1.5, "dropout must be at least 0 and below 1"),
    "training.schedule.learning_rate": ("null", "needs a learning_rate"),
}
REFUSED = [  # a command, and parts of its error
    *(
        (f"train copy.json --out run --set '{key}={value}'", part)
        for key, (value, part) in KEYS.items()
    ),
    ("translate M --input nowhere --output out", "nowhere", NO_FILE),
    ("evaluate M --src nowhere --ref lines --output out", "nowhere", NO_FILE),
    ("evaluate M --src lines --ref nowhere --output out", "nowhere", NO_FILE),
    ("score M --src lines --tgt nowhere --output out", "nowhere", NO_FILE),
    *((use.format("none"), "none", "does not exist") for use in USES),
    ("train pairs.json --set data.train.src=nowhere.en", "nowhere.en", NO_FILE),
    (
        "train bare.json",
        "data.train is not given",
        "add --set data.train.src=FILE --set data.train.tgt=FILE, or --set data.train.file=FILE",
    ),
    ("train half.json", "1 src files but 0 tgt files"),
    ("train none.yaml", "none.yaml", "no such file"),
    ("train dattes", "did you mean dates?"),
    ("recipes show copi", "did you mean copy?"),
    ("translate M --input folder", "folder is a folder: name a folder for its translations"),
    ("evaluate M --src folder --ref lines", "folder", FOLDER),
    ("score M --src lines --tgt folder", "folder", FOLDER),
    ("train pairs.json --set data.train.tgt=folder", "folder", "has no files"),
    ("train folder", "folder", "is a directory"),
    ("translate lines", "lines", "not a model directory"),
    ("train copy.json --out lines", "lines", "is a file"),
    ("average M lines", "lines", "exists"),
    ("average M out --last 99", "--last 99 is more than the checkpoints that there are"),
    ("distill M --student", "--student is for translators", "the task copy"),
    ("translate M a --output folder", "Is a directory; name another place"),
    ("train pairs.json --set data.train.tgt=more.de", "32 lines", "33", "more.de"),
    ("evaluate M --src two --ref three", "2 lines", "has 3"),
    ("score M --src two --tgt three", "2 lines", "has 3"),
    ("evaluate M --src empty --ref empty", "empty", "empty"),
    ("score M --src empty --tgt empty", "empty", "empty"),
    ("train pairs.json --set data.train.src=empty --set data.train.tgt=empty", "is empty"),
    ("train pairs.json --set data.train.src=blank --set data.train.tgt=blank", "is empty"),
    ("train pairs.json --set data.valid_size=30", "valid_size 30 of 32"),
    ("train pairs.json --set data.train.src=latin.en", "latin.en", "line 7", "UTF-8"),
    ("translate M --input latin --output out", "latin", "line 2", "UTF-8"),
    ("score M --src two --tgt latin", "latin", "line 2", "UTF-8"),
    ("translate M --output out < latin", "stdin, line 2", "UTF-8"),
    ("train pairs.json --set data.train.src=half.en.gz", "half.en.gz", "damaged"),
    *(
        (
            f"train pairs.json --set tokenizer.kind={kind} --set tokenizer.vocab_size=5000",
            *("5000", "more than the text allows", "vocab_size"),
        )
        for kind in ("bpe", "unigram", "wordpiece", "byte_bpe")
    ),
    (
        "train copy.json --set model.d_model=18 --set model.num_heads=4",
        *("d_model 18", "num_heads 4", "divisible"),
    ),
    ("train copy.json --set training.schedule.name=noam", "learning_rate to null"),
    ("train tight.json", "alone takes 12 tokens", "8"),
    ("train long.json", "long.en", "line 33", "40"),  # also where pairs are held out
    ("train short.json --set data.truncation=error", "src and", "tokens", "max_length 5"),
    ("train open.yaml", "open.yaml, line"),
    ("train list.yaml", "a recipe is a mapping of keys, not a list"),
    ("train latin.yaml", "not UTF-8 at byte"),
    ("train endless.yaml", "no end is set"),
    ("train copy.json --set task", "write key=value"),
    ("translate M --strict --input long --output out", TOO_LONG, "allows 12", "--truncate"),
    ("evaluate M --strict --src long --ref four --output out", TOO_LONG, "allows 12", "--truncate"),
    ("score M --strict --src long --tgt four --output out", TOO_LONG, "allows 12", "--truncate"),
    ("score M --strict --src four --tgt long --output out", TOO_LONG, "allows 12", "--truncate"),
    *(
        (f"{use.format('M')} --output a.en/out", "cannot write", "Not a directory")
        for use in USES[1:3]
    ),
    ("average M a.en/out", "cannot write", "Not a directory"),
    ("recipes cp copy a.en/out", "cannot write", "Not a directory"),
    ("train copy.json --out a.en/out", "cannot write", "Not a directory"),
    ("translate M --normalization averge --input lines", "average"),
    ("translate M --stop-rule never --input lines", "optimal"),
    ("evaluate M --src lines --ref lines --metrics bleu,chrff", "chrff", "chrf"),
]


@pytest.mark.parametrize(("line", "parts"), [(line, parts) for line, *parts in REFUSED])
def test_bad_input_is_one_line_and_leaves_no_files(commands, trained, workdir, line, parts):
    line, _, stdin = line.partition(" < ")
    words = [str(trained) if word == "M" else word for word in shlex.split(line)]
    stdin_bytes = (workdir / stdin).read_bytes() if stdin else b""
    starts = [words]
    if words[0] == "train":
        starts = [[*words, "--quiet"]]
        if "--out" not in words:  # in a new folder, and in an empty existing one
            (workdir / "made").mkdir()
            starts = [[*words, "--quiet", "--out", out] for out in ("runs/new", "made")]
    before = tree(workdir)
    for start in starts:
        assert_refused(commands.run(*start, stdin=stdin_bytes, cwd=workdir), *parts)
        assert tree(workdir) == before


# --- valid and corrected input ---------------------------------------------------------------


def test_a_corrected_command_runs_in_the_same_folder(commands, workdir):
    """No file of the failed start is used: the corpus is another one."""
    more = ("--set", "model.d_model=18", "--set", "model.num_heads=4")
    assert_refused(commands.train(workdir / "copy.json", workdir / "mine", *more), "divisible")
    more = ("--set", "model.d_model=16", "--set", "data.generated.num_symbols=4")
    ended = commands.train(workdir / "copy.json", workdir / "mine", *more)
    assert (ended.code, ended.err) == (0, "")
    config = json.loads((workdir / "mine/config.json").read_text())
    assert (config["model"]["d_model"], config["model"]["src_vocab_size"]) == (16, 4 + 4)


def test_an_empty_input_has_an_empty_translation(commands, trained, workdir):
    ended = commands.run("translate", trained, "--input", workdir / "empty")
    assert (ended.code, ended.out, ended.err) == (0, "", "")


@pytest.mark.parametrize("name", ["a.en", "a.de"])
def test_dropped_pairs_are_reported_also_with_held_out_pairs(commands, workdir, name):
    """The summary was once missing if the recipe named no validation files."""
    for side in ("a.en", "a.de"):
        lines = (workdir / side).read_text().splitlines(keepends=True)
        blank = "\n" if side == name else "one more\n"
        (workdir / side).write_text("".join([*lines[:3], blank, *lines[3:]]))
    ended = commands.run("train", "pairs.json", "--out", "out", cwd=workdir)
    assert ended.code == 0, ended.err
    counts = "source 1, target 0" if name == "a.en" else "source 0, target 1"
    assert f"33 lines read, 32 pairs kept; 1 dropped as empty ({counts})" in ended.out
    assert "4 lines read, 4 pairs kept" in ended.out


def test_lines_that_are_too_long_are_left_out_and_counted(commands, trained, workdir):
    words = ("translate", trained, "--input", workdir / "long")
    outcome = commands.run(*words, "--no-split-sentences")
    assert outcome.code == 0
    lines = outcome.out.split("\n")
    assert lines[1:3] == ["", ""]
    assert outcome.err.splitlines()[0].startswith(TOO_LONG)
    assert "lines left out, whose outputs are blank: 2" in outcome.err.splitlines()
    alone = commands.run("translate", trained, stdin=b"1 2\n3\n")
    assert lines[:1] + lines[3:] == alone.out.split("\n")


def test_lines_that_are_too_long_are_translated_in_parts(commands, trained, workdir):
    words = ("translate", trained, "--input", workdir / "long")
    outcome = commands.run(*words)
    assert outcome.code == 0, outcome.err
    parts = "note: lines too long for the model, translated in parts: 2"
    assert outcome.err.splitlines()[0].startswith(parts)
    assert len(outcome.out.splitlines()) == 4
    scored = commands.run(*words, "--scores")
    assert "lines left out, whose outputs are blank: 2" in scored.err.splitlines()


def test_lines_before_an_interruption_are_kept(tmp_path):
    from heedful.cli.lines import line_writer
    from heedful.errors import UserError

    out = tmp_path / "out"

    def write_until(error):
        with line_writer(out) as write:
            write("new")
            raise error

    out.write_text("old\n")
    for error, is_kept in ((KeyboardInterrupt, True), (SystemExit, True), (UserError, False)):
        with pytest.raises(error):
            write_until(error)
        assert out.read_text() == "old\n"
        names = {path.name for path in tmp_path.iterdir()}
        assert names == ({"out", "out.partial"} if is_kept else {"out"})
        if is_kept:
            assert (tmp_path / "out.partial").read_text() == "new\n"
            (tmp_path / "out.partial").unlink()


def test_truncated_lines_are_counted(commands, trained, workdir):
    cut = commands.run("translate", trained, "--input", workdir / "long", "--truncate")
    assert cut.code == 0, cut.err
    assert len(cut.out.splitlines()) == 4
    assert "truncated lines: 2" in cut.err.splitlines()
    by_hand = " ".join(LONG.split()[:11])
    same = commands.run("translate", trained, stdin=f"1 2\n{by_hand}\n{by_hand}\n3\n".encode())
    assert same.out == cut.out
    assert "truncated" not in same.err


@pytest.mark.parametrize(
    ("way", "counted"),
    [("truncate", "truncated to the maximum length"), ("drop", "dropped as too long")],
)
def test_long_training_pairs(commands, workdir, way, counted):
    words = ("train", "short.json", "--out", way, "--set", f"data.truncation={way}")
    ended = commands.run(*words, cwd=workdir)
    assert ended.code == 0, ended.err
    line = next(line for line in ended.out.splitlines() if line.startswith("train "))
    assert counted in line


def test_labels_in_brackets_are_printed_unchanged(commands, tmp_path):
    """Text of a data set is not markup."""
    rows = [f"{'[/INST]' if n % 2 else '[red]'}\ttext {n}" for n in range(40)]
    (tmp_path / "a.tsv").write_text("\n".join(rows) + "\n")
    recipe = {
        "task": "classification",
        "data": {
            "train": {"file": str(tmp_path / "a.tsv"), "text_field": 2, "label_field": 1},
            "valid_size": 4,
        },
        "tokenizer": {"kind": "word", "vocab_size": None},
        "model": {"architecture": "bert", "d_model": 8, "num_heads": 2, "num_layers": 1, "d_ff": 8},
        "training": {"device": "cpu", "max_steps": 1, "schedule": {"learning_rate": 0.01}},
    }
    (tmp_path / "r.json").write_text(json.dumps(recipe))
    ended = commands.run("train", tmp_path / "r.json", "--out", tmp_path / "[red]run")
    assert ended.code == 0, ended.err
    assert re.search(r"\[/INST\] \(\d+\), \[red\] \(\d+\)", ended.out)
    assert f"{tmp_path}/[red]run" in ended.out


# --- a truncated or foreign checkpoint ------------------------------------------------------


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def refuse_uses(commands, model, *parts):
    """Every command refuses a damaged model, and changes nothing."""
    (model.parent / "lines").write_text("1 2\n")
    before = tree(model.parent)
    for use in USES:
        assert_refused(commands.run(*use.format("model").split(), cwd=model.parent), *parts)
        assert tree(model.parent) == before


def test_truncated_weights(commands, model):
    file = model / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        refused = commands.run("translate", model, stdin=b"1 2\n")
        assert_refused(refused, file, "truncated, or another format")
    refuse_uses(commands, model, "model.safetensors")


def test_weights_are_never_unpickled(commands, model, tmp_path):
    file, trace = model / "model.safetensors", tmp_path / "unpickled"
    file.write_bytes(pickle.dumps(Bomb(trace)))
    refuse_uses(commands, model, "model.safetensors", "another format")
    assert not trace.exists()
    pickle.loads(file.read_bytes()).close()  # the bomb is a real one
    assert trace.exists()


def test_a_pickled_run_is_never_unpickled(commands, model, tmp_path):
    trace = tmp_path / "unpickled"
    newest = sorted((model / "checkpoints").glob("step-*"))[-1]
    parts = ("model.safetensors", "training.safetensors", "state.json")
    prepared = json.loads((model / "run.json").read_text())["data"]
    ids = Path(os.environ["HEEDFUL_CACHE"]) / "data" / prepared / "train/src.ids.bin"
    best = model / "checkpoints/best.safetensors"
    for file in (*(newest / name for name in parts), best, ids):
        whole = file.read_bytes()
        file.write_bytes(pickle.dumps(Bomb(trace)))
        blocked = prepared if file == ids else file
        assert_refused(commands.train(model / "recipe.yaml", model, "--resume"), blocked)
        file.write_bytes(whole)
    assert not trace.exists()


def test_weights_of_another_model(commands, model):
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(4)
    (model / "model.safetensors").write_bytes(content)
    refuse_uses(commands, model, "model.safetensors", "2 layers are more than its 1 tensors")


def test_damaged_configs_and_tokenizers(commands, model):
    config, tokenizer = model / "config.json", model / "tokenizer.json"
    content, whole = json.loads(config.read_text()), tokenizer.read_text()
    for text, part in (
        (config.read_text()[:50], "not JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "not written by heedful"),
        (json.dumps(content | {"architecture": "gpt9"}), "no architecture gpt9"),
        (json.dumps(content | {"model": {}}), "src_vocab_size"),
        (json.dumps(content | {"model": content["model"] | {"depth": 1}}), "unknown key depth"),
        (json.dumps(content | {"tokenizers": {"src": "gone", "tgt": "gone"}}), "gone"),
        (json.dumps(content | {"tokenizers": {"src": "../a", "tgt": "../a"}}), "beside it"),
    ):
        config.write_text(text)
        assert_refused(commands.run("translate", model, stdin=b"1\n"), part)
    config.write_text(json.dumps(content))
    for text in ("", whole[: len(whole) // 2], "{}", '{"format": "heedful-tokenizer-1"}'):
        tokenizer.write_text(text)
        assert_refused(commands.run("translate", model, stdin=b"1\n"), tokenizer)
    config.unlink()
    assert_refused(
        commands.run("translate", model, stdin=b"1\n"), config, "does not exist, so this is not"
    )


# --- a full disk or unwritable output -------------------------------------------------------


def test_a_full_disk_while_translating(commands, trained, workdir):
    (workdir / "lines").write_text("1 2 3 4 5\n" * 400)
    (workdir / "out").write_text("what was there before")
    before = tree(workdir)
    words = ("translate", trained, "--input", "lines", "--output", "out")
    refused = commands.run(*words, cwd=workdir, file_limit=200)
    assert_refused(refused, "out", "cannot write", "File too large")
    assert tree(workdir) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize(
    "line",
    [
        "translate M",
        USES[2],
        "evaluate M --src lines --ref lines --json",
        "info M",
        "recipes show copy",
    ],
)
def test_a_full_disk_behind_stdout(commands, trained, workdir, line):
    words = [str(trained) if word in ("M", "{}") else word for word in line.split()]
    ended = commands.run(*words, stdin=b"1 2 3\n", stdout="/dev/full", cwd=workdir)
    assert_refused(ended, "cannot write", "No space left")


@pytest.mark.parametrize("limit", [400, 4_000, 20_000])
def test_a_full_disk_while_training(commands, tmp_path, limit):
    """At any time: existing files are complete, and the run can be resumed."""
    recipe = write_recipe(tmp_path / "recipe.json", training__max_steps=6)
    out = tmp_path / "run"
    refused = commands.train(recipe, out, file_limit=limit)
    assert_refused(refused, "cannot write", "File too large")
    assert not list(tmp_path.rglob("*.tmp"))
    if limit == 400:  # before the first step
        assert not out.exists()
    ended = commands.train(recipe, out, *(["--resume"] if out.exists() else []))
    assert ended.code == 0, ended.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("line", ["train copy.json --out closed/run", "translate M -o closed/x"])
def test_a_folder_without_permission(commands, trained, workdir, line):
    (workdir / "closed").mkdir(mode=0o500)
    words = [str(trained) if word == "M" else word for word in line.split()]
    assert_refused(commands.run(*words, stdin=b"1\n", cwd=workdir), "Permission denied")


# --- the words of Python callers and of the command line ----------------------------------------

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
SHELL = re.compile(r"(heedful|torchrun|ray|pip)\b[^;,.(]*?--[a-z][a-z-]+")  # a whole command
# Texts of the library that are for the command line: what `heedful plan` suggests, the command that
# repeats a run, a description in `heedful recipes show`, and flags that are declared.
FOR_THE_COMMAND_LINE = {
    "plan/planner.py": 2, "training/divergence.py": 2, "config/recipe.py": 1, "options.py": 2
}  # fmt: skip


def texts_of(module: ast.Module) -> Iterator[str]:
    """The literal texts of a module, without docstrings."""
    skipped = {node.value for node in ast.walk(module) if isinstance(node, ast.Expr)}
    for node in ast.walk(module):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            skipped |= {*node.values}
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            yield node.value


def test_messages_of_the_library_name_arguments_and_no_flags() -> None:
    """The command line puts its flags in place of the arguments (`with_flags`)."""
    found: dict[str, int] = {}
    source = Path(heedful.__file__).parent
    for path in source.rglob("*.py"):
        name = path.relative_to(source).as_posix()
        if name.split("/")[0] in ("cli", "serve"):  # which have no callers in Python
            continue
        for text in texts_of(ast.parse(path.read_text(encoding="utf-8"))):
            if FLAG.search(SHELL.sub("", text)):
                found[name] = found.get(name, 0) + 1
    assert found == FOR_THE_COMMAND_LINE


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("x exists; give overwrite=True", "x exists; give --overwrite"),
        ("give another out=FOLDER, or move it", "give another --out FOLDER, or move it"),
        ("give tokenizer=False to", "give --no-tokenizer to"),
        ("gpus=0: must be 1", "--gpus 0: must be 1"),
        ("(tgt_language=CODE)", "(--tgt-lang CODE)"),
        ("add data.src=A data.tgt=B", "add --set data.src=A --set data.tgt=B"),
        ("backward_changes has no effect", "--backward-set has no effect"),
        ('cut (too_long="truncate")', "cut (--truncate)"),
        ("first=FIRST and last=LAST with", "--tokens FIRST:LAST with"),
        ("overrides: data.x=1: write", "--set data.x=1: write"),
        ("overrides: data.x: unknown", "--set: data.x: unknown"),
        ("length_penalty needs num_groups: x", "--length-penalty needs --num-groups: x"),
        ("option json_schema and option regex", "--json-schema and --regex"),
        ("temperature must be above 0", "--temperature must be above 0"),
        ("beam_size = 4, beam_size=N", "--beam-size = 4, --beam-size N"),
        # what is no argument stays
        ("a temperature must be above 0", "a temperature must be above 0"),
        ('evaluation.beam_size, "tgt_language"', 'evaluation.beam_size, "tgt_language"'),
        ("a/config.json: min_p must be 1", "a/config.json: min_p must be 1"),
        ("model: top_k 3 is above num_experts 2", "model: top_k 3 is above num_experts 2"),
        ("`heedful train a --set data.x=1`", "`heedful train a --set data.x=1`"),
        ("data.out=3x of my.overwrite=True", "--set data.out=3x of my.overwrite=True"),
        ("data.out is de, scores=1, memory is full", "data.out is de, scores=1, memory is full"),
    ],
)  # fmt: skip
def test_flags_are_shown_in_place_of_arguments(message: str, shown: str) -> None:
    assert with_flags(message) == shown
