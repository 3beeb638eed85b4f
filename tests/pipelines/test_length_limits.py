"""Outputs at the length limit of a net, by every search, against passes over whole texts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from backend_models import TEXTS, VOCAB, model_of
from heedful.backends.base import Settings
from heedful.backends.registry import open_conversion
from heedful.backends.torch.eager import Eager
from heedful.data.tokenizer import train_tokenizer
from heedful.deploy.convert import convert_model
from heedful.errors import UserError
from heedful.pipelines import GenerationIds, open_net
from heedful.pipelines.ensembles import ensemble
from heedful.pipelines.metadata import Limits

END, LONGEST = 2, 10
ROWS = [[6, 7, 8], [9, 10]]
TWO_STACKS = ["vaswani2017", "bart", "marian", "t5"]


def translator(name: str, start: int, max_length: int = LONGEST) -> Any:
    """A model with this number of start ids and no EOS, so that it generates to its limit."""
    model = model_of(name, max_length=max_length)
    ids = GenerationIds((1, 7, 8, 9)[:start], (END,), suppressed_ids=(END,))
    model.metadata = replace(model.metadata, generation=ids)
    return model


def greedy(model: Any, row: list[int], count: int) -> list[int]:
    """The most probable tokens, by passes over the whole text."""
    ids = list(model.ids.decoder_start_ids)
    for _ in range(count):
        with torch.no_grad():
            logits = model.net(torch.tensor([row]), torch.tensor([ids]))[0, -1]
        logits[END] = -torch.inf
        ids.append(int(logits.argmax()))
    return ids[len(model.ids.decoder_start_ids) :]


@pytest.mark.parametrize("name", TWO_STACKS)
@pytest.mark.parametrize("start", [1, 2, 4])
@pytest.mark.parametrize("max_new_tokens", [None, 50])
def test_start_ids_count_towards_the_positions_of_the_net(
    name: str, start: int, max_new_tokens: int | None
) -> None:
    """Every search fills all positions and no more; greedy search equals whole passes."""
    model, room = translator(name, start), LONGEST - start + 1
    options: dict[str, Any] = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    expected = [greedy(model, row, room) for row in ROWS]
    assert model.generate(ROWS, beam_size=1, **options) == expected
    assert model.generate(ROWS, beam_size=1, draft="lookup", **options) == expected
    assert ensemble([model, model]).generate(ROWS, beam_size=1, **options) == expected
    request = model.request(ROWS[:1], beam_size=1, **options)
    stream = model.eager.stream_tokens(ROWS[0], request)
    steps = [token for tokens, _ in stream for token in tokens]
    assert steps == expected[0]
    for own in ({"beam_size": 3}, {"temperature": 1.0}, {"beam_size": 4, "require": [[9, 10]]}):
        assert [len(ids) for ids in model.generate(ROWS, **own, **options)] == [room, room]


def test_a_prompt_that_is_cut_keeps_its_bos() -> None:
    """The net was trained with it before every text."""
    model = model_of("gpt2", max_length=4)
    tokenizer = train_tokenizer(TEXTS, kind="bpe", vocab_size=VOCAB, template="bos")
    model = open_net(model.net, model.config, model.metadata, tokenizer)
    ids, options = tokenizer.encode(TEXTS[0]), model.options(too_long="truncate")
    assert len(ids) > 4
    assert model.prompt_ids([TEXTS[0]], options) == [[tokenizer.bos_id, *ids[-3:]]]
    assert model.prompt_ids([ids], options) == [ids[-4:]]
    assert model.num_truncated == 2


def test_more_start_ids_than_positions_are_refused() -> None:
    model = translator("bart", 4, max_length=3)
    with pytest.raises(UserError, match="4 start ids do not fit the 3 positions"):
        model.generate(ROWS)


@pytest.mark.parametrize("max_new_tokens", [None, 9, 50])
@pytest.mark.parametrize("name", TWO_STACKS)
def test_a_draft_with_fewer_positions_does_not_change_the_output(
    name: str, max_new_tokens: int | None
) -> None:
    model, draft = translator(name, 1), translator(name, 1, max_length=6)
    options: dict[str, Any] = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    plain = model.generate(ROWS, beam_size=1, **options)
    assert model.generate(ROWS, beam_size=1, draft=draft, **options) == plain


@pytest.mark.parametrize("name", ["gpt2", *TWO_STACKS])
@pytest.mark.parametrize(("positions", "runs"), [(LONGEST, [1, 3, 3, 3]), (6, [1, 3, 3, 1, 1, 1])])
def test_a_draft_with_equal_weights_is_accepted_up_to_its_positions(
    name: str, positions: int, runs: list[int]
) -> None:
    """A call of the model returns the two proposed tokens and one more."""
    model, row = translator(name, 1), [6]
    call = model.request([row], beam_size=1, max_new_tokens=LONGEST, num_draft_tokens=2)
    call = call._replace(draft=(Eager(model.net, positions), model.ids.decoder_start_ids))
    assert [len(run) for run, _ in model.eager.stream_tokens(row, call)] == runs


@pytest.mark.parametrize("draft_length", [8, 48])
def test_a_language_model_with_a_draft_generates_up_to_its_own_length(draft_length: int) -> None:
    model, draft = model_of("gpt2"), model_of("gpt2", max_length=draft_length)
    rows, longest = [[6, 7, 8]], model.config.max_length
    room = longest - len(rows[0]) + 1
    options: dict[str, Any] = {"banned": [END]}
    plain = model.generate(rows, max_new_tokens=room, **options)
    for helper in (draft, "lookup"):
        assert model.generate(rows, draft=helper, **options) == plain
        assert model.generate(rows, draft=helper, max_new_tokens=room, **options) == plain
    with pytest.raises(UserError, match="cannot outgrow the net"):
        model.generate(rows, draft=draft, max_new_tokens=room + 1)


@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_a_prompt_longer_than_the_drafts_positions_is_refused(name: str) -> None:
    model, draft = model_of(name), model_of(name, max_length=3)
    with pytest.raises(UserError, match="4 tokens, but the draft allows 3"):
        model.generate([[6, 7, 8, 9]], beam_size=1, draft=draft, max_new_tokens=5)


@pytest.mark.parametrize("last", [END, 7])
@pytest.mark.parametrize("rule", ["optimal", "beam_full", "heuristic"])
def test_the_forced_eos_is_at_the_limit_with_log_probability_zero(rule: str, last: int) -> None:
    model = translator("bart", 1)
    model.metadata = replace(
        model.metadata,
        generation=GenerationIds((1,), (END,), suppressed_ids=(), forced_eos_id=last),
    )
    options = {"beam_size": 3, "num_return": 3, "stop_rule": rule, "min_new_tokens": 4}
    for row, outputs in zip(
        ROWS, model.generate(ROWS, max_new_tokens=4, **options, return_details=True), strict=True
    ):
        for output in outputs:
            assert (len(output.ids), output.ids[-1], output.finished) == (4, last, last == END)
            targets = [output.ids[:-1]]
            [parts] = model.eager.log_probs([row], targets, model.request([row]))
            assert output.log_prob == pytest.approx(float(parts[:-1].sum()), abs=1e-4)


@pytest.mark.parametrize("backend", ["eager", "ctranslate2"])
def test_a_prompt_whose_limit_is_below_min_new_tokens_is_named(
    backend: str, tmp_path: Path
) -> None:
    """For every backend: CTranslate2 would fail, or exceed the limit beside a longer prompt."""
    model = model_of("bart")
    model.metadata = replace(model.metadata, limits=Limits(factor=1.0, offset=3))
    if backend == "ctranslate2":
        facts = convert_model(model, tmp_path, "float32")
        model.backend = open_conversion(
            tmp_path, tmp_path, "ctranslate2", "float32", facts, Settings(1)
        )
    rows = [[6, 7, 8, 9], [10], [6, 7]]
    assert len(model.generate(rows, beam_size=1, min_new_tokens=4)) == 3
    for draws in ({}, {"temperature": 1.0}):
        with pytest.raises(UserError, match="prompt 12 may have 4 new tokens"):
            model.generate(rows, beam_size=1, min_new_tokens=5, first_number=11, **draws)
    with pytest.raises(UserError, match="prompt 1 may have 2 new tokens"):
        model.generate(rows, beam_size=1, min_new_tokens=3, max_new_tokens=2)
    with pytest.raises(UserError, match="prompt 1 may have 4 new tokens"):
        next(model.stream(rows[1], min_new_tokens=5))


def test_a_greedy_output_outgrows_a_language_model_from_its_last_half() -> None:
    """Without rules, as of imported models, it continued from its last token alone."""
    model, ids = model_of("gpt2", max_length=12), [6, 7, 8]
    for options in ({}, {"presence_penalty": 0.0}):
        output, first = list(ids), 0
        [actual] = model.generate([ids], beam_size=1, max_new_tokens=40, **options)
        for token in actual:
            if len(output) - first > model.config.max_length:
                first = len(output) - model.config.max_length // 2
            with torch.no_grad():
                logits = model.net(torch.tensor([output[first:]]))[0, -1]
            assert token == int(logits.argmax())
            output.append(token)
        assert len(actual) > model.config.max_length


@pytest.mark.parametrize("name", ["gpt2", "vaswani2017"])
def test_an_eos_with_the_id_of_padding_is_no_padding(name: str) -> None:
    """Padding is filled with id 0: a prompt may contain it, and an output may end in it."""
    model = model_of(name)
    model.metadata = replace(model.metadata, generation=replace(model.ids, eos_ids=(0,)))
    rows = [[6, 0, 7, 8, 0], [9], [0, 6, 0]]
    options: dict[str, Any] = {"max_new_tokens": 5, "return_details": True}
    for search in ({"beam_size": 1}, {"beam_size": 3}):
        together = model.generate(rows, **options, **search)
        for row, [output] in zip(rows, together, strict=True):
            [alone] = model.generate([row], **options, **search)[0]
            assert output.ids == alone.ids
            assert output.score == pytest.approx(alone.score, abs=1e-4)
            assert output.finished == (output.ids[-1] == 0)
    other = model.generate([[6, 7, 8]], **options)[0][0]
    assert other.score != pytest.approx(model.generate([rows[0]], **options)[0][0].score, abs=1e-3)


def test_a_prompt_that_is_longer_than_a_language_model_is_refused_or_left_out_or_cut() -> None:
    model = model_of("gpt2", max_length=12)
    long, short = [6, 7, 8] * 5, [6, 7]
    options: dict[str, Any] = {"max_new_tokens": 3, "temperature": 0}
    with pytest.raises(UserError, match=r"^prompt 2 has 15 tokens, but the model allows 12;"):
        model.generate([short, long], **options)
    with pytest.raises(UserError, match=r"^prompt 1 has 15 tokens"):
        [*model.stream(long, **options)]
    left_out = model.generate([short, long, short], too_long="leave_out", **options)
    alone = model.generate(short, **options)
    assert left_out == [alone, [], alone]
    assert model.num_left_out == 1
    assert [*model.stream(long, too_long="leave_out", **options)] == []
    # The end of a prompt is continued, so that its beginning is what it loses.
    cut = model.generate([long], too_long="truncate", **options)
    assert cut == model.generate([long[-12:]], **options)
    assert model.num_truncated == 1
    assert len(model.generate([long[:12]], **options | {"max_new_tokens": 9})[0]) == 9


@pytest.mark.parametrize("name", ["gpt2", "vaswani2017"])
def test_several_outputs_are_a_list_for_each_prompt(name: str) -> None:
    model = model_of(name)
    options: dict[str, Any] = {"beam_size": 3, "num_return": 2, "max_new_tokens": 4}
    prompts = ["the cat", "a dog"]
    details = model.generate(prompts, return_details=True, **options)
    expected = [[output.text for output in outputs] for outputs in details]
    assert model.generate(prompts, **options) == expected
    assert model.generate(prompts[0], **options) == expected[0]
    rows = model.prompt_ids(prompts)
    expected_ids = [[output.ids for output in outputs] for outputs in details]
    assert model.generate(rows, **options) == expected_ids
    assert model.generate(rows[0], **options) == expected_ids[0]
