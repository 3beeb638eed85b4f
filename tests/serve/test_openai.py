"""OpenAI's routes, by OpenAI's own client; answers are those of the model alone."""

import asyncio
import base64
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic
import pytest

from chat_formats import chat_model
from heedful.data.chat_template import BUILT_IN
from heedful.data.decoding import TextDecoder
from running_server import model_of, running, wait_for_free_slots
from tokenizer_kinds import byte_fallback, tokenizer_of

openai = pytest.importorskip("openai", reason="the extra serve is not installed")

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
PROMPTS = ["the cat", "a dog ran", "cats and", "the", "a dog sat on the mat", ""]


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 5}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def json_format(schema: Any) -> dict[str, Any]:
    """The argument of a request for JSON of a schema."""
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    }


@pytest.fixture(scope="module")
def client(served: Any) -> Any:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def alone(served: Any, prompt: Any, **options: Any) -> str:
    model = served.models["gpt"]
    [generation] = model.generate([prompt], return_details=True, beam_size=1, **options)
    return generation[0].text


def test_models_are_listed(served: Any, client: Any) -> None:
    assert [model.id for model in client.models.list()] == [*served.models]
    assert client.models.retrieve("gpt").owned_by == "heedful"
    with pytest.raises(openai.NotFoundError, match="no model 'x' here"):
        client.models.retrieve("x")


def test_completions_of_a_text_a_list_and_ids(served: Any, client: Any) -> None:
    answer = client.completions.create(model="gpt", prompt="the cat", **GREEDY)
    assert answer.choices[0].text == alone(served, "the cat", max_new_tokens=8)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    batch = client.completions.create(model="gpt", prompt=PROMPTS, **GREEDY)
    assert [choice.text for choice in batch.choices] == [
        alone(served, prompt, max_new_tokens=8) for prompt in PROMPTS
    ]
    assert [choice.index for choice in batch.choices] == [*range(len(PROMPTS))]
    rows = [served.models["gpt"].tokenizer.encode(prompt) for prompt in ("a dog", "the")]
    for prompt, expected in ((rows, rows), (rows[0], rows[:1])):
        answer = client.completions.create(model="gpt", prompt=prompt, **GREEDY)
        assert [choice.text for choice in answer.choices] == [
            alone(served, row, max_new_tokens=8) for row in expected
        ]


def test_samples_have_the_numbers_of_the_seed(served: Any, client: Any) -> None:
    options: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 3}
    answer = client.completions.create(
        model="gpt", prompt=["the cat", "a"], max_tokens=7, n=3, frequency_penalty=0.5, **options
    )
    expected = served.models["gpt"].generate(
        ["the cat", "a"],
        return_details=True,
        num_return=3,
        max_new_tokens=7,
        frequency_penalty=0.5,
        **options,
    )
    texts = [choice.text for choice in answer.choices]
    assert texts == [output.text for outputs in expected for output in outputs]
    assert len({*texts}) > 3
    again = client.completions.create(model="gpt", prompt="the", max_tokens=9, n=2)
    assert again.choices[0].text != again.choices[1].text  # temperature 1 is the default


def test_a_stream_joins_to_the_answer(served: Any, client: Any) -> None:
    arguments: dict[str, Any] = {"model": "gpt", "prompt": ["the cat", "a"], "seed": 1, "n": 2}
    whole = client.completions.create(**arguments)
    chunks = [
        *client.completions.create(stream=True, stream_options={"include_usage": True}, **arguments)
    ]
    texts, reasons = [""] * 4, [None] * 4
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert not chunks[-1].choices
    assert chunks[-1].usage == whole.usage
    assert len(chunks) > 8


def test_stop_texts_end_an_answer(served: Any, client: Any) -> None:
    text = alone(served, "a dog", max_new_tokens=16)
    stop = text[3:5]
    for stream in (False, True):
        answer = client.completions.create(
            model="gpt", prompt="a dog", temperature=0, max_tokens=16, stop=[stop, "§"],
            stream=stream,
        )  # fmt: skip
        parts = [choice for chunk in answer for choice in chunk.choices] if stream else []
        own = "".join(part.text for part in parts) if stream else answer.choices[0].text
        assert own == text[: text.index(stop)]
        assert (parts[-1] if stream else answer.choices[0]).finish_reason == "stop"


