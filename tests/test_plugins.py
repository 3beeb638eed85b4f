"""Tasks, architectures, metrics and schedules from outside the package."""

import json
import os
import subprocess
import sys
import textwrap
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import heedful
from commands import assert_refused, set_variable
from heedful import back_translation, plugins
from heedful.config import parse_recipe
from heedful.errors import UserError
from heedful.export.hf import export_hf, import_hf
from heedful.parts.losses import LossSum
from heedful.run import train
from heedful.tasks.scoring import make_evaluation
from heedful.training.folder import MARKER, save_recipe
from heedful.zoo import gpt2
from heedful.zoo.hf_directory import write_hf_directory
from heedful.zoo.hf_nets import net_to_hf

PAGE = Path(heedful.__file__).parents[2] / "docs" / "plugins.md"
RECIPE = {
    "task": "doubling",
    "data": {"generated": {"num_train": 60, "num_valid": 6, "num_test": 6}, "max_length": 40},
    "tokenizer": {"kind": "word", "vocab_size": None},
    "model": {"architecture": "tiny_pair", "d_model": 16},
    "training": {
        "device": "cpu",
        "max_steps": 3,
        "batch_sentences": 10,
        "evaluate_every": 3,
        "schedule": {"name": "triangle", "learning_rate": 0.01},
    },
    "evaluation": {"metric": "length_ratio", "decode_sentences": 3, "final_beam_size": 1},
}


@contextmanager
def registered_here():
    """Entries registered in the block are removed after it."""
    with ExitStack() as stack:
        for registry in plugins._REGISTRIES:
            registry.names()
            stack.enter_context(patch.dict(registry._entries))
            stack.enter_context(patch.dict(registry._plugins))
        stack.enter_context(patch.dict(plugins._loaded))
        yield


@pytest.fixture(scope="module", autouse=True)
def _unregister_after_each_test():
    """Entries of these tests do not reach the tests of other files in this process.

    The shipped plugin is loaded before: its module is imported, and so registers, only once.
    """
    heedful.load_recipe("dates")
    with registered_here():
        yield


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """The plugin that the documentation shows."""
    _, code = PAGE.read_text(encoding="utf-8").split("```python\n", 1)
    path = tmp_path_factory.mktemp("plugin") / "doubling.py"
    path.write_text(code.partition("```")[0], encoding="utf-8")
    return path


def test_a_plugin_task_and_architecture_train_save_load_and_generate(plugin, tmp_path):
    recipe = parse_recipe(RECIPE | {"plugins": [str(plugin)]})
    result = train(recipe, tmp_path / "run")
    assert result.scores is not None
    assert "length_ratio" in result.scores.values()
    model = heedful.load(tmp_path / "run", device="cpu")
    assert model.metadata.architecture == "tiny_pair"
    assert model.metadata.plugins == ("doubling.py",)
    assert model.config.d_model == 16
    source = "1 2 3"
    assert model.translate([source]) == [model.generate([source])[0]]
    assert model.score([source], ["1 1 2 2 3 3"])[0].num_tokens == 7


def test_a_plugin_metric_declares_its_direction(plugin):
    plugins.metric("words_wrong", higher_is_better=False)(lambda outputs, references, **_: None)
    recipe = parse_recipe(
        RECIPE | {"plugins": [str(plugin)], "evaluation": {"metric": "words_wrong"}}
    )
    sums = LossSum(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(1), 1)
    actual = [make_evaluation(recipe, sums, [], {"words_wrong": count}) for count in (0.1, 0.9)]
    few, many = (item.value for item in actual)
    assert few > many


