"""Bad input, by running the command: one clear line, exit code 2, nothing half-written."""

import gzip
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from commands import Commands, assert_refused, tiny, tree, write_recipe

SENTENCES = [
    f"the {a} dog sees a {b} cat" for a in ["red", "old", "big", "shy"] for b in ["wet", "sad"]
]


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    commands = Commands(tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()


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
def corpus(tmp_path):
    """Two line-parallel files and the recipe of a run over them."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.en").write_text("".join(f"{line}\n" for line in SENTENCES * 4))
    (folder / "a.de").write_text("".join(f"{line[::-1]}\n" for line in SENTENCES * 4))
    return folder


def translation(corpus, **changes):
    sides = {"src": str(corpus / "a.en"), "tgt": str(corpus / "a.de")}
    data = {"train": sides, "hold_out": 4, "max_length": 40}
    return write_recipe(
        corpus / "recipe.json", task="translation", data=data, training__max_steps=2, **changes
    )


def refuse_train(commands, recipe, *more, parts, **options):
    """A start that fails leaves nothing, and the same --out can be used afterwards."""
    folder = recipe.parent
    before = tree(folder)
    out = folder / "runs" / "new"
    assert_refused(commands.train(recipe, out, *more, **options), *parts)
    assert tree(folder) == before
    # In a folder that is there already with something of the user's in it.
    own = folder / "mine"
    own.mkdir()
    (own / "notes.txt").write_text("keep me")
    before = tree(folder)
    assert_refused(commands.train(recipe, own, *more, **options), *parts)
    assert tree(folder) == before
    return own


def refuse(commands, *arguments, parts, watched, **options):
    """A verb other than train: refused, and nothing in the watched folder has changed."""
    before = tree(watched)
    assert_refused(commands.run(*arguments, **options), *parts)
    assert tree(watched) == before


# --- a missing file -------------------------------------------------------------------------


def test_missing_files(commands, trained, corpus, tmp_path):
    missing, there = tmp_path / "nowhere.en", corpus / "a.en"
    out = ("--output", tmp_path / "out.txt")
    for arguments in (
        ("translate", trained, "--input", missing, *out),
        ("evaluate", trained, "--src", missing, "--ref", there, *out),
        ("evaluate", trained, "--src", there, "--ref", missing, *out),
        ("score", trained, "--src", there, "--tgt", missing, *out),
    ):
        refuse(commands, *arguments, parts=[missing, "No such file"], watched=tmp_path)


def test_missing_model(commands, corpus, tmp_path):
    missing = tmp_path / "nomodel"
    for arguments in (
        ("translate", missing),
        ("evaluate", missing, "--src", corpus / "a.en", "--ref", corpus / "a.en"),
        ("score", missing, "--src", corpus / "a.en", "--tgt", corpus / "a.en"),
        ("average", missing, tmp_path / "average"),
        ("verify", missing),
        ("info", missing),
    ):
        refuse(commands, *arguments, parts=[missing, "does not exist"], watched=tmp_path)


def test_missing_training_data(commands, corpus):
    recipe = translation(corpus)
    more = ("--set", f"data.train.src={corpus / 'nowhere.en'}")
    refuse_train(commands, recipe, *more, parts=[corpus / "nowhere.en", "No such file"])


def test_data_not_given(commands, tmp_path):
    recipe = write_recipe(tmp_path / "r.json", task="translation", data={})
    refuse_train(commands, recipe, parts=["data.train is not given", "--set data.train.src=FILE"])
    recipe = write_recipe(tmp_path / "r.json", task="translation", data={"train": {"src": "a"}})
    assert_refused(commands.train(recipe, tmp_path / "new"), "1 src files but 0 tgt files")


def test_missing_recipe(commands, tmp_path):
    refused = commands.train(tmp_path / "none.yaml", tmp_path / "run")
    assert_refused(refused, tmp_path / "none.yaml", "no such file")
    assert_refused(commands.run("train", "dattes"), "did you mean dates?")
    assert_refused(commands.run("recipes", "show", "copi"), "did you mean copy?")


def test_missing_file_in_a_real_process(trained, tmp_path):
    """As a shell runs it: nothing forked, nothing imported before."""
    code = "from heedful.cli import main; main()"
    arguments = ["translate", str(trained), "--input", str(tmp_path / "nowhere")]
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stderr.startswith(f"error: cannot read {tmp_path / 'nowhere'}: No such file")


def test_unknown_recipe_key_in_a_real_process(tmp_path):
    code = "from heedful.cli import main; main()"
    arguments = ["train", "copy", "--set", "training.max_step=3", "--out", str(tmp_path / "run")]
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stderr.startswith("error: ")
    assert "unknown key training.max_step; did you mean max_steps?" in ended.stderr
    assert not (tmp_path / "run").exists()


# --- a directory for a file -----------------------------------------------------------------


def test_directories_for_files(commands, trained, corpus, tmp_path):
    there = corpus / "a.en"
    for arguments in (
        ("translate", trained, "--input", corpus),
        ("evaluate", trained, "--src", corpus, "--ref", there),
        ("score", trained, "--src", there, "--tgt", corpus),
    ):
        refuse(commands, *arguments, parts=[corpus, "Is a directory"], watched=tmp_path)
    out = tmp_path / "folder"
    out.mkdir()
    refuse(
        commands,
        *("translate", trained, "--output", out),
        parts=[out, "Is a directory"],
        watched=tmp_path,
        stdin=b"1 2 3\n",
    )


def test_a_directory_for_training_data(commands, corpus):
    more = ("--set", f"data.train.tgt={corpus}")
    refuse_train(commands, translation(corpus), *more, parts=[corpus, "Is a directory"])


def test_a_directory_for_a_recipe(commands, tmp_path):
    (tmp_path / "folder").mkdir()
    refused = commands.train(tmp_path / "folder", tmp_path / "run")
    assert_refused(refused, tmp_path / "folder", "is a directory")
    assert not (tmp_path / "run").exists()


def test_a_file_for_a_directory(commands, trained, corpus, tmp_path):
    there = corpus / "a.en"
    refuse(commands, "translate", there, parts=[there, "not a model directory"], watched=tmp_path)
    refused = commands.train(write_recipe(tmp_path / "r.json"), there)
    assert_refused(refused, there, "is a file")
    refuse(commands, "average", trained, there, parts=[there, "exists"], watched=tmp_path)


# --- files of different length, empty, broken -----------------------------------------------


def test_files_of_different_length(commands, trained, corpus, tmp_path):
    (corpus / "a.de").open("a").write("one more\n")
    (tmp_path / "short").write_text("1 2\n3 4\n")
    (tmp_path / "long").write_text("1 2\n3 4\n5 0\n")
    own = refuse_train(commands, translation(corpus), parts=["32 lines", "33", corpus / "a.de"])
    for verb, tgt in (("evaluate", "--ref"), ("score", "--tgt")):
        arguments = (verb, trained, "--src", tmp_path / "short", tgt, tmp_path / "long")
        refuse(commands, *arguments, parts=["2 lines", "has 3"], watched=tmp_path)
    # Corrected, the same command with the same folder runs.
    (corpus / "a.en").open("a").write("one more\n")
    recipe = translation(corpus)
    assert commands.train(recipe, own).code == 0
    assert (own / "model.safetensors").is_file()
    assert (own / "notes.txt").read_text() == "keep me"


def test_an_empty_corpus(commands, trained, corpus, tmp_path):
    for content in ("", "\n  \n\n"):
        for name in ("a.en", "a.de"):
            (corpus / name).write_text(content)
        refuse_train(commands, translation(corpus), parts=["corpus is empty"])
        shutil.rmtree(corpus / "mine")
    (tmp_path / "empty").write_text("")
    for verb, tgt in (("evaluate", "--ref"), ("score", "--tgt")):
        arguments = (verb, trained, "--src", tmp_path / "empty", tgt, tmp_path / "empty")
        refuse(commands, *arguments, parts=[tmp_path / "empty", "empty"], watched=tmp_path)


def test_an_empty_input_has_an_empty_translation(commands, trained, tmp_path):
    (tmp_path / "empty").write_text("")
    ended = commands.run("translate", trained, "--input", tmp_path / "empty")
    assert (ended.code, ended.out, ended.err) == (0, "", "")


def test_too_few_pairs_to_hold_out(commands, corpus):
    refuse_train(
        commands, translation(corpus), "--set", "data.hold_out=30", parts=["hold_out 30 of 32"]
    )


def test_what_was_dropped_is_told_also_where_pairs_are_held_out(commands, corpus):
    """The account of the text was once lost when the recipe named no validation files."""
    for name in ("a.en", "a.de"):
        lines = (corpus / name).read_text().splitlines(keepends=True)
        (corpus / name).write_text("".join([*lines[:3], "\n", *lines[3:]]))
    ended = commands.run("train", translation(corpus), "--out", corpus / "out")
    assert ended.code == 0, ended.err
    assert "33 lines read, 28 pairs kept; 1 dropped as empty (source 1, target 1)" in ended.out
    assert "4 lines read, 4 pairs kept" in ended.out


def test_a_pair_that_is_too_long_is_named_by_its_line_also_where_pairs_are_held_out(
    commands, corpus
):
    for name in ("a.en", "a.de"):
        with (corpus / name).open("a") as file:
            file.write("very " * 60 + "\n")
    refuse_train(
        commands,
        translation(corpus),
        *("--set", "data.truncation=error"),
        parts=[corpus / "a.en", "line 33", "40"],
    )


def test_invalid_utf8_names_the_line(commands, trained, corpus, tmp_path):
    lines = (corpus / "a.en").read_bytes().splitlines(keepends=True)
    (corpus / "a.en").write_bytes(b"".join([*lines[:6], b"caf\xe9\n", *lines[7:]]))
    refuse_train(commands, translation(corpus), parts=[corpus / "a.en", "line 7", "UTF-8"])
    (tmp_path / "bad").write_bytes(b"1 2\n3 \xff\n")
    (tmp_path / "good").write_bytes(b"1 2\n3 4\n")
    for arguments in (
        ("translate", trained, "--input", tmp_path / "bad", "--output", tmp_path / "out"),
        ("score", trained, "--src", tmp_path / "good", "--tgt", tmp_path / "bad"),
    ):
        refuse(commands, *arguments, parts=[tmp_path / "bad", "line 2", "UTF-8"], watched=tmp_path)
    refuse(
        commands,
        *("translate", trained, "--output", tmp_path / "out"),
        stdin=b"1 2\n3 4\n\xe4\n",
        parts=["stdin, line 3", "UTF-8"],
        watched=tmp_path,
    )


def test_damaged_gzip(commands, corpus):
    packed = gzip.compress((corpus / "a.en").read_bytes())
    (corpus / "a.en.gz").write_bytes(packed[: len(packed) // 2])
    more = ("--set", f"data.train.src={corpus / 'a.en.gz'}")
    refuse_train(commands, translation(corpus), *more, parts=[corpus / "a.en.gz", "damaged"])


# --- settings that do not fit ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "byte_bpe"])
def test_a_vocabulary_larger_than_the_text_gives(commands, corpus, kind):
    recipe = translation(corpus, tokenizer={"kind": kind, "vocab_size": 5000})
    refuse_train(commands, recipe, parts=["5000", "more than the text gives", "vocab_size"])


def test_d_model_not_divisible_by_heads(commands, tmp_path):
    recipe = write_recipe(tmp_path / "recipe.json", model__d_model=18, model__num_heads=4)
    own = refuse_train(commands, recipe, parts=["d_model 18", "num_heads 4", "divisible"])
    # The corrected command, with another corpus too: nothing of the failed start is used.
    more = ("--set", "model.d_model=16", "--set", "data.generated.num_symbols=4")
    ended = commands.train(recipe, own, *more)
    assert ended.code == 0, ended.err
    assert "4 symbols" not in ended.err
    assert "'4'" not in ended.err
    config = json.loads((own / "config.json").read_text())
    assert (config["model"]["d_model"], config["model"]["src_vocab_size"]) == (16, 4 + 4)


def test_pairs_that_no_batch_can_hold(commands, tmp_path):
    recipe = write_recipe(tmp_path / "r.json", training__batch_tokens=8)
    refuse_train(commands, recipe, parts=["alone takes 12 tokens", "8"])


UNKNOWN_KEYS = {
    "tasks": ("copy", "unknown key tasks; did you mean task?"),
    "data.trian.src": ("x", "unknown key data.trian; did you mean train?"),
    "data.train.scr": ("x", "unknown key data.train.scr; did you mean src?"),
    "data.generated.num_trains": (
        1,
        "unknown key data.generated.num_trains; did you mean num_train?",
    ),
    "tokenizer.vocabsize": (9, "unknown key tokenizer.vocabsize; did you mean vocab_size?"),
    "training.lr": (1, "unknown key training.lr; known: "),
    "training.optimizer.beta": (1, "unknown key training.optimizer.beta; did you mean betas?"),
    "training.schedule.warmup": (
        1,
        "unknown key training.schedule.warmup; did you mean warmup_steps?",
    ),
    "evaluation.beam": (1, "unknown key evaluation.beam; did you mean beam_size?"),
    "model.num_head": (2, "unknown key num_head; did you mean num_heads?"),
}
UNKNOWN_VALUES = {
    "task": ("translate", "task: unknown value translate; did you mean translation?"),
    "tokenizer.kind": ("bpee", "tokenizer.kind: unknown value bpee; did you mean bpe?"),
    "training.precision": ("fp16", "training.precision: unknown value fp16; did you mean"),
    "training.schedule.name": ("cosin", "unknown value cosin; did you mean cosine?"),
    "training.optimizer.name": ("adamww", "unknown value adamww; did you mean adamw?"),
    "evaluation.metric": ("blue", "unknown value blue; did you mean"),
    "training.max_steps": ("many", "training.max_steps: input should be a valid integer"),
    "training.max_steps ": (0, "unknown key training.max_steps ; did you mean max_steps?"),
    "training.gradient_accumulation": (0, "input should be greater than or equal to 1"),
    "training.optimizer.betas": ("[0.9, x]", "training.optimizer.betas: input should be a valid"),
    "training.device": ("gpu9", "no device gpu9 here"),
    "data.train.src": (5, "data.train.src: input should be a valid"),
    "training": (5, "training: input should be a valid dictionary"),
    "model.architecture": ("vaswani", "no architecture vaswani; did you mean vaswani2017?"),
    "model.size": ("smal", "no size smal of vaswani2017; known: tiny, base, big"),
    "model.positions": ("sine", "model: positions: input should be 'sinusoidal'"),
    "model.dropout": (1.5, "dropout must be at least 0 and below 1"),
}


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [(key, *rest) for table in (UNKNOWN_KEYS, UNKNOWN_VALUES) for key, rest in table.items()],
)
def test_unknown_recipe_keys_and_values(commands, tmp_path, key, value, part):
    recipe = write_recipe(tmp_path / "recipe.json")
    before = tree(tmp_path)
    refused = commands.train(recipe, tmp_path / "run", "--set", f"{key}={value}")
    assert refused.code == 2, refused.err
    assert len(refused.err.splitlines()) == 1
    assert part.lower() in refused.err.lower(), refused.err
    assert tree(tmp_path) == before


def test_recipes_that_are_none(commands, tmp_path):
    bad = tmp_path / "bad.yaml"
    for content, part in (
        (b"task: [copy", "bad.yaml, line"),
        (b"- task\n- copy\n", "a recipe is a mapping of keys, not a list"),
        (b"task: copy\nname: caf\xe9\n", "cannot read the recipe"),
        (b"task: copy\n", "no end is set"),
    ):
        bad.write_bytes(content)
        assert_refused(commands.train(bad, tmp_path / "run"), part)
        assert not (tmp_path / "run").exists()
    recipe = write_recipe(tmp_path / "recipe.json")
    assert_refused(commands.train(recipe, tmp_path / "run", "--set", "task"), "write key=value")


def test_settings_that_contradict_each_other(commands, tmp_path):
    recipe = write_recipe(tmp_path / "recipe.json")
    for changes, part in (
        (("training.schedule.name=noam",), "learning_rate to null"),
        (("training.schedule.learning_rate=null",), "needs a learning_rate"),
        (("training.optimizer.weight_decay=0.1",), "set name to adamw"),
        (("training.batch_sentences=null",), "give training.batch_tokens or"),
        (("evaluation.metric=bleu", "evaluation.decode_sentences=0"), "raise decode_sentences"),
        (
            ("training.schedule.name=cosine", "training.max_steps=null", "training.max_epochs=1"),
            "ends at training.max_steps",
        ),
    ):
        more = [word for change in changes for word in ("--set", change)]
        assert_refused(commands.train(recipe, tmp_path / "run", *more), part)
        assert not (tmp_path / "run").exists()


# --- a sequence longer than the model allows ------------------------------------------------

LONG = " ".join("012345012345")  # 12 symbols and EOS are 13 tokens


def test_a_line_longer_than_the_model_allows(commands, trained, tmp_path):
    (tmp_path / "long").write_text(f"1 2\n{LONG}\n{LONG}\n3\n")
    (tmp_path / "short").write_text("1 2\n3\n3\n3\n")
    long, short = tmp_path / "long", tmp_path / "short"
    parts = ["line 2 has 13 tokens", "allows 12", "--truncate"]
    for arguments in (
        ("translate", trained, "--input", long, "--output", tmp_path / "out"),
        ("evaluate", trained, "--src", long, "--ref", short, "--output", tmp_path / "out"),
        ("score", trained, "--src", long, "--tgt", short, "--output", tmp_path / "out"),
        ("score", trained, "--src", short, "--tgt", long, "--output", tmp_path / "out"),
    ):
        refuse(commands, *arguments, parts=parts, watched=tmp_path)


def test_cut_lines_are_counted(commands, trained, tmp_path):
    (tmp_path / "long").write_text(f"1 2\n{LONG}\n{LONG}\n3\n")
    cut = commands.run("translate", trained, "--input", tmp_path / "long", "--truncate")
    assert cut.code == 0, cut.err
    assert len(cut.out.splitlines()) == 4
    assert "2 lines were truncated" in cut.err.splitlines()
    by_hand = " ".join(LONG.split()[:11])
    same = commands.run("translate", trained, stdin=f"1 2\n{by_hand}\n{by_hand}\n3\n".encode())
    assert same.out == cut.out
    assert "truncated" not in same.err


def test_long_training_pairs(commands, tmp_path):
    recipe = write_recipe(tmp_path / "recipe.json", data__max_length=5)
    error = ("--set", "data.truncation=error")
    refuse_train(commands, recipe, *error, parts=["source", "tokens", "max_length 5"])
    for way, counted in (
        ("truncate", "cut to the longest allowed"),
        ("drop", "dropped as too long"),
    ):
        out = tmp_path / way
        ended = commands.run("train", recipe, "--out", out, "--set", f"data.truncation={way}")
        assert ended.code == 0, ended.err
        line = next(line for line in ended.out.splitlines() if line.startswith("train "))
        assert counted in line


# --- a truncated or foreign checkpoint ------------------------------------------------------


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def use_model(commands, model, parts, tmp_path):
    (tmp_path / "lines").write_text("1 2\n")
    lines = tmp_path / "lines"
    for arguments in (
        ("translate", model, "--input", lines, "--output", tmp_path / "out"),
        ("evaluate", model, "--src", lines, "--ref", lines),
        ("info", model),
        ("verify", model),
        ("average", model, tmp_path / "average"),
    ):
        refuse(commands, *arguments, parts=parts, watched=tmp_path)


def test_truncated_weights(commands, model, tmp_path):
    file = model / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        refused = commands.run("translate", model, stdin=b"1 2\n")
        assert_refused(refused, file, "truncated, or another format")
    use_model(commands, model, [file], tmp_path)


def test_foreign_weights_are_never_unpickled(commands, model, tmp_path):
    file, trace = model / "model.safetensors", tmp_path / "unpickled"
    file.write_bytes(pickle.dumps(Bomb(trace)))
    use_model(commands, model, [file, "another format"], tmp_path)
    assert not trace.exists()
    pickle.loads(file.read_bytes()).close()  # the bomb is a real one
    assert trace.exists()


def test_a_pickled_run_is_never_unpickled(commands, model, tmp_path):
    trace = tmp_path / "unpickled"
    newest = sorted((model / "checkpoints").glob("step-*"))[-1]
    recipe = model / "recipe.yaml"
    for name in ("model.safetensors", "training.safetensors", "state.json"):
        whole = (newest / name).read_bytes()
        (newest / name).write_bytes(pickle.dumps(Bomb(trace)))
        assert_refused(commands.train(recipe, model, "--resume"), newest / name)
        (newest / name).write_bytes(whole)
    ids = model / "data/train/src.ids.npy"
    ids.write_bytes(pickle.dumps(Bomb(trace)))
    assert_refused(commands.train(recipe, model, "--resume"), ids)
    assert not trace.exists()


def test_weights_of_another_model(commands, model, tmp_path):
    file = model / "model.safetensors"
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    use_model(commands, model, [file, "lacks the tensor"], tmp_path)


def test_foreign_descriptions(commands, model):
    config = model / "config.json"
    content = json.loads(config.read_text())
    for text, part in (
        (config.read_text()[:50], "no JSON"),
        ("[]", "not written by heedful"),
        ("{}", "not written by heedful"),
        (json.dumps(content | {"architecture": "gpt9"}), "no architecture gpt9"),
        (json.dumps(content | {"model": {}}), "src_vocab_size"),
        (json.dumps(content | {"model": content["model"] | {"depth": 1}}), "unknown key depth"),
        (json.dumps(content | {"tokenizers": {"src": "gone", "tgt": "gone"}}), "gone"),
        (json.dumps(content | {"tokenizers": {"src": "../a", "tgt": "../a"}}), "beside it"),
    ):
        config.write_text(text)
        assert_refused(commands.run("translate", model, stdin=b"1\n"), part)
    config.unlink()
    assert_refused(commands.run("translate", model, stdin=b"1\n"), config, "No such file")


def test_foreign_tokenizers(commands, model):
    file = model / "tokenizer.json"
    whole = file.read_text()
    for text in ("", whole[: len(whole) // 2], "{}", '{"format": "heedful-tokenizer-1"}'):
        file.write_text(text)
        assert_refused(commands.run("translate", model, stdin=b"1\n"), file)


# --- a full disk or unwritable output -------------------------------------------------------


def test_a_full_disk_while_translating(commands, trained, tmp_path):
    (tmp_path / "lines").write_text("1 2 3 4 5\n" * 400)
    (tmp_path / "out").write_text("what was there before")
    refuse(
        commands,
        *("translate", trained, "--input", tmp_path / "lines", "--output", tmp_path / "out"),
        parts=[tmp_path / "out", "cannot write", "File too large"],
        watched=tmp_path,
        file_limit=800,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_behind_stdout(commands, trained, tmp_path):
    (tmp_path / "lines").write_text("1 2 3\n")
    lines = tmp_path / "lines"
    for arguments in (
        ("translate", trained),
        ("score", trained, "--src", lines, "--tgt", lines),
        ("evaluate", trained, "--src", lines, "--ref", lines, "--json"),
        ("info", trained),
        ("recipes", "show", "copy"),
    ):
        ended = commands.run(*arguments, stdin=b"1 2 3\n", stdout="/dev/full")
        assert_refused(ended, "cannot write", "No space left")


@pytest.mark.parametrize("limit", [400, 4_000, 20_000])
def test_a_full_disk_while_training(commands, tmp_path, limit):
    """However early it comes: what is there is whole, and the run can be gone on with."""
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
def test_a_folder_without_permission(commands, trained, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    refused = commands.train(write_recipe(tmp_path / "r.json"), closed / "run")
    assert_refused(refused, "Permission denied")
    refused = commands.run("translate", trained, "--output", closed / "x", stdin=b"1\n")
    assert_refused(refused, "Permission denied")


def test_unwritable_output(commands, trained, corpus, tmp_path):
    below = corpus / "a.en" / "out"  # a file is no folder
    (tmp_path / "lines").write_text("1 2\n")
    lines = tmp_path / "lines"
    for arguments in (
        ("translate", trained, "--input", lines, "--output", below),
        ("score", trained, "--src", lines, "--tgt", lines, "--output", below),
        ("evaluate", trained, "--src", lines, "--ref", lines, "--output", below),
        ("average", trained, below),
        ("recipes", "cp", "copy", below),
        ("train", write_recipe(tmp_path / "r.json"), "--out", below, "--quiet"),
    ):
        refuse(commands, *arguments, parts=["cannot write", "Not a directory"], watched=tmp_path)


# --- options --------------------------------------------------------------------------------


def test_options_out_of_range(commands, trained):
    for arguments, part in (
        (("--normalization", "averge"), "average"),
        (("--stop", "never"), "optimal"),
        (("--device", "gpu9"), "no device gpu9"),
    ):
        assert_refused(commands.run("translate", trained, *arguments, stdin=b"1\n"), part)


def test_unknown_metrics(commands, trained, tmp_path):
    (tmp_path / "lines").write_text("1 2\n")
    lines = tmp_path / "lines"
    arguments = ("evaluate", trained, "--src", lines, "--ref", lines, "--metrics", "bleu,chrff")
    assert_refused(commands.run(*arguments), "chrff", "chrf")


def test_the_recipe_of_these_tests_is_a_good_one(commands, tmp_path):
    """Without it every refusal above could be that of another mistake."""
    assert tiny()["task"] == "copy"
    assert commands.train(write_recipe(tmp_path / "r.json"), tmp_path / "run").code == 0


# --- brackets in data are no markup ---------------------------------------------------------


def test_labels_in_brackets_are_shown_as_they_are(commands, tmp_path):
    rows = [f"{'[/INST]' if n % 2 else '[red]'}\ttext {n}" for n in range(40)]
    (tmp_path / "a.tsv").write_text("label\ttext\n" + "\n".join(rows) + "\n")
    recipe = {
        "task": "classification",
        "data": {
            "train": {"file": str(tmp_path / "a.tsv"), "text_field": 2, "label_field": 1},
            "hold_out": 4,
        },
        "tokenizer": {"kind": "word", "vocab_size": None},
        "model": {"architecture": "bert", "d_model": 8, "num_heads": 2, "num_layers": 1, "d_ff": 8},
        "training": {"device": "cpu", "max_steps": 1, "schedule": {"learning_rate": 0.01}},
    }
    (tmp_path / "r.json").write_text(json.dumps(recipe))
    ended = commands.run("train", tmp_path / "r.json", "--out", tmp_path / "[red]run")
    assert ended.code == 0, ended.err
    assert "[/INST] (20), [red] (20)" in ended.out
    assert f"{tmp_path}/[red]run" in ended.out