def test_log_probabilities_of_tokens(served: Any, client: Any) -> None:
    [choice] = client.completions.create(
        model="gpt", prompt="the cat", logprobs=3, **GREEDY
    ).choices
    model = served.models["gpt"]
    [[details]] = model.generate(["the cat"], return_details=True, max_new_tokens=8)
    assert sum(choice.logprobs.token_logprobs) == pytest.approx(details.log_prob, abs=1e-4)
    names = {model.tokenizer.piece(token) for token in model.tokenizer.special_ids}
    assert "".join(token for token in choice.logprobs.tokens if token not in names) == choice.text
    assert len(choice.logprobs.tokens) == len(details.ids)
    for value, top in zip(
        choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert max(top.values()) >= value - 1e-6
    chunks = client.completions.create(
        model="gpt", prompt="the cat", logprobs=3, stream=True, **GREEDY
    )
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert [value for part in parts for value in part.token_logprobs] == pytest.approx(
        choice.logprobs.token_logprobs
    )
    assert [token for part in parts for token in part.tokens] == choice.logprobs.tokens


@pytest.mark.parametrize("stream", [False, True])
def test_the_most_probable_tokens_are_with_the_sampled_one(client: Any, stream: bool) -> None:
    for count in (0, 2):
        answer = client.completions.create(
            model="gpt", prompt="the cat", logprobs=count, seed=5, max_tokens=20, stream=stream
        )
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        sizes = set()
        for part in (choice.logprobs for choice in choices):
            columns = part.tokens, part.token_logprobs, part.top_logprobs
            for token, value, top in zip(*columns, strict=True):
                assert top[token] == value
                sizes.add(len(top))
        assert sizes == ({1} if count == 0 else {2, 3})


def test_an_echo_has_the_log_probabilities_of_the_prompt(served: Any, client: Any) -> None:
    model, prompts = served.models["gpt"], ["the cat sat", "a dog", "cats"]
    arguments: dict[str, Any] = {"model": "gpt", "temperature": 0, "echo": True, "logprobs": 3}
    read = client.completions.create(prompt=prompts, max_tokens=0, n=1, **arguments)
    scores = model.score(prompts)
    for choice, prompt, score in zip(read.choices, prompts, scores, strict=True):
        found = choice.logprobs
        assert (choice.text, choice.finish_reason) == (prompt, "length")
        assert found.token_logprobs[0] is found.top_logprobs[0] is None
        assert sum(found.token_logprobs[1:]) == pytest.approx(score.log_prob, abs=1e-5)
        for token, value, top in zip(
            found.tokens[1:], found.token_logprobs[1:], found.top_logprobs[1:], strict=True
        ):
            assert top[token] == value
            assert 3 <= len(top) <= 4
        ends = [*found.text_offset[1:], len(prompt)]
        pieces = [prompt[start:end] for start, end in zip(found.text_offset, ends, strict=True)]
        assert pieces == found.tokens
    assert read.usage.completion_tokens == 0
    assert read.usage.prompt_tokens == sum(len(one.logprobs.tokens) for one in read.choices)

    whole = client.completions.create(prompt=prompts[0], max_tokens=6, **arguments).choices[0]
    [[details]] = model.generate([prompts[0]], return_details=True, max_new_tokens=6)
    count = len(details.ids)
    row = [*model.prompt_ids([prompts[0]])[0], *details.ids]
    assert whole.text == model.tokenizer.decode(row)
    assert whole.logprobs.token_logprobs[-count:] == pytest.approx(
        client.completions.create(prompt=prompts[0], max_tokens=6, **(arguments | {"echo": False}))
        .choices[0]
        .logprobs.token_logprobs
    )
    first, *others = whole.logprobs.token_logprobs[:-count]
    assert first is None
    assert others == pytest.approx(read.choices[0].logprobs.token_logprobs[1:])
    chunks = client.completions.create(prompt=prompts[0], max_tokens=6, stream=True, **arguments)
    parts = [chunk.choices[0] for chunk in chunks]
    assert "".join(part.text for part in parts) == whole.text
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        joined = [value for part in parts for value in getattr(part.logprobs, name)]
        assert joined == getattr(whole.logprobs, name)
    ids = model.prompt_ids(prompts[:1])[0]
    plain = client.completions.create(model="gpt", prompt=ids, max_tokens=0, echo=True, n=2)
    assert [choice.text for choice in plain.choices] == [prompts[0]] * 2
    assert plain.choices[0].logprobs is None


def test_tokens_that_end_within_a_character_have_their_bytes(client: Any) -> None:
    messages: Any = [{"role": "user", "content": "é"}]
    answer = client.chat.completions.create(
        model="chat", messages=messages, seed=1, max_tokens=40, logprobs=True, top_logprobs=2,
        logit_bias={str(token): -100 for token in range(128)},
    )  # fmt: skip
    choice = answer.choices[0]
    data = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
    assert data.decode(errors="replace").startswith(choice.message.content)
    assert "\N{REPLACEMENT CHARACTER}" in choice.message.content
    legacy = client.completions.create(
        model="chat", prompt="é", seed=1, max_tokens=9, logprobs=5, echo=True
    ).choices[0].logprobs  # fmt: skip
    assert legacy.tokens[-10].startswith("bytes:\\x")
    assert all(len(top) >= 5 for top in legacy.top_logprobs[1:])


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_parts_of_the_text_for_every_tokenizer(stream: bool) -> None:
    """Of a unigram tokenizer with spaces in its pieces, and of one with byte pieces."""
    template = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
    models = {}
    for name, tokenizer in {"bytes": byte_fallback(), "words": tokenizer_of("bpe")}.items():
        models[name] = model_of("gpt2", vocab_size=300)
        own_tokenizer = tokenizer.extended(["<end>"], template)
        models[name]._src_tokenizer = models[name]._tgt_tokenizer = own_tokenizer
    with running(models) as server:
        own = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        for name, model in models.items():
            prompt, arguments = "Hund und", {"model": name, "seed": 3, "max_tokens": 24}
            names = {model.tokenizer.piece(token) for token in model.tokenizer.special_ids}
            answer = own.completions.create(
                prompt=prompt, logprobs=5, echo=True, stream=stream, **arguments
            )
            parts = [one.choices[0] for one in answer] if stream else answer.choices
            text, columns = "".join(part.text for part in parts), []
            for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                columns.append([v for p in parts for v in getattr(p.logprobs, column)])
            for token, value, top, offset in zip(*columns, strict=True):
                if token not in names and not token.startswith(("bytes:", "<id ")):
                    assert text[offset : offset + len(token)] == token
                assert top is None or len(top) in (5, 6)
                assert top is None or top[token] == value
            messages: Any = [{"role": "user", "content": prompt}]
            chat = own.chat.completions.create(
                messages=messages, logprobs=True, top_logprobs=20, stream=stream, **arguments
            )
            choices = [one.choices[0] for one in chat] if stream else chat.choices
            content = "".join(
                (choice.delta.content or "") if stream else choice.message.content
                for choice in choices
            )
            entries = [e for c in choices if c.logprobs for e in c.logprobs.content]
            assert len(entries) == 24
            data = b"".join(bytes(entry.bytes) for entry in entries)
            assert data.decode(errors=model.tokenizer.decoder.errors) == content
            for entry in entries:
                assert len({top.token for top in entry.top_logprobs}) == 20


def test_tokens_are_decoded_once_and_not_in_the_event_loop(
    served: Any, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, calls = TextDecoder._library_texts, []

    def counted(self: TextDecoder, rows: list[list[int]]) -> list[str]:
        calls.append((sum(map(len, rows)), threading.current_thread()))
        return library(self, rows)

    monkeypatch.setattr(TextDecoder, "_library_texts", counted)
    arguments: dict[str, Any] = {"model": "gpt", "prompt": "the", "seed": 1, "max_tokens": 40}
    more: Any
    for more, each in (({"stream": True}, 3), ({"logprobs": 5}, 20), ({"stop": ["§"]}, 5)):
        calls.clear()
        answer = client.completions.create(**arguments, **more)
        if "stream" in more:
            assert [*answer]
        assert sum(size for size, _ in calls) <= each * 40 + 20
        if "stream" not in more:
            assert served._thread not in [thread for _, thread in calls]


def test_a_logit_bias_is_that_of_the_library(served: Any, client: Any) -> None:
    model = served.models["gpt"]
    first = model.generate([model.prompt_ids(["the cat"])[0]], max_new_tokens=1, beam_size=1)[0][0]
    bias = {first: -100.0, 7: 3.5}
    answer = client.completions.create(
        model="gpt", prompt="the cat", logit_bias={str(k): v for k, v in bias.items()}, **GREEDY
    )
    assert (
        answer.choices[0].text
        == alone(
            served, "the cat", max_new_tokens=8, sequence_bias=[([k], v) for k, v in bias.items()]
        )
        != alone(served, "the cat", max_new_tokens=8)
    )
    chat = served.models["chat"]
    messages: Any = [{"role": "user", "content": "hello"}]
    only = client.chat.completions.create(
        model="chat", messages=messages, max_tokens=3, seed=1, logit_bias={"100": 100}
    )
    assert only.choices[0].message.content == chat.tokenizer.decode([100] * 3)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bo"]}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_answers_match_the_response_format(served: Any, client: Any, stream: bool) -> None:
    """In continuous batches, beside answers without one."""
    messages: Any = [{"role": "user", "content": "hello"}]

    def ask(seed: int) -> str:
        more = json_format(SCHEMA) if seed % 2 else {}
        answer = client.chat.completions.create(
            model="chat", messages=messages, seed=seed, max_tokens=40, stream=stream, n=1, **more
        )
        if not stream:
            return str(answer.choices[0].message.content)
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer)

    with ThreadPoolExecutor(6) as pool:
        texts = [*pool.map(ask, range(12))]
    model = served.models["chat"]
    for seed, text in enumerate(texts):
        own = {"json_schema": SCHEMA} if seed % 2 else {}
        options: dict[str, Any] = {"seed": seed, "temperature": 1.0, "max_new_tokens": 40, **own}
        assert text == model.chat(messages, **options)
        if seed % 2:
            assert {*json.loads(text)} == {"name", "old"}
    answer = client.chat.completions.create(
        model="chat", messages=messages, seed=1, max_tokens=9,
        response_format={"type": "json_object"},
    )  # fmt: skip
    assert answer.choices[0].message.content.startswith("{")


def test_the_client_parses_answers_into_its_types(client: Any) -> None:
    class Person(pydantic.BaseModel):
        name: Literal["Ann", "Bo"]
        old: bool

    answer = client.chat.completions.parse(
        model="chat", messages=[{"role": "user", "content": "a"}], response_format=Person, seed=2
    )
    person = answer.choices[0].message.parsed
    assert person.name in ("Ann", "Bo")
    assert answer.choices[0].finish_reason == "stop"


def test_a_converted_backend_has_response_formats_and_biases_too(tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    import heedful
    from backend_models import saved

    saved("gpt2", tmp_path / "model")
    model: Any = heedful.load(tmp_path / "model", backend="ctranslate2", precision="float32")
    with running({"model": model}) as server:
        own = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        arguments: dict[str, Any] = {"model": "model", "prompt": ["the", "a"], **GREEDY}
        echoed = own.completions.create(**arguments, echo=True)
        plain = own.completions.create(**arguments)
        biased = own.completions.create(**arguments, logit_bias={"9": 100})
        # No token of its vocabulary continues the text.
        cut = own.completions.create(**arguments, extra_body=json_format({"enum": ["a", "t"]}))
        assert {choice.finish_reason for choice in cut.choices} == {"length"}
    for prompt, one, other in zip(arguments["prompt"], echoed.choices, plain.choices, strict=True):
        assert one.text.startswith(prompt)
        assert one.text.replace(" ", "") == prompt + other.text.replace(" ", "") != prompt
    assert [one.text for one in biased.choices] == [model.tokenizer.decode([9] * 8)] * 2


def test_fields_that_clients_send_as_a_matter_of_course(served: Any, client: Any) -> None:
    expected = served.models["chat"].chat([{"role": "user", "content": "a"}], max_new_tokens=5)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    answer = client.chat.completions.create(
        model="chat", messages=[{"role": "user", "content": "a", "name": "ann"}],
        temperature=0, max_tokens=5, store=False, metadata={"a": "b"}, user="u", n=1, seed=0,
        service_tier="auto", parallel_tool_calls=False, tools=[tool], tool_choice="none",
        modalities=["text"], top_p=1, presence_penalty=0, stop=None, logit_bias={},
        safety_identifier="s", prompt_cache_key="k", response_format={"type": "text"},
    )  # fmt: skip
    assert answer.choices[0].message.content == expected
    again = [
        {"role": "user", "content": "a"},
        answer.choices[0].message.model_dump() | {"content": "c"},
        {"role": "user", "content": "b"},
    ]
    client.chat.completions.create(model="chat", messages=again, temperature=0, max_tokens=2)


def test_tools_in_a_conversation_are_written_by_a_template_that_has_them() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.a }}"
        "{% endfor %}{% if m.role == 'tool' %}{{ m.tool_call_id }}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    model = chat_model(template)
    messages: Any = [
        {"role": "user", "content": "q"},
        CALLING,
        {"role": "tool", "content": "r", "tool_call_id": "9"},
    ]
    plain = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "f5"},
        {"role": "tool", "content": "r9"},
    ]
    text = template.replace("{{ m.tool_call_id }}", "")
    with running({"chat": model, "plain": chat_model(text)}) as server:
        own = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        answers = [
            own.chat.completions.create(model=name, messages=chat, temperature=0, max_tokens=9)
            for name, chat in (("chat", messages), ("plain", plain))
        ]
        broken = {**CALL, "function": {"name": "f", "arguments": "[5"}}
        messages[1] = {**CALLING, "tool_calls": [broken]}
        with pytest.raises(openai.BadRequestError, match=r"message 2: .* must be a JSON object"):
            own.chat.completions.create(model="chat", messages=messages)
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert answers[0].usage == answers[1].usage