def test_by_command_and_a_model_in_another_process(commands, plugin, tmp_path):
    (tmp_path / "r.json").write_text(json.dumps(RECIPE | {"plugins": [str(plugin)]}))
    ended = commands.run("train", tmp_path / "r.json", "--out", tmp_path / "run")
    assert ended.code == 0, ended.err
    refused = commands.run("translate", tmp_path / "run", stdin=b"1 2\n")
    assert_refused(refused, "needs the plugin doubling.py", "HEEDFUL_PLUGINS")
    # The recipe in the folder names the plugin's file, which a command that only reads it must
    # not execute: the folder may come from anybody.
    run = tmp_path / "run"
    for command in (
        ("report", run),
        ("inspect", run),
        ("distill", run, "--student"),
        ("recipes", "show", run),
        ("demo", "--out", run),
    ):
        refused = commands.run(*command, cwd=tmp_path)
        assert_refused(refused, f"{run} needs the plugin doubling.py")
    known = partial(set_variable, "HEEDFUL_PLUGINS", str(plugin))
    for command in (("report", run), ("recipes", "show", run)):
        ended = commands.run(*command, first=known)
        assert ended.code == 0, ended.err
    ended = commands.run("translate", tmp_path / "run", stdin=b"1 2\n", first=known)
    assert ended.code == 0, ended.err
    assert len(ended.out.splitlines()) == 1


def test_a_plugin_that_an_output_folder_names_is_not_executed(tmp_path):
    """A folder to continue in may come from anybody; the given recipe names the user's plugins."""
    mark, out = tmp_path / "ran", tmp_path / "run"
    (tmp_path / "own.py").write_text(f"open({str(mark)!r}, 'w').close()")
    listed = {"plugins": [str(tmp_path / "own.py")]}
    content = {key: RECIPE[key] for key in ("data", "tokenizer")}
    content |= {"task": "copy", "training": {"max_steps": 1}}
    recipe = parse_recipe(content)
    out.mkdir()
    (out / "recipe.yaml").write_text(json.dumps(content | listed))
    (out / MARKER).write_text(json.dumps({"heedful": heedful.__version__, "precision": "float32"}))
    (out / "scores.json").write_text("{}")
    for read in (
        lambda: train(recipe, out, resume=True, progress=False),
        lambda: save_recipe(recipe, out / "recipe.yaml"),
        lambda: back_translation._train_unless_complete(recipe, out, train),
    ):
        with pytest.raises(UserError, match=r"run\S* needs the plugin own\.py"):
            read()
        assert not mark.exists()
    # By a recipe that names it, the plugin runs, and the folder's recipe is read.
    given = parse_recipe(content | listed)
    assert mark.exists()
    save_recipe(given, out / "recipe.yaml")


WRONG = {
    "1 + 'a'": ", line 1: TypeError: unsupported operand",
    "x = 1\nimport nothing_of_this_name": ", line 2: ModuleNotFoundError: No module named",
    "def f(:\n": ", line 1: SyntaxError: invalid syntax",
    "from heedful import plugins\n@plugins.metric('new_one')\ndef f(): ...": (
        ", line 2: TypeError: Metrics.__call__() missing 1 required keyword-only argument: "
        "'higher_is_better'"
    ),
    "from heedful import plugins\n@plugins.metric('bleu', higher_is_better=True)\ndef f(): ...": (
        ", line 2: the metric bleu is registered already (by heedful itself); rename yours"
    ),
    "from heedful import plugins\nplugins.task('new_one')(1)\nplugins.task('copy')(1)": (
        ", line 3: the task copy is registered already"
    ),
}


@pytest.mark.parametrize(("code", "reason"), WRONG.items())
def test_a_plugin_that_does_not_load_is_refused_in_one_line(code, reason, tmp_path):
    path = tmp_path / f"wrong{abs(hash(code))}.py"
    path.write_text(code)
    for _ in range(2):  # registrations before the error are removed, so that it can be repeated
        with pytest.raises(UserError) as refused:
            plugins.load_plugin(path)
        assert str(refused.value).startswith(f"plugin {path}{reason}")
        assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="no task new_one"):
        plugins.task.get("new_one")


