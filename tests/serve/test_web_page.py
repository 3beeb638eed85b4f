"""The web page: its files and their texts, and every use of it by keyboard in Chromium."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")

import httpx

from heedful.data.rows import is_blank
from heedful.documents import FORMATS, read_document, translate_document
from heedful.fidelity.reasons import TEXTS as REASONS
from heedful.insight import alignments
from heedful.serve import page
from heedful.serve.errors import Code
from running_server import running, tiny_models

PO_OF_A_LANGUAGE = 'msgid ""\nmsgstr "Language: en\\n"\n\nmsgid "the cat"\nmsgstr ""\n'
FOLDER = Path(page.__file__).parent
BESIDE = ("button.primary", "button.copy")  # on a phone, too


def contents(pattern: str) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob(pattern)}


def test_every_file_is_served_to_anyone_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-a-user\n")
    names = {path.name for path in FOLDER.iterdir() if path.is_file()} - {"__init__.py"}
    assert set(page.FILES.values()) == names
    with running({}, keys) as server, httpx.Client(base_url=server.url) as client:
        for path, name in page.FILES.items():
            answer = client.get(path)
            assert (answer.status_code, answer.content) == (200, (FOLDER / name).read_bytes())
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert "unsafe" not in answer.headers["content-security-policy"]
        for path in ("/page/", "/page/__init__.py", "/page/../page.py", "/page/%2e%2e/app.py"):
            assert client.get(path).status_code in (401, 404)
        client.headers["X-API-Key"] = "a-key-of-a-user"
        described = client.get("/openapi.json").json()["paths"]
        routes = [path for path, methods in described.items() if "get" in methods]
        for path in (*routes, *page.FILES, "/openapi.json", "/redoc", "/docs/oauth2-redirect"):
            addresses = set(re.findall(r"https?://[^\s\"'`]+", client.get(path).text))
            assert addresses <= {"http://www.w3.org/2000/svg"}, path  # a name, which is not loaded
    for html in contents("*.html").values():
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)


def test_both_languages_have_every_text_that_is_shown() -> None:
    scripts, html = contents("*.js"), "".join(contents("*.html").values())
    english, chinese = (
        re.findall(r"^    (\w+): ", part, re.MULTILINE)
        for part in scripts["texts.js"].split("let current")[0].split("  zh: {")
    )
    assert english == chinese
    shown = re.findall(r'data-(?:text|hint|empty|label|title)="(\w+)"', html)
    for name, script in scripts.items():
        shown += re.findall(r'\btext\("(\w+)"', script) if name != "texts.js" else []
    shown += re.findall(r'"(docs\w+)"', scripts["docs.js"])
    assert set(shown) <= set(english)
    indirect = {"themeAuto", "themeLight", "themeDark", "switchLanguage", "title", "failed"}
    indirect |= {name for name in english if name.startswith("tab")}
    codes = {f"error_{code}" for code in get_args(Code)}
    assert {name for name in english if name.startswith("error_")} == codes
    # Reasons for a review are found by their codes; in English they are what the server says.
    lines = re.findall(r'^    reason_(\w+): "(.*)",$', scripts["texts.js"], re.MULTILINE)
    assert dict(lines[: len(REASONS)]) == REASONS
    codes |= {f"reason_{code}" for code in REASONS}
    assert set(english) - indirect - codes <= set(shown), "a text that is never shown"
    uses = re.findall(r"^  (\w+): \(\{ kind", scripts["app.js"], re.MULTILINE)
    assert len(uses) == 5
    assert {f"tab{use.capitalize()}" for use in uses} <= set(english)


def test_every_use_by_keyboard_in_both_languages(browser: Any) -> None:
    models = tiny_models()
    translator = models["de-en"]
    translator.metadata = replace(translator.metadata, tgt_language="zh")  # it writes no spaces
    problems: list[str] = []
    with running(models) as server:
        tab = browser.new_context(viewport={"width": 390, "height": 844}, locale="en-US").new_page()
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("request", lambda request: problems.extend(elsewhere(request.url, server.url)))
        tab.goto(server.url)
        tab.wait_for_selector("[role=tab]")
        names = tab.locator("[role=tab]").all_inner_texts()
        assert names == ["Translate", "Generate", "Chat", "Classify", "Fill"]

        source = models["de-en"].src_tokenizer.decode([7, 8, 9])
        tab.focus("#translate-text")
        tab.keyboard.type(source)
        tab.keyboard.press("Control+Enter")
        tab.wait_for_selector("#translate-facts:not(:empty)")
        [best, *others] = models["de-en"].generate(source, return_details=True, num_return=3)
        assert tab.inner_text("#translation").split() == best.text.split()
        assert tab.locator("#other-list li").count() == len(others)
        check_alignment(tab, models["de-en"], source, best)
        assert tab.is_hidden("#swap"), "no translator goes back"
        assert tab.is_visible(".for-touch")
        assert tab.is_hidden(".for-keys"), "a phone has no Tab"
        places = [tab.locator(f"#panel-translate {name}").first.bounding_box() for name in BESIDE]
        assert places[0]["y"] == places[1]["y"]
        assert 0 < places[1]["x"] - places[0]["x"] - places[0]["width"] < 20
        use_files(tab, models["de-en"])

        tab.focus("[role=tab][aria-selected=true]")
        tab.keyboard.press("ArrowRight")
        assert tab.evaluate("document.activeElement.id") == "tab-generate"
        tab.fill("#generate-temperature", "0")
        tab.fill("#generate-tokens", "5")
        prompt = models["gpt"].tokenizer.decode([7, 8])
        tab.fill("#generate-text", prompt)
        tab.keyboard.press("Control+Enter")
        tab.wait_for_selector("#panel-generate .primary:not(:disabled)")
        expected = models["gpt"].generate(prompt, temperature=0.0, max_new_tokens=5, beam_size=1)
        assert tab.evaluate("document.querySelector('#generated').textContent") == expected
        assert tab.locator(".token").count() in range(1, 6)
        tab.focus(".token")
        values = tab.locator("[role=tooltip] .value").all_inner_texts()
        shares = [float(value.removesuffix("%")) for value in values]
        assert shares == sorted(shares, reverse=True)
        assert shares
        tab.keyboard.press("Escape")
        assert tab.locator("[role=tooltip]").count() == 0

        tab.focus("#tab-generate")
        tab.keyboard.press("ArrowRight")
        assert tab.locator("#chat-model option").all_inner_texts() == ["chat"]
        tab.fill("#chat-tokens", "4")
        tab.fill("#chat-temperature", "0")
        asked, expected = chat_with_answer(models["chat"])
        tab.fill("#chat-text", asked)
        tab.keyboard.press("Enter")
        tab.wait_for_selector("#panel-chat .primary:not(:disabled)")
        question, answer = tab.locator(".message").all_inner_texts()
        assert (question.split(), answer.split()) == (asked.split(), expected.split())
        assert tab.is_hidden("#status")
        tab.fill("#chat-text", "more")
        with tab.expect_request("**/v1/chat/completions") as second:
            tab.keyboard.press("Enter")
        sent = second.value.post_data_json["messages"]
        assert [each["role"] for each in sent] == ["user", "assistant", "user"]
        assert (sent[0]["content"], sent[2]["content"]) == (asked, "more")
        tab.wait_for_selector("#panel-chat .primary:not(:disabled)")

        tab.focus("#tab-chat")
        tab.keyboard.press("ArrowRight")
        tab.fill("#classify-text", models["sentiment"].tokenizer.decode([7, 8, 9]))
        tab.keyboard.press("Control+Enter")
        tab.wait_for_selector("#classes .best")
        assert tab.locator("#classes .name").count() == len(models["sentiment"].labels)

        tab.focus("#tab-classify")
        tab.keyboard.press("End")
        tab.focus("#fill-text")
        tab.focus("#insert-mask")
        tab.keyboard.press("Enter")
        assert tab.input_value("#fill-text") == "<mask>"
        tab.keyboard.press("Control+Enter")
        tab.wait_for_selector("#masks .best")
        assert tab.locator("#masks .name").count() == 5

        tab.fill("#fill-text", "a b")
        tab.keyboard.press("Control+Enter")
        tab.wait_for_selector("#status:not([hidden])")
        assert "has no mask: write <mask>" in tab.inner_text("#status")
        tab.focus("#language")
        tab.keyboard.press("Enter")
        assert tab.inner_text("#status") == "文本中没有掩码：请在要预测的词处写 <mask>。"
        assert " ".join(tab.locator("[role=tab]").all_inner_texts()) == "翻译 续写 对话 分类 填词"
        assert tab.evaluate("document.documentElement.lang") == "zh-Hans"
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390
        tab.type("#fill-text", "c")
        assert tab.is_hidden("#status"), "the error of a text that has changed"
        tab.focus("#tab-fill")
        tab.keyboard.press("ArrowLeft")
        assert tab.is_hidden("#status")
        tab.click("#tab-translate")
        tab.fill("#translate-text", "the cat 52")
        tab.keyboard.press("Control+Enter")
        tab.wait_for_selector("#translate-reasons:not([hidden])")
        reasons = (
            "需要审校：模型词表中没有、未读取的部分：5, 2；缺少：52；译文达到长度上限，已被截断"
        )
        assert tab.inner_text("#translate-reasons") == reasons
        assert tab.locator("#review-list div").count() == 0, "of a file that is gone"
        tab.click("#language")
        reasons = "not read, as the model's vocabulary lacks it: 5, 2; missing: 52"
        reasons = f"To review: {reasons}; cut off by the length limit"
        assert tab.inner_text("#translate-reasons") == reasons
        tab.click("#language")
        tab.focus("#theme")
        tab.keyboard.press("Enter")
        tab.keyboard.press("Enter")
        assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
        use_docs(tab, server, models)
        tab.close()
    # Chromium reports the answer that the page shows as an error.
    assert [each for each in problems if "status of 400" not in each] == []
    assert len(problems) == 2


def test_a_server_with_keys_asks_for_one(browser: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-a-user\n")
    models = {"sentiment": tiny_models()["sentiment"]}
    with running(models, keys) as server:
        tab = browser.new_context(locale="zh-CN", color_scheme="dark").new_page()
        tab.goto(f"{server.url}/docs")
        tab.wait_for_selector("#status:not([hidden])")
        assert tab.inner_text("#status") == "此服务器需要 API 密钥：请在模型页面中输入。"
        tab.goto(server.url)
        tab.wait_for_selector("#key-form:not([hidden])")
        assert not tab.is_visible("#status"), "nobody has given a wrong key so far"
        tab.fill("#key", "another-key")
        tab.keyboard.press("Enter")
        tab.wait_for_selector("#status.bad")
        assert tab.inner_text("#status") == "服务器拒绝了此密钥。"
        tab.fill("#key", "a-key-of-a-user")
        tab.keyboard.press("Enter")
        tab.wait_for_selector("[role=tab]")
        assert tab.locator("[role=tab]").all_inner_texts() == ["分类"]
        assert not tab.is_visible("#key-form")
        assert not tab.is_visible("#status")
        assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
        tab.goto(f"{server.url}/docs")
        tab.wait_for_selector(".route")
        tab.close()


def test_a_file_that_names_languages_for_a_model_that_names_none(browser: Any) -> None:
    model = tiny_models()["de-en"]
    model.metadata = replace(model.metadata, src_language=None, tgt_language=None)
    with running({"any": model}) as server:
        tab = browser.new_page()
        tab.goto(server.url)
        tab.wait_for_selector("#file-form:not([hidden])")
        file = {"name": "a.po", "mimeType": "", "buffer": PO_OF_A_LANGUAGE.encode()}
        tab.set_input_files("#file", file)
        tab.click("#file-translate")
        tab.wait_for_selector("#file-link:not([hidden])")
        tab.close()


def check_alignment(tab: Any, model: Any, source: str, best: Any) -> None:
    """Each token of the translation shows the token of the source that it is aligned with."""
    expected = alignments(model, source, best.ids, unit="tokens")
    links = [
        (expected.source[own].strip("▁"), expected.target[index].strip("▁"))
        for own, index in sorted(expected.links, key=lambda link: link[1])
    ]
    assert len({own for own, _ in links}) > 1
    tab.focus("#translation .word")
    for own, name in links:
        assert tab.evaluate("document.activeElement.textContent") == name
        assert tab.locator("[role=tooltip] mark").all_inner_texts() == [own]
        tab.keyboard.press("ArrowRight")
    assert tab.is_visible("#word-help")
    tab.keyboard.press("Home")
    assert tab.locator("[role=tooltip] mark").all_inner_texts() == [links[0][0]]
    assert f"score {best.score:.3f}" in tab.inner_text("#translate-facts")
    tab.keyboard.press("Tab")
    assert tab.locator("[role=tooltip]").count() == 0


def use_files(tab: Any, model: Any) -> None:
    """A file by keyboard and by drop: its progress, result, reviews and errors."""
    text = "the cat 52\n\na dog\n"
    document = read_document(text.encode(), "a b.txt", ("de", "zh"))
    counts = translate_document(model, document)
    assert (counts.segments, counts.to_review) == (2, 2)
    shown = [f"{own.text}\n{'; '.join(own.reasons)}" for own in document.segments]
    assert "missing: 52" in shown[0]
    assert tab.get_attribute("#file", "accept").split(",") == [*FORMATS]
    tab.focus("#file-translate")
    for name, problem in (("a.exe", "Files of this kind"), ("a.xlf", "a.xlf, line 1, column 4")):
        tab.set_input_files("#file", {"name": name, "mimeType": "", "buffer": b"<a>"})
        tab.keyboard.press("Enter")
        tab.wait_for_selector(f"#file-problem:has-text('{problem}')")
    file = {"name": "a b.txt", "mimeType": "text/plain", "buffer": text.encode()}
    tab.set_input_files("#file", file)
    assert tab.is_hidden("#file-problem"), "the error of another file"
    assert tab.inner_text("#file-name") == "a b.txt"
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#file-link:not([hidden])")
    assert tab.inner_text("#file-facts") == "2 of 2 segments need a review"
    assert tab.evaluate("document.activeElement.id") == "file-link"
    with tab.expect_download() as downloaded:
        tab.keyboard.press("Enter")
    assert downloaded.value.suggested_filename == "a_b.txt"
    assert Path(downloaded.value.path()).read_bytes() == document.to_bytes()
    tab.focus("#reviews summary")
    tab.keyboard.press("Enter")
    assert tab.locator("#review-list li").all_inner_texts() == shown
    tab.evaluate(
        """() => {
          const data = new DataTransfer();
          data.items.add(new File([new Uint8Array(2 ** 20)], "b.md"));
          const drop = new DragEvent("drop", { dataTransfer: data, bubbles: true });
          document.querySelector("#file-drop").dispatchEvent(drop);
        }"""
    )
    assert tab.inner_text("#file-name") == "b.md"
    assert tab.is_hidden("#file-link")
    assert tab.inner_text("#file-facts") == ""
    tab.focus("#file-translate")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#file-problem:has-text('may have 1048576 bytes')")


def use_docs(tab: Any, server: Any, models: Any) -> None:
    """The page of routes: every field and example, and a request that is sent by keyboard."""
    tab.focus("footer a")
    tab.keyboard.press("Enter")
    tab.wait_for_selector(".route")
    description = httpx.get(f"{server.url}/openapi.json").json()
    operations = [entry for path in description["paths"].values() for entry in path.values()]
    assert tab.locator(".route").count() == len(operations)
    for route in tab.locator(".route > summary").all():
        route.focus()
        tab.keyboard.press("Enter")
    names = {*tab.locator("td:first-child code").all_inner_texts()}
    bodies = [s for s in description["components"]["schemas"].values() if "properties" in s]
    assert names == {name for schema in bodies for name in schema["properties"]}
    assert "undefined" not in tab.inner_text("main")
    curl = tab.locator("pre").all_inner_texts()
    assert any(f"{server.url}/v1/completions" in line and '"model": "gpt"' in line for line in curl)
    tab.focus("[id='body-/translate']")
    tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("pre:not([hidden]):has-text('translatedText')")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    tab.fill("[id='body-/translate']", "{")
    tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("pre:has-text('请求不是有效的 JSON')")


def chat_with_answer(model: Any) -> tuple[str, str]:
    """A question and an answer of some letters, at most 4 tokens long."""
    for token in range(7, model.tokenizer.vocab_size):
        asked = model.tokenizer.decode([token, token])
        if asked.strip() != asked or is_blank(asked):  # a blank message is refused
            continue
        messages = [{"role": "user", "content": asked}]
        answer = model.chat(messages, temperature=0.0, max_new_tokens=4)
        if answer.strip():
            return asked, answer
    raise AssertionError("the model answers nothing")


def elsewhere(url: str, server: str) -> list[str]:
    return [] if url.startswith(f"{server}/") else [url]