def test_results_of_tools_are_refused_where_a_template_leaves_them_out() -> None:
    results: Any = [
        {"role": "user", "content": "q"},
        {"role": "tool", "content": "r", "tool_call_id": "9"},
    ]
    # The first names no role and writes all, the second names one and leaves it out.
    silent = BUILT_IN["chatml"].replace("messages %}", "messages if message.role != 'tool' %}")
    with running({"all": chat_model(), "silent": chat_model(silent)}) as server:
        own = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        answer = own.chat.completions.create(
            model="all", messages=results, temperature=0, max_tokens=5
        )
        with pytest.raises(openai.BadRequestError, match="not write messages of the role tool"):
            own.chat.completions.create(model="silent", messages=results)
    expected = chat_model().chat(results, max_new_tokens=5)
    assert answer.choices[0].message.content == expected


def test_chats(served: Any, client: Any) -> None:
    model = served.models["chat"]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    expected = model.chat(messages, max_new_tokens=12)
    answer = client.chat.completions.create(
        model="chat", messages=messages, temperature=0, max_tokens=12
    )
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].message.role == "assistant"
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    chunks = [
        *client.chat.completions.create(
            model="chat",
            messages=[
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": parts},
            ],
            temperature=0,
            max_completion_tokens=12,
            stream=True,
            logprobs=True,
            top_logprobs=2,
        )
    ]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    tokens = [token for chunk in chunks[1:] for token in chunk.choices[0].logprobs.content]
    assert all(len(token.top_logprobs) == 2 for token in tokens)
    assert tokens[0].logprob == pytest.approx(tokens[0].top_logprobs[0].logprob)
    seeded: dict[str, Any] = {"temperature": 0.9, "seed": 4}
    answer = client.chat.completions.create(model="chat", messages=messages, **seeded)
    assert answer.choices[0].message.content == model.chat(messages, **seeded)