def test_missing_plugins_are_refused(tmp_path, commands):
    with pytest.raises(UserError, match=r"plugin nowhere\.py: no such file"):
        plugins.load_plugin("nowhere.py")
    recipe = RECIPE | {"plugins": ["nowhere.py"]}
    (tmp_path / "r.json").write_text(json.dumps(recipe))
    refused = commands.run("train", tmp_path / "r.json", "--out", tmp_path / "run")
    assert_refused(refused, tmp_path / "r.json", "plugin nowhere.py: no such file")


@pytest.mark.parametrize(
    ("entry", "described"),
    [("old_name", "a str"), (type("Toy", (), {"Config": 1}), "the class Toy"), (gpt2, "a module")],
)
def test_an_object_that_is_no_architecture_is_refused(entry, described):
    with pytest.raises(
        UserError, match=rf"takes a heedful\.zoo\.architectures\.Architecture, not {described}$"
    ):
        plugins.architecture(entry)


def test_a_plugin_architecture_is_imported_and_exported(tmp_path):
    """By the model type of its format; the model stores the plugin's name."""
    (tmp_path / "toy.py").write_text(
        textwrap.dedent("""
        from dataclasses import replace

        from heedful import plugins
        from heedful.zoo import gpt2

        hf = gpt2.ARCHITECTURE.formats["hf"]
        toy = replace(hf, config=replace(hf.config, model_type="toy"))
        plugins.architecture(replace(gpt2.ARCHITECTURE, name="toy", formats={"hf": toy}))
        """)
    )
    plugins.load_plugin(tmp_path / "toy.py")
    config = gpt2.Config(vocab_size=9, d_model=4, num_heads=1, num_layers=1, max_length=8)
    net = gpt2.build(config)
    write_hf_directory(tmp_path / "hf", *net_to_hf("toy", config, net))
    model = import_hf(tmp_path / "hf", tmp_path / "ours")
    assert (model.metadata.architecture, model.metadata.plugins) == ("toy", ("toy.py",))
    export_hf(heedful.load(tmp_path / "ours", device="cpu"), tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "toy"


REUSES = """
from dataclasses import replace

from heedful import plugins
from heedful.zoo import gpt2

hf = gpt2.ARCHITECTURE.formats["hf"]
hf = replace(hf, config=replace(hf.config, model_type="{model_type}"))
plugins.architecture(replace(gpt2.ARCHITECTURE, name="{name}", formats={{"hf": hf}}))
"""


def test_a_plugin_for_a_known_format_is_used_only_by_name(tmp_path):
    """heedful's own architecture precedes a plugin's; of two plugins neither is preferred."""
    with registered_here():
        for name, model_type in (("mine", "gpt2"), ("one", "shared"), ("two", "shared")):
            path = tmp_path / f"reuses_{name}.py"
            path.write_text(REUSES.format(name=name, model_type=model_type))
            plugins.load_plugin(path)
        config = gpt2.Config(vocab_size=9, d_model=4, num_heads=1, num_layers=1, max_length=8)
        net = gpt2.build(config)
        write_hf_directory(tmp_path / "gpt2", *net_to_hf("mine", config, net))
        write_hf_directory(tmp_path / "shared", *net_to_hf("one", config, net))
        selected = [("gpt2", None, "gpt2"), ("gpt2", "mine", "mine"), ("shared", "two", "two")]
        for number, (folder, architecture, expected) in enumerate(selected):
            out = tmp_path / f"out{number}"
            model = import_hf(tmp_path / folder, out, architecture=architecture)
            assert model.metadata.architecture == expected
            assert model.metadata.plugins == (
                () if architecture is None else (f"reuses_{architecture}.py",)
            )
        with pytest.raises(UserError, match="one and two read the model type shared; choose one"):
            import_hf(tmp_path / "shared", tmp_path / "out")
        with pytest.raises(
            UserError, match=r"llama does not read the model type gpt2; .*gpt2, mine"
        ):
            import_hf(tmp_path / "gpt2", tmp_path / "out", architecture="llama")


def test_two_plugins_with_one_file_name_are_refused(tmp_path):
    """A model stores a plugin by its file's name."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same_name.py").write_text("")
    plugins.load_plugin(tmp_path / "a/same_name.py")
    plugins.load_plugin(tmp_path / "a/same_name.py")
    with pytest.raises(UserError, match="has the same name; rename one"):
        plugins.load_plugin(tmp_path / "b/same_name.py")


REGISTERS = """
from heedful import plugins
plugins.schedule("{name}_before")("{name}")
with open({log!r}, "a") as log:
    log.write("{name}\\n")
{loads}
plugins.schedule.names()
plugins.schedule("{name}_after")("{name}")
"""


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_plugins_that_load_each_other_run_once_and_own_their_entries(data):
    """For any graph of plugins, with loops and cycles, reached by path and by the variable."""
    count = data.draw(st.integers(1, 4))
    numbers = st.integers(0, count - 1)
    edges = [data.draw(st.lists(numbers, max_size=3), label=f"loaded by {n}") for n in range(count)]
    listed = data.draw(st.lists(numbers, max_size=3), label="in the variable")
    with TemporaryDirectory() as folder, registered_here(), ExitStack() as stack:
        paths = [Path(folder).resolve() / f"p{number}.py" for number in range(count)]
        log = Path(folder) / "log"
        for path, others in zip(paths, edges, strict=True):
            loads = "\n".join(f"plugins.load_plugin({str(paths[k])!r})" for k in others)
            path.write_text(REGISTERS.format(name=path.stem, log=str(log), loads=loads))
        variable = os.pathsep.join(str(paths[number]) for number in listed)
        stack.enter_context(patch.dict(os.environ, {plugins.VARIABLE: variable}))
        plugins._load_external_plugins.cache_clear()
        stack.callback(plugins._load_external_plugins.cache_clear)
        plugins.load_plugin(paths[0])
        reached = [0, *listed]
        for number in reached:
            reached += [k for k in edges[number] if k not in reached]
        names = {f"p{number}" for number in reached}
        assert sorted(log.read_text().split()) == sorted(names)
        for name in names:
            for entry in ("before", "after"):
                assert plugins.schedule.plugin_of(f"{name}_{entry}") == f"{name}.py"
            module = sys.modules.pop(f"heedful_plugin_{name}")
            assert module.__file__ == str(Path(folder).resolve() / f"{name}.py")


@pytest.mark.parametrize("first", ["own", "shipped"])
def test_a_file_with_the_name_of_a_shipped_plugin_does_not_hide_it(first, tmp_path, monkeypatch):
    """In either order; both are loaded, under separate names."""
    own = tmp_path / "dates.py"
    own.write_text("from heedful import plugins\nplugins.schedule('of_days')(len)\n")
    monkeypatch.delitem(sys.modules, "heedful.examples.dates", raising=False)
    with registered_here():
        for registry in (plugins.task._entries, plugins.task._plugins, plugins._loaded):
            for name in ("dates", "dates.py", "shipped:dates.py"):
                registry.pop(name, None)
        paths = [own, "shipped:dates.py"]
        for path in paths if first == "own" else paths[::-1]:
            plugins.load_plugin(path)
        assert plugins.task.plugin_of("dates") == "shipped:dates.py"
        assert plugins.schedule.plugin_of("of_days") == "dates.py"


def test_an_installed_package_adds_its_plugins(tmp_path):
    """By an entry point of the group heedful, when an unknown name is looked up."""
    (tmp_path / "outside.py").write_text(
        textwrap.dedent("""
        from heedful import plugins

        @plugins.schedule("halved")
        def halved(settings, *, d_model, max_steps):
            return lambda step: 0.5**step
        """)
    )
    info = tmp_path / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[heedful]\noutside = outside\n")
    code = "from heedful import plugins; halved = plugins.schedule.get('halved'); "
    code += "print(halved(0, d_model=1, max_steps=1)(2))"
    actual = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join([str(tmp_path), *sys.path]), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert actual.stdout == "0.25\n", actual.stderr
