"""Outputs of a JSON schema or a regular expression: valid, and the likeliest valid ones."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import heedful
from heedful.data.tokenizer import Tokenizer, train_tokenizer
from heedful.errors import UserError
from heedful.pipelines.grammar import Grammar
from heedful.pipelines.metadata import GenerationIds
from heedful.zoo import architecture
from option_space import randomized

pytest.importorskip("llguidance", reason="llguidance is not installed")
TEXT = (
    'the {"name": "Ann", "age": 3, "tags": ["a", "b"]} of [12, 345] is true, "or" false null é ok'
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ann", "é"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"temperature": 1.0, "seed": 3},
    "samples": {"temperature": 1.0, "seed": 3, "num_return": 3},
    "beam": {"beam_size": 3},
}
KINDS = ("byte_bpe", "byte", "char", "bpe", "unigram")
PROMPTS = ["the", "of [12", "is true or"]


def model_of(tokenizer: Tokenizer) -> Any:
    """A tiny GPT-2 of random weights."""
    gpt2, size = architecture("gpt2"), tokenizer.vocab_size + 2
    config = gpt2.config(vocab_size=size, d_model=8, num_heads=2, num_layers=1, max_length=200)
    torch.manual_seed(0)
    with torch.no_grad():
        net = randomized(gpt2.build(config))
    ids = GenerationIds(eos_ids=(2,), suppressed_ids=(0, 1, 3))
    return heedful.from_net(net, config, tokenizer, generation=ids)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    sizes = {"byte_bpe": 290, "bpe": 70, "unigram": 60}
    return {
        kind: model_of(
            train_tokenizer([TEXT] * 2, kind=kind, vocab_size=sizes.get(kind), or_fewer=True)
        )
        for kind in KINDS
    }


def assert_valid(text: str) -> None:
    value = json.loads(text)
    assert value.keys() == {"name", "age", "ok"}
    assert value["name"] in ("Ann", "é")
    assert type(value["age"]) is int
    assert 0 <= value["age"] <= 99
    assert type(value["ok"]) is bool


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_json_of_the_schema(kind: str, search: str, models: dict[str, Any]) -> None:
    options = SEARCHES[search] | {"json_schema": SCHEMA, "max_new_tokens": 90}
    batch = models[kind].generate(PROMPTS, return_details=True, **options)
    for outputs in batch:
        assert len(outputs) == SEARCHES[search].get("num_return", 1)
        for output in outputs:
            assert output.finished
            assert_valid(output.text)
    alone = models[kind].generate(PROMPTS[:1], return_details=True, **options)
    assert [output.ids for output in alone[0]] == [output.ids for output in batch[0]]


def test_each_token_is_the_likeliest_that_the_expression_allows(models: dict[str, Any]) -> None:
    """Against a search over all tokens with Python's own expressions."""
    model = models["byte"]
    [output] = model.generate(PROMPTS[:1], return_details=True, regex="(ab|ba|abba)c{2}")[0]
    complete = {"abcc", "bacc", "abbacc"}
    ids, text = model.prompt_ids(PROMPTS[:1])[0], ""
    for token in output.ids:
        with torch.no_grad():
            logits = model.net(torch.tensor([ids]))[0, -1]
        letters = {text + c for c in "abc" if any(w.startswith(text + c) for w in complete)}
        allowed = [model.tokenizer.encode(word[-1])[0] for word in letters]
        allowed += [2] if text in complete else []
        assert token == max(allowed, key=lambda i: float(logits[i]))
        ids, text = [*ids, token], text + model.tokenizer.decode([token])
    assert text in complete
    assert output.ids[-1] == 2


def test_states_do_not_depend_on_the_order_of_calls(models: dict[str, Any]) -> None:
    """The cache of states has no influence: prefixes are asked for in any order, and forgotten."""
    model = models["byte"]
    options = model.options(regex="[ab]{3}c*")
    make = lambda: Grammar(options, model.tokenizer, [2], model.config.vocab_size)  # noqa: E731
    prefixes = [model.tokenizer.encode(text) for text in ("", "a", "ab", "abb", "abbcc", "bab")]
    expected = [sorted(make()(0, ids)) for ids in prefixes]
    grammar = make()
    for ids, allowed in [*zip(prefixes, expected, strict=True)][::-1]:
        assert sorted(grammar(0, ids)) == allowed
    assert expected[3] == sorted([2, *model.tokenizer.encode("c")])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"json_schema": {"type": "nothing"}}, "json_schema: "),
        ({"json_schema": "{"}, "json_schema is no JSON"),
        ({"json_schema": "/no/such/file"}, "/no/such/file"),
        ({"json_schema": 3}, "must be a JSON schema, or its path, not 3"),
        ({"regex": "(a"}, "regex: "),
        ({"regex": "a", "json_schema": SCHEMA}, "exclude each other"),
        ({"regex": "a", "prefix_function": lambda number, ids: [2]}, "prefix_function and a gramm"),
        ({"regex": "a", "draft": "lookup"}, "draft and a grammar"),
    ],
)
def test_wrong_grammars_are_refused_in_one_line(
    options: dict[str, Any], reason: str, models: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=re.escape(reason)) as error:
        models["byte"].generate("the", **options)
    assert "\n" not in str(error.value)


def test_a_schema_may_be_text_or_a_file(models: dict[str, Any], tmp_path: Any) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    texts: list[Callable[[], Any]] = [
        lambda source=source: models["byte"].generate("the", json_schema=source, max_new_tokens=90)
        for source in (SCHEMA, json.dumps(SCHEMA), str(tmp_path / "schema.json"))
    ]
    assert len({text() for text in texts}) == 1
    streamed = "".join(models["byte"].stream("the", json_schema=SCHEMA, max_new_tokens=90))
    assert streamed == texts[0]()


def test_a_vocabulary_that_lacks_a_character_ends_an_output(models: dict[str, Any]) -> None:
    """The other texts keep their outputs; one that no text can begin is an error."""
    [[output]] = models["char"].generate(["the"], regex="azz", return_details=True)
    assert (output.text, output.failure) == ("a", "dead_end")
    with pytest.raises(UserError, match=r"no token .* begins as the grammar requires"):
        models["char"].generate("the", regex="zz")


def test_tokens_whose_text_is_not_fixed_are_refused() -> None:
    tokenizer = train_tokenizer([TEXT], kind="wordpiece", vocab_size=90, or_fewer=True)
    with pytest.raises(UserError, match="not fixed"):
        model_of(tokenizer).generate("the", regex="a")