def test_embeddings_have_the_pooling_and_the_prompt_of_the_model(
    served: Any, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served.models["bert"]
    [expected] = model.vectors(["a dog the cat"], pooling="max", normalize=True)
    made: dict[str, Any] = {"pooling": "max", "normalize": True, "prompts": {"q": "a dog "}}
    monkeypatch.setattr(model, "metadata", replace(model.metadata, default_prompt="q", **made))
    answer = client.embeddings.create(model="bert", input="the cat", encoding_format="float")
    assert answer.data[0].embedding == pytest.approx(expected, abs=1e-6)
    assert np.linalg.norm(answer.data[0].embedding) == pytest.approx(1)


def test_embeddings_as_numbers_and_base64(served: Any, client: Any) -> None:
    for name in ("bert", "gpt"):
        model = served.models[name]
        expected = model.vectors(["the cat", "a dog"])
        answer = client.embeddings.create(
            model=name, input=["the cat", "a dog"], encoding_format="float"
        )
        assert [entry.embedding for entry in answer.data] == [
            pytest.approx(vector, abs=1e-6) for vector in expected
        ]
        coded = client.embeddings.with_raw_response.create(
            model=name, input="a dog", encoding_format="base64"
        )
        raw = coded.http_response.json()["data"][0]["embedding"]
        vector = np.frombuffer(base64.b64decode(raw), "<f4")
        assert vector == pytest.approx(expected[1], abs=1e-6)
    with pytest.raises(openai.BadRequestError, match="dimensions must be 16"):
        client.embeddings.create(model="bert", input="a", dimensions=3)


def test_answers_equal_those_alone_under_random_arrival(served: Any, client: Any) -> None:
    """Greedy, seeded, streamed and long ones, from 12 clients at once."""
    rng = random.Random(5)
    calls = []
    for seed in range(36):
        options = rng.choice(
            [{"temperature": 0}, {"seed": seed, "temperature": 1.0}, {"seed": seed, "top_k": 5}]
        )
        prompt = " ".join(
            rng.choices(["the", "cat", "sat", "on", "a", "dog"], k=rng.randrange(1, 7))
        )
        calls.append((prompt, rng.randrange(1, 20), options))

    def ask(call: tuple[str, int, dict[str, Any]]) -> str:
        prompt, count, options = call
        extra = {name: options[name] for name in options if name == "top_k"}
        plain = {name: options[name] for name in options if name != "top_k"}
        answer = client.completions.create(
            model="gpt", prompt=prompt, max_tokens=count, stream=count % 2 == 0,
            extra_body=extra, **plain,
        )  # fmt: skip
        if count % 2:
            return str(answer.choices[0].text)
        return "".join(chunk.choices[0].text for chunk in answer)

    with ThreadPoolExecutor(12) as pool:
        texts = [*pool.map(ask, calls)]
    for text, (prompt, count, options) in zip(texts, calls, strict=True):
        own = {"temperature": 1.0, **options}
        assert text == alone(served, prompt, max_new_tokens=count, **own)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"model": "bert"}, "needs a language model, but bert is a masked"),
        ({"model": "nope"}, "no model 'nope' here"),
        ({"max_tokens": 0}, "max_tokens 0 needs echo"),
        ({"max_tokens": -1}, "max_tokens"),
        (
            {"max_tokens": 0, "echo": True, "prompt": "the cat " * 24 + "a"},
            "the model's context is 48",
        ),
        ({"max_tokens": 5_000}, "the prompt has 2 tokens, and 5000 new ones"),
        ({"prompt": "the cat " * 60}, "the prompt has 120 tokens, but the model's context is 48"),
        ({"n": 9}, "n may be at most 8"),
        ({"stop": ["a"] * 5}, "stop may have 4 texts"),
        ({"stop": [""]}, "stop text is empty"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"seed": 1.5}, "seed"),
        ({"best_of": 2}, "best_of must be n"),
        ({"suffix": "b"}, "suffix"),
        ({"logit_bias": {"5": 101}}, "logit_bias: input should be less than or equal to 100"),
        ({"logit_bias": {"cat": 1}}, "logit_bias"),
        ({"logit_bias": {"4000": 1}}, "token id 4000 is outside"),
        ({"extra_body": {"store": True}}, "store"),
        ({"extra_body": {"service_tier": "priority"}}, "service_tier"),
        ({"extra_body": {"metadata": {"a": 5}}}, "metadata"),
        ({"extra_body": {"response_format": {"type": "xml"}}}, "response_format"),
        (
            {"extra_body": {"response_format": {"type": "json_schema"}}},
            "response_format: the field 'json_schema' is required in it",
        ),
        (
            {"extra_body": {"response_format": {"type": "json_schema", "json_schema": {}}}},
            "response_format: the field 'schema' is required in it",
        ),
        ({"extra_body": json_format({"type": "no"})}, "json_schema"),
        ({"extra_body": json_format({"type": "integer", "minimum": "a"})}, "json_schema"),
        ({"extra_body": json_format({"$ref": "#/definitions/none"})}, "json_schema"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [4_000]}, "token id 4000 is outside"),
        ({"stream_options": {"include_usage": True}}, "needs stream"),
    ],
)
def test_what_cannot_be_done_is_refused(client: Any, arguments: Any, reason: str) -> None:
    arguments = {"model": "gpt", "prompt": "the cat", **arguments}
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as error:
        client.completions.create(**arguments)
    assert reason in error.value.body["message"]
    assert error.value.param, "the parameter at fault"


