"""States of the web page: requests that are stopped or break off, and what is shown meanwhile."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from running_server import running, tiny_models

NO_ANSWER = "The server does not answer. Is it still running?"


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with running(tiny_models()) as started:
        yield started


@pytest.fixture
def tab(browser: Any, server: Any) -> Iterator[Any]:
    problems: list[str] = []
    opened = browser.new_context(viewport={"width": 390, "height": 600}, locale="en-US").new_page()
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.goto(server.url)
    opened.wait_for_selector("[role=tab]")
    yield opened
    opened.close()
    assert problems == []


def events(*contents: Any, end: bool = True) -> str:
    lines = [f"data: {json.dumps(content)}\n\n" for content in contents]
    return "".join(lines) + "data: [DONE]\n\n" * end


def part(text: str, **more: Any) -> dict[str, Any]:
    """An event of a completion without log-probabilities, or of a chat."""
    return {"choices": [{"text": text, "delta": {"content": text}, "finish_reason": None, **more}]}


def answer(tab: Any, route: str, body: str) -> None:
    tab.route(f"**/{route}", lambda call: call.fulfill(body=body))


def held(tab: Any, route: str) -> list[Any]:
    """The requests of a route, which wait for their answers."""
    calls: list[Any] = []

    def add(call: Any) -> None:
        calls.append(call)

    tab.route(f"**/{route}", add)
    return calls


def wait_for(tab: Any, calls: list[Any], count: int) -> list[Any]:
    """The requests, once there are so many."""
    while len(calls) < count:
        tab.wait_for_timeout(10)
    return calls


def ask(tab: Any, text: str) -> None:
    tab.fill("#chat-text", text)
    tab.press("#chat-text", "Enter")


def test_words_without_links_do_not_shift_those_after_them(tab: Any) -> None:
    links = {"source": ["der", "Hund"], "target": ["the", "cat", "the", "dog"]}
    links |= {"links": [[0, 2], [1, 3]]}
    content = {"translatedText": "the cat the dog", "scores": [-1.0], "alignments": [links]}
    content |= {"reasons": [], "reasonCodes": []}
    answer(tab, "translate", json.dumps(content))
    tab.fill("#translate-text", "der Hund")
    tab.press("#translate-text", "Control+Enter")
    tab.wait_for_selector(".word")
    before = "document.querySelector('#translation .word').previousSibling.textContent"
    assert tab.evaluate(before) == "the cat "
    assert tab.locator("#translation .word").all_inner_texts() == ["the", "dog"]
    assert tab.evaluate("document.querySelector('#translation').textContent") == "the cat the dog"
    assert "score -1.000" in tab.inner_text("#translate-facts")
    tab.click("#language")
    assert "得分 -1.000" in tab.inner_text("#translate-facts")
    held(tab, "translate_file")
    tab.set_input_files("#file", {"name": "a.txt", "mimeType": "", "buffer": b"a cat"})
    tab.click("#file-translate")
    tab.focus("#translation .word")
    tab.keyboard.press("Escape")
    assert tab.locator("[role=tooltip]").count() == 0
    assert tab.is_visible("#file-stop"), "the key was for the box"
    tab.keyboard.press("Escape")
    tab.wait_for_selector("#file-stop", state="hidden")


def test_the_tokens_of_an_output_are_those_of_the_server(tab: Any) -> None:
    """Without log-probabilities an event may have several tokens."""
    usage = {"choices": [], "usage": {"completion_tokens": 7}}
    answer(tab, "v1/completions", events(part("a b"), part(" c"), usage))
    tab.click("#tab-generate")
    tab.fill("#generate-text", "x")
    tab.press("#generate-text", "Control+Enter")
    tab.wait_for_selector("#generate-facts:has-text('7 tokens')")
    assert tab.inner_text("#announced") == "a b c"


def test_the_tokens_of_an_output_are_one_stop_of_the_tab_key(tab: Any) -> None:
    logs = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}]}
    answer(tab, "v1/completions", events(*[part("a", logprobs=logs)] * 3))
    tab.click("#tab-generate")
    tab.fill("#generate-text", "x")
    tab.press("#generate-text", "Control+Enter")
    tab.wait_for_selector("#panel-generate .primary:not(:disabled)")
    tab.focus(".token")
    tab.keyboard.press("End")
    assert tab.evaluate("document.activeElement === document.querySelector('.token:last-child')")
    assert tab.locator(".token[tabindex='0']").count() == 1


def test_codes_of_languages_are_read_in_the_forms_of_models(tab: Any) -> None:
    tab.click("#language")
    found = tab.evaluate(
        """() => import("/page/texts.js").then(({ hasSpaces, languageName }) =>
          [["zh_CN", "zho_Hans", "ja_XX"].some(hasSpaces), hasSpaces("deu_Latn"),
            languageName("de_DE", "German"), languageName("en_XX", "English")])"""
    )
    assert found[:2] == [False, True]
    assert "德语" in found[2]
    assert found[3] == "英语"


def test_an_answer_that_breaks_off_is_no_whole_answer(tab: Any) -> None:
    answer(tab, "v1/completions", events(part("a"), end=False))
    tab.click("#tab-generate")
    tab.fill("#generate-text", "x")
    tab.press("#generate-text", "Control+Enter")
    tab.wait_for_selector(f"#status.bad:has-text('{NO_ANSWER}')")
    assert tab.inner_text("#generated") == "a"


def test_the_language_of_the_page_changes_while_a_request_runs(tab: Any) -> None:
    calls = held(tab, "classify")
    tab.click("#tab-classify")
    tab.fill("#classify-text", "x")
    tab.press("#classify-text", "Control+Enter")
    [call] = wait_for(tab, calls, 1)
    tab.click("#language")
    results = {"label": "a", "probability": 0.75, "probabilities": {"a": 0.75, "b": 0.25}}
    call.fulfill(body=json.dumps({"results": results}))
    tab.wait_for_selector("#classes .best")
    tab.unroute("**/classify")
    tab.route("**/classify", lambda call: call.abort())
    tab.press("#classify-text", "Control+Enter")
    tab.wait_for_selector("#status.bad")
    assert tab.inner_text("#classes") == "", "the result of another request"


def test_a_new_conversation_has_nothing_of_the_former_one(tab: Any) -> None:
    """Neither where its answer is still coming."""
    bodies: list[Any] = []
    tab.click("#tab-chat")
    tab.evaluate(
        """() => {
          const fetched = window.fetch;
          window.fetch = async (route, options) => {
            if (!route.endsWith("chat/completions")) return fetched(route, options);
            const data = new TextEncoder().encode(
              'data: {"choices": [{"delta": {"content": "old"}}]}\\n\\n');
            const body = new ReadableStream({ start(controller) {
              controller.enqueue(data); // and no more, until the request is stopped
              const { signal } = options;
              signal.addEventListener("abort", () => controller.error(signal.reason));
            } });
            window.fetch = fetched;
            return new Response(body);
          };
        }"""
    )
    ask(tab, "first")
    tab.wait_for_selector(".message.assistant:has-text('old')")
    tab.click("#chat-clear")
    tab.wait_for_selector("#panel-chat .primary:not(:disabled)")
    tab.route(
        "**/chat/completions",
        lambda call: (
            bodies.append(call.request.post_data_json),
            call.fulfill(body=events(part("new", finish_reason="length"))),
        ),
    )
    ask(tab, "second")
    tab.wait_for_selector("#messages em:has-text('Cut off by the limit')")
    assert [each["content"] for each in bodies[0]["messages"]] == ["second"]


def test_a_conversation_follows_its_last_message(tab: Any) -> None:
    answer(tab, "v1/chat/completions", events(part("b")))
    tab.click("#tab-chat")
    for _ in range(6):
        ask(tab, "a\na\na\na")
        tab.wait_for_selector("#panel-chat .primary:not(:disabled)")
    left = "({ scrollHeight, scrollTop, clientHeight }) => scrollHeight - scrollTop - clientHeight"
    assert tab.evaluate(f"({left})(document.querySelector('#messages'))") < 2


def test_a_page_without_a_clipboard_copies_by_the_selection(tab: Any) -> None:
    """Outside of https and this machine browsers have none."""
    tab.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    tab.evaluate("document.querySelector('#translation').textContent = 'a text'")
    tab.click("#panel-translate .copy")
    tab.wait_for_selector("#panel-translate .copy:has-text('Copied')")
    assert tab.evaluate("getSelection().toString()") == "a text"


def test_words_and_keys_of_other_pages_and_input_methods(tab: Any, server: Any) -> None:
    tab.click("#tab-chat")
    tab.fill("#chat-text", "ni")
    tab.evaluate(
        """() => document.querySelector("#chat-text").dispatchEvent(
          new KeyboardEvent("keydown", { key: "Enter", keyCode: 229, bubbles: true }))"""
    )
    assert tab.locator(".message").count() == 0, "the end of a composition"
    tab.evaluate("localStorage.setItem('theme', 'system')")
    tab.reload()
    tab.wait_for_selector("[role=tab]")
    tab.evaluate("sessionStorage.setItem('heedful-key', '密钥')")
    tab.reload()
    tab.wait_for_selector("#key-form:not([hidden])")
    assert tab.inner_text("#status") == "The server refused this key."


def test_a_file_that_has_changed_is_chosen_again(tab: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("the cat\n")
    tab.set_input_files("#file", path)
    path.write_text("a dog and a cat\n")
    tab.click("#file-translate")
    tab.wait_for_selector("#file-problem:has-text('has changed or is gone')")


def test_an_example_that_is_sent_twice_shows_the_second_answer(tab: Any, server: Any) -> None:
    tab.goto(f"{server.url}/docs")
    tab.wait_for_selector(".route")
    calls = held(tab, "detect")
    tab.click(".route > summary:has-text('/detect')")
    for text in ("first", "second"):
        tab.fill("[id='body-/detect']", json.dumps({"q": text}))
        tab.click(".route[open] button.primary")
    for call in reversed(wait_for(tab, calls, 2)):
        call.fulfill(body=call.request.post_data)
    tab.wait_for_selector(".route[open] pre >> nth=1 >> text=second")
    assert json.loads(tab.locator(".route[open] pre").last.inner_text()) == {"q": "second"}
