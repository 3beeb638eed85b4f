"""Mistakes in Python: each public name answers a wrong argument with one line (`UserError`)."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import heedful
from backend_models import model_of
from heedful import insight, models, parts, zoo
from heedful.zoo import bert, gpt2, vaswani2017

PAIRS = [("a b", "c d")] * 8
SIZES = {"d_model": 16, "num_heads": 2, "max_length": 16}
Call = Callable[[Any], object]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Models of each kind, nets with their Configs, and a folder with some of them and others."""
    folder = tmp_path_factory.mktemp("misuse")
    translator, lm = model_of("marian"), model_of("gpt2")
    lm.save(folder / "lm")
    (folder / "file").write_text("x")
    (folder / "empty").mkdir()
    (folder / "other").mkdir()
    (folder / "other" / "config.json").write_text("{}")
    (folder / "mamba").mkdir()
    (folder / "mamba" / "config.json").write_text('{"model_type": "mamba"}')
    (folder / "bare").mkdir()
    (folder / "bare" / "config.json").write_text('{"model_type": "gpt2"}')
    decoder, pair = gpt2.Config(50, num_layers=1, **SIZES), {"num_decoder_layers": 1}
    two = vaswani2017.Config(50, 50, num_encoder_layers=1, d_ff=32, **pair, **SIZES)
    classes = bert.Config(50, num_layers=1, d_ff=32, head="classify", **SIZES)
    return SimpleNamespace(
        folder=folder,
        translator=translator,
        lm=lm,
        classifier=model_of("bert", head="classify"),
        mlm=model_of("bert", head="mlm"),
        tokenizer=heedful.train_tokenizer(["a b c d"], kind="word"),
        config=decoder,
        net=gpt2.build(decoder),
        two_config=two,
        two=vaswani2017.build(two),
        classes_config=classes,
        classes=bert.build(classes),
    )


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


def train(data: Any, task: str = "translation", **keys: Any) -> object:
    recipe = heedful.load_recipe(task, {"training.max_steps": 1})
    return heedful.train(recipe, data=data, progress=False, **keys)


