"""Initialization from another model: copied tensors, printed summary, refused sources."""

import json
import re
from typing import Any

import pytest
import torch

import heedful
from commands import assert_refused, tiny, write_recipe
from heedful.config import parse_recipe
from heedful.data.tokenizer import train_tokenizer
from heedful.errors import UserError
from heedful.run import train
from heedful.zoo import bert
from heedful.zoo.saved import VOCABULARY_TENSORS, load_tensors, weights_of

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A trained model of the task copy."""
    folder = tmp_path_factory.mktemp("source") / "run"
    train(parse_recipe(tiny(training__max_steps=3)), folder)
    return folder


def start(source: Any, **changes: Any) -> Any:
    return parse_recipe(tiny(init_from=str(source), **({"training__max_steps": 1} | changes)))


STILL = {"name": "constant", "learning_rate": 1e-12, "warmup_steps": 0}


def test_all_weights_sizes_and_tokenizers_are_inherited(source, tmp_path):
    printed_lines: list[str] = []
    recipe = start(source, model={}, training__schedule=STILL, data__generated__num_symbols=4)
    train(recipe, tmp_path / "run", print_line=printed_lines.append)
    before, after = (heedful.load(path, device="cpu") for path in (source, tmp_path / "run"))
    assert after.config == before.config
    assert after.src_tokenizer.content() == before.src_tokenizer.content()
    source_tensors = load_tensors(source / WEIGHTS)
    for name, tensor in load_tensors(tmp_path / "run" / WEIGHTS).items():
        torch.testing.assert_close(tensor, source_tensors[name], rtol=0, atol=1e-9)
    assert f"init_from  {len(source_tensors)} tensors of {source} loaded" in printed_lines
    assert not any("initialized" in line or "not used" in line for line in printed_lines)


def test_tensors_that_were_not_copied_are_summarized(source, tmp_path):
    printed_lines: list[str] = []
    recipe = start(source, model={"num_encoder_layers": 2, "d_ff": 48})
    train(recipe, tmp_path / "run", print_line=printed_lines.append)
    new = next(line for line in printed_lines if "initialized, not loaded" in line)
    unused = next(line for line in printed_lines if "of its tensors not used" in line)
    own = {name: t.shape for name, t in load_tensors(tmp_path / "run" / WEIGHTS).items()}
    source_shapes = {name: t.shape for name, t in load_tensors(source / WEIGHTS).items()}
    initialized = {name for name in own if own[name] != source_shapes.get(name)}
    assert f"{len(initialized)} initialized" in new
    blocks = sum(name.startswith("encoder.blocks.") for name in initialized)
    assert f"encoder.blocks ({blocks})" in new
    left = {name for name in source_shapes if source_shapes[name] != own.get(name)}
    assert f"{len(left)} of its tensors not used" in unused
    names = json.loads((tmp_path / "run/init_from.json").read_text())
    assert set(names["initialized"]) == initialized
    assert set(names["not_used"]) == left
    assert set(names["loaded"]) == own.keys() - initialized
    assert f"           all names are in {tmp_path / 'run/init_from.json'}" in printed_lines
    assert f"           model.d_ff is 48, where {source} has 32" in printed_lines
    assert f"{len(own) - len(initialized)} tensors of" in "\n".join(printed_lines)


def test_sizes_of_the_source_replace_those_of_a_recipe(source, tmp_path, commands):
    recipe = write_recipe(tmp_path / "wide.json", model__d_ff=48, model__dropout=0.2)
    for sets, sizes in (
        ((), (32, 1)),
        (("--set", "model.num_encoder_layers=2"), (32, 2)),
    ):
        out = tmp_path / f"run{len(sets)}"
        done = commands.train(recipe, out, "--set", f"init_from={source}", *sets)
        assert done.code == 0, done.err
        config = heedful.load(out, device="cpu").config
        assert (config.d_ff, config.num_encoder_layers, config.dropout) == (*sizes, 0.2)


def test_the_maximum_length_is_inherited_and_longer_texts_are_refused(source, tmp_path, commands):
    train(start(source, model={}, data__max_length=8), tmp_path / "run")
    assert heedful.load(tmp_path / "run", device="cpu").config.max_length == 12
    recipe = write_recipe(tmp_path / "r.json", init_from=str(source), data__max_length=20)
    ended = commands.train(recipe, tmp_path / "long")
    assert_refused(ended, "data.max_length 20", "the 12 tokens")
    assert not (tmp_path / "long").exists()


def test_a_model_with_nothing_in_common_is_refused(source, tmp_path, commands):
    recipe = write_recipe(
        tmp_path / "r.json",
        init_from=str(source),
        model={"d_model": 24, "num_heads": 2, "d_ff": 48, "bias": False},
    )
    ended = commands.train(recipe, tmp_path / "run")
    assert_refused(ended, "init_from: no tensor of", source, "architecture or sizes differ")
    assert not (tmp_path / "run").exists()


def test_a_relative_path_is_relative_to_the_current_folder(source, tmp_path, commands):
    recipe = write_recipe(
        tmp_path / "r.json", init_from=source.name, model={}, training__max_steps=1
    )
    ended = commands.train(recipe, tmp_path / "here", cwd=source.parent)
    assert ended.code == 0, ended.err
    elsewhere = commands.train(recipe, tmp_path / "elsewhere", cwd=tmp_path)
    assert_refused(elsewhere, "run", "does not exist")


def test_a_run_that_is_killed_before_its_first_checkpoint_starts_from_it_again(
    source, tmp_path, commands
):
    recipe = write_recipe(tmp_path / "r.json", init_from=str(source), model={})
    assert commands.train(recipe, tmp_path / "whole").code == 0
    kill = {"call": "replace", "path": r"checkpoints/", "when": "before"}
    assert commands.train(recipe, tmp_path / "run", kill=kill).signal == 9
    assert not list((tmp_path / "run/checkpoints").glob("step-*"))
    ended = commands.train(recipe, tmp_path / "run", "--resume")
    assert ended.code == 0, ended.err
    for name in (WEIGHTS, "scores.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_embeddings_of_another_vocabulary_of_equal_size_are_not_copied(source, tmp_path):
    """Embeddings are copied only for an equal vocabulary, not for one of equal size."""
    other = tmp_path / "teacher"
    changes = {"task": "reverse", "data__generated__seed": 5, "training__max_steps": 1}
    train(parse_recipe(tiny(**changes)), other)
    edited = json.loads((other / "tokenizer.json").read_text())
    vocabulary = edited["tokenizer"]["model"]["vocab"]
    words = sorted(vocabulary, key=vocabulary.get)
    first, last = words[4], words[-1]
    vocabulary[first], vocabulary[last] = vocabulary[last], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(edited))
    printed_lines: list[str] = []
    recipe = start(source, model={}, distillation={"teacher": str(other)})
    train(recipe, tmp_path / "run", print_line=printed_lines.append)
    new = next(line for line in printed_lines if "initialized, not loaded" in line)
    names = new.split(": ")[1].split(", ")
    assert names == ["src_embedding.tokens.weight"]  # of all three, since they are tied


def test_names_of_vocabulary_tensors():
    names = weights_of(bert.build(bert.Config(12, 8, 2, 1, 16, max_length=8, tie_embeddings=False)))
    rows = {name for name, weight in names.items() if weight.size(0) == 12}
    assert rows == {name for name in names if re.fullmatch(VOCABULARY_TENSORS, name)}


def test_a_run_may_use_an_existing_tokenizer(tmp_path):
    """Its ids are kept; with `init_from` of another vocabulary it is refused."""
    own = train_tokenizer(["9 8 7 6 5 4 3 2 1 0"], kind="word", extra_specials=("<mask>",))
    own.save(tmp_path / "tokenizer.json")
    keys = {"tokenizer": {"path": str(tmp_path / "tokenizer.json")}, "training__max_steps": 1}
    train(parse_recipe(tiny(**keys)), tmp_path / "run")
    model = heedful.load(tmp_path / "run", device="cpu")
    assert model.tokenizer.encode("9 0") == own.encode("9 0")
    assert model.config.src_vocab_size == own.vocab_size == 15
    train(parse_recipe(tiny(training__max_steps=1)), tmp_path / "other")
    other, same = (
        parse_recipe(tiny(**keys, model={}, init_from=str(tmp_path / name)))
        for name in ("other", "run")
    )
    with pytest.raises(UserError, match=r"tokenizer\.path: .* is another tokenizer"):
        train(other, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    train(same, tmp_path / "again")