def test_chats_that_cannot_be_answered_are_refused(client: Any) -> None:
    def ask(model: str = "chat", **arguments: Any) -> Any:
        messages = arguments.pop("messages", [{"role": "user", "content": "a"}])
        client.chat.completions.create(model=model, messages=messages, **arguments)

    for reason, arguments in {
        "chat template": {"model": "gpt"},
        "tools are not supported": {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "functions: input should be None": {"functions": []},
        "'reasoning'": {"extra_body": {"reasoning": 1}},
        "verbosity": {"verbosity": "high"},
        "modalities": {"modalities": ["audio"]},
        "top_logprobs needs": {"top_logprobs": 2},
        "give one": {"max_tokens": 1, "max_completion_tokens": 1},
        "'system', 'developer'": {"messages": [{"role": "function", "content": "a"}]},
        "does not write tool_calls": {"messages": [CALLING]},
        "messages[0]: it has no content": {"messages": [{"role": "assistant", "content": None}]},
        "tokens, but the model's context is": {
            "messages": [{"role": "user", "content": "abc " * 99}]
        },
        "it is empty": {"messages": [{"role": "user", "content": " "}]},
    }.items():
        with pytest.raises(openai.BadRequestError) as error:
            ask(**arguments)
        assert reason in error.value.body["message"]
        assert error.value.param, "the parameter at fault"


def test_the_limit_of_new_tokens_is_the_default_where_that_is_larger(served: Any) -> None:
    models = {name: served.models[name] for name in ("gpt", "chat")}
    with running(models, max_new_tokens=3) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        answer = client.completions.create(model="gpt", prompt="the cat", temperature=0)
        assert answer.choices[0].text == alone(served, "the cat", max_new_tokens=3)
        messages: Any = [{"role": "user", "content": "a"}]
        chat = client.chat.completions.create(model="chat", messages=messages, temperature=0)
        assert chat.choices[0].message.content == served.models["chat"].chat(
            messages, temperature=0.0, max_new_tokens=3
        )
        with pytest.raises(openai.BadRequestError, match="at most 3 here, not 4"):
            client.completions.create(model="gpt", prompt="the cat", max_tokens=4)


def test_errors_are_the_exceptions_of_the_client(tmp_path: Path) -> None:
    """With its status, code and header; an error within a stream is an exception too."""
    keys, model = tmp_path / "keys", model_of("gpt2")
    keys.write_text("a-key-of-a-user\n")
    decode = model.net.decode

    def slow(tokens: Any, cache: Any) -> Any:
        time.sleep(0.03)
        return decode(tokens, cache)

    model.net.decode = slow
    arguments: dict[str, Any] = {"model": "gpt", "prompt": "the cat", "temperature": 0}
    with running({"gpt": model}, keys, max_queue=2, request_timeout=0.6) as server:
        served = server.server.registry.models["gpt"]

        def client(**options: Any) -> Any:
            settings = {"api_key": "a-key-of-a-user", "max_retries": 0, **options}
            return openai.OpenAI(base_url=f"{server.url}/v1", **settings)

        def refused(kind: Any, code: str, opened: Any, **more: Any) -> Any:
            with pytest.raises(kind) as error:
                [*opened.completions.create(**{**arguments, **more})]
            assert error.value.body["code"] == error.value.code == code
            assert error.value.body["message"] in str(error.value)
            return error.value

        opened = client()
        refused(openai.AuthenticationError, "invalid_api_key", client(api_key="another-key"))
        origin = {"Origin": "https://example.org"}
        refused(openai.PermissionDeniedError, "not_allowed", client(default_headers=origin))
        refused(openai.NotFoundError, "model_not_found", opened, model="x")
        error = refused(openai.BadRequestError, "invalid_parameter", opened, top_p=2)
        assert error.param == "top_p"
        long = refused(openai.BadRequestError, "max_tokens_too_large", opened, max_tokens=999)
        assert long.body["values"] == {"tokens": 2, "new": 999, "limit": 48}
        prompt = "the cat " * 60
        long = refused(openai.BadRequestError, "context_length_exceeded", opened, prompt=prompt)
        assert long.body["values"] == {"tokens": 120, "limit": 48}
        late = {"max_tokens": 40}
        error = refused(openai.InternalServerError, "timeout", opened, **late)
        assert error.status_code == 504
        refused(openai.APIError, "timeout", opened, stream=True, **late)
        with pytest.raises(openai.APITimeoutError):
            client(timeout=0.05).completions.create(**arguments, **late)
        wait_for_free_slots(server)
        with served.slots(1), served.slots(1):
            error = refused(openai.RateLimitError, "rate_limit_exceeded", opened)
            assert error.response.headers["retry-after"] == "1"
            threading.Timer(0.1, lambda: setattr(served, "_num_places", 0)).start()
            answer = client(max_retries=1).completions.create(**arguments, max_tokens=2)
            served._num_places = 2
        assert answer.choices[0].finish_reason == "length"
        server.server.guard.is_draining = True
        error = refused(openai.InternalServerError, "draining", opened)
        assert error.status_code == 503
        server.server.guard.is_draining = False


def test_the_asynchronous_client(served: Any) -> None:
    async def ask() -> tuple[list[str], str]:
        arguments: dict[str, Any] = {"model": "gpt", **GREEDY}
        url = f"{served.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            answers = await asyncio.gather(
                *(client.completions.create(prompt=prompt, **arguments) for prompt in PROMPTS)
            )
            stream = await client.completions.create(prompt="the", stream=True, **arguments)
            streamed = "".join([chunk.choices[0].text async for chunk in stream])
        return [answer.choices[0].text for answer in answers], streamed

    texts, streamed = asyncio.run(ask())
    assert texts == [alone(served, prompt, max_new_tokens=8) for prompt in PROMPTS]
    assert streamed == alone(served, "the", max_new_tokens=8)