LOADING: dict[str, Call] = {
    "path must be a path, as text or a pathlib.Path, not 5 (int)": lambda w: heedful.load(5),
    "not None": lambda w: heedful.load(None),
    "not b'lm' (bytes)": lambda w: heedful.load_translator(b"lm"),
    "does not exist": lambda w: heedful.load(w.folder / "nowhere"),
    "is a file, not a model directory": lambda w: heedful.load(w.folder / "file"),
    "config.json does not exist, so this": lambda w: heedful.load(w.folder / "empty"),
    "was not written by heedful": lambda w: heedful.load(w.folder / "other"),
    "model type mamba is not supported": lambda w: heedful.load(w.folder / "mamba"),
    "holds neither model.safetensors": lambda w: heedful.load(w.folder / "bare"),
    "backend must be": lambda w: heedful.load(w.folder / "lm", backend="onnx"),
    "precision must be": lambda w: heedful.load(w.folder / "lm", precision="fp4"),
    "no device tpu": lambda w: heedful.load(w.folder / "lm", device="tpu"),
    "threads must be from 1": lambda w: heedful.load(w.folder / "lm", threads="2"),
    "use must be": lambda w: heedful.load(w.folder / "lm", use="speed"),
    "needs a translator": lambda w: heedful.load_translator(w.folder / "lm"),
    "needs an encoder": lambda w: heedful.load_encoder(w.folder / "lm"),
    "needs a classifier": lambda w: heedful.load_classifier(w.folder / "lm"),
    "needs a masked": lambda w: heedful.load_masked_language_model(w.folder / "lm"),
    "directory must be a path, as text or a pathlib.Path, not None": lambda w: w.lm.save(None),
    "base must be a path": lambda w: w.lm.save(w.folder / "new", base=3),
    "exists already, as a file": lambda w: w.lm.save(w.folder / "file"),
}
TEXTS: dict[str, Call] = {
    "not 5 (int)": lambda w: w.lm.generate(5),
    "texts must be a list": lambda w: w.lm.generate(text for text in ["a"]),
    "not b'the cat' (bytes)": lambda w: w.lm.generate(b"the cat"),
    "not b'cat' (bytes)": lambda w: w.lm.generate([b"cat"]),
    "of token ids, not None": lambda w: w.lm.generate(["the", None]),
    "of token ids, not 7 (int)": lambda w: w.lm.generate(["the", 7]),
    "of token ids, not [5, 'the'] (list)": lambda w: w.lm.generate([5, "the"]),
    "of token ids, not [1.5] (list)": lambda w: w.lm.generate([[1.5]]),
    "not {'text': 'a'} (dict)": lambda w: w.lm.generate({"text": "a"}),
    "token id 1000000 is outside": lambda w: w.lm.generate([[10**6]]),
    "token id -1 is outside": lambda w: w.lm.generate([-1]),
    "prompt 1 is empty": lambda w: w.lm.generate([[]]),
    "of token ids, not ['a', 'b'] (list)": lambda w: list(w.lm.stream(["a", "b"])),
    "draft must be a language model": lambda w: w.lm.generate("a", draft=w.translator),
    "windows must be lists": lambda w: list(w.lm.iterate_generations("a b")),
    "for one text write [text]": lambda w: w.lm.score("the cat"),
    "stride must be a whole number": lambda w: w.lm.score(["a"], stride="x"),
    "batch_tokens must be at least 1, not 'x'": lambda w: w.lm.score(["a"], batch_tokens="x"),
    "1 sources but 2 targets": lambda w: w.translator.score(["a"], ["b", "c"]),
    "sources must be a list": lambda w: w.translator.score("a", "b"),
    "sources must be a list of texts, but one is 1": lambda w: w.translator.score([1], ["a"]),
    "source line 1 has": lambda w: w.translator.score(["the " * 200], ["a"]),
    "there are no pairs": lambda w: w.translator.teacher_forced([], []),
    "1 sources but 0 targets": lambda w: w.translator.pair_ids(["a"], []),
    "1 texts but 2 second": lambda w: w.classifier.classify(["a"], pairs=["b", "c"]),
    "pairs must be a list": lambda w: w.classifier.classify(["a"], pairs="b"),
    "pairs must be a list of texts, but": lambda w: w.classifier.classify(["a"], pairs=[None]),
    "too_long must be": lambda w: w.classifier.classify("a", too_long="cut"),
    "batch_tokens must be at least 1, not -3": lambda w: w.lm.embed(["a"], batch_tokens=-3),
    "normalize must be True or False": lambda w: w.lm.embed("a", normalize="no"),
    "pooling must be": lambda w: w.lm.embed("a", pooling="median"),
    "texts must be a list of texts, but": lambda w: w.mlm.fill([5]),
    "top_k must be at least 1": lambda w: w.mlm.fill("a <mask>", top_k="x"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "beam_size must be at least 1, not -1": {"beam_size": -1},
    "beam_size must be a whole number, not '4' (str)": {"beam_size": "4"},
    "beam_size must be a whole number, not 2.5": {"beam_size": 2.5},
    "beam_size must be a whole number, not True": {"beam_size": True},
    "max_new_tokens must be at least 1": {"max_new_tokens": 0},
    "temperature must be a number, not 'hot'": {"temperature": "hot"},
    "temperature must be a finite number": {"temperature": float("nan")},
    "temperature 0 of generate is greedy": {"temperature": -1.0},
    "top_p must be above 0 and at most 1": {"top_p": 1.5},
    "top_k must be at least 1": {"top_k": 0},
    "top_k must be a whole number": {"top_k": 1.5},
    "seed must be a whole number": {"seed": "x"},
    "normalization must be average, gnmt, none": {"normalization": "mean"},
    "stop_rule must be optimal": {"stop_rule": "first"},
    "stop must be a list of texts": {"stop": [5]},
    "banned must be a list": {"banned": "cat"},
    "token id 10000000 is outside": {"banned": [10**7]},
    "require must be a list": {"require": "cat"},
    "unknown generation option beams; did you mean beam_size?": {"beams": 3},
    "draft must be a model": {"draft": 3},
    "prefixes must be a list of texts": {"prefixes": "the"},
    "forced must be a mapping": {"forced": [1]},
    "the prefix function must return ids, not None": {"prefix_function": lambda index, ids: None},
    "prefix_function must be a function": {"prefix_function": 3},
    "progress must be a function": {"progress": True},
    "batch_tokens must be a whole number": {"batch_tokens": "x"},
    "too_long must be error": {"too_long": None},
    "length_penalty must be a number": {"length_penalty": "a", "beam_size": 2},
    "exclude each other": {"beam_size": 4, "temperature": 1.0},
    "must divide the beam": {"beam_size": 4, "num_groups": 3},
    "scores must be True or False": {"scores": "no"},
}
MAKING: dict[str, Call] = {
    "net is a Linear": lambda w: heedful.from_net(nn.Linear(2, 2), w.config),
    "config is a NoneType": lambda w: heedful.from_net(w.net, None),
    "config is not that of the net": lambda w: heedful.from_net(w.net, w.two_config),
    "shape (60, 16)": lambda w: heedful.from_net(w.net, gpt2.Config(60, num_layers=1, **SIZES)),
    "the tokenizer is a str": lambda w: heedful.from_net(w.net, w.config, "words"),
    "without tokenizer": lambda w: heedful.from_net(w.two, w.two_config, tgt_tokenizer=w.tokenizer),
    "1 labels, but": lambda w: heedful.from_net(w.classes, w.classes_config, labels=["a"]),
    "labels must be a list": lambda w: heedful.from_net(w.classes, w.classes_config, labels="ab"),
    "the same name": lambda w: heedful.from_net(w.classes, w.classes_config, labels=["a", "a"]),
    "limits must be Limits": lambda w: heedful.from_net(w.two, w.two_config, limits=3),
    "has no tokenizer: give lists": lambda w: heedful.from_net(w.net, w.config).generate("a"),
    "has no EOS id": lambda w: heedful.from_net(w.net, w.config).generate([1]),
    "at least one model": lambda w: heedful.ensemble([]),
    "needs a list of models": lambda w: heedful.ensemble(w.lm),
    "of another kind (translator)": lambda w: heedful.ensemble([w.lm, w.translator]),
    "not 'lm' (str)": lambda w: heedful.ensemble(["lm"]),
    "1 weights for 2 models": lambda w: heedful.ensemble([w.lm, w.lm], weights=[1.0]),
    "weights must be numbers": lambda w: heedful.ensemble([w.lm, w.lm], weights=["a", "b"]),
    "has no net": lambda w: heedful.ensemble([w.lm, w.lm]).save(w.folder / "both"),
    "directory must be a path": lambda w: heedful.import_hf(5, w.folder / "new"),
    "out must be a path, as text or a pathlib.Path, not None": lambda w: heedful.import_hf(
        w.folder / "bare", None
    ),
    "nowhere is no directory": lambda w: heedful.import_hf(w.folder / "nowhere", w.folder / "new"),
    "is a model of heedful's already": lambda w: heedful.import_hf(
        w.folder / "lm", w.folder / "new"
    ),
    "export needs a model": lambda w: heedful.export_hf(w.net, w.folder / "new"),
    "exists already": lambda w: heedful.export_hf(w.lm, w.folder / "lm"),
    "precision of the": lambda w: heedful.export_hf(w.lm, w.folder / "new", precision="int8"),
    "verify needs a torch.nn.Module": lambda w: heedful.verify(w.lm),
    "at least 8": lambda w: insight.verify(w.net, length=3),
    "causal must be True or False": lambda w: insight.verify(w.net, causal="no"),
    "stacks must be 1 or 2": lambda w: insight.verify(w.net, stacks=3),
    "outputs must be one of": lambda w: insight.verify(w.net, outputs="logits"),
    "vocab_size must be at least 2": lambda w: insight.verify(w.net, vocab_size=0),
    "tokenizer kind must be": lambda w: heedful.train_tokenizer(["a"], kind="bpee"),
    "texts must be a list of texts, not 'a b'": lambda w: heedful.train_tokenizer("a b"),
    "but one is None": lambda w: heedful.train_tokenizer(["a", None], kind="word"),
    "no text to train": lambda w: heedful.train_tokenizer([], kind="word"),
    "template must be": lambda w: heedful.train_tokenizer(["a"], kind="word", template="all"),
    "normalization must be": lambda w: heedful.train_tokenizer(["a"], normalization="nfx"),
    "vocab_size must be a whole": lambda w: heedful.train_tokenizer(["a"], vocab_size="9"),
    "texts must be a list of texts, but one is 5": lambda w: w.tokenizer.encode(5),
    "decode takes lists of token ids": lambda w: w.tokenizer.decode("5"),
    "not a token id": lambda w: w.tokenizer.decode([-1]),
    "cannot read": lambda w: heedful.Tokenizer.load(w.folder / "nowhere.json"),
}
TRAINING: dict[str, Call] = {
    "no recipe nope": lambda w: heedful.load_recipe("nope"),
    "recipe must be the name or path of one, not 5": lambda w: heedful.train(5),
    "did you mean max_steps?": lambda w: heedful.load_recipe("dates", {"training.steps": 1}),
    "overrides must be a mapping": lambda w: heedful.load_recipe("dates", "training.max_steps=1"),
    "a key must be text": lambda w: heedful.load_recipe("dates", {1: 1}),
    "unknown value translate": lambda w: heedful.load_recipe("dates", {"task": "translate"}),
    "did you mean metric": lambda w: heedful.load_recipe("dates", {"evaluation.metrics": 1}),
    "data.train is not given": lambda w: train(None),
    "rows must be a list or": lambda w: train("a b"),
    "there are no rows": lambda w: train([]),
    "1 items, but a row has 2": lambda w: train([("a",)]),
    "tgt must be a text": lambda w: train([("a", None)]),
    "no column 'tgt' among 'src'": lambda w: train([{"src": "a"}]),
    "unknown split 'training'": lambda w: train({"training": PAIRS}),
    "data, valid, row 1: label 'z' is not among": lambda w: train(
        {"train": [("a b", "x"), ("c d", "y")] * 4, "valid": [("e f", "z")]}, "classification"
    ),
    "data, train is empty": lambda w: train([(" ", "")]),
    "every text has the label '1'": lambda w: train([("a", 1)] * 5, "classification"),
    "out must be a path": lambda w: train(PAIRS, out=5),
    "is a file; give a folder": lambda w: train(PAIRS, out=w.folder / "file"),
    "which no run wrote": lambda w: train(PAIRS, out=w.folder / "lm"),
    "give its folder as out": lambda w: train(PAIRS, resume=True),
    "on_event must be a function": lambda w: train(PAIRS, on_event=5),
}
NETS: dict[str, Call] = {
    "no architecture gtp2; did you mean gpt2?": lambda w: zoo.architecture("gtp2"),
    "no architecture 5": lambda w: zoo.architecture(5),
    "gpt2.Config: unknown key width": lambda w: gpt2.Config(50, width=3),
    "d_model 16 is not divisible by num_heads 3": lambda w: gpt2.Config(d_model=16, num_heads=3),
    "gpt2.Config: vocab_size: Input": lambda w: gpt2.Config("fifty"),
    "vocab_size must be at least 1": lambda w: gpt2.Config(-5),
    "gpt2.Config: activation: Input should be": lambda w: gpt2.Config(activation="swash"),
    "positions.LinearScaling: factor": lambda w: parts.LinearScaling(0),
    "ids must be a tensor (B, T) of token ids, not (2, 3) of torch.float32": lambda w: w.net(
        torch.zeros(2, 3)
    ),
    "not (3,) of torch.int64": lambda w: w.net(ids(3)),
    "not [[1, 2]] (list)": lambda w: w.net([[1, 2]]),
    "must be from 0 to 49, not 99": lambda w: w.net(torch.tensor([[99]])),
    "longer than the model allows": lambda w: w.net(ids(1, 40)),
    "lengths must be from 0 to 3": lambda w: w.net(ids(2, 3), torch.tensor([3, 9])),
    "must be a tensor (2,)": lambda w: w.net(ids(2, 3), torch.tensor([3])),
    "not [3, 2] (list)": lambda w: w.net(ids(2, 3), [3, 2]),
    "padding_side must be": lambda w: w.net(ids(2, 3), padding_side="middle"),
    "segments must have the shape": lambda w: w.net(ids(2, 3), segments=ids(2, 4)),
    "src has 2 rows, but tgt 3": lambda w: w.two(ids(2, 3), ids(3, 3)),
    "types must have the shape": lambda w: w.classes(ids(2, 3), types=ids(2, 4)),
    "token types must be from 0 to 1": lambda w: w.classes(ids(2, 3), types=ids(2, 3) + 7),
    "not divisible by num_heads 3": lambda w: parts.Attention(10, 3),
    "num_heads must be a number above 0": lambda w: parts.Attention(16, 0),
    "d_model must be a number above 0": lambda w: parts.CrossAttention("16", 4),
    "dropout must be at least 0": lambda w: parts.Attention(16, 4, dropout="a"),
    "window must be a number above 0": lambda w: parts.Attention(16, 4, window=0),
    "needs states of shape": lambda w: parts.Attention(16, 4)(torch.zeros(2, 3, 8)),
    "the attention mask has shape (4, 4)": lambda w: parts.Attention(16, 4)(
        torch.zeros(2, 3, 16), torch.ones(4, 4, dtype=torch.bool)
    ),
    "the attention mask is float32": lambda w: parts.Attention(16, 4)(
        torch.zeros(2, 3, 16), torch.ones(3, 3)
    ),
    "must be a bool tensor": lambda w: parts.Attention(16, 4)(torch.zeros(2, 3, 16), [[True]]),
    "memory has 3 rows": lambda w: parts.CrossAttention(16, 4)(
        torch.zeros(2, 3, 16), torch.zeros(3, 4, 16)
    ),
    "no feed-forward 'swash'": lambda w: parts.FeedForward(16, 32, "swash"),
    "d_ff must be a number above 0": lambda w: parts.FeedForward(16, 0),
    "must be an nn.Embedding": lambda w: parts.TokenEmbedding(5),
    "max_length must be": lambda w: parts.SinusoidalTable(0, 16),
    "even head width": lambda w: parts.RotaryPositions(7),
    "num_heads must be": lambda w: parts.AlibiBias(0),
    "top_k must be from 1": lambda w: parts.Experts(16, 2, 3, nn.Identity),
    "the loss needs logits": lambda w: parts.cross_entropy(torch.zeros(3, 5), ids(4)),
    "label_smoothing must be": lambda w: parts.cross_entropy(
        torch.zeros(3, 5), ids(3), label_smoothing=2.0
    ),
    "weight must be a matrix": lambda w: parts.tied_linear(5),
}
CALLS = {**LOADING, **TEXTS, **MAKING, **TRAINING, **NETS}


def assert_refused(call: Call, world: SimpleNamespace, message: str) -> None:
    with pytest.raises(heedful.UserError, match=re.escape(message)) as error:
        call(world)
    assert "\n" not in str(error.value)
    assert "http" not in str(error.value)


def test_tables_have_every_public_function() -> None:
    assert len(CALLS) == sum(map(len, (LOADING, TEXTS, MAKING, TRAINING, NETS)))
    text = Path(__file__).read_text(encoding="utf-8")
    made_by_others = {"UserError", "TrainingRun", "Translator", "LanguageModel"}
    made_by_others |= {"MaskedLanguageModel", "Classifier", "Embedder", "load_language_model"}
    for name in set(heedful.__all__) - made_by_others:
        assert f"heedful.{name}" in text, name
    assert models.__all__


@pytest.mark.parametrize("message", CALLS)
def test_misuse_is_one_line(message: str, world: SimpleNamespace) -> None:
    assert_refused(CALLS[message], world, message)


@pytest.mark.parametrize("message", OPTIONS)
def test_misuse_of_an_option_is_one_line(message: str, world: SimpleNamespace) -> None:
    options = OPTIONS[message]
    assert_refused(lambda w: w.lm.generate("the", **options), world, message)


@pytest.mark.parametrize(("right", "wrong"), [(1, True), (2, 2.0)])
def test_an_option_is_checked_where_an_equal_one_was_given_before(
    right: int, wrong: Any, world: SimpleNamespace
) -> None:
    expected = world.lm.options(beam_size=right)
    with pytest.raises(heedful.UserError, match="beam_size must be a whole number, not"):
        world.lm.options(beam_size=wrong)
    assert world.lm.options(beam_size=right) is expected


def test_lists_without_items_give_lists_without_items(world: SimpleNamespace) -> None:
    assert world.lm.generate([]) == world.lm.score([]) == world.lm.encode([]) == []
    assert world.translator.translate([]) == world.translator.score([], []) == []
    assert world.translator.pair_ids([], []) == ([], [])
    assert world.classifier.classify([]) == []
    assert world.lm.embed([]).shape == (0, 16)
    assert world.translator.translate(["", "the cat"])[0] == world.translator.translate("") == ""


def test_arrays_and_tensors_of_ids_are_rows_of_ids(world: SimpleNamespace) -> None:
    row = [3, 4, 5]
    expected = world.lm.generate(row, max_new_tokens=5)
    for one in (torch.tensor(row), torch.tensor(row).numpy(), tuple(row)):
        assert world.lm.generate(one, max_new_tokens=5) == expected
        assert world.lm.generate([one], max_new_tokens=5) == [expected]
    assert world.lm.generate(torch.tensor([row]), max_new_tokens=5) == [expected]


def test_numbers_of_numpy_are_numbers(world: SimpleNamespace) -> None:
    numbers: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 3, "banned": [4]}
    samples = numbers | {"temperature": 0.5, "top_k": 9, "seed": 5}
    for options in (numbers | {"beam_size": 2, "num_return": 2}, samples):
        given = {name: np.array([value])[0] for name, value in options.items() if name != "banned"}
        given["banned"] = [np.int64(4)]
        assert world.lm.generate("the", **given) == world.lm.generate("the", **options)
    assert world.lm.score(["the cat"], stride=np.int64(2)) == world.lm.score(["the cat"], stride=2)
